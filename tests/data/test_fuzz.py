"""Whatever is thrown at it: either a valid result or one sentence (UserError), never a traceback or
a huge allocation.

Bounded and derandomised here; `make fuzz` runs the profile `long` with new random examples. Adding
an input: write a strategy for it, call the code inside `sentence_or_none`, and check what comes
out.
"""

import contextlib
import gzip
import io
import os
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedjax_sim.data import folder as folder_module
from fedjax_sim.data import memory
from fedjax_sim.data.federation import Federation
from fedjax_sim.data.folder import read_idx
from fedjax_sim.data.partition import PARTITIONS, partition
from fedjax_sim.data.protocols import PROTOCOLS, federate
from fedjax_sim.data.sources import DATASETS, Dataset, load
from fedjax_sim.errors import UserError

COMMON = dict(deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("short", max_examples=120, derandomize=True, database=None, **COMMON)
settings.register_profile("long", max_examples=5000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


# ---- what may happen -----------------------------------------------------------------------------


def sentence_or_none(make):
    """What `make()` returns, or None where it was refused in a sentence; every other exception is a
    failure."""
    try:
        return make()
    except UserError as error:
        text = str(error)
        assert text and len(text.splitlines()) == 1 and text.isprintable(), repr(text)
        assert len(text) < 1000, text
        return None


def check_federation(fed):
    """What every method relies on."""
    total = len(fed.x)
    tokens = fed.x.ndim == 2 and fed.x.dtype == np.int32  # whole numbers in two dimensions
    assert (fed.x.ndim == 4 or tokens) and min(fed.x.shape) >= 1 and len(fed.y) == total
    assert fed.y.min() >= 0 and fed.y.max() < fed.classes
    assert fed.size["train"].min() >= 1 and len(fed.server_rows["test"]) >= 1
    owned, tested = [], set(fed.server_rows["test"].tolist())
    for split, table in fed.rows.items():
        assert table.shape[0] == fed.num_clients and table.dtype == np.int32
        assert table.min() >= 0 and table.max() < total and fed.size[split].max() <= table.shape[1]
        rows = np.concatenate([fed.client_rows(i, split) for i in range(fed.num_clients)])
        owned += rows.tolist()
        assert split == "test" or not tested & set(rows.tolist())
    assert len(owned) == len(set(owned))
    assert not tested & set(fed.server_rows.get("val", np.zeros(0, int)).tolist())
    assert np.isfinite(fed.mean).all() and np.isfinite(fed.std).all() and (fed.std > 0).all()
    assert fed.x.dtype == np.uint8 or np.isfinite(fed.x).all()
    assert fed.label_counts().sum() == fed.size["train"].sum()
    assert len(fed.fingerprint()) == 64 and fed.description.isprintable() and fed.describe()


@pytest.fixture(autouse=True, scope="module")
def small_machine(tmp_path_factory):
    """30 MB of memory and no data folders: what asks for more must say so before it takes it."""
    nothing = tmp_path_factory.mktemp("nothing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "SMALL", 0)
        patch.setattr(memory, "available", lambda: 30_000_000)
        patch.delenv("FEDJAX_SIM_DATA", raising=False)
        patch.setenv("TFDS_DATA_DIR", str(nothing))
        patch.setattr(folder_module, "DEBIAN_FOLDERS", {})
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


# ---- texts ---------------------------------------------------------------------------------------

NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "10",
    "-1",
    "0.1",
    "0.5",
    "1.0",
    "1e-3",
    "1e30",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "²",
    "٣",
]
NUMBERS += [
    "1_0",
    "10**30",
    "9" * 19,
    "9" * 50,
    "0x10",
    "",
    " ",
    "true",
    "no",
    "2x2",
    "8x8x3",
    "0x0x0",
    "40/40/20",
    "1/0/0",
    "1/",
]
number_text = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(-5, 60).map(str),
    st.floats().map(str),
    st.text(max_size=8),
)
keys = sorted(
    {key for table in (PARTITIONS, DATASETS) for entry in table.values() for key in entry.options}
)
option_text = st.one_of(
    number_text,
    st.tuples(st.sampled_from([*keys, "x", ""]), number_text).map("=".join),
    st.text(max_size=10),
)


def specs(names):
    """Spec strings: mostly a known name with options of all kinds, sometimes anything."""
    known = st.tuples(
        st.sampled_from(sorted(names)), st.lists(option_text, max_size=4).map(",".join)
    ).map(":".join)
    return st.one_of(st.sampled_from(sorted(names)), known, known, st.text(max_size=20))


@given(specs([*DATASETS, "mine.npz", "mine.csv"]))
def test_dataset_specs(spec):
    data = sentence_or_none(lambda: load(spec))
    if data is not None:
        assert (
            data.x_train.nbytes < 30_000_000
            and len(data.x_train) == len(data.y_train)
            and data.y_train.max() < data.classes
        )


@given(
    st.sampled_from(["mnist", "digits", "omniglot"]),
    st.one_of(st.text(), st.text("~/.x\0\n", max_size=300)),
)
def test_data_folders(name, folder):
    sentence_or_none(lambda: load(name, data_dir=folder))


@given(st.one_of(st.text(max_size=300), st.text("~/.x\0\n", max_size=300)))
def test_file_names(text):
    assert sentence_or_none(lambda: load(text + ".npz")) is None


@given(specs(PARTITIONS), st.integers(-1, 80), st.integers(1, 60), st.integers(1, 7))
def test_partition_specs(spec, clients, number, classes):
    rng = np.random.default_rng(number)
    extra = {
        "domain": np.arange(number) % 3,
        "drawer": np.arange(number) % 5,
        "x": np.arange(number) % 4,
    }
    rows = sentence_or_none(
        lambda: partition(spec, rng.integers(0, classes, number), clients, 0, extra)
    )
    if rows is not None:
        together = np.concatenate(rows)
        assert len(rows) == clients and min(map(len, rows)) >= 1
        assert (
            len(set(together.tolist())) == len(together)
            and together.min() >= 0
            and together.max() < number
        )


@given(st.tuples(*[st.integers(1, 10**k) for k in (1, 2, 4, 6, 18)]), st.integers(1, 2**63 - 1))
def test_synthetic_of_any_size(sizes, seed):
    """What does not fit is refused before it is made."""
    channels, classes, side, test, train = sizes
    spec = (
        f"synthetic:shape={side}x{side}x{channels},classes={classes},"
        f"train={train},test={test},seed={seed}"
    )
    data = sentence_or_none(lambda: load(spec))
    assert data is None or data.x_train.nbytes + data.x_test.nbytes < 30_000_000


@given(
    st.sampled_from([0.001, 0.1, 1.0, 100.0]),
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 100),
)
def test_dirichlet_of_any_size(alpha, least, tries, clients, number):
    spec = f"dirichlet:{alpha},min={least},tries={tries}"
    rows = sentence_or_none(lambda: partition(spec, np.arange(number) % 4, clients, 0))
    assert (rows is None) == (least * clients > number)
    assert rows is None or (
        min(map(len, rows)) >= least and sorted(np.concatenate(rows)) == list(range(number))
    )


