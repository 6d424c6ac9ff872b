"""Published tables: the data, which runs they become, and a few cells of every table, run at the
smallest scale."""

from __future__ import annotations

import json
import math
import pathlib
import re

import numpy as np
import pytest
from commands import refused
from paths import ROOT

from fedjax_sim.cli.main import main
from fedjax_sim.cli.paper.cells import Choice, Planner, jobs_in, planned, scoped
from fedjax_sim.cli.paper.show import Found, groups_of
from fedjax_sim.errors import UserError
from fedjax_sim.experiment.tree import flat_config
from fedjax_sim.methods import METHODS
from fedjax_sim.papers import pictures, reading
from fedjax_sim.papers.tables import SCALES, block_of, cell_of, find, paper_of, papers
from fedjax_sim.report import style
from fedjax_sim.runner.files import Lock
from fedjax_sim.sweeps.work import Shared

TABLES = [table for paper in papers().values() for table in paper.tables.values()]
PROMISED = {
    "fedpolicy": [
        *(f"T{i}" for i in (2, 3, 4, 5, 6, 7, 9, 10, 11)),
        *(f"F{i}" for i in range(3, 11)),
    ],
    "pfedrlla": [*(f"T{i}" for i in range(1, 9)), *(f"F{i}" for i in range(2, 9))],
    "fedpam": [f"T{i}" for i in range(1, 9)],
    "qbandit": ["T2", *(f"F{i}" for i in range(2, 8))],
}


def cells(name: str, scale: str = "smoke", rows: str = "", cols: str = "", **typed):
    return list(Planner(find(name), Choice(scale, rows, cols, typed=typed)).cells())


# ---- the data ------------------------------------------------------------------------------------
def test_all_tables_and_figures_are_there():
    for paper, keys in PROMISED.items():
        assert set(keys) <= set(papers()[paper].tables), paper


@pytest.mark.parametrize(
    "table, row, col, value, sd",
    [
        ("fedpolicy:T2", "fedpolicy", "c10.05", 55.25, 1.38),
        ("fedpolicy:T5", "trpo", "c10.1", 64.32, 0),
        ("fedpolicy:T7", "fedca", "c10.1+gb50", 72.5, 0),
        ("pfedrlla:T1", "fedala", "mnist*", 73.58, 0),
        ("pfedrlla:T3", "c100a1e1", "pfedrlla", 52.42, 0),
        ("pfedrlla:T7", "AP+s50", "p-body", 38.07, 0),
        ("fedpam:T2", "fedcp", "N200", 44.86, 0),
        ("fedpam:T4", "fedas", "10of50", 58.29, 0),
        ("fedpam:T7", "accuracy", "m512", 62.73, 0),
        ("qbandit:T2", "learner+joint+comm", "c10a5", 396, 0),
    ],
)
def test_published_figures(table, row, col, value, sd):
    cell = find(table).published[row, col]
    assert (cell.value, cell.sd) == (value, sd)


def test_what_is_no_number():
    assert find("fedpolicy:T4").published["fedavg", "c10.3+to70"].text == "×"
    lost = find("fedpam:T2").published["fedavg", "N200"]
    assert lost.value is None and lost.text == "?"
    assert find("fedpam:T8").published["fedcp", "payload"].text == "Σ+O(d²)"


def test_means_agree_with_their_own_sums():
    """Margins that the papers print themselves: a digit that was copied wrongly shows."""
    figures = lambda name, row: [c.value for (r, _), c in find(name).published.items() if r == row]
    ours, others = figures("pfedrlla:T1", "pfedrlla"), papers()["pfedrlla"].tables["T1"].rows[:-1]
    best = [
        max(col) for col in zip(*(figures("pfedrlla:T1", line.key) for line in others), strict=True)
    ]
    gains = [round(a - b, 2) for a, b in zip(ours, best, strict=True)]
    assert gains == [1.01, 1.50, 2.44, 3.11, 0.72, 0.82, 0.58, 3.07, 0.70]
    widths = dict(
        zip(
            ("identity", "64", "128", "256", "512", "1024"),
            figures("fedpam:T7", "accuracy"),
            strict=True,
        )
    )
    assert [round(v - widths["identity"], 2) for v in widths.values()][1:] == [
        3.68,
        4.02,
        4.49,
        6.21,
        4.92,
    ]


