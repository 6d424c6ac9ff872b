"""Local optimisers of optax: against independent loops, as arguments of the program, kept with the
client, and refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_sim as fs
from fedjax_sim.api import set_up
from fedjax_sim.cli.main import main
from fedjax_sim.local.optimizers import OPTIMIZERS
from fedjax_sim.runner.facts import facts
from fedjax_sim.runner.many import run_values

SIZES, BATCH, EPOCHS, RATE = (7, 4, 10), 4, 2, 0.03
HOW = dict(
    model="mlp",
    participation="1",
    rounds=3,
    epochs=EPOCHS,
    batch_size=BATCH,
    shuffle="off",
    devices="1",
    chunk="2",
)
WIDTH = {"model_options": {"hidden": (5,)}}


@functools.cache
def federation(dtype=np.float64) -> fs.Federation:
    rng = np.random.default_rng(3)
    total = sum(SIZES) + 4
    x, y = rng.normal(size=(total, 6)).astype(dtype), rng.integers(0, 3, total)
    cuts = np.split(np.arange(total), np.cumsum(SIZES))
    return fs.Federation.from_arrays(
        x, y, {"train": cuts[:-1]}, test=cuts[-1], classes=3, mean=0.0, std=1.0
    )


def run(**options):
    return fs.run("fedavg", federation(), **{**HOW, **WIDTH, **options})


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(a) for a in jax.tree.leaves(tree)]


# ---- independent loops ---------------------------------------------------------------------------
class NumpyAdam:
    """Adam, and backpropagation through the one hidden layer, by hand."""

    def __init__(self):
        self.m = self.v = None
        self.t = 0

    def step(self, w, x, y, decay):
        a, c, b, d = w  # fc1 kernel and bias, fc kernel and bias
        before = x @ a + c
        hidden = np.maximum(before, 0)
        z = hidden @ b + d
        p = np.exp(z - z.max(1, keepdims=True))
        p = p / p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        slope = p / len(y)
        back = (slope @ b.T) * (before > 0)
        grads = [x.T @ back, back.sum(0), hidden.T @ slope, slope.sum(0)]
        self.t += 1
        self.m = [0 * g for g in grads] if self.m is None else self.m
        self.v = [0 * g for g in grads] if self.v is None else self.v
        self.m = [0.9 * m + 0.1 * g for m, g in zip(self.m, grads, strict=True)]
        self.v = [0.999 * v + 0.001 * g * g for v, g in zip(self.v, grads, strict=True)]
        unit = lambda m, v: (m / (1 - 0.9**self.t)) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8)
        return [
            p - RATE * (unit(m, v) + decay * p) for p, m, v in zip(w, self.m, self.v, strict=True)
        ]


class TorchAdam:
    """The same by PyTorch's autograd and its own AdamW."""

    def __init__(self):
        self.torch = pytest.importorskip("torch")
        self.rule = None

    def step(self, w, x, y, decay):
        torch = self.torch
        if self.rule is None:
            self.w = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in w]
            self.rule = torch.optim.AdamW(self.w, lr=RATE, weight_decay=decay)
        with torch.no_grad():
            for mine, given in zip(self.w, w, strict=True):
                mine.copy_(torch.tensor(given))
        a, c, b, d = self.w
        z = torch.relu(torch.tensor(x) @ a + c) @ b + d
        self.rule.zero_grad()
        torch.nn.functional.cross_entropy(z, torch.tensor(y)).backward()
        self.rule.step()
        return [p.detach().numpy().copy() for p in self.w]


def by_hand(rule, net, state: str, decay: float) -> list[np.ndarray]:
    """FedAvg of all clients, three rounds."""
    fed, kept = federation(), {}
    p = net["params"]
    w = [
        np.array(a, np.float64)
        for a in (p["fc1"]["kernel"], p["fc1"]["bias"], p["fc"]["kernel"], p["fc"]["bias"])
    ]
    for _ in range(HOW["rounds"]):
        total = [0 * a for a in w]
        for client, n in enumerate(SIZES):
            rows = fed.client_rows(client)
            own = kept.setdefault(client, rule()) if state == "client" else rule()
            mine = w
            for _ in range(EPOCHS):
                for i in range(0, n, BATCH):
                    x = np.asarray(fed.x)[rows[i : i + BATCH]].reshape(-1, 6)
                    mine = own.step(
                        mine, x, np.asarray(fed.y)[rows[i : i + BATCH]].astype(np.int64), decay
                    )
            total = [t + n / sum(SIZES) * m for t, m in zip(total, mine, strict=True)]
        w = total
    return w


