"""Federations designed so that the right answer is known: groups of clients that mean the same by a
label.

Used by `benchmarks.pfedrlla` and by the tests: the weight heat-map, the embeddings of five groups,
and whether the agent is alive. Real digits by default; any dataset by name.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.api import run
from fedjax_sim.data.federation import Federation
from fedjax_sim.data.sources import load
from fedjax_sim.engine import layout as layouts
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.methods.pfedrlla import mhae, pca
from fedjax_sim.methods.pfedrlla.control import STILL
from fedjax_sim.methods.pfedrlla.encoder import features, make_frame, placed
from fedjax_sim.methods.pfedrlla.reward import preferred, terms
from fedjax_sim.runner.driver import Result
from fedjax_sim.runner.prepare import prepare
from fedjax_sim.types import Tree

LOCAL: dict[str, Any] = dict(
    model="mlp",  # all head: nothing but the agent's weights decides what is mixed
    participation="1",
    batch_size=16,
    lr=0.1,
    momentum=0.5,
    weight_decay=0.0,
    evaluations=("resident",),
    chunk="1",
    devices="1",
)


def grouped(
    groups: int,
    per_group: int,
    rows: int = 200,
    dataset: str = "digits",
    data_dir: str | None = None,
) -> Federation:
    """`groups · per_group` clients with all classes; group g calls class c by the name c +
    g·(classes / groups).

    Models of one group help each other and models of two groups contradict each other, whatever a
    body could do about it. 65/15/20 train/val/test; nobody shares an image.
    """
    data = load(dataset, data_dir)
    if not 2 <= groups <= data.classes:
        raise UserError(
            f"groups {groups} is not allowed; use 2 to {data.classes}, the classes of '{dataset}'"
        )
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    order = np.random.default_rng(21).permutation(len(y))
    size = min(rows, len(y) // (groups * per_group))
    y, lists = y.copy(), {"train": [], "val": [], "test": []}
    for client in range(groups * per_group):
        own = order[client * size : (client + 1) * size]
        y[own] = (y[own] + client // per_group * (data.classes // groups)) % data.classes
        for split, part in zip(
            lists, np.split(own, [int(0.65 * size), int(0.80 * size)]), strict=True
        ):
            lists[split].append(part)
    return Federation.from_arrays(
        x, y, lists, classes=data.classes, name=f"{dataset} in {groups} groups"
    )


def trained(
    fed: Federation,
    rounds: int,
    *,
    regime: str = "pretrain",
    out: pathlib.Path | None = None,
    **more: Any,
) -> Result:
    """A run of pFedRLLA with everybody in every round, as in the paper's heat-map, or with
    participation="6/9".

    Cohorts are in the order in which they are drawn, another one in every round.
    """
    options = LOCAL | dict(epochs=1.0, eval_every=rounds, regime=regime)
    return run("pfedrlla", fed, out=out, rounds=rounds, **{**options, **more})


def allocation(result: Result) -> dict[str, np.ndarray]:
    """Of the next round, without noise: weights and V_k [N, m+1], whose models are weighed [m], and
    for whom [N]."""
    sim = result.setup.simulation
    state, data = layouts.place(sim.layout, jax.tree.map(jnp.copy, result.state), sim.data)

    def announced(state: Any, data: Any) -> tuple:
        round_plan = sim.plan_round(state, data)
        server, usable = round_plan.server, jnp.append(round_plan.server.reported, True)
        # e_k
        mine = round_plan.observed.reshape(len(round_plan.observed), -1, server.embedded.shape[1])[
            :, -1
        ]
        wanted = jax.vmap(lambda e: preferred(e, server.embedded, usable, "paper"))(mine)
        return round_plan.info.policy, wanted, server.previous, round_plan.slots.ctx.id

    weights, wanted, peers, ids = layouts.as_numpy(jax.jit(announced)(state, data))
    return dict(weights=weights, wanted=wanted, peers=peers, ids=ids)


def heatmap_figures(found: dict[str, np.ndarray], group: np.ndarray) -> dict[str, float]:
    """Mean weight of one other client of the same group, of another group, and of the client
    itself; r3 beside uniform."""
    peers, ids, weights = found["peers"], found["ids"], found["weights"]
    other = peers[None] != ids[:, None]
    same = other & (group[peers][None] == group[ids][:, None])
    far = other & (group[peers][None] != group[ids][:, None])
    r3 = lambda action: float(
        np.mean(terms(np.float32(0), np.float32(0), action, found["wanted"], 1.0, "paper")[2])
    )
    itself = weights[:, -1] + np.where(other, 0, weights[:, :-1]).sum(1)
    return dict(
        same=float(weights[:, :-1][same].mean()),
        other=float(weights[:, :-1][far].mean()),
        itself=float(itself.mean()),
        wanted_same=float(found["wanted"][:, :-1][same].mean()),
        wanted_other=float(found["wanted"][:, :-1][far].mean()),
        r3=r3(weights),
        r3_uniform=r3(np.full_like(weights, 1 / weights.shape[1])),
    )


def run_silhouettes(result: Result, group: np.ndarray) -> dict[str, float]:
    """Of the run's own embeddings and of PCA of the same models, after its last round."""
    clients, server = result.state.clients, result.state.server
    options, env = result.setup.experiment.method.options, result.setup.simulation.env
    functions = mhae(
        int(options.get("side", 32)), int(options.get("embedding", 128)), dtype=env.dtype
    )
    seen = placed(jax.tree.map(jnp.asarray, server.frame), jnp.asarray(clients.own.features))
    points = jax.jit(functions.embed)(server.encoder, seen)
    raw = jnp.concatenate(
        [jnp.reshape(a, (len(group), -1)) for a in jax.tree.leaves(clients.resident["params"])], 1
    )
    return dict(
        silhouette_mhae=silhouette(np.asarray(points), group),
        silhouette_pca=silhouette(np.asarray(pca(raw, len(group) - 1)), group),
    )


