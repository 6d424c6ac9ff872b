"""Proximal policy optimisation."""

from __future__ import annotations

from typing import Any

from agents import losses, schedule
from agents.actor_critic import GradientAgent
from agents.node import Real, field
from agents.types import Array, Transition


class PPO(GradientAgent):
    """A2C with a clipped ratio, so that the last `rounds` rounds can be used `epochs` times (full
    batches).

        ρ = π(a|S) / π_old(a|S)           L = −mean min(ρ Â, clip(ρ, 1 ± 0.2) Â) + ½ value − 0.01 H

    π_old is the policy that chose the action; its log-probability comes from the transition's
    `info`, which is therefore required. Targets and advantages are those of A2C, computed once per
    round for all rows. `cohort` is the largest batch one `update` may bring: it sizes the memory of
    earlier rounds.

    >>> import jax
    >>> agent = PPO(observation_size=2, num_actions=3, cohort=10)
    >>> agent.init(jax.random.key(0)).memory.rows[0].observation.shape     # one earlier round of 10
    (10, 2)
    """

    name = "ppo"
    corrects = True
    rounds: int = field(2, kw_only=True)  # type: ignore[misc]
    cohort: int = field(64, kw_only=True)  # type: ignore[misc]
    epochs: int = field(4, kw_only=True)  # type: ignore[misc]
    clip: Real = field(0.2, ge=1e-12, le=1e6, kw_only=True)

    def policy_loss(self, new: Array, old: Array, advantage: Array) -> Array:
        return losses.clipped_surrogate_loss(new, old, advantage, self.number(self.clip))

    def update(
        self, state: Any, transitions: Transition, key: Array
    ) -> tuple[Any, schedule.Losses]:
        if transitions.info is None:
            raise ValueError(
                "ppo needs the info that act returned: the log-probabilities of the actions"
            )
        brought = len(transitions.mask)
        if brought > self.cohort and self.rounds > 1:
            raise ValueError(
                f"ppo remembers at most cohort={self.cohort} transitions per round and was given "
                f"{brought}; build it with cohort={brought}"
            )
        return super().update(state, transitions, key)
