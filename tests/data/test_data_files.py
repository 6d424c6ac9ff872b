"""Files and names nobody vouches for: every one is read right or answered in one sentence, and
nothing huge is made."""

import gzip
import io
import zipfile

import numpy as np
import pytest

from fedjax_sim.data import memory
from fedjax_sim.data.folder import read_idx
from fedjax_sim.data.sources import load
from fedjax_sim.errors import UserError


def images(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def npy(array, **header):
    """The bytes of a .npy; `header` overwrites what it claims (shape, descr, fortran_order)."""
    out = io.BytesIO()
    facts = {
        "shape": array.shape,
        "descr": np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
    }
    np.lib.format.write_array_header_1_0(out, facts | header)
    return out.getvalue() + array.tobytes()


def write_members(path, change, compression=zipfile.ZIP_DEFLATED):
    """A good dataset file in which the members of `change` (bytes) replace the good ones."""
    y = (np.arange(30) % 3).astype(np.uint8)
    members = {
        "x_train": images(30, 6, 6),
        "y_train": y,
        "x_test": images(10, 6, 6),
        "y_test": y[:10],
    }
    with zipfile.ZipFile(path, "w", compression) as file:
        for key, array in members.items():
            file.writestr(f"{key}.npy", change.get(key, npy(array)))
        for key in change.keys() - members.keys():
            file.writestr(key, change[key])


X, Y = np.zeros((30, 6, 6), np.uint8), np.zeros(30, np.int64)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"x_train": npy(X, shape=(10**9, 800, 800))},
            r"claims \|u1\[1000000000, 800, 800\], which is 640 TB, but holds",
        ),
        ({"x_train": npy(X, shape=(30, 6, 7))}, "but holds 1080 bytes"),
        ({"x_train": npy(X, shape=(-30, 6, -6))}, "claims the shape"),
        ({"x_train": npy(X, shape=(10**30, 0, 6))}, "but holds"),
        ({"x_train": npy(X.astype(np.longdouble))}, "allowed floats"),
        ({"x_train": npy(X.astype(complex))}, "complex128; allowed"),
        ({"x_train": npy(X.astype("M8[s]"))}, "datetime64"),
        ({"x_train": npy(np.zeros((30, 6, 6), "f4,i4"))}, "allowed: numbers"),
        ({"x_train": npy(X, descr="|O")}, "allowed: numbers"),
        ({"x_train": npy(X, descr="<U0")}, "allowed: numbers"),
        ({"x_train": npy(X.astype("U1"))}, "uint8 or floating"),
        ({"x_train": npy(X.astype(np.int64))}, "uint8 or floating"),
        ({"x_train": npy(X[:, :0])}, "no side of 0"),
        ({"x_train": npy(X[..., None][..., :0])}, "no side of 0"),
        ({"x_train": npy(X[0, 0])}, r"got shape \(6,\)"),
        (
            {"x_train": npy(np.where(np.arange(1080).reshape(30, 6, 6) == 700, np.nan, 0))},
            "x_train must be finite, but row 19",
        ),
        ({"x_train": b"hello"}, "x_train in .* is not a plain NumPy array"),
        ({"x_train": b""}, "claims|not a plain"),
        ({"x_train": b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16}, "not a plain"),
        ({"x_train": b"\x93NUMPY\x03\x00" + b" " * 64}, "not a plain"),
        ({"y_train": npy(np.int64(3))}, "vector of integer labels"),
        ({"y_train": npy(Y.astype(bool))}, "vector of integer labels"),
        ({"y_train": npy(Y - 1)}, "row 0 has -1"),
        ({"y_train": npy(Y + 2**31)}, "below 100000, but row 0 has 2147483648"),
        ({"y_train": npy(Y[:-1])}, "30 examples, but y_train has 29"),
        ({"x_test": npy(X[:10, :5])}, "differ"),
        ({"x_test": npy(X[:10].astype(np.float32))}, "differ"),
    ],
)
def test_malformed_npz_is_one_sentence(change, message, tmp_path):
    write_members(tmp_path / "bad.npz", change)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path / "bad.npz")
    assert "\n" not in str(caught.value)


