"""Rules that need no learning: which blocks a client keeps or withholds, by what is known of it.

    rule       clause; clause; …
    clause     verb                         always
               verb: condition & condition  where all of them hold
               discount: p                  what was kept is sent with weight (1 + staleness)^−p
    verb       keep_head, keep_backbone             does not take this block
               withhold_head, withhold_backbone     does not send it
    condition  feature<number or feature>number; features: see `features`, and `chance`, a number
               between 0 and 1 that is drawn anew for each client and round

Several clauses with one verb: any of them. Examples:

    keep_head: effective_classes<2.5            few classes: the backbone only
    withhold_head: size<50 & progress>0.5       late, small clients do not send their head
    keep_head: round>30                         full, then backbone
    keep_head: chance<0.3; keep_backbone: chance>0.8     a mixture: 30 %, 20 %, else everything
    keep_head: staleness>10; discount: 0.5      who was away long keeps its head, which counts less

A rule is data: bounds on the features, verb by verb, in the agent's state. So rules of one shape
share one compiled round, and may be mapped over.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.errors import UserError, unknown
from fedjax_sim.methods.fedpolicy.features import FEATURES
from fedjax_sim.options import convert, real, shown
from fedjax_sim.types import Array

VERBS = ("keep_backbone", "keep_head", "withhold_backbone", "withhold_head")
SEEN = tuple(FEATURES)  # what the rule's agent observes
KNOWN = (*SEEN, "chance")  # what a condition may name
CONDITION = re.compile(r"\s*([a-z_]+)\s*([<>])\s*(\S+)\s*")
EXAMPLE = "keep_head: effective_classes<2.5"


class Boxes(NamedTuple):
    """A rule as data: a clause holds where every feature lies between its bounds, a verb where any
    of its clauses holds."""

    low: Array  # [4, K, F]
    high: Array  # [4, K, F]
    discount: Array  # []
    taken: Array  # []  1: sends nothing that it did not take


def parse(text: str) -> dict[str, Any]:
    """verb -> clauses, each a dict of feature -> (low, high); and discount -> p.

    >>> parse("keep_head: effective_classes<2.5 & round>3; withhold_head")["keep_head"]
    [{'effective_classes': (-inf, 2.5), 'round': (3.0, inf)}]
    """
    found: dict[str, Any] = {verb: [] for verb in VERBS} | {"discount": 0.0}
    for clause in text.split(";"):
        verb, colon, rest = (part.strip() for part in clause.partition(":"))
        if verb == "discount":
            found[verb] = power(rest)
        elif verb in VERBS:
            found[verb].append(bounds(verb, rest) if colon else {})
        else:
            raise unknown("verb of fedpolicy.rule", shown(verb), (*VERBS, "discount"))
    return found


def power(text: str) -> float:
    value = convert("fedpolicy.rule: discount", text, real, "; allowed: 0 or more")
    if value < 0:
        raise UserError(f"fedpolicy.rule: discount {text} is not allowed; use 0 or more")
    return value


def bounds(verb: str, text: str) -> dict[str, tuple[float, float]]:
    """feature -> (low, high) of conditions joined by &."""
    found: dict[str, tuple[float, float]] = {}
    for condition in text.split("&"):
        match = CONDITION.fullmatch(condition)
        if match is None:
            raise UserError(
                f"fedpolicy.rule: '{shown(condition.strip())}' of {verb} is not a condition;"
                f" allowed: feature<number or feature>number, joined by &, such as '{EXAMPLE}'"
            )
        name, sign, number = match.groups()
        if name not in KNOWN:
            raise unknown("feature of fedpolicy.rule", shown(name), KNOWN)
        value = convert(f"fedpolicy.rule: {name}{sign}", number, real)
        low, high = found.get(name, (-np.inf, np.inf))
        found[name] = (max(low, value), high) if sign == ">" else (low, min(high, value))
    return found


def boxes(text: str, taken: bool = False, clauses: int = 0) -> Boxes:
    """A rule as data; taken: nothing is sent that was not taken; clauses: places per verb, at least
    as many as the rule has. '' is `full`."""
    rule = parse(text) if text.strip() else {verb: [] for verb in VERBS} | {"discount": 0.0}
    width = max(1, clauses, *(len(rule[verb]) for verb in VERBS))
    shape = (len(VERBS), width, len(KNOWN))
    low, high = np.full(shape, np.inf), np.full(shape, np.inf)  # nothing lies above infinity
    for v, verb in enumerate(VERBS):
        for c, clause in enumerate(rule[verb]):
            low[v, c] = -np.inf
            for name, (least, most) in clause.items():
                low[v, c, KNOWN.index(name)], high[v, c, KNOWN.index(name)] = least, most
    arrays: Any = low, high, np.asarray(rule["discount"]), np.asarray(float(taken))
    return Boxes(*arrays)


def decide(rule: Boxes, seen: Array, chance: Array) -> Array:
    """[4] weights from 0 to 1: take the backbone, take the head, send the backbone, send the
    head."""
    known = jnp.append(seen, chance)
    holds = ((known > rule.low) & (known < rule.high)).all(-1).any(-1)
    take, send = ~holds[:2], ~holds[2:]
    aged = (1 + seen[SEEN.index("staleness")]) ** -rule.discount
    return jnp.concatenate([1.0 * take, send * jnp.where(take, 1, aged * (1 - rule.taken))])


@functools.cache
def rule_agent(text: str, taken: bool, dtype: Any) -> Any:
    """The rule as an agent: its state is the rule, an action is what `exchange_mix` reads."""
    from agents.types import Agent, Info

    class Rule(Agent):
        name = "rule"

        def init(self, key: Array) -> Boxes:
            return jax.tree.map(lambda a: jnp.asarray(a, dtype), boxes(text, taken))

        def act(
            self, state: Boxes, observation: Array, key: Array, available: Array | None = None
        ) -> tuple[Array, Info]:
            chance = jax.random.uniform(key, dtype=dtype)
            action = 2 * decide(state, observation, chance).astype(dtype) - 1
            nothing = jnp.zeros((), dtype)
            return action, Info(nothing, nothing, action, jnp.ones(action.shape, bool))

        def update(self, state: Boxes, transitions: Any, key: Array) -> tuple[Boxes, dict]:
            return state, {}

    return Rule(len(SEEN), 4, dtype=dtype)