TOY = Dataset(
    "toy",
    np.random.default_rng(0).integers(0, 256, (90, 2, 2, 1), dtype=np.uint8),
    (np.arange(90) % 5).astype(np.int32),
    np.random.default_rng(1).integers(0, 256, (30, 2, 2, 1), dtype=np.uint8),
    (np.arange(30) % 5).astype(np.int32),
    5,
    extra={"domain": np.arange(120) % 3, "drawer": np.arange(120) % 6},
)
anything = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5), st.booleans())


@given(
    st.sampled_from(
        [
            "iid",
            "dirichlet:0.1",
            "shards:2",
            "pathological:2",
            "fixed:2",
            "mnist_star",
            "omniglot:0.2",
        ]
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "clients": st.one_of(st.integers(1, 40), anything),
            "protocol": st.one_of(st.sampled_from(sorted(PROTOCOLS)), st.text(max_size=5)),
            "data_seed": st.one_of(st.integers(0, 2**70), anything),
            "norm": st.sampled_from(["dataset", "pfllib", "none", "²"]),
            "batch_size": st.one_of(st.integers(1, 100), anything),
            "server_val": st.one_of(st.integers(-1, 91), anything),
            "val_fraction": st.one_of(st.floats(0, 1), anything),
        },
    ),
)
def test_protocols(spec, options):
    fed = sentence_or_none(lambda: federate(TOY, spec, **({"clients": 4} | options)))
    if fed is not None:
        check_federation(fed)


# ---- files ---------------------------------------------------------------------------------------

DTYPES = [
    "u1",
    "<f2",
    "<f4",
    ">f4",
    "<f8",
    ">i8",
    "i1",
    "<u8",
    "?",
    "<c8",
    "S3",
    "<U2",
    "<M8[s]",
    "O",
    "f4,i4",
    "g",
]
SHAPES = [
    (),
    (0,),
    (6,),
    (6, 3),
    (6, 2, 2),
    (6, 2, 2, 1),
    (6, 2, 2, 0),
    (6, 0, 2),
    (0, 2, 2),
    (5, 2, 2),
    (6, 2, 2, 1, 1),
]
VALUES = [0, 1, 2, 255, -1, 2**31, 1e30, np.nan, np.inf]


