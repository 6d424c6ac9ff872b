"""The user's own data: a client column, tables, .csv files, folders of pictures, idx files, and
what docs/data.md shows."""

import gzip
import pathlib
import re

import jax
import numpy as np
import pytest
from paths import ROOT
from PIL import Image

import fedjax_sim as fs
from fedjax_sim import models
from fedjax_sim.data.partition import partition
from fedjax_sim.data.protocols import federate
from fedjax_sim.data.sources import Dataset, load
from fedjax_sim.errors import UserError


def refused(message):
    return pytest.raises(UserError, match=message)


# ---- one client per value ------------------------------------------------------------------------


def with_column(column, test=10):
    n = len(column)
    rng = np.random.default_rng(0)
    pixels = lambda k: rng.integers(0, 256, (k, 2, 2, 1), dtype=np.uint8)
    labels = lambda k: (np.arange(k) % 2).astype(np.int32)
    extra = {"who": np.concatenate([column, column[:test]])}
    return Dataset("people", pixels(n), labels(n), pixels(test), labels(test), 2, extra=extra)


@pytest.mark.parametrize("kind", [str, int])
def test_one_client_per_value(kind):
    column = np.random.default_rng(1).choice(np.array(["30", "4", "100"]), 60).astype(kind)
    data = with_column(column)
    fed = federate(data, "column:who", protocol="pfllib")
    assert fed.num_clients == 3
    for i, value in enumerate(sorted(set(column.tolist()))):
        mine = np.concatenate([fed.client_rows(i, split) for split in fed.rows])
        assert sorted(mine.tolist()) == np.flatnonzero(data.extra["who"] == value).tolist()
    assert (
        federate(data, "column:who", clients=3, protocol="pfllib").fingerprint()
        == fed.fingerprint()
    )
    with refused("makes 3 clients.*but 20 were asked for; use clients=3"):
        federate(data, "column:who", clients=20)


def test_small_clients_of_a_column(caplog):
    column = np.array(["ann"] * 20 + ["bob"] * 20 + ["eve"])
    data = with_column(column, test=4)
    with refused("client 2 of column:who has 1 of the at least 2.*column:who,min=2"):
        federate(data, "column:who", server_val=0)
    fed = federate(data, "column:who,min=2", server_val=0)
    assert fed.num_clients == 2 and "1 examples of small clients left out" in caplog.text
    assert 40 not in np.concatenate(
        [fed.client_rows(i, split) for i in (0, 1) for split in fed.rows]
    )
    y = np.zeros(41, int)
    for spec, extra, message in (
        ("column", {}, "needs its name"),
        ("column:where", {"who": column}, "no column 'where' for the partition; it has who"),
        ("column:who", {"who": np.zeros(41)}, "whole numbers or text"),
        ("column:who,min=99", {"who": column}, "no client has 99 examples; the largest has 20"),
    ):
        with refused(message):
            partition(spec, y, 3, 0, extra)


# ---- tables --------------------------------------------------------------------------------------


