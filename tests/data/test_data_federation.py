"""The Federation record: row tables, histograms, leaks, pytree behaviour, own arrays, the
figure."""

import dataclasses
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.data.federation import Federation, channel_moments
from fedjax_sim.data.figure import bubble_plot
from fedjax_sim.data.protocols import federate
from fedjax_sim.errors import UserError


def arrays(n=40, classes=4, channels=3):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n, 5, 6, channels), dtype=np.uint8), rng.integers(0, classes, n)


TRAIN = [[0, 1, 2, 3, 4], [10, 11], [20, 21, 22]]
ALL_TRAIN = [0, 1, 2, 3, 4, 10, 11, 20, 21, 22]


def test_from_arrays_tables():
    x, y = arrays()
    fed = Federation.from_arrays(
        x, y, {"train": TRAIN, "val": [[5], [], [23, 24]]}, test=[30], server_val=[39]
    )
    assert fed.num_clients == 3 and fed.shape == (5, 6, 3) and set(fed.rows) == {"train", "val"}
    assert fed.rows["train"].tolist() == [[0, 1, 2, 3, 4], [10, 11, 0, 0, 0], [20, 21, 22, 0, 0]]
    assert {
        a.dtype for a in (fed.rows["train"], fed.size["train"], fed.server_rows["test"], fed.y)
    } == {np.dtype(np.int32)}
    assert fed.size["val"].tolist() == [1, 0, 2] and fed.server_rows["val"].tolist() == [39]
    assert fed.x.dtype == np.uint8 and fed.scale == 1 / 255
    train = x[ALL_TRAIN] / 255.0
    np.testing.assert_allclose(fed.mean, train.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(fed.std, train.std((0, 1, 2)), rtol=1e-12)


def test_label_counts_against_bincount():
    x, y = arrays()
    fed = Federation.from_arrays(x, y, {"train": TRAIN}, test=[30])
    expected = [np.bincount(y[rows], minlength=4) for rows in TRAIN]
    np.testing.assert_array_equal(fed.label_counts(), expected)
    big = federate("digits", "dirichlet:0.1", clients=30)
    for split in ("train", "val"):
        for i, counts in enumerate(big.label_counts(split)):
            np.testing.assert_array_equal(
                counts, np.bincount(big.y[big.client_rows(i, split)], minlength=10)
            )


def test_float_images_and_appended_test_set():
    x, y = arrays()
    x = (x / 255.0).astype(np.float32)[..., 0]  # [D, H, W] gets a channel axis
    fed = Federation.from_arrays(x, y, {"train": TRAIN}, test=(x[:7], y[:7]))
    assert fed.shape == (5, 6, 1) and fed.scale == 1.0 and fed.x.dtype == np.float32
    assert fed.server_rows["test"].tolist() == list(range(40, 47))
    np.testing.assert_array_equal(fed.x[40:, ..., 0], x[:7])
    np.testing.assert_allclose(fed.mean, [x[ALL_TRAIN].mean(dtype=np.float64)], rtol=1e-12)


def test_global_test_set_is_the_union_of_the_clients():
    x, y = arrays()
    fed = Federation.from_arrays(x, y, {"train": TRAIN, "test": [[6], [12, 13], [25]]})
    assert sorted(fed.server_rows["test"].tolist()) == [6, 12, 13, 25]


def test_is_a_pytree_argument():
    x, y = arrays()
    fed = Federation.from_arrays(
        x, y, {"train": TRAIN}, test=[30], name="mine", augment="crop_flip"
    )

    @jax.jit
    @chex.assert_max_traces(n=1)
    def first_batch_mean(f):
        assert f.classes == 4
        batch = (f.x[f.rows["train"][:, 0]] * f.scale - f.mean) / f.std
        return batch.mean(), f.num_clients

    fed = jax.device_put(fed)
    expected = ((x[[0, 10, 20]] / 255.0 - np.asarray(fed.mean)) / np.asarray(fed.std)).mean()
    np.testing.assert_allclose(first_batch_mean(fed)[0], expected, rtol=1e-4, atol=1e-6)
    # same static fields: no new trace
    first_batch_mean(dataclasses.replace(fed, y=jnp.flip(fed.y)))
    assert (fed.name, fed.augment) == ("mine", "crop_flip")
    np.testing.assert_array_equal(fed.label_counts(), Federation.label_counts(jax.device_get(fed)))


def test_origin_and_fingerprint_do_not_compile_again():
    x, y = arrays()
    make = lambda **more: Federation.from_arrays(x, y, {"train": TRAIN}, test=[30], **more)
    one, other = make(), make(description="made elsewhere")
    assert (one.description, other.description) == ("arrays", "made elsewhere")

    @jax.jit
    @chex.assert_max_traces(n=1)
    def total(fed):
        return fed.y.sum()

    total(one), total(other), total(jax.device_put(other))
    assert len(jax.tree.leaves(one)) == len(jax.tree.leaves(other))
    assert (
        jax.tree.structure(one) == jax.tree.structure(other)
        and hash(jax.tree.structure(one)) is not None
    )
    assert jax.device_put(other).description == "made elsewhere"  # it rides along
    # float64 -> float32
    assert one.fingerprint() == other.fingerprint() == jax.device_put(one).fingerprint()
    assert (
        one.__dict__["_fingerprint"] == one.fingerprint()
        and "_fingerprint" not in dataclasses.replace(one).__dict__
    )


def test_fingerprint_sees_every_part():
    x, y = arrays()
    fed = Federation.from_arrays(
        x, y, {"train": TRAIN, "val": [[5], [], [23, 24]]}, test=[30], server_val=[39]
    )
    pixel, label = np.array(fed.x), np.array(fed.y)
    pixel[-1, -1, -1, -1] ^= 1
    label[7] = (label[7] + 1) % 4
    row = np.array(fed.rows["val"])
    row[2, 1] = 25
    changed = [
        dict(x=pixel),
        dict(y=label),
        dict(rows=fed.rows | {"val": row}),
        dict(size=fed.size | {"val": np.array([1, 0, 1], np.int32)}),
        dict(server_rows=fed.server_rows | {"test": np.array([31], np.int32)}),
        dict(server_rows={"test": fed.server_rows["test"]}),
        dict(mean=fed.mean + 0.01),
        dict(std=fed.std * 2),
        dict(scale=fed.scale * 2),
        dict(classes=5),
        dict(augment="crop_flip"),
    ]
    prints = [
        fed.fingerprint(),
        *(dataclasses.replace(fed, **change).fingerprint() for change in changed),
    ]
    assert len(set(prints)) == len(prints)
    assert dataclasses.replace(fed, name="other").fingerprint() == fed.fingerprint()


def test_non_finite_images_are_refused_by_row():
    x, y = arrays()
    for dtype in (np.float16, np.float32, np.float64):
        for bad in (np.nan, np.inf, -np.inf):
            poisoned = (x / 255).astype(dtype)
            poisoned[17, 2, 3, 1] = bad
            with pytest.raises(UserError, match=r"row 17 has -?(nan|inf).*\[2, 3, 1\]"):
                Federation.from_arrays(poisoned, y, {"train": TRAIN}, test=[30])
    clean = Federation.from_arrays((x / 255).astype(np.float32), y, {"train": TRAIN}, test=[30])
    assert np.isnan(
        dataclasses.replace(clean, x=np.full_like(clean.x, np.nan)).x
    ).all()  # planting stays possible


def test_kinds_of_images():
    x, y = arrays()
    make = lambda x: Federation.from_arrays(x, y, {"train": TRAIN}, test=[30])
    big = make((x / 255).astype(">f4"))
    assert (
        big.x.dtype == np.dtype("=f4")
        and big.fingerprint() == make((x / 255).astype(np.float32)).fingerprint()
    )
    assert make((x / 255).astype(np.float16)).x.dtype == np.float16
    ink = make(x > 100)
    assert ink.x.dtype == np.uint8 and set(np.unique(ink.x)) == {0, 255} and ink.scale == 1 / 255


def test_tables_are_normalised_feature_by_feature():
    _, y = arrays()
    table = np.random.default_rng(0).normal([5.0, -300.0, 0.01], [2.0, 40.0, 0.001], (40, 3))
    fed = Federation.from_arrays(table, y, {"train": TRAIN}, test=(table[:5], y[:5]))
    assert fed.shape == (1, 1, 3) and fed.server_rows["test"].tolist() == [40, 41, 42, 43, 44]
    np.testing.assert_allclose(fed.mean, table[ALL_TRAIN].mean(0), rtol=1e-12)
    np.testing.assert_allclose(fed.std, table[ALL_TRAIN].std(0), rtol=1e-12)


def test_moments_of_a_constant_channel():
    mean, std = channel_moments(np.full((2, 3, 3, 1), 51, np.uint8), 1 / 255)
    np.testing.assert_allclose(mean, [0.2])
    assert std.tolist() == [1.0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rows": {"train": [[0, 30]]}}, "row 30 is both a test row and a training row"),
        ({"rows": {"train": [[0]], "val": [[31]]}}, "validation row"),
        ({"rows": {"train": [[0]], "test": [[5]]}, "server_val": [5]}, "server validation row"),
        ({"rows": {"train": [[0], []]}}, "client 1 has none"),
        ({"rows": {"train": []}}, "at least 1 client"),
        ({"rows": {"val": [[0]]}}, "'train'"),
        ({"rows": {"train": [[0]], "tset": [[1]]}}, "tset"),
        ({"rows": {"train": [[0], [1]], "val": [[2]]}}, "lists 1 clients"),
        ({"rows": {"train": [[99]]}}, "row 99"),
        ({"rows": {"train": [[-1]]}}, "row -1"),
        ({"rows": {"train": [[0.5]]}}, "row numbers"),
        ({"test": None}, "needs a test set"),
        ({"classes": 2}, "labels go up to"),
        ({"std": 0.0}, "positive"),
        ({"mean": [0.1, 0.2]}, "3 numbers"),
        ({"y": np.zeros(3, int)}, "40 examples but y has 3"),
        ({"y": np.zeros(40), "task": "classification"}, "integer labels"),
        ({"x": np.zeros(40)}, r"\[D, H, W\]"),
        ({"x": np.zeros((40, 7, 7, 0), np.uint8)}, "no side of 0"),
        ({"x": np.zeros((40, 7, 7), np.longdouble)}, "float64"),
        ({"x": np.zeros((40, 7, 7), complex)}, "uint8 or floating"),
        ({"x": np.zeros((40, 7, 7), "f4,f4")}, "plain array"),
        ({"x": [[1], [2, 3]]}, "not an array"),
        ({"x": np.full((40, 7, 7), 1e300)}, "finite, but row 0"),
        ({"y": np.int64(3)}, "integer labels"),
        ({"y": np.array([-1] + [0] * 39)}, "row 0 has -1"),
        ({"y": np.array([0] * 39 + [2**40])}, "row 39 has 1099511627776"),
        ({"y": np.array([0] * 39 + [2**63], np.uint64)}, "row 39"),
        ({"classes": 10**9}, "at most 100000"),
        ({"mean": float("nan")}, "mean must be finite"),
        ({"std": 1e-60}, "positive"),
        ({"std": "wide"}, "3 numbers"),
        ({"x": np.zeros((40, 7, 7), np.int64)}, "uint8 or floating"),
    ],
)
def test_bad_arrays(change, message):
    x, y = arrays()
    given = {"x": x, "y": y, "rows": {"train": TRAIN}, "test": [30, 31]} | change
    with pytest.raises(UserError, match=message):
        Federation.from_arrays(**given)


def test_describe_is_compact():
    text = federate("digits", "dirichlet:0.3", clients=60).describe()
    assert "60 clients" in text and "... 50 more clients" in text and len(text.splitlines()) < 20


def test_bubble_plot(tmp_path):
    path = tmp_path / "labels.png"
    bubble_plot(federate("digits", "fixed:2", clients=10), path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_import_is_light():
    code = (
        "import sys, fedjax_sim.data, fedjax_sim.data.sources, fedjax_sim.data.partition\nprint([m"
        " for m in ('jax', 'sklearn', 'tensorflow_datasets', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
