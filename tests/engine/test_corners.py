"""Off the main road: statistics that stay on clients, rates that end at zero, clients kept out,
seeds beyond 32 bits, …"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import BATCH, M, N, same_bits, simulation, start
from tiny_bn import tiny_bn

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.evaluation import check_evaluations
from fedjax_sim.engine.keys import seed_key
from fedjax_sim.engine.participation import Participation, sample_distinct
from fedjax_sim.engine.records import make_data
from fedjax_sim.engine.simulation import simulate
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Personal
from fedjax_sim.local import epoch_permutations, optim
from fedjax_sim.local.score import predict_net
from fedjax_sim.local.threefry import counter_bits
from fedjax_sim.methods import make_method

MODES = ("global", "personal", "resident")


def run(
    method,
    *,
    model=None,
    lr=None,
    evaluations=MODES,
    seen=range(N),
    rounds=3,
    bn_local=False,
    **env,
):
    """(simulation, State after some rounds, data) on the tiny federation."""
    base = simulation("fedavg")
    fed = tiny.federation()
    facts = dataclasses.replace(
        base.env,
        model=model or base.env.model,
        bn_local=bn_local,
        rounds=rounds,
        kept_out=N - len(seen),
        track_confusion="confusion" in method.needs,
        **env,
    )
    lr = lr or optim.schedule("constant", 0.05, rounds)
    sim = simulate(
        method,
        facts,
        fed,
        Participation(M, M, tuple(seen)),
        lr=lr,
        evaluations=evaluations,
        eval_every=rounds,
        capacity=1,
    )
    state, data = start(sim)
    return sim, sim.run(state, data, jnp.int32(rounds))[0], data


# ---- BatchNorm statistics that stay on the client ------------------------------------------------
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedavg_ft"])
def test_clients_are_scored_with_their_own_statistics(name):
    fed = tiny.federation()
    model = tiny_bn(fed.shape, fed.classes)
    method = make_method(name, **({"ft_epochs": 0.0} if name == "fedavg_ft" else {}))
    sim, state, data = run(method, model=model, bn_local=True)
    scores = (sim.adapt if method.adapts else sim.evaluate)(state, data)["personal"]
    env = sim.open(data)
    for k in range(N):
        own = jax.tree.map(lambda a: a[k], state.clients.batch_stats)
        rows = fed.client_rows(k, "test")
        logits = predict_net(
            env, {**state.server.net, "batch_stats": own}, jnp.asarray(fed.x[rows])
        )
        loss = -jax.nn.log_softmax(logits)[jnp.arange(len(rows)), fed.y[rows]].sum()
        np.testing.assert_allclose(scores["loss"]["total"][k], loss, rtol=1e-4)


def test_a_predictor_of_its_own_gets_the_clients_statistics():
    """Also with `predict`: what a method makes of the server's net holds the client's
    statistics."""
    fed = tiny.federation()
    seen = {}

    class Wrapped(Personal, Method):
        def personal(self, env, server, client, ctx):
            return {"inner": server.net}

        def predict(self, env, predictor, x):
            seen["stats"] = predictor["inner"]["batch_stats"]
            return predict_net(env, predictor["inner"], x)

    sim, state, data = run(Wrapped(), model=tiny_bn(fed.shape, fed.classes), bn_local=True)
    plain, other, same = run(
        make_method("fedavg"), model=tiny_bn(fed.shape, fed.classes), bn_local=True
    )
    want, got = (
        plain.evaluate(other, same)["personal"]["loss"]["total"],
        sim.evaluate(state, data)["personal"]["loss"]["total"],
    )
    np.testing.assert_allclose(want, got, rtol=1e-5)
    assert seen


# ---- fine-tuning after a schedule that ends at zero ----------------------------------------------
def test_fine_tuning_uses_the_rate_of_the_last_round():
    """cosine is 0 at round T; what is adapted after round T must still move."""
    lr = optim.schedule("cosine", 0.05, 3)
    sim, state, data = run(
        make_method("fedavg_ft"), lr=lr, evaluations=("global", "global@clients", "personal")
    )
    assert float(lr(jnp.float32(3))) == 0 and float(lr(jnp.float32(2))) > 0
    tuned, plain = (
        sim.adapt(state, data)["personal"]["loss"]["total"],
        sim.evaluate(state, data)["global@clients"]["loss"]["total"],
    )
    assert (np.abs(np.asarray(tuned) - np.asarray(plain)) > 1e-4).all()


# ---- SCAFFOLD ------------------------------------------------------------------------------------
def test_scaffold_counts_the_clients_that_can_take_part():
    """c moves by n_t/N times the mean change of the c_k, N without the clients kept out of
    training."""
    seen = (0, 2, 3, 5)
    _, state, _ = run(make_method("scaffold"), seen=seen, rounds=1)
    mean = jax.tree.map(
        lambda own: np.asarray(own)[list(seen)].sum(0) / len(seen), state.clients.own
    )
    tiny.assert_close(mean, state.server.control, 1e-6)


def test_scaffold_applies_weight_decay():
    """Without control variates yet, one client alone for one round: plain SGD with the run's weight
    decay."""
    decayed = optim.Sgd(0.9, 0.5)
    method = make_method("scaffold")
    assert dict(method.replaces)["momentum"].startswith("0")
    _, with_decay, _ = run(method, rounds=1, optimizer=decayed)
    _, fedavg, _ = run(
        make_method("fedavg", weights="uniform"), rounds=1, optimizer=optim.Sgd(0.0, 0.5)
    )
    tiny.assert_close(with_decay.server.net, fedavg.server.net, 1e-6)


# ---- shuffles ------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 7, 200, 5000])
def test_a_shuffle_depends_on_its_own_size_alone(n):
    key = jax.random.key(5)
    tables = [(n, 1), (n + 13, 3), (4096 + n, 2), (9000, 4)]
    permutations = [
        np.asarray(epoch_permutations(key, jnp.int32(n), padded, epochs))
        for padded, epochs in tables
    ]
    for order in permutations:
        np.testing.assert_array_equal(order[0, :n], permutations[0][0, :n])
        assert sorted(order[0, :n].tolist()) == list(range(n))
    np.testing.assert_array_equal(permutations[1][1, :n], permutations[3][1, :n])
    assert n == 1 or not np.array_equal(permutations[1][0, :n], permutations[1][1, :n])


def test_another_clients_row_count_changes_nobodys_upload():
    sim = simulation("fedavg")
    state, data = start(sim)
    fed = tiny.federation()
    _, _, ids, nets = sim.examine(state, data)
    victim = int(ids[0])
    lists = {
        split: [fed.client_rows(k, split) for k in range(N)] for split in ("train", "val", "test")
    }
    lists["train"][victim] = np.concatenate([lists["train"][victim]] * 9)  # by far the largest now
    wide = Federation.from_arrays(
        fed.x,
        fed.y,
        lists,
        test=fed.server_rows["test"],
        server_val=fed.server_rows["val"],
        classes=fed.classes,
        mean=0.0,
        std=1.0,
    )
    assert wide.rows["train"].shape[1] > fed.rows["train"].shape[1] + BATCH
    _, _, ids2, nets2 = sim.examine(state, make_data(sim.stages, wide))
    assert np.array_equal(ids, ids2)
    others = lambda tree: jax.tree.map(lambda a: a[1:], tree)
    assert same_bits(others(nets), others(nets2))


@pytest.mark.parametrize("shape", [(1,), (300,)])
def test_bits_are_threefry(shape):
    key = jax.random.fold_in(jax.random.key(3), 4)
    low = jnp.arange(shape[0], dtype=jnp.uint32)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            np.testing.assert_array_equal(
                counter_bits(key, jnp.uint32(0), low), jax.random.bits(key, shape, jnp.uint32)
            )
    from jax.extend.random import threefry_2x32

    high = jnp.full(shape, 7, jnp.uint32)
    bits = threefry_2x32(jax.random.key_data(key), jnp.concatenate([high, low]))
    np.testing.assert_array_equal(counter_bits(key, high, low), bits[: shape[0]] ^ bits[shape[0] :])


# ---- divergence ----------------------------------------------------------------------------------
def test_what_a_client_keeps_is_guarded_too():
    """Ditto's private model may diverge alone: the upload is fine, the client counts as diverged
    and stays as it was."""
    # the pull overflows in the second step; the global branch knows nothing of it
    method = make_method("ditto", lam=1e30)
    sim, _, _ = run(method, rounds=1)
    state, data = start(sim)
    after, log, _, nets = sim.examine(state, data)
    assert int(log["diverged"]) > 0
    assert all(
        np.isfinite(a).all()
        for a in tiny.arrays((after.clients, nets, after.server))
        if a.dtype.kind == "f"
    )


# ---- evaluation modes ----------------------------------------------------------------------------
def test_modes_without_a_model_are_refused():
    with pytest.raises(
        UserError,
        match="'personal@global' is not possible with method 'fedavg': its clients have no",
    ):
        check_evaluations(make_method("fedavg"), ("global", "personal@global"), False)
    with pytest.raises(
        UserError,
        match=r"'global@clients' is not possible .* no global model; allowed: global, personal",
    ):
        check_evaluations(make_method("local"), ("global@clients",), False)
    check_evaluations(make_method("fedavg"), ("personal@global",), True)
    check_evaluations(make_method("local"), ("global", "personal", "resident"), False)
    with pytest.raises(UserError, match="unknown evaluation 'globl'"):
        check_evaluations(make_method("local"), ("globl",), False)


# ---- draws ---------------------------------------------------------------------------------------
def test_all_bits_of_a_seed_count():
    keys = [seed_key(s) for s in (0, 1, 2**32, 2**32 + 1, 2**63)]
    assert len({k.tobytes() for k in keys}) == len(keys)
    np.testing.assert_array_equal(seed_key(7), jax.random.key_data(jax.random.key(7)))
    sim = simulation("fedavg")
    net = sim.env.model.init(jax.random.key(0))
    a, b = (
        sim.examine(tiny.place(sim.layout, sim.init(s, net), sim.data)[0], sim.data)
        for s in (0, 2**32)
    )
    assert not same_bits(a[3], b[3])


def test_cohorts_do_not_depend_on_the_precision():
    part = Participation(3, 9, tuple(range(20)), dropout=0.3, slow=(0.5, 0.2))
    ids = jnp.arange(20, dtype=jnp.int32)

    def draws():
        key = jax.random.key(11)
        return [
            np.asarray(a, np.float32)
            for t in range(20)
            for k in [jax.random.fold_in(key, t)]
            for a in (
                *part.sample(k, jnp.int32(t)),
                part.reports(k, ids),
                part.share_of_work(k, ids),
            )
        ]

    single = draws()
    with jax.enable_x64(True):
        double = draws()
    for a, b in zip(single, double, strict=True):
        np.testing.assert_array_equal(a, b)


def test_sampled_clients_are_different_and_uniform():
    draw = jax.jit(jax.vmap(lambda k: sample_distinct(k, 6, 9)))
    ids = np.asarray(draw(jax.random.split(jax.random.key(1), 6000)))
    assert all(len(set(row)) == 6 for row in ids.tolist()) and ids.min() == 0 and ids.max() == 8
    for place in range(
        6
    ):  # every number is equally likely in every place: 667 of 6000, deviation 24
        assert np.abs(np.bincount(ids[:, place], minlength=9) - 6000 / 9).max() < 5 * 25
    pairs = np.bincount(ids[:, 0] * 9 + ids[:, 5], minlength=81).reshape(9, 9)
    assert (np.diag(pairs) == 0).all() and np.abs(
        pairs[~np.eye(9, dtype=bool)] - 6000 / 72
    ).max() < 60


def test_many_clients_are_sampled_without_replacement():
    part = Participation(20, 20, tuple(range(5, 5005)))
    ids, _ = jax.jit(part.sample)(jax.random.key(0), jnp.int32(0))
    assert (
        len(set(np.asarray(ids).tolist())) == 20 and int(ids.min()) >= 5 and int(ids.max()) < 5005
    )


# ---- steps ---------------------------------------------------------------------------------------
def test_steps_of_every_pass_are_counted():
    """Ditto trains twice; its personal epochs may differ from the run's."""
    per_epoch = -(-np.array(tiny.SIZES) // BATCH)
    for chunk in (1, 2):
        sim = simulation("ditto", chunk=chunk, personal_epochs=3.0)
        _, log, ids, _ = sim.examine(*start(sim))
        assert int(log["steps_needed"]) == (2 + 3) * per_epoch[np.asarray(ids)].sum()
        assert int(log["steps_executed"]) >= int(log["steps_needed"])
    one = simulation("ditto", personal_epochs=3.0)
    log = one.examine(*start(one))[1]
    assert int(log["steps_executed"]) == int(log["steps_needed"])


@pytest.mark.parametrize("name", ["fedpac", "fedas"])
def test_steps_of_a_pass_before_training_are_counted(name):
    """FedPAC's epoch on the head; FedAS's alignment, in batches of 16."""
    sizes = np.array(tiny.SIZES)
    per_epoch = -(-sizes // BATCH)
    before = {"fedpac": per_epoch, "fedas": -(-sizes // 16)}[name]
    sim = simulation(name)
    _, log, ids, _ = sim.examine(*start(sim))
    assert (
        int(log["steps_needed"])
        == int(log["steps_executed"])
        == (2 * per_epoch + before)[np.asarray(ids)].sum()
    )


# ---- probes --------------------------------------------------------------------------------------
def test_layer_distances_are_those_of_the_uploads():
    """`--probe`: per parameter group, the mean over the participants of ‖w_k − Θ‖, Θ as the round
    began."""
    base = simulation("fedavg")
    sim = dataclasses.replace(base, stages=dataclasses.replace(base.stages, probe=True))
    state, data = start(base)
    _, _, _, nets = base.examine(state, data)
    from fedjax_sim.engine.round import one_round

    log = jax.jit(lambda s, d: one_round(sim.stages, sim.open(d), s, d.dropout)[1])(state, data)
    for group in sim.env.model.groups:
        far = [
            np.sqrt(
                sum(
                    np.square(np.asarray(a)[k] - np.asarray(b)).sum()
                    for a, b in zip(*leaves, strict=True)
                )
            )
            for leaves in [[jax.tree.leaves(t["params"][group]) for t in (nets, state.server.net)]]
            for k in range(M)
        ]
        np.testing.assert_allclose(log[f"layer_dist_{group}"], np.mean(far), rtol=1e-5)
