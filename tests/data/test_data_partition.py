"""Partitioners: disjoint covers, the promised label structure, determinism, termination, errors."""

import logging
import time
from collections import Counter

import numpy as np
import pytest

from fedjax_sim.data import memory
from fedjax_sim.data.partition import PARTITIONS, _dirichlet_counts, parse_partition, partition
from fedjax_sim.errors import UserError


def labels(n=3000, classes=10, seed=0):
    return np.random.default_rng(seed).integers(0, classes, n)


def flat(rows):
    return np.concatenate(rows)


def is_disjoint(rows):
    return len(flat(rows)) == len(set(flat(rows).tolist()))


COVERING = [
    "iid",
    "dirichlet:0.1",
    "dirichlet:0.05,min=5",
    "dirichlet:100",
    "shards:2",
    "shards:3",
    "pathological:2",
    "pathological:2,balance=false",
    "pathological:10",
    "fixed:1",
    "fixed:3",
]


@pytest.mark.parametrize("spec", COVERING)
@pytest.mark.parametrize("clients", [10, 20])
def test_covers_everything_exactly_once(spec, clients):
    y = labels()
    rows = partition(spec, y, clients, rng=3)
    assert len(rows) == clients
    assert sorted(flat(rows).tolist()) == list(range(len(y)))


@pytest.mark.parametrize("spec", COVERING)
def test_deterministic_in_the_seed(spec):
    y = labels()
    one, same, other = (partition(spec, y, 20, rng=seed) for seed in (5, 5, 6))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(one, other, strict=True))


def test_iid_sizes_differ_by_at_most_one():
    assert Counter(len(r) for r in partition("iid", labels(1003), 10)) == {101: 3, 100: 7}


def test_dirichlet_counts_follow_the_recipe_of_one_draw():
    """Against the recipe written out index by index, fed the same Dirichlet shares."""
    per_class, clients, alpha = np.array([300, 500, 200, 400]), 7, 0.2
    counts = _dirichlet_counts(per_class, clients, alpha, np.random.default_rng(11))
    shares = np.random.default_rng(11).dirichlet([alpha] * clients, size=4)
    filled = [0] * clients
    for k, n in enumerate(per_class):
        p = [
            share if filled[j] < per_class.sum() / clients else 0.0
            for j, share in enumerate(shares[k])
        ]
        total, reached, start = sum(p), 0.0, 0
        for j in range(clients):
            reached += p[j] / total
            end = int(reached * n + 1e-9)
            assert abs(counts[j, k] - (end - start)) <= 1  # rounding of the running sum
            start = end
        filled = [h + int(c) for h, c in zip(filled, counts[:, k], strict=True)]
        assert counts[:, k].sum() == n
        assert all(counts[j, k] == 0 for j in range(clients) if p[j] == 0.0)


def test_dirichlet_skew_and_balance():
    y = labels(20_000)
    share = {}
    for alpha in (0.1, 100):
        rows = partition(f"dirichlet:{alpha}", y, 20, rng=0)
        share[alpha] = np.mean([np.bincount(y[r], minlength=10).max() / len(r) for r in rows])
    assert share[0.1] > 0.4 and share[100] < 0.15


@pytest.mark.parametrize("n", [60_000, 1_300])
def test_dirichlet_500_clients_terminates(n, caplog):
    y, start = labels(n), time.perf_counter()
    with caplog.at_level(logging.WARNING):
        rows = partition("dirichlet:0.05", y, 500, rng=0, least=2)
    assert time.perf_counter() - start < 30
    assert sorted(flat(rows).tolist()) == list(range(n))
    assert min(map(len, rows)) >= (10 if n == 60_000 else 2)
    assert "topped up" in caplog.text


def test_dirichlet_with_vanishing_alpha_terminates():
    rows = partition("dirichlet:1e-8,tries=3", labels(2000), 50, rng=0)
    assert sorted(flat(rows).tolist()) == list(range(2000)) and min(map(len, rows)) >= 10