def test_tables_that_repeat_figures_agree_but_where_a_footnote_says_so():
    t3, t9 = (find(f"fedpolicy:{key}").published for key in ("T3", "T9"))
    assert [key for key in t3 if t3[key].value != t9[key].value] == [
        key for key in t9 if t9[key].marks
    ]


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_every_cell_is_a_run_at_every_scale(table):
    more = ("all", "") if table.rank == "rows" else ("", "all")
    for scale in SCALES:
        found = cells(table.name, scale, *more)
        assert found and all(c.jobs or not (c.row.method or c.col.method) for c in found)
        assert scale != "paper" or not any(c.smaller for c in found)
        for cell in found:
            if table.draw:
                assert set(table.draw) <= set(pictures.PICTURES)
            else:
                assert reading.describe(cell.reading)


def test_mistakes_in_the_data_are_sentences():
    with pytest.raises(UserError, match="'8x' is not a published figure"):
        cell_of("here", "8x")
    with pytest.raises(UserError, match="reading 'best' cannot be read; use best:COLUMN"):
        reading.describe("best")
    with pytest.raises(UserError, match="use rounds_to:X:COLUMN"):
        reading.describe("rounds_to:20")
    with pytest.raises(UserError, match="X of the reading 'twenty' is not a number"):
        reading.describe("rounds_to:twenty:global_acc")
    with pytest.raises(UserError, match="the line 'a' has 1 figures for 2 columns"):
        block_of("here", "x y\na 1")
    data = {
        "title": "P",
        "lines": {"a": {"method": "fedavg"}},
        "tables": {"T1": {"title": "t", "rows": ["b"], "cols": ["a"]}},
    }
    with pytest.raises(UserError, match="unknown line in p:T1 'b'"):
        paper_of("p", data)
    data["tables"]["T1"] = {"title": "t", "published": "  a\na 1^z"}
    with pytest.raises(UserError, match="no footnote 'z'"):
        paper_of("p", data)
    data["tables"]["T1"] = {"title": "t", "colums": []}
    with pytest.raises(UserError, match="did you mean 'cols'"):
        paper_of("p", data)


# ---- settings ------------------------------------------------------------------------------------
def test_the_published_settings_reach_the_runs():
    (cell,) = cells("fedpolicy:T5", "paper", "trpo", "fc2")
    config = cell.jobs[0].experiment
    assert (
        config.method.name,
        config.method.options["agent"],
        config.data.partition,
        config.model.name,
    ) == (*("fedpolicy", "trpo", "fixed:2"), "resnet18")
    assert (
        config.training.rounds,
        config.training.epochs,
        config.training.batch_size,
        config.training.loss,
        len(cell.jobs),
    ) == (105, 5, 64, "c3e", 3)
    (cell,) = cells("fedpolicy:T2", "paper", "fedprox", "c100.1")
    assert float(cell.jobs[0].experiment.method.options["mu"]) == 0.001
    (cell,) = cells("pfedrlla:T3", "paper", "c10s5e1", "fedavg")
    assert (
        cell.jobs[0].experiment.training.epochs,
        cell.jobs[0].experiment.training.rounds,
        cell.reading,
    ) == (1, 500, "last:before_all_pooled")
    (cell,) = cells("fedpam:T3", "paper", "fedfomo", "p.5")
    config = cell.jobs[0].experiment
    assert (config.data.clients, config.training.participation, config.data.val_fraction) == (
        50,
        (0.5, 1),
        0.2,
    )


def test_what_is_smaller_is_said():
    (cell,) = cells("fedpolicy:T5", "small", "sac", "c10.05")
    assert cell.smaller == ("model lenet5 (resnet18)",)
    (cell,) = cells("fedpolicy:T2", "small", "fedavg", "fm.1")
    assert cell.smaller == ()
    (cell,) = cells("fedpolicy:T2", "paper", "fedavg", "fm.1", rounds=7)
    assert cell.smaller == ("rounds 7 (105)",) and cell.jobs[0].experiment.training.rounds == 7


