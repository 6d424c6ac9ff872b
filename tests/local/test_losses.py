"""Local losses against a transcription in NumPy (float64, loops) and values of PyTorch."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.stored import torch_values

from fedjax_sim.errors import UserError
from fedjax_sim.local import losses

BATCH, CLASSES = 7, 5


@contextlib.contextmanager
def double_precision():
    with jax.enable_x64(True):
        yield


def example(seed=0, scale=2.0):
    """logits, labels, mask, counts (class 3 absent), confusion: all NumPy float64."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(BATCH, CLASSES)) * scale
    labels = np.array([0, 1, 2, 4, 1, 0, 2])
    mask = np.array([1, 1, 0, 1, 1, 1, 0], bool)
    counts = np.array([40.0, 3.0, 17.0, 0.0, 1.0])
    confusion = (rng.gamma(1.0, size=(CLASSES, CLASSES)), rng.gamma(1.0, size=CLASSES), 1500.0)
    return logits, labels, mask, counts, confusion


# ---- the transcription: one example at a time, plain Python sums ---------------------------------


def log_softmax(z):
    m = max(z)
    return z - m - np.log(sum(np.exp(v - m) for v in z))


def reference(
    name,
    z,
    y,
    n,
    confusion,
    *,
    gamma=2.0,
    tau=0.5,
    beta=0.9999,
    smoothing=0.1,
    b=0.95,
    beta_c=0.5,
    lam_mu=0.95,
    lam_nu=0.05,
    warmup=1000.0,
    prior=True,
    row_norm=True,
):
    """The loss of one example."""
    classes = len(z)
    nll = -log_softmax(z)[y]
    if name == "ce":
        return nll
    if name == "focal":
        return (1 - np.exp(-nll)) ** gamma * nll
    if name == "fedlc":
        return -log_softmax(
            np.array([z[c] - tau * max(n[c], 1e-8) ** -0.25 for c in range(classes)])
        )[y]
    if name == "cb":
        w = np.array([(1 - beta) / (1 - beta ** n[c]) if n[c] > 0 else 0.0 for c in range(classes)])
        return (w * classes / w.sum())[y] * nll
    if name == "ls":
        t = [1 - smoothing if c == y else smoothing / (classes - 1) for c in range(classes)]
        return -sum(a * v for a, v in zip(t, log_softmax(z), strict=True))
    conf, count, seen = confusion
    pi = np.maximum(count / count.sum(), 1e-8)
    zp = np.array(
        [
            z[j] + (b * np.log(pi[j]) * np.exp(conf[y, j] / conf.sum()) if prior else 0.0)
            for j in range(classes)
        ]
    )
    a = 0.5 * (conf + conf.T)
    delta = a / a.sum(1)[:, None] if row_norm else a.copy()
    np.fill_diagonal(delta, 0)
    delta /= delta.max()
    m = np.exp(a) / np.exp(a).sum(1)[:, None]
    np.fill_diagonal(m, 0)
    m /= m.max()
    if seen < warmup:
        delta[:] = 0
    log_part = -zp[y] + np.log(sum(np.exp(zp[j] + delta[y, j]) for j in range(classes)))
    conf_part = -log_softmax(z - beta_c * m[y])[y] if seen >= warmup else 0.0
    return lam_mu * log_part + lam_nu * conf_part


def reference_mean(name, logits, labels, mask, counts, confusion, **options):
    return np.mean(
        [
            reference(name, logits[i], labels[i], counts, confusion, **options)
            for i in range(len(labels))
            if mask[i]
        ]
    )


CASES = [
    ("ce", {}),
    ("focal", {}),
    ("focal", {"gamma": 0.5}),
    ("fedlc", {}),
    ("fedlc", {"tau": 1.0}),
    ("cb", {}),
    ("cb", {"beta": 0.9}),
    ("cb", {"beta": 0.0}),
    ("ls", {}),
    ("ls", {"smoothing": 0.3}),
    ("c3e", {}),
    ("c3e", {"warmup": 2000.0}),
    ("c3e", {"prior": False}),
    ("c3e", {"row_norm": False}),
    ("c3e", {"b": 0.85, "beta_c": 0.85, "lam_mu": 0.9, "lam_nu": 0.9, "warmup": 1500.0}),
]


