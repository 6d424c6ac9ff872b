"""Advantage actor-critic."""

from __future__ import annotations

from agents import losses
from agents.actor_critic import GradientAgent
from agents.types import Array


class A2C(GradientAgent):
    """On-policy policy gradient with a learned baseline: one step per round on the round's
    transitions.

        Â = r + γ (1 − done) V(S') − V(S)            no gradient, standardised over the rounds
        L = −mean log π(a|S) Â + ½ mean (V(S) − [r + γ (1 − done) V(S')])² − 0.01 mean H(π(·|S))

    >>> import jax, jax.numpy as jnp
    >>> agent = A2C(observation_size=2, num_actions=3)
    >>> action, info = agent.act(agent.init(jax.random.key(0)), jnp.zeros(2), jax.random.key(1))
    >>> bool(info.log_probability < 0)
    True
    """

    name = "a2c"

    def policy_loss(self, new: Array, old: Array, advantage: Array) -> Array:
        return losses.policy_gradient_loss(new, advantage)
