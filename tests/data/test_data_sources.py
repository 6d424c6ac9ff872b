"""Sources: digits, synthetic, npz, idx, prepared tensorflow-datasets, and what missing data
says."""

import gzip
import hashlib
import importlib.util
import io
import os
import sys

import numpy as np
import pytest
from golden import make_data

from fedjax_sim.data import digits
from fedjax_sim.data import folder as folder_module
from fedjax_sim.data.images import resize_bilinear
from fedjax_sim.data.protocols import federate
from fedjax_sim.data.sources import DATASETS, load
from fedjax_sim.errors import UserError


@pytest.fixture(autouse=True)
def no_outside_data(monkeypatch, tmp_path):
    """No data folder, no Debian package, no prepared datasets: what a test needs, it writes."""
    monkeypatch.delenv("FEDJAX_SIM_DATA", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setattr(
        folder_module, "DEBIAN_FOLDERS", {"fashion_mnist": str(tmp_path / "debian")}
    )


def images(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def save(path, x_shape, classes=10, train=30, test=10, **more):
    arrays = {
        "x_train": images(train, *x_shape),
        "y_train": np.arange(train) % classes,
        "x_test": images(test, *x_shape, seed=1),
        "y_test": np.arange(test) % classes,
    }
    np.savez(
        path, **{k: v.astype(np.uint8) if k[0] == "y" else v for k, v in arrays.items()}, **more
    )
    return arrays


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def save_idx(folder):
    folder.mkdir(parents=True)
    x, y = images(12, 28, 28), (np.arange(12) % 10).astype(np.uint8)
    write_idx(folder / "train-images-idx3-ubyte.gz", x)
    write_idx(folder / "train-labels-idx1-ubyte.gz", y)
    write_idx(folder / "t10k-images-idx3-ubyte.gz", x[:4])
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", y[:4])
    return x, y


DIGITS = {  # sha256 of the arrays as scikit-learn's copy gave them, resized in floating point
    "x_train": "e1a25caa54723d708eacabeb98a8c3a11cb63808668588c02905a06624258307",
    "y_train": "399103ccd18f804d43eb4ca839f034814919c41416b6de1493d49f487de2750e",
    "x_test": "1168245b9c86bf2b84bcdbf54b8d710ee64999d0103e5248589918cff09817f1",
    "y_test": "9706540758069ba25a7f0ad7c2040434f9991bcdccbe9993cdc2b2094d37a240",
}


def test_digits_are_bit_for_bit_what_they_were():
    data = load("digits")
    assert (
        data.x_train.dtype == np.uint8
        and data.y_train.dtype == np.int32
        and data.x_test.shape == (355, 28, 28, 1)
    )
    assert {
        key: hashlib.sha256(getattr(data, key).tobytes()).hexdigest() for key in DIGITS
    } == DIGITS
    share = np.bincount(data.y_test) / np.bincount(np.concatenate([data.y_train, data.y_test]))
    assert (np.abs(share - 0.2) < 0.01).all()  # stratified


def test_digits_need_no_scikit_learn_and_match_it_where_it_is():
    stored = dict(np.load(digits.FILE))
    assert os.path.getsize(digits.FILE) < 60_000 and len(stored["low"]) == 167
    near = resize_bilinear(stored["levels"][..., None] * (255 / 16), 28, 28)
    assert np.abs(digits.arrays()[0] - near).max() <= 0.5 + 1e-9
    if importlib.util.find_spec("sklearn"):
        for key, value in make_data.digits().items():
            np.testing.assert_array_equal(stored[key], value, err_msg=key)


@pytest.fixture(scope="module")
def interpolated():
    """What PyTorch's interpolate gives: computed here where it is installed, and equal to the
    committed arrays."""
    golden = dict(np.load(make_data.HERE / "data_resize.npz"))
    if importlib.util.find_spec("torch"):
        live = make_data.resized()
        assert set(live) == set(golden)
        for key, value in live.items():
            np.testing.assert_allclose(value, golden[key], atol=1e-12, err_msg=key)
    return golden


def test_resize_against_torch(interpolated):
    for old, new in make_data.RESIZES:
        expected = interpolated[f"{old[0]}x{old[1]}"]
        np.testing.assert_allclose(
            resize_bilinear(make_data.resize_input(old), *new), expected, atol=1e-12
        )


def test_synthetic_options_and_determinism():
    data = load("synthetic:shape=16x12x3,classes=7,train=70,test=14,difficulty=2.0")
    assert (
        data.x_train.shape == (70, 16, 12, 3)
        and data.x_train.dtype == np.uint8
        and data.classes == 7
    )
    assert (
        np.bincount(data.y_train).tolist() == [10] * 7
        and np.bincount(data.y_test).tolist() == [2] * 7
    )
    same = load("synthetic", shape=(16, 12, 3), classes=7, train=70, test=14, difficulty=2.0)
    np.testing.assert_array_equal(data.x_train, same.x_train)
    assert (load("synthetic:shape=16x12x3,classes=7,train=70,seed=1").x_train != data.x_train).any()


def test_synthetic_difficulty():
    """A nearest-centre classifier: near the Gaussian optimum, and worse as the difficulty grows."""
    accuracy = []
    for difficulty in (0.3, 1.0, 3.0):
        d = load("synthetic", shape=(12, 12, 1), train=4000, test=1000, difficulty=difficulty)
        flat = lambda x: x.reshape(len(x), -1) / 255.0
        # Whitened by the pooled covariance, the best linear rule for Gaussian classes.
        centres = np.stack([flat(d.x_train)[d.y_train == k].mean(0) for k in range(10)])
        residual = flat(d.x_train) - centres[d.y_train]
        inverse = np.linalg.pinv(residual.T @ residual / len(residual) + 1e-6 * np.eye(144))
        gap = flat(d.x_test)[:, None] - centres
        accuracy.append(
            (np.einsum("nki,ij,nkj->nk", gap, inverse, gap).argmin(1) == d.y_test).mean()
        )
    assert accuracy[0] > 0.98 and 0.6 < accuracy[1] < 0.95 and 0.15 < accuracy[2] < 0.5


def test_npz_folder_and_variable(tmp_path, monkeypatch):
    arrays = save(tmp_path / "cifar10.npz", (32, 32, 3))
    data = load("cifar10", tmp_path)
    np.testing.assert_array_equal(data.x_train, arrays["x_train"])
    np.testing.assert_array_equal(data.y_test, arrays["y_test"])
    assert data.y_train.dtype == np.int32
    np.testing.assert_allclose(data.mean, [0.4914, 0.4822, 0.4465])
    monkeypatch.setenv("FEDJAX_SIM_DATA", str(tmp_path))
    np.testing.assert_array_equal(load("cifar10").x_test, arrays["x_test"])


def test_user_npz_with_extras(tmp_path):
    save(
        tmp_path / "mine.npz",
        (6, 6),
        classes=3,
        domain_train=np.zeros(30, int),
        domain_test=np.ones(10, int),
    )
    data = load(tmp_path / "mine.npz")
    assert (data.name, data.classes, data.x_train.shape, data.mean) == (
        "mine",
        3,
        (30, 6, 6, 1),
        None,
    )
    assert data.extra["domain"].tolist() == [0] * 30 + [1] * 10
    fed = federate(str(tmp_path / "mine.npz"), "iid", clients=3)
    assert fed.classes == 3 and fed.name == "mine"


def test_idx_folder_and_debian(tmp_path):
    x, y = save_idx(tmp_path / "data" / "mnist")
    data = load("mnist", tmp_path / "data")
    np.testing.assert_array_equal(data.x_train[..., 0], x)
    np.testing.assert_array_equal(data.y_test, y[:4])
    x, _ = save_idx(tmp_path / "debian")
    np.testing.assert_array_equal(load("fashion_mnist").x_train[..., 0], x)


def test_usps_and_mnist_m_become_28x28(tmp_path, interpolated):
    save(tmp_path / "usps.npz", (16, 16))
    grey = make_data.usps_input()
    np.savez(
        tmp_path / "usps.npz",
        **dict(np.load(tmp_path / "usps.npz")) | {"x_train": grey, "y_train": np.arange(len(grey))},
    )
    usps = load("usps", tmp_path).x_train
    assert usps.shape == (make_data.USPS, 28, 28, 1)
    assert np.abs(usps[..., 0] - interpolated["usps"]).max() <= 0.5 + 1e-9
    colour = save(tmp_path / "mnist_m.npz", (32, 32, 3))
    np.testing.assert_array_equal(
        load("mnist_m", tmp_path).x_train, colour["x_train"][:, 2:30, 2:30]
    )


def test_mnist_star(tmp_path):
    mnist = save(tmp_path / "mnist.npz", (28, 28), train=50)
    save(tmp_path / "usps.npz", (16, 16))
    save(tmp_path / "mnist_m.npz", (32, 32, 3), train=40)
    data = load("mnist_star", tmp_path)
    assert data.x_train.shape == (120, 28, 28, 3) and data.x_test.shape == (30, 28, 28, 3)
    assert np.bincount(data.extra["domain"]).tolist() == [60, 40, 50]
    assert (
        data.extra["domain"].tolist()
        == [0] * 50 + [1] * 30 + [2] * 40 + [0] * 10 + [1] * 10 + [2] * 10
    )
    for channel in range(3):
        np.testing.assert_array_equal(data.x_train[:50, ..., channel], mnist["x_train"])
    fed = federate("mnist_star", "mnist_star", clients=10, protocol="pfedrlla", data_dir=tmp_path)
    assert [set(data.extra["domain"][fed.client_rows(i)]) for i in (0, 3, 4, 7, 8)] == [
        {0},
        {0},
        {1},
        {1},
        {2},
    ]


def save_omniglot(path, characters=(12, 8)):
    arrays, first = {}, 0
    for split, number in zip(("train", "test"), characters, strict=True):
        character = np.repeat(np.arange(first, first + number), 20)
        arrays |= {
            f"x_{split}": images(20 * number, 105, 105, seed=first) % 2,
            f"y_{split}": character + 1,
            f"alphabet_{split}": character // 3,
            f"drawer_{split}": np.tile(np.arange(1, 21), number),
        }
        first += number
    np.savez(path, **arrays)
    return arrays


def test_omniglot(tmp_path):
    arrays = save_omniglot(tmp_path / "omniglot.npz")
    data = load("omniglot", tmp_path)
    np.testing.assert_array_equal(data.x_train[..., 0], arrays["x_train"] * 255)
    np.testing.assert_array_equal(data.y_train, arrays["alphabet_train"])
    fed = federate("omniglot", "omniglot", clients=20, protocol="pfedrlla", data_dir=tmp_path)
    for j in (0, 19):
        rows = np.concatenate([fed.client_rows(j, split) for split in fed.rows])
        assert set(data.extra["drawer"][rows]) == {j}
        # one drawing of each character
        assert sorted(data.extra["character"][rows].tolist()) == list(range(1, 21))


def prepare_tfds(root, name, n=(20, 5)):
    """A prepared dataset as tensorflow-datasets lays it out, written without TensorFlow."""
    tfds = pytest.importorskip("tensorflow_datasets")
    writer = pytest.importorskip("array_record.python.array_record_module")
    from PIL import Image
    from tensorflow_datasets.proto import tf_example_pb2

    place = root / name / "3.0.2"
    place.mkdir(parents=True)
    features = tfds.features.FeaturesDict(
        {
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
    )
    truth, infos = {}, []
    for split, number in zip(("train", "test"), n, strict=True):
        truth[split] = images(number, 32, 32, 3, seed=number), np.arange(number) % 10
        file = writer.ArrayRecordWriter(
            str(place / f"{name}-{split}.array_record-00000-of-00001"), "group_size:1"
        )
        for i, (x, y) in enumerate(zip(*truth[split], strict=True)):
            png = io.BytesIO()
            Image.fromarray(x).save(png, "PNG")
            example = tf_example_pb2.Example()
            example.features.feature["id"].bytes_list.value.append(b"%d" % i)
            example.features.feature["image"].bytes_list.value.append(png.getvalue())
            example.features.feature["label"].int64_list.value.append(int(y))
            file.write(example.SerializeToString())
        file.close()
        infos.append(
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[number],
                num_bytes=1,
                filename_template=tfds.core.ShardedFileTemplate(
                    dataset_name=name, data_dir=place, split=split, filetype_suffix="array_record"
                ),
            )
        )
    tfds.folder_dataset.write_metadata(
        data_dir=place, features=features, split_infos=infos, check_data=False
    )
    return truth


@pytest.mark.parametrize("where", ["data folder", "default folder"])
def test_prepared_tfds_is_read_without_tensorflow(where, tmp_path, monkeypatch):
    truth = prepare_tfds(tmp_path, "cifar10")
    if where == "default folder":
        monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    data = load("cifar10", tmp_path if where == "data folder" else None)
    for split, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        np.testing.assert_array_equal(x, truth[split][0])
        np.testing.assert_array_equal(y, truth[split][1])
    assert "tensorflow" not in sys.modules and data.extra == {}


def test_missing_data_is_one_sentence(tmp_path, monkeypatch):
    for name in set(DATASETS) - {"digits", "synthetic", "folder", "idx", "plays", "text"}:
        for data_dir in (None, tmp_path):
            with pytest.raises(UserError, match="three ways") as caught:
                load(name, data_dir)
            assert "\n" not in str(caught.value) and str(caught.value).count("; or ") == 2
            assert ".npz" in str(caught.value)
    with pytest.raises(UserError, match=r"dataset-fashion-mnist.*--download"):
        load("fashion_mnist")
    monkeypatch.setenv("FEDJAX_SIM_DATA", str(tmp_path / "absent"))
    with pytest.raises(UserError, match="absent' does not exist"):
        load("mnist")


def test_download_without_tensorflow_says_so(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    if folder_module.importlib.util.find_spec("tensorflow"):
        pytest.skip("TensorFlow is installed: this would download")
    with pytest.raises(UserError, match=r"fedjax-sim\[prepare\]"):
        load("mnist", tmp_path, download=True)


def test_bad_files(tmp_path):
    np.savez(tmp_path / "packed.npz", x_train_xz=np.zeros(3, np.uint8), y_train=np.zeros(3, int))
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 not a zip")
    np.savez(
        tmp_path / "pickled.npz",
        x_train=np.array([{}], object),
        y_train=[0],
        x_test=[0],
        y_test=[0],
    )
    save(tmp_path / "ragged.npz", (6, 6))
    arrays = dict(np.load(tmp_path / "ragged.npz"))
    np.savez(tmp_path / "ragged.npz", **arrays | {"y_train": arrays["y_train"][:-1]})
    save(tmp_path / "mnist.npz", (32, 32))
    for name, message in (
        ("packed", "lacks x_train, x_test, y_test.*it has x_train_xz, y_train"),
        ("broken", "not a readable"),
        ("pickled", "plain arrays"),
        ("ragged", "integer labels"),
        ("absent", "no file"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load(tmp_path / f"{name}.npz")
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"shape \(28, 28, 1\)"):
        load("mnist", tmp_path)
    idx = tmp_path / "data" / "mnist"
    save_idx(idx)
    (idx / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x09abc"))
    with pytest.raises(UserError, match="should hold 9 bytes"):
        load("mnist", tmp_path / "data")
    (idx / "train-images-idx3-ubyte.gz").write_bytes(b"nothing")
    with pytest.raises(UserError, match="gzip"):
        load("mnist", tmp_path / "data")


def test_a_damaged_prepared_dataset_is_one_sentence(tmp_path):
    prepare_tfds(tmp_path, "cifar10")
    for file in (tmp_path / "cifar10" / "3.0.2").glob("*array_record*"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"cifar10 at .* cannot be read") as caught:
        load("cifar10", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, message",
    [
        ("cifar", "did you mean 'cifar10'"),
        ("synthetic:shape=3", "32x32x3"),
        ("synthetic:size=3", "allowed: "),
        ("digits:a=1", "unknown option in 'digits:a=1' 'a'; allowed: none$"),
        ("synthetic:train=3", "fewer than one example"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(UserError, match=message):
        load(name)
    with pytest.raises(UserError, match="no option 'colour'"):
        load("digits", colour=1)


def test_a_fixed_part_of_a_published_dataset(tmp_path):
    arrays = save(tmp_path / "mnist.npz", (28, 28))
    few, again, more = (load(f"mnist:train={n},test=4", tmp_path) for n in (6, 6, 20))
    assert few.name == "mnist" and (len(few.y_train), len(few.y_test), len(more.y_train)) == (
        6,
        4,
        20,
    )
    assert np.array_equal(few.x_train, again.x_train) and np.array_equal(few.y_test, more.y_test)
    rows = lambda data: {
        (x.tobytes(), int(y)) for x, y in zip(data.x_train, data.y_train, strict=True)
    }
    whole = {
        (x.tobytes(), int(y)) for x, y in zip(arrays["x_train"], arrays["y_train"], strict=True)
    }
    assert rows(few) < rows(more) < whole
    assert len(load("mnist:train=6", tmp_path).y_test) == 10
    with pytest.raises(
        UserError, match="mnist has 30 train examples, not 31; allowed: train=1 to train=30"
    ):
        load("mnist:train=31", tmp_path)
    with pytest.raises(UserError, match="'0' is not a valid train"):
        load("mnist:train=0", tmp_path)
    fed = federate("mnist:train=20", "iid", 2, "qbandit", data_dir=str(tmp_path))
    assert "mnist:train=20" in fed.description and fed.size["train"].sum() == 18


def test_a_part_keeps_the_facts_of_its_examples(tmp_path):
    more = {
        f"{k}_{s}": np.arange(n) % 3
        for k in ("alphabet", "drawer")
        for s, n in (("train", 30), ("test", 10))
    }
    save(tmp_path / "omniglot.npz", (105, 105), **more)
    whole, part = load("omniglot", tmp_path), load("omniglot:train=7,test=3", tmp_path)
    at = [int(np.flatnonzero((whole.x_train == x).all((1, 2, 3)))[0]) for x in part.x_train]
    np.testing.assert_array_equal(part.extra["character"][:7], whole.extra["character"][:30][at])
    assert len(part.extra["drawer"]) == 10


REAL = os.environ.get("FEDJAX_SIM_DATA", "")  # read at import: the fixture above hides these
REAL_DEBIAN = folder_module.DEBIAN_FOLDERS


@pytest.mark.skipif(not REAL, reason="FEDJAX_SIM_DATA is not set")
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_published_constants_of_the_real_files(name, monkeypatch):
    monkeypatch.setattr(folder_module, "DEBIAN_FOLDERS", REAL_DEBIAN)
    try:
        data = load(name, REAL)
    except UserError as error:
        pytest.skip(str(error))
    pixels = data.x_train[::5].reshape(-1, data.x_train.shape[-1]) / 255.0
    np.testing.assert_allclose(pixels.mean(0), data.mean, atol=0.01)
    np.testing.assert_allclose(pixels.std(0), data.std, atol=0.01)