def test_the_same_run_has_one_name_whatever_the_table():
    one, two, three = (
        cells(*choice)[0].jobs[0].name
        for choice in (
            ("fedpolicy:T2", "paper", "fedpolicy", "c10.1"),
            ("fedpolicy:T5", "paper", "sac", "c10.1"),
            ("fedpolicy:T6", "paper", "all", "c10.1"),
        )
    )
    assert one == two == three
    assert cells("fedpolicy:T10", "paper", "lam0.10", "c10.1")[0].jobs[0].name != one


def test_an_option_of_one_method_is_nobody_elses():
    given = {"lr": 1, "fedprox.lr": 0.1, "fedavg.lr": 0.2, "fedprox.mu": 3, "ditto.start_from": ""}
    assert scoped("fedprox", given) == {"lr": 0.1, "fedprox.mu": 3}
    assert planned("fedavg", {"fedprox.mu": 3}).method.options == {}
    with pytest.raises(UserError, match="did you mean 'rounds'"):
        planned("fedavg", {"round": 3})


def test_every_method_converges_by_the_accuracy_that_it_is_judged_by():
    """FedAvg's is before the round's training, FedBABU's of fine-tuned copies."""
    chosen = cells("pfedrlla:T4", "paper", "fedavg,fedbabu,ditto", "c10s5+converge,c10s5+total")
    assert {(c.row.key, c.reading) for c in chosen} == {
        *((name, "seconds") for name in ("fedavg", "fedbabu", "ditto")),
        ("fedavg", "converged:before_all_pooled"),
        ("fedbabu", "converged:client_pooled"),
        ("ditto", "converged:resident_pooled"),
    }


def test_the_paper_s_seeds():
    """FedPolicy and FedPAM have three; a profile of a round needs one."""
    for table in TABLES:
        if table.paper in ("fedpolicy", "fedpam") and table.published and table.kind == "run":
            assert table.seeds == 3, table.name


def test_omniglot_is_pre_trained_without_a_fifth_of_the_labels():
    (cell,) = cells("pfedrlla:T1", "paper", "pfedrlla", "omniglot")
    assert cell.jobs[0].before.experiment.data.partition == "omniglot:0.2"
    assert cell.jobs[0].experiment.data.partition == "omniglot"


def test_an_agent_for_another_network_depends_on_neither_its_size_nor_its_cohort():
    """A basis of all clients has the size of a network; an agent has an output per participant."""
    for col, participants in (("omniglot", "4/100"), ("mnist*", "10/100")):
        (cell,) = cells("pfedrlla:T6", "paper", "cross", col)
        (job,) = cell.jobs
        runs = job.experiment, job.before.experiment
        assert {run.method.options["basis"] for run in runs} == {"own"}
        assert "frame" not in job.parts
        assert job.before.experiment.training.participation == participants


def test_runs_before_others():
    (cell,) = cells("pfedrlla:T1", "paper", "pfedrlla", "c10s2")
    (job,) = cell.jobs
    assert (
        job.before is not None
        and job.before.experiment.data.partition == "pathological:4"
        and job.before.experiment.training.rounds == 600
    )
    assert job.before.experiment.method.options["regime"] == "pretrain" and "agent" in job.parts
    assert [j.name for j in jobs_in([cell])] == [job.before.name, job.name]
    (short,) = cells("pfedrlla:T1", "paper", "pfedrlla", "c10s2", rounds=40, epochs=1)
    assert (
        short.jobs[0].experiment.training.rounds,
        short.jobs[0].before.experiment.training.rounds,
        short.jobs[0].before.experiment.training.epochs,
    ) == (40, 600, 1)
    (cell,) = cells("fedpam:T1", "paper", "fedpam-m0-cosine", "dir-c10")
    (plain,) = cells("fedpam:T1", "paper", "fedpam-m0", "dir-c10")
    assert [j.before.name for j in cell.jobs] == [j.name for j in plain.jobs]
    assert cell.jobs[0].experiment.training.lr == 0 and cell.jobs[0].experiment.training.rounds == 1


def test_a_missing_column_is_not_never_reached(tmp_path):
    from fedjax_sim.report.runs import Run

    column = lambda *values: np.array(values, float)
    run = Run(tmp_path, {}, {"round": column(1, 2)}, {"round": column(1, 2), "a": column(0.1, 0.2)})
    assert reading.value("rounds_to:20:a", run) == 2
    assert math.isinf(reading.value("rounds_to:30:a", run))
    missing = [
        reading.value(f"{kind}:b", run) for kind in ("rounds_to:30", "gb_to:30", "converged")
    ]
    assert all(map(math.isnan, missing))