def test_npz_that_are_fine(tmp_path):
    """Big-endian, Fortran order, float16, bool, version 2 headers, stored or deflated, and members
    nobody reads."""
    path = tmp_path / "good.npz"
    halves = (images(30, 6, 6) / 255).astype(np.float16)
    swapped = {
        "x_train": npy(halves.astype(">f8")),
        "x_test": npy(halves[:10].astype("<f8")),
        "notes.txt": b"\xff",
    }
    write_members(path, swapped | {"y_train": npy(Y.astype(">i8") + 2)}, zipfile.ZIP_STORED)
    data = load(path)
    assert data.x_train.dtype == np.dtype("=f8") and data.y_train.tolist() == [2] * 30
    np.testing.assert_array_equal(data.x_train[..., 0], halves)
    turned = npy(np.ascontiguousarray(halves.T), shape=halves.shape, fortran_order=True)
    write_members(path, {"x_train": turned, "x_test": npy(halves[:10])})
    np.testing.assert_array_equal(load(path).x_train[..., 0], halves)
    write_members(path, {"x_train": npy(halves > 0.5), "x_test": npy(halves[:10] > 0.5)})
    np.testing.assert_array_equal(load(path).x_train[..., 0], np.where(halves > 0.5, 255, 0))
    version_2 = io.BytesIO()
    np.lib.format.write_array(version_2, X, version=(2, 0))
    write_members(path, {"x_train": version_2.getvalue()})
    np.testing.assert_array_equal(load(path).x_train[..., 0], X)


def test_zips_that_are_not_ours(tmp_path, monkeypatch):
    path = tmp_path / "bad.npz"
    write_members(path, {}, zipfile.ZIP_BZIP2)
    refused = lambda message: pytest.raises(UserError, match=message)
    with refused("compressed by method 12; use numpy.savez"):
        load(path)
    write_members(path, {}, zipfile.ZIP_STORED)
    good = path.read_bytes()
    central = good.index(b"PK\x01\x02")

    def patched(at, value):
        return good[: central + at] + value + good[central + at + len(value) :]

    path.write_bytes(patched(8, b"\x01\x00"))
    with refused("x_train in .* is encrypted"):
        load(path)
    path.write_bytes(patched(10, b"\x63\x00"))
    with refused("compressed by method 99"):
        load(path)
    path.write_bytes(patched(24, b"\xff\xff\xff\x7f"))
    with refused("claims 2.15 GB out of"):
        load(path)
    path.write_bytes(good.replace(b"x_test.npy", b"y_test.npy"))
    with refused("y_test in .* is there twice"):
        load(path)
    place = good.index(npy(images(30, 6, 6))) + 200
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    with refused("CRC"):
        load(path)
    path.write_bytes(good)
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "available", lambda: 2000)
    with refused("needs about .* of memory, but 2000 bytes are free"):
        load(path)
    (tmp_path / "folder.npz").mkdir()
    with refused(r"not a readable .npz file of plain arrays \(Is a directory\)"):
        load(tmp_path / "folder.npz")


@pytest.mark.parametrize(
    "name, message",
    [
        ("synthetic:seed=-1", "at least 0"),
        ("synthetic:train=²", "plain digits"),
        ("synthetic:train=1_000", "plain digits"),
        ("synthetic:train=10**30", "plain digits"),
        ("synthetic:train=1" + "0" * 30, "at most 2"),
        ("synthetic:train=1" + "0" * 300, "plain digits"),
        ("synthetic:train=1" + "0" * 15, "PB|TB|EB of memory"),
        (
            "synthetic:shape=1000000x1000000x3",
            "of memory, but .* are free; use fewer or smaller images",
        ),
        ("synthetic:classes=200000,train=200000,shape=1x1x1", "more than the 100000 allowed"),
        ("synthetic:train=20,train=30", "gives train twice"),
        ("synthetic:difficulty=inf", "finite number above 0"),
        ("synthetic:difficulty=1e200", "below 1,000,000"),
        ("~nosuchuser/mine.npz", "is not a path"),
        ("x" * 300, r"xxx\.\.\.xxx"),
        ("x" * 300 + ".npz", "File name too long"),
        ("two\nlines", r"two\\nlines"),
        ("zero\0byte.npz", "zero"),
        ("digits²", "unknown dataset"),
    ],
)
def test_hostile_names(name, message):
    with pytest.raises(UserError, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("data_dir", ["~nosuchuser", "x" * 300, "zero\0byte", "two\nlines"])
def test_hostile_data_folders(data_dir):
    with pytest.raises(UserError, match=r"does not exist|is not a path") as caught:
        load("mnist", data_dir)
    assert "\n" not in str(caught.value)


def test_hostile_idx(tmp_path):
    path = tmp_path / "images.gz"
    for raw, message in (
        (b"\0\0\x08\x03" + b"\xff" * 12, "claims the shape"),
        (b"\0\0\x08\xff", "claims the shape"),
        (b"\0\0\x0d\x01" + b"\0\0\0\0", "unsigned bytes"),
        (b"\0\0\x08\x01\0\0\0\x01abc", "holds more"),
    ):
        path.write_bytes(gzip.compress(raw))
        with pytest.raises(UserError, match=message):
            read_idx(path)
    plain = tmp_path / "images-idx1-ubyte"
    plain.write_bytes(b"\0\0\x08\x01\0\0\0\x03abc")
    assert read_idx(plain).tolist() == list(b"abc")
