"""FedAvg, FedProx, SCAFFOLD and Ditto for three rounds against a loop written in NumPy alone.

The loop below knows nothing of the engine: forward and backward pass of the mlp by hand, SGD in
PyTorch's order, the methods from their equations. Only the random draws are shared (see
`golden/draws.py`). Ragged clients, in double precision within 1e-9; float32 alone could hide a
wrong term behind rounding.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.draws import minibatches, reporting, stage_key
from numpy_loop import (
    BATCH,
    CLASSES,
    DECAY,
    LAYERS,
    LR,
    MOMENTUM,
    ROUNDS,
    SEED,
    each,
    gradients,
    mean_of,
    pull,
    sgd,
)

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import simulate
from fedjax_sim.local import losses, optim
from fedjax_sim.methods import make_method
from fedjax_sim.types import Env

SIZES = (3, 23, 8, 17, 11)  # of 5 clients: less than a batch, exactly one, ragged ends
COHORT = 3
DROPOUT = 0.5


# ---- the independent loop ------------------------------------------------------------------------


def reference(
    method: str, options: dict, fed: Federation, start: dict, draws, epochs: float
) -> dict:
    """`draws(t) -> reporting clients`; returns everything the method keeps, in float64."""
    images = (np.asarray(fed.x, np.float64) / 255 - fed.mean) / fed.std
    images, labels = images.reshape(len(images), -1), np.asarray(fed.y)
    sizes = [len(fed.client_rows(k)) for k in range(len(SIZES))]
    theta, control = start, each(np.zeros_like, start)
    own = [start if method == "ditto" else control for _ in sizes]
    train_loss = []

    def train(w, t, k, salt=0, epochs=epochs, **how):
        how = dict(momentum=MOMENTUM, decay=DECAY) | how
        return sgd(
            w,
            minibatches(fed, SEED, t, k, batch_size=BATCH, epochs=epochs, salt=salt),
            images,
            labels,
            **how,
        )

    for t in range(ROUNDS):
        cohort = draws(t)
        received, ends, changes, round_loss = theta, [], [], []
        for k in cohort:
            if method == "scaffold":
                c, ck = control, own[k]
                end, loss = train(
                    received,
                    t,
                    k,
                    momentum=0.0,
                    correction=lambda w, c=c, ck=ck: each(np.subtract, c, ck),
                )
                steps = len(minibatches(fed, SEED, t, k, batch_size=BATCH, epochs=epochs))
                own[k] = each(
                    lambda ck, c, a, b, s=steps: ck - c + (a - b) / (s * LR), ck, c, received, end
                )
                changes.append(each(np.subtract, own[k], ck))
            elif method == "fedprox":
                end, loss = train(received, t, k, correction=pull(options["mu"], received))
            else:
                end, loss = train(received, t, k)
            if method == "ditto":
                own[k], _ = train(
                    own[k],
                    t,
                    k,
                    salt=1,
                    epochs=options["personal_epochs"] or epochs,
                    correction=pull(options["lam"], received),
                )
            ends.append(end)
            round_loss.append(loss)
        train_loss.append(np.mean(round_loss) if cohort else 0.0)
        if not cohort:
            continue
        if method == "scaffold":
            average = mean_of(ends, [1] * len(ends))
            theta = each(
                lambda old, new: old + options["server_lr"] * (new - old), received, average
            )
            share = len(cohort) / len(sizes)  # n_t / N
            control = each(
                lambda c, d: c + share * d, control, mean_of(changes, [1] * len(changes))
            )
        else:
            theta = mean_of(ends, [sizes[k] for k in cohort])
    return dict(net=theta, own=own, control=control, loss=np.array(train_loss))


# ---- the engine ----------------------------------------------------------------------------------
def federation() -> Federation:
    rng = np.random.RandomState(0)
    total = sum(SIZES) + 6
    x = rng.randint(0, 256, (total, 3, 4, 2)).astype(np.uint8)
    y = rng.randint(0, CLASSES, total)
    cuts = np.split(rng.permutation(total), np.cumsum(SIZES))
    return Federation.from_arrays(x, y, {"train": cuts[:-1]}, test=cuts[-1], classes=CLASSES)


def initial(width: int = 24) -> dict:
    rng = np.random.RandomState(1)
    widths = (width, 7, 5, CLASSES)
    return {
        name: {"kernel": rng.normal(0, 0.5, (a, b)), "bias": rng.normal(0, 0.1, b)}
        for name, a, b in zip(LAYERS, widths[:-1], widths[1:], strict=True)
    }


@functools.cache  # tests that ask for the same program share its compilation
def engine(method: str, epochs: float, dtype, chunk: int, **options):
    """(simulation, maker of its first State) of the engine with the settings of this file."""
    fed = federation()
    model = models.build("mlp", fed.shape, CLASSES, dtype=dtype, hidden=(7, 5))
    env = Env(
        model=model,
        loss=losses.make_loss("ce", CLASSES),
        optimizer=optim.Sgd(MOMENTUM, DECAY),
        num_clients=len(SIZES),
        cohort=COHORT,
        batch_size=BATCH,
        epochs=epochs,
        max_epochs=epochs,
        dtype=dtype,
    )
    sim = simulate(
        make_method(method, **CASES.get(method, options)),
        env,
        fed,
        participation(),
        Layout(chunk),
        lr=optim.schedule("constant", LR, ROUNDS),
        evaluations=(),
        eval_every=ROUNDS,
        capacity=1,
    )
    net = {"params": jax.tree.map(lambda a: jnp.asarray(a, dtype), initial()), "batch_stats": {}}
    return sim, lambda: sim.init(SEED, net)


def participation() -> Participation:
    return Participation(COHORT, COHORT, tuple(range(len(SIZES))))


def kept(method: str, state) -> dict:
    """What a State holds, under the names of `reference`."""
    server = state.server
    out = dict(net=server.net["params"])
    if method == "scaffold":
        out |= dict(control=server.control, own=state.clients.own)
    if method == "ditto":
        out |= dict(own=state.clients.own["params"])
    return jax.tree.map(np.asarray, out)


def assert_same(ours: dict, theirs: dict, tolerance: float) -> None:
    for what, tree in ours.items():
        expected = theirs[what]
        if what == "own":  # [N, …] against a list of N trees
            expected = each(lambda *leaves: np.stack(leaves), *expected)
        for layer in LAYERS:
            for leaf in ("kernel", "bias"):
                np.testing.assert_allclose(
                    tree[layer][leaf],
                    expected[layer][leaf],
                    rtol=tolerance,
                    atol=tolerance,
                    err_msg=f"{what} {layer} {leaf}",
                )


CASES = {
    "fedavg": {},
    "fedprox": {"mu": 0.3},
    "scaffold": {"server_lr": 0.7},
    "ditto": {"lam": 0.4, "personal_epochs": 1.0},
}


@pytest.mark.parametrize(
    ("epochs", "chunk"), [(2.0, 1), (1.5, COHORT)], ids=["2 epochs", "1.5 epochs side by side"]
)
@pytest.mark.parametrize("method", CASES)
def test_three_rounds_in_double_precision(method, epochs, chunk):
    """Θ, and whatever the method keeps (c, c_k, v_k), with everybody reporting and with
    failures."""
    options, fed = CASES[method], federation()
    with jax.enable_x64(True):
        sim, start = engine(method, epochs, jnp.float64, chunk)
        for dropout in (0.0, DROPOUT):
            failed = [reporting(participation(), SEED, t, dropout)[1] for t in range(ROUNDS)]
            assert any(failed) == (dropout > 0)
            theirs = reference(
                method,
                options,
                fed,
                initial(),
                lambda t, p=dropout: reporting(participation(), SEED, t, p)[0],
                epochs,
            )
            data = sim.data._replace(dropout=np.float64(dropout))
            state, logs, _ = sim.run(start(), data, jnp.int32(ROUNDS))
            assert state.t == ROUNDS
            ours = kept(method, state)
            assert ours["net"]["fc"]["kernel"].dtype == np.float64
            assert_same(ours, theirs, 1e-9)
            np.testing.assert_allclose(logs["train_loss"], theirs["loss"], atol=1e-9)
            np.testing.assert_array_equal(logs["dropped"], [len(f) for f in failed])
        moved = max(
            np.abs(a["kernel"] - b["kernel"]).max()
            for a, b in ((ours["net"][name], initial()[name]) for name in LAYERS)
        )
        assert moved > 1e-2  # the comparison is not of two standstills


@pytest.mark.parametrize("method", CASES)
def test_three_rounds_in_single_precision(method):
    options, fed = CASES[method], federation()
    sim, start = engine(method, 2.0, jnp.float32, 1)
    theirs = reference(
        method, options, fed, initial(), lambda t: reporting(participation(), SEED, t)[0], 2.0
    )
    state, _, _ = sim.run(start(), sim.data, jnp.int32(ROUNDS))
    ours = kept(method, state)
    assert ours["net"]["fc"]["kernel"].dtype == np.float32
    assert_same(ours, theirs, 1e-4)


@pytest.mark.parametrize(("method", "chunk"), [("scaffold", COHORT), ("ditto", 1)])
def test_who_does_not_report_changes_nothing(method, chunk):
    """All fail: only the round of the State changes. One fails: exactly its own row stays."""
    sim, start = engine(method, 2.0, jnp.float32, chunk)
    before = jax.tree.map(np.asarray, start())
    after, _, _ = sim.run(start(), sim.data._replace(dropout=np.float32(1)), jnp.int32(ROUNDS))
    assert after.t == ROUNDS
    jax.tree.map(np.testing.assert_array_equal, after._replace(t=before.t), before)

    state = start()
    for t in range(ROUNDS):
        old = jax.tree.map(np.asarray, state.clients.own)
        state, _, _ = sim.run(state, sim.data._replace(dropout=np.float32(DROPOUT)), jnp.int32(1))
        active, _ = reporting(participation(), SEED, t, DROPOUT)
        for a, b in zip(jax.tree.leaves(state.clients.own), jax.tree.leaves(old), strict=True):
            moved = [k for k in range(len(SIZES)) if not np.array_equal(a[k], b[k])]
            assert moved == sorted(active)


def test_local_only_is_everybody_for_himself():
    """`local`: a sampled client continues from its own model; no other model reaches it."""
    fed = federation()
    images = ((np.asarray(fed.x, np.float64) / 255 - fed.mean) / fed.std).reshape(len(fed.x), -1)
    own = [initial() for _ in SIZES]
    for t in range(ROUNDS):
        for k in reporting(participation(), SEED, t)[0]:
            batches = minibatches(fed, SEED, t, k, batch_size=BATCH, epochs=2.0)
            own[k], _ = sgd(
                own[k], batches, images, np.asarray(fed.y), momentum=MOMENTUM, decay=DECAY
            )
    with jax.enable_x64(True):
        sim, start = engine("local", 2.0, jnp.float64, 1)
        state, _, _ = sim.run(start(), sim.data, jnp.int32(ROUNDS))
        assert_same(
            dict(own=jax.tree.map(np.asarray, state.clients.resident["params"])),
            dict(own=own),
            1e-9,
        )


def test_fine_tuning_is_training_from_the_global_model():
    """`fedavg_ft`: a client's own model is Θ after ft_epochs on its rows, at the round's learning
    rate."""
    from fedjax_sim.engine.keys import TRAIN
    from fedjax_sim.methods.fedavg import FINE_TUNE
    from fedjax_sim.types import Client, Ctx

    fed, k = federation(), 3
    images = ((np.asarray(fed.x, np.float64) / 255 - fed.mean) / fed.std).reshape(len(fed.x), -1)
    batches = minibatches(fed, SEED, 0, k, batch_size=BATCH, epochs=3.0, salt=FINE_TUNE)
    want, _ = sgd(initial(), batches, images, np.asarray(fed.y), momentum=MOMENTUM, decay=DECAY)
    with jax.enable_x64(True):
        sim, start = engine("fedavg_ft", 2.0, jnp.float64, 1, ft_epochs=3.0)
        key = jax.random.fold_in(stage_key(SEED, 0, TRAIN), k)
        ctx = Ctx(jnp.int32(k), key, jnp.int32(0), jnp.float64(2.0), jnp.float64(LR))
        tune = jax.jit(
            lambda server, data: sim.method.personal(sim.open(data), server, Client(), ctx)
        )
        net = tune(start().server, sim.data)
        assert_same(dict(net=jax.tree.map(np.asarray, net["params"])), dict(net=want), 1e-9)


def test_gradients_of_the_reference_by_finite_differences():
    """The hand-written backward pass is right by itself."""
    rng = np.random.RandomState(2)
    params, x, y = initial(), rng.normal(size=(6, 24)), rng.randint(0, CLASSES, 6)
    _, grads = gradients(params, x, y)
    direction = each(lambda a: rng.normal(size=a.shape), params)
    step = lambda h: gradients(each(lambda w, d: w + h * d, params, direction), x, y)[0]
    slope = sum(
        (grads[n][leaf] * direction[n][leaf]).sum() for n in LAYERS for leaf in ("kernel", "bias")
    )
    np.testing.assert_allclose((step(1e-6) - step(-1e-6)) / 2e-6, slope, rtol=1e-6)