def to_confusion(confusion):
    return losses.Confusion(*(jnp.asarray(part) for part in confusion))


@pytest.mark.parametrize("name,options", CASES)
def test_value_and_gradient_match_the_transcription(name, options):
    logits, labels, mask, counts, confusion = example()
    with double_precision():
        loss = losses.make_loss(name, CLASSES, **options)
        stats = to_confusion(confusion)
        value = lambda z: loss.value(
            z, jnp.asarray(labels), jnp.asarray(mask), jnp.asarray(counts), stats
        )
        got, slope = jax.jit(jax.value_and_grad(value))(jnp.asarray(logits))
        assert got.dtype == slope.dtype == jnp.float64
    want = reference_mean(name, logits, labels, mask, counts, confusion, **options)
    np.testing.assert_allclose(got, want, rtol=1e-10)
    numeric = np.zeros_like(logits)
    for where in np.ndindex(logits.shape):
        up, down = logits.copy(), logits.copy()
        up[where] += 1e-5
        down[where] -= 1e-5
        numeric[where] = (
            reference_mean(name, up, labels, mask, counts, confusion, **options)
            - reference_mean(name, down, labels, mask, counts, confusion, **options)
        ) / 2e-5
    np.testing.assert_allclose(slope, numeric, atol=1e-8)


def test_cross_entropy_and_label_smoothing_match_torch():
    """Two masked rows between PyTorch's five: they change nothing, and get no slope."""
    want = torch_values("losses")
    mask = np.array([1, 1, 0, 1, 1, 1, 0], bool)
    logits, labels = np.full((BATCH, CLASSES), 7.0), np.full(BATCH, 2)
    logits[mask], labels[mask] = want["logits"], want["labels"]
    with double_precision():
        args = [jnp.asarray(a) for a in (logits, labels, mask, np.ones(CLASSES))]
        got, slope = jax.jit(jax.value_and_grad(losses.make_loss("ce", CLASSES).value))(*args, ())
        # torch spreads its s over all classes: s' = s C/(C−1) on the wrong ones makes them the same
        smooth = losses.make_loss(
            "ls", CLASSES, smoothing=float(want["smoothing"]) * (CLASSES - 1) / CLASSES
        )
        smoothed = smooth.value(*args, ())
    np.testing.assert_allclose(got, want["ce"], rtol=1e-12)
    np.testing.assert_allclose(slope[mask], want["ce/slope"], atol=1e-12)
    assert not np.asarray(slope)[~mask].any()
    np.testing.assert_allclose(smoothed, want["ls"], rtol=1e-12)