def test_shards_structure_and_leftover():
    y = np.sort(labels(1007))
    rows = partition("shards:2", y, 10, rng=0)
    # 20 shards of 50, 7 left over for the last client
    assert [len(r) for r in rows] == [100] * 9 + [107]
    shards = [sorted(y[half].tolist()) for r in rows for half in (r[:50], r[50:100])]
    # Sorted by label, the shards laid end to end are the sorted labels; the leftover is the end of
    # them.
    np.testing.assert_array_equal(np.concatenate(sorted(shards)), y[:1000])
    assert y[rows[-1][100:]].tolist() == y[1000:].tolist()


def test_shards_hold_s_classes_where_classes_divide():
    y = np.repeat(np.arange(10), 100)
    rows = partition("shards:2", y, 50, rng=1)
    assert all(len(r) == 20 and len(np.unique(y[r])) <= 2 for r in rows)


def test_pathological_groups_and_equal_parts():
    """PFLlib's structure: C/s groups of clients with identical label sets, each class in equal
    parts."""
    y = np.repeat(np.arange(10), 600)
    rows = partition("pathological:2", y, 100, rng=0)
    sets = [tuple(np.unique(y[r])) for r in rows]
    assert Counter(sets) == {(0, 1): 20, (2, 3): 20, (4, 5): 20, (6, 7): 20, (8, 9): 20}
    assert sets == sorted(sets)
    assert {len(r) for r in rows} == {60}


def test_pathological_leftover_goes_to_the_last_holder():
    y = np.repeat(np.arange(2), [13, 10])
    rows = partition("pathological:1", y, 4, rng=0)
    assert [len(r) for r in rows] == [6, 7, 5, 5]


def test_pathological_unbalanced_parts_stay_in_range():
    y = np.repeat(np.arange(10), 1000)
    rows = partition("pathological:2,balance=false", y, 50)
    counts = np.array([np.bincount(y[r], minlength=10) for r in rows])
    for k in range(10):
        parts = counts[counts[:, k] > 0, k]
        assert (
            len(parts) == 10
            and parts[:-1].min() >= 10
            and parts[:-1].max() < 100
            and parts.sum() == 1000
        )
    assert len(set(counts[counts > 0].tolist())) > 10


def test_pathological_leaves_out_classes_nobody_is_missing(caplog):
    y = np.repeat(np.arange(100), 10)
    with caplog.at_level(logging.WARNING):
        rows = partition("pathological:2", y, 20, rng=0)
    assert len(np.unique(y[flat(rows)])) == 40 and is_disjoint(rows)
    assert "600 examples left out" in caplog.text


def test_fixed_classes():
    y = labels(5000)
    rows = partition("fixed:3", y, 25, rng=0)
    total = np.bincount(y)
    counts = np.array([np.bincount(y[r], minlength=10) for r in rows])
    assert ((counts > 0).sum(1) == 3).all()
    assert all(counts[i, i % 10] > 0 for i in range(25))
    for k in range(10):
        parts = counts[counts[:, k] > 0, k]
        assert parts.sum() == total[k] and parts.max() - parts.min() <= 1


def test_mnist_star_domains_and_equal_sizes():
    domain = np.repeat([0, 1, 2], [70_000, 9_298, 68_002])
    domain = np.random.default_rng(0).permutation(domain)
    for spec, bounds in (("mnist_star", (40, 80)), ("mnist_star:30/30/40", (30, 60))):
        rows = partition(spec, np.zeros(len(domain), int), 100, rng=0, extra={"domain": domain})
        assert is_disjoint(rows)
        assert {len(r) for r in rows} == {232 if spec == "mnist_star" else 309}
        for i, r in enumerate(rows):
            assert set(domain[r]) == {0 if i < bounds[0] else 1 if i < bounds[1] else 2}