def test_csv(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal([3.0, 5000.0], [1.0, 100.0], (50, 2))
    lines = [
        f"{a!r};{i % 3};{b!r};p{i % 4};{'cat' if i % 2 else 'ant'}\n"
        for i, (a, b) in enumerate(values.tolist())
    ]
    (tmp_path / "t.csv").write_text(
        "\ufeffheight;id; weight;person;label\n" + "\n".join(lines), encoding="utf-8"
    )
    data = load(tmp_path / "t.csv")
    assert (
        data.x_train.shape == (40, 1, 1, 2)
        and data.x_test.shape == (10, 1, 1, 2)
        and data.classes == 2
    )
    assert set(data.extra) == {"id", "person"} and data.extra["id"].dtype == np.int64
    rows = {tuple(np.float32(v)): i for i, v in enumerate(values)}
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    numbers = np.array([rows[tuple(v)] for v in x[:, 0, 0]])
    assert sorted(numbers) == list(range(50))
    np.testing.assert_array_equal(y, numbers % 2)  # ant 0, cat 1
    np.testing.assert_array_equal(data.extra["person"], [f"p{i % 4}" for i in numbers])
    assert np.bincount(data.y_test).tolist() == [5, 5]
    fed = federate(tmp_path / "t.csv", "column:person")
    assert fed.num_clients == 4 and fed.description.startswith("t.csv, column:person, 4 clients")
    train = np.unique(np.concatenate([fed.client_rows(i) for i in range(4)]))
    np.testing.assert_allclose(fed.mean, fed.x[train, 0, 0].mean(0, dtype=np.float64), rtol=1e-12)
    model = models.build("mlp", fed.shape, fed.classes)
    logits = jax.eval_shape(
        lambda key: model.head(net := model.init(key), model.features(net, fed.x[:3])[0]),
        jax.random.key(0),
    )
    assert logits.shape == (3, 2)


def test_csv_with_its_own_split_and_numbers_as_labels(tmp_path):
    text = "y,a,split\n" + "".join(
        f"{i % 3},{i},{'test' if i >= 8 else 'Train'}\n" for i in range(12)
    )
    (tmp_path / "t.csv").write_text(text)
    data = load(tmp_path / "t.csv")
    assert data.x_train.ravel().tolist() == list(range(8)) and data.y_test.tolist() == [2, 0, 1, 2]


@pytest.fixture
def patients(tmp_path):
    """Numbers everywhere: a client number, a feature, the code of a ward, an outcome."""
    lines = [f"{i % 4},{i / 10},{i % 5},{i % 2}\n" for i in range(80)]
    (tmp_path / "t.csv").write_text("user_id,dose,ward,outcome\n" + "".join(lines))
    return tmp_path / "t.csv"


def test_a_number_of_a_client_is_no_feature(patients, caplog):
    """Not by its name, and not where the partition asks for it; and it is said which column is
    what."""
    source = f"{patients}:label=outcome"
    data = load(source)
    assert data.x_train.shape[-1] == 2 and set(data.extra) == {"user_id"}
    assert "the column 'user_id' of numbers is taken for a fact" in caplog.text
    assert data.columns == "features: dose, ward; label: outcome; facts: user_id"
    fed = federate(source, "column:ward")
    assert fed.num_clients == 5 and fed.shape == (1, 1, 1)  # dose alone
    assert "columns: features: dose; label: outcome; client: ward; facts: user_id" in fed.describe()
    for named in (
        load(f"{source},client=user_id,features=dose"),
        load(patients, label="outcome", client="user_id", features=["dose"]),
    ):
        assert (
            named.x_train.shape[-1] == 1
            and named.columns == "features: dose; label: outcome; client: user_id; facts: ward"
        )
    assert load(f"{source},features=dose+user_id").x_train.shape[-1] == 2  # somebody wants it


def test_columns_are_named_in_a_sentence(patients, capsys):
    from fedjax_sim.cli.main import main

    for options, message in (
        ("label=outcom", "no column 'outcom'; it has user_id, dose"),
        ("", "one column called label or y, or label=NAME"),
        ("label=outcome,client=outcome", "'outcome' cannot be two things at once"),
        ("lable=outcome", "'lable'.*did you mean 'label'"),
    ):
        with refused(message):
            load(f"{patients}:{options}")
    argv = ["run", "fedavg", "--model", "mlp", "--dry-run", "--partition", "column:user_id"]
    assert main([*argv, "--dataset", f"{patients}:label=outcome"]) == 0
    assert (
        "columns of t: features: dose, ward; label: outcome; client: user_id\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no rows"),
        ("label,a\n", "no rows below its header"),
        ("a,b\n1,2\n", "one column called label or y, or label=NAME; it has a, b"),
        ("label,y,b\n1,2,3\n", "one column called label or y"),
        ("label,a,a\n1,2,3\n", "the column 'a' twice"),
        ("label,a\n1,2\n1\n", "row 1 has 1 cells, but there are 2 columns"),
        ("label,a\n0,1\n1,\n1,3\n", "row 1 has '' in the column 'a' of numbers"),
        ("label,a\n0,1\n1,nan\n1,3\n", "row 1 has 'nan'"),
        ("label,a\n0,1\n1,4\n1,1e99\n", "row 2 has '1e99'"),
        ("label,a\n0,red\n1,blue\n", "no column of numbers"),
        ("label,a\n0.5,1\nx,2\n", "labels must be whole numbers from 0 up, or words"),
        ("label,a\n-1,1\n1,2\n", "labels must be whole numbers"),
        ("label,a\n,1\n1,2\n", "row 0 has no label"),
        ("label,a\n500000,1\n1,2\n", "below 100000"),
        (
            "label,a,split\n1,1,train\n1,2,valid\n",
            "row 1 has the split 'valid'; allowed: train, test",
        ),
        ('label,a\n1,"2\n', "not a readable .csv"),
        ("label,a\n1,\ud800\n", "not a readable .csv"),
    ],
)
def test_bad_csv(text, message, tmp_path):
    (tmp_path / "t.csv").write_bytes(text.encode("utf-8", "surrogatepass"))
    with refused(message) as caught:
        load(tmp_path / "t.csv")
    assert "\n" not in str(caught.value)
    with refused("no file"):
        load(tmp_path / "absent.csv")


