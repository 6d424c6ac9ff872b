"""`build`: from a name, the images' shape and the number of classes to a Model."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.errors import UserError, first_line, unknown
from fedjax_sim.models.flax_module import as_model
from fedjax_sim.models.layers import FORMS
from fedjax_sim.models.nets import PlainNet, plain_groups
from fedjax_sim.models.record import Model, from_module
from fedjax_sim.models.registry import REGISTRY, check_inputs, check_options, too_small
from fedjax_sim.models.sequence import build_tokens_model
from fedjax_sim.options import like, shown

LARGEST = 2**30  # weights of one layer: more is refused before it is allocated


def narrow_or_none(dtype: Any, activations: Any) -> Any:
    """The type of the activations where it is not that of the weights: bfloat16, or None.

    >>> narrow_or_none("float32", "bfloat16").name, narrow_or_none("float32", "float32")
    ('bfloat16', None)
    """
    if activations is None or activations == "auto":
        return None
    try:
        asked, weights = jnp.dtype(activations), jnp.dtype(dtype)
    except TypeError:
        asked = None
    if asked == weights:
        return None
    if asked != jnp.bfloat16 or weights != jnp.float32:
        raise UserError(
            f"activations {shown(str(activations))} do not go with {jnp.dtype(dtype).name} weights;"
            " allowed:"
            f" {'float32, bfloat16' if jnp.dtype(dtype) == jnp.float32 else jnp.dtype(dtype).name}"
        )
    return asked


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    /,
    *,
    dtype: Any = jnp.float32,
    conv: str = "auto",
    activations: Any = None,
    vocabulary: int | None = None,
    places: bool = True,
    **options: Any,
) -> Model:
    """The model `name` for images `shape = (H, W, C)`; parameters and arithmetic in `dtype`.

    activations: "bfloat16" for what travels between layers and the operands of products; weights,
    their gradients, logits and statistics stay float32 (`narrow.py`). For tokens the shape is (T,);
    vocabulary: how many there are (default: classes), places: logits for every place. `conv`
    selects how convolutions are computed (see `layers.py`; equal values). `registry.py` lists the
    options.

    >>> build("mlp", (28, 28, 1), 10, hidden=(200, 100)).groups
    ('fc1', 'fc2', 'fc')
    """
    options = check_options(name, options)
    activations = narrow_or_none(dtype, activations)
    if jnp.dtype(dtype) == jnp.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise UserError(
            f"model '{name}' in float64 needs JAX's 64-bit mode; call"
            " jax.config.update('jax_enable_x64', True) before"
        )
    if conv not in FORMS:
        raise unknown("convolution form", conv, FORMS)
    check_inputs(name, shape)
    if REGISTRY[name].tokens:
        size = vocabulary or classes
        return _tokens(name, shape, classes, options, dtype, activations, size, places)
    if REGISTRY[name].build is None and (len(shape) != 3 or min(shape) < 1):
        raise UserError(
            "the input shape of a model is (height, width, channels), all at least 1, not"
            f" {tuple(shape)}"
        )
    if classes < 1:
        raise UserError(f"a model needs at least 1 class, not {classes}")
    sides = tuple(int(n) for n in shape)
    height, width, channels = sides if len(sides) == 3 else (1, 1, 1)
    image = (height, width, channels)
    how: dict[str, Any] = dict(dtype=dtype, conv=conv, activations=activations)
    if name == "resnet18":
        from fedjax_sim.models.resnet import build_resnet18

        return build_resnet18(image, classes, **how, **options)
    if REGISTRY[name].build is not None:
        return _registered(name, sides, classes, options, places=places, **how)
    return _plain(name, image, sides, classes, options, **how)


def _tokens(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    options: dict[str, Any],
    dtype: Any,
    activations: Any,
    vocabulary: int,
    places: bool,
) -> Model:
    """A network of tokens (T,)."""
    if activations is not None:
        raise UserError(
            f"model '{name}' has no {activations.name} activations; leave --activations out"
        )
    values = {k: like(f"model.{k}", v, REGISTRY[name].options[k]) for k, v in options.items()}
    sides = (int(shape[0]),)
    how: dict[str, Any] = dict(dtype=dtype, vocabulary=vocabulary, places=places)
    return build_tokens_model(name, sides, classes, values, **how)


def _registered(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    options: dict[str, Any],
    *,
    places: Any,
    dtype: Any,
    conv: str,
    activations: Any,
) -> Model:
    """By the builder of a registered model."""
    entry = REGISTRY[name]
    make: Any = entry.build
    values = {k: like(f"model.{k}", v, entry.options[k]) for k, v in options.items()}
    if activations is not None:
        if "activations" not in inspect.signature(make).parameters:
            raise UserError(
                f"model '{name}' cannot have {activations.name} activations: its builder takes no"
                " argument 'activations'"
            )
        values["activations"] = activations
    try:
        built = make(shape, classes, dtype=dtype, conv=conv, **values)
    except (TypeError, ValueError) as problem:  # in the user's code
        why = f"{type(problem).__name__}: {first_line(problem)}"
        raise UserError(f"the builder of model '{name}' failed: {why}") from problem
    return as_model(
        built,
        shape,
        classes,
        dtype,
        places=places,
        what=f"the builder of model '{name}' returned {type(built).__name__},",
    )._replace(name=name)


def _plain(
    name: str,
    image: tuple[int, int, int],
    shape: tuple[int, ...],
    classes: int,
    options: dict[str, Any],
    *,
    dtype: Any,
    conv: str,
    activations: Any,
) -> Model:
    """Convolutions, then dense layers, as the registry lists them."""
    entry, (height, width, channels) = REGISTRY[name], image
    hidden = options.get("hidden", ())
    convs = tuple(
        (co, *form) for co, form in zip(options.get("channels", ()), entry.convs, strict=True)
    )
    for co, k, pad, pool in convs:
        if k * k * channels * co > LARGEST:
            raise UserError(
                f"a layer of model '{name}' would be {k} x {k} x {channels} x {co}; at most"
                f" {LARGEST} weights are allowed"
            )
        height, width = ((n + 2 * pad - k + 1) // (2 if pool else 1) for n in (height, width))
        channels = co
        if min(height, width) < 1:
            raise too_small(name, image)
    widths = (height * width * channels, *hidden, classes)
    for a, b in itertools.pairwise(widths):
        if a * b > LARGEST:
            raise UserError(
                f"a layer of model '{name}' would be {a} x {b}; at most {LARGEST} weights are"
                " allowed"
            )
    names, dense = plain_groups(convs, hidden)
    return from_module(
        name,
        PlainNet(convs, hidden, classes, conv, dtype, activations),
        shape=shape,
        groups=names + dense,
        dense=dense,
        width=widths[-2],
        classes=classes,
        dtype=dtype,
        stages=tuple((n, c[0]) for n, c in zip(names, convs, strict=True)),
        activations=activations,
    )
