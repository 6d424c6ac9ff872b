"""A small policy whose parameters an evolution strategy found: it acts, and never learns by
itself."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agents import nets
from agents.node import Real, field
from agents.types import Agent, Array, Info, Transition, clean_observation, usable_actions


class EvolvedState(NamedTuple):
    parameters: Array  # [D], layer by layer: weights [in, out], then biases [out] if it has any


class Evolved(Agent):
    """A linear map of the observation, or a network with tanh layers; always its best action.

        h = s;  h ← tanh(W h + b) for every hidden layer;  output = rest + W h + b (b = 0 without
        `bias`: of observations around 0, no policy decides the same whatever it sees but one)

    continuous: the action is the output, cut to [−1, 1]; otherwise the action with the largest
    output. It starts with zeros, so that it decides `rest` whatever it sees. `--start-from` or an
    evolution strategy hands other parameters in: one vector, so that a population is a matrix.

    >>> agent = Evolved(continuous=True).sized(3, 2)
    >>> agent.act(agent.init(jax.random.key(0)), jnp.ones(3), jax.random.key(1))[0].tolist()
    [1.0, 1.0]
    >>> agent.num_parameters, Evolved(hidden=(4,)).sized(3, 2).num_parameters
    (8, 26)
    """

    name = "evolved"
    hidden: tuple[int, ...] = field((), help="widths of hidden layers; none: a linear policy")
    continuous: bool = field(False, help="numbers in [-1, 1] in place of one of some actions")
    bias: bool = field(True, help="whether the output layer has one")
    frozen: bool = field(True, help="it learns across runs, never in one")
    rest: Real = field(1.0, ge=-1e6, le=1e6, help="the output of a policy whose parameters are 0")

    def check(self) -> None:
        super().check()
        if not self.frozen:
            raise ValueError(
                "frozen=False is not possible: an evolved policy never learns in a run"
            )

    def shapes(self) -> list[tuple[int, int]]:
        """(in, out) of every layer."""
        return list(pairwise((self.observation_size, *self.hidden, self.num_actions)))

    @property
    def num_parameters(self) -> int:
        total = sum((inputs + 1) * outputs for inputs, outputs in self.shapes())
        return total if self.bias else total - self.num_actions

    def init(self, key: Array) -> EvolvedState:
        return EvolvedState(jnp.zeros(self.num_parameters, self.dtype))

    def output(self, parameters: Array, observation: Array) -> Array:
        """[A] of ONE observation [S]."""
        found, start = observation, 0
        for layer, (inputs, outputs) in enumerate(self.shapes()):
            end = start + inputs * outputs
            weights = parameters[start:end].reshape(inputs, outputs)
            found = (jnp.tanh(found) if layer else found) @ weights
            start = end + outputs
            if start <= len(parameters):
                found = found + parameters[end:start]
        return self.number(self.rest) + found

    def act(
        self, state: EvolvedState, observation: Array, key: Array, available: Array | None = None
    ) -> tuple[Array, Info]:
        seen = clean_observation(observation, self.observation_size, self.dtype)
        out, nothing = self.output(state.parameters, seen), jnp.zeros((), self.dtype)
        usable = usable_actions(available, self.num_actions)
        if self.continuous:
            action = jnp.clip(out, -1, 1)
            return action, Info(nothing, nothing, action, usable)
        best = nets.greedy(out, usable)
        sure = jax.nn.one_hot(best, self.num_actions, dtype=self.dtype)
        return best, Info(nothing, out[best], sure, usable)

    def update(
        self, state: EvolvedState, transitions: Transition, key: Array
    ) -> tuple[EvolvedState, dict[str, Array]]:
        return state, {}
