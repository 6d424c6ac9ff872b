"""Federations and runs of `benchmarks.headroom`: many rules side by side in one program, on the
same draws.

A federation is a draw of images, a Dirichlet partition and a seed; row tables are padded to one
width, so that all federations of a data set's shape go through the same compiled rounds. Rules
(the agent's state) and learning rates are variants of one program: participants, minibatches and
steps are then the same for all of them, and computed once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.data.federation import Federation
from fedjax_sim.data.partition import partition
from fedjax_sim.data.sources import load
from fedjax_sim.engine.records import Data, make_data
from fedjax_sim.engine.simulation import Simulation
from fedjax_sim.experiment import Experiment
from fedjax_sim.metrics.base import worst_tenth
from fedjax_sim.plans import payload_bytes
from fedjax_sim.runner.prepare import prepare
from fedjax_sim.runner.weights import initial_net
from fedjax_sim.types import State, Tree

GOALS = ("global", "clients", "worst", "budget")
LEAST, WIDEST = 20, 4  # examples of the smallest client; of the largest, in means
CLAUSES = 2  # places for clauses per verb: rules of one shape share a program


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large the federations are."""

    datasets: tuple[str, ...]
    alphas: tuple[float, ...] = (0.05, 0.1, 0.3)
    pool: int = 4  # images are averaged over squares of so many pixels
    model: str = "mlp"
    model_options: tuple[tuple[str, Any], ...] = (("hidden", (32,)),)
    clients: int = 30
    cohort: int = 5
    rounds: int = 50
    every: int = 2  # rounds between evaluations
    last: int = 10  # evaluations that are averaged
    epochs: float = 2.0
    batch: int = 20
    examples: int = 4000  # of all clients
    val: int = 400  # of the server
    test: int = 1000
    rates: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.4)
    seeds: int = 5
    tuning: int = 2  # federations of other images, by which rates and rules are chosen


SCALES = {
    "smoke": Scale(
        ("digits",), (0.1,), 2, "mlp", (("hidden", (8,)),), 6, 3, 4, 1, 2, 1.0, 8, 360, 60, 100,
        (0.05, 0.2), 2, 1,
    ),
    "small": Scale(("fashion_mnist", "cifar10", "mnist")),
    "paper": Scale(
        ("fashion_mnist", "cifar10", "mnist"), pool=1, model="lenet5", model_options=(),
        clients=100, cohort=10, rounds=105, epochs=5.0, batch=64, examples=40_000, test=5000,
        rates=(0.005, 0.01, 0.02, 0.05), seeds=5, tuning=1,
    ),
}  # fmt: skip


class Variant(NamedTuple):
    """One run of a program."""

    row: str  # its name in the tables
    rule: str = ""
    rate: float = 0.0
    cosine: bool = False  # the rate falls to 0
    taken: bool = False  # only what was taken is sent


class Program(NamedTuple):
    """What selects code."""

    method: str
    options: tuple[tuple[str, Any], ...] = ()
    loss: str = "ce"
    width: int = 16  # variants; calls with fewer are filled up, so that there is one program


