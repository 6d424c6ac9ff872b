"""Split protocols: fractions, disjointness, no leak of test rows, server validation, seeds,
normalisation."""

import hashlib

import jax
import numpy as np
import pytest

from fedjax_sim.data.protocols import PROTOCOLS, federate, stratified
from fedjax_sim.data.sources import Dataset, load
from fedjax_sim.errors import UserError


def toy(name="toy", train=4000, test=1000, classes=10):
    rng = np.random.default_rng(0)
    pixels = lambda n: rng.integers(0, 256, (n, 2, 2, 1), dtype=np.uint8)
    labels = lambda n: rng.integers(0, classes, n).astype(np.int32)
    return Dataset(name, pixels(train), labels(train), pixels(test), labels(test), classes)


def used(fed, split):
    return np.concatenate([fed.client_rows(i, split) for i in range(fed.num_clients)])


SHARES = {
    "standard": {"train": 0.9, "val": 0.1},
    "fedpolicy": {"train": 0.9, "val": 0.1},
    "pfllib": {"train": 0.75, "test": 0.25},
    "pfedrlla": {"train": 0.65, "val": 0.15, "test": 0.20},
    "qbandit": {"train": 0.95, "val": 0.05},
}


@pytest.mark.parametrize("protocol", SHARES)
@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.1", "shards:2"])
def test_fractions_cover_and_no_leak(protocol, partition):
    fed = federate(toy(), partition, clients=20, protocol=protocol)
    assert set(fed.rows) == set(SHARES[protocol])
    total = sum(fed.size[split] for split in fed.size)
    for split, share in SHARES[protocol].items():
        if (
            protocol == "standard"
        ):  # few rows say nothing: at least 20 for validation, or a third of what there is
            more = np.maximum(np.minimum(20, total // 3) - np.floor(0.1 * total + 0.5), 0)
            total_or_more = share * total + (more if split == "val" else -more)
            assert np.abs(fed.size[split] - total_or_more).max() <= 1.0
        else:
            assert np.abs(fed.size[split] - share * total).max() <= 1.0
        assert fed.size[split].min() >= 1
    rows = np.concatenate([used(fed, split) for split in fed.rows])
    assert len(rows) == len(set(rows.tolist()))  # clients and splits are disjoint
    merged = protocol in ("pfllib", "pfedrlla")
    if merged:
        assert sorted(rows.tolist()) == list(range(5000))
        assert sorted(fed.server_rows["test"].tolist()) == sorted(used(fed, "test").tolist())
    else:
        assert fed.server_rows["test"].tolist() == list(range(4000, 5000))
        server = fed.server_rows["val"].tolist() if protocol in ("standard", "fedpolicy") else []
        assert sorted([*rows.tolist(), *server]) == list(range(4000))
    tested = set(fed.server_rows["test"].tolist()) | set(
        used(fed, "test").tolist() if "test" in fed.rows else []
    )
    for split in set(fed.rows) - {"test"}:
        assert not tested & set(used(fed, split).tolist())
    assert ("val" in fed.server_rows) == (protocol in ("standard", "fedpolicy"))
    if "val" in fed.server_rows:
        assert not tested & set(fed.server_rows["val"].tolist())


def test_pool_keeps_images_and_labels_together():
    data = toy()
    fed = federate(data, "iid", clients=5, protocol="pfllib")
    np.testing.assert_array_equal(fed.x, np.concatenate([data.x_train, data.x_test]))
    np.testing.assert_array_equal(fed.y, np.concatenate([data.y_train, data.y_test]))


def test_server_validation_is_stratified():
    data = toy(train=20_000)
    fed = federate(data, "iid", clients=5)
    assert len(fed.server_rows["val"]) == 1000  # min(1000, 10 %)
    share = np.bincount(fed.y[fed.server_rows["val"]], minlength=10)
    assert np.abs(share - 1000 * np.bincount(data.y_train) / 20_000).max() < 1
    assert len(federate(data, "iid", clients=5, server_val=777).server_rows["val"]) == 777
    assert "val" not in federate(data, "iid", clients=5, server_val=0).server_rows
    assert len(federate(toy(), "iid", clients=5).server_rows["val"]) == 400


@pytest.mark.parametrize("number", [1, 9, 33, 100])
def test_stratified_is_exact(number):
    y = np.array([0] * 50 + [2] * 30 + [3] * 20)
    picked = stratified(y, number, np.random.default_rng(0))
    assert len(set(picked.tolist())) == number
    exact = np.bincount(y) * number / 100
    assert np.abs(np.bincount(y[picked], minlength=4) - exact).max() < 1


def test_seed_and_stages():
    a, b, c = (federate("digits", clients=10, data_seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(a.rows["train"], b.rows["train"])
    np.testing.assert_array_equal(a.server_rows["val"], b.server_rows["val"])
    assert (
        a.rows["train"].shape != c.rows["train"].shape or (a.rows["train"] != c.rows["train"]).any()
    )


def test_pfllib_minimum_client():
    """B=10 at 75 %: at least 40 examples; bounded by half the mean client."""
    data = toy(train=40_000, test=10_000)
    for batch, least in ((10, 40), (1000, 50_000 // 50 // 2)):
        fed = federate(data, "dirichlet:0.1", clients=50, protocol="pfllib", batch_size=batch)
        assert (fed.size["train"] + fed.size["test"]).min() >= least


def test_tiny_imagenet_merges_nothing():
    fed = federate(toy("tiny_imagenet"), "iid", clients=5, protocol="pfllib")
    assert max(used(fed, "train").max(), used(fed, "test").max()) < 4000


def test_augmentation_is_recorded_for_qbandit_cifar10_only():
    assert federate(toy("cifar10"), "iid", clients=5, protocol="qbandit").augment == "crop_flip"
    assert federate(toy("cifar10"), "iid", clients=5).augment == ""
    assert federate(toy("mnist"), "iid", clients=5, protocol="qbandit").augment == ""


def test_norms():
    data = load("digits")
    assert federate(data, norm="pfllib").mean.tolist() == [0.5]
    assert federate(data, norm="none").std.tolist() == [1.0]
    fed = federate(data)
    train = fed.x[used(fed, "train")] / 255.0
    np.testing.assert_allclose([fed.mean[0], fed.std[0]], [train.mean(), train.std()], rtol=1e-10)


# sha256 over the leaves of federate("digits", "dirichlet:0.3", clients=10, protocol=...), before
# val_fraction
ROWS = {
    "standard": (
        "b4a2910af0972b20e1fd1445d372894490f9de6529b5fda428042e2b2c267f25"
    ),  # since it has at least 20 val rows
    "fedpolicy": "1387a2a4964d5c0766ea2defc06500877222e46ddb54df3394d1f5a4922cf233",
    "pfllib": "5b980494eff62a94a100f0b029f7d6a6b4d3877d0d99279c92d10cba5e5b9eda",
    "pfedrlla": "8bfb8da4b437b0686d73f03407b78ba4df54f89840563ccefdb458901a9f22cb",
    "qbandit": "2ec67732f520352273dfb5b6b64c1182fb39e47b144f3cebd2a17a02b627acd4",
}


@pytest.mark.parametrize("protocol", ROWS)
def test_the_defaults_give_the_same_federation_as_ever(protocol):
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(federate("digits", "dirichlet:0.3", clients=10, protocol=protocol)):
        total.update(np.ascontiguousarray(leaf).tobytes())
    assert total.hexdigest() == ROWS[protocol]


@pytest.mark.parametrize("protocol", SHARES)
def test_val_fraction_under_any_protocol(protocol):
    whole = federate(toy(), "dirichlet:0.3", clients=20, protocol=protocol)
    fed = federate(toy(), "dirichlet:0.3", clients=20, protocol=protocol, val_fraction=0.3)
    everything = lambda f: sorted(np.concatenate([used(f, split) for split in f.rows]).tolist())
    assert everything(fed) == everything(whole) == sorted(set(everything(whole)))
    if "val" in whole.rows:  # it replaces the protocol's own share, of all that a client holds
        of = sum(fed.size[split] for split in fed.size)
    else:  # it is taken from what would be training data, and nothing else moves
        of = whole.size["train"]
        np.testing.assert_array_equal(fed.rows["test"], whole.rows["test"])
    assert (np.abs(fed.size["val"] - 0.3 * of) <= 0.5 + 1e-9).all() and fed.size["val"].min() >= 1
    none = federate(toy(), "dirichlet:0.3", clients=20, protocol=protocol, val_fraction=0)
    assert "val" not in none.rows and everything(none) == everything(whole)


def test_val_fraction_needs_two_training_examples():
    small = toy(train=60, test=0)
    # 2 each: 1 test, 1 train
    fed = federate(small, "iid", clients=30, protocol="pfllib", val_fraction=0.9)
    assert fed.size["train"].tolist() == [1] * 30 and fed.size["val"].tolist() == [0] * 30
    fed = federate(small, "iid", clients=20, protocol="pfllib", val_fraction=0.01)  # 3 each
    assert fed.size["train"].tolist() == fed.size["val"].tolist() == [1] * 20


def test_description_and_fingerprint_of_a_federation(tmp_path):
    make = lambda **more: federate(**dict(dataset="digits", partition="iid", clients=5) | more)
    fed = make()
    assert (
        fed.description
        == "digits, iid, 5 clients, standard, server_val 144, norm dataset, data_seed 0, 1797"
        " examples 28x28x1"
    )
    assert make().fingerprint() == fed.fingerprint() and make().description == fed.description
    others = [
        dict(data_seed=1),
        dict(partition="shards:2"),
        dict(clients=6),
        dict(norm="none"),
        dict(val_fraction=0.2),
    ]
    others = [make(**other) for other in others]
    assert (
        len({f.fingerprint() for f in [fed, *others]})
        == len({f.description for f in [fed, *others]})
        == 6
    )

    data = load("digits")
    arrays = {key: getattr(data, key) for key in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(tmp_path / "mine.npz", **arrays)
    (tmp_path / "elsewhere").mkdir()
    np.savez(tmp_path / "elsewhere" / "mine.npz", **arrays)
    one, same = (
        make(dataset=str(tmp_path / "mine.npz")),
        make(dataset=tmp_path / "elsewhere" / "mine.npz"),
    )
    assert (
        one.description == same.description
        and "mine.npz, iid" in one.description
        and str(tmp_path) not in one.description
    )
    assert one.fingerprint() == same.fingerprint() == fed.fingerprint()
    arrays["x_test"][3, 4, 5, 0] ^= 1
    np.savez(tmp_path / "mine.npz", **arrays)
    changed = make(dataset=str(tmp_path / "mine.npz"))
    assert changed.description == one.description and changed.fingerprint() != one.fingerprint()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"val_fraction": -0.1}, "between 0 and 1"),
        ({"val_fraction": float("nan")}, "between 0 and 1"),
        ({"val_fraction": "0.1"}, "between 0 and 1"),
        ({"data_seed": -1}, "data_seed must be a whole number"),
        ({"clients": 2.5}, "clients must be a whole number"),
        ({"clients": 10**9}, "too many"),
        ({"clients": 10**30}, "below 2"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"server_val": 0.5}, "does not fit"),
        ({"dataset": 3}, "name or a path"),
        ({"protocol": "pfllb"}, "did you mean 'pfllib'"),
        ({"norm": "imagenet"}, "dataset, pfllib, none"),
        ({"server_val": 4000}, "4000 training examples"),
        ({"server_val": -1}, "does not fit"),
        ({"clients": 3000}, "too many"),
        ({"val_fraction": 1.0}, "between 0 and 1"),
        ({"partition": "dir:1"}, "unknown partition"),
        ({"dataset": toy(test=0), "protocol": "qbandit"}, "no official test set"),
        ({"partition": "iid", "clients": 500, "val_fraction": 0.99}, "keeps none for training"),
    ],
)
def test_errors(change, message):
    with pytest.raises(UserError, match=message):
        federate(**({"dataset": toy(), "clients": 10} | change))


def test_test_set_of_other_classes_is_refused():
    data = toy()
    strange = Dataset("omniglot", data.x_train, data.y_train, data.x_test, data.y_test + 10, 20)
    with pytest.raises(UserError, match="no class of its training set"):
        federate(strange, "iid", clients=5)
    assert federate(strange, "iid", clients=5, protocol="pfedrlla").num_clients == 5


def test_every_protocol_has_help():
    assert set(PROTOCOLS) == set(SHARES) and all(p.help for p in PROTOCOLS.values())


def test_enough_validation_rows_by_default():
    """The figures over clients of a run without any option stand on more than a handful of rows."""
    fed = federate("digits")
    total = fed.size["train"] + fed.size["val"]
    assert (
        fed.size["val"] == np.maximum(np.floor(0.1 * total + 0.5), np.minimum(20, total // 3))
    ).all()
    assert fed.size["val"].mean() > 15 and (fed.size["val"] >= np.minimum(20, total // 3)).all()
    assert (
        federate("digits", val_fraction=0.1).size["val"]
        == np.maximum(1, np.floor(0.1 * total + 0.5))
    ).all()  # as it is said
    # nothing changes for clients of 200 and more
    large = federate("synthetic:train=9000,test=100", "iid", clients=20)
    assert (large.size["val"] == 41).all()