# ---- running -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def out(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("papers")


def paper(out: pathlib.Path, *argv: str, what: str = "run") -> int:
    return main(
        [
            "paper",
            what,
            *argv,
            "--scale",
            "smoke",
            "--out",
            str(out),
            "--devices",
            "1",
            "--chunk",
            "1",
            "--quiet",
        ]
    )


def cell_json(out: pathlib.Path, name: str) -> dict:
    return json.loads((out / name.split(":")[0] / f"{name.split(':')[1]}-smoke.json").read_text())


# a few cells of every table: rows, columns
FEW = {
    "fedpolicy:T2": ("fedavg,fedpolicy", "c10.1"),
    "fedpolicy:T3": ("fedavg", "c10.1+with-ce,c10.1+with-c3e"),
    "fedpolicy:T4": ("fedavg", "c10.3+to20,c10.3+to70"),
    "fedpolicy:T5": ("full,sac", "c10.1"),
    "fedpolicy:T6": ("all,r-combined", "c10.1"),
    "fedpolicy:T7": ("fedavg,fedpolicy", "c10.1+to20,c10.1+gb20,c10.1+min20,c10.1+best"),
    "fedpolicy:T9": ("fedpolicy", "c10.1+with-c3e"),
    "fedpolicy:T10": ("lam0.25", "c10.1"),
    "fedpolicy:T11": ("fedavg", "c10.1+local,c10.1+controller"),
    "fedpolicy:shares": ("sac", "c10.1+share-full,c10.1+share-head"),
    "fedpolicy:fmnist": ("random,sac,sac-greedy", "fm.1"),
    "more:baselines": ("local,fedavg", "mean,worst"),
    "pfedrlla:T1": ("local,fedavg,fedavg-ft,fedavg-global,pfedrlla", "c10s2"),
    "pfedrlla:T2": ("s10", "none+BP,none+AP"),
    "pfedrlla:T3": ("c10s5e1", "local,fedavg,pfedrlla"),
    "pfedrlla:T4": ("fedavg", "c10s5+total,c10s5+per-round,c10s5+converge,c10s5+accuracy"),
    "pfedrlla:T5": ("pretraining", "1-1-2"),
    "pfedrlla:T6": ("cross,best-baseline", "c100s5"),
    "pfedrlla:T7": ("BP+s10,AP+s10", "w-body"),
    "pfedrlla:T8": ("best-baseline,pre-trained", "c10s2"),
    "fedpam:T1": ("fedavg,fedpam,fedpam-cosine", "dir-c10"),
    "fedpam:T2": ("fedavg", "N10"),
    "fedpam:T3": ("fedpam", "p1"),
    "fedpam:T4": ("fedpam", "50of50"),
    "fedpam:T5": ("accuracy", "fedavg,fedpam"),
    "fedpam:T6": ("accuracy", "lam30"),
    "fedpam:T7": ("accuracy", "m512"),
    "fedpam:T8": ("fedpam", "payload,seconds"),
    "qbandit:T2": ("baseline+joint+comp,baseline+joint+comm,learner+joint+comp", "mnista1"),
}


# of the first tier: a run, a profile, a run before others
QUICK = ("fedpolicy:T2", "fedpolicy:T11", "pfedrlla:T6", "fedpam:T1")
TRIED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in FEW]


@pytest.mark.parametrize("name", TRIED)
def test_a_few_cells_of_every_table(name, out, capsys):
    rows, cols = FEW[name]
    assert paper(out, name, "--rows", rows, "--cols", cols) == 0
    printed, found = capsys.readouterr().out, cell_json(out, name)
    assert f"{name}. {find(name).title}" in printed and "Not as published" in printed
    assert [c["row"] for c in found["cells"] if c["seeds"] == 0] in ([], ["best-baseline"])
    assert all(c["values"] != [None] for c in found["cells"] if c["seeds"]), found["cells"]
    text = (out / name.split(":")[0] / f"{name.split(':')[1]}-smoke.md").read_text()
    assert text.count("\n| ") >= len(rows.split(","))