@pytest.mark.parametrize("rule", [NumpyAdam, TorchAdam])
@pytest.mark.parametrize("state", ["round", "client"])
def test_adam_equals_an_independent_loop_in_float64(rule, state):
    decay = 0.1
    rule()  # or skip
    result = run(
        optimizer=f"adamw:lr={RATE},weight_decay={decay}", optimizer_state=state, dtype="float64"
    )
    p = result.net["params"]
    ours = [p["fc1"]["kernel"], p["fc1"]["bias"], p["fc"]["kernel"], p["fc"]["bias"]]
    for mine, theirs in zip(ours, by_hand(rule, result.setup.net, state, decay), strict=True):
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-10, atol=1e-12)


# ---- by name and as an object --------------------------------------------------------------------
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "sgd"])
def test_every_rule_makes_a_round(name):
    before, after = (
        set_up("fedavg", federation(), optimizer=name, **HOW, **WIDTH).net,
        run(optimizer=name, rounds=1),
    )
    moved = [
        float(np.abs(a - b).max()) for a, b in zip(leaves(before), leaves(after.net), strict=True)
    ]
    assert max(moved) > 0 and np.isfinite(moved).all()


def test_an_object_is_its_name():
    named = run(optimizer="adamw:lr=1e-3,weight_decay=0.02")
    given = run(optimizer=optax.adamw(1e-3, weight_decay=0.02))
    injected = run(optimizer=optax.inject_hyperparams(optax.adamw)(1e-3, weight_decay=0.02))
    for a, b, c in zip(leaves(named.net), leaves(given.net), leaves(injected.net), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-7)


def test_a_line_search_gets_what_it_asks_for():
    assert np.isfinite(run(optimizer=optax.lbfgs(), rounds=1).summary["last_global"])


def test_numbers_are_arguments():
    text = lambda s: s.simulation.run.lower(s.first_state(), s.simulation.data, 1, True).as_text()
    one = set_up(
        "fedavg", federation(), optimizer="adamw:b1=0.9", lr=0.1, clip_norm=1, **HOW, **WIDTH
    )
    two = set_up(
        "fedavg", federation(), optimizer="adamw:b1=0.5", lr=0.2, clip_norm=2, **HOW, **WIDTH
    )
    assert text(one) == text(two)
    a = set_up(
        "fedavg", federation(), optimizer=optax.inject_hyperparams(optax.adam)(0.1), **HOW, **WIDTH
    )
    b = set_up(
        "fedavg", federation(), optimizer=optax.inject_hyperparams(optax.adam)(0.2), **HOW, **WIDTH
    )
    here = a.simulation.run(a.first_state(), b.simulation.data, 1, True)[
        0
    ].server.net  # a's program, b's numbers
    there = b.simulation.run(b.first_state(), b.simulation.data, 1, True)[0].server.net
    assert all((p == q).all() for p, q in zip(leaves(here), leaves(there), strict=True))