@pytest.mark.parametrize(
    "name,options,counts",
    [
        ("focal", {"gamma": 0.0}, None),
        ("ls", {"smoothing": 0.0}, None),
        ("fedlc", {"tau": 0.0}, None),
        ("cb", {}, np.full(CLASSES, 12.0)),
        ("c3e", {"prior": False, "lam_mu": 1.0, "warmup": float("inf")}, None),
    ],
)
def test_reduces_to_cross_entropy(name, options, counts):
    logits, labels, mask, drawn, confusion = example(1)
    args = [jnp.asarray(a) for a in (logits, labels, mask, drawn if counts is None else counts)]
    plain = jax.jit(losses.make_loss("ce", CLASSES).value)(*args, ())
    other = jax.jit(losses.make_loss(name, CLASSES, **options).value)(
        *args, to_confusion(confusion)
    )
    np.testing.assert_allclose(other, plain, rtol=2e-6)


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hostile_input_gives_finite_values_and_gradients(name, dtype):
    """No example at all, NaN and wild labels in masked rows, saturated logits, absent classes."""
    with double_precision():
        loss = losses.make_loss(name, CLASSES)
        logits, labels, mask, _, confusion = example()
        stats = jax.tree.map(lambda a: jnp.asarray(a, dtype), to_confusion(confusion))
        zero = jax.tree.map(jnp.zeros_like, stats)
        step = jax.jit(jax.value_and_grad(loss.value))
        logits = np.where(mask[:, None], logits, np.nan)
        labels = np.where(mask, labels, -1)
        if "class" not in loss.targets:  # a target per output
            labels = np.repeat((labels > 1)[:, None], CLASSES, 1).astype(np.float64)
        logits[0] = [1e4, -1e4, 0, 0, 0]  # p_y = 1 exactly
        logits[1] = [1e4, -1e4, 0, 0, 0]  # p_y = 0 exactly
        for on in (mask, mask.astype(dtype), np.zeros(BATCH, bool)):
            for n in (np.zeros(CLASSES), np.array([40.0, 0, 0, 0, 1.0])):
                for state in (stats, zero):
                    value, slope = step(
                        jnp.asarray(logits, dtype),
                        jnp.asarray(labels),
                        jnp.asarray(on),
                        jnp.asarray(n, dtype),
                        state,
                    )
                    assert value.dtype == slope.dtype == dtype
                    assert np.isfinite(value) and np.isfinite(slope).all()
                    assert not np.asarray(slope)[~mask].any()
                    if not on.any():
                        assert value == 0 and not np.asarray(slope).any()


def test_focal_slope_is_finite_at_certainty_for_small_gamma():
    loss = losses.make_loss("focal", 2, gamma=0.3)
    sure, label, on = jnp.array([[100.0, -100.0]]), jnp.array([0]), jnp.array([True])
    slope = jax.jit(jax.grad(loss.value))(sure, label, on, jnp.ones(2), ())
    assert np.isfinite(slope).all()


def test_class_balanced_keeps_its_digits_in_single_precision():
    counts = np.array([1.0, 2.0, 5000.0, 0.0])
    want = np.array([(1 - 0.9999) / (1 - 0.9999**n) if n else 0 for n in counts])
    want *= 4 / want.sum()
    got = losses.class_balanced_weights(jnp.asarray(counts, jnp.float32), 0.9999)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_confusion_follows_its_recurrence():
    rng = np.random.default_rng(5)
    conf, count, decay = np.ones((CLASSES, CLASSES)), np.ones(CLASSES), 0.85
    with double_precision():
        stats = losses.init_confusion(CLASSES, jnp.float64)
        for _ in range(4):
            logits, labels = rng.normal(size=(6, CLASSES)), rng.integers(0, CLASSES, 6)
            mask = rng.random(6) < 0.7
            new_conf, new_count = np.full((CLASSES, CLASSES), 1e-3), np.full(CLASSES, 1e-3)
            for i in np.flatnonzero(mask):
                new_conf[labels[i]] += np.exp(log_softmax(logits[i]))
                new_count[labels[i]] += 1
            conf, count = (
                decay * conf + (1 - decay) * new_conf,
                decay * count + (1 - decay) * new_count,
            )
            batch = [jnp.asarray(a) for a in (logits, labels, mask)]
            stats = losses.update_confusion(stats, *batch, decay, batch_size=6)
    got_conf, got_count, seen = (np.asarray(part) for part in stats)
    np.testing.assert_allclose(got_conf, conf, rtol=1e-12)
    np.testing.assert_allclose(got_count, count, rtol=1e-12)
    assert seen == 12.0


def test_an_empty_batch_leaves_the_confusion_alone_and_no_gradient_flows():
    stats = to_confusion(example()[-1])
    nothing = jnp.full((3, CLASSES), jnp.nan), jnp.full(3, -1), jnp.zeros(3, bool)
    empty = losses.update_confusion(stats, *nothing, 0.9, batch_size=64)
    for after, before in zip(empty, stats, strict=True):
        np.testing.assert_array_equal(after, before)
    labels, on = jnp.zeros(3, int), jnp.ones(3)
    total = lambda z: losses.update_confusion(stats, z, labels, on, 0.9, batch_size=4).conf.sum()
    assert not np.asarray(jax.jit(jax.grad(total))(jnp.ones((3, CLASSES)))).any()
    loss = losses.make_loss("c3e", CLASSES)
    through = lambda s: loss.value(jnp.ones((3, CLASSES)), labels, on, jnp.ones(CLASSES), s)
    assert all(not np.asarray(g).any() for g in jax.jit(jax.grad(through))(stats))


