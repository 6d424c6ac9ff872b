"""Any command line ends with exit code 0, or with 2 and one line on stderr; never in a traceback,
never with files.

Mostly dry runs in this process, bounded and derandomised; `make fuzz` runs more of them, at random.
Profiles as in `test_fuzz.py`, with fewer examples: a command line that is right costs a fifth of a
second.
"""

from __future__ import annotations

import contextlib
import io
import os

import jax
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedjax_sim.cli.main import main
from fedjax_sim.cli.parser import make_parser
from fedjax_sim.methods import METHODS

jax.devices()  # started with the test session's devices
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
BOUNDED = settings(
    max_examples=1500 if LONG else 120,
    derandomize=not LONG,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
SMALL = [
    "--model",
    "mlp",
    "--set",
    "model.hidden=2",
    "--clients",
    "4",
    "--participation",
    "0.5",
    "--epochs",
    "1",
]
SMALL += ["--devices", "1", "--chunk", "1", "--dry-run"]

COMMAND = next(action for action in make_parser()._actions if action.dest == "command")
FLAGS = sorted(
    action.option_strings[0]
    for action in COMMAND.choices["run"]._actions  # type: ignore[index]
    if action.option_strings
    # a coordinator is waited for; a download leaves the machine; help exits by itself
    and action.option_strings[0] not in ("-h", "--help", "--coordinator", "--download")
    and action.nargs != 0
)
STARTS = ["run", "compare", "resume", "report", "list", "fedavg", "--set"]
OWNERS = ["model", "loss", "fedavg", "agent", ""]
NAMES = [
    "name",
    "shape",
    "classes",
    "dtype",
    "conv",
    "hidden",
    "weights",
    "decay",
    "warmup",
    "agent_options",
    "agent.lr",
    "",
]
numbers = st.one_of(
    st.sampled_from(
        [
            "0",
            "-1",
            "1",
            "2",
            "0.5",
            "1e30",
            "1e-30",
            "1e400",
            "nan",
            "inf",
            "-inf",
            "²",
            "1_0",
            "٣",
            "0x1",
        ]
    ),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 10**400]).map(str),
    st.integers(-3, 50).map(str),
    st.floats().map(str),
)
texts = st.one_of(
    st.sampled_from(
        [
            "auto",
            "global",
            "iid",
            "ce",
            "c3e",
            "mlp",
            "digits",
            "float64",
            "host",
            "loop",
            "vmap",
            "true",
            "",
        ]
    ),
    st.sampled_from(
        [
            "~nosuchuser",
            "~nosuchuser/x.npz",
            "n" * 300,
            "/",
            "/proc/self/mem",
            ".",
            "a:b,c=d",
            "1:2",
            "3/4",
        ]
    ),
    st.sampled_from(
        ["synthetic:seed=-1", "synthetic:train=99999999999", "dirichlet:nan", "cosine:end=inf"]
    ),
    st.text(max_size=8),
    st.text("~/.:=,x@²\n\t\x1b\ud800", max_size=8),
)
values = st.one_of(numbers, texts)
flags = st.tuples(st.sampled_from(FLAGS), values).map(list)
sets = st.builds(
    lambda o, n, v: ["--set", f"{o}.{n}={v}"],
    st.sampled_from(OWNERS),
    st.sampled_from(NAMES),
    values,
)


@pytest.fixture(autouse=True, scope="module")
def empty_folder(tmp_path_factory):
    """No data folders, nothing to find; what is left in the folder at the end was written by a
    command."""
    folder = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("FEDJAX_SIM_DATA", raising=False)
        patch.setenv("FEDJAX_SIM_CACHE", "off")
        yield
        jax.config.update("jax_enable_x64", False)  # --dtype float64 was among them
    assert list(folder.iterdir()) == []


def ends_well(argv: list[str]) -> int:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    finally:
        jax.config.update("jax_enable_x64", False)
        jax.config.update("jax_default_matmul_precision", None)
    said = err.getvalue()
    if code == 2:
        assert (
            said.startswith("fedjax-sim: ") and said.count("\n") == 1 and said[:-1].isprintable()
        ), repr(said)
        assert len(said) < 1000 and "Traceback" not in said
    else:
        assert code == 0 and said == "", (code, said)
    return code


@BOUNDED
@given(st.lists(st.one_of(flags, flags, sets), min_size=1, max_size=3))
@example([["--set", "model.dtype=float64"]])
@example([["--set", "fedavg.name=x"]])
@example([["--batch-size", "2147483648"]])
@example([["--out", "n" * 300]])
@example([["--dataset", "\ud800"]])
def test_options_of_a_run(options):
    ends_well(["run", "fedavg", *SMALL, *(word for pair in options for word in pair)])


@BOUNDED
@given(st.sampled_from(sorted(METHODS)), st.data())
def test_options_of_methods(name, data):
    from fedjax_sim.methods import options_of

    option = data.draw(st.sampled_from([*options_of(name), "agent.hidden", "agent.lr", "name"]))
    ends_well(["run", name, *SMALL, "--set", f"{name}.{option}={data.draw(values)}"])


@BOUNDED
@given(
    st.lists(
        st.one_of(
            values,
            st.sampled_from(["run", "compare", "resume", "report", "list", "fedavg", "--set"]),
        ),
        max_size=5,
    )
)
def test_any_arguments(argv):
    if "-h" in argv or any(w.startswith("--h") for w in argv) or argv[:1] in (["run"], ["compare"]):
        argv = [*argv, "--dry-run"]
    if argv[:1] == ["report"]:
        argv = ["report", "nowhere", *argv[1:]]
    try:
        ends_well(argv)
    except SystemExit as asked:  # --help, --version
        assert asked.code == 0
