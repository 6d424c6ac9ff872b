"""Presets: the papers' settings reach the run, options override them, names are listed."""

from __future__ import annotations

import pytest
from commands import empty_folder, refused
from paths import ROOT

from fedjax_sim.cli.main import main
from fedjax_sim.cli.parser import make_parser
from fedjax_sim.cli.settings import method_of, settings_of
from fedjax_sim.experiment.given import experiment_of
from fedjax_sim.methods import METHODS, make_method
from fedjax_sim.presets import PRESETS
from fedjax_sim.sweeps.plan import jobs_of

__all__ = ["empty_folder"]  # used by every test


def config(*argv: str):
    args = make_parser().parse_args(argv)
    return experiment_of(method_of(args), settings_of(args, method_of(args)))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_run(name):
    chosen = PRESETS[name]
    assert chosen.help
    if chosen.method not in METHODS:
        config("run", "fedavg", "--preset", name, "--evaluate", "global")  # holds for the others
        pytest.skip(
            f"the method '{chosen.method}' is not part of this version: its own options were not"
            " tried"
        )
    own = config("run", "--preset", name)
    make_method(own.method.name, **own.method.options)
    assert own.method.name == chosen.method and own.data.dataset == chosen.settings["dataset"]


def test_the_settings_of_the_papers():
    """Against the tables of hyper-parameters, written down here once more."""
    expected = {
        "fedpolicy-fmnist": dict(
            clients=100,
            participation=0.1,
            rounds=105,
            epochs=5,
            batch_size=64,
            lr=0.01,
            momentum=0.9,
        ),
        "fedpam-mnist": dict(
            clients=20,
            participation=1,
            rounds=200,
            batch_size=10,
            lr=0.005,
            norm="pfllib",
            epochs=1,
        ),
        "pfedrlla-cifar10": dict(
            clients=100, rounds=500, epochs=5, batch_size=64, lr=0.01, momentum=0.5, model="cnn4"
        ),
        "qbandit-mnist": dict(
            clients=10, rounds=100, batch_size=64, lr=0.01, model="cnn6", partition="dirichlet:1"
        ),
    }
    for name, wanted in expected.items():
        got = config("run", "fedavg", "--preset", name, "--evaluate", "global,personal")
        assert {k: got.get(k) for k in wanted} == wanted, name
        protocol = got.data.protocol
        assert got.method.options == {} and protocol == name.split("-")[0].replace(
            "fedpam", "pfllib"
        )
    policy = config("run", "--preset", "fedpolicy-fmnist")
    assert policy.training.weight_decay == 5e-4
    assert policy.method.options == {"agent": "sac", "lam": 0.25}
    assert config("run", "--preset", "fedpam-cifar10").model.name == "resnet18"
    assert config("run", "--preset", "fedpam-cifar10-cnn4").model.name == "cnn4"


def test_they_have_the_constants_of_the_baselines():
    """A baseline under a paper's preset has that paper's constants, and nobody else's."""
    expected = {
        ("fedpolicy-cifar10", "fedprox"): {"mu": 0.01},
        ("fedpolicy-cifar100", "fedprox"): {"mu": 0.001},
        ("fedpolicy-cifar10", "ditto"): {"lam": 0.01},
        ("pfedrlla-cifar10", "ditto"): {"lam": 0.5, "personal_epochs": 5},
        ("pfedrlla-cifar10", "fedprox"): {"mu": 0.02},
        ("pfedrlla-cifar10", "fedamp"): {"lam": 5e-07, "alpha": 0.005, "sigma": 0.1},
        ("fedpam-mnist", "ditto"): {"lam": 1.0},
        ("fedpam-mnist", "fedrep"): {"head_epochs": 1},
    }
    for (name, method), wanted in expected.items():
        assert config("run", method, "--preset", name).method.options == wanted, (name, method)
    # a setting of the run may be one method's alone
    assert config("run", "fedfomo", "--preset", "fedpam-mnist").data.val_fraction == 0.2
    assert config("run", "ditto", "--preset", "fedpam-mnist").data.val_fraction != 0.2
    both = {"preset": "fedpam-mnist", "methods": ["fedfomo", "ditto"], "settings": {"rounds": 1}}
    fomo, ditto = (job.experiment for job in jobs_of(both))
    assert (fomo.data.val_fraction, ditto.method.options) == (0.2, {"lam": 1.0})


def test_whatever_is_typed_wins():
    argv = [
        "run",
        "--rounds",
        "7",
        "--preset",
        "fedpolicy-fmnist",
        "--set",
        "fedpolicy.lam=0.75",
        "--partition",
        "fixed:4",
    ]
    got = config(*argv)
    assert (got.training.rounds, got.data.partition) == (7, "fixed:4")
    assert got.method.options == {"agent": "sac", "lam": 0.75}
    assert got.training.epochs == 5


def test_the_command_line_takes_and_lists_them(capsys):
    few = [
        "--dataset",
        "digits",
        "--clients",
        "6",
        "--model",
        "mlp",
        "--devices",
        "1",
        "--chunk",
        "1",
        "--dry-run",
    ]
    assert main(["run", "--preset", "fedpolicy-fmnist", *few]) == 0
    assert "fedpolicy on digits (dirichlet:0.1, 6 clients" in capsys.readouterr().out
    assert (
        main(
            ["compare", "fedavg", "fedpolicy", "fedprox:mu=1", "--preset", "fedpolicy-fmnist", *few]
        )
        == 0
    )
    assert capsys.readouterr().out.count("105 rounds") == 3
    assert main(["list", "presets"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in PRESETS)
    assert "did you mean 'fedpolicy-fmnist'" in refused(
        capsys, "run", "--preset", "fedpolicy-mnist"
    )
    assert "needs a METHOD or a --preset" in refused(capsys, "run")
    assert "unknown method 'fedavgg'" in refused(
        capsys, "run", "fedavgg", "--preset", "fedpolicy-fmnist"
    )


def test_a_sweep_may_start_from_one():
    data = {
        "preset": "fedpolicy-fmnist",
        "methods": ["fedavg", "fedpolicy"],
        "settings": {"rounds": 3},
    }
    avg, policy = jobs_of(data | {"grid": {"lr": [0.1]}})
    assert (
        avg.experiment.training.rounds,
        avg.experiment.training.lr,
        avg.experiment.training.epochs,
    ) == (3, 0.1, 5) and avg.experiment.method.options == {}
    assert policy.experiment.method.options["agent"] == "sac"


def test_they_are_in_the_package():
    import tomllib

    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "presets/*.toml" in said["tool"]["setuptools"]["package-data"]["fedjax_sim"]