@st.composite
def arrays(draw):
    """Arrays of every kind that a file or a caller may hold."""
    dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), draw(st.sampled_from(SHAPES))
    array = np.zeros(shape, dtype)
    with np.errstate(all="ignore"), contextlib.suppress(TypeError, ValueError, OverflowError):
        array[...] = draw(st.sampled_from(VALUES))
    return array


GOOD = {"x_train": TOY.x_train, "y_train": TOY.y_train, "x_test": TOY.x_test, "y_test": TOY.y_test}
mostly_good = {
    key: st.one_of(st.just(value), st.just(value), arrays()) for key, value in GOOD.items()
}


@given(st.fixed_dictionaries(mostly_good), st.sampled_from([np.savez, np.savez_compressed]))
def test_npz_of_any_arrays(place, members, save):
    save(place / "any.npz", **members)
    fed = sentence_or_none(lambda: federate(place / "any.npz", "iid", clients=2))
    if fed is not None:
        check_federation(fed)


@given(
    arrays(),
    arrays(),
    st.one_of(st.just([[0, 1], [2]]), arrays()),
    st.one_of(st.just([3, 4]), arrays()),
)
def test_user_arrays(x, y, train, test):
    y = np.arange(6) % 2 if y.dtype.kind not in "iu" or y.ndim != 1 else y
    fed = sentence_or_none(lambda: Federation.from_arrays(x, y, {"train": train}, test=test))
    if fed is not None:
        check_federation(fed)


def zipped(compression):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        for key, value in GOOD.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, value)
            file.writestr(f"{key}.npy", member.getvalue())
    return out.getvalue()


WORDS = [
    b"x_train",
    b"y_train",
    b"x_test",
    b"y_test",
    b"<i4",
    b"|u1",
    b"<f8",
    b"|O",
    b"2, 2",
    b"9, 9",
]


@st.composite
def damaged(draw, originals):
    """Bytes of a good file, cut, flipped, overwritten, moved or doubled at a few places."""
    raw = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        start, width = draw(st.integers(0, len(raw))), draw(st.integers(1, 40))
        kind = draw(st.sampled_from(["cut", "flip", "write", "remove", "double", "swap"]))
        if kind == "cut":
            del raw[start:]
        elif kind == "flip" and start < len(raw):
            raw[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "write":
            raw[start : start + width] = draw(st.sampled_from([b"\0", b"\xff", b"9", b"("])) * width
        elif kind == "remove":
            del raw[start : start + width]
        elif kind == "double":
            raw[start:start] = raw[start : start + width]
        elif kind == "swap":
            old, new = draw(
                st.permutations(
                    [b"x_train", b"y_train", b"xx_test", b"<i4", b"|u1", b"<f8", b"2, 2", b"9, 9"]
                )
            )[:2]
            raw = bytearray(bytes(raw).replace(old, new[: len(old)].ljust(len(old))))
    return bytes(raw)


@given(damaged([zipped(zipfile.ZIP_STORED), zipped(zipfile.ZIP_DEFLATED)]))
def test_damaged_npz(place, raw):
    (place / "damaged.npz").write_bytes(raw)
    fed = sentence_or_none(lambda: federate(place / "damaged.npz", "iid", clients=2))
    if fed is not None:
        check_federation(fed)


CSV = b"a,client,label,split\n" + b"".join(
    b"%d.5,c%d,%d,%s\n" % (i, i % 3, i % 2, (b"train", b"test")[i % 4 == 3]) for i in range(24)
)


@given(
    damaged([CSV, CSV.replace(b",", b";"), CSV.replace(b"0,", b"no,")]),
    st.sampled_from(["iid", "column:client"]),
)
def test_damaged_csv(place, raw, spec):
    (place / "damaged.csv").write_bytes(raw)
    fed = sentence_or_none(
        lambda: federate(
            place / "damaged.csv", spec, server_val=0, clients=None if spec != "iid" else 2
        )
    )
    if fed is not None:
        check_federation(fed)


@given(st.text(max_size=200))
def test_any_text_as_csv(place, text):
    (place / "any.csv").write_bytes(("label,a\n" + text).encode("utf-8", "surrogatepass"))
    data = sentence_or_none(lambda: load(place / "any.csv"))
    assert data is None or data.x_train.shape[1:] == (1, 1, 1)


IDX = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (5, 2, 2)) + bytes(range(20))


@given(damaged([IDX]), st.booleans())
def test_damaged_idx(place, raw, packed):
    (place / "images.gz").write_bytes(gzip.compress(raw) if packed else raw)
    array = sentence_or_none(lambda: read_idx(place / "images.gz"))
    assert array is None or (array.dtype == np.uint8 and array.nbytes < len(raw))