# ---- embeddings ----------------------------------------------------------------------------------
def silhouette(points: np.ndarray, group: np.ndarray) -> float:
    """Mean over points of (b − a) / max(a, b): a, b the mean distances to its own and to the
    nearest other group.

    >>> round(silhouette(np.array([[0.0], [0.1], [5.0], [5.1]]), np.array([0, 0, 1, 1])), 2)
    0.98
    """
    apart = np.sqrt(np.square(points[:, None] - points[None]).sum(-1))
    values = []
    for i, g in enumerate(group):
        own = (group == g) & (np.arange(len(group)) != i)
        a = apart[i, own].mean()
        b = min(apart[i, group == h].mean() for h in set(group.tolist()) - {g})
        values.append((b - a) / max(a, b))
    return float(np.mean(values))


def trained_heads(fed: Federation, epochs: float, seed: int = 0) -> tuple[Tree, tuple[str, ...]]:
    """(parameters [N, …] of clients that trained alone from one common start, their layers in
    order)."""
    config = Experiment.of(
        "pfedrlla",
        options=dict(body="weighted", head="weighted"),
        epochs=epochs,
        seed=seed,
        **LOCAL,
    )
    setup = prepare(config, fed=fed, measure=False)
    return (
        jax.tree.map(jnp.asarray, setup.first_state().clients.resident["params"]),
        setup.simulation.env.model.dense,
    )


def embeddings(
    heads: Tree,
    groups: tuple[str, ...],
    group: np.ndarray,
    steps: int,
    side: int,
    embedding: int,
    basis: str,
) -> dict[str, Any]:
    """MHAE trained on the layers `groups` of nets [N, …], and PCA of the same nets: points,
    silhouettes, losses.

    Every third head is held out of the training. Taken is the pass after which these are
    reconstructed best: later the autoencoder learns the others by heart, one by one, and what heads
    of a group have in common is lost again. `mhae_last` is what the last pass would have given.
    """
    if basis == "shared":
        frame, seen = make_frame(heads, groups, side)
        seen = placed(frame, seen)
    else:
        seen = jax.vmap(lambda net: features(net, groups, side))(heads)
    functions = mhae(side, embedding)
    validation = jnp.arange(len(group)) % 3 == 2
    train = jax.jit(lambda e, x: functions.train(e, x, ~validation), donate_argnums=0)
    apart = jax.jit(
        lambda e, x: (
            jnp.where(validation, jax.vmap(lambda one: functions.loss(e.params, one))(x), 0).sum()
            / validation.sum()
        )
    )
    embed = jax.jit(functions.embed)
    encoder, losses, unseen = functions.init(seen.shape[1]), [], [np.inf]
    best = last = embed(encoder, seen)
    for _ in range(steps):
        encoder = train(encoder, seen)
        losses.append(float(encoder.loss))
        last = embed(encoder, seen)
        now = float(apart(encoder, seen))
        best = last if now < min(unseen) else best
        unseen.append(now)
    raw = jnp.concatenate([a.reshape(len(group), -1) for a in jax.tree.leaves(heads)], 1)
    dims = min(embedding, len(group) - 1)
    points = dict(
        mhae=best, mhae_last=last, projected=seen.reshape(len(group), -1), pca=pca(raw, dims)
    )
    flat = {f"{name}_2d": pca(value, 2) for name, value in points.items()}
    found = {name: np.asarray(value) for name, value in (points | flat).items()}
    alike = unit(found["mhae"]) @ unit(found["mhae"]).T
    same = group[:, None] == group
    return dict(
        points=found,
        losses=losses,
        held_out=unseen[1:],
        passes=int(np.argmin(unseen)),
        silhouette={k: silhouette(v, group) for k, v in found.items()},
        cosine_same=float(alike[same & ~np.eye(len(group), dtype=bool)].mean()),
        cosine_other=float(alike[~same].mean()),
        live=float((found["mhae"].std(0) > STILL).mean()),
    )


def unit(points: np.ndarray) -> np.ndarray:
    return points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
