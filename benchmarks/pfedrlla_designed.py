"""Federations designed so that the right answer is known: groups of clients that hold the same classes.

Used by `benchmarks.pfedrlla` and by the tests: the weight heat-map, the embeddings of five groups, and whether the agent is
alive. Real digits by default; any dataset by name.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.data.federation import Federation
from fedjax_sim.data.sources import load
from fedjax_sim.engine import layout as layouts
from fedjax_sim.errors import UserError
from fedjax_sim.methods.pfedrlla import mhae, pca
from fedjax_sim.methods.pfedrlla.encoder import matrices
from fedjax_sim.methods.pfedrlla.reward import preferred, terms
from fedjax_sim.runner.driver import Result
from fedjax_sim.runner.execute import run


def grouped(
    groups: int, per_group: int, rows: int = 100, dataset: str = "digits", data_dir: str | None = None, seed: int = 0
) -> Federation:
    """`groups · per_group` clients; those of group g hold the classes g, g + groups, … only. 65/15/20 train/val/test."""
    data = load(dataset, data_dir)
    if not 2 <= groups <= data.classes:
        raise UserError(f"groups {groups} is not allowed; use 2 to {data.classes}, the classes of '{dataset}'")
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    rng = np.random.default_rng([seed, 21])
    lists: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
    for g in range(groups):
        mine = rng.permutation(np.nonzero(y % groups == g)[0])
        size = min(rows, len(mine) // per_group)
        for k in range(per_group):
            own = mine[k * size : (k + 1) * size]
            parts = np.split(own, [int(0.65 * size), int(0.80 * size)])
            for split, part in zip(("train", "val", "test"), parts, strict=True):
                lists[split].append(part)
    return Federation.from_arrays(x, y, lists, classes=data.classes, name=f"{dataset} in {groups} groups")


def group_of(fed: Federation) -> np.ndarray:
    """[N] the group of each client, by the classes it holds."""
    held = [tuple(row > 0) for row in fed.label_counts()]
    names = sorted(set(held), reverse=True)
    return np.array([names.index(row) for row in held])


def trained(
    fed: Federation, rounds: int, *, regime: str = "pretrain", out: pathlib.Path | None = None, **more: Any
) -> Result:
    """A run of pFedRLLA with everybody in every round, always in the same order, as in the paper's heat-map."""
    options: dict[str, Any] = dict(
        model="lenet5",
        participation="1",
        cohorts=[list(range(fed.num_clients))],
        epochs=1.0,
        batch_size=16,
        lr=0.05,
        momentum=0.5,
        weight_decay=0.0,
        eval_every=rounds,
        evaluations=("resident",),
        chunk="1",
        devices="1",
    )
    return run("pfedrlla", fed, out=out, rounds=rounds, regime=regime, **{**options, **more})


def allocation(result: Result) -> dict[str, np.ndarray]:
    """Of the next round, without noise: weights and V_k [N, m+1], whose models are weighed [m], and for whom [N]."""
    sim = result.setup.simulation
    state, data = layouts.place(sim.layout, jax.tree.map(jnp.copy, result.state), sim.data)

    def announced(state: Any, data: Any) -> tuple:
        told = sim.orders(state, data)
        server, usable = told.server, jnp.append(told.server.reported, True)
        mine = told.observed.reshape(len(told.observed), -1, server.embedded.shape[1])[:, -1]  # e_k
        wanted = jax.vmap(lambda e: preferred(e, server.embedded, usable, "paper"))(mine)
        return told.info.policy, wanted, server.previous, told.slots.ctx.id

    weights, wanted, peers, ids = layouts.as_numpy(jax.jit(announced)(state, data))
    return dict(weights=weights, wanted=wanted, peers=peers, ids=ids)


def heatmap_figures(found: dict[str, np.ndarray], group: np.ndarray) -> dict[str, float]:
    """Mean weight of one other client of the same group, of another group, and of the client itself; r3 beside uniform."""
    peers, ids, weights = found["peers"], found["ids"], found["weights"]
    other = peers[None] != ids[:, None]
    same = other & (group[peers][None] == group[ids][:, None])
    far = other & (group[peers][None] != group[ids][:, None])
    r3 = lambda action: float(np.mean(terms(np.float32(0), np.float32(0), action, found["wanted"], 1.0, "paper")[2]))
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


# ---- embeddings ---------------------------------------------------------------------------------------------------
def silhouette(points: np.ndarray, group: np.ndarray) -> float:
    """Mean over points of (b − a) / max(a, b): a, b the mean distances to its own and to the nearest other group.

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


def embeddings(result: Result, steps: int, side: int = 32, embedding: int = 128) -> dict[str, Any]:
    """MHAE trained on the clients' heads, and PCA of the same heads: points, silhouettes, and the loss step by step."""
    clients, env = result.state.clients, result.setup.simulation.env
    seen, functions = jnp.asarray(clients.own.features), mhae(side, embedding)
    train = jax.jit(lambda e, x: functions.train(e, x, jnp.ones(x.shape[0], bool)), donate_argnums=0)
    encoder, losses = functions.init(seen.shape[1]), []
    for _ in range(steps):
        encoder = train(encoder, seen)
        losses.append(float(encoder.loss))
    heads = [a.reshape(a.shape[0], -1) for a in matrices(clients.resident["params"], env.model.dense) if a.ndim > 2]
    raw, group = jnp.concatenate(heads, 1), group_of(result.setup.fed)
    dims = min(embedding, len(group) - 1)
    points = dict(
        mhae=functions.embed(encoder, seen),
        pca_weights=pca(raw, dims),
        pca_projected=pca(seen.reshape(len(group), -1), dims),
    )
    flat = {f"{name}_2d": pca(value, 2) for name, value in points.items()}
    found = {name: np.asarray(value) for name, value in (points | flat).items()}
    return dict(points=found, group=group, losses=losses, silhouette={k: silhouette(v, group) for k, v in found.items()})
