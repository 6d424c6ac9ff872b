"""Text as data, one client per speaker: sources, windows, and methods on next-character
prediction."""

from __future__ import annotations

import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim.cli.main import main
from fedjax_sim.data.sources import load

HOW = dict(
    model="lstm",
    model_options={"width": 24, "embed": 8},
    rounds=3,
    epochs=1,
    batch_size=8,
    devices="1",
    chunk="3",
)


def decoded(fed, rows) -> str:
    return "".join("".join(fed.vocabulary[t] for t in row) for row in np.asarray(fed.x)[rows])


def test_the_embedded_plays():
    data = load("plays")
    assert (
        data.task == "sequence"
        and data.classes == len(data.vocabulary) == 60
        and len(set(data.extra["client"])) == 18
    )
    fed = fs.federate("plays:window=32", protocol="pfllib", val_fraction=0.2)
    assert fed.shape == (32,) and fed.num_clients == 18 and "vocabulary of 60" in fed.description
    assert "vocabulary of 60" in fed.describe() and "\\n !',-." in fed.describe()


def test_windows_are_the_text(tmp_path):
    letters = "".join(chr(97 + i % 26) for i in range(103))
    (tmp_path / "ann.txt").write_text(letters)
    (tmp_path / "bob.txt").write_text(letters.upper())
    data = load(f"text:{tmp_path},window=10")
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    owner = data.extra["client"]
    mine = {"".join(data.vocabulary[t] for t in row) for row in x[owner == 0]}
    assert {letters[i : i + 10] for i in range(0, 100, 10)} <= mine and len(mine) == 11
    assert ((y[:, :-1] == x[:, 1:]) | (y[:, 1:] < 0)).all()
    assert (y == -1).sum() == 2 * 8  # the end of each text
    assert len(data.x_test) == 4 and set(owner[len(data.x_train) :]) == {0, 1}
    raw = load(f"text:{tmp_path},window=10,unit=bytes")
    assert raw.classes == 256 and raw.x_train.max() == ord("z")


def test_a_play_and_a_table_say_the_same(tmp_path):
    speech = {
        "ANN": "so it is and so it was and so it will be",
        "BOB": "never say never to the never ending sea",
    }
    (tmp_path / "play.txt").write_text(
        "\n\n".join(f"{name}:\n{said}" for name, said in speech.items())
    )
    (tmp_path / "play.csv").write_text(
        "who,words\n" + "\n".join(f"{n},{s}" for n, s in speech.items())
    )
    a = load(f"text:{tmp_path}/play.txt,window=8")
    b = load(f"text:{tmp_path}/play.csv,window=8,speaker=who,text=words")
    assert (
        a.vocabulary == b.vocabulary
        and (a.x_train == b.x_train).all()
        and (a.extra["client"] == b.extra["client"]).all()
    )


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("a.txt", "no speeches here", "", "has no speeches"),
        ("a.txt", "ANN:\nshort", "", "no client has text for three windows of 64"),
        ("a.csv", "who,words\nann,hi", "", "needs speaker=COLUMN; its columns are who, words"),
        ("a.txt", "ANN:\nshort", ",window=0", "'0' is not a valid window"),
        ("a.txt", "ANN:\nshort", ",unit=words", "use characters or bytes"),
        ("a.txt", "ANN:\nshort", ",speaker=who", "is no .csv"),
        ("missing/b.txt", None, "", "there is no file or folder"),
    ],
)
def test_texts_that_do_not_fit(name, text, options, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(fs.UserError, match=message):
        load(f"text:{tmp_path}/{name}{options}")


def test_a_partition_by_classes_is_refused():
    with pytest.raises(fs.UserError, match="shares out classes, and plays is a sequence task"):
        fs.federate("plays", "shards:2", clients=5)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "ditto", "fedper", "fedpolicy"])
def test_methods_on_the_next_character(method):
    """All of them learn in three rounds; Ditto's clients that did not take part yet have the first
    weights."""
    fed = fs.federate("plays:window=32")
    options = {"agent.batch": 4, "first": "any"} if method == "fedpolicy" else {}
    result = fs.run(
        method, fed, participation="6/18", optimizer="adam:lr=0.02", seed=1, **HOW, **options
    )
    first, last = result.rows[0], result.rows[-1]
    assert last["client_loss"] < first["client_loss"] and last["client_loss"] < 3.6
    assert result.summary["bytes_up"] > 0 and last["client_perplexity"] == pytest.approx(
        np.exp(last["client_loss"])
    )
    if method == "fedpolicy":  # blocks: what goes down differs from client to client
        assert result.summary["bytes_down"] < result.summary["bytes_up"]


def test_on_the_command_line(tmp_path, capsys):
    argv = (
        "run fedavg --dataset plays:window=16 --model lstm --set model.width=8 --rounds 1 --epochs"
        " 0.1 --devices 1 --chunk 1"
    )
    assert main([*argv.split(), "--participation", "3/18", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "fedavg on plays (column:client, 18 clients, 3 per round)" in printed
    assert (
        "task: sequence, 16 in, 60 out, loss ce" in printed
        and "vocabulary of 60: \\n !'" in printed
    )
    assert main(["list", "tasks"]) == 0
    assert "multilabel" in capsys.readouterr().out
