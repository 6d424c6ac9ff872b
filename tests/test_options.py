"""Text to value: what is meant is read, everything else is refused in one sentence, from text and
from Python alike."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from fedjax_sim import options
from fedjax_sim.errors import UserError


@pytest.mark.parametrize(
    "text, value", [("0", 0), ("-3", -3), ("+7", 7), (" 12 ", 12), (str(2**63 - 1), 2**63 - 1)]
)
def test_whole(text, value):
    assert options.whole(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "1.0",
        "1e3",
        "1_000",
        "²",
        "٣",
        "１",
        "0x10",
        "nan",
        "inf",
        "--1",
        str(2**63),
        "9" * 5000,
    ],
)
def test_whole_refuses(text):
    with pytest.raises(ValueError):
        options.whole(text)


@pytest.mark.parametrize(
    "text, value", [("0.5", 0.5), (".5", 0.5), ("5.", 5.0), ("1e-3", 0.001), ("-2E+2", -200.0)]
)
def test_real(text, value):
    assert options.real(text) == value


@pytest.mark.parametrize("text", ["nan", "-inf", "Infinity", "1e400", "1_0.5"])
def test_real_refuses_what_is_not_finite_plain_text(text):
    with pytest.raises(ValueError, match="not a finite number"):
        options.real(text)


@pytest.mark.parametrize("text", ["", "x", "0.5.1", "²", "1e", "e5", ".", "1,5"])
def test_real_refuses_what_is_no_number(text):
    with pytest.raises(ValueError, match="not a number"):
        options.real(text)


@pytest.mark.parametrize(
    "value, default, expected",
    [
        ("yes", False, True),
        (False, True, False),
        ("3", 1, 3),
        (3.0, 1, 3),
        ("3", 1.0, 3.0),
        (3, 1.0, 3.0),
        ("8x4", (1,), (8, 4)),
        (8, (1,), (8,)),
        ((8, 4), (1,), (8, 4)),
        ("size", "uniform", "size"),
        ("5", None, "5"),
    ],
)
def test_like_its_default(value, default, expected):
    got = options.like("a.b", value, default)
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    "value, default, sentence",
    [
        ("maybe", True, "a.b 'maybe' is not one of true, false; default: True"),
        (2, True, "a.b '2' is not one of true, false; default: True"),
        ("1.5", 3, "a.b '1.5' is not a whole number; default: 3"),
        (1.5, 3, "a.b '1.5' is not a whole number; default: 3"),
        ("nan", 0.1, "a.b 'nan' is not a finite number; default: 0.1"),
        (math.nan, 0.1, "a.b 'nan' is not a finite number; default: 0.1"),
        (math.inf, 2, "a.b 'inf' is not a whole number; default: 2"),
        ("8xx", (64, 64), "joined by x, such as 64 or 200x100; default: 64x64"),
    ],
)
def test_like_refuses_in_one_sentence(value, default, sentence):
    with pytest.raises(UserError) as caught:
        options.like("a.b", value, default)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_heavy_is_imported():
    code = "import sys, fedjax_sim.options; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
