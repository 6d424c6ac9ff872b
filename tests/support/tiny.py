"""A tiny federation and a compiled method on it, shared by the contract and the layout tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from dummies import DUMMIES

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.layout import Layout, make_layout, place
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.hooks import Method
from fedjax_sim.local import losses, optim
from fedjax_sim.methods import make_method
from fedjax_sim.models import build
from fedjax_sim.types import Env

N, M, CLASSES, BATCH = 6, 4, 3, 4
SIZES = (9, 3, 14, 1, 7, 12)  # ragged; one client has a single example


@functools.cache
def federation() -> Federation:
    """Float images (so that a NaN can be planted), ragged clients with val and test rows, a server
    validation set."""
    rng = np.random.default_rng(7)
    total = sum(SIZES) + N * 6 + 20
    y = rng.integers(0, CLASSES, total)
    x = (rng.standard_normal((total, 4, 4, 1)) + y[:, None, None, None]).astype(np.float32)
    cut = np.split(rng.permutation(total), np.cumsum([*SIZES, *[3] * N, *[3] * N, 8]))
    rows = {"train": cut[:N], "val": cut[N : 2 * N], "test": cut[2 * N : 3 * N]}
    return Federation.from_arrays(
        x,
        y,
        rows,
        test=cut[3 * N + 1],
        server_val=cut[3 * N],
        classes=CLASSES,
        mean=0.0,
        std=1.0,
        name="tiny",
    )


@functools.cache
def simulation(
    name: str,
    chunk: int = 1,
    devices: int = 1,
    loss: str = "ce",
    model: str = "mlp",
    stored: str = "all",
    around: Callable[[Method], Method] = lambda method: method,
    **options,
) -> Simulation:
    """around: what is put around the method."""
    fed = federation()
    method = around(DUMMIES[name]() if name in DUMMIES else make_method(name, **options))
    net_of = build(model, fed.shape, fed.classes, **({"hidden": (5,)} if model == "mlp" else {}))
    net_of = method.extend(net_of)
    loss_record = losses.make_loss(loss, CLASSES)
    env = Env(
        net_of,
        loss_record,
        optim.Sgd(0.9, 5e-4),
        N,
        M,
        BATCH,
        2.0,
        max(2.0, method.max_epochs),
        rounds=8,
        track_confusion=loss_record.uses_confusion or "confusion" in method.needs,
    )
    layout = make_layout(chunk, devices)
    return simulate(
        method,
        env,
        fed,
        Participation(M, M, tuple(range(N))),
        layout,
        lr=optim.schedule("constant", 0.05, 8),
        eval_every=2,
        capacity=2,
        stored=stored,
        evaluations=("global", "personal", "global@clients", "resident"),
    )


def traced_once(sim: Simulation) -> Simulation:
    """The same, and an error where its rounds are traced a second time."""
    chex.clear_trace_counter()
    run = chex.assert_max_traces(sim.run.__wrapped__, n=1)
    return dataclasses.replace(sim, run=jax.jit(run, donate_argnums=0))


def start(sim: Simulation, seed: int = 0, data=None):
    """(state, data) placed where the layout wants them; the state is fresh, since `run` donates
    it."""
    net = sim.env.model.init(jax.random.key(seed))
    return place(sim.layout, sim.init(seed, net), sim.data if data is None else data)


def arrays(tree) -> list[np.ndarray]:
    return [np.asarray(a) for a in jax.tree.leaves(tree)]


def same_bits(a, b) -> bool:
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(arrays(a), arrays(b), strict=True)
    )


def assert_close(a, b, tolerance: float = 1e-5) -> None:
    """Leaf by leaf; a failure names the leaf and prints the difference."""
    (left, tree), (right, other) = (
        jax.tree_util.tree_flatten_with_path(a),
        jax.tree_util.tree_flatten_with_path(b),
    )
    assert tree == other, f"different trees:\n{tree}\n{other}"
    for (path, x), (_, y) in zip(left, right, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance, err_msg=name
        )


def close(a, b, tolerance: float = 1e-5) -> bool:
    return all(
        np.allclose(x, y, rtol=tolerance, atol=tolerance)
        for x, y in zip(arrays(a), arrays(b), strict=True)
    )


__all__ = [
    "BATCH",
    "CLASSES",
    "SIZES",
    "Layout",
    "M",
    "N",
    "arrays",
    "assert_close",
    "close",
    "federation",
    "jnp",
    "same_bits",
    "simulation",
    "start",
]
