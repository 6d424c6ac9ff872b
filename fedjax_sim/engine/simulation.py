"""T rounds as one program: `simulate` turns a method and an environment into compiled functions of
(State, Data)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine import evaluation
from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.cohort import each_client, zeros
from fedjax_sim.engine.keys import SETUP, seed_key, stage_key
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.records import (
    Data,
    Numbers,
    Round,
    RoundPlan,
    in_its_precision,
    make_data,
    open_env,
)
from fedjax_sim.engine.round import contexts, one_round, plan_round
from fedjax_sim.hooks import Controlled, Method, SetsUp
from fedjax_sim.local.losses import init_confusion
from fedjax_sim.metrics import make_metrics
from fedjax_sim.metrics.base import Metric
from fedjax_sim.platform import run_once
from fedjax_sim.types import Array, Client, Count, Ctx, Env, Key, Scalar, State, Tree

LOGGED = 4096  # rounds whose logs one call of `run` can hold


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Pure functions of one set-up. `run` and `evaluate` are compiled once each."""

    env: Env
    method: Method
    layout: Layout
    init: Callable  # (seed, net) -> State
    # (state, data, rounds, ends=True) -> (state, logs [≤ cap rounds], evaluations [≤ cap blocks])
    run: Callable
    evaluate: Callable  # (state, data) -> dict
    # (state, data) -> dict: the expensive personal evaluation, for methods that fine-tune
    adapt: Callable
    round: Callable  # (state, data) -> (state, log): one round, not compiled
    # (state, data) -> (state, log, ids [M], nets [M, …]): one round with all its uploads
    examine: Callable
    # for the functions of `round` and `evaluation`, one by one: profiling, debugging,
    # `host_clients`
    stages: Round
    data: Data
    eval_every: int
    capacity: int  # most evaluation blocks in one call of `run`

    def open(self, data: Data) -> Env:
        """The environment as the compiled program sees it."""
        return open_env(self.stages, data)

    @property
    def described(self) -> Env:
        """The environment with its method: what can be asked before anything is compiled."""
        return dataclasses.replace(self.env, method=self.method)

    def agent(self) -> Any:
        """The agent that steers the method, sized for this run; None without one."""
        control = self.method.ask(Controlled)
        return None if control is None else control.make_agent(self.open(self.data))

    def plan_round(self, state: State, data: Data) -> RoundPlan:
        """The plan of the coming round; not compiled."""
        return plan_round(self.stages, self.open(data), state, data.dropout)

    def with_numbers(self, numbers: Numbers) -> Simulation:
        """The same programs for other real settings."""
        data = self.data._replace(numbers=numbers)
        return dataclasses.replace(
            self, data=data, init=lambda seed, net: start(self.stages, data, seed, net)
        )

    def shapes(self, net: Tree) -> tuple[Tree, Client]:
        """Shapes of the server's state and of ONE client's; nothing is computed."""
        return jax.eval_shape(
            lambda n, d: initial_states(self.stages, self.open(d), n), net, self.data
        )

    @property
    def most_rounds(self) -> int:
        """The most rounds in one call of `run`."""
        return most_rounds(self.eval_every, self.capacity)

    @property
    def client_split(self) -> str:
        """The split on which client accuracies are measured."""
        return self.stages.split


def simulate(
    method: Method,
    env: Env,
    fed: Federation,
    participation: Participation,
    layout: Layout | None = None,
    *,
    lr: Callable[[Scalar], Scalar],
    evaluations: tuple[str, ...] = ("global", "personal"),
    eval_every: int = 1,
    capacity: int = 32,
    metrics: tuple[Metric, ...] = (),
    probe: bool = False,
    stored: str = "all",
    precision: str = "default",
) -> Simulation:
    """Compose a method, a federation and a layout into compiled functions; see `Simulation`.

    stored: "all": a State holds all clients; "cohort": only the cohort's, in its order, and
    `host_clients` keeps the others. precision: of float32 products on accelerators.
    """
    env = dataclasses.replace(
        equal_work(env, fed), metrics=metrics or make_metrics((), fed.classes)
    )
    r = Round(
        method=method,
        env=env,
        participation=participation,
        layout=layout or Layout(),
        lr=lr,
        evaluations=evaluations,
        split=evaluation.client_split(fed),
        probe=probe,
        stored=stored,
        precision=precision,
    )
    if (control := method.ask(Controlled)) is not None:
        # bad input is refused before anything is built
        control.make_agent(dataclasses.replace(env, fed=fed))
    return compiled(r, make_data(r, fed), eval_every, capacity)


