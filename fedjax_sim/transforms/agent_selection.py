"""An agent decides who takes part.

    state   s_k = [n_k / max n, last loss of k / (1 + last loss), 1 / (1 + rounds since its last
            participation), has taken part]
    action  take or skip; the M clients with the largest log π(take|s_k) + Gumbel noise take part
    reward  the fall of the participants' mean training loss since the previous round

Any discrete agent of `agents/` that learns from stored transitions (q_bandit, dqn, sac). Its state
is the server's. Wire: the method's, and the losses, one float up.

agent=evolved: a policy trained across federations (`train --over`), which learns nothing here; the
M clients with the largest π(s_k) + Gumbel noise take part (uniform before it is trained), and

    s_k = [log n_k/mean n, log last loss of k/mean last loss, has taken part, log(1 + rounds since ·
           M/N), entropy of its labels / log C, rounds completed / planned]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from agents import registry
from fedjax_sim.errors import UserError
from fedjax_sim.fields import field
from fedjax_sim.hooks import Around, Stats
from fedjax_sim.plans import BITS_PER_PARAMETER, Wire
from fedjax_sim.transforms import register_transform
from fedjax_sim.transforms.power_of_choice import Selection
from fedjax_sim.types import Array, Cohort, Env, Tree

AGENTS = ("q_bandit", "dqn", "sac", "evolved")
SEEN, TAKE = 4, 1  # numbers in a state; the action that takes a client
PORTABLE = 6  # numbers in a state of agent=evolved


class Memory(NamedTuple):
    agent: Tree
    loss: Array  # [N] as last reported, 0 before
    last: Array  # [N] the round of its last participation, from 1; 0: none
    mean: Array  # []  of the last round's losses


@register_transform("agent_selection")
class AgentSelection(Selection):
    """An agent decides who takes part."""

    agent: Any = field("q_bandit", help="q_bandit, dqn, sac or evolved, or an agent object")

    def check(self) -> None:
        super().check()
        if isinstance(self.agent, str) and self.agent in AGENTS:
            kind: Any = registry.kind(self.agent)
            sizes = dict(hidden=(16,), batch=16, capacity=1000)
            built = kind(rest=0.0) if self.agent == "evolved" else kind(**sizes)
            object.__setattr__(self, "agent", built)
        if getattr(self.agent, "name", None) not in AGENTS:
            raise UserError(
                f"agent_selection.agent={self.agent} is not allowed; use {', '.join(AGENTS)}"
            )

    @property
    def hands_over(self) -> tuple[str, ...]:
        """What a later run takes over: the agent is part of the server's state."""
        return ("server",)

    @property
    def evolved(self) -> bool:
        return self.agent.name == "evolved"

    @property
    def evolves(self) -> str:
        return "server.mine.agent.parameters" if self.evolved else ""

    def sized_agent(self, env: Env) -> Any:
        sizes = (PORTABLE, 1) if self.evolved else (SEEN, 2)
        return self.agent.sized(*sizes, env.dtype)

    def begin_server(self, env: Env, net: Tree) -> Memory:
        nothing = jnp.zeros(env.num_clients, env.dtype)
        # always the same start: the server's state has no key of its own
        agent = self.sized_agent(env).init(jax.random.key(0))
        return Memory(agent, nothing, nothing.astype(jnp.int32), jnp.zeros((), env.dtype))

    def states(self, env: Env, mine: Memory, t: Array) -> Array:
        """[N, S]."""
        size = env.fed.size["train"].astype(env.dtype)
        since = jnp.where(mine.last > 0, t + 1 - mine.last, t + 1).astype(env.dtype)
        parts = [
            size / jnp.maximum(size.max(), 1),
            mine.loss / (1 + mine.loss),
            1 / (1 + since),
            mine.last > 0,
        ]
        return jnp.stack([part.astype(env.dtype) for part in parts], 1)

    def portable(self, env: Env, mine: Memory, t: Array) -> Array:
        """[N, PORTABLE]: numbers that mean the same in every federation."""
        size, known = env.fed.size["train"].astype(env.dtype), mine.last > 0
        mean = size.sum() / jnp.maximum((size > 0).sum(), 1)
        losses = jnp.where(known, mine.loss, 0).sum() / jnp.maximum(known.sum(), 1)
        ratio = lambda a, b: jnp.log(jnp.maximum(a, 1e-6) / jnp.maximum(b, 1e-6))
        since = jnp.where(known, t + 1 - mine.last, t + 1).astype(env.dtype)
        share = env.cohort / env.population if env.share is None else env.share
        labels = env.counts / jnp.maximum(env.counts.sum(1, keepdims=True), 1)
        entropy = -jnp.where(labels > 0, labels * jnp.log(jnp.maximum(labels, 1e-9)), 0).sum(1)
        parts = [
            jnp.clip(ratio(size, mean), -3, 3),
            jnp.where(known, jnp.clip(ratio(mine.loss, losses), -3, 3), 0),
            known,
            jnp.log1p(since * share),
            entropy / jnp.log(max(env.counts.shape[1], 2)),
            jnp.broadcast_to(t / max(env.rounds, 1), size.shape),
        ]
        return jnp.stack([part.astype(env.dtype) for part in parts], 1)

    def preferences(self, env: Env, mine: Memory, t: Array, key: Array) -> Array:
        """[N] the agent's preference for each client, before noise."""
        agent = self.sized_agent(env)
        if self.evolved:
            outputs = lambda s: agent.output(mine.agent.parameters, s)[0]
            return jax.vmap(outputs)(self.portable(env, mine, t))
        wanted = lambda s: agent.act(mine.agent, s, key)[1].policy[TAKE]
        return jnp.log(jax.vmap(wanted)(self.states(env, mine, t)) + 1e-6)

    def select(self, env: Env, server: Around, t: Array, key: Array, stats: Stats) -> Array:
        wanted = self.preferences(env, server.mine, t, key)
        score = wanted + jax.random.gumbel(jax.random.fold_in(key, 1), wanted.shape, env.dtype)
        return lax.top_k(jnp.where(stats.eligible, score, -jnp.inf), env.cohort)[1]

    def step(
        self, env: Env, mine: Memory, old: Any, new: Any, cohort: Cohort
    ) -> tuple[Memory, Any]:
        from agents.types import Transition

        mean = cohort.losses.sum() / jnp.maximum(cohort.count, 1)
        gain = jnp.where(mine.last.any(), mine.mean - mean, 0).astype(env.dtype)
        to = jnp.where(cohort.ok, cohort.ids, env.num_clients)  # out of range: not written
        loss = mine.loss.at[to].set(cohort.losses.astype(env.dtype), mode="drop")
        after = Memory(
            mine.agent,
            loss,
            mine.last.at[to].set(cohort.t + 1, mode="drop"),
            mean.astype(env.dtype),
        )
        if self.evolved:
            return after, new
        before, then = (
            self.states(env, mine, cohort.t)[cohort.ids],
            self.states(env, after, cohort.t + 1)[cohort.ids],
        )
        taken, never = (
            jnp.full(cohort.ids.shape, TAKE, jnp.int32),
            jnp.zeros(cohort.ids.shape, bool),
        )
        rewards = jnp.broadcast_to(gain, cohort.ids.shape)
        transition = Transition(before, taken, rewards, then, never, cohort.ok)
        return after._replace(
            agent=self.sized_agent(env).update(mine.agent, transition, cohort.key)[0]
        ), new

    def wire(self, env: Env, net: Tree) -> Wire:
        plain = self.inner.wire(env, net)
        return plain._replace(beside_up=plain.beside_up + BITS_PER_PARAMETER)