def test_every_table_is_tried():
    assert set(FEW) == {table.name for table in TABLES if not table.draw}


def test_differences_are_paired_by_seed(out, capsys):
    argv = ("more:baselines", "--rows", "local,fedavg", "--cols", "mean", "--seeds", "2")
    assert paper(out, *argv) == 0
    found, printed = cell_json(out, "more:baselines"), capsys.readouterr().out
    local, fedavg = (c["values"] for c in found["cells"])
    gaps = [b - a for a, b in zip(local, fedavg, strict=True)]
    assert found["paired"] == [dict(row="fedavg", col="mean", values=gaps)]
    line = next(line for line in printed.splitlines()[::-1] if line.startswith("fedavg"))
    assert f"{sum(gaps) / 2:+.2f}" in line and "minus local" in printed


def test_exceedances_of_the_baseline_follow_from_the_budgets(out):
    """Four of ten budgets are below one epoch, eight below six layers; three rounds."""
    paper(
        out, "qbandit:T2", "--rows", "baseline+joint+comp,baseline+joint+comm", "--cols", "mnista1"
    )
    assert [c["values"] for c in cell_json(out, "qbandit:T2")["cells"]] == [[12.0], [24.0]]


def test_readings_are_those_of_the_run(out):
    """FedAvg's two published rows are two columns of one run."""
    paper(out, "pfedrlla:T1", "--rows", "fedavg,fedavg-ft,fedavg-global", "--cols", "c10s2")
    found = cell_json(out, "pfedrlla:T1")
    assert len({name for runs in found["runs"] for name in runs["runs"]}) == 1
    (name,) = found["runs"][0]["runs"]
    from fedjax_sim.report.runs import load_run

    run = load_run(out / "pfedrlla" / "runs" / name)
    columns = ("before_all_pooled", "resident_pooled", "global_at_clients_pooled")
    assert [c["values"][0] for c in found["cells"]] == [100 * run.metrics[c][-1] for c in columns]


def test_the_cosine_is_of_the_same_state(out):
    """A round with rate 0 from the other cell's state: nothing but the way of inference differs."""
    paper(out, "fedpam:T1", "--rows", "fedpam,fedpam-cosine", "--cols", "dir-c10")
    (first,), (then,) = (
        [*c.jobs] for c in cells("fedpam:T1", "smoke", "fedpam,fedpam-cosine", "dir-c10")
    )
    folder = Shared(out / "fedpam")
    config = flat_config(json.loads((folder.run(then) / "config.json").read_text()))
    assert config["started_with"].startswith("clients,server@") and then.before.name == first.name


def test_what_has_ended_is_not_run_again(out, capsys):
    argv = ("fedpolicy:T2", "--rows", "fedavg", "--cols", "c10.1")
    assert paper(out, *argv) == 0
    folder = out / "fedpolicy" / "runs"
    before = {f: f.stat().st_mtime_ns for f in folder.rglob("summary.json")}
    assert paper(out, *argv) == 0
    assert "1 runs in" in capsys.readouterr().err
    assert before == {f: f.stat().st_mtime_ns for f in folder.rglob("summary.json")}


def test_a_run_that_another_process_does_is_left_to_it(out, capsys):
    (cell,) = cells("fedpolicy:T2", "smoke", "fedprox", "c10.1", devices="1", chunk="1")
    place = out / "fedpolicy" / "claims" / cell.jobs[0].name
    place.mkdir(parents=True)
    lock = Lock(place)
    lock.take()
    try:
        assert paper(out, "fedpolicy:T2", "--rows", "fedprox", "--cols", "c10.1") == 0
        assert "another process does the other 1 runs" in capsys.readouterr().err
        assert not Shared(out / "fedpolicy").run(cell.jobs[0]).exists()
    finally:
        lock.release()


def test_a_run_that_fails_is_named_and_the_others_go_on(out, capsys):
    """150 classes per client are more than there are."""
    argv = (
        "pfedrlla:T1",
        "--rows",
        "local,fedavg",
        "--cols",
        "c10s2",
        "--set",
        "partition=pathological:150",
    )
    assert paper(out, *argv) == 1
    captured = capsys.readouterr()
    assert (
        captured.err.count("failed: ") == 2
        and "pathological" in captured.out
        and "failed" in captured.out
    )


