"""Who weighs what in ONE client's mixture: [m+1] weights over the previous participants and, last,
the client itself.

What follows from sizes, labels and the agent's word is known when plans are made; what follows from
models (`BY_MODEL`) only where the client's is, see `by_model`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim.errors import UserError, unknown
from fedjax_sim.options import convert, real, shown
from fedjax_sim.types import Array

RULES = {
    "weighted": "by data sizes, n_j / Σ n over the previous participants and itself",
    "agent": "the weights that the agent chooses",
    "even": "equal weights, itself included",
    "mean": "the mean of the previous participants, without itself",
    "local": "its own only: the part never leaves the client",
    "similarity": "exp(p cos) of the heads, each minus their mean; similarity:p, p = 5",
    "same_classes": "the overlap of label distributions, to the power p; same_classes:p, p = 4",
    "bandit": "exp(κ cos) and a share of its own head, by a bandit over both",
    "pairs": "attention by one learned network per pair of heads, which starts as similarity",
    "gradient": "mirror descent on the loss of its validation rows; gradient:p, p = 10 steps",
}
LEARNED = ("bandit", "pairs")
BY_MODEL = ("similarity", "gradient", *LEARNED)
HEADS_ALONE = ("gradient", *LEARNED)
# the number behind the colon: its usual value, the largest that makes sense
NUMBERS = {"similarity": (5.0, 1e4), "same_classes": (4.0, 1e4), "gradient": (10.0, 1e4)}


class Rule(NamedTuple):
    """How a part is mixed: a name of RULES, and the number behind its colon."""

    name: str
    p: float = 0.0


def read_rule(what: str, text: str, allowed: Iterable[str] = RULES) -> Rule:
    """`what` is the option, for the sentence that says what is wrong.

    >>> read_rule("head", "similarity"), read_rule("head", "same_classes:2")
    (Rule(name='similarity', p=5.0), Rule(name='same_classes', p=2.0))
    """
    name, colon, number = text.partition(":")
    if name not in tuple(allowed) or (colon and name not in NUMBERS):
        numbered = [f"{word}:p" for word in allowed if word in NUMBERS]
        raise unknown(f"{what} of pfedrlla", shown(text), [*allowed, *numbered])
    if not colon:
        return Rule(name, NUMBERS.get(name, (0.0, 0.0))[0])
    p, most = convert(f"p of {what}={name}:p", number, real), NUMBERS[name][1]
    if not 0 <= p <= most or (name == "gradient" and p != int(p)):
        kind = "a whole number" if name == "gradient" else "a number"
        raise UserError(
            f"{what}={shown(text)} is not allowed; p of {name}:p is {kind}, 0 to {most:g}"
        )
    return Rule(name, p)


def overlaps(counts: Array) -> Array:
    """[m+1] Σ_c min(q_j(c), q_k(c)) of label counts [m+1, C]; k is the last, with itself 1.

    >>> overlaps(jnp.array([[3.0, 1.0], [0.0, 2.0], [2.0, 2.0]])).tolist()
    [0.75, 0.5, 1.0]
    """
    shares = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1)
    return jnp.minimum(shares, shares[-1]).sum(-1).at[-1].set(1)


def part_weights(
    rule: Rule, action: Array, sizes: Array, usable: Array, overlap: Array | None = None
) -> Array:
    """[m+1] weights that sum to 1. sizes, usable, overlap: [m+1], itself last; usable[m] is True.

    Rules that follow from models start from all alike.

    >>> sizes, usable = jnp.array([2.0, 4.0, 2.0]), jnp.array([True, True, True])
    >>> for rule in ("weighted", "mean"):
    ...     print(rule, part_weights(Rule(rule), sizes / 8, sizes, usable))
    weighted [0.25 0.5  0.25]
    mean [0.5 0.5 0. ]
    """
    if rule.name == "agent":
        return action
    myself = jnp.arange(usable.shape[0]) == usable.shape[0] - 1
    others = usable & ~myself
    by_name: dict[str, Array] = {
        "weighted": jnp.where(usable, sizes, 0),
        "mean": jnp.where(others.any(), others, myself),
        "local": myself,
    }
    if rule.name == "same_classes":
        assert overlap is not None  # always there with this rule
        by_name[rule.name] = jnp.where(usable, overlap**rule.p, 0)
    shares = jnp.asarray(by_name.get(rule.name, usable), sizes.dtype)
    return shares / jnp.maximum(shares.sum(), 1e-9)
