"""Local training of ONE client: which rows it uses, how many steps it makes, what is frozen, what
it keeps.

Expected values come from NumPy and closed forms. The model is the smallest mlp: what is tested is
the loop.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.errors import UserError
from fedjax_sim.local import (
    VMAP_AXIS,
    epoch_permutations,
    local_sgd,
    losses,
    optim,
    steps_for,
    stream,
)
from fedjax_sim.local.augment import crop_flip
from fedjax_sim.platform import lowering_for
from fedjax_sim.types import Client, Ctx, Env

BATCH, CLASSES = 4, 3
SIZES = (7, 4, 13, 1)
LR = 0.2


def federation(augment: str = "") -> Federation:
    rng = np.random.RandomState(0)
    total = sum(SIZES) + 3
    x, y = rng.normal(size=(total, 3, 2, 1)), rng.randint(0, CLASSES, total)
    cuts = np.split(rng.permutation(total), np.cumsum(SIZES))
    return Federation.from_arrays(
        x,
        y,
        {"train": cuts[:-1]},
        test=cuts[-1],
        classes=CLASSES,
        mean=0.0,
        std=1.0,
        augment=augment,
    )


def with_empty_client(fed: Federation) -> Federation:
    """The same with a further client that owns nothing."""
    table, size = fed.rows["train"], fed.size["train"]
    return dataclasses.replace(
        fed,
        rows={"train": np.concatenate([table, table[:1] * 0])},
        size={"train": np.append(size, 0).astype(np.int32)},
    )


def environment(
    loss: str = "ce",
    optimizer=None,
    dtype=jnp.float32,
    fed: Federation | None = None,
    **loss_options,
) -> Env:
    fed = jax.tree.map(jnp.asarray, fed or federation())
    loss_record = losses.make_loss(loss, CLASSES, **loss_options)
    counts = jnp.asarray(fed.label_counts(), dtype)
    return Env(
        model=models.build("mlp", fed.shape, CLASSES, dtype=dtype, hidden=(5,)),
        loss=loss_record,
        optimizer=optimizer or optim.Sgd(0.9, 0.01),
        num_clients=fed.num_clients,
        cohort=2,
        batch_size=BATCH,
        epochs=2.0,
        max_epochs=3.0,
        track_confusion=loss_record.uses_confusion,
        dtype=dtype,
        fed=fed,
        counts=counts,
    )


def context(env: Env, client, epochs=2.0, seed: int = 5) -> Ctx:
    """Of one client, or of several when `client` is a vector."""
    ids = jnp.asarray(client, jnp.int32)
    keys = jnp.vectorize(
        lambda i: jax.random.key_data(jax.random.fold_in(jax.random.key(seed), i)),
        signature="()->(k)",
    )
    return Ctx(
        ids,
        keys(ids),
        jnp.zeros_like(ids),
        jnp.broadcast_to(jnp.asarray(epochs, env.dtype), ids.shape),
        jnp.full(ids.shape, LR, env.dtype),
    )


def start_net(env: Env):
    return env.model.init(jax.random.key(1))


def arrays(tree):
    return jax.tree.map(np.asarray, tree)


def gradient_plug(value: float):
    """Replace the gradient by `value` everywhere, so that closed forms exist."""

    def gradient(grad_of, params, step, draw, carry):
        batch = draw(step)
        out, grads = grad_of(params, batch)
        return out, jax.tree.map(lambda g: jnp.full_like(g, value), grads), batch

    return gradient


# ---- how many steps ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n", "epochs", "steps"),
    [
        (7, 1.0, 2),
        (8, 1.0, 2),
        (9, 1.0, 3),
        (1, 1.0, 1),
        (13, 2.0, 8),  # ⌈n/4⌉ per epoch
        (13, 0.5, 2),
        (13, 1.25, 5),
        (7, 1.5, 3),
        (13, 1.1, 4),
        (13, 1.4, 6),  # fractions of an epoch, in nearest steps
        (7, 0.1, 1),
        (100, 0.001, 1),  # at least one step if there is any work
        (7, 0.0, 0),
        (0, 2.0, 0),
        (0, 0.0, 0),
    ],
)
def test_number_of_steps(n, epochs, steps):
    assert int(steps_for(environment(), jnp.int32(n), epochs)) == steps


@pytest.mark.parametrize(
    ("client", "epochs"), [(len(SIZES), 2.0), (2, 0.0)], ids=["no data", "no epochs"]
)
def test_nothing_to_do_leaves_everything_as_it_was(client, epochs):
    env = environment("c3e", fed=with_empty_client(federation()))
    net, before = start_net(env), Client(confusion=losses.init_confusion(CLASSES))
    after, done = jax.jit(lambda c: local_sgd(env, net, before, c))(context(env, client, epochs))
    assert int(done.steps) == 0 and float(done.loss) == 0 and float(done.accuracy) == 0
    jax.tree.map(np.testing.assert_array_equal, arrays((done.net, after)), arrays((net, before)))


# ---- what is seen --------------------------------------------------------------------------------
@pytest.mark.parametrize("wide", [False, True], ids=["32 bit", "64 bit"])
def test_every_epoch_is_a_fresh_permutation(wide):
    with jax.enable_x64(wide):
        for n, padded in ((1, 4), (5, 8), (8, 8), (37, 40)):
            permutations = np.asarray(
                epoch_permutations(jax.random.key(n), jnp.int32(n), padded, 6)
            )
            assert permutations.shape == (6, padded)
            np.testing.assert_array_equal(
                np.sort(permutations[:, :n], 1), np.tile(np.arange(n), (6, 1))
            )
        assert len({tuple(o[:37]) for o in permutations}) == 6


def test_permutations_do_not_depend_on_the_precision():
    permutations = lambda: np.asarray(epoch_permutations(jax.random.key(2), jnp.int32(9), 12, 3))
    narrow = permutations()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(permutations(), narrow)


def test_permutations_are_fair():
    """Each example comes first about equally often: 4000 epochs, 5 examples, 5 standard
    deviations."""
    first = np.asarray(epoch_permutations(jax.random.key(3), jnp.int32(5), 8, 4000))[:, 0]
    assert np.abs(np.bincount(first, minlength=5) - 800).max() < 5 * math.sqrt(4000 * 0.2 * 0.8)


def drawn(env: Env, client: int, steps: int, key_seed: int = 7):
    """(x, y, mask) of the first `steps` minibatches."""
    draw = jax.jit(
        lambda k: stream(env, context(env, client), jax.random.key(key_seed), 3.0)(k)[:3]
    )
    return [arrays(draw(jnp.int32(k))) for k in range(steps)]


@pytest.mark.parametrize("client", range(len(SIZES)))
def test_every_example_exactly_once_per_epoch(client):
    fed, env = federation(), environment()
    n, rows = SIZES[client], federation().client_rows(client)
    per_epoch = math.ceil(n / BATCH)
    batches, epochs = drawn(env, client, 3 * per_epoch), []
    for epoch in range(3):
        part = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        masks = np.concatenate([m for _, _, m in part])
        assert masks.sum() == n and masks[:n].all()  # only the end of the last batch is padding
        seen = np.concatenate([x[m] for x, _, m in part]).reshape(n, -1)
        labels = np.concatenate([y[m] for _, y, m in part])
        mine = np.asarray(fed.x, np.float32)[rows].reshape(n, -1)
        which = [int(np.flatnonzero((mine == one).all(1))[0]) for one in seen]
        assert sorted(which) == list(range(n))
        np.testing.assert_array_equal(labels, np.asarray(fed.y)[rows][which])
        epochs.append(tuple(which))
    if n >= 7:
        assert len(set(epochs)) > 1


def test_normalisation_when_gathered():
    rng = np.random.RandomState(4)
    x = rng.randint(0, 256, (6, 2, 2, 2)).astype(np.uint8)
    fed = Federation.from_arrays(
        x, np.arange(6) % 3, {"train": [[0, 1, 2, 3]]}, test=[4, 5], mean=[0.2, 0.4], std=[0.5, 2.0]
    )
    ((seen, _, _),) = drawn(environment(fed=fed), 0, 1)
    expected = (x[:4] / 255 - np.array([0.2, 0.4])) / np.array([0.5, 2.0])
    np.testing.assert_allclose(
        np.sort(seen.reshape(4, -1), 0), np.sort(expected.reshape(4, -1), 0), atol=1e-6
    )


@pytest.mark.parametrize("client", [0, 3])
def test_nothing_of_other_clients_is_read(client):
    """Ragged last batches: even NaN in every row the client does not own leaves its result
    bit-equal."""
    fed = federation()
    others = np.setdiff1d(np.arange(len(fed.x)), fed.client_rows(client))
    poisoned = fed.x.copy()
    poisoned[others] = np.nan
    env = environment()
    train = jax.jit(
        lambda x, c: local_sgd(
            dataclasses.replace(env, fed=dataclasses.replace(env.fed, x=x)),
            start_net(env),
            Client(),
            c,
        )[1]
    )
    clean, dirty = (arrays(train(jnp.asarray(x), context(env, client))) for x in (fed.x, poisoned))
    assert np.isfinite(dirty.loss) and dirty.steps > 0
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


# ---- how it moves --------------------------------------------------------------------------------
def test_momentum_in_closed_form():
    """A constant gradient g: v_s = g(1 − m^s)/(1 − m), w = w₀ − η Σ v_s; the velocity starts at 0
    in every call."""
    momentum, g, steps = 0.9, 0.25, 8  # 13 examples, batch 4, 2 epochs
    env = environment(optimizer=optim.Sgd(momentum))
    net, train = (
        start_net(env),
        jax.jit(lambda net, c: local_sgd(env, net, Client(), c, gradient=gradient_plug(g))[1]),
    )
    way = LR * sum(g * (1 - momentum**s) / (1 - momentum) for s in range(1, steps + 1))
    once = train(net, context(env, 2))
    twice = train(once.net, context(env, 2))
    assert int(once.steps) == steps
    for a, b, c in zip(
        *(jax.tree.leaves(arrays(n["params"])) for n in (net, once.net, twice.net)), strict=True
    ):
        np.testing.assert_allclose(a - b, way, rtol=1e-5)
        np.testing.assert_allclose(b - c, way, rtol=1e-5)


def test_weight_decay_of_some_groups():
    """Without gradient, w shrinks by (1 − η·wd) per step where the group decays and stands still
    elsewhere."""
    decay, steps = 0.1, 4
    shrink = (1 - LR * decay) ** steps
    groups = environment().model.groups
    for names in ("all", "fc1", "fc", "fc1+fc"):
        env = environment(optimizer=optim.Sgd(0.0, decay, optim.decay_groups(names, groups)))
        net = start_net(env)
        done = jax.jit(
            lambda c, env=env, net=net: local_sgd(
                env, net, Client(), c, gradient=gradient_plug(0.0)
            )[1]
        )(context(env, 0))
        for group in groups:
            factor = shrink if names == "all" or group in names.split("+") else 1.0
            for a, b in zip(
                jax.tree.leaves(net["params"][group]),
                jax.tree.leaves(done.net["params"][group]),
                strict=True,
            ):
                np.testing.assert_allclose(b, np.asarray(a) * factor, rtol=1e-5)
    with pytest.raises(UserError, match="conv1"):
        optim.decay_groups("conv1", groups)


def test_decay_enters_the_momentum():
    """Coupled, as in PyTorch: g + wd·w feeds the velocity. Two steps by hand for every weight."""
    momentum, decay, g = 0.5, 0.2, 0.1
    env = environment(optimizer=optim.Sgd(momentum, decay))
    net = start_net(env)
    done = jax.jit(
        lambda c: local_sgd(env, net, Client(), c, gradient=gradient_plug(g), epochs=1)[1]
    )(context(env, 0))
    assert int(done.steps) == 2
    for w, ours in zip(
        jax.tree.leaves(arrays(net["params"])), jax.tree.leaves(done.net["params"]), strict=True
    ):
        v = g + decay * w
        first = w - LR * v
        v = momentum * v + g + decay * first
        np.testing.assert_allclose(ours, first - LR * v, rtol=1e-5, atol=1e-6)


def test_frozen_groups():
    """A frozen group stands still, bit for bit, also against decay and momentum; the others move as
    if it were fixed."""
    env = environment()
    net = start_net(env)
    alone = jax.jit(
        lambda net, c: local_sgd(env, net, Client(), c, trainable=("fc",))[1].net["params"]
    )
    after = arrays(alone(net, context(env, 2)))
    jax.tree.map(np.testing.assert_array_equal, after["fc1"], arrays(net["params"]["fc1"]))
    assert np.abs(after["fc"]["kernel"] - net["params"]["fc"]["kernel"]).max() > 1e-3

    # expected: softmax regression on fixed features, in NumPy
    w, b = (np.asarray(net["params"]["fc"][k], np.float64) for k in ("kernel", "bias"))
    hidden = {k: np.asarray(v, np.float64) for k, v in net["params"]["fc1"].items()}
    vw, vb = np.zeros_like(w), np.zeros_like(b)
    ctx = context(env, 2)
    draw = jax.jit(
        lambda k: stream(env, ctx, jax.random.fold_in(ctx.key, 0), env.max_epochs)(k)[:3]
    )
    for k in range(8):
        x, y, mask = arrays(draw(jnp.int32(k)))
        x, y = x[mask].reshape(mask.sum(), -1).astype(np.float64), y[mask]
        h = np.maximum(x @ hidden["kernel"] + hidden["bias"], 0)
        p = softmax(h @ w + b)
        p[np.arange(len(y)), y] -= 1
        vw, vb = 0.9 * vw + h.T @ p / len(y) + 0.01 * w, 0.9 * vb + p.mean(0) + 0.01 * b
        w, b = w - LR * vw, b - LR * vb
    np.testing.assert_allclose(after["fc"]["kernel"], w, atol=1e-5)
    np.testing.assert_allclose(after["fc"]["bias"], b, atol=1e-5)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_passes_of_one_round_differ_by_their_salt():
    env = environment()
    net = start_net(env)
    end = jax.jit(
        lambda c, salt: local_sgd(env, net, Client(), c, salt=salt)[1].net["params"]["fc"]["kernel"]
    )
    a, again, b = (np.asarray(end(context(env, 2), salt)) for salt in (0, 0, 1))
    np.testing.assert_array_equal(a, again)
    assert np.abs(a - b).max() > 1e-6


# ---- side by side --------------------------------------------------------------------------------
def test_clients_of_different_length_equal_clients_one_by_one():
    """Clients that have finished stand still: nets, loss, accuracy, steps and loss statistics, in
    double precision."""
    with jax.enable_x64(True):
        env = environment("c3e", dtype=jnp.float64, warmup=4.0)
        net, client = start_net(env), Client(confusion=losses.init_confusion(CLASSES, jnp.float64))
        clients, epochs = [0, 1, 2, 3, 2], [2.0, 1.0, 3.0, 0.5, 0.0]
        ctx = context(env, clients)._replace(epochs=jnp.array(epochs))
        wide = dataclasses.replace(env, vmap_width=len(clients))
        together = arrays(
            jax.jit(jax.vmap(lambda c: local_sgd(wide, net, client, c), axis_name=VMAP_AXIS))(ctx)
        )
        alone = jax.jit(lambda c: local_sgd(env, net, client, c))
        for i in range(len(clients)):
            one = arrays(alone(jax.tree.map(lambda a: a[i], ctx)))
            assert together[1].steps[i] == one[1].steps
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a[i], b, rtol=1e-11, atol=1e-12),
                together,
                one,
            )
        assert len(set(together[1].steps.tolist())) >= 4
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a[-1], b), together[1].net, arrays(net)
        )


# ---- loss statistics -----------------------------------------------------------------------------
def test_running_confusion_of_c3e():
    """Conf ← μ Conf + (1−μ)(Yᵀ softmax(Z) + ε), Count likewise, on the same batches, carried on
    from the stored one."""
    with jax.enable_x64(True):
        env = environment("c3e", dtype=jnp.float64)
        ctx, net, decay, eps = context(env, 2), start_net(env), env.loss.decay, 1e-3
        rng = np.random.RandomState(6)
        stored = losses.Confusion(
            jnp.asarray(rng.uniform(1, 2, (CLASSES, CLASSES))),
            jnp.asarray(rng.uniform(1, 2, CLASSES)),
            jnp.asarray(30.0),
        )
        # rate 0: the net stays what it is, so the logits are those of the initial net
        train = jax.jit(
            lambda c, track: local_sgd(env, net, Client(confusion=stored), c, lr=0.0, track=track),
            static_argnums=1,
        )
        kept, _ = arrays(train(ctx, True))
        conf, count = np.asarray(stored.conf), np.asarray(stored.count)
        draw = jax.jit(
            lambda k: stream(env, ctx, jax.random.fold_in(ctx.key, 0), env.max_epochs)(k)[:3]
        )
        p = arrays(net["params"])
        for k in range(8):
            x, y, mask = arrays(draw(jnp.int32(k)))
            x, y = x[mask].reshape(mask.sum(), -1), y[mask]
            hidden = np.maximum(x @ p["fc1"]["kernel"] + p["fc1"]["bias"], 0)
            onehot = np.eye(CLASSES)[y]
            conf = decay * conf + (1 - decay) * (
                onehot.T @ softmax(hidden @ p["fc"]["kernel"] + p["fc"]["bias"]) + eps
            )
            count = decay * count + (1 - decay) * (onehot.sum(0) + eps)
        np.testing.assert_allclose(kept.confusion.conf, conf, atol=1e-12)
        np.testing.assert_allclose(kept.confusion.count, count, atol=1e-12)
        assert kept.confusion.seen == 30 + 8 * BATCH / 2
        untracked, _ = arrays(train(ctx, False))
        jax.tree.map(np.testing.assert_array_equal, untracked.confusion, arrays(stored))


def test_loss_and_accuracy_are_means_over_examples():
    """At rate 0: the mean over all examples seen, so the short last batch counts by its size."""
    env = environment()
    net, fed = start_net(env), federation()
    done = arrays(jax.jit(lambda c: local_sgd(env, net, Client(), c, lr=0.0)[1])(context(env, 2)))
    rows, p = fed.client_rows(2), arrays(net["params"])
    x, y = np.asarray(fed.x)[rows].reshape(len(rows), -1), np.asarray(fed.y)[rows]
    prob = softmax(
        np.maximum(x @ p["fc1"]["kernel"] + p["fc1"]["bias"], 0) @ p["fc"]["kernel"]
        + p["fc"]["bias"]
    )
    np.testing.assert_allclose(done.loss, -np.log(prob[np.arange(len(y)), y]).mean(), rtol=1e-5)
    np.testing.assert_allclose(done.accuracy, (prob.argmax(1) == y).mean(), rtol=1e-6)


# ---- learning rate over rounds -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant", lambda t: 0.3),
        ("step:every=4,gamma=0.5", lambda t: 0.3 * 0.5 ** (t // 4)),
        ("step", lambda t: 0.3 * 0.1 ** (t // 30)),
        ("cosine", lambda t: 0.3 * (1 + math.cos(math.pi * min(t, 10) / 10)) / 2),
        ("cosine:end=0.1", lambda t: 0.1 + 0.2 * (1 + math.cos(math.pi * min(t, 10) / 10)) / 2),
    ],
)
def test_schedules(text, expected):
    rate = optim.schedule(text, 0.3, 10)
    for t in (0, 1, 3, 4, 5, 9, 10, 12, 31):
        np.testing.assert_allclose(float(rate(jnp.float32(t))), expected(t), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "text", ["linear", "step:each=3", "step:every=0", "cosine:end", "constant:gamma=1"]
)
def test_schedules_that_do_not_exist(text):
    with pytest.raises(UserError):
        optim.schedule(text, 0.3, 10)


# ---- augmentation --------------------------------------------------------------------------------
def test_crop_flip():
    """Every result is one of the 2·9·9 crops and flips of its own zero-padded image; a function of
    the key alone."""
    rng = np.random.RandomState(8)
    x = rng.normal(size=(6, 5, 7, 2)).astype(np.float32)
    augmented = jax.jit(crop_flip)
    out = np.asarray(augmented(jax.random.key(0), x))
    assert out.shape == x.shape and out.dtype == x.dtype
    choices = []
    for image, got in zip(np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0))), out, strict=True):
        crops = {
            (i, j, flip): image[i : i + 5, j : j + 7][:, ::flip]
            for i in range(9)
            for j in range(9)
            for flip in (1, -1)
        }
        found = [name for name, crop in crops.items() if np.array_equal(crop, got)]
        assert found
        choices.append(found[0])
    assert len(set(choices)) > 1  # examples are treated one by one
    np.testing.assert_array_equal(out, augmented(jax.random.key(0), x))
    assert np.abs(out - np.asarray(augmented(jax.random.key(1), x))).max() > 0
    with lowering_for("cuda"):  # the accelerators' form
        np.testing.assert_array_equal(
            out, jax.jit(lambda key, x: crop_flip(key, x))(jax.random.key(0), x)
        )
    keys = jax.random.split(jax.random.key(0), 3)  # clients side by side
    beside = jax.jit(jax.vmap(crop_flip))(keys, np.stack([x] * 3))
    np.testing.assert_array_equal(beside, [augmented(key, x) for key in keys])


def test_augmentation_is_part_of_the_minibatches():
    """Keyed by (client's key, step): the same step is the same picture, labels and mask are
    untouched."""
    plain, augmented = environment(), environment(fed=federation("crop_flip"))
    clean = drawn(plain, 0, 2)
    once, again, other = (drawn(augmented, 0, 2, seed) for seed in (7, 7, 8))
    for (x0, y0, m0), (x1, y1, m1), (x2, _, _) in zip(clean, once, again, strict=True):
        assert x1.shape == x0.shape
        np.testing.assert_array_equal(y1, y0)
        np.testing.assert_array_equal(m1, m0)
        np.testing.assert_array_equal(x1, x2)
    assert any(np.abs(a[0] - b[0]).max() > 0 for a, b in zip(clean, once, strict=True))
    assert any(np.abs(a[0] - b[0]).max() > 0 for a, b in zip(other, once, strict=True))
