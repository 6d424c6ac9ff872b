"""`fedjax-sim report`: which runs it finds, what it draws, and its page in a real browser."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
from drawn import CLIENTS, sign, write_comparison, write_run

from fedjax_sim.cli.main import main
from fedjax_sim.errors import UserError
from fedjax_sim.report import costs, curves, style, tables
from fedjax_sim.report.groups import grouped, labels, scenes
from fedjax_sim.report.page import possible
from fedjax_sim.report.runs import load_run, load_runs, write_order
from fedjax_sim.runner.files import checksum

HOSTILE = "fedavg</script><img src=x onerror=alert(1)>$x_1$"


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> tuple[pathlib.Path, list[str]]:
    """One report of everything there is to draw: (its folder, what was said)."""
    root = tmp_path_factory.mktemp("report")
    write_comparison(root / "runs", betas=("0.3",))
    write_run(root / "runs" / "hostile", HOSTILE, best=0.5, ended=False, budgets=True)
    (root / "runs" / "profiled").mkdir()
    seconds = dict(plan=0.01, local=1.0, aggregation=0.02, controller=0.0, evaluation=0.3)
    profile = {"method": "fedavg", "seconds": seconds}
    (root / "runs" / "profiled" / "profile.json").write_text(
        json.dumps(profile | {"checksum": checksum(profile)})
    )
    said: list[str] = []
    from fedjax_sim.report.page import report

    report([root / "runs"], root / "out", said.append)
    return root / "out", said


# ---- which runs ----------------------------------------------------------------------------------
def test_folders_of_runs_are_searched(tmp_path):
    write_comparison(tmp_path / "sweep")
    write_run(tmp_path / "single", "fedavg", seed=5)
    said: list[str] = []
    groups = grouped(
        load_runs([tmp_path / "sweep", tmp_path / "single", tmp_path / "sweep"], said.append),
        said.append,
    )
    assert len(scenes(groups)) == 2 and len(groups) == 10
    assert labels(groups) == [
        "fedavg",
        "fedprox (mu=0.01)",
        "fedprox (mu=0.1)",
        "fedprox (mu=1)",
        "fedpolicy (sac)",
    ]
    assert all("digits" in s and "dirichlet" in s and "20 clients" in s for s in scenes(groups))
    (avg,) = [g for g in groups if g.label == "fedavg" and "0.3" in g.scene]
    assert [run.config["seed"] for run in avg.runs] == [0, 1, 5]
    assert len(said) == 1 and "notes" in said[0]  # no run
    with pytest.raises(UserError, match="no run directory that can be read"):
        (tmp_path / "empty").mkdir()
        load_runs([tmp_path / "empty"])
    with pytest.raises(UserError, match="not a run directory"):
        load_runs([tmp_path / "sweep" / "notes"])


def test_the_longer_of_two_equal_runs_counts(tmp_path):
    write_run(tmp_path / "a", "fedavg", rounds=5)
    write_run(tmp_path / "b", "fedavg", rounds=9)
    said: list[str] = []
    (group,) = grouped(load_runs([tmp_path / "a", tmp_path / "b"]), said.append)
    assert (
        len(group.runs) == 1 and len(group.runs[0].rounds["round"]) == 9 and "same run" in said[0]
    )


def test_means_and_bands_are_over_seeds(tmp_path):
    paths = [write_run(tmp_path / str(seed), "fedavg", seed, rounds=8 + seed) for seed in range(3)]
    (group,) = grouped(load_runs(paths))
    x, mean, std = group.series("global_acc", curves.PLACES["bytes"])
    # rounds that all of them have
    acc = np.stack([load_run(p).metrics["global_acc"][:8] for p in paths])
    np.testing.assert_allclose(mean, acc.mean(0))
    np.testing.assert_allclose(std, acc.std(0, ddof=1))
    np.testing.assert_allclose(x, 1_600_000 * np.arange(1, 9))
    np.testing.assert_allclose(
        group.series("global_acc", curves.PLACES["time"])[0], 3.0 * np.arange(1, 9)
    )
    figure = tables.statistics(group)["best_global"]
    best = [load_run(p).summary["best_global"] for p in paths]
    assert (
        figure.n == 3
        and figure.mean == pytest.approx(np.mean(best))
        and figure.std == pytest.approx(np.std(best, ddof=1))
    )


def test_a_run_that_has_not_ended_is_summed_up_from_its_rows(tmp_path):
    ended, open_ = (
        load_run(write_run(tmp_path / str(e), "fedavg", ended=e)) for e in (True, False)
    )
    assert open_.summary["rounds_to"] == ended.summary["rounds_to"]
    for name in ("best_global", "bytes_down", "seconds_per_round", "client_acc_mean"):
        assert open_.summary[name] == pytest.approx(ended.summary[name], rel=1e-5), name
    assert not open_.stored and open_.summary["rounds"] == 30


def test_weights_of_a_controller_become_a_matrix(tmp_path):
    """Who mixes whose model: weights of the participants of the round before, then of itself, by
    client ids."""
    folder = write_run(tmp_path / "a", "pfedrlla", rounds=3)
    with np.load(folder / "clients.npz") as file:
        arrays = {name: file[name] for name in file.files}
    ids = np.array([[0, 2], [2, 1], [-1, 0]])  # nobody in one slot of the last round
    weights = np.array(
        [
            [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]],
            [[0.5, 0.2, 0.3], [0.6, 0.1, 0.3]],
            [[0, 0, 1], [0.2, 0.3, 0.5]],
        ]
    )
    np.savez(folder / "clients.npz", **arrays, acted_ids=ids, acted_actions=weights)
    sign(folder)
    mixed = load_run(folder).matrices["weights"]
    assert mixed.shape == (3, 3, 3)
    # the first round: its own participants, itself twice
    np.testing.assert_allclose(mixed[0, 0], [0.8, np.nan, 0.2])
    np.testing.assert_allclose(mixed[1, 2], [0.5, np.nan, 0.5])
    np.testing.assert_allclose(mixed[1, 1], [0.6, 0.3, 0.1])
    np.testing.assert_allclose(mixed[2, 0], [0.5, 0.3, 0.2])
    assert np.isnan(mixed[2, 1:]).all()
    assert "weights" in [name for name, _, _ in possible(grouped(load_runs([folder])))]
    # indices: no weights
    np.savez(folder / "clients.npz", **arrays, acted_ids=ids, acted_actions=weights[:, :, 0])
    sign(folder)
    assert load_run(folder).matrices == {}


# ---- tables --------------------------------------------------------------------------------------
def test_tables_in_markdown_and_latex(tmp_path):
    write_run(tmp_path / "a", "fed_avg|&", 0, best=0.9)
    write_run(tmp_path / "b", "fedprox", 0, best=0.5)
    write_run(tmp_path / "c", "fedprox", 1, best=0.5)
    groups = grouped(load_runs([tmp_path]))
    text = tables.markdown(groups)
    lines = text.splitlines()
    assert (
        lines[0].startswith("| method | seeds | best (%) |")
        and len({re.sub(r"\\\|", "", x).count("|") for x in lines}) == 1
    )
    assert (
        "fed_avg\\|&" in lines[2]
        and "| **" in lines[2]
        and "**" not in lines[3].split("|")[3]
        and "±" in lines[3]
    )
    tex = tables.latex(groups)
    assert (
        r"fed\_avg|\&" in tex and r"\textbf{" in tex and r"$\pm$" in tex and tex.count(r"\\") == 3
    )
    assert "×" not in tex and tex.count("{") == tex.count("}")
    rows = tables.rows_of(groups)
    assert [r["seed"] for r in rows] == [0, "mean", "std", "n", 0, 1, "mean", "std", "n"]
    assert (
        rows[6]["rounds_to.40"] == np.mean([rows[4]["rounds_to.40"], rows[5]["rounds_to.40"]])
        and rows[8]["best_global"] == 2
    )


def test_an_unfinished_run_is_never_the_best(tmp_path):
    """The highest accuracy so far, and the fewest bytes: it has not paid for all of its rounds."""
    write_run(tmp_path / "a", "fedavg", best=0.6)
    write_run(tmp_path / "b", "fedprox", best=0.5)
    write_run(tmp_path / "c", "fedntd", best=0.9, rounds=8, ended=False)
    head, rows = tables.written(grouped(load_runs([tmp_path])), "<{}>")
    by_name = {row[0]: row for row in rows}
    assert not any(cell.startswith("<") for cell in by_name["fedntd (not ended)"])
    assert by_name["fedavg"][head.index("best (%)")].startswith("<")
    (group,) = [g for g in grouped(load_runs([tmp_path])) if g.label == "fedntd"]
    assert not group.ended
    shutil.rmtree(tmp_path / "b")  # nothing that has ended is left to be better than
    assert not any(
        "<" in cell
        for row in tables.written(grouped(load_runs([tmp_path])), "<{}>")[1]
        for cell in row
    )


def test_no_figure_and_never_reached_are_two_signs(tmp_path):
    write_run(tmp_path / "a", "fedavg", best=0.9)
    write_run(tmp_path / "b", "local", best=0.3)
    file = tmp_path / "b" / "summary.json"
    stored = json.loads(file.read_text())
    file.write_text(
        json.dumps(stored | {"best_global": None, "last_global": None, "targets_of": "client_mean"})
    )
    write_run(tmp_path / "c", "fedper", best=0.3)
    file = tmp_path / "c" / "summary.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"targets_of": None, "rounds_to": {}})
    )
    for name in ("b", "c"):
        sign(tmp_path / name)
    groups = grouped(load_runs([tmp_path]))
    head, rows = tables.written(groups, "{}")
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert cells["local"]["best (%)"] == "–" and cells["local"]["rounds to 70 %"] == "×"
    # nothing was measured that could have reached it
    assert cells["fedper"]["rounds to 70 %"] == "–"
    assert r"$\times$" in tables.latex(groups) and "& -- &" in tables.latex(groups)


def test_methods_stand_in_the_order_typed(tmp_path):
    for name in ("alpha", "beta", "gamma"):
        write_run(tmp_path / name, name)
    write_order(tmp_path, ["gamma", "alpha", "beta"])
    assert labels(grouped(load_runs([tmp_path]))) == ["gamma", "alpha", "beta"]
    for damage in ("[", "{}", "[1, 2]", "[" * 100_000):
        (tmp_path / "order.json").write_text(damage)
        assert labels(grouped(load_runs([tmp_path]))) == ["alpha", "beta", "gamma"]
    assert labels(grouped(load_runs([tmp_path / "beta", tmp_path / "alpha"]))) == ["beta", "alpha"]


def test_lines_differ_beside_colours():
    look = style.looks([f"method {i}" for i in range(40)])
    values = list(look.values())
    assert all(
        a["color"] != b["color"] and a["linestyle"] != b["linestyle"]
        for a, b in itertools.pairwise(values)
    )
    assert len({str(one) for one in values}) == 40


@pytest.mark.parametrize("argv, titled", [([], True), (["--no-titles"], False)])
def test_titles_are_optional(tmp_path, monkeypatch, argv, titled):
    seen = []
    real = style.save
    monkeypatch.setattr(
        style, "save", lambda plt, figure, path: seen.append(figure) or real(plt, figure, path)
    )
    folder = write_run(tmp_path / "a", "fedpolicy", rounds=3, actions=(0.5, 0.4, 0.1))
    assert main(["report", str(folder), "--out", str(tmp_path / "out"), *argv]) == 0
    titles = [
        axis.get_title()
        for figure in seen
        for axis in figure.axes
        if axis.get_visible() and axis.lines
    ]
    assert len(titles) > 5 and bool([title for title in titles if title]) == titled


# ---- figures -------------------------------------------------------------------------------------
def test_every_figure_is_drawn_in_two_formats(drawn):
    from PIL import Image

    out, said = drawn
    files = {p.name for p in out.iterdir()}
    names = (
        "accuracy",
        "accuracy_bytes",
        "accuracy_time",
        "thresholds",
        "settings",
        "clients",
        "client_curves",
        "one_client",
        "labels",
        "communication",
        "actions",
        "policy",
        "reward",
        "budgets",
        "weights",
        "layers",
        "time",
    )
    assert files == {"report.html", *(f"{n}.{kind}" for n in names for kind in ("png", "pdf"))}
    for name in names:
        with Image.open(out / f"{name}.png") as image:
            assert (
                image.info["dpi"][0] >= 200
                and len(set(image.convert("L").resize((64, 64)).getdata())) > 5
            ), name
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert len(said) == 1


def test_a_profile_of_version_0_2_is_read(tmp_path):
    """There the stage `plan` is called `orders`."""
    from fedjax_sim.report.costs import read_profiles

    seconds = dict(orders=0.5, local=1.0, aggregation=0.02, controller=0.0, evaluation=0.3)
    profile = {"method": "fedavg", "seconds": seconds}
    text = json.dumps(profile | {"checksum": checksum(profile)})
    (tmp_path / "profile.json").write_text(text)
    (found,) = read_profiles([tmp_path])
    assert found["seconds"]["plan"] == 0.5 and found["seconds"]["local"] == 1.0


def test_what_has_no_data_is_not_drawn(tmp_path):
    folder = write_run(tmp_path / "a", "fedavg", best=0.1)
    for name in ("clients.npz", "labels.npz", "timings.csv"):
        (folder / name).unlink()
    sign(folder)
    names = [name for name, _, _ in possible(grouped(load_runs([folder])))]
    assert names == ["accuracy", "accuracy_bytes", "communication"]


def test_axes_units_and_legends(tmp_path, monkeypatch):
    """Whole rounds below, units that fit, the setting in the title, and no legend inside the
    axes."""
    seen = []
    monkeypatch.setattr(style, "save", lambda plt, figure, path: seen.append(figure) or [path])
    groups = grouped(load_runs([write_comparison(tmp_path / "runs", betas=("0.3",))]))
    for place in ("rounds", "bytes", "time"):
        curves.accuracy(groups, tmp_path / place, place)
    costs.thresholds(groups, tmp_path / "cost")
    for figure in seen:
        figure.canvas.draw()
        (legend,) = figure.legends
        boxes = [axis.get_window_extent() for axis in figure.axes if axis.get_visible()]
        assert not any(legend.get_window_extent().overlaps(box) for box in boxes)
        assert all(
            "digits · dirichlet:0.3" in axis.get_title()
            for axis in figure.axes
            if axis.get_visible()
        )
        titles = [axis.title.get_window_extent() for axis in figure.axes if axis.get_visible()]
        assert not any(a.overlaps(b) for i, a in enumerate(titles) for b in titles[i + 1 :])
    assert all(float(t).is_integer() for t in seen[0].axes[0].get_xticks())
    assert seen[1].axes[0].get_xlabel() == "MB sent, down and up"
    assert seen[2].axes[0].get_xlabel() == "minutes of running time"
    assert [axis.get_ylabel() for axis in seen[3].axes] == ["rounds", "MB", "seconds"]
    curves_of = lambda axis: [
        line for line in axis.lines if not line.get_label().startswith(("_", "○"))
    ]
    colours = {line.get_color() for line in curves_of(seen[0].axes[0])}
    assert len(colours) == 5 and colours == {
        line.get_color() for line in curves_of(seen[1].axes[1])
    }


def test_where_a_target_is_reached_is_marked(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(style, "save", lambda plt, figure, path: seen.append(figure) or [path])
    groups = grouped(load_runs([write_comparison(tmp_path / "runs", betas=("0.3",))]))
    curves.accuracy(groups, tmp_path / "a")
    axis = seen[0].axes[0]
    (goal,) = (line.get_ydata()[0] for line in axis.lines if line.get_label().startswith("○"))
    rings = [line for line in axis.lines if line.get_markerfacecolor() == "none"]
    best = [100 * g.series("global_acc", curves.PLACES["rounds"])[1].max() for g in groups]
    assert goal % 10 == 0 and len(rings) == sum(b >= goal for b in best) >= len(groups) / 2
    assert all(ring.get_ydata()[0] >= goal for ring in rings)
    assert curves.target(groups[:1], "global_acc") is None  # nothing to compare


def test_a_curve_that_ends_far_off_makes_the_axis_logarithmic():
    plt = style.drawing()
    for ends, scale in (((1.0, 2.0), "linear"), ((0.1, 30.0), "log")):
        axis = plt.subplots()[1]
        style.far_apart(axis, [np.array([0.5, 1]) * end for end in ends])
        assert axis.get_xscale() == scale
        plt.close("all")


# ---- the page ------------------------------------------------------------------------------------
def test_the_page_stands_alone_and_escapes_every_name(drawn):
    text = (drawn[0] / "report.html").read_text()
    assert (
        not re.search(r"(src|href)=[\"']?(?!data:)[\w/.]", text.replace("img src=x", ""))
        and "@@" not in text
    )
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert (
        "onerror=alert" not in text.replace("\\u003cimg src=x onerror=alert(1)>", "")
        and text.count("</script>") == 2
    )
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert (
        any(m["label"] == HOSTILE for m in data["methods"])
        and len(data["clients"][0]["values"]) == 2 * CLIENTS
    )
    assert text.count("<figure>") == 17


ACT = """
<script>
const said = [];
addEventListener("error", e => said.push("error " + e.message));
const rows = () => [...document.querySelectorAll("#results tbody tr")];
const names = () => rows().map(r => r.cells[0].innerText.trim());
const drawnLines = id => document.querySelectorAll(`#${id} polyline`).length;
const tell = (key, value) => { const p = document.createElement("pre"); p.className = "told";
document.body.append(p);
  p.textContent = JSON.stringify([key, value]); };
