"""Split protocols: fractions, disjointness, no leak of test rows, server validation, seeds, normalisation."""

import numpy as np
import pytest

from fedjax_sim.data import PROTOCOLS, Dataset, federate, load
from fedjax_sim.data.protocols import stratified
from fedjax_sim.errors import UserError


def toy(name="toy", train=4000, test=1000, classes=10):
    rng = np.random.default_rng(0)
    pixels = lambda n: rng.integers(0, 256, (n, 2, 2, 1), dtype=np.uint8)
    labels = lambda n: rng.integers(0, classes, n).astype(np.int32)
    return Dataset(name, pixels(train), labels(train), pixels(test), labels(test), classes)


def used(fed, split):
    return np.concatenate([fed.client_rows(i, split) for i in range(fed.num_clients)])


SHARES = {
    "fedpolicy": {"train": 0.9, "val": 0.1},
    "pfllib": {"train": 0.75, "test": 0.25},
    "pfedrlla": {"train": 0.65, "val": 0.15, "test": 0.20},
    "qbandit": {"train": 0.95, "test": 0.05},
}


@pytest.mark.parametrize("protocol", SHARES)
@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.1", "shards:2"])
def test_fractions_cover_and_no_leak(protocol, partition):
    fed = federate(toy(), partition, clients=20, protocol=protocol)
    assert set(fed.rows) == set(SHARES[protocol])
    total = sum(fed.size[split] for split in fed.size)
    for split, share in SHARES[protocol].items():
        assert np.abs(fed.size[split] - share * total).max() <= 1.0
        assert fed.size[split].min() >= 1
    rows = np.concatenate([used(fed, split) for split in fed.rows])
    assert len(rows) == len(set(rows.tolist()))  # clients and splits are disjoint
    merged = protocol in ("pfllib", "pfedrlla")
    if merged:
        assert sorted(rows.tolist()) == list(range(5000))
        assert sorted(fed.held["test"].tolist()) == sorted(used(fed, "test").tolist())
    else:
        assert fed.held["test"].tolist() == list(range(4000, 5000))
        server = fed.held["val"].tolist() if protocol == "fedpolicy" else []
        assert sorted([*rows.tolist(), *server]) == list(range(4000))
    tested = set(fed.held["test"].tolist()) | set(used(fed, "test").tolist() if "test" in fed.rows else [])
    for split in set(fed.rows) - {"test"}:
        assert not tested & set(used(fed, split).tolist())
    assert ("val" in fed.held) == (protocol == "fedpolicy")
    if "val" in fed.held:
        assert not tested & set(fed.held["val"].tolist())


def test_pool_keeps_images_and_labels_together():
    data = toy()
    fed = federate(data, "iid", clients=5, protocol="pfllib")
    np.testing.assert_array_equal(fed.x, np.concatenate([data.x_train, data.x_test]))
    np.testing.assert_array_equal(fed.y, np.concatenate([data.y_train, data.y_test]))


def test_server_validation_is_stratified():
    data = toy(train=20_000)
    fed = federate(data, "iid", clients=5)
    assert len(fed.held["val"]) == 1000  # min(1000, 10 %)
    share = np.bincount(fed.y[fed.held["val"]], minlength=10)
    assert np.abs(share - 1000 * np.bincount(data.y_train) / 20_000).max() < 1
    assert len(federate(data, "iid", clients=5, server_val=777).held["val"]) == 777
    assert "val" not in federate(data, "iid", clients=5, server_val=0).held
    assert len(federate(toy(), "iid", clients=5).held["val"]) == 400


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
    np.testing.assert_array_equal(a.held["val"], b.held["val"])
    assert a.rows["train"].shape != c.rows["train"].shape or (a.rows["train"] != c.rows["train"]).any()


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


@pytest.mark.parametrize(
    "change, words",
    [
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
def test_errors(change, words):
    with pytest.raises(UserError, match=words):
        federate(**({"dataset": toy(), "clients": 10} | change))


def test_test_set_of_other_classes_is_refused():
    data = toy()
    strange = Dataset("omniglot", data.x_train, data.y_train, data.x_test, data.y_test + 10, 20)
    with pytest.raises(UserError, match="no class of its training set"):
        federate(strange, "iid", clients=5)
    assert federate(strange, "iid", clients=5, protocol="pfedrlla").num_clients == 5


def test_every_protocol_has_help():
    assert set(PROTOCOLS) == set(SHARES) and all(p.help for p in PROTOCOLS.values())