def compiled(r: Round, data: Data, eval_every: int, capacity: int) -> Simulation:
    """The functions of a Round; each is compiled when it is first called."""
    stacking = dataclasses.replace(r, stacks=True)

    def examine(state: State, data: Data) -> tuple[State, dict, Int[Array, " participants"], Tree]:
        state, log, outcome, ids = one_round(stacking, open_env(r, data), state, data.dropout)
        return state, log, ids, outcome.stacked

    return Simulation(
        env=r.env,
        method=r.method,
        layout=r.layout,
        init=lambda seed, net: start(r, data, seed, net),
        run=jax.jit(
            lambda s, d, rounds, ends=True: run(r, s, d, rounds, ends, eval_every, capacity),
            donate_argnums=0,
        ),
        evaluate=jax.jit(lambda s, d: evaluate(r, open_env(r, d), s, d)),
        adapt=jax.jit(
            lambda s, d: evaluation.score_stored(r, open_env(r, d), s, everyone(r), True)
        ),
        round=lambda s, d: one_round(r, open_env(r, d), s, d.dropout)[:2],
        examine=jax.jit(examine),
        stages=r,
        data=data,
        eval_every=eval_every,
        capacity=capacity,
    )


def equal_work(env: Env, fed: Federation) -> Env:
    """With `Env.even` and `Env.full`: what is known about all clients' minibatches before the first
    round."""
    size = np.asarray(fed.size["train"])
    batches = -(-size // env.batch_size)
    even = bool((batches == max(1, -(-fed.rows["train"].shape[1] // env.batch_size))).all())
    return dataclasses.replace(
        env, even=even, full=even and bool((size % env.batch_size == 0).all())
    )


def everyone(r: Round) -> Int[Array, " clients"]:
    return jnp.arange(r.env.num_clients, dtype=jnp.int32)


# ---- the start -----------------------------------------------------------------------------------
@in_its_precision
def set_up(r: Round, env: Env, state: State, who: Int[Array, " some_clients"]) -> Client:
    """The clients before round 1; `state` holds those of `who` [B]."""
    if env.method.ask(SetsUp) is None:
        return state.clients
    ctxs = contexts(r, env, stage_key(state, SETUP), who, state.t)

    def one(env: Env, server: Tree, client: Client, ctx: Ctx) -> tuple[Tree, Client]:
        after = env.method.setup(env, server, client, ctx)
        # the optimiser's state is that of rounds
        return (), after._replace(optimizer=client.optimizer)

    return each_client(env, r.layout, one, state.server, state.clients, ctxs)[1]


@in_its_precision
def initial_states(r: Round, env: Env, net: Tree) -> tuple[Tree, Client]:
    """(the server's state, ONE client's) before anything happened."""
    server, own = env.method.init(env, net)
    one = Client(
        own,
        init_confusion(env.fed.classes, env.dtype) if env.track_confusion else (),
        net if r.keeps_resident else (),
        net["batch_stats"] if env.bn_local else (),
        optimizer=env.optimizer.init(net["params"]) if env.keeps_optimizer else (),
    )
    return server, one


def blank_state(r: Round, env: Env, key: Array, net: Tree) -> State:
    """The State before anything happened on the clients: a pure function, also inside a trace."""
    server, one = initial_states(r, env, net)
    rows = r.layout.padded(r.num_stored)
    clients = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *jnp.shape(a))), one)
    state = State(jnp.int32(0), key, server, clients, ())
    if (control := env.method.ask(Controlled)) is not None:
        state = state._replace(agent=control.make_agent(env).init(stage_key(state, SETUP)))
    return state


def start(r: Round, data: Data, seed: int, net: Tree) -> State:
    """The State before round 1; client states are created where they live."""
    setting_up = r.method.ask(SetsUp)
    later = setting_up is not None and setting_up.setup_trains

    def build(key: Key, net: Tree, data: Data) -> State:
        state = blank_state(r, open_env(r, data), key, net)
        return state if later or r.stored != "all" else ready(state, data)

    def ready(state: State, data: Data) -> State:
        return state._replace(clients=set_up(r, open_env(r, data), state, everyone(r)))

    # the run donates its state: the caller's net and key must not be among its buffers
    key, net, inputs = layouts.everywhere(
        r.layout, (seed_key(seed), jax.tree.map(jnp.copy, net), data)
    )
    where: dict[str, Any] = {}
    if r.layout.mesh is not None:
        where["out_shardings"] = layouts.shardings(
            r.layout, jax.eval_shape(build, key, net, inputs)
        )
    state = run_once(build, key, net, inputs, **where)
    return (
        jax.jit(ready, donate_argnums=0, **where)(state, inputs)
        if later and r.stored == "all"
        else state
    )


# ---- many rounds ---------------------------------------------------------------------------------
def evaluate(r: Round, env: Env, state: State, data: Data) -> dict[str, Tree]:
    """Every evaluation that costs no training; the stored clients only where the State holds them
    all."""
    out = evaluation.score_server(r, env, state, data)
    return out | evaluation.score_stored(r, env, state, everyone(r)) if r.stored == "all" else out


def run(
    r: Round,
    state: State,
    data: Data,
    rounds: Array,
    ends: Array | bool,
    eval_every: int,
    capacity: int,
) -> tuple[State, dict, dict]:
    """`rounds` ≤ most_rounds(…) rounds, an evaluation after every eval_every-th and, if `ends`,
    after the last.

    The place of an evaluation that was left out stays empty: its round is 0.
    """
    env = open_env(r, data)
    log_shape = jax.eval_shape(lambda s: one_round(r, env, s, data.dropout)[1], state)
    eval_shape = jax.eval_shape(lambda s: {**evaluate(r, env, s, data), "round": s.t}, state)
    write = lambda buffer, i, value: jax.tree.map(lambda b, v: b.at[i].set(v), buffer, value)
    first = state.t

    def round_(_: Count, carry: tuple) -> tuple:
        state, logs = carry
        place = state.t - first
        state, log = one_round(r, env, state, data.dropout)[:2]
        return state, write(logs, place, log)

    def block(i: Count, carry: tuple) -> tuple:
        state, logs, scores = carry
        left = rounds - (state.t - first)
        now = jnp.minimum(eval_every - state.t % eval_every, left)
        state, logs = lax.fori_loop(0, now, round_, (state, logs))
        score = lambda scores: write(scores, i, {**evaluate(r, env, state, data), "round": state.t})
        # no loop of one turn: XLA would compute its inside before it
        due = jnp.asarray(ends) | (state.t % eval_every == 0)
        return state, logs, lax.cond(due, score, lambda scores: scores, scores)

    last = first + rounds  # no sum with eval_every, which may be the largest number there is
    blocks = last // eval_every - first // eval_every + (last % eval_every != 0)
    buffers = zeros(log_shape, (most_rounds(eval_every, capacity),)), zeros(eval_shape, (capacity,))
    state, logs, scores = lax.fori_loop(0, blocks, block, (state, *buffers))
    return state._replace(server=layouts.stay(r.layout, state.server)), logs, scores


def most_rounds(eval_every: int, capacity: int) -> int:
    """Rounds that one call of `run` can write down: the logs of rounds far apart from any
    evaluation stay small too."""
    return min(capacity * eval_every, LOGGED)


def drive(step: Callable, evaluate: Callable, eval_every: int) -> Callable:
    """`run` from the host, for rounds that are more than one program: same arguments, same results.

    step: (state, data) -> (state, log); evaluate: (state, data) -> dict.
    """

    def run(state: State, data: Any, rounds: Any, ends: Any = True) -> tuple[State, dict, dict]:
        logs, scores = [], []
        for left in range(int(rounds), 0, -1):
            state, log = step(state, data)
            logs.append(layouts.as_numpy(log))
            if int(state.t) % eval_every == 0 or (left == 1 and ends):
                scores.append(layouts.as_numpy({**evaluate(state, data), "round": state.t}))
        stack = lambda entries: jax.tree.map(lambda *a: np.stack(a), *entries)
        return state, stack(logs), stack(scores) if scores else {"round": np.zeros(0, np.int32)}

    return run
