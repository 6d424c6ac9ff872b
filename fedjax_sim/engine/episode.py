"""A whole run as ONE pure function, and federations padded to a common shape, so that many runs are
one mapped axis.

    episode(parameters, draw, key) -> Scores

`parameters` are what an agent has learned, `draw` is a federation with its participants, `key` the
raw key of a run's seed. The rounds are the engine's own, so an episode is `fedjax_sim.run` of the
same federation, seed and method. `vmap` it over parameters (policies of a population: same
participants, same minibatches), over draws, or over both; `each` says how.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine import evaluation
from fedjax_sim.engine.keys import weights_key
from fedjax_sim.engine.participation import MANY, Padded
from fedjax_sim.engine.records import Data, Round, make_data, open_env
from fedjax_sim.engine.round import one_round
from fedjax_sim.engine.simulation import Simulation, blank_state, everyone, set_up
from fedjax_sim.errors import UserError
from fedjax_sim.local.score import primary
from fedjax_sim.metrics.base import value_of
from fedjax_sim.types import Array, Env, State, Tree

POLICIES = "policies"  # names of the mapped axes
FEDERATIONS = "federations"


class Draw(NamedTuple):
    """A federation, perhaps padded, and who takes part in it; leaves [F, …] for several of them."""

    data: Data
    clients: Array  # []  those that exist; the others are padding
    participants: Array  # []  per round


class Scores(NamedTuple):
    """The results of a run: means over its last evaluations."""

    common: Array  # []  the primary metric of the common model on the global test set
    clients: Array  # []  of the clients' own models on their own rows, mean over clients
    worst: Array  # []  and over the worst tenth of them
    down: Array  # []  parameters sent down, as a share of what whole models would be
    up: Array  # []


# ---- federations of one shape --------------------------------------------------------------------
def one_pool(feds: Sequence[Federation]) -> tuple[list[Federation], np.ndarray, np.ndarray]:
    """(the federations with their rows in the common pool, its examples, its labels).

    A pool that several federations share is stored once.
    """
    pools: dict[int, int] = {}  # checksum of a pool -> its first row
    sums: dict[int, int] = {}  # id of the examples -> that checksum
    x, y, total, moved = [], [], 0, []
    for fed in feds:
        if (np.shape(fed.x)[1:], fed.classes, fed.x.dtype) != (
            np.shape(feds[0].x)[1:],
            feds[0].classes,
            feds[0].x.dtype,
        ):
            raise UserError(
                f"federations side by side must have examples of one shape and as many classes:"
                f" '{feds[0].name}' has {feds[0].shape} and {feds[0].classes}, '{fed.name}' has"
                f" {fed.shape} and {fed.classes}"
            )
        if id(fed.x) not in sums:  # a large pool is read once
            labels = zlib.crc32(np.ascontiguousarray(fed.y).data)
            sums[id(fed.x)] = zlib.crc32(np.ascontiguousarray(fed.x).data, labels)
        content = sums[id(fed.x)]
        if content not in pools:
            pools[content] = total
            x.append(np.asarray(fed.x))
            y.append(np.asarray(fed.y))
            total += len(fed.x)
        first = pools[content]
        shift = lambda tables, first=first: {k: np.asarray(v) + first for k, v in tables.items()}
        moved.append(
            dataclasses.replace(fed, rows=shift(fed.rows), server_rows=shift(fed.server_rows))
        )
    return moved, x[0] if len(x) == 1 else np.concatenate(x), np.concatenate(y)


def padded(
    feds: Sequence[Federation], *, clients: int = 0, examples: Mapping[str, int] | None = None
) -> tuple[list[Federation], np.ndarray]:
    """(the federations in one pool and of one shape, [F] how many clients each one really has).

    clients, examples (of a client, per split): the least number of places, even if no federation
    needs so many.
    """
    moved, x, y = one_pool(feds)
    first = moved[0]
    most = max(clients, *(fed.num_clients for fed in feds))
    if most >= MANY:
        raise UserError(f"{most} clients are too many side by side; allowed: up to {MANY - 1}")
    for fed in moved:
        lengths = {name: len(rows) for name, rows in fed.server_rows.items()}
        if lengths != {name: len(rows) for name, rows in first.server_rows.items()}:
            raise UserError(
                f"federations side by side must have equally many server rows: '{first.name}' and"
                f" '{fed.name}' do not"
            )
        if set(fed.rows) != set(first.rows):
            raise UserError("federations side by side must be split by one protocol")
    # places per client
    wide = {
        split: max((examples or {}).get(split, 0), *(fed.rows[split].shape[1] for fed in moved))
        for split in first.rows
    }
    fill = lambda a, *shape: np.pad(a, [(0, n - m) for n, m in zip(shape, a.shape, strict=True)])
    same: dict[str, Any] = dict(
        x=x, y=y, name="federations", augment=first.augment, origin=first.origin
    )
    out = [
        dataclasses.replace(
            fed,
            **same,
            rows={s: fill(np.asarray(rows), most, wide[s]) for s, rows in fed.rows.items()},
            size={s: fill(np.asarray(size), most) for s, size in fed.size.items()},
        )
        for fed in moved
    ]
    return out, np.array([fed.num_clients for fed in feds], np.int32)


def round_up(rows: int) -> int:
    """The next of 64, 96, 128, 192, 256, …: federations of other lengths mostly share a program.

    >>> [round_up(n) for n in (1, 65, 97, 1000, 1025)]
    [64, 96, 128, 1024, 1536]
    """
    size = 64
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def draws(r: Round, feds: Sequence[Federation], clients: Any, participants: Sequence[int]) -> Draw:
    """Padded federations as one Draw with leaves [F, …]; the pool, which all share, has no F."""
    each = [make_data(r, fed) for fed in feds]
    rows = round_up(max(len(data.flat_rows) for data in each))
    nobody = feds[0].num_clients  # an owner out of range: its row counts for nobody
    fill: Callable[..., Any] = lambda a, value: np.pad(a, (0, rows - len(a)), constant_values=value)
    each = [
        data._replace(flat_rows=fill(data.flat_rows, 0), flat_owner=fill(data.flat_owner, nobody))
        for data in each
    ]
    pool = each[0].fed
    bare = [data._replace(fed=dataclasses.replace(data.fed, x=(), y=())) for data in each]
    data = jax.tree.map(lambda *leaves: np.stack(leaves), *bare)
    data = data._replace(fed=dataclasses.replace(data.fed, x=pool.x, y=pool.y))
    numbers: Any = np.asarray(clients, np.int32), np.asarray(participants, np.int32)
    return Draw(data, *numbers)


def mapped_axes(draw: Draw) -> Draw:
    """`in_axes` of a Draw with leaves [F, …]."""
    own = ("rows", "size", "server_rows", "mean", "std", "scale")
    zeros: dict[str, Any] = dict.fromkeys(own, 0)
    fed = dataclasses.replace(draw.data.fed, x=None, y=None, **zeros)
    rest: Any = [0] * (len(Data._fields) - 1)
    zero: Any = 0
    return Draw(Data(fed, *rest), zero, zero)


def only(draw: Draw, i: Array | int) -> Draw:
    """The i-th of several draws."""
    pool = draw.data.fed
    without = draw._replace(data=draw.data._replace(fed=dataclasses.replace(pool, x=(), y=())))
    one = jax.tree.map(lambda leaf: leaf[i], without)
    fed = dataclasses.replace(one.data.fed, x=pool.x, y=pool.y)
    return one._replace(data=one.data._replace(fed=fed))


# ---- a run ---------------------------------------------------------------------------------------
def replace_at(tree: Any, path: str, value: Tree) -> Any:
    """`tree` with `value` where `path` leads: names of fields and dots, as in --start-from."""
    name, _, rest = path.partition(".")
    inner = replace_at(getattr(tree, name), rest, value) if rest else value
    return tree._replace(**{name: inner})


def value_at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = getattr(tree, name)
    return tree


@dataclasses.dataclass(frozen=True)
class Length:
    """Rounds of an episode, and what its scores are means of."""

    rounds: int
    last: int = 5  # evaluations
    every: int = 2  # rounds between two of them

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 1 or self.rounds < 1 + (self.last - 1) * self.every:
            raise UserError(
                f"an episode of {self.rounds} rounds cannot have its last {self.last} evaluations"
                f" {self.every} rounds apart"
            )


def start_run(
    r: Round, draw: Draw, key: Array, mapped: tuple[str, ...] = ()
) -> tuple[Round, Env, State]:
    """The stages, the environment and the first State of a run on a draw; clients are not set
    up."""
    env = dataclasses.replace(r.env, mapped=mapped, even=False, full=False)
    who = Padded(draw.clients, draw.participants, env.num_clients, env.cohort)
    here = dataclasses.replace(r, env=env, participation=who)
    share = (draw.participants / draw.clients).astype(env.dtype)
    inside = dataclasses.replace(open_env(here, draw.data), share=share)
    return here, inside, blank_state(here, inside, key, env.model.init(weights_key(key)))


def make_episode(
    simulation: Simulation, length: Length, *, parts: str = "agent", mapped: tuple[str, ...] = ()
) -> Callable[[Tree, Draw, Array], Scores]:
    """(parameters, draw, key [2]) -> Scores: the rounds of `simulation` from start to end.

    parts: where in a State the parameters go; parameters None: as the agent begins. mapped: names
    of the vmap axes that are put around it and along which participants differ.
    """
    r = simulation.stages

    def episode(parameters: Tree, draw: Draw, key: Array) -> Scores:
        here, inside, state = start_run(r, draw, key, mapped)
        if parameters is not None:
            state = replace_at(state, parts, parameters)
        state = state._replace(clients=set_up(here, inside, state, everyone(here)))
        return run(here, inside, state, draw, length)

    return episode


def run(r: Round, env: Env, state: State, draw: Draw, length: Length) -> Scores:
    """The rounds of an episode, its last evaluations among them."""
    floats = jnp.asarray(env.group_floats(env.model.init(jax.random.key(0))), env.dtype)

    def round_(_: Array, carry: tuple) -> tuple:
        state, moved = carry
        state, log = one_round(r, env, state, draw.data.dropout)[:2]
        whole = log["participants"] * floats.sum()
        now = jnp.stack([log["taken"] @ floats, log["sent"] @ floats, whole]).astype(env.dtype)
        return state, moved + now

    def block(carry: tuple, rounds: Array) -> tuple:
        carry = lax.fori_loop(0, rounds, round_, carry)
        return carry, score(r, env, carry[0], draw)

    first = length.rounds - (length.last - 1) * length.every
    plan = jnp.asarray([first, *[length.every] * (length.last - 1)], jnp.int32)
    start = state, jnp.zeros(3, env.dtype)
    found: Any
    (_, moved), found = lax.scan(block, start, plan)
    means = jax.tree.map(lambda a: a.mean(0), found)
    return Scores(*means, *(moved[:2] / jnp.maximum(moved[2], 1)))


def score(r: Round, env: Env, state: State, draw: Draw) -> tuple[Array, Array, Array]:
    """(of the common model, clients' mean, clients' worst tenth) of the primary metric."""
    metric = primary(env)
    found: dict[str, Any] = evaluation.score_server(r, env, state, draw.data)
    found |= evaluation.score_stored(r, env, state, everyone(r))
    of = lambda mode: value_of(metric, found[mode][metric.name])
    own = of("personal")  # [N]
    real = (found["personal"][metric.name]["count"] > 0) & r.participation.eligible(len(own))
    many = real.sum()
    tenth = jnp.maximum((many + 9) // 10, 1)
    lowest = jnp.sort(jnp.where(real, metric.better * own, jnp.inf))
    worst = jnp.where(jnp.arange(len(own)) < tenth, lowest, 0).sum() * metric.better / tenth
    common = of("global") if env.method.has_global_model else jnp.full((), jnp.nan, env.dtype)
    return common, jnp.where(real, own, 0).sum() / jnp.maximum(many, 1), worst


# ---- many runs -----------------------------------------------------------------------------------
def each(
    episode: Callable, *, population: bool = False, side_by_side: bool = False
) -> Callable[[Tree, Draw, Array], Any]:
    """`episode` for F draws and keys [F, 2], one after another or in one vmap; with `population`,
    for parameters [P, …] as well. What `episode` gives, Scores as a rule, with axes [F] or [F, P].

    On a CPU one after another is faster: all policies then train on the same minibatches.
    """
    one = jax.vmap(episode, (0, None, None), axis_name=POLICIES) if population else episode

    def many(parameters: Tree, draw: Draw, keys: Array) -> Any:
        if side_by_side:
            axes = (None, mapped_axes(draw), 0)
            return jax.vmap(one, axes, axis_name=FEDERATIONS)(parameters, draw, keys)
        number = jnp.arange(draw.clients.shape[0])
        return lax.map(lambda i: one(parameters, only(draw, i), keys[i]), number)

    return many
