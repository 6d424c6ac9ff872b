"""What Python users see: short texts, tables, predictions that agree with the evaluation,
comparisons, sweeps, sentences."""

from __future__ import annotations

import builtins
import html
import re

import numpy as np
import pytest

import fedjax_sim as fs

SMALL = dict(
    model="mlp", model_options={"hidden": (6,)}, epochs=1, batch_size=8, devices="1", rounds=2
)


@pytest.fixture(scope="module")
def fed():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 3, 150)
    x = (rng.integers(0, 90, (150, 4, 4)) + 60 * y[:, None, None]).astype(np.uint8)
    cut = np.split(rng.permutation(150), np.cumsum([20, 31, 9, 40, 8, 5, 7, 10]))
    return fs.Federation.from_arrays(
        x, y, {"train": cut[:4], "test": cut[4:8]}, test=np.concatenate(cut[4:]), name="bars"
    )


@pytest.fixture(scope="module")
def result(fed):
    return fs.run("ditto", fed, participation="0.5", evaluate="global,personal", **SMALL)


def test_dir_shows_the_api_and_every_name_is_there():
    assert set(fs.__all__) <= set(dir(fs)) and "annotations" not in dir(fs)
    for name in fs.__all__:
        assert getattr(fs, name) is not None


def test_texts_are_short(fed, result):
    assert len(repr(result)) < 200 and "ditto on bars, 2 rounds" in repr(result)
    assert len(repr(fed)) < 200 and "4 clients" in repr(fed) and "bars" in repr(fed)


def test_predictions_are_those_of_the_evaluation(fed, result):
    # raw images without a channel, as they were given
    x, y = (np.asarray(fed.x)[..., 0], np.asarray(fed.y))
    test = np.asarray(fed.server_rows["test"])
    assert np.mean(result.predict(x[test]) == y[test]) == pytest.approx(
        result.rows[-1]["global_acc"], abs=1e-6
    )
    for k in range(4):
        rows = fed.client_rows(k, "test")
        assert (result.predict(x[rows], client=k) == y[rows]).sum() == result.clients[
            "personal_correct"
        ][-1][k]
    hidden, head = (result.net["params"][g] for g in ("fc1", "fc"))
    flat = ((x / 255 - fed.mean) / fed.std).reshape(len(x), -1)
    want = np.maximum(flat @ hidden["kernel"] + hidden["bias"], 0) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(result.predict(x, logits=True), want, atol=1e-4)
    # Ditto's client 2 is another model
    assert not np.allclose(result.predict(x, 2, logits=True), want, atol=1e-3)


def test_what_cannot_be_predicted_is_said(fed, result):
    with pytest.raises(fs.UserError, match=r"x is float64, but the images of 'bars' are uint8"):
        result.predict(np.zeros((1, 4, 4)))
    with pytest.raises(
        fs.UserError, match=r"images \(5, 4, 1\), but those of 'bars' are \(4, 4, 1\)"
    ):
        result.predict(np.zeros((1, 5, 4), np.uint8))
    with pytest.raises(fs.UserError, match="there is no client 4; allowed: 0 to 3"):
        result.predict(np.zeros((1, 4, 4), np.uint8), client=4)


def test_a_method_that_fine_tunes_and_one_without_a_global_model(fed):
    x, y = np.asarray(fed.x), np.asarray(fed.y)
    for name in ("fedavg_ft", "local"):
        result = fs.run(name, fed, participation="1", **SMALL)
        rows = fed.client_rows(1, "test")
        assert (result.predict(x[rows], client=1) == y[rows]).sum() == result.clients[
            "personal_correct"
        ][-1][1]
    with pytest.raises(fs.UserError, match="method 'local' has no global model"):
        result.predict(x)


def test_tables(result, monkeypatch):
    assert result.table() == result.rows and result.table("rounds") == result.rounds
    assert (
        repr(result.table()).splitlines()[0].split()[0] == "round"
        and "<table>" in result.table()._repr_html_()
    )
    frame = result.to_pandas()
    assert frame["global_acc"].tolist() == [row["global_acc"] for row in result.rows]
    with pytest.raises(fs.UserError, match=r"unknown table 'metrix' \(did you mean 'metrics'\?\)"):
        result.table("metrix")
    real = builtins.__import__

    def without_pandas(name, *more, **also):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *more, **also)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(fs.UserError, match="pip install pandas"):
        result.to_pandas()