def test_show_runs_nothing(out, tmp_path, capsys):
    assert paper(tmp_path, "fedpolicy:T4", what="show") == 0
    shown = capsys.readouterr().out
    assert "(63)" in shown and "(×)" in shown and not (tmp_path / "fedpolicy" / "runs").exists()


def test_mistakes_are_sentences(capsys):
    assert "unknown paper 'fedpolcy' (did you mean 'fedpolicy'?)" in refused(
        capsys, "paper", "run", "fedpolcy:T2"
    )
    assert "is not the name of a table" in refused(capsys, "paper", "run", "fedpolicy")
    assert "unknown table of fedpolicy 'T8'" in refused(capsys, "paper", "show", "fedpolicy:T8")
    assert "unknown row of fedpolicy:T2 'fedavgg'" in refused(
        capsys, "paper", "run", "fedpolicy:T2", "--rows", "fedavgg"
    )
    assert "unknown scale 'tiny'" in refused(
        capsys, "paper", "run", "fedpolicy:T2", "--scale", "tiny"
    )
    assert "use NAME=VALUE" in refused(capsys, "paper", "run", "fedpolicy:T2", "--set", "rounds")
    assert "'0' is too small" in refused(capsys, "paper", "run", "fedpolicy:T2", "--seeds", "0")
    other = ("paper", "run", "fedpolicy:T2", "--rows", "fedavg", "--set", "fedprox.mo=1")
    assert "did you mean 'mu'" in refused(capsys, *other)