# ---- pictures and idx ----------------------------------------------------------------------------


def draw(path, value, size=(5, 4), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 7)).save(path)


def test_folder_of_pictures(tmp_path):
    for part, count in (("train", 3), ("test", 1)):
        for k, name in enumerate(("zebra", "ant")):
            for i in range(count):
                draw(tmp_path / part / name / f"{i}.png", 100 * k + 10 * i + (part == "test"))
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not a picture")
    data = load(f"folder:{tmp_path}")
    assert (
        data.x_train.shape == (6, 4, 5, 1)
        and data.y_train.tolist() == [0, 0, 0, 1, 1, 1]
        and data.classes == 2
    )
    assert data.x_train[:, 0, 0, 0].tolist() == [100, 110, 120, 0, 10, 20] and data.x_test[
        :, 3, 4, 0
    ].tolist() == [101, 1]
    draw(tmp_path / "train" / "ant" / "9.png", 50, mode="RGB")
    data = load(f"folder:{tmp_path}/")
    assert data.x_train.shape == (7, 4, 5, 3) and data.x_train[3, 0, 0].tolist() == [50, 0, 7]
    assert federate(f"folder:{tmp_path}", "iid", clients=2).description.startswith(
        f"folder:{tmp_path.name}, iid"
    )


def test_folder_without_test_set_and_bad_folders(tmp_path, monkeypatch):
    for k in range(2):
        for i in range(10):
            draw(tmp_path / f"class{k}" / f"{i}.png", 20 * i + k)
    data = load(f"folder:{tmp_path}")
    assert np.bincount(data.y_test).tolist() == [2, 2] and len(set(data.x_train[:, 0, 0, 0])) == 16
    draw(tmp_path / "class1" / "a.png", 3, size=(5, 5))
    with refused("is 5x5, but .* is 5x4: all pictures must have one size"):
        load(f"folder:{tmp_path}")
    (tmp_path / "class1" / "a.png").write_bytes(b"no picture")
    with refused("a.png' is not a readable picture"):
        load(f"folder:{tmp_path}")
    good = (tmp_path / "class1" / "1.png").read_bytes()
    # the header is right, the pixels are missing
    (tmp_path / "class1" / "a.png").write_bytes(good[:45])
    # as tensorflow-datasets leaves it
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    with refused("a.png' is not a readable picture"):
        load(f"folder:{tmp_path}")
    for path, message in (
        ("", "folder:FOLDER"),
        ("absent", "not a folder"),
        ("~nosuchuser", "not a path"),
    ):
        with refused(message):
            load(f"folder:{path}")
    (tmp_path / "empty").mkdir()
    with refused("no pictures"):
        load(f"folder:{tmp_path}/empty")


