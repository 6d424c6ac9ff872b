"""Where the project and its stored values lie."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN_FOLDER = ROOT / "tests" / "golden"