def test_the_list(capsys):
    assert main(["paper", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {table.name} " in printed for table in TABLES)
    assert main(["paper", "list", "qbandit:T2"]) == 0
    assert "own-terms+joint+comp" in capsys.readouterr().out
    assert set(METHODS) >= {
        line.method for t in TABLES for line in (*t.rows, *t.cols, *t.extra) if line.method
    }


CLAIMS = [
    line.strip("| \n").split(" | ")
    for line in (ROOT / "docs" / "results" / "README.md").read_text().splitlines()
    if re.search(r"`paper run [^`]*` \|$", line)
]


def test_every_claim_has_a_verdict():
    assert len(CLAIMS) > 40
    assert {claim[1] for claim in CLAIMS} == {"supported", "contradicted", "cannot tell"}


@pytest.mark.full
@pytest.mark.parametrize("command", sorted({claim[3].strip("`") for claim in CLAIMS}))
def test_the_command_of_a_claim(command, capsys):
    assert main([*command.split(), "--dry-run"]) == 0
    assert " rounds\n" in capsys.readouterr().out


def test_the_data_are_in_the_package():
    import tomllib

    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "presets/papers/*.toml" in said["tool"]["setuptools"]["package-data"]["fedjax_sim"]


# ---- figures -------------------------------------------------------------------------------------
DRAWN = {
    "fedpolicy:F3": ("fedavg,fedpolicy", "c10.1"),
    "fedpolicy:F4": ("sac", "c10.1"),
    "fedpolicy:F5": ("sac", "c10.1"),
    "fedpolicy:F6": ("sac", "c10.1"),
    "fedpolicy:F7": ("sac", "c10.1"),
    "fedpolicy:F8": ("sac", "c10.1"),
    "fedpolicy:F9": ("c3e", "c10.1"),
    "fedpolicy:F10": ("fedavg,fedpolicy", "c10.1"),
    "pfedrlla:F2": ("pretraining", "pre-c10"),
    "pfedrlla:F3": ("pretraining", "nine-c10"),
    "pfedrlla:F4": ("local,fedavg", "c10s5"),
    "pfedrlla:F5": ("local", "10%,25%"),
    "pfedrlla:F6": ("pretraining", "five"),
    "pfedrlla:F7": ("fedavg", "twenty"),
    "pfedrlla:F8": ("pre-trained", "c10s5"),
    "qbandit:F2": ("baseline", "mnista1"),
    "qbandit:F3": ("E1", "mnista1"),
    "qbandit:F4": ("E1", "c10a1"),
    "qbandit:F5": ("baseline,learner+epochs", "mnista1"),
    "qbandit:F6": ("baseline", "mnista1"),
    "qbandit:F7": ("baseline", "mnista1"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", DRAWN)
def test_every_figure_is_drawn(name, out):
    rows, cols = DRAWN[name]
    assert paper(out, name, "--rows", rows, "--cols", cols) == 0
    drawn = sorted((out / name.split(":")[0]).glob(f"{name.split(':')[1]}-smoke*.png"))
    assert len(drawn) == len(find(name).draw) and all(f.stat().st_size > 5000 for f in drawn)


def test_all_figures_are_tried():
    assert set(DRAWN) == {table.name for table in TABLES if table.draw}


def test_a_curve_is_of_the_accuracy_that_its_method_is_judged_by(out, capsys):
    """FedAvg's two curves are two columns of one run; the caption says rounds and scale."""
    words = ("pfedrlla:F4", "--rows", "fedavg,fedavg-ft", "--cols", "c10s5")
    assert paper(out, *words) == 0
    assert "Scale smoke: 2 rounds, 1 seed." in capsys.readouterr().out
    table = find("pfedrlla:F4")
    chosen = cells("pfedrlla:F4", "smoke", "fedavg,fedavg-ft", "c10s5", devices="1", chunk="1")
    first, second = groups_of(chosen, Found(Shared(out / "pfedrlla")), "resident_pooled")
    assert (first.label, second.label) == ("FedAvg (before all pooled)", "FedAvg+FT")
    metrics = second.runs[0].metrics
    assert first.runs[0].metrics["resident_pooled"][-1] == metrics["before_all_pooled"][-1]
    text = (out / "pfedrlla" / "F4-smoke.md").read_text()
    assert "](F4-smoke.png)" in text and table.title in text and "Not as published" in text


def test_a_figure_without_runs_says_why(out, capsys):
    words = ("pfedrlla:F4", "--rows", "local", "--cols", "c10s5")
    assert paper(out, *words, "--rounds", "3", what="show") == 2
    again = "run it with: fedjax-sim paper run pfedrlla:F4 --scale smoke"
    assert again in capsys.readouterr().err
    assert paper(out, *words, "--set", "partition=pathological:150") == 2
    assert "no finished runs yet; local-digits-pathological_150" in capsys.readouterr().err


def test_a_long_legend_leaves_the_panel_its_size():
    plt = style.drawing()
    figure, (axis,) = style.panels(plt, 1)
    for i in range(14):
        axis.plot([0, 1], [0, i], label=f"a method with a long name {i}")
    style.legend(figure, [axis])
    figure.canvas.draw()
    high = axis.get_position().height * figure.get_size_inches()[1]
    plt.close(figure)
    assert high > 2


def test_figures_of_accuracy_draw_one():
    for table in TABLES:
        assert "accuracy" not in table.draw or table.read, table.name


@pytest.mark.full
def test_any_clients_picture(out, capsys):
    argv = ("qbandit:F3", "--rows", "E1", "--cols", "mnista1")
    assert paper(out, *argv) == 0
    assert paper(out, *argv, "--client", "7", what="show") == 0
    before = (out / "qbandit" / "F3-smoke.png").read_bytes()
    assert paper(out, *argv, "--client", "1", what="show") == 0
    assert (out / "qbandit" / "F3-smoke.png").read_bytes() != before
    capsys.readouterr()
    assert paper(out, *argv, "--client", "10", what="show") == 2
    assert "client 10 is not among the 10 clients; allowed: 0 to 9" in capsys.readouterr().err


def test_training_accuracy_client_by_client(out):
    """Every client's own model on its own training rows: counted on as many rows as it has."""
    (cell,) = cells("qbandit:F3", "smoke", "E1", "mnista1", devices="1", chunk="1")
    paper(out, "qbandit:F3", "--rows", "E1", "--cols", "mnista1")
    from fedjax_sim.report.runs import load_run

    run = load_run(out / "qbandit" / "runs" / cell.jobs[0].name)
    rows = run.clients["label_counts"].sum(1)
    assert run.of_clients("personal_at_train").shape == (3, 10)
    counts = [
        v
        for k, v in run.clients.items()
        if k.startswith("personal_at_train") and k.endswith("count")
    ]
    assert (counts[0].reshape(-1)[:10] == rows).all()