try {
  tell("lines",
    [drawnLines("accuracy"), drawnLines("spread"),
    document.querySelectorAll("#accuracy polygon").length]);
  tell("figures", [...document.querySelectorAll("figure img")].map(i => i.naturalWidth));
  const best = document.querySelector('th[data-key="best_global"]');
  best.click(); tell("down", rows().map(r => parseFloat(r.cells[2].innerText)));
  best.click(); tell("up", rows().map(r => parseFloat(r.cells[2].innerText)));
  document.querySelector('th[data-key="label"]').click(); tell("names", names());
  tell("bold",
    [...document.querySelectorAll("#results td b")]
    .map(b => b.closest("tr").cells[0].innerText.trim()));
  document.querySelector("#chips button").click();
  tell("off", [names(), drawnLines("accuracy"), drawnLines("spread")]);
  document.querySelector("#chips button").click();
  tell("on", [names().length, drawnLines("accuracy")]);
  const box = document.getElementById("accuracy").getBoundingClientRect();
  const at = { clientX: box.left + box.width / 2, clientY: box.top + 50 };
  document.getElementById("accuracy").dispatchEvent(new PointerEvent("pointermove", at));
  tell("tip",
    [getComputedStyle(document.getElementById("tip")).display,
    document.getElementById("tip").innerText]);
  const place = document.getElementById("choose-place"); place.value = "bytes";
  place.dispatchEvent(new Event("change"));
  tell("bytes", document.getElementById("accuracy").textContent.includes("MB"));
  const before = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  tell("theme", before !== getComputedStyle(document.body).backgroundColor);
  const wide = document.querySelector(".wide");
  tell("fits", [innerWidth, wide.scrollWidth - wide.clientWidth]);
  tell("signs",
    [document.getElementById("notes").textContent,
    rows().map(r => r.innerText).join(" ").includes("×")]);
  tell("dashes", new Set(
    [...document.querySelectorAll("#chips line")]
    .map(l => l.getAttribute("stroke-dasharray"))).size);
  tell("alien", document.querySelectorAll("main img:not(figure img)").length);
} catch (problem) { said.push(String(problem)); }
tell("said", said);
</script>
"""


def test_the_page_in_a_browser(drawn, tmp_path):
    """Loads without console errors, figures there, the table sorts, methods go on and off, values
    at the pointer."""
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        pytest.skip("no Chromium is installed: the page was not opened in a browser")
    page = tmp_path / "report.html"
    page.write_text((drawn[0] / "report.html").read_text().replace("</body>", ACT + "</body>"))
    command = [
        chromium,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += [
        "--enable-logging=stderr",
        "--virtual-time-budget=4000",
        "--window-size=1400,1000",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    import html

    seen = dict(
        json.loads(html.unescape(t))
        for t in re.findall(r'<pre class="told">(.*?)</pre>', done.stdout, re.S)
    )
    assert seen["said"] == [] and "CONSOLE" not in done.stderr, (
        seen.get("said"),
        done.stderr[-2000:],
    )
    assert seen["lines"] == [6, 6, 5]  # the run with one seed has no band
    assert len(seen["figures"]) == 17 and min(seen["figures"]) > 500
    assert (
        seen["down"] == sorted(seen["down"], reverse=True)
        and seen["up"] == seen["down"][::-1]
        and len(seen["up"]) == 6
    )
    assert seen["names"] == sorted(seen["names"], key=str) and any(
        "(not ended)" in n for n in seen["names"]
    )
    assert "fedpolicy (sac)" in seen["bold"]
    assert seen["off"] == [[n for n in seen["names"] if n != "fedavg"], 5, 5] and seen["on"] == [
        6,
        6,
    ]
    assert (
        seen["tip"][0] == "block" and "fedpolicy (sac)" in seen["tip"][1] and "±" in seen["tip"][1]
    )
    assert seen["bytes"] and seen["theme"] and seen["alien"] == 0
    assert seen["fits"] == [1400, 0] and seen["dashes"] == 4
    assert (
        seen["signs"][0]
        == "–: no such figure, as for a method without a global model. ×: never reached."
        and seen["signs"][1]
    )
    assert not any("(not ended)" in name for name in seen["bold"])


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    folder = write_run(tmp_path / "a", "fedavg", rounds=3)
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert str(folder / "report.html") == out[-1] and all(
        pathlib.Path(line).is_file() for line in out
    )
    assert main(["report", str(tmp_path / "nowhere")]) == 2
