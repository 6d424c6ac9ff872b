"""The headroom benchmark: the oracle against brute force, padding that changes nothing, a table
that resumes where it was."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import M, close, simulation, start

from benchmarks import headroom, headroom_page, oracle, pages
from benchmarks.headroom_runs import SCALES, Variant, data_of, federation, goals, run_variants
from benchmarks.headroom_runs import simulation as compiled_for
from fedjax_sim.local.score import mean_loss

SCALE = dataclasses.replace(SCALES["smoke"], rounds=3)


# ---- the oracle ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def later():
    """A simulation, and a State of it in which some have taken part and others not."""
    sim = simulation("fedpolicy", agent="rule", rule="keep_head: size<0")
    state, data = start(sim)
    return sim, sim.examine(state, data)[0], data


def tried_by(sim, state, data):
    r = dataclasses.replace(sim.stages, stacks=True)
    env, round_plan = sim.open(data), sim.plan_round(state, data)
    return env, round_plan, oracle.try_all(r, env, state, round_plan)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_coordinate_descent_against_brute_force(later, weight):
    """Three of the pairs, all 3^M cohorts: never better than the best, never worse than `full`, no
    single exchange left; where clients do not interact (w = 1), the best itself."""
    sim, state, data = later

    def both(state, data, weight):
        env, _, tried = tried_by(sim, state, data)
        value = oracle.objective(env, tried, state.server.net, weight)
        some = jnp.array([0, 5, 10])  # full/all, backbone/backbone, head/head
        few = lambda choice: value(some[choice])
        found = oracle.search(few, M, 3)
        near = jax.vmap(lambda i: jax.vmap(lambda k: few(found.at[i].set(k)))(jnp.arange(3)))
        best = oracle.brute_force(few, M, 3)[1]
        return few(found), best, few(jnp.zeros(M, jnp.int32)), near(jnp.arange(M))

    both = jax.jit(both)
    found, best, full, near = (np.asarray(a) for a in both(state, data, weight))
    assert best <= found <= full and found < full
    assert (near >= found - 1e-6).all()
    assert found - best <= 0.5 * (full - best)
    found, best, *_ = both(state, data, 1.0)
    np.testing.assert_allclose(found, best, rtol=1e-6)


def test_the_oracles_full_is_the_engines_round(later):
    """Pair 0 for everybody is a round of `full`; and what the objective says is the loss of what
    the server then has."""
    sim, state, data = later

    def chosen(state, data, choice):
        env, round_plan, tried = tried_by(sim, state, data)
        value = oracle.objective(env, tried, state.server.net, 0.0)(choice)
        round_plan, outcome = oracle.carried_out(env, state, round_plan, tried, choice)
        server, _, log = oracle.stages.aggregate(sim.stages, env, state, round_plan, outcome)
        rows = env.fed.server_rows["val"]
        return (
            server,
            outcome.clients,
            log,
            value,
            mean_loss(env, server.net, rows, jnp.int32(len(rows))),
        )

    server, clients, _, value, loss = jax.jit(chosen)(state, data, jnp.zeros(M, jnp.int32))
    after = sim.examine(state, data)[0]
    assert close((server, clients), (after.server, after.clients), 1e-5)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    # everything; backbone/backbone; head taken, nothing sent; backbone taken, head sent
    other = jnp.array([0, 5, 11, 6])
    server, _, log, value, loss = jax.jit(chosen)(state, data, other)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    assert np.asarray(log["sent"]).tolist() == [2, 2]


def test_oracle_rounds_lower_the_loss_they_look_at(later):
    sim, state, data = later
    env = sim.open(data)
    rows = env.fed.server_rows["val"]
    loss = jax.jit(lambda net: mean_loss(sim.open(data), net, rows, jnp.int32(len(rows))))
    mine, _ = jax.jit(lambda s, d: oracle.oracle_round(sim, s, d, 0.0))(state, data)
    full = sim.examine(state, data)[0]
    assert float(loss(mine.server.net)) < float(loss(full.server.net))
    assert int(mine.t) == int(full.t)
    later_on = jax.jit(lambda s, d: oracle.branches(sim, s, d, 2))(state, data)
    assert later_on.shape == (2,) and np.isfinite(later_on).all()


# ---- runs and tables -----------------------------------------------------------------------------
def test_variants_are_the_runs_and_padding_changes_nothing():
    """A rule beside others gives what the method gives alone on the unpadded federation."""
    import fedjax_sim as fs

    fed = federation(SCALE, "digits", None, 0.1, 3, False)
    rule = "keep_head: effective_classes<3"
    program = compiled_for(SCALE, headroom.ruled(), "digits", None)
    variants = [Variant("full", "", 0.05), Variant("few", rule, 0.1, taken=True)]
    found = run_variants(SCALE, program, fed, variants, 3)
    whole = {k: a[:, : int(fed.size[k].max())] for k, a in fed.rows.items()}
    alone = fs.run(
        "fedpolicy",
        dataclasses.replace(fed, rows=whole),
        agent="rule",
        rule=rule,
        send="taken",
        model="mlp",
        participation=f"{SCALE.cohort}/{SCALE.clients}",
        rounds=SCALE.rounds,
        epochs=SCALE.epochs,
        batch_size=SCALE.batch,
        lr=0.1,
        momentum=0.0,
        weight_decay=0.0,
        loss="ce",
        seed=3,
        chunk="1",
        devices="1",
        **{"model.hidden": (8,)},
    )
    rows = [row for row in alone.rows if row["round"]]
    np.testing.assert_allclose(
        found[1]["test"], [100 * row["global_acc"] for row in rows], atol=0.01
    )
    np.testing.assert_allclose(
        found[1]["clients"], [100 * row["client_mean"] for row in rows], atol=0.01
    )
    assert found[1]["bytes"][-1] == alone.summary["bytes_up"] + alone.summary["bytes_down"]
    assert data_of(program.sim, fed).flat_owner.max() == SCALE.clients


def test_goals_by_hand():
    found = dict(
        test=[10.0, 20.0, 30.0, 40.0],
        val=[1.0, 2.0, 3.0, 4.0],
        clients=[50.0, 60.0, 70.0, 80.0],
        worst=[0.0, 0.0, 5.0, 7.0],
        bytes=[100, 200, 300, 400],
    )
    scores = goals(found, 300, 2)
    assert scores == {"global": 35, "clients": 75, "worst": 6, "budget": 25, "val": 3.5}


def test_paired_differences_are_students():
    from scipy import stats

    a, b = {0: 3.0, 1: 4.5, 2: 7.0}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 0.0}
    gain = headroom_page.paired(a, b)
    low, high = stats.ttest_1samp([2.0, 2.5, 4.0], 0).confidence_interval(0.95)
    np.testing.assert_allclose([gain.mean - gain.half, gain.mean + gain.half], [low, high])
    assert headroom_page.paired({0: None}, {0: 1.0}) is None


def test_smoke_run_and_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(headroom, "BASELINES", ("fedper",))
    monkeypatch.setattr(headroom, "SCHEDULES", ("constant",))
    small = dataclasses.replace(SCALE, seeds=1)
    monkeypatch.setitem(headroom.SCALES, "smoke", small)
    main = lambda *more: headroom.main(["--scale", "smoke", "--out", str(tmp_path), *more])
    (tmp_path / "headroom.md").write_text(
        "before\n{}\nearlier tables\n{}\nafter\n".format(*pages.marks("fedpolicy"))
    )
    main()
    page, lines = (tmp_path / "headroom.md").read_text(), tmp_path / "headroom-smoke.jsonl"
    assert page.startswith("before") and page.endswith("after\n") and "earlier" not in page
    assert "few classes < 2.5 keep head, `taken`" in page and "digits 0.1" in page
    kept = lines.read_text()
    rows = json.loads((tmp_path / "headroom.json").read_text())
    full = next(r for r in rows if (r["part"], r["row"]) == ("constant", "full"))
    assert full["global_minus_full"][0] == 0
    main()  # nothing is missing
    assert lines.read_text() == kept
    text = kept.splitlines()
    lines.write_text("\n".join(text[:-1]) + "\n" + text[-1][:10])  # cut short
    main()
    assert len(lines.read_text().splitlines()) == len(text) + 1
