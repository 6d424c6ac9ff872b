"""`export`: what is in the file is what was scored in the run, in both formats, and a run can start
from it."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from commands import SMALL, empty_folder, refused

import fedjax_sim as fs
from fedjax_sim.cli.main import main

__all__ = ["empty_folder"]  # used by every test


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> pathlib.Path:
    """fedavg (one common model), fedpam (clients that predict with more than a net), local (no
    common model)."""
    root = tmp_path_factory.mktemp("export")
    for method in ("fedavg", "fedpam", "local"):
        assert (
            main(
                [
                    "run",
                    method,
                    *SMALL,
                    "--rounds",
                    "2",
                    "--protocol",
                    "pfllib",
                    "--out",
                    str(root / method),
                ]
            )
            == 0
        )
    return root


def federation():
    return fs.federate("digits", "dirichlet:0.3", clients=6, protocol="pfllib", batch_size=32)


def accuracy(model: fs.Exported, rows: np.ndarray) -> float:
    fed = federation()
    return float(
        (np.asarray(model(np.asarray(fed.x)[rows])).argmax(-1) == np.asarray(fed.y)[rows]).mean()
    )


@pytest.mark.parametrize("ending", ["npz", "msgpack"])
def test_the_global_model_scores_as_in_the_run(runs, ending, capsys):
    assert main(["export", str(runs / "fedavg"), "--out", f"model.{ending}"]) == 0
    model = fs.load_model(f"model.{ending}")
    summary = json.loads((runs / "fedavg" / "summary.json").read_text())
    assert accuracy(model, np.asarray(federation().server_rows["test"])) == pytest.approx(
        summary["last_global"], abs=1e-6
    )
    assert model.about["round"] == 2 and model.about["client"] is None


def test_a_clients_predictor_scores_as_in_the_run(runs):
    """FedPAM: a net and a private matrix; the method's own prediction rule."""
    with np.load(runs / "fedpam" / "clients.npz") as file:
        correct, count = file["personal_correct"][-1], file["personal_count"]
    for client in (0, 4):
        file = fs.export(runs / "fedpam", f"client-{client}.npz", client)
        rows = federation().client_rows(client, "test")
        assert accuracy(fs.load_model(file), rows) == pytest.approx(
            correct[client] / count[client], abs=1e-6
        )
    private = [np.asarray(fs.load_model(f"client-{k}.npz").net[1]).tobytes() for k in (0, 4)]
    assert private[0] != private[1]
    common = fs.load_model(fs.export(runs / "fedpam", "common.npz"))
    assert set(common.net) == {"params", "batch_stats"}


def test_the_example_runs_and_is_short(runs, capsys):
    assert main(["export", str(runs / "fedavg"), "--out", "mine.npz"]) == 0
    assert "--init mine.npz" in capsys.readouterr().out
    text = pathlib.Path("use_mine.py").read_text()
    assert len(text.strip().splitlines()) <= 10
    names: dict = {}
    exec(compile(text, "use_mine.py", "exec"), names)
    assert "labels: [" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["a\"b'c.npz", 'x""" + oops + """.npz', "back\\slash\n{name}.npz", "é\u202e.msgpack"]
)
def test_the_example_says_any_file_name(runs, name, capsys):
    """What stands in a file name is text in the example, never code."""
    assert main(["export", str(runs / "fedavg"), "--out", name]) == 0
    (example,) = pathlib.Path().glob("use_*.py")
    exec(compile(example.read_text(), "example", "exec"), {})
    assert "labels: [" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["npz", "msgpack"])
def test_a_run_starts_from_it(runs, ending):
    file = fs.export(runs / "fedavg", f"start.{ending}")
    assert (
        main(["run", "fedavg", *SMALL, "--protocol", "pfllib", "--init", str(file), "--dry-run"])
        == 0
    )
    options = dict(
        model="mlp",
        model_options={"hidden": (8,)},
        clients=6,
        protocol="pfllib",
        devices="1",
        chunk="1",
    )
    setup = fs.prepare(fs.Experiment.of("fedavg", init=str(file), **options))
    kept = fs.load_model(file).net["params"]["fc"]["kernel"]
    assert np.array_equal(setup.net["params"]["fc"]["kernel"], kept)


def test_mistakes_are_one_sentence(runs, capsys, tmp_path):
    for argv, sentence in (
        (["nowhere"], "there is no run directory 'nowhere'"),
        (
            [str(runs / "fedavg"), "--client", "1"],
            "predict with the global model; leave --client out",
        ),
        ([str(runs / "fedpam"), "--client", "6"], "client 6 is not there; allowed: 0 to 5"),
        ([str(runs / "local")], "has no global model; name a client"),
        ([str(runs / "fedavg"), "--out", "model.pt"], "is neither .npz nor .msgpack"),
    ):
        assert sentence in refused(capsys, "export", *argv)
    fs.export(runs / "fedpam", "client.npz", 0)
    assert "exists already" in refused(
        capsys, "export", str(runs / "fedavg"), "--out", "client.npz"
    )
    assert "initial weights 'client.npz'" in refused(
        capsys, "run", "fedavg", *SMALL, "--init", "client.npz"
    )
    (tmp_path / "cut.msgpack").write_bytes(b"\x81")
    assert "cannot be read as .msgpack" in refused(
        capsys, "run", "fedavg", *SMALL, "--init", "cut.msgpack"
    )
    np.savez("plain.npz", a=np.zeros(2))
    with pytest.raises(fs.UserError, match="has no description of the model"):
        fs.load_model("plain.npz")
