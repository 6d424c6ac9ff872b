"""Controllers trained across federations: what is drawn, the search, and what it leaves behind."""

from __future__ import annotations

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim.engine.episode import Length, make_episode, only
from fedjax_sim.engine.keys import seed_key
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment
from fedjax_sim.presets import controllers
from fedjax_sim.runner.across import evolve
from fedjax_sim.runner.across.over import draw_federation, parse_over
from fedjax_sim.runner.across.pretrained import pack
from fedjax_sim.runner.sinks import Steps

OVER = (
    "dirichlet:0.1..1, clients:5..7, participation:0.3..0.5, examples:20, data:digits,"
    " test:50, server_val:20, population:4, federations:2, tuning:2, held_out:3, last:2,"
    " rates:0.05|0.2, schedules:constant, goal:global=0.5+own=0.5"
)
CONFIG = Experiment.of(
    "fedpolicy",
    options={"agent": "evolved"},
    model="mlp",
    model_options={"hidden": (6,)},
    loss="ce",
    rounds=4,
    epochs=1,
    momentum=0.0,
)


def test_federations_are_functions_of_their_number():
    over = parse_over(OVER.split(", population")[0])
    (one, facts), (same, _), (other, _) = (draw_federation(over, 3, n) for n in (5, 5, 6))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert 5 <= facts.clients <= 7 and one.num_clients == facts.clients
    assert 0.1 <= facts.dirichlet <= 1 and facts.participants <= 4
    used = [rows[:n] for s in one.rows for rows, n in zip(one.rows[s], one.size[s], strict=True)]
    used = np.concatenate([*used, *one.server_rows.values()])
    assert len(used) == len(np.unique(used))  # no row twice: nothing leaks into a test


def test_generations_share_a_program():
    """Federations of one distribution have one shape; or every generation would be compiled."""
    over, search = evolve.parse(OVER)
    problem = evolve.Problem(over, CONFIG, Length(4, last=search.last))
    sim = problem.simulation()
    drawn = [problem.draws(sim, evolve.TRAINING, 3 * i, 3).draw for i in range(4)]
    assert len({tuple(np.shape(a) for a in jax.tree.leaves(draw)) for draw in drawn}) == 1


