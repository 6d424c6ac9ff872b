"""`--state-on host`: the same numbers as on the device, resume included, and only the cohort's rows
on the device."""

import jax
import numpy as np
import pytest
from tiny import N, federation

import fedjax_sim as fs
from fedjax_sim.cli.main import main
from fedjax_sim.engine import host_clients
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.hooks import Method, Server, SetsUp
from fedjax_sim.runner import checkpoint
from fedjax_sim.runner import execute as runner
from fedjax_sim.runner.prepare import prepare
from fedjax_sim.runner.run_directory import RunDirectory

EVERY = ("global", "personal", "personal@global", "resident")


def config(method: str, **options) -> Experiment:
    return Experiment.of(
        method,
        **{
            **dict(
                model="mlp",
                model_options={"hidden": (5,)},
                participation=f"3/{N}",
                rounds=4,
                epochs=1,
                batch_size=4,
                eval_every=2,
                evaluations=EVERY,
                devices="1",
                chunk="1",
            ),
            **options,
        },
    )


def numbers(rows: list[dict]) -> np.ndarray:
    return np.asarray([[float(row[k]) for k in sorted(row)] for row in rows])


def run(method: str, out=None, **options) -> runner.Result:
    setup = prepare(config(method, **options), fed=federation())
    return runner.execute(setup, RunDirectory(out) if out else None)


@pytest.mark.parametrize(
    ("method", "where"), [("ditto", {}), ("random", {}), ("random", {"devices": "4", "chunk": "2"})]
)
def test_host_gives_the_numbers_of_the_device(method, where):
    device, host = run(method, **where), run(method, state_on="host", **where)
    np.testing.assert_allclose(numbers(host.rows), numbers(device.rows), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(numbers(host.rounds), numbers(device.rounds), rtol=1e-6, atol=1e-6)
    for name in device.clients:
        np.testing.assert_allclose(host.clients[name], device.clients[name], rtol=1e-6, atol=1e-6)
    # rows beyond are nobody's: they fill up the devices' shares
    count = device.setup.fed.num_clients
    real = lambda state: jax.tree.leaves(
        (state._replace(clients=()), jax.tree.map(lambda a: a[:count], state.clients))
    )
    for mine, theirs in zip(real(host.state), real(device.state), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    assert all(isinstance(a, np.ndarray) for a in jax.tree.leaves(host.state.clients))
    changed = (
        np.abs(
            jax.tree.leaves(host.state.clients)[0] - jax.tree.leaves(host.state.clients)[0][0]
        ).sum()
        > 0
    )
    assert changed, "clients that trained must differ"


def test_controllers_observe_the_cohorts_rows():
    device, host = run("fedpolicy", loss="ce"), run("fedpolicy", loss="ce", state_on="host")
    np.testing.assert_allclose(numbers(host.rounds), numbers(device.rounds), rtol=1e-5, atol=1e-5)


def test_setup_is_streamed(monkeypatch):
    """A method that counts up in its own state: by its client number before round 1, by one per
    participation."""

    class Counting(SetsUp, Method):
        def init(self, env, net):
            return Server(net), np.float32(0)

        def setup(self, env, server, client, ctx):
            return client._replace(own=client.own + 100 * (ctx.id + 1))

        def local(self, env, net, server, client, ctx):
            after, up = super().local(env, net, server, client, ctx)
            return after._replace(own=client.own + 1), up

    # four rows of one float at a time: 4 + 2 clients
    monkeypatch.setattr(host_clients, "BLOCK", 4 * 4)
    setup = prepare(
        config("fedavg", evaluations=("global",), state_on="host", participation="1"),
        fed=federation(),
        method=Counting(),
    )
    result = runner.execute(setup, None)
    np.testing.assert_array_equal(result.state.clients.own, 100.0 * np.arange(1, N + 1) + 4)


@pytest.mark.parametrize("block", [1, 10**9])
def test_resume_repeats_an_uninterrupted_run(tmp_path, monkeypatch, block):
    monkeypatch.setattr(checkpoint, "BLOCK", block)  # 1: every leaf in rows, one at a time
    whole = run("ditto", state_on="host")
    run("ditto", tmp_path / "run", state_on="host", rounds=2)
    rest = fs.resume(tmp_path / "run", 4, fed=federation())
    assert len(rest.rows) == 2
    np.testing.assert_array_equal(numbers(rest.rows[-1:]), numbers(whole.rows[-1:]))
    on_device = prepare(config("ditto"), fed=federation())
    state = checkpoint.load(
        checkpoint.latest(tmp_path / "run" / "checkpoints"),
        on_device.simulation.init(0, on_device.net),
        on_device.hash,
    )
    for stored, kept in zip(jax.tree.leaves(state), jax.tree.leaves(rest.state), strict=True):
        np.testing.assert_array_equal(stored, kept)  # the device reads what the host wrote


def test_only_the_cohort_is_on_the_device():
    sim = prepare(
        config("ditto", state_on="host", participation=f"1/{N}"), fed=federation()
    ).simulation
    keeper = host_clients.HostClients(sim)
    state = sim.init(0, sim.env.model.init(jax.random.key(0)))
    rows = keeper.with_clients(state, np.asarray([3]))
    assert {a.shape[0] for a in jax.tree.leaves(rows.clients)} == {1}
    assert {a.shape[0] for a in jax.tree.leaves(state.clients)} == {N}


def test_what_cannot_be_streamed_is_refused(capsys):
    with pytest.raises(UserError, match="loop"):
        prepare(config("ditto", state_on="host", backend="loop"), fed=federation())
    assert main(["run", "ditto", "--state-on", "moon", "--dry-run"]) == 2
    assert "unknown state-on 'moon'; allowed: device, host" in capsys.readouterr().err