def test_warm_up_ends_when_the_counter_reaches_the_threshold():
    """Batches of 64, threshold 1000: 31 batches are warm-up, the 32nd (counter 1024) is not."""
    loss, plain = losses.make_loss("c3e", 3), losses.make_loss("c3e", 3, warmup=float("inf"))
    update = jax.jit(losses.update_confusion, static_argnames="batch_size")
    value, value_of_plain = jax.jit(loss.value), jax.jit(plain.value)
    z, y, on = jnp.array([[0.3, -1.0, 0.5]]), jnp.array([1]), jnp.array([True])
    stats, equal = losses.init_confusion(3), []
    for _ in range(33):
        stats = update(stats, z, y, on, loss.decay, batch_size=64)
        args = z, y, on, jnp.ones(3), stats
        equal.append(bool(value(*args) == value_of_plain(*args)))
    assert equal == [True] * 31 + [False] * 2


def test_works_for_many_clients_at_once():
    """Written for one client, mapped over three: the same numbers."""
    parts = [example(seed) for seed in range(3)]
    loss = losses.make_loss("c3e", CLASSES)
    one = [jax.jit(loss.value)(*(jnp.asarray(a) for a in p[:4]), to_confusion(p[4])) for p in parts]
    stacked = [jnp.stack([jnp.asarray(p[i]) for p in parts]) for i in range(4)]
    stats = jax.tree.map(lambda *a: jnp.stack(a), *[to_confusion(p[4]) for p in parts])
    np.testing.assert_allclose(jax.jit(jax.vmap(loss.value))(*stacked, stats), one, rtol=1e-5)


def test_defaults_follow_the_data_set():
    for spelling in ("cifar100", "CIFAR-100", "cifar_100"):
        assert losses.loss_defaults("c3e", spelling) == {
            "b": 0.85,
            "beta_c": 0.85,
            "lam_mu": 0.9,
            "lam_nu": 0.9,
            "warmup": 2000.0,
            "prior": True,
            "row_norm": True,
            "decay": 0.85,
        }
    assert losses.make_loss("ce", 100, "cifar100").decay == 0.85
    assert losses.make_loss("c3e", 10, "cifar10").decay == losses.make_loss("ce", 10).decay == 0.95
    assert losses.make_loss("c3e", 10, decay=0.5).decay == 0.5
    assert [n for n in losses.LOSSES if losses.make_loss(n, 3).uses_confusion] == ["c3e"]


@pytest.mark.parametrize(
    "call,message",
    [
        (
            lambda: losses.make_loss("fokal", 3),
            "unknown loss 'fokal' (did you mean 'focal'?); allowed: bce, c3e, cb",
        ),
        (
            lambda: losses.make_loss("ce", 3, gamma=1.0),
            "unknown option of loss 'ce' 'gamma'; allowed: decay",
        ),
        (lambda: losses.make_loss("focal", 3, gamma=-1), "gamma=-1 must be a number in [0, inf)"),
        (lambda: losses.make_loss("cb", 3, beta=1.0), "beta=1.0 must be a number in [0, 1)"),
        (lambda: losses.make_loss("ls", 3, smoothing="much"), "smoothing='much' must be a number"),
        (lambda: losses.make_loss("c3e", 3, prior=1), "prior=1 must be true or false"),
        (
            lambda: losses.make_loss("c3e", 3).value(
                jnp.ones((1, 3)), jnp.zeros(1, int), jnp.ones(1), jnp.ones(3)
            ),
            "needs the client's running confusion",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value)
