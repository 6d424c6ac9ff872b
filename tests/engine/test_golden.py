"""lenet5 and cnn4 for three rounds against values from a PyTorch loop; see golden/make_golden.py,
which wrote them.

Within 1e-9 in double precision, in every form of convolution (Winograd's transforms lose a few
digits: 1e-7).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import settings
from paths import GOLDEN_FOLDER

from fedjax_sim import models
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.simulation import simulate
from fedjax_sim.local import losses, optim
from fedjax_sim.methods import make_method
from fedjax_sim.types import Env

FOLDER = GOLDEN_FOLDER

# every form once per layer shape, every method at least once per model; few programs, because
# compiling them is what this file spends its time on. XLA's own convolution is slow inside a loop:
# only in the small model.
RUNS = [
    ("lenet5", "fedavg", "lax"),
    ("lenet5", "fedavg", "patches"),
    ("lenet5", "fedavg", "winograd"),
    ("lenet5", "fedprox", "auto"),
    ("lenet5", "scaffold", "block"),
    ("lenet5", "ditto", "patches"),
    ("cnn4", "fedavg", "auto"),
    ("cnn4", "fedprox", "block"),
    ("cnn4", "scaffold", "patches"),
    ("cnn4", "ditto", "patches"),
]


def golden(model: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{model}.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def three_rounds(
    model: str, method: str, conv: str, dtype, chunk: int = 1
) -> dict[str, np.ndarray]:
    """The engine's run, under the names of the golden file."""
    fed = settings.federation()
    net = {
        "params": jax.tree.map(lambda a: jnp.asarray(a, dtype), settings.initial(model)),
        "batch_stats": {},
    }
    env = Env(
        model=models.build(model, fed.shape, settings.CLASSES, dtype=dtype, conv=conv),
        loss=losses.make_loss("ce", settings.CLASSES),
        optimizer=optim.Sgd(settings.MOMENTUM, settings.DECAY),
        num_clients=len(settings.SIZES),
        cohort=settings.COHORT,
        batch_size=settings.BATCH,
        epochs=settings.EPOCHS,
        max_epochs=settings.EPOCHS,
        dtype=dtype,
    )
    sim = simulate(
        make_method(method, **settings.METHODS[method]),
        env,
        fed,
        settings.participation(),
        Layout(chunk),
        lr=optim.schedule("constant", settings.LR, settings.ROUNDS),
        evaluations=(),
        eval_every=settings.ROUNDS,
        capacity=1,
    )
    state, _, _ = sim.run(sim.init(settings.SEED, net), sim.data, jnp.int32(settings.ROUNDS))
    state = jax.tree.map(np.asarray, state)
    out = {"net": settings.digest(state.server.net["params"], 40)}
    if method in ("scaffold", "ditto"):
        own = state.clients.own if method == "scaffold" else state.clients.own["params"]
        out["own"] = np.stack(
            [
                settings.digest(jax.tree.map(lambda a: a[k], own), 6)
                for k in range(len(settings.SIZES))
            ]
        )
    if method == "scaffold":
        out["control"] = settings.digest(state.server.control, 40)
    return {f"{method}/{name}": value for name, value in out.items()}


def assert_golden(ours: dict[str, np.ndarray], model: str, tolerance: float) -> None:
    stored = golden(model)
    np.testing.assert_array_equal(
        stored["batches"],
        settings.batches_of_the_run(),
        err_msg=(
            "the random draws are no longer those of the golden files; check why, then run"
            " golden/make_golden.py"
        ),
    )
    for name, value in ours.items():
        np.testing.assert_allclose(
            value, stored[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize(("model", "method", "conv"), RUNS)
def test_three_rounds_in_double_precision(model, method, conv):
    with jax.enable_x64(True):
        uses_winograd = conv == "winograd" or (conv == "auto" and model == "cnn4")
        assert_golden(
            three_rounds(model, method, conv, jnp.float64), model, 1e-7 if uses_winograd else 1e-9
        )


def test_clients_side_by_side():
    with jax.enable_x64(True):
        assert_golden(
            three_rounds("lenet5", "fedavg", "auto", jnp.float64, chunk=settings.COHORT),
            "lenet5",
            1e-9,
        )


def test_single_precision():
    """A smoke check: one near-tied pooling window may choose otherwise, so only the norms are held
    to much."""
    ours = three_rounds("lenet5", "fedavg", "auto", jnp.float32)["fedavg/net"]
    stored = golden("lenet5")["fedavg/net"]
    np.testing.assert_allclose(ours[:, 0], stored[:, 0], rtol=1e-3)
    np.testing.assert_allclose(ours, stored, atol=5e-3)


def test_training_moved_every_group():
    """The golden values are not those of a standstill."""
    for model in settings.WEIGHTS:
        start, end = settings.digest(settings.initial(model), 40), golden(model)["fedavg/net"]
        assert (np.abs(end - start).max(1) > 1e-3).all()
