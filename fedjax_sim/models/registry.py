"""Which models there are and what can be set, in one table. No JAX here: the command line's help
reads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.named import first_sentence


class Entry(NamedTuple):
    """One model: a line of help, the options it takes with their defaults, and its shape if it is a
    plain network."""

    help: str
    options: Mapping[str, Any] = {}
    convs: tuple[tuple[int, int, bool], ...] = ()  # (k, pad, pool) per convolution block
    tokens: bool = False  # its inputs are tokens
    # of the user: (shape, classes, *, dtype, conv, **options) -> Model
    build: Callable[..., Any] | None = None


REGISTRY: dict[str, Entry] = {
    "mlp": Entry("fully connected (784-64-10 on 28x28)", {"hidden": (64,)}),
    "lenet5": Entry(
        "conv6-conv16-120-84, 5x5 kernels without padding (44,426 parameters on 1x28x28)",
        {"channels": (6, 16), "hidden": (120, 84)},
        convs=((5, 0, True), (5, 0, True)),
    ),
    "lenet5_pad2": Entry(
        "the same with padding 2 on the first layer (61,706 parameters on 1x28x28)",
        {"channels": (6, 16), "hidden": (120, 84)},
        convs=((5, 2, True), (5, 0, True)),
    ),
    "cnn4": Entry(
        "conv32-conv64-512, 5x5 kernels (924,708 parameters on 3x32x32 with 100 classes)",
        {"channels": (32, 64), "hidden": (512,)},
        convs=((5, 0, True), (5, 0, True)),
    ),
    "cnn6": Entry(
        "conv32-conv32-conv64-conv64-128, 3x3 kernels (591,274 parameters on 3x32x32)",
        {"channels": (32, 32, 64, 64), "hidden": (128,)},
        convs=((3, 1, False), (3, 1, True), (3, 1, False), (3, 1, True)),
    ),
    "linear": Entry(
        "one linear layer on the flattened example: linear, logistic and softmax regression"
    ),
    "lstm": Entry(
        "tokens: embedding, LSTM layers, linear head",
        {"embed": 16, "width": 128, "layers": 1},
        tokens=True,
    ),
    "transformer": Entry(
        "tokens: a small causal transformer", {"width": 64, "heads": 4, "layers": 2}, tokens=True
    ),
    "resnet18": Entry(
        "ResNet-18 with BatchNorm, stem imagenet (7x7) or cifar (3x3)", {"stem": "imagenet"}
    ),
}


def _line(entry: Entry) -> str:
    """One line, with the options as `--set model.OPTION=VALUE` writes them."""
    text = lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else value
    options = ", ".join(f"{name}={text(value)}" for name, value in entry.options.items())
    return f"{entry.help} [{options}]" if options else entry.help


MODELS: dict[str, str] = {name: _line(entry) for name, entry in REGISTRY.items()}


def check_inputs(name: str, shape: tuple[int, ...]) -> None:
    """Refuse images for a model of tokens, and tokens for a model of images.

    >>> check_inputs("mlp", (32,))
    Traceback (most recent call last):
    fedjax_sim.errors.UserError: model 'mlp' is for images or tables, and the data are tokens, 32
    each; use lstm, transformer
    """
    entry = REGISTRY[name]
    fit = [other for other, e in REGISTRY.items() if e.tokens]
    if len(shape) == 1 and not (entry.tokens or entry.build):
        raise UserError(
            f"model '{name}' is for images or tables, and the data are tokens, {shape[0]} each; use"
            f" {', '.join(fit)}"
        )
    if len(shape) != 1 and entry.tokens:
        raise UserError(
            f"model '{name}' is for tokens, and the data are images or a table {tuple(shape)}; use"
            " mlp, lenet5, …"
        )


def too_small(name: str, shape: tuple[int, int, int]) -> UserError:
    """
    >>> str(too_small("lenet5", (1, 1, 3)))
    "model 'lenet5' is for images, and the data are a table of 3 features; use model mlp"
    """
    if shape[:2] == (1, 1):
        return UserError(
            f"model '{name}' is for images, and the data are a table of {shape[2]} features; use"
            " model mlp"
        )
    return UserError(f"images of {shape[0]}x{shape[1]} are too small for model '{name}'")


GIVEN = ("dtype", "conv", "activations")  # arguments of a builder that are options of the run


def register_model(name: str, build: Callable[..., Any], help: str = "") -> None:
    """Register a model of your own by name: build(shape, classes, *, dtype, conv, **options) ->
    Model.

    What it takes beside these, with a default, is an option (`--set model.OPTION=VALUE`); see
    `models.from_module`. With an argument `activations=None` it can be asked for `--activations
    bfloat16`.
    """
    taken = inspect.signature(build).parameters.values()
    options = {p.name: p.default for p in taken if p.default is not p.empty and p.name not in GIVEN}
    REGISTRY[name] = Entry(help or first_sentence(build), options, build=build)
    MODELS[name] = _line(REGISTRY[name])


# of hidden layers: a mistyped number is refused before anything is allocated
WIDEST, DEEPEST = 2**20, 100


def check_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of model `name` with its defaults, or a sentence. Everything `build` names itself
    is refused too.

    >>> check_options("mlp", {"hidden": [200, 100]})
    {'hidden': (200, 100)}
    >>> check_options("mlp", {"dtype": "float64"})
    Traceback (most recent call last):
    fedjax_sim.errors.UserError: model 'mlp' has no option 'dtype'; allowed: hidden
    """
    entry = lookup("model", name, REGISTRY)
    allowed = entry.options
    for option in options:
        if option not in allowed:
            raise UserError(
                f"model '{name}' has no option '{option}'; allowed:"
                f" {', '.join(sorted(allowed)) or 'none'}"
            )
    chosen = {**allowed, **options}
    if entry.build is not None:
        return chosen  # the user's builder checks its own options
    if "hidden" in chosen:
        chosen["hidden"] = widths(f"the hidden widths of {name}", chosen["hidden"])
    if "channels" in chosen:
        chosen["channels"] = widths(f"the channels of {name}", chosen["channels"], len(entry.convs))
    return chosen


def widths(what: str, value: Any, count: int = 0) -> tuple[int, ...]:
    """Widths as a tuple of integers, `count` of them unless 0; a text may join them by x.

    >>> widths("the hidden widths", "200x100"), widths("the hidden widths", 64)
    ((200, 100), (64,))
    """
    try:
        parts = (
            value.split("x")
            if isinstance(value, str)
            else value
            if isinstance(value, (tuple, list))
            else [value]
        )
        if not all(
            (isinstance(n, str) and n.isascii() and n.isdigit() and len(n) < 20) or n == int(n)
            for n in parts
        ):
            raise ValueError  # 2.5, nan, words
        if any(isinstance(n, bool) for n in parts):
            raise ValueError
        found = tuple(int(n) for n in parts)
        if not (1 <= len(found) <= DEEPEST and min(found) >= 1 and max(found) <= WIDEST):
            raise ValueError
        if count and len(found) != count:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        shown = repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "..."
        raise UserError(
            f"{what} are {count or f'1 to {DEEPEST}'} integers from 1 to {WIDEST}, joined by x, not"
            f" {shown}"
        ) from None
    return found
