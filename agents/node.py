"""Records that are pytrees: agents here, methods and their transforms in the simulator.

A subclass of `Node` is a frozen dataclass and a pytree. Fields annotated `Real` are its leaves, so
an instance is an argument of a compiled function, and another value is not another program; so are
fields that hold a `Node`. All else is static and selects code. A word or None in a `Real` field is
static too, and so is 0 where the field says `off=True`: there 0 leaves a whole term out (momentum
and its buffer).
"""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax

T = TypeVar("T", bound="Node")
# of a field: the compiled program takes it as an argument, and it is an array there
if TYPE_CHECKING:
    Real = Annotated[float, "Real"]
else:
    Real = Annotated[Any, "Real"]


class Limits(NamedTuple):
    """What a field may be, and what it means."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # beside numbers
    off: bool = False  # 0 leaves a term out, so it is a constant of the program
    help: str = ""

    def allow(self, value: Any) -> bool:
        """Whether a plain number lies inside; NaN does not."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and value == value
        )


def field(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    off: bool = False,
    help: str = "",
    kw_only: bool = False,
    repr: bool = True,
) -> Any:
    """A field of a `Node` with its limits: ge, gt, le of a number, choices of a word; see
    `Limits`."""
    limits = Limits(ge, gt, le, choices, words, off, help)
    return dataclasses.field(
        default=default, metadata={"limits": limits}, kw_only=kw_only, repr=repr
    )


def limits_of(one: dataclasses.Field) -> Limits:
    return one.metadata.get("limits", Limits())


def is_real(one: dataclasses.Field) -> bool:
    return re.search(r"\bReal\b", str(one.type)) is not None


def is_leaf(one: dataclasses.Field, value: Any) -> bool:
    """Whether a field of this value is an argument of the compiled program."""
    if isinstance(value, Node):
        return True
    if not is_real(one) or isinstance(value, (str, bool)) or value is None:
        return False
    return not (limits_of(one).off and isinstance(value, (int, float)) and value == 0)


@dataclass_transform(frozen_default=True)
class Node:
    """A frozen dataclass that is a pytree; its values are checked when it is made.

    >>> class Rule(Node):
    ...     lr: Real = field(0.1, ge=0, help="learning rate")
    ...     kind: str = field("plain", choices=("plain", "signed"))
    >>> Rule(lr=1), jax.tree.leaves(Rule(0.5)), dataclasses.replace(Rule(), kind="signed")
    (Rule(lr=1.0, kind='plain'), [0.5], Rule(lr=0.1, kind='signed'))
    >>> Rule(lr=-1)
    Traceback (most recent call last):
    ValueError: lr must be 0 or more, got -1.0
    """

    name: ClassVar[str] = "node"

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        if (
            cls.__module__ not in sys.modules
        ):  # made by text that is executed; dataclasses ask for the module
            cls.__module__ = __name__
        dataclasses.dataclass(frozen=True)(cls)
        keyed = lambda node: node._flatten(
            lambda name, value: (jax.tree_util.GetAttrKey(name), value)
        )
        jax.tree_util.register_pytree_with_keys(
            cls, keyed, cls._unflatten, lambda node: node._flatten()
        )

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            given = getattr(self, one.name)
            value = self._read(one, given)
            if value is not given:
                object.__setattr__(self, one.name, value)
        self.check()

    def check(self) -> None:
        """What is wrong with several fields together."""

    def _read(self, one: dataclasses.Field, value: Any) -> Any:
        """A field's value as it is kept; a value that is traced cannot be looked at."""
        limits = limits_of(one)
        if isinstance(value, list):
            value = tuple(value)
        if is_real(one) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if isinstance(value, (int, float)) and not limits.allow(value):
            raise self._outside(one.name, value, limits)
        if limits.choices and value not in limits.choices:
            raise ValueError(f"unknown {one.name} {value!r} (allowed: {', '.join(limits.choices)})")
        return value

    def _outside(self, name: str, value: Any, limits: Limits) -> ValueError:
        low = limits.ge if limits.gt is None else limits.gt
        if low is not None and limits.le is not None:
            return ValueError(f"{name} must lie between {low} and {limits.le}, got {value!r}")
        return ValueError(f"{name} must be {allowed_range(limits)}, got {value!r}")

    def _flatten(self, keyed: Any = lambda name, value: value) -> tuple[tuple, tuple]:
        names, leaves, facts = [], [], []
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if is_leaf(one, value):
                names.append(one.name)
                leaves.append(keyed(one.name, value))
            else:
                facts.append((one.name, value))
        return tuple(leaves), (tuple(names), tuple(facts))

    @classmethod
    def _unflatten(cls: type[T], static: Any, leaves: Any) -> T:
        node = object.__new__(cls)
        for name, value in (*zip(static[0], leaves, strict=True), *static[1]):
            object.__setattr__(node, name, value)
        return node

    def has(self, name: str) -> bool:
        """Whether a field declared `off=True` is there: its 0 leaves the whole term out of the
        program.

        >>> class Rule(Node):
        ...     momentum: Real = field(0.0, off=True)
        >>> Rule().has("momentum"), Rule(0.9).has("momentum")
        (False, True)
        """
        return any(
            one.name == name and is_leaf(one, getattr(self, name))
            for one in dataclasses.fields(self)  # type: ignore[arg-type]
        )

    @property
    def numbers(self) -> dict[str, Any]:
        """Its leaves by name; those of a field that is a `Node` behind a dot.

        >>> class Inner(Node):
        ...     lr: Real = 0.1
        >>> class Outer(Node):
        ...     agent: Inner = Inner()
        ...     mu: Real = field(0.0, off=True)
        >>> Outer().numbers, Outer(mu=1).numbers
        ({'agent.lr': 0.1}, {'agent.lr': 0.1, 'mu': 1.0})
        """
        found = jax.tree_util.tree_flatten_with_path(self)[0]
        return {".".join(str(key.name) for key in path): leaf for path, leaf in found}


def allowed_range(limits: Limits) -> str:
    """
    >>> allowed_range(Limits(ge=0)), allowed_range(Limits(gt=0, le=100)), allowed_range(
    ...     Limits(ge=0, le=1e6)
    ... )
    ('0 or more', 'a number above 0 to 100', '0 to 1e+06')
    """
    if limits.le is not None:
        return (
            f"a number above {limits.gt:g} to {limits.le:g}"
            if limits.gt is not None
            else f"{limits.ge:g} to {limits.le:g}"
        )
    return f"a number above {limits.gt:g}" if limits.gt is not None else f"{limits.ge:g} or more"