def test_idx_by_path(tmp_path):
    def write(name, array):
        raw = (
            bytes([0, 0, 8, array.ndim])
            + b"".join(n.to_bytes(4, "big") for n in array.shape)
            + array.tobytes()
        )
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)

    x = np.random.default_rng(0).integers(0, 256, (8, 3, 3), dtype=np.uint8)
    write("train-images-idx3-ubyte", x)
    write("train-labels-idx1-ubyte", np.arange(8, dtype=np.uint8) % 4)
    write("t10k-images-idx3-ubyte.gz", x[:2])
    write("t10k-labels-idx1-ubyte.gz", np.arange(2, dtype=np.uint8))
    data = load(f"idx:{tmp_path}")
    np.testing.assert_array_equal(data.x_train[..., 0], x)
    assert data.classes == 4 and data.y_test.tolist() == [0, 1]
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with refused("no file .*train-labels"):
        load(f"idx:{tmp_path}")


# ---- what the page shows -------------------------------------------------------------------------


def test_docs_run(tmp_path, monkeypatch, capsys):
    """Every kind of own data in at most 25 lines, with the number of clients that it should
    have."""
    page = (ROOT / "docs" / "data.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    clients = []
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        assert block.count("\n") <= 25
        exec(block, names)  # one page, one session
        clients.append(names["fed"].num_clients)
    # arrays, .npz, .csv twice, pictures, idx, and the last one described
    assert clients == [2, 3, 4, 4, 3, 2, 2]
    assert "arrays" in capsys.readouterr().out and pathlib.Path("labels.png").exists()


def test_pictures_are_resized_on_request(tmp_path):
    """Of differing size, grey: the size that was asked for, and the same picture where it has it
    already."""
    for i in range(10):
        draw(tmp_path / "a,b" / f"class{i % 2}" / f"{i}.png", 10 * i, size=(5 + i, 4 + 2 * i))
    data = load(f"folder:{tmp_path / 'a,b'},size=8x6")
    assert data.x_train.shape[1:] == (8, 6, 1) and data.name == "a,b"
    assert sorted(
        {int(v) for v in np.unique(data.x_train)} | {int(v) for v in np.unique(data.x_test)}
    ) == list(range(0, 100, 10))
    assert load(f"folder:{tmp_path / 'a,b'},size=9").x_test.shape[1:] == (9, 9, 1)
    with refused("folder:PATH,size=32 resizes them"):
        load(f"folder:{tmp_path / 'a,b'}")
    for text in ("", "0", "8x", "8x8x3", "-3", "99999", "²"):
        with refused("cannot be read; write size=32"):
            load(f"folder:{tmp_path / 'a,b'},size={text}")


# ---- what cannot be meant ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given, sentence",
    [
        (dict(classes="3"), "classes must be a whole number, at least 1 and below 2^63, got '3'"),
        (
            dict(classes=float("nan")),
            "classes must be a whole number, at least 1 and below 2^63, got nan",
        ),
        (
            dict(rows=[[1], [2]]),
            "rows must be {'train': [rows of client 0, rows of client 1, …]}, got [[1], [2]]",
        ),
        (dict(name=3), "name must be text, got 3"),
        (dict(description=None), "description must be text, got None"),
    ],
)
def test_user_arrays_are_distinguished_from_mistakes(given, sentence):
    x, y = np.zeros((6, 2, 2), np.uint8), np.array([0, 1, 2, 0, 1, 2])
    with pytest.raises(fs.UserError) as caught:
        fs.Federation.from_arrays(x, y, **dict(rows={"train": [[0, 1], [2]]}, test=[4, 5]) | given)
    assert str(caught.value) == sentence


def test_a_batch_of_more_rows_than_can_be_counted():
    with pytest.raises(
        fs.UserError, match="batch-size 2147483648 is too large; allowed: 2147483647 or less"
    ):
        fs.run("fedavg", model="mlp", clients=4, rounds=1, batch_size=2**31)
