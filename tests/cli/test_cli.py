"""The command line: every mistake is one sentence on stderr and exit code 2, and nothing is written
or overwritten."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import resource
import subprocess
import sys

import jax
import numpy as np
import pytest
from commands import SMALL, contents, empty_folder, refused  # noqa: F401
from paths import ROOT

from fedjax_sim import __version__
from fedjax_sim.cli import registries
from fedjax_sim.cli.main import main, make_parser

# started with the test session's eight devices, before a command asks for its own number
jax.devices()


MISTAKES = [  # options of `run fedavg`, what the sentence must say
    # unknown names, with the nearest match
    (["--dataset", "digit"], "unknown dataset 'digit' (did you mean 'digits'?)"),
    (["--model", "lenet"], "unknown model 'lenet' (did you mean 'lenet5'?)"),
    (["--partition", "dirichelt:0.1"], "unknown partition 'dirichelt' (did you mean 'dirichlet'?)"),
    (["--protocol", "fedpolcy"], "unknown protocol 'fedpolcy' (did you mean 'fedpolicy'?)"),
    (["--loss", "fokal"], "unknown loss 'fokal' (did you mean 'focal'?)"),
    (["--evaluate", "global,personl"], "unknown evaluation 'personl' (did you mean 'personal'?)"),
    (["--schedule", "cosin"], "unknown schedule 'cosin' (did you mean 'cosine'?)"),
    (["--backend", "vmpa"], "unknown backend 'vmpa' (did you mean 'vmap'?)"),
    (
        ["--set", "fedavg.weigths=uniform"],
        "unknown option of fedavg 'weigths' (did you mean 'weights'?)",
    ),
    (
        ["--set", "fedavgg.weights=uniform"],
        "unknown owner in 'fedavgg.weights' 'fedavgg' (did you mean 'fedavg'?)",
    ),
    (["--dtype", "float16"], "unknown dtype 'float16'"),
    (["--norm", "foo"], "unknown norm 'foo'"),
    (["--conv", "foo"], "unknown convolution form 'foo'"),
    # options that cannot be read
    (["--set", "garbage"], "--set 'garbage' cannot be read"),
    (["--set", "fedavg.weights=unifrm"], "allowed: size, uniform"),
    (
        ["--set", "model.hidden=abc"],
        "model.hidden 'abc' is not a list of whole numbers joined by x",
    ),
    (["--set", "model.hidden=0"], "integers from 1 to 1048576"),
    (["--set", "model.foo=1"], "model 'mlp' has no option 'foo'"),
    (["--set", "loss.gamma=1"], "unknown option of loss 'ce' 'gamma'"),
    (["--schedule", "step:every=x"], "schedule 'step:every=x' cannot be read"),
    (["--schedule", "step:foo=1"], "schedule 'step' has no option 'foo'"),
    (["--nonsense", "3"], "'--nonsense' is not an option of fedjax-sim run"),
    (["--clients", "x"], "clients 'x' is not a whole number"),
    (["--seeds-mode", "foo"], "invalid choice: 'foo'"),
    (["--decay-groups", "foo"], "decay-groups names 'foo'"),
    # impossible partitions
    (["--clients", "5000"], "5000 clients with at least 2 examples each are too many"),
    (["--clients", "0"], "clients 0 is too small"),
    (["--partition", "pathological:20"], "asks for 20 classes per client, but there are 10"),
    (["--partition", "fixed:11"], "asks for 11 classes per client, but there are 10"),
    (["--partition", "dirichlet:-1"], "'-1' is not a valid alpha"),
    (["--partition", "dirichlet:nan"], "'nan' is not a valid alpha"),
    (["--server-val", "99999"], "server_val=99999 does not fit"),
    # participation
    (
        ["--participation", "11/10", "--clients", "10"],
        "asks for 11 clients per round; allowed: 1 to 10",
    ),
    (["--participation", "10/50", "--clients", "20"], "is of 50 clients, but there are 20"),
    (["--participation", "0"], "participation '0' is not allowed"),
    (["--participation", "1.5"], "participation '1.5' is not allowed"),
    (["--participation", "11", "--clients", "10"], "a number of clients from 2 to 10"),
    (["--participation", "5:2"], "participation '5:2' is not allowed"),
    (["--participation", "1:0.5"], "participation '1:0.5' is not allowed"),
    (["--participation", "inf/6"], "asks for inf clients"),
    (["--participation", "nan"], "participation 'nan' is not a finite number"),
    (["--participation", "half"], "'half' is not a number"),
    (["--participation", "6/6", "--unseen", "1"], "allowed: 1 to 5"),
    (["--unseen", "6"], "leaves no client to train"),
    (["--unseen", "nan"], "unseen 'nan' is not a finite number"),
    (["--unseen", "1.5"], "unseen 1.5 is not allowed"),
    # numbers out of range
    (["--dropout", "2"], "dropout 2 is not allowed; use a probability"),
    (["--stragglers", "0.5:0"], "stragglers '0.5:0' is not allowed"),
    (["--epochs", "0"], "epochs 0 is not allowed"),
    (["--epochs", "inf"], "epochs 'inf' is not a finite number"),
    (["--lr", "nan"], "lr 'nan' is not a finite number"),
    (["--lr", "-1"], "lr -1.0 is too small"),
    (["--momentum", "1"], "momentum 1 is not allowed"),
    (["--weight-decay", "inf"], "weight-decay 'inf' is not a finite number"),
    (["--batch-size", "0"], "batch-size 0 is too small"),
    (["--rounds", "0"], "rounds 0 is too small"),
    (["--eval-every", "0"], "eval-every 0 is too small"),
    (["--personal-every", "-1"], "personal-every -1 is too small"),
    (["--keep", "0"], "keep 0 is too small"),
    (["--chunk", "0"], "chunk '0' is not allowed"),
    (["--chunk", "²"], "chunk '²' is not allowed; use auto or a whole number"),
    (["--clients", "²"], "clients '²' is not a whole number"),
    (["--batch-size", "9" * 5000], "batch-size '9999"),
    (["--lr", "1e400"], "lr '1e400' is not a finite number"),
    (["--set", "loss.decay=nan"], "loss.decay 'nan' is not a finite number"),
    (["--stragglers", "nan"], "stragglers 'nan' is not allowed"),
    (["--devices", "abc"], "devices 'abc' is not allowed"),
    (["--devices", "99"], "devices 99 is more than the"),
    (["--seeds", "0"], "seeds 0 is not allowed"),
    (
        ["--seeds", "2", "--seeds-mode", "vmap", "--devices", "2"],
        "--seeds-mode vmap runs on one device, not 2",
    ),
    (["--seed", "-1"], "seed -1 is not allowed"),
    (["--data-seed", "-1"], "data-seed -1 is not allowed"),
    (["--seed", "9" * 30], "is too large; allowed: at most 2^63 - 1"),
    (["--val-fraction", "2"], "val_fraction must be between 0 and 1"),
    (["--num-processes", "2"], "need --coordinator"),
    (["--batch-size", "2147483648"], "2147483648 is too large; allowed: 2147483647 or less"),
    (["--epochs", "1e30"], "epochs 1e+30 are too many steps"),
    (["--lr", "1e39"], "'1e39' is too large"),
    (["--seeds", "20000"], "seeds 20000 is not allowed"),
    (["--evaluate", ","], "evaluations ',' is not a list of evaluation modes"),
    # names that the program gives itself
    (["--set", "model.name=x"], "model 'mlp' has no option 'name'"),
    (["--set", "model.shape=1"], "model 'mlp' has no option 'shape'"),
    (["--set", "model.classes=1"], "model 'mlp' has no option 'classes'"),
    (["--set", "model.dtype=float64"], "model 'mlp' has no option 'dtype'"),
    (["--set", "model.conv=auto"], "model 'mlp' has no option 'conv'"),
    (["--set", "loss.name=ce"], "unknown option of loss 'ce' 'name'"),
    (["--set", "loss.classes=3"], "unknown option of loss 'ce' 'classes'"),
    (["--set", "loss.warmup=inf"], "loss.warmup 'inf' is not a finite number"),
    (["--set", "fedavg.name=x"], "unknown option of fedavg 'name'"),
    # more memory than there is: refused before it is taken
    (["--batch-size", "2147483647"], "of memory, but"),
    # paths
    (["--out", "~nosuchuser/x"], "'~nosuchuser/x' is not a path"),
    (["--out", "n" * 300], "File name too long"),
    (["--init", "~nosuchuser/x"], "initial weights '~nosuchuser/x' cannot be read"),
    (["--data-dir", "~nosuchuser", "--dataset", "mnist"], "'~nosuchuser' is not a path"),
    (["--start-from", "n" * 300 + ":agent"], "File name too long"),
    (["--dataset", "two\nlines"], "unknown dataset"),
    (["--dataset", "a\0b"], "an argument holds a zero byte"),
    # parts of another run
    (["--start-from", "runs/first"], "use RUN:PART,PART"),
    (["--start-from", "runs/first:"], "use RUN:PART,PART"),
    (["--start-from", "nowhere:agent"], "there is no run directory 'nowhere'"),
    (["--start-from", ".:agent"], "'.' holds no complete checkpoint"),
    # files
    (["--dataset", "mine.npz"], "there is no file 'mine.npz'"),
    (["--data-dir", "nowhere", "--dataset", "mnist"], "'nowhere' does not exist"),
    (["--init", "nowhere.npz"], "initial weights 'nowhere.npz' cannot be read"),
]


@pytest.mark.parametrize("options, sentence", MISTAKES, ids=[" ".join(m[0])[:40] for m in MISTAKES])
def test_mistakes_are_one_sentence(capsys, tmp_path, options, sentence):
    assert sentence in refused(capsys, "run", "fedavg", *SMALL, "--out", "out", *options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["run", "fedavgg"], "unknown method 'fedavgg' (did you mean 'fedavg'?)"),
        (["profile", "scafold"], "unknown method 'scafold' (did you mean 'scaffold'?)"),
        (["compare", "fedavg", "fedprx"], "unknown method 'fedprx' (did you mean 'fedprox'?)"),
        (["compare", "fedavg", "fedavg"], "'fedavg' and 'fedavg' are the same run"),
        (
            ["compare", "fedprox:mu=0.1", "fedprox:mu=0.10"],
            "'fedprox:mu=0.1' and 'fedprox:mu=0.10' are the same run",
        ),
        (["compare", "fedprox:mu"], "use METHOD:OPTION=VALUE"),
        (
            ["compare", "fedprox:lrr=1"],
            "unknown option of a run or of method 'fedprox' 'lrr' (did you mean 'lr'?)",
        ),
        (["compare", "fedprox:lr=x"], "lr 'x' is not a number"),
        (["compare", "fedprox:out=x"], "'out' is an option of the whole comparison"),
        (["compare", "fedavg:probe=maybe"], "probe 'maybe' is not one of true, false"),
        (["compare", "fedavg", "fedprox:clients=5000", *SMALL, "--out", "o"], "are too many"),
        (["run", "fedavg", *SMALL, "--data-seed", "x"], "data-seed 'x' is not a whole number"),
        (
            [
                "run",
                "fedavg",
                *SMALL,
                "--seeds",
                "2",
                "--seeds-mode",
                "vmap",
                "--data-seed",
                "follow",
            ],
            "own data",
        ),
        (
            ["compare", "fedavg", "ditto", *SMALL, "--set", "ditto.lam=x"],
            "ditto.lam 'x' is not a number",
        ),
        (
            ["compare", "fedavg", "ditto", *SMALL, "--data-seed", "-1"],
            "data-seed -1 is not allowed",
        ),
        (["compare", "fedavg", "ditto", *SMALL, "--seeds", "0"], "seeds 0 is not allowed"),
        (
            ["run", "ditto", *SMALL, "--set", "ditto.personal_epochs=nan"],
            "personal_epochs 'nan' is not a finite number",
        ),
        (["run", "ditto", *SMALL, "--set", "ditto.personal_epochs=1e30"], "use 0 to 1e+06"),
        (
            ["run", "fedavg_ft", *SMALL, "--set", "fedavg_ft.ft_epochs=inf"],
            "ft_epochs 'inf' is not a finite number",
        ),
        (
            ["run", "fedavg_ft", *SMALL, "--set", "fedavg_ft.ft_epochs=-1"],
            "fedavg_ft.ft_epochs=-1 is not allowed; use 0 to 1e+06",
        ),
        (
            ["run", "fedprox", *SMALL, "--set", "fedprox.mu=nan"],
            "fedprox.mu 'nan' is not a finite number",
        ),
        (["resume", "~nosuchuser/x"], "'~nosuchuser/x' is not a path"),
        (["list", "metods"], "(did you mean 'methods'?)"),
        (["resume", "nowhere"], "no run directory 'nowhere'"),
        (["resume", "."], "'.' is not a run directory"),
        *(
            ([*command, f"--{option}=--"], f"--{option} '--' is not a value")
            for command, option in (
                (["run", "fedavg"], "lr"),
                (["run", "fedavg"], "set"),
                (["run", "fedavg"], "evaluate"),
                (["compare", "fedavg", "fedprox"], "clients"),
                (["report", "."], "out"),
                (["sweep", "grid.toml"], "workers"),
                (["run"], "preset"),
            )
        ),
        (["compare", "fedavg:lr=--", "fedprox"], "lr '--' is not a number"),
        (["rum"], "invalid choice: 'rum'"),
        ([], "required: COMMAND"),
    ],
)
def test_mistakes_of_other_commands(capsys, tmp_path, argv, sentence):
    assert sentence in refused(capsys, *argv)
    # a second method's mistake is found before the first one runs
    assert list(tmp_path.iterdir()) == []


def test_missing_data_names_three_ways(capsys, monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FEDJAX_SIM_DATA", str(tmp_path / "data"))
    text = refused(capsys, "run", "fedavg", "--dataset", "cifar100", *SMALL)
    assert "three ways" in text and text.count("; or ") == 2
    assert "cifar100.npz" in text and "--data-dir" in text and "--download" in text


def test_damaged_initial_weights(capsys, tmp_path):
    np.savez(tmp_path / "cut.npz", a=np.zeros(100))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:60])
    assert "cannot be read as .npz" in refused(
        capsys, "run", "fedavg", *SMALL, "--init", "cut.npz", "--out", "o"
    )
    np.savez(tmp_path / "other.npz", a=np.zeros(100))
    assert "'params/fc/bias' is missing" in refused(
        capsys, "run", "fedavg", *SMALL, "--init", "other.npz", "--out", "o"
    )
    assert not (tmp_path / "o").exists()


def test_output_directory_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "cannot be created" in refused(
        capsys, "run", "fedavg", *SMALL, "--rounds", "1", "--out", "file/run"
    )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """A run directory made by the command line: 4 rounds, a checkpoint every 2."""
    out = tmp_path_factory.mktemp("cli") / "run"
    assert (
        main(
            ["run", "fedavg", *SMALL, "--rounds", "4", "--checkpoint-every", "2", "--out", str(out)]
        )
        == 0
    )
    return out


@pytest.fixture
def copy(finished, tmp_path) -> pathlib.Path:
    import shutil

    return pathlib.Path(shutil.copytree(finished, tmp_path / "copy"))


def test_existing_directory_is_not_overwritten(capsys, copy):
    before = contents(copy)
    for command in (
        ["run", "fedavg"],
        ["compare", "fedavg", "ditto"],
        ["run", "fedavg", "--seeds", "2"],
    ):
        assert "exists already" in refused(capsys, *command, *SMALL, "--out", str(copy))
    assert contents(copy) == before


def test_resume_refuses_fewer_rounds_than_done(capsys, copy):
    before = contents(copy)
    assert "rounds 3 is less than the 4 rounds already done" in refused(
        capsys, "resume", str(copy), "--rounds", "3"
    )
    assert contents(copy) == before


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda c: c["experiment"]["training"].update(lr=0.5), "was changed"),
        (lambda c: c["experiment"]["data"].update(partition="iid"), "was changed"),
        (lambda c: c["experiment"]["data"].update(colour="red"), "was changed"),
        (lambda c: c.pop("experiment"), "was changed"),
        (lambda c: c.pop("checksum"), "cannot be read"),
    ],
)
def test_resume_refuses_a_changed_configuration(capsys, copy, change, sentence):
    file = copy / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    before = contents(copy)
    assert sentence in refused(capsys, "resume", str(copy), "--rounds", "6")
    assert contents(copy) == before


def test_resume_refuses_another_hash(capsys, copy):
    """Configuration and its hash changed together: the checkpoint still knows what it belongs
    to."""
    from fedjax_sim.experiment.tree import read_config
    from fedjax_sim.runner.files import checksum

    file = copy / "config.json"
    data = json.loads(file.read_text())
    data["experiment"]["training"]["lr"] = 0.5
    experiment, found = read_config(data)
    data["config_hash"] = experiment.hash(found)
    file.write_text(json.dumps(data | dict(checksum=checksum(data))))
    assert "belongs to configuration" in refused(
        capsys, "resume", str(copy), "--rounds", "6", "--quiet"
    )


def largest_array_file(checkpoint: pathlib.Path) -> pathlib.Path:
    return max(
        (p for p in (checkpoint / "state").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )


def flip(file: pathlib.Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    file.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: largest_array_file(c).write_bytes(largest_array_file(c).read_bytes()[:200]),
        lambda c: flip(largest_array_file(c)),
        lambda c: (c / "meta.json").write_text((c / "meta.json").read_text()[:100]),
        lambda c: (c / "meta.json").write_text("{}"),
    ],
    ids=["truncated", "flipped", "meta", "empty meta"],
)
def test_resume_refuses_a_damaged_checkpoint(capsys, copy, damage):
    damage(copy / "checkpoints" / "00000004")
    before = contents(copy)
    text = refused(capsys, "resume", str(copy), "--rounds", "6", "--quiet")
    assert "is damaged" in text and "older one" in text
    assert contents(copy) == before


def test_a_run_of_the_old_format_is_refused(capsys, copy):
    """The sentence names both versions, for resume and for parts."""
    for file in (copy / "config.json", copy / "checkpoints" / "00000004" / "meta.json"):
        file.write_text(
            json.dumps({**json.loads(file.read_text()), "format": 1, "version": "0.1.0"})
        )
    before = contents(copy)
    both = (
        f"was written by fedjax_sim 0.1.0 in format 1; this is version {__version__}, which reads"
        " format {}"
    )
    assert both.format(5) in refused(capsys, "resume", str(copy))
    assert both.format(4) in refused(
        capsys, "run", "fedavg", *SMALL, "--start-from", f"{copy}:server", "--out", "new"
    )
    assert contents(copy) == before and not pathlib.Path("new").exists()


def test_a_run_of_the_flat_form_is_resumed_and_read(capsys, copy):
    """config.json as version 0.3 wrote it: settings and findings in one table, ranges as text."""
    from drawn import sign

    from fedjax_sim.experiment.tree import flat_config
    from fedjax_sim.report.runs import load_run
    from fedjax_sim.runner.files import checksum

    file = copy / "config.json"
    now = json.loads(file.read_text())
    flat = flat_config(now) | dict(devices="1", chunk="1")
    del flat["start_from"]
    assert flat["participation"] == "0.5" and flat["shuffle"] == "on" and "own_data" in flat
    older = {k: now[k] for k in ("version", "config_hash", "resolved")}
    older |= dict(format=4, config=flat)
    file.write_text(json.dumps(older | dict(checksum=checksum(older))))
    sign(copy)
    assert load_run(copy).config["model"] == "mlp"
    assert main(["resume", str(copy), "--rounds", "5", "--quiet"]) == 0
    again = json.loads(file.read_text())
    assert again["format"] == 5 and again["config_hash"] == now["config_hash"]
    assert again["experiment"]["training"]["rounds"] == 5 and again["found"] == now["found"]


def test_train_a_transforms_agent(capsys, tmp_path):
    """The agent that chooses participants is trained around a method that has none."""
    argv = [*SMALL, "--rounds", "2", "--transform", "agent_selection", "--out", "first"]
    assert main(["train", "fedavg", *argv]) == 0
    said = capsys.readouterr().out
    use = "fedjax-sim run fedavg --transform agent_selection --start-from first:server"
    assert use in said
    argv = ["--rounds", "1", "--transform", "agent_selection", "--start-from", "first:server"]
    assert main(["run", "fedavg", *SMALL, *argv, "--out", "then"]) == 0
    found = json.loads(pathlib.Path("then/config.json").read_text())["found"]
    assert found["started_with"].startswith("server@")
    assert "'fedavg' has no agent to train; allowed: fedpolicy" in refused(
        capsys, "train", "fedavg", *SMALL
    )


def test_resume_needs_a_checkpoint(capsys, copy):
    import shutil

    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints" / ".00000002.partial").mkdir(parents=True)
    assert "no complete checkpoint" in refused(capsys, "resume", str(copy))


def test_resume_of_a_finished_run_changes_no_figure(capsys, copy, finished):
    assert main(["resume", str(copy), "--quiet"]) == 0
    for name in ("metrics.csv", "rounds.csv"):
        assert (copy / name).read_bytes() == (finished / name).read_bytes()


def test_dry_run_prints_sizes_and_writes_nothing(capsys, tmp_path):
    assert main(["run", "scaffold", *SMALL, "--dry-run"]) == 0
    out = capsys.readouterr().out
    # an mlp 784-8-10 in float32: 784·8 + 8 and 8·10 + 10 parameters, and as many control variates
    # on each of 6 clients
    assert "parameters: 6,370 (fc1 6,280, fc 90)" in out
    assert f"N x {4 * 6370} B" in out and f"{6 * 4 * 6370 / 1e6:.2f} MB" in out
    for word in ("estimated peak memory", " down", " up", "steps on average", "chunk 1"):
        assert word in out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_times_no_layouts(capsys, tmp_path, monkeypatch):
    """A run long enough to be measured: the dry run still only prints."""
    from fedjax_sim.runner import autotune

    monkeypatch.setenv("FEDJAX_SIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "LONG_RUN", 1.0)
    monkeypatch.setattr(autotune, "MANY_ROUNDS", 0)
    monkeypatch.setattr(autotune, "stopwatch", lambda *a: pytest.fail("a dry run must not measure"))
    assert main(["run", "fedavg", *SMALL, "--chunk", "auto", "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_profile_prints_every_part(capsys):
    assert main(["profile", "fedavg", *(word for word in SMALL if word != "--quiet")]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("fedavg: compiling and timing plan …\n") and "timing evaluation …" in err
    for part in (
        "local",
        "aggregation",
        "controller",
        "evaluation",
        "bytes down",
        "bytes up",
        "persistent client state",
    ):
        assert part in out
    # 3 of 6 clients, 6370 parameters of 4 bytes
    assert f"{3 * 6370 * 4} B" in out


def test_list_names_everything(capsys):
    from fedjax_sim.methods import METHODS

    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in (
        *METHODS,
        "digits",
        "cifar100",
        "lenet5",
        "resnet18",
        "dirichlet",
        "shards",
        "pfllib",
        "c3e",
        "ppo",
        "personal@global",
    ):
        assert f"\n  {name} " in out


def test_help_is_quick_and_imports_no_jax():
    code = (
        "import sys; from fedjax_sim.cli.main import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'flax', 'distrax', 'orbax', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    for text in (
        "--participation",
        "--dropout",
        "--dry-run",
        "--set",
        "--seeds",
        "--coordinator",
        "default: 0.02",
    ):
        assert text in done.stdout
    whole = subprocess.run(
        [sys.executable, "-m", "fedjax_sim", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert whole.returncode == 0 and all(
        c in whole.stdout for c in ("run", "compare", "resume", "profile", "list")
    )


@pytest.mark.parametrize(
    "command",
    ["", "run", "compare", "sweep", "train", "profile", "resume", "report", "export", "list"],
)
def test_help_fits_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        make_parser().parse_args([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    # every list of names was filled in
    assert "{" not in re.sub(r"\{(loop,vmap|local,slurm,ray)\}", "", text)


@pytest.mark.parametrize("what", sorted(registries.REGISTRIES))
def test_help_names_what_the_registries_hold(capsys, monkeypatch, what):
    """Read from the source, without importing the module: the very names of the imported registry,
    and all in the help."""
    module, variable = registries.REGISTRIES[what]
    registered = list(getattr(importlib.import_module(module), variable))
    if what not in registries.LIGHT:
        assert registries._keys_in_source(module, variable) == registered
    assert registries.names(what) == registered
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        make_parser().parse_args(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ", ".join(registered) in text
