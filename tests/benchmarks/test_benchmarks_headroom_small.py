"""Headroom of pFedRLLA and of the Q-bandit: they run, go on where they stopped, and leave pages."""

from __future__ import annotations

import json

import numpy as np

from benchmarks import headroom_pfedrlla, headroom_qbandit, headroom_small


def test_paired_differences():
    mean, half = headroom_small.paired([2.0, 4.0, 3.0], [1.0, 2.0, 3.0])
    assert mean == 1.0 and abs(half - 4.30 * 1 / np.sqrt(3)) < 1e-6
    lines = headroom_small.table({"even": [1.0, 2.0], "other": [2.0, 3.0]}, "even")
    assert lines[-1] == "| `other` | 2.50 | +1.00 ± 0.00 | 2 |"


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
    words = ["--scale", "smoke", "--seeds", "2", "--out", str(tmp_path)]
    assert headroom_pfedrlla.main([*words, "--rules", "even,similarity:5"]) == 0
    found = json.loads((tmp_path / "headroom-pfedrlla.json").read_text())
    assert [len(v) for v in found["digits, 2 classes"].values()] == [2, 2]
    monkeypatch.setattr(headroom_pfedrlla, "program", None)  # what is there is not run again
    assert headroom_pfedrlla.main([*words, "--rules", "even,similarity:5"]) == 0
    page = (tmp_path / "headroom-pfedrlla.md").read_text()
    assert "| `similarity:5` |" in page and "minus even" in page
    monkeypatch.undo()
    assert headroom_pfedrlla.main([*words, "--rules", "oven"]) == 2
    assert "unknown head of pfedrlla 'oven'" in capsys.readouterr().err


def test_budgets(tmp_path, monkeypatch):
    few = {name: headroom_qbandit.POLICIES[name] for name in ("compliant", "ridge_bandit")}
    monkeypatch.setattr(headroom_qbandit, "POLICIES", few)
    words = ["--scale", "smoke", "--seeds", "2", "--out", str(tmp_path)]
    assert headroom_qbandit.main(words) == 0
    found = json.loads((tmp_path / "headroom-qbandit.json").read_text())["digits"]
    assert all(one["exceeded"] == 0 for name in few for one in found[name])
    most = [(c, min(b, 3)) for c, b in headroom_qbandit.TABLE_1]
    assert all(c <= own[0] and b <= own[1] for (c, b), own in zip(found["told"], most, strict=True))
    # who is told to do what `compliant` does is scored as it is
    assert len(found["best fixed"]) == 2
    assert "epochs/layers client by client" in (tmp_path / "headroom-qbandit.md").read_text()


def test_the_fixed_choice_goes_on_where_it_was():
    """One client at a time, written down after each; a second call asks only for the others."""
    scale, asked = {"layers": 3}, []

    def worth(told: list) -> float:
        asked.append(list(told))
        return -sum(b for _, b in told)  # the fewest layers are the best

    whole, kept = {}, []
    keep = lambda: kept.append(json.loads(json.dumps(whole)))
    chosen = headroom_qbandit.best_fixed(scale, worth, whole, keep)
    assert [b for _, b in chosen] == [1] * len(chosen) and len(kept) == len(chosen)
    number = len(asked)
    asked.clear()
    again = headroom_qbandit.best_fixed(scale, worth, kept[-2], lambda: None)
    assert again == chosen and len(asked) < number / 4