# ---- federations ---------------------------------------------------------------------------------
@functools.cache
def images(name: str, data_dir: str | None, pool: int) -> tuple[np.ndarray, ...]:
    """(x_train, y_train, x_test, y_test), averaged over squares of `pool` pixels."""
    data = load(name, data_dir)

    def smaller(x: np.ndarray) -> np.ndarray:
        n, height, width, channels = x.shape
        cut = x.reshape(n, height // pool, pool, width // pool, pool, channels)
        return np.round(cut.mean((2, 4), dtype=np.float32)).astype(np.uint8)

    return smaller(data.x_train), data.y_train, smaller(data.x_test), data.y_test


def split(own: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ONE client's rows, in random order: a quarter for testing, a tenth for validation, the rest
    for training."""
    test, val = max(3, len(own) // 4), max(2, len(own) // 10)
    return own[test + val :], own[test : test + val], own[:test]


@functools.cache
def federation(
    scale: Scale, name: str, data_dir: str | None, alpha: float, seed: int, tuning: bool
) -> Federation:
    """The federation of a seed; those for tuning are made of images that the others never have."""
    x, y, x_test, y_test = images(name, data_dir, scale.pool)
    half, half_test = len(y) // 2, len(y_test) // 2
    shift, shift_test = (half, half_test) if tuning else (0, 0)
    rng = np.random.default_rng([seed, tuning])
    some = shift + rng.permutation(half)[: scale.examples + scale.val]
    tested = shift_test + rng.permutation(half_test)[: scale.test]
    y_own = y[some[: scale.examples]]
    shares = partition(f"dirichlet:{alpha}", y_own, scale.clients, rng, least=LEAST)
    widest = WIDEST * scale.examples // scale.clients
    parts = [split(rng.permutation(own)[:widest]) for own in shares]
    rows = dict(zip(("train", "val", "test"), map(list, zip(*parts, strict=True)), strict=True))
    fed = Federation.from_arrays(
        np.concatenate([x[some], x_test[tested]]),
        np.concatenate([y[some], y_test[tested]]),
        rows,
        test=np.arange(len(some), len(some) + len(tested)),
        server_val=np.arange(scale.examples, len(some)),
        classes=10,
        name="headroom",
    )
    return padded(fed, split(np.arange(widest)))


def padded(fed: Federation, widths: tuple[np.ndarray, ...]) -> Federation:
    """Row tables of the same shape for all federations."""
    wide = dict(zip(("train", "val", "test"), map(len, widths), strict=True))
    fill = lambda a, width: np.pad(a, ((0, 0), (0, max(0, width - a.shape[1]))))
    return dataclasses.replace(fed, rows={k: fill(a, wide[k]) for k, a in fed.rows.items()})


def data_of(sim: Simulation, fed: Federation) -> Data:
    """What the program reads of a federation; the flat table of test rows is padded as well (its
    padding belongs to nobody)."""
    data = make_data(sim.stages, fed)
    room = fed.rows["test"].size - len(data.flat_rows)
    return data._replace(
        flat_rows=np.pad(data.flat_rows, (0, room)),
        flat_owner=np.pad(data.flat_owner, (0, room), constant_values=fed.num_clients),
    )


# ---- runs ----------------------------------------------------------------------------------------
@functools.cache
def simulation(scale: Scale, program: Program, name: str, data_dir: str | None) -> Compiled:
    """The compiled functions of a program for a data set's shape."""
    config = Experiment.of(
        method=program.method,
        options=dict(program.options),
        model=scale.model,
        model_options=dict(scale.model_options),
        participation=f"{scale.cohort}/{scale.clients}",
        rounds=scale.rounds,
        epochs=scale.epochs,
        batch_size=scale.batch,
        lr=scale.rates[0],
        momentum=0.0,
        weight_decay=0.0,
        schedule="cosine",  # to an end that is a variant's own: its rate, where that is constant
        eval_every=scale.every,
        loss=program.loss,
        chunk="1",
        devices="1",
    )
    fed = federation(scale, name, data_dir, max(scale.alphas), 0, True)
    return Compiled(prepare(config, fed=fed, capacity=scale.rounds).simulation, program.width)


def first_states(sim: Simulation, data: Data, variants: list[Variant], seed: int) -> State:
    """The States before round 1, which differ in the agents."""
    from fedjax_sim.engine.simulation import start
    from fedjax_sim.methods.fedpolicy.rules import boxes

    state = start(sim.stages, data, seed, initial_net(sim.env.model, seed))
    wide = lambda a: jnp.broadcast_to(a, (len(variants), *a.shape))
    agent = jax.tree.map(wide, state.agent)
    if jax.tree.leaves(agent):
        each_agent = [boxes(variant.rule, variant.taken, CLAUSES) for variant in variants]
        agent = jax.tree.map(lambda *each: jnp.stack([jnp.float32(a) for a in each]), *each_agent)
    server, clients = jax.tree.map(wide, (state.server, state.clients))
    return state._replace(server=server, clients=clients, agent=agent)


AXES = State(None, None, 0, 0, 0)  # type: ignore[arg-type]


def with_rate(data: Data, rate: Any, end: Any) -> Data:
    """The data of a run whose learning rate falls from `rate` to `end`."""
    lr = dataclasses.replace(data.numbers.lr, lr=rate, end=end)
    return data._replace(numbers=data.numbers._replace(lr=lr))


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A simulation and its program over variants, compiled once."""

    sim: Simulation
    width: int

    @functools.cached_property
    def run(self) -> Any:
        """(states, data, rates [L], their ends [L], rounds) -> states, logs, scores of all
        variants."""
        run = self.sim.run.__wrapped__  # type: ignore[attr-defined]
        variant = lambda state, data, rate, end, rounds: run(
            state, with_rate(data, rate, end), rounds
        )
        return jax.jit(jax.vmap(variant, (AXES, None, 0, 0, None), (AXES, 0, 0)))


def run_variants(
    scale: Scale, program: Compiled, fed: Federation, variants: list[Variant], seed: int
) -> list[dict[str, Any]]:
    """The curves of every variant, on one federation."""
    sim = program.sim
    data = data_of(sim, fed)
    found: list[dict[str, Any]] = []
    for first in range(0, len(variants), program.width):
        some = variants[first : first + program.width]
        some = some + [some[-1]] * (program.width - len(some))
        states = first_states(sim, data, some, seed)
        rates = jnp.array([variant.rate for variant in some], jnp.float32)
        ends = jnp.array([0.0 if variant.cosine else variant.rate for variant in some], jnp.float32)
        done = jax.device_get(program.run(states, data, rates, ends, scale.rounds))
        found += [curves(scale, sim, *one) for one in each_variant(*done)]
    return found[: len(variants)]


def each_variant(states: State, logs: dict, scores: dict) -> Iterator[tuple[Tree, dict, dict]]:
    """(the server's net, logs, scores) of one variant after another."""
    for i in range(len(logs["round"])):
        yield jax.tree.map(lambda a, i=i: a[i], (states.server.net, logs, scores))


def curves(scale: Scale, sim: Simulation, net: Tree, logs: dict, scores: dict) -> dict[str, Any]:
    """Accuracies in % at every evaluation, and bytes so far."""
    rounds, times = scale.rounds, -(-scale.rounds // scale.every)
    share = lambda mode: (
        100
        * scores[mode]["accuracy"]["correct"][:times]
        / np.maximum(scores[mode]["accuracy"]["count"][:times], 1)
    )
    common = "global" in scores
    own = share("personal")  # [T, N]
    wire = sim.method.wire(sim.described, net)
    whole = {k: np.asarray(logs[k])[:rounds] for k in ("taken", "sent", "down", "up")}
    down, up = payload_bytes(whole["taken"], whole["sent"], wire, whole["down"], whole["up"])
    return dict(
        test=share("global").tolist() if common else None,
        val=share("val").tolist() if common else None,
        clients=own.mean(1).tolist(),
        worst=[worst_tenth(each) for each in own],
        bytes=np.cumsum(down + up)[scores["round"][:times] - 1].tolist(),
    )


def half_of_full(scale: Scale, sim: Simulation) -> float:
    """Bytes: half of what `full` moves."""
    floats = sum(sim.env.group_floats(jax.eval_shape(sim.env.model.init, jax.random.key(0))))
    return 4 * floats * 2 * scale.cohort * scale.rounds / 2


def goals(found: dict[str, Any], budget: float, last: int) -> dict[str, float | None]:
    """The four goals of a run, means of its last evaluations; budget: bytes."""
    mean = lambda curve: float(np.mean(curve[-last:]))
    spent = int(np.searchsorted(found["bytes"], budget, side="right"))  # evaluations it can pay
    common = found["test"] is not None
    return {
        "global": mean(found["test"]) if common else None,
        "clients": mean(found["clients"]),
        "worst": mean(found["worst"]),
        "budget": mean(found["test"][: max(spent, 1)]) if common else None,
        "val": mean(found["val"]) if common else None,
    }
