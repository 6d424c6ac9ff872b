"""Headroom of pFedRLLA and of the Q-bandit: the runs, the resume, and the tables on their pages."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from scipy import stats

from benchmarks import headroom_pfedrlla, headroom_qbandit, headroom_small, pages
from fedjax_sim.errors import UserError

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"


def test_paired_differences():
    mean, half = pages.interval([1.0, 2.0, 0.0])
    low, high = stats.ttest_1samp([1.0, 2.0, 0.0], 0).confidence_interval(0.95)
    np.testing.assert_allclose([mean - half, mean + half], [low, high])
    assert pages.interval([2.5]) == (2.5, np.inf)
    lines = headroom_small.table({"even": [1.0, 2.0], "other": [2.0, 3.0]}, "even")
    assert lines[-1] == "| `other` | 2.50 | +1.00 ± 0.00 | 2 |"


def test_tables_replace_only_the_lines_between_the_marks(tmp_path):
    path = tmp_path / "page.md"
    pages.write_tables(path, "one", "Title", ["first"])
    begin, end = pages.marks("one")
    assert path.read_text() == f"# Title\n\n{begin}\nfirst\n\n{end}\n"
    path.write_text(path.read_text() + "\n## What it says\n\nBy hand.\n")
    pages.write_tables(path, "one", "Another title", ["second", ""])
    expected = f"# Title\n\n{begin}\nsecond\n\n{end}\n\n## What it says\n\nBy hand.\n"
    assert path.read_text() == expected
    path.write_text("By hand.\n")
    with pytest.raises(UserError, match="has no lines '<!-- tables of one: begin -->' and"):
        pages.write_tables(path, "one", "Title", ["third"])
    assert path.read_text() == "By hand.\n"


@pytest.mark.parametrize("benchmark", [headroom_pfedrlla, headroom_qbandit])
def test_the_published_pages_are_the_tables_and_prose(tmp_path, benchmark):
    """The stored results give the published tables, and the prose around them stays."""
    name = benchmark.__name__.rpartition("_")[2]
    page = (RESULTS / f"headroom-{name}.md").read_text()
    copy = tmp_path / "page.md"
    copy.write_text(page)
    found = headroom_small.read(RESULTS / f"headroom-{name}.json")
    pages.write_tables(copy, name, "Title", benchmark.lines(found, "small"))
    assert copy.read_text() == page and "## What it says" in page.partition(pages.marks(name)[0])[0]


def test_federations_have_one_shape_and_the_labels_asked_for():
    data = headroom_small.images("digits", None, 2)
    assert data[0].shape[1:] == (14, 14, 1)
    feds = []
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        shares = headroom_small.few_classes(3, 10, 2, rng)
        feds.append(headroom_small.federation(data, shares, [(6, 2, 4)] * 3, rng, test=20))
        assert (feds[-1].label_counts().astype(bool) <= shares.astype(bool)).all()
    one, other = ({k: np.asarray(v).shape for k, v in fed.rows.items()} for fed in feds)
    assert one == other and (feds[0].label_counts() != feds[1].label_counts()).any()


def test_heads(tmp_path, capsys, monkeypatch):
    options = ["--scale", "smoke", "--seeds", "2", "--out", str(tmp_path)]
    assert headroom_pfedrlla.main([*options, "--rules", "even,similarity:5"]) == 0
    found = json.loads((tmp_path / "headroom-pfedrlla.json").read_text())
    assert [len(v) for v in found["digits, 2 classes"].values()] == [2, 2]
    page = tmp_path / "headroom-pfedrlla.md"
    page.write_text(page.read_text() + "By hand.\n")
    monkeypatch.setattr(headroom_pfedrlla, "program", None)  # finished runs are not repeated
    assert headroom_pfedrlla.main([*options, "--rules", "even,similarity:5"]) == 0
    text = page.read_text()
    assert "| `similarity:5` |" in text and "minus even" in text and text.endswith("By hand.\n")
    monkeypatch.undo()
    assert headroom_pfedrlla.main([*options, "--rules", "oven"]) == 2
    assert "unknown head of pfedrlla 'oven'" in capsys.readouterr().err


def test_budgets(tmp_path, monkeypatch):
    few = {name: headroom_qbandit.POLICIES[name] for name in ("compliant", "ridge_bandit")}
    monkeypatch.setattr(headroom_qbandit, "POLICIES", few)
    options = ["--scale", "smoke", "--seeds", "2", "--out", str(tmp_path)]
    assert headroom_qbandit.main(options) == 0
    found = json.loads((tmp_path / "headroom-qbandit.json").read_text())["digits"]
    assert all(one["exceeded"] == 0 for name in few for one in found[name])
    most = [(c, min(b, 3)) for c, b in headroom_qbandit.TABLE_1]
    pairs = zip(found["best_fixed_actions"], most, strict=True)
    assert all(c <= limit[0] and b <= limit[1] for (c, b), limit in pairs)
    assert len(found["best fixed"]) == 2
    assert "epochs/layers client by client" in (tmp_path / "headroom-qbandit.md").read_text()


def test_the_choice_of_fixed_actions_resumes():
    """The choice is saved after each client; a second call scores only the clients that remain."""
    scale, scored = {"layers": 3}, []

    def score(pairs: list) -> float:
        scored.append(list(pairs))
        return -sum(b for _, b in pairs)  # the fewest layers are the best

    results, saved = {}, []
    save = lambda: saved.append(json.loads(json.dumps(results)))
    chosen = headroom_qbandit.best_fixed(scale, score, results, save)
    assert [b for _, b in chosen] == [1] * len(chosen) and len(saved) == len(chosen)
    number = len(scored)
    scored.clear()
    resumed = headroom_qbandit.best_fixed(scale, score, saved[-2], lambda: None)
    assert resumed == chosen and len(scored) < number / 4