def test_values_of_a_rule_side_by_side():
    setup = set_up("fedavg", federation(), optimizer="adam:b1=0.9", lr=0.05, **HOW, **WIDTH)
    side = run_values(setup, "optimizer.b1", [0.9, 0.2])
    for result, b1 in zip(side, (0.9, 0.2), strict=True):
        alone = run(optimizer=f"adam:b1={b1}", lr=0.05)
        for a, b in zip(leaves(result.net), leaves(alone.net), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_sgd_behind_its_name_is_the_run_with_its_options():
    one, two = (
        run(optimizer="sgd:lr=0.1,momentum=0.5,weight_decay=0"),
        run(lr=0.1, momentum=0.5, weight_decay=0.0),
    )
    assert all((a == b).all() for a, b in zip(leaves(one.net), leaves(two.net), strict=True))
    assert one.setup.hash == two.setup.hash


# ---- clipping and schedules ----------------------------------------------------------------------
def test_a_clipped_step_is_no_longer_than_it_may_be():
    options = dict(momentum=0.0, weight_decay=0.0, lr=1.0, rounds=1, epochs=0.01, batch_size="full")
    start = set_up("fedavg", federation(), **{**HOW, **WIDTH, **options}).net
    far = lambda r: float(
        jnp.sqrt(
            sum(((a - b) ** 2).sum() for a, b in zip(leaves(r.net), leaves(start), strict=True))
        )
    )
    free, clipped = run(**options), run(clip_norm=0.1, **options)
    assert far(free) > 0.2
    assert far(clipped) <= 0.1 + 1e-6  # a mean of steps of this length
    step = next(fs.rounds("fedavg", federation(), clip_norm=0.1, **{**HOW, **WIDTH, **options}))
    for client in range(3):
        own = jax.tree.map(lambda a: a[client], step.uploads)
        gap = sum(
            ((np.asarray(a) - b) ** 2).sum()
            for a, b in zip(jax.tree.leaves(own), leaves(start), strict=True)
        )
        np.testing.assert_allclose(np.sqrt(gap), 0.1, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "factors"),
    [
        ("linear:end=0.5", lambda k, s: 1 - 0.5 * k / s),
        ("cosine", lambda k, s: 0.5 * (1 + np.cos(np.pi * k / s))),
        ("warmup:steps=4", lambda k, s: min((k + 1) / 4, 1)),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "signsgd"])
def test_schedules_within_a_round(text, factors, optimizer):
    """Six equal examples and a small rate: every gradient is nearly the same, and the way gone is
    the sum of the rates."""
    x, y = np.ones((8, 1)), np.zeros(8, int)
    fed = fs.Federation.from_arrays(
        x, y, {"train": [range(6)]}, test=[6, 7], classes=2, mean=0.0, std=1.0
    )
    how = dict(
        HOW,
        rounds=1,
        epochs=1,
        batch_size=1,
        momentum=0.0,
        weight_decay=0.0,
        lr=1e-4,
        optimizer=optimizer,
    )
    if optimizer == "signsgd":
        how = {k: v for k, v in how.items() if k not in ("momentum", "weight_decay")}
    plain = fs.run("fedavg", fed, **how, **WIDTH)
    bent = fs.run("fedavg", fed, local_schedule=text, **how, **WIDTH)
    start = np.asarray(plain.setup.net["params"]["fc"]["bias"])
    gone = [np.asarray(r.net["params"]["fc"]["bias"]) - start for r in (plain, bent)]
    share = sum(factors(k, 6) for k in range(6)) / 6
    np.testing.assert_allclose(gone[1] / gone[0], share, rtol=2e-3)


# ---- state that stays ----------------------------------------------------------------------------
def test_kept_state_is_counted_and_resumed(tmp_path):
    options = dict(HOW, optimizer="adam", optimizer_state="client", lr=0.01, **WIDTH)
    setup = set_up("fedavg", federation(np.float32), **options)
    params = sum(a.size for a in jax.tree.leaves(setup.net["params"]))
    assert facts(setup)["per_client"] == 2 * 4 * params + 4  # two moments and a counter
    whole = fs.run("fedavg", federation(np.float32), **options)
    fs.run("fedavg", federation(np.float32), out=tmp_path / "a", **{**options, "rounds": 1})
    again = fs.resume(tmp_path / "a", 3, fed=federation(np.float32))
    assert all((a == b).all() for a, b in zip(leaves(whole.net), leaves(again.net), strict=True))
    fresh = fs.run("fedavg", federation(np.float32), **{**options, "optimizer_state": "round"})
    assert not all(
        (a == b).all() for a, b in zip(leaves(whole.net), leaves(fresh.net), strict=True)
    )


