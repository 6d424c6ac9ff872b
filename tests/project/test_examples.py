"""The examples run: the scripts and the notebook's cells, one round each."""

from __future__ import annotations

import ast
import json
import runpy
import sys

import pytest
from paths import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", ["custom_data", "custom_method", "compare_two"])
def test_scripts(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "1"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert {
        "custom_data": "Result(fedavg on mine",
        "custom_method": "\nByLoss ",
        "compare_two": "ditto:lam=0.1 1",
    }[name] in printed


def shown(cell: str, names: dict) -> object:
    """Run a cell as a notebook does; the value of its last line."""
    tree = ast.parse(cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None


def test_notebook(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert notebook["nbformat"] == 4 and "ROUNDS = 10" in cells[0]
    assert not any(c.get("outputs") for c in notebook["cells"]), "stored without outputs"
    names: dict = {"__name__": "notebook"}
    values = [shown(cell.replace("ROUNDS = 10", "ROUNDS = 1"), names) for cell in cells]
    assert "Federation(digits" in repr(values[0]) and "Result(ditto" in repr(values[1])
    assert "<table>" in values[2]._repr_html_() and values[3]._repr_png_()[1:4] == b"PNG"
    out = capsys.readouterr().out
    assert "did you mean 'rounds'" in out and "Step(round 2" in out