def test_omniglot_by_drawing_and_drop():
    characters = 80
    drawer = np.tile(np.arange(1, 21), characters)
    alphabet = np.repeat(np.arange(characters) % 50, 20)
    rows = partition("omniglot", alphabet, 20, extra={"drawer": drawer})
    assert sorted(flat(rows).tolist()) == list(range(20 * characters))
    assert all(len(r) == characters and set(drawer[r]) == {j + 1} for j, r in enumerate(rows))
    less = partition("omniglot:drop=0.2", alphabet, 20, rng=0, extra={"drawer": drawer})
    assert all(len(np.unique(alphabet[r])) == 40 for r in less)
    assert len({tuple(np.unique(alphabet[r])) for r in less}) > 1


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("iid", ("iid", {})),
        ("dirichlet:0.1", ("dirichlet", {"alpha": 0.1})),
        ("dirichlet:alpha=0.1,min=10", ("dirichlet", {"alpha": 0.1, "min": 10})),
        ("pathological:2,balance=false", ("pathological", {"s": 2, "balance": False})),
        ("mnist_star:40/40/20", ("mnist_star", {"mix": (40, 40, 20)})),
        ("omniglot:drop=0.2", ("omniglot", {"drop": 0.2})),
    ],
)
def test_parse(spec, expected):
    assert parse_partition(spec) == expected


@pytest.mark.parametrize(
    "spec, message",
    [
        ("dirichelt:0.1", "did you mean 'dirichlet'"),
        ("dirichlet", "needs its alpha"),
        ("dirichlet:zero", "'zero'"),
        ("dirichlet:0", "above 0"),
        ("dirichlet:nan", "above 0"),
        ("shards:0", "at least 1"),
        ("shards:2,t=1", "allowed: s"),
        ("shards:2,3", "key=value"),
        ("pathological:2,balance=maybe", "true or false"),
        ("omniglot:drop=1", "below 1"),
        ("mnist_star:a/b", "mix"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(UserError, match=message):
        parse_partition(spec)


@pytest.mark.parametrize(
    "spec, clients, message",
    [
        ("iid", 101, "too many"),
        ("iid", 0, "at least 1"),
        ("dirichlet:0.1", 101, "too many"),
        ("dirichlet:0.1,min=20", 10, "need 200"),
        ("shards:30", 10, "at least 300"),
        ("fixed:11", 10, "there are 10"),
        ("pathological:11", 10, "there are 10"),
        ("mnist_star", 10, "'domain'"),
        ("omniglot", 10, "'drawer'"),
        ("pathological:10", 60, "leaves client"),
    ],
)
def test_impossible_partitions(spec, clients, message):
    with pytest.raises(UserError, match=message) as caught:
        partition(spec, np.arange(100) % 10, clients)
    assert "\n" not in str(caught.value)


def test_more_omniglot_clients_than_drawings():
    with pytest.raises(UserError, match="at most 20 clients"):
        partition("omniglot", np.zeros(100, int), 21, extra={"drawer": np.arange(100) % 20})


def test_every_partition_has_help():
    assert len(PARTITIONS) == 8 and all(
        entry.help.startswith(name) for name, entry in PARTITIONS.items()
    )


def test_tables_that_do_not_fit_in_memory_are_refused(monkeypatch):
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "available", lambda: 10_000)
    y = np.arange(2000) % 50
    for spec in ("dirichlet:0.1", "fixed:2", "pathological:2", "shards:2"):
        with pytest.raises(
            UserError,
            match="with 20 clients and 50 classes needs about 40000 bytes of memory, but 10000",
        ):
            partition(spec, y, clients=20)
    assert len(partition("iid", y, clients=20)) == 20


@pytest.mark.parametrize(
    "spec, message",
    [
        ("dirichlet:²", "finite number above 0"),
        ("dirichlet:0.1,tries=1000000", "at most 100000"),
        ("dirichlet:0.1,min=1_0", "plain digits"),
        ("shards:" + "9" * 30, "at most 2"),
        ("dirichlet:0.1,alpha=2", "alpha twice"),
        ("mnist_star:1000000000/1/1", "shares like"),
        ("no\nsuch", r"no\\nsuch"),
    ],
)
def test_hostile_specs(spec, message):
    with pytest.raises(UserError, match=message) as caught:
        partition(spec, np.arange(100) % 10, clients=5)
    assert "\n" not in str(caught.value)


def test_domains_must_be_whole_numbers():
    for domain in (np.zeros(30), np.full(30, -1), np.full(30, "a"), np.full(30, 2**40)):
        with pytest.raises(UserError, match="needs whole numbers from 0 up as 'domain'"):
            partition("mnist_star", np.zeros(30, int), clients=3, extra={"domain": domain})
