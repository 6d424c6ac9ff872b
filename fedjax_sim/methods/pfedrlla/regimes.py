"""When the agent and the encoder learn, and which models the reward compares.

pretrain   bodies never leave the clients, only heads are mixed; agent and encoder learn in every
           round (600 of them)
finetune   both come from a pre-trained run (--start-from, `fedjax-sim train` says what) and learn
           every 10 rounds. The encoder's frame comes with them: one head has the same embedding and
           the same weights in both runs. Heads of another initial model have other hidden units,
           and no coordinates in common with those that the agent has seen: give both runs the same
           initial weights (the same --seed, or --init)
scratch    the paper's Appendix G: 50 rounds of random weights while the encoder learns in every
           round, then both learn every 10 rounds. Bodies change meanwhile, so rewards compare
           w_DRL, a second model of the client that is never trained: its head is copied from the
           model at every mixture, its body only after the agent has learned. Each time the agent
           takes the steps of all rounds since the last, 5 each: with 5 in all, as elsewhere, a run
           of 500 rounds would have 225 of them

During the first 50 rounds of an agent's life its weights are random; a pre-trained one has them
behind it. Random rounds and intervals are counted by the agent and by the encoder alike, and both
counters travel with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.errors import UserError
from fedjax_sim.plans import overlay, part
from fedjax_sim.types import Array, Client, Env, Tree

REGIMES = ("auto", "pretrain", "finetune", "scratch")


class Own(NamedTuple):
    """What ONE client keeps beside its model."""

    features: Array  # [L, side²] the projected head of its resident model
    # []  whether they are: with a shared basis, only after its first participation
    known: Tree = ()
    second: Tree = ()  # w_DRL, in the regime scratch
    version: Tree = ()  # []  how often the agent had learned when the body of w_DRL was copied
    last: Tree = ()  # []  accuracy after its previous mixture, for acc_pre=previous


class Schedule(NamedTuple):
    """Who learns when; `rounds` counts the rounds that agent and encoder have seen before this
    one."""

    regime: str
    random_rounds: int
    every: int

    def encoder_due(self, rounds: Array) -> Array:
        return (rounds < self.random_rounds) | ((rounds + 1) % self.every == 0)

    def versions(self, rounds: Array) -> Array:
        """How often the agent has been due to learn."""
        return jnp.maximum(rounds // self.every - self.random_rounds // self.every, 0)


def schedule(
    env: Env, regime: str, random_rounds: int, every: int, hands_over: tuple[str, ...]
) -> Schedule:
    """What `auto` and 0 become in this run; hands_over: what an agent needs that comes from another
    one."""
    given = [part for part in env.started if part.split(".")[0] in ("agent", "server")]
    if given and set(given) != set(hands_over):
        raise UserError(
            f"--start-from takes {', '.join(given)}, but an agent needs its encoder and the"
            " encoder's frame, and must not take the other run's experience; allowed:"
            f" RUN:{','.join(hands_over)}"
        )
    if regime == "auto":
        regime = "finetune" if given else "scratch"
    return Schedule(regime, random_rounds, every or (1 if regime == "pretrain" else 10))


def compared(
    plan: Schedule, body: tuple[str, ...], rounds: Array, client: Client, mixed: Tree
) -> tuple:
    """(before, after, own): the two nets whose accuracies are the reward's, and the client's state
    with w_DRL renewed."""
    own: Any = client.own
    if plan.regime != "scratch":
        return client.resident, mixed, own
    version = plan.versions(rounds)
    renew = lambda new, old: jax.tree.map(
        lambda a, b: jnp.where(version > own.version, a, b), new, old
    )
    # the body first, for both models: what the reward shows is the head's doing
    before = overlay(own.second, renew(part(mixed, body), part(own.second, body)))
    after = overlay(mixed, part(before, body))
    return before, after, own._replace(second=after, version=jnp.maximum(version, own.version))