def test_momentum_that_stays():
    """One client: rounds with a kept state are one long round."""
    fed = fs.Federation.from_arrays(
        np.random.default_rng(0).normal(size=(10, 6)),
        np.arange(10) % 3,
        {"train": [range(8)]},
        test=[8, 9],
    )
    how = dict(HOW, lr=0.05, momentum=0.9, dtype="float64", **WIDTH)
    many = fs.run("fedavg", fed, optimizer_state="client", **{**how, "rounds": 4, "epochs": 1})
    once = fs.run("fedavg", fed, **{**how, "rounds": 1, "epochs": 4})
    for a, b in zip(leaves(many.net), leaves(once.net), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_resume_needs_the_same_object(tmp_path):
    fs.run(
        "fedavg",
        federation(np.float32),
        out=tmp_path / "a",
        **{**HOW, "rounds": 1},
        optimizer=optax.adam(1e-3),
        **WIDTH,
    )
    with pytest.raises(fs.UserError, match="an optimiser given as an object"):
        fs.resume(tmp_path / "a", 2, fed=federation(np.float32))
    with pytest.raises(fs.UserError, match="the optimiser is not that of the run"):
        fs.resume(tmp_path / "a", 2, fed=federation(np.float32), optimizer=optax.adam(2e-3))
    assert (
        fs.resume(
            tmp_path / "a", 2, fed=federation(np.float32), optimizer=optax.adam(1e-3)
        ).summary["rounds"]
        == 2
    )


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(optimizer="adm"), "unknown optimizer 'adm' .did you mean 'adam'"),
        (dict(optimizer="adam:beta=1"), "unknown option of optimizer 'adam' 'beta'"),
        (dict(optimizer="adam:b1=big"), "optimizer adam.b1 'big' is not a number"),
        (dict(optimizer="adam:b1"), "cannot be read; example: adamw:lr=1e-3"),
        (dict(optimizer="adam:lr=0.1", lr=0.2), "lr is given twice"),
        (dict(optimizer="adam", momentum=0.5), "momentum 0.5 belongs to optimizer sgd"),
        (dict(optimizer="adam", decay_groups="fc"), "adam, which has no weight decay"),
        (dict(optimizer=3), "neither a name .* nor an optax.GradientTransformation"),
        (dict(optimizer_state="always"), "unknown optimizer-state 'always'"),
        (dict(optimizer_state="client", momentum=0.0), "has no state to keep"),
        (dict(local_schedule="linear:to=1"), "local-schedule 'linear' has no option 'to'"),
        (dict(clip_norm=-1), "clip-norm -1.0 is too small"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(fs.UserError, match=message):
        set_up("fedavg", federation(np.float32), **HOW, **WIDTH, **options)


@pytest.mark.parametrize("method", ["scaffold", "pfedme", "apfl", "perfedavg"])
@pytest.mark.parametrize(
    "options", [dict(optimizer="adam"), dict(clip_norm=1.0), dict(local_schedule="cosine")]
)
def test_methods_whose_equations_are_of_sgd_say_so(method, options):
    with pytest.raises(fs.UserError, match=f"method '{method}' does not go with .*; use plain sgd"):
        set_up(method, federation(np.float32), **HOW, **WIDTH, **options)
    with pytest.raises(fs.UserError, match="use plain sgd"):
        set_up(
            fs.Clip(1.0, fs.make_method(method)), federation(np.float32), **HOW, **WIDTH, **options
        )


@pytest.mark.parametrize(
    ("method", "message"), [("ditto", "trains more than once"), ("fedrep", "trains some groups")]
)
def test_one_state_serves_one_pass(method, message):
    with pytest.raises(fs.UserError, match=message):
        fs.run(
            method,
            federation(np.float32),
            optimizer="adam",
            optimizer_state="client",
            **HOW,
            **WIDTH,
        )


def test_on_the_command_line(tmp_path, capsys):
    argv = "run fedavg --model mlp --clients 3 --rounds 1 --epochs 1 --devices 1 --chunk 1 --quiet"
    more = [
        "--optimizer",
        "adamw:lr=1e-3,weight_decay=0.01",
        "--clip-norm",
        "1.0",
        "--optimizer-state",
        "client",
    ]
    assert main([*argv.split(), *more, "--out", str(tmp_path / "a")]) == 0
    assert main(["list", "optimizers"]) == 0
    assert "adamw" in capsys.readouterr().out