def test_plot_leaves_the_callers_look_alone(result, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.rcParams["font.size"] = 13
    picture = result.plot(tmp_path / "figures" / "mine.png")
    assert picture._repr_png_().startswith(b"\x89PNG") and matplotlib.rcParams["font.size"] == 13
    assert sorted(f.name for f in (tmp_path / "figures").iterdir()) == ["mine.pdf", "mine.png"]
    assert result.plot(against="bytes").files == []
    with pytest.raises(fs.UserError, match="unknown axis 'tim'"):
        result.plot(against="tim")


def test_a_saved_net_is_where_the_next_run_starts(fed, result, tmp_path):
    fs.save_net(tmp_path / "net.npz", result.net)
    again = fs.run(
        "fedavg", fed, init=tmp_path / "net.npz", participation="1", **SMALL | dict(rounds=1, lr=0)
    )
    np.testing.assert_allclose(
        again.net["params"]["fc"]["kernel"], result.net["params"]["fc"]["kernel"], atol=1e-6
    )


def test_compare_is_run_twice_on_the_same_draws(fed, tmp_path):
    both = fs.compare(
        "fedavg",
        "fedprox:mu=0.5,lr=0.1",
        fed=fed,
        seeds=2,
        participation="0.5",
        out=tmp_path / "c",
        **SMALL,
    )
    assert both.entries == ["fedavg"] * 2 + ["fedprox:mu=0.5,lr=0.1"] * 2
    same = fs.make_method("fedprox", mu=0.5)
    alone = fs.compare(same, fed=fed, lr=0.1, seed=1, participation="0.5", **SMALL).results[0]
    assert both.results[3].rows == alone.rows and both.results[3].rows != both.results[2].rows
    assert {row["seed"] for row in both.table()} == {0, 1} and "fedprox:mu=0.5" in repr(both)
    assert (tmp_path / "c" / "compare.csv").exists()
    with pytest.raises(fs.UserError, match=r"'fedavg' and 'fedavg:lr=0.02' are the same run"):
        fs.compare("fedavg", "fedavg:lr=0.02", fed=fed, **SMALL)
    with pytest.raises(fs.UserError, match="option of the whole comparison"):
        fs.compare("fedavg:seeds=2", fed=fed, **SMALL)


def test_a_comparison_shows_itself_as_a_table(fed):
    """What the console shows, cell by cell; names are text, never markup."""
    both = fs.compare("fedavg", "fedprox:mu=0.5", fed=fed, participation="0.5", **SMALL)
    both.entries[0] = "fedavg <b>"
    shown = both._repr_html_()
    assert shown.startswith("<table>") and "fedavg &lt;b&gt;" in shown and "<b>" not in shown
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", shown)
    assert len(cells) % 3 == 0 and "fedprox:mu=0.5" in cells
    for cell in cells:
        assert html.unescape(cell) in repr(both)


def test_sweep_is_the_command(tmp_path):
    ask = dict(
        grid={"lr": [0.01, 0.1], "mu": [0.5]},
        rounds=1,
        clients=3,
        epochs=0.1,
        model="mlp",
        devices="1",
    )
    rows = fs.sweep(["fedavg"], tmp_path / "s", **ask | dict(grid={"lr": [0.1]}))
    assert [(r["method"], r["status"], r["lr"]) for r in rows] == [
        ("fedavg", "done", 0.1)
    ] and rows[0]["last_global"] > 0
    with pytest.raises(
        fs.UserError, match="unknown option of a run or of method 'fedavg' 'raunds'"
    ):
        fs.sweep(["fedavg"], tmp_path / "t", raunds=3)
    with pytest.raises(fs.UserError, match=r"lr <object .* is not a number"):
        fs.sweep(["fedavg"], tmp_path / "t", lr=object())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            dict(raunds=3),
            r"unknown option of a run or of method 'fedavg' 'raunds' \(did you mean 'rounds'\?\)",
        ),
        (dict(rounds="three"), "rounds 'three' is not a whole number; default: 30"),
        (dict(rounds=2.5), "rounds '2.5' is not a whole number"),
        (dict(rounds=None), "rounds None is not a number"),
        (dict(lr=[0.1]), r"lr \[0.1\] is not a number"),
        (dict(batch_size=True), "batch-size True is not a number"),
        (dict(clients="many"), "clients 'many' is not a whole number"),
        (dict(evaluate="globl"), r"unknown evaluation 'globl' \(did you mean 'global'\?\)"),
        (dict(evaluations=3), "evaluations 3 is not a list of evaluation modes"),
        (dict(model_options=[8]), r"model-options \[8\] is not a dict"),
        (dict(partition=None), "partition None is not text"),
        (dict(data_dir=3), "data-dir 3 is not a path"),
        ({"model.hiden": 8}, "model 'mlp' has no option 'hiden'"),
    ],
)
def test_a_mistake_is_one_sentence(wrong, sentence):
    with pytest.raises(fs.UserError, match=sentence):
        fs.run("fedavg", **dict(model="mlp") | wrong)
    with pytest.raises(fs.UserError, match="unknown method 'fedavgg'"):
        fs.run("fedavgg")
    with pytest.raises(fs.UserError, match="method is a name or a Method"):
        fs.run(3)
