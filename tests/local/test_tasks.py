"""Tasks beside classification: what is learned and measured, against closed forms and scikit-learn;
files and refusals."""

from __future__ import annotations

import functools
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_sim as fs
from fedjax_sim.cli.main import main
from fedjax_sim.local import losses
from fedjax_sim.metrics import make_metrics
from fedjax_sim.tasks import TASKS, Task

HOW = dict(participation="1", rounds=2, epochs=1, batch_size=8, devices="1", chunk="2")
ROWS = {
    "train": [range(0, 20), range(20, 27), range(27, 45)],
    "val": [range(45, 49), range(49, 53), range(53, 57)],
}
TEST = range(57, 75)


@functools.cache
def table(task: str) -> fs.Federation:
    """75 rows of 3 features, three clients."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(75, 3)) * [1, 10, 0.1] + [0, 5, -1]
    clear = (x - x.mean(0)) / x.std(0)
    if task == "regression":
        y = np.stack([clear @ [1.0, -2, 0.5] + 0.3, clear @ [0.0, 1, 1]], 1) + 0.1 * rng.normal(
            size=(75, 2)
        )
    else:
        y = (clear @ rng.normal(size=(3, 4)) + 0.3 * rng.normal(size=(75, 4)) > 0).astype(int)
    return fs.Federation.from_arrays(x, y, ROWS, test=TEST, server_val=[0, 1, 2, 3][:0] or None)


@functools.cache
def tokens() -> fs.Federation:
    """A little language of 5 tokens in which the next one is the last but one plus one; the ends of
    some rows are masked."""
    rng = np.random.default_rng(2)
    x = np.zeros((75, 9), int)
    x[:, :2] = rng.integers(0, 5, (75, 2))
    for t in range(2, 9):
        x[:, t] = (x[:, t - 2] + 1) % 5
    y = x[:, 1:].copy()
    y[::3, 5:] = -1
    return fs.Federation.from_arrays(x[:, :-1], y, ROWS, test=TEST)


def federation(task: str) -> fs.Federation:
    return tokens() if task == "sequence" else table(task)


MODELS = {
    "regression": dict(model="linear", lr=0.05),
    "multilabel": dict(model="mlp", lr=0.1),
    "sequence": dict(
        model="lstm", model_options={"width": 16, "embed": 4}, optimizer="adam:lr=0.02"
    ),
}


# ---- data ----------------------------------------------------------------------------------------
def test_arrays_say_their_task():
    assert [federation(task).task for task in MODELS] == list(MODELS)
    fed = tokens()
    assert (fed.x.dtype, fed.shape, fed.classes, fed.vocabulary) == (np.int32, (8,), 5, ())
    # tokens are never normalised
    assert (fed.mean == 0).all() and (fed.std == 1).all() and fed.scale == 1
    own = table("regression")
    trained = np.concatenate([np.asarray(own.x)[own.client_rows(i)] for i in range(3)])
    np.testing.assert_allclose(own.mean, trained.mean((0, 1, 2)))  # per column
    assert fs.Federation.from_arrays(
        np.zeros((4, 6), int), None, {"train": [[0], [1]]}, test=[2, 3]
    ).shape == (5,)


def test_counts_of_what_clients_have():
    fed, y = tokens(), np.asarray(tokens().y)
    mine = y[list(ROWS["train"][1])]
    assert fed.label_counts()[1].tolist() == [int((mine == c).sum()) for c in range(5)]
    labels = table("multilabel")
    assert labels.label_counts()[0].tolist() == np.asarray(labels.y)[:20].sum(0).tolist()
    assert table("regression").label_counts().tolist() == [[20, 20], [7, 7], [18, 18]]


@pytest.mark.parametrize(
    ("x", "y", "task", "message"),
    [
        (np.zeros((4, 3)), np.array([0, 1, 2, 0.5]), "classification", "vector of integer labels"),
        (np.zeros((4, 3)), np.array([[0, 2]] * 4), "", "0 or 1 for every label, but row 0 has 2"),
        (np.zeros((4, 3)), np.array([0, 1, np.nan, 1]), "", "y must be finite"),
        (np.full((4, 3), -1), None, "", "tokens from 0"),
        (np.zeros((4, 3)), None, "", "y may be left out for tokens"),
        (np.zeros((4, 3)), np.zeros(4, int), "clustering", "unknown task 'clustering'"),
        (np.zeros((4, 3), int), np.zeros((4, 3)), "sequence", "y must be tokens"),
    ],
)
def test_arrays_that_do_not_fit(x, y, task, message):
    with pytest.raises(fs.UserError, match=message):
        fs.Federation.from_arrays(x, y, {"train": [[0], [1]]}, test=[2, 3], task=task)


# ---- closed forms and scikit-learn ---------------------------------------------------------------
def test_ridge_regression_by_fedavg_is_the_closed_form():
    """One full step per client and round, averaged by size, is a step on everybody's data; weight
    decay is ridge."""
    fed, decay = table("regression"), 0.1
    how = {**HOW, "rounds": 400, "eval_every": 400, "batch_size": "full", "dtype": "float64"}
    result = fs.run("fedavg", fed, model="linear", lr=0.2, momentum=0.0, weight_decay=decay, **how)
    rows = np.concatenate([fed.client_rows(i) for i in range(3)])
    x = (np.asarray(fed.x)[rows].reshape(-1, 3) - fed.mean) / fed.std
    x, y = np.concatenate([x, np.ones((len(x), 1))], 1), np.asarray(fed.y)[rows]
    # mean over examples and the K outputs: d/dw = 2/(n K) Xᵀ(Xw − y) + decay·w
    scale = 2 / (len(x) * y.shape[1])
    exact = np.linalg.solve(scale * x.T @ x + decay * np.eye(4), scale * x.T @ y)
    layer = result.net["params"]["fc"]
    np.testing.assert_allclose(np.asarray(layer["kernel"]), exact[:3], rtol=1e-8)
    np.testing.assert_allclose(np.asarray(layer["bias"]), exact[3], rtol=1e-8)


def test_figures_of_labels_are_those_of_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    fed = table("multilabel")
    result = fs.run("fedavg", fed, **HOW, **MODELS["multilabel"])
    truth, said = np.asarray(fed.y)[list(TEST)], result.predict(np.asarray(fed.x)[list(TEST)])
    row = result.rows[-1]
    assert row["global_f1"] == pytest.approx(
        sk.f1_score(truth, said, average="micro", zero_division=0)
    )
    assert row["global_f1_macro"] == pytest.approx(
        sk.f1_score(truth, said, average="macro", zero_division=0)
    )
    assert row["global_subset"] == pytest.approx(sk.accuracy_score(truth, said))
    assert row["global_hamming"] == pytest.approx(sk.hamming_loss(truth, said))
    scores = result.predict(np.asarray(fed.x)[list(TEST)], logits=True)
    assert row["global_loss"] == pytest.approx(
        sk.log_loss(truth.ravel(), 1 / (1 + np.exp(-scores.ravel()))), rel=1e-4
    )
    each = [
        sk.f1_score(
            np.asarray(fed.y)[list(r)], result.predict(np.asarray(fed.x)[list(r)]), average="micro"
        )
        for r in ROWS["val"]
    ]
    assert row["client_f1_mean"] == pytest.approx(np.mean(each)) and row[
        "client_f1_worst10"
    ] == pytest.approx(min(each))


def test_figures_of_numbers_are_those_of_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    fed = table("regression")
    result = fs.run("fedavg", fed, metrics=("r2",), **HOW, **MODELS["regression"])
    truth, said = np.asarray(fed.y)[list(TEST)], result.predict(np.asarray(fed.x)[list(TEST)])
    row = result.rows[-1]
    assert row["global_mse"] == pytest.approx(sk.mean_squared_error(truth, said), rel=1e-5)
    assert row["global_rmse"] == pytest.approx(row["global_mse"] ** 0.5)
    assert row["global_mae"] == pytest.approx(sk.mean_absolute_error(truth, said), rel=1e-5)
    assert row["global_r2"] == pytest.approx(sk.r2_score(truth, said), rel=1e-4)
    assert result.summary["primary"]["better"] == -1 and result.summary[
        "last_global"
    ] == pytest.approx(row["global_mse"])


def test_places_without_a_target_do_not_count():
    fed = tokens()
    result = fs.run("fedavg", fed, **HOW, **MODELS["sequence"])
    truth, x = np.asarray(fed.y)[list(TEST)], np.asarray(fed.x)[list(TEST)]
    said, scores = result.predict(x), result.predict(x, logits=True)
    on = truth >= 0
    assert said.shape == truth.shape and not on.all()
    row = result.rows[-1]
    assert row["global_acc"] == pytest.approx((said == truth)[on].mean())
    each = optax.softmax_cross_entropy_with_integer_labels(scores[on], truth[on])
    assert row["global_loss"] == pytest.approx(float(each.mean()), rel=1e-4)
    assert row["global_perplexity"] == pytest.approx(np.exp(row["global_loss"]))
    other = np.where(on, truth, -1)
    loss = losses.make_loss("ce", 5)
    value = lambda y: float(
        loss.value(jnp.asarray(scores), jnp.asarray(y), jnp.ones(len(y)), jnp.ones(5))
    )
    assert value(other) == pytest.approx(row["global_loss"], rel=1e-5)


@pytest.mark.parametrize("task", MODELS)
def test_every_task_learns(task):
    result = fs.run(
        "fedavg", federation(task), **{**HOW, "rounds": 25, "eval_every": 5}, **MODELS[task]
    )
    assert result.rows[-1]["global_loss"] < 0.6 * result.rows[0]["global_loss"]
    if task == "sequence":
        assert result.rows[-1]["global_acc"] > 0.75  # two places cannot be known


# ---- losses --------------------------------------------------------------------------------------
def test_losses_of_numbers_and_labels():
    z, t, on = (
        jnp.array([[1.0, 3.0], [9.0, 9.0]]),
        jnp.array([[0.0, 0.0], [9.0, 0.0]]),
        jnp.array([True, False]),
    )
    value = lambda name, target, **options: float(
        losses.make_loss(name, 2, **options).value(z, target, on, jnp.ones(2))
    )
    assert value("mse", t) == pytest.approx((1 + 9) / 2)
    assert value("huber", t, delta=2.0) == pytest.approx((0.5 + 2 * (3 - 1)) / 2)
    both = [np.log1p(np.exp(1.0)), np.log1p(np.exp(-3.0))]
    assert value("bce", jnp.array([[0, 1], [0, 0]])) == pytest.approx(np.mean(both), rel=1e-5)
    assert value("bce", jnp.array([[0, 1], [0, 0]]), positive=3.0) == pytest.approx(
        (both[0] + 3 * both[1]) / 2, rel=1e-5
    )


def test_a_user_loss():
    mine = lambda outputs, targets: jnp.square(outputs - targets).mean(-1)
    own = fs.run("fedavg", table("regression"), loss=mine, **HOW, **MODELS["regression"])
    usual = fs.run("fedavg", table("regression"), **HOW, **MODELS["regression"])
    assert own.rows[-1]["global_mse"] == pytest.approx(usual.rows[-1]["global_mse"], rel=1e-6)
    fs.register_loss("mine", "squares")(mine)
    named = fs.run("fedavg", table("regression"), loss="mine", **HOW, **MODELS["regression"])
    assert named.rows[-1]["global_mse"] == pytest.approx(own.rows[-1]["global_mse"], rel=1e-6)
    del losses.CLASSES["mine"], losses.LOSSES["mine"]
    with pytest.raises(fs.UserError, match="must return one value per example"):
        fs.run(
            "fedavg",
            table("regression"),
            loss=lambda z, y: (z - y).mean(),
            **HOW,
            **MODELS["regression"],
        )


def test_a_loss_as_a_class_with_a_number():
    @fs.register_loss("powers", "of the distance")
    class Powers(losses.OfNumbers):
        """Of the distance."""

        power: fs.Real = fs.field(2.0, ge=1)

        def per_example(self, logits, labels, counts, confusion):
            return (jnp.abs(logits - labels) ** self.power).mean(-1)

    options = {"loss.power": 2.0}
    own = fs.run(
        "fedavg", table("regression"), loss="powers", **options, **HOW, **MODELS["regression"]
    )
    usual = fs.run("fedavg", table("regression"), **HOW, **MODELS["regression"])
    del losses.CLASSES["powers"], losses.LOSSES["powers"]
    assert own.rows[-1]["global_mse"] == pytest.approx(usual.rows[-1]["global_mse"], rel=1e-5)


def test_a_user_task():
    """Ages in classes of ten years: classes that are numbers, measured by their distance."""
    far = Task("ages", "how far off", metrics=("accuracy", "loss", "worst_decile", "recall"))
    fs.register_task(far)
    fed = table("regression")
    y = np.clip(np.asarray(fed.y)[:, 0] + 2, 0, 3).astype(int)
    ages = fs.Federation.from_arrays(np.asarray(fed.x)[:, 0, 0], y, ROWS, test=TEST, task="ages")
    result = fs.run("fedavg", ages, model="linear", **HOW)
    del TASKS["ages"]
    assert "global_recall_mean" in result.rows[-1]


# ---- files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", MODELS)
def test_files_resume_report_and_export(task, tmp_path, capsys):
    fed, how = federation(task), {**HOW, **MODELS[task]}
    whole = fs.run("fedprox", fed, **{**how, "rounds": 3})
    fs.run("fedprox", fed, out=tmp_path / "a", **how)
    again = fs.resume(tmp_path / "a", 3, fed=fed)
    assert again.rows[-1] == whole.rows[-1]
    metric = make_metrics((), fed.classes, TASKS[task].metrics)[0]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["primary"]["figure"] == metric.shown[0] and summary["bytes_up"] > 0
    assert main(["report", str(tmp_path / "a")]) == 0
    assert (metric.label or metric.name) in (tmp_path / "a" / "report.html").read_text()
    file = fs.export(tmp_path / "a", fed=fed)
    model = fs.load_model(file)
    x = np.asarray(fed.x)[:3]
    np.testing.assert_allclose(
        np.asarray(model(x)), again.predict(x, logits=True), rtol=1e-4, atol=1e-5
    )
    capsys.readouterr()


@pytest.mark.parametrize("task", MODELS)
def test_clients_side_by_side_are_clients_one_after_another(task):
    one = fs.run("ditto", federation(task), **{**HOW, "chunk": "1"}, **MODELS[task])
    for layout in (dict(chunk="3"), dict(chunk="1", devices="2")):
        other = fs.run("ditto", federation(task), **{**HOW, **layout}, **MODELS[task])
        for key, value in one.rows[-1].items():
            assert value == pytest.approx(other.rows[-1][key], rel=1e-3, abs=1e-5), key


# ---- what is refused -----------------------------------------------------------------------------
CLASSES_ONLY = (
    "fedntd",
    "ccvr",
    "fedca",
    "fedpac",
    "fedas",
    "pfedfda",
    "fedcp",
    "fedphp",
    "fedrod",
    "fedpam",
    "qbandit",
)


@pytest.mark.parametrize("method", CLASSES_ONLY)
@pytest.mark.parametrize("task", MODELS)
def test_methods_of_classes_say_so(method, task):
    with pytest.raises(fs.UserError, match=f"is for classification with one class .* is {task}: "):
        fs.run(method, federation(task), **HOW, **MODELS[task])


@pytest.mark.parametrize("method", ["fedpolicy"])
@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_agents_that_see_a_confusion_say_so(method, task):
    with pytest.raises(fs.UserError, match="it reads the confusion of classes"):
        fs.run(method, federation(task), **HOW, **MODELS[task])


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (
            "regression",
            dict(loss="ce"),
            "loss 'ce' needs class labels, .* allowed there: huber, mse",
        ),
        ("multilabel", dict(loss="mse"), "loss 'mse' needs real"),
        ("sequence", dict(loss="bce"), "loss 'bce' needs labels"),
        (
            "sequence",
            dict(model="lenet5", model_options={}),
            "the data are tokens, 8 each; use lstm, transformer",
        ),
        ("regression", dict(model="lstm"), "model 'lstm' is for tokens"),
        (
            "sequence",
            dict(model_options={"width": 0}),
            "model.width=0 of model 'lstm' is not allowed",
        ),
        ("regression", dict(loss=3), "neither a name nor a function"),
    ],
)
def test_what_does_not_fit_a_task(task, options, message):
    with pytest.raises(fs.UserError, match=message):
        fs.run("fedavg", federation(task), **{**HOW, **MODELS[task], **options})


# ---- tables --------------------------------------------------------------------------------------
def frame():
    import pandas as pd

    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(60, 3)), columns=["a", "b", "c"])
    table["price"] = table["a"] * 2 + 1
    table["rain"], table["wind"] = (table["a"] > 0).astype(int), (table["b"] > 0).astype(int)
    table["ward"] = np.array(["north", "south", "west"])[np.arange(60) % 3]
    table["kind"] = np.array(["x", "y"])[np.arange(60) % 2]
    return table


@pytest.mark.parametrize(
    ("label", "task", "classes"),
    [
        ("price", "regression", 1),
        ("rain+wind", "multilabel", 2),
        ("kind", "classification", 2),
        ("price+a", "regression", 2),
    ],
)
@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_tables_with_named_columns(label, task, classes, ending, tmp_path):
    pytest.importorskip("pandas")
    if ending == ".csv" and "+" not in label:
        pytest.skip("a .csv with one label is read without pandas")
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
        frame().to_parquet(tmp_path / "t.parquet")
    else:
        frame().to_csv(tmp_path / "t.csv", index=False)
    fed = fs.federate(
        f"{tmp_path}/t{ending}:label={label},client=ward,features=b+c", "column:client"
    )
    assert (fed.task, fed.classes, fed.num_clients, fed.shape) == (task, classes, 3, (1, 1, 2))
    said = f"  columns: features: b, c; label: {label.replace('+', ', ')}; client: ward; facts: "
    assert said in fed.describe()
    assert np.isfinite(fs.run("fedavg", fed, model="linear", **HOW).summary["last_global"])


def test_a_csv_with_a_target_of_regression(tmp_path):
    frame()[["a", "b", "price"]].rename(columns={"price": "y"}).to_csv(
        tmp_path / "t.csv", index=False
    )
    fed = fs.federate(f"{tmp_path}/t.csv", clients=4)
    assert (fed.task, fed.num_clients, fed.y.shape[1]) == (
        "regression",
        4,
        1,
    ) and ", iid, " in fed.description
    with pytest.raises(fs.UserError, match="vector of integer labels"):
        fs.federate(f"{tmp_path}/t.csv", clients=4, task="classification")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (":label=nothing", "has no column 'nothing' .label."),
        ("", "needs label=COLUMN"),
        (":label=rain+kind", "the label 'kind' has words"),
        (":label=rain,features=ward", "the column 'ward' has no numbers"),
        (":labels=rain", "unknown option"),
    ],
)
def test_tables_that_do_not_fit(options, message, tmp_path):
    pytest.importorskip("pyarrow")
    frame().to_parquet(tmp_path / "t.parquet")
    with pytest.raises(fs.UserError, match=message):
        fs.federate(f"{tmp_path}/t.parquet{options}")


def test_a_task_by_name_on_the_command_line(tmp_path, capsys):
    table = frame()[["a", "b", "rain"]].rename(columns={"rain": "y"})
    table.to_csv(tmp_path / "t.csv", index=False)
    argv = [
        "run",
        "fedavg",
        "--dataset",
        f"{tmp_path}/t.csv",
        "--partition",
        "iid",
        "--clients",
        "4",
        "--model",
        "linear",
    ]
    more = ["--rounds", "1", "--devices", "1", "--chunk", "1", "--dry-run"]
    assert main([*argv, "--task", "regression", *more]) == 0
    assert "task: regression, 1x1x2 in, 1 out, loss mse" in capsys.readouterr().out
