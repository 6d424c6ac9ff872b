"""Models: flax modules behind one record of pure functions with ordered, named parameter groups.

>>> import jax, jax.numpy as jnp
>>> model = build("lenet5", (28, 28, 1), 10)
>>> net = model.init(jax.random.key(0))
>>> features, _ = model.features(net, jnp.zeros((2, 28, 28, 1)))
>>> model.head(net, features).shape, model.groups
((2, 10), ('conv1', 'conv2', 'fc1', 'fc2', 'fc'))
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedjax_sim.models.record import Model, from_module, parameter_counts

MODELS: dict[str, str] = {
    "mlp": "fully connected, hidden=(64,) by default (784-64-10 on 28x28)",
    "lenet5": "conv6-conv16-120-84, 5x5 kernels without padding (44,426 parameters on 1x28x28)",
    "lenet5_pad2": "the same with padding 2 on the first layer (61,706 parameters on 1x28x28)",
    "cnn4": "conv32-conv64-512, 5x5 kernels (924,708 parameters on 3x32x32 with 100 classes)",
    "cnn6": "conv32-conv32-conv64-conv64-128, 3x3 kernels (591,274 parameters on 3x32x32)",
    "resnet18": "ResNet-18 with BatchNorm, stem='imagenet' (7x7, the default) or 'cifar' (3x3)",
}

# (channels, k, pad, pool) per convolution block, and the hidden widths
_PLAIN: dict[str, tuple[tuple[tuple[int, int, int, bool], ...], tuple[int, ...]]] = {
    "mlp": ((), (64,)),
    "lenet5": (((6, 5, 0, True), (16, 5, 0, True)), (120, 84)),
    "lenet5_pad2": (((6, 5, 2, True), (16, 5, 0, True)), (120, 84)),
    "cnn4": (((32, 5, 0, True), (64, 5, 0, True)), (512,)),
    "cnn6": (((32, 3, 1, False), (32, 3, 1, True), (64, 3, 1, False), (64, 3, 1, True)), (128,)),
}


def build(
    name: str, shape: tuple[int, int, int], classes: int, *, dtype: Any = jnp.float32, conv: str = "auto", **options: Any
) -> Model:
    """The model `name` for images `shape = (H, W, C)`; parameters and arithmetic in `dtype`.

    `conv` selects how convolutions are computed (see `layers.py`; equal values).
    Options: `hidden=(64,)` for mlp, `stem="imagenet" | "cifar"` for resnet18.

    >>> build("mlp", (28, 28, 1), 10, hidden=(200, 100)).groups
    ('fc1', 'fc2', 'fc')
    """
    from fedjax_sim.errors import UserError, lookup, unknown
    from fedjax_sim.models.layers import FORMS
    from fedjax_sim.models.nets import PlainNet, plain_groups

    lookup("model", name, MODELS)
    if conv not in FORMS:
        raise unknown("convolution form", conv, FORMS)
    allowed = {"mlp": {"hidden"}, "resnet18": {"stem"}}.get(name, set())
    for option in options:
        if option not in allowed:
            raise UserError(f"model '{name}' has no option '{option}'; allowed: {', '.join(sorted(allowed)) or 'none'}")
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"the input shape of a model is (height, width, channels), all at least 1, not {tuple(shape)}")
    if classes < 1:
        raise UserError(f"a model needs at least 1 class, not {classes}")
    height, width, channels = (int(n) for n in shape)
    shape = (height, width, channels)
    if name == "resnet18":
        from fedjax_sim.models.resnet import build_resnet18

        return build_resnet18(shape, classes, dtype=dtype, conv=conv, **options)

    convs, hidden = _PLAIN[name]
    if name == "mlp":
        hidden = tuple(int(n) for n in options.get("hidden", hidden))
        if not hidden or min(hidden) < 1:
            raise UserError(f"hidden widths of the mlp are positive integers, at least one, not {hidden}")
    for _, k, pad, pool in convs:
        height, width = ((n + 2 * pad - k + 1) // (2 if pool else 1) for n in (height, width))
        if min(height, width) < 1:
            raise UserError(f"images of {shape[0]}x{shape[1]} are too small for model '{name}'")
    names, dense = plain_groups(convs, hidden)
    module = PlainNet(convs, hidden, classes, conv, dtype)
    return from_module(
        name,
        module,
        shape=shape,
        groups=names + dense,
        dense=dense,
        width=hidden[-1],
        classes=classes,
        dtype=dtype,
        stages=tuple((n, c[0]) for n, c in zip(names, convs, strict=True)),
    )


__all__ = ["MODELS", "Model", "build", "from_module", "parameter_counts"]
