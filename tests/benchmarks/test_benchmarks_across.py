"""The benchmark across federations: what is chosen, how it is paired, what the page says."""

from __future__ import annotations

import json

import numpy as np

from benchmarks import across_cycles, across_page
from benchmarks import across_federations as across
from benchmarks.pages import marks
from fedjax_sim.engine.episode import Scores


def scores(common, clients) -> Scores:
    zeros = np.zeros(len(common))
    return Scores(np.array(common), np.array(clients), zeros, zeros, zeros)


def test_the_setting_is_chosen_by_the_goal():
    rest = dict(worst=0.0, down=1.0, up=1.0)
    tuned = {
        "full|0.1|constant": dict(common=0.5, clients=0.9, **rest),
        "full|0.4|cosine": dict(common=0.8, clients=0.7, **rest),
        "backbone after 0.8|0.2|cosine": dict(common=0.9, clients=0.95, **rest),
    }
    full = lambda name: name == "full"
    assert across.best(tuned, "own", full) == ("full", 0.1, "constant")
    assert across.best(tuned, "global=0.9+own=0.1", full) == ("full", 0.4, "cosine")
    tuned["own|0.4|constant"] = dict(common=0.1, clients=0.8, **rest)  # the controller
    tuned["own|0.2|cosine"] = dict(common=0.0, clients=0.85, **rest)
    entries = across.entries_of(tuned, ["own"], ())
    assert [entry.row for entry in entries] == ["full", across.MINE, "best rule"]
    assert (entries[1].rate, entries[1].schedule) == (0.2, "cosine")
    assert entries[2].name == "backbone after 0.8"


def test_a_goal_with_bytes_has_rules_and_rounds_that_save_them():
    whole, half = dict(down=1.0, up=1.0), dict(down=0.5, up=0.5)
    level = lambda common, sent: dict(common=common, clients=0.0, worst=0.0, **sent)
    goal = "global+bytes=0.2"
    tuned = {
        "full|0.4|cosine": level(0.8, whole),
        f"{goal}|0.4|cosine": level(0.8, half),
        "heads if chance<0.5|0.4|cosine": level(0.75, half),
        "0.5|0.4|cosine": level(0.71, half),
    }
    rows = {entry.row: entry for entry in across.entries_of(tuned, [goal], ())}
    assert rows["best rule"].name == "heads if chance<0.5"
    assert rows["full, fewer rounds"].label == "full, 50% of the rounds"
    part = across.in_part(scores([0.7], [0.7])._replace(down=np.ones(1), up=np.ones(1)), 0.5)
    assert (part.down, part.up, part.common) == (0.5, 0.5, 0.7)
    kept = across.FRUGAL["nothing if chance<0.5"]
    assert all(kept.count(word) == 2 for word in ("keep_", "withhold_", "_head:", "_backbone:"))


def test_rows_are_paired_federation_by_federation():
    entry = lambda row: across.Entry("own", row, "rule", "full", 0.1, "constant")
    found = {
        entry("full"): scores([0.5, 0.6, 0.7], [0.5, 0.6, 0.7]),
        entry("best rule"): scores([0.5, 0.6, 0.7], [0.6, 0.7, 0.8]),
        entry(across.MINE): scores([0.4, 0.6, 0.8], [0.7, 0.8, 0.9]),
    }
    rows = across.paired(found, "own")[across.MINE]
    np.testing.assert_allclose(rows["over_full"]["goal"]["mean"], 0.2)
    np.testing.assert_allclose(rows["over_full"]["goal"]["half"], 0, atol=1e-9)
    np.testing.assert_allclose(rows["over_rule"]["goal"]["mean"], 0.1)
    assert rows["over_full"]["goal"]["better"] == 3 and rows["over_full"]["common"]["better"] == 1
    assert across_page.points(rows["over_full"]["clients"]).startswith("**+20.00")
    assert "**" not in across_page.points(rows["over_full"]["common"])


def test_the_figure_shows_what_the_agent_does():
    """`shares` is the agent's action on what FedPolicy would show it."""
    import agents
    from fedjax_sim.methods.fedpolicy.state import USUAL

    rng = np.random.default_rng(0)
    parameters = rng.normal(size=36).astype(np.float32)
    seen = rng.uniform(size=9)
    usual = np.array([USUAL[name] for name in across_page.FEATURES])
    agent = agents.make("evolved", 9, 4, continuous=True, bias=False)
    state = agent.init(None)._replace(parameters=parameters)
    action, _ = agent.act(state, np.clip((seen - usual[:, 0]) / usual[:, 1], -3, 3), None)
    np.testing.assert_allclose(
        across_page.shares(parameters, seen), (np.asarray(action) + 1) / 2, atol=1e-5
    )
    weights = np.zeros((9, 4))
    weights[[3, 8]] = [[1, 0, 0, 0], [0, 0, 0, 2]]
    assert across_page.strongest(weights.ravel()) == (8, 3)


def test_a_round_lasts_as_long_as_its_largest_client():
    sizes = np.array([10, 10, 10, 100])
    assert across_cycles.longest(sizes, 4, 20, 2) == 10
    assert across_cycles.longest(sizes, 1, 20, 1) == 2  # (1 + 1 + 1 + 5) / 4


def test_only_a_tpu_has_cycles():
    row = dict(device="v5e", policies=128, steps=2, cycles=15000.0, clock=1.5e9, kernels=9)
    row |= dict(unpriced=3, memory_us=1.5)
    lines = across_page.chip_lines([row, row | dict(device="h100", cycles=None)])
    assert "| v5e | 128 | 15,000 | 10.0 | 1.5 | 9 (3) |" in lines
    assert "| h100 | 128 | – | – | 1.5 | 9 |" in lines


def test_what_a_method_does_not_have_is_no_number():
    nothing = dict(mean=float("nan"), half=float("nan"), better=0, of=3)
    assert across_page.points(nothing) == "–"
    assert across_page.rounded({"a": [float("nan"), 1 / 3], "of": 3}) == {
        "a": [None, 0.333333],
        "of": 3,
    }


def test_a_page_keeps_its_prose(tmp_path):
    """Tables go between the marks; nothing is said of what was not measured."""
    goal, work = "global=1+bytes=0.1", tmp_path / "work"
    work.mkdir()
    entry = lambda row: across.Entry(goal, row, "rule", "full", 0.1, "constant")
    found = {entry(row): scores([0.5, 0.6], [0.7, 0.8]) for row in ("full", "best rule")}
    found[entry(across.MINE)] = scores([0.6, 0.7], [0.7, 0.8])
    (work / f"scores-USPS--{goal}.json").write_text(json.dumps(across.paired(found, goal)))
    page = tmp_path / "mine.md"
    page.write_text("# Mine\n\nBy hand.\n\n{}\nold\n{}\n\nThe end.\n".format(*marks("mine")))
    across_page.write(work, tmp_path, {goal: np.zeros(40)}, "mine")
    text = page.read_text()
    assert "By hand." in text and "The end." in text and "old" not in text
    assert "| USPS | global=1+bytes=0.1 | **+10.00 ± 0.00** | 2 of 2 |" in text
    assert "## Speed" not in text and "## Who takes part" not in text
    for name in ("mine-front.png", "across-policy-global1-bytes01.png", "mine.json"):
        assert (tmp_path / name).stat().st_size > 0