def test_words_that_are_refused():
    for text, said in (
        ("clients:0..5", "clients '0..5'"),
        ("alpha:1", "unknown option of over 'alpha'"),
        ("participation:0.5..2", "participation 2"),
        ("population:2", "population 2"),
        ("generations:x", "generations 'x'"),
        ("goal:speed", "unknown goal 'speed'"),
        ("rates:0.1|fast", "rates"),
    ):
        with pytest.raises(UserError, match=said):
            evolve.parse(text)
    with pytest.raises(UserError, match="no policy to train"):
        evolve.where_it_evolves(Experiment.of("fedavg"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two generations in one go."""
    out = tmp_path_factory.mktemp("across") / "whole"
    return out, evolve.train_over(f"{OVER}, generations:2", CONFIG, out, say=lambda text: None)


def test_a_search_goes_on_where_it_was(trained, tmp_path):
    out, whole = trained
    first = evolve.train_over(f"{OVER}, generations:1", CONFIG, tmp_path, say=lambda text: None)
    again = evolve.train_over(f"{OVER}, generations:2", CONFIG, tmp_path, say=lambda text: None)
    assert first["parameters"] != whole["parameters"] == again["parameters"]
    assert whole["held_out"] == again["held_out"] and whole["held_out"]["goal"]["of"] == 3
    with pytest.raises(UserError, match="choose another --out"):
        evolve.train_over(f"{OVER}, sigma:0.5", CONFIG, tmp_path, say=lambda text: None)
    assert json.loads((out / "result.json").read_text())["parameters"] == whole["parameters"]


def test_a_search_starts_from_a_policy(trained, tmp_path):
    """--start-from: the search begins at that policy, is still scored against `full`, and does not
    go on from another start."""
    out, whole = trained
    config = CONFIG.replace(start_from=f"{out}:agent")
    text = f"{OVER}, generations:1, sigma:0.000001"
    said: list[str] = []
    found = evolve.train_over(text, config, tmp_path, say=said.append)
    np.testing.assert_allclose(found["parameters"], whole["parameters"], atol=1e-4)
    assert found["held_out"]["goal"] == whole["held_out"]["goal"]
    assert sum(line.startswith("generation 1 of 1: mean") for line in said) == 1
    with pytest.raises(UserError, match="was searched with start_from=agent@"):
        evolve.train_over(text, CONFIG, tmp_path, say=lambda text: None)


def test_a_search_draws_one_bar(capsys):
    lines: list[str] = []
    for bar in (True, False):
        steps = Steps("generation", 1, 3, lines.append, bar)
        for _ in range(2):
            steps.step("mean +1.00", 30.0)
        steps.close()
    shown = capsys.readouterr().err
    assert "3/3" in shown and "mean +1.00" in shown and shown.count("\n") == 1
    ends = ("0:30 left", "0:00 left")
    assert lines == [
        f"generation {i} of 3: mean +1.00, {t}" for i, t in zip((2, 3), ends, strict=True)
    ]


def test_the_trained_policy_is_used_frozen(trained):
    """A run that starts from it is the episode with its parameters, and leaves it as it was."""
    out, whole = trained
    over, _ = evolve.parse(OVER)
    fed, facts = draw_federation(over, 11, 0)
    share = f"{facts.participants}/{facts.clients}"
    config = CONFIG.replace(participation=share, lr=0.2)
    plain = dict(participation=share, rounds=4, epochs=1, momentum=0.0, lr=0.2, loss="ce")
    plain |= dict(model="mlp", model_options={"hidden": (6,)}, chunk=1)
    run = lambda **more: fs.run("fedpolicy", fed, agent="evolved", **plain, seed=2, **more)
    result = run(start_from=f"{out}:agent", **{"agent.frozen": True})
    kept = np.asarray(result.state.agent.parameters)
    np.testing.assert_array_equal(kept, np.float32(whole["parameters"]))
    problem = evolve.Problem(over, config, Length(4, last=2))
    sim = evolve.prepare(config, fed=fed, measure=False).simulation
    clients = np.array([fed.num_clients])
    draw = evolve.episodes.draws(sim.stages, [fed], clients, [facts.participants])
    episode = make_episode(sim, problem.length, parts="agent.parameters")
    scores = jax.jit(episode)(jnp.asarray(kept), only(draw, 0), seed_key(2))
    rows = [row for row in result.rows if row["round"] in (2, 4)]
    np.testing.assert_allclose(scores.common, np.mean([r["global_acc"] for r in rows]), atol=1e-6)
    np.testing.assert_allclose(scores.clients, np.mean([r["client_mean"] for r in rows]), atol=1e-6)


def test_untrained_is_full():
    """Parameters of 0 take and send everything."""
    over, _ = evolve.parse(OVER)
    fed, _ = draw_federation(over, 11, 1)
    plain = dict(participation="0.5", rounds=3, epochs=1, loss="ce", model="mlp")
    plain |= dict(model_options={"hidden": (6,)}, chunk=1)
    full, none = (fs.run("fedpolicy", fed, agent=a, **plain) for a in ("full", "evolved"))
    assert [r["global_acc"] for r in full.rows] == [r["global_acc"] for r in none.rows]
    assert full.summary["bytes_up"] == none.summary["bytes_up"]


@pytest.mark.parametrize("name", controllers.names())
def test_what_comes_with_the_package(name):
    about = controllers.about(name)
    assert "fedjax-sim train" in about["command"] and about["held_out"]
    path, arrays = controllers.read(name)
    assert path.stat().st_size < 10_000 and all(np.isfinite(a).all() for a in arrays.values())
    options = dict(re.findall(r"--set fedpolicy\.(agent\.\w+)=(\w+)", about["command"]))
    start = dict(start_from=f"pretrained:{name}:agent", rounds=1, epochs=1, clients=4, model="mlp")
    for dtype in ("float32", "float64"):
        result = fs.run(
            "fedpolicy", agent="evolved", participation=1, dtype=dtype, **start, **options
        )
        parameters = result.state.agent.parameters
        assert parameters.dtype == dtype
        np.testing.assert_array_equal(parameters, arrays["agent.parameters"])


def test_a_pretrained_controller_by_name(tmp_path, monkeypatch, trained):
    monkeypatch.setattr(controllers, "FOLDER", tmp_path)
    pack(trained[0], tmp_path / "mine.npz", "fedjax-sim train …")
    assert controllers.about("mine")["held_out"] == trained[1]["held_out"]
    parameters = np.float32(trained[1]["parameters"])
    fed = draw_federation(evolve.parse(OVER)[0], 11, 2)[0]
    start = dict(rounds=1, epochs=1, model="mlp", model_options={"hidden": (6,)}, chunk=1)
    result = fs.run("fedpolicy", fed, agent="evolved", start_from="pretrained:mine:agent", **start)
    np.testing.assert_array_equal(result.state.agent.parameters, parameters)
    for text, said in (
        ("pretrained:none:agent", "unknown pretrained controller 'none'"),
        ("pretrained:mine:server", "has no part 'server'"),
    ):
        with pytest.raises(UserError, match=said):
            fs.run("fedpolicy", fed, agent="evolved", start_from=text, **start)


def test_a_selection_is_trained_alike(tmp_path):
    around = ("agent_selection:agent=evolved",)
    config = CONFIG.replace(method="fedavg", options={}, transforms=around)
    text = f"{OVER}, generations:1".replace("goal:global=0.5+own=0.5", "goal:global")
    found = evolve.train_over(text, config, tmp_path, say=lambda text: None)
    assert found["parts"] == "server.mine.agent.parameters" and len(found["parameters"]) == 7
    fed = draw_federation(evolve.parse(OVER)[0], 11, 3)[0]
    start = dict(rounds=1, epochs=1, model="mlp", model_options={"hidden": (6,)}, chunk=1)
    how = dict(transforms=config.method.transforms, start_from=f"{tmp_path}:server.mine.agent")
    result = fs.run("fedavg", fed, **start, **how)
    kept = result.state.server.mine.agent.parameters
    np.testing.assert_array_equal(kept, np.float32(found["parameters"]))
    shutil.rmtree(tmp_path / "checkpoints")


@pytest.mark.parametrize("values", [[1.0, 2.5], [0.3, -0.2, 0.8, 1.1, 0.4]])
def test_the_interval_is_students(values):
    """With few federations the quantile of the normal distribution is far too small."""
    from scipy.stats import ttest_1samp

    found = evolve.interval(np.array(values))
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(
        [found["mean"] - found["half"], found["mean"] + found["half"]], [low, high]
    )
    assert np.isnan(evolve.interval(np.array([1.0]))["half"])
