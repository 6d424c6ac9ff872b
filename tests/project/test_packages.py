"""Which subpackage may import which, read from the source (imports for type checkers do not count).

A subpackage is a module or a folder in `fedjax_sim`, or `agents`. `ALLOWED` is the whole rule: a
subpackage imports itself and what stands there (only a part of another one where only that part is
named). What is allowed "inside functions" must not be loaded with the module.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from paths import ROOT

BASICS = {"errors", "options", "named", "tree", "types", "fields", "tasks"}
ONE_CLIENT = BASICS | {"hooks", "local", "plans", "models", "metrics", "data.federation"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "options": {"errors"},
    "named": {"errors"},
    "tasks": {"errors"},
    "types": {"errors", "options"},
    "metrics": {"errors", "named", "types"},
    "fields": {"errors", "options", "agents.node"},
    "tree": {"types", "platform"},
    "platform": {"errors", "options"},
    "data": {"errors", "named", "options", "tasks"},
    "models": {"errors", "named", "options", "platform", "types"},
    "plans": BASICS,
    "hooks": BASICS | {"plans", "local"},
    "local": BASICS | {"plans", "models", "metrics", "platform"},
    "methods": ONE_CLIENT | {"agents.registry", "platform"},
    "transforms": ONE_CLIENT | {"agents.registry"},
    "engine": ONE_CLIENT | {"platform"},
    "accelerators": {"errors", "platform", "types", "engine"},
    "experiment": {"errors", "options", "methods", "models", "transforms", "__init__"},
    "runner": ONE_CLIENT
    | {"data", "engine", "experiment", "methods", "transforms", "platform", "accelerators"}
    | {"presets.controllers", "__init__"},
    "presets": {"errors"},
    "report": {"errors", "options", "experiment", "metrics.base", "__init__"}
    | {"runner.files", "runner.figures", "runner.run_directory"},
    "papers": {"errors", "options", "presets", "report", "runner.files", "runner.figures"},
    "sweeps": {"errors", "options", "experiment", "methods", "metrics.base", "presets", "papers"}
    | {"report", "runner"},
    "api": {"errors", "options", "experiment", "hooks", "report", "runner"},
    "cli": {"errors", "options", "experiment", "methods", "metrics.base", "transforms"}
    | {"accelerators", "api", "papers", "presets", "report", "runner", "sweeps", "__init__"},
    "__main__": {"cli"},
    "__init__": BASICS  # the public names, and the version
    | {"api", "data", "engine", "experiment", "hooks", "methods", "metrics", "models", "runner"}
    | {"transforms"},
    "agents": set(),
}
INSIDE_FUNCTIONS: dict[str, set[str]] = {
    "methods": {"agents"},
    "transforms": {"agents"},
    "engine": {"agents"},
    "api": {"agents", "sweeps"},
}
# they answer at once
WITHOUT_JAX = (
    "report",
    "papers",
    "errors",
    "named",
    "tasks",
    "cli.main",
    "experiment",
    "methods.__init__",
    "transforms.__init__",
    "metrics.__init__",
    "metrics.base",
    "agents.registry",
)


LONGEST = 60  # lines of a function, decorators and docstring among them


class Import(NamedTuple):
    line: int
    module: str  # absolute; of `from a import b` this is a.b
    lazy: bool  # inside a function


def resolve(node: ast.Import | ast.ImportFrom | ast.Call, package: str) -> list[str]:
    """Absolute names of what one statement (or `import_module("…")`) imports, seen from inside
    `package`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    called = (
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    )
    literal = node.args[0] if called in ("import_module", "__import__") and node.args else None
    return (
        [literal.value]
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str)
        else []
    )


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import of a file, without the blocks `if TYPE_CHECKING:`."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            for child in node.orelse:
                yield from walk(child, lazy)
            return
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            for module in resolve(node, package):
                yield Import(node.lineno, module, lazy)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy)

    yield from walk(ast.parse(source), False)


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """{dotted name: file} of the package and the agents; a folder's own file ends in
    `.__init__`."""
    files = [
        file for top in ("fedjax_sim", "agents") for file in sorted((ROOT / top).rglob("*.py"))
    ]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


@functools.cache
def read(name: str) -> tuple[Import, ...]:
    return tuple(imports_of(modules()[name].read_text(), name.rpartition(".")[0]))


def place(module: str) -> str | None:
    """`fedjax_sim.data.spec.mix` -> `data.spec.mix`, `fedjax_sim.__version__` -> `__init__`; None:
    a foreign module."""
    top, _, rest = module.partition(".")
    if top == "agents":
        return module
    if top != "fedjax_sim":
        return None
    known = any(
        name.split(".")[1] == rest.split(".")[0]
        for name in modules()
        if name.startswith("fedjax_sim.")
    )
    return rest if rest and known else "__init__"


def subpackage_of(name: str) -> str:
    return "agents" if name.startswith("agents") else name.split(".")[1]


def stands_in(place: str, allowed: set[str]) -> bool:
    return any(place == one or place.startswith(one + ".") for one in allowed)


def violations(subpackage: str, name: str, imports: tuple[Import, ...]) -> list[str]:
    """One sentence for every import that the table does not allow."""
    found = []
    for line, module, lazy in imports:
        target = place(module)
        allowed = {
            subpackage,
            *ALLOWED[subpackage],
            *(INSIDE_FUNCTIONS.get(subpackage, ()) if lazy else ()),
        }
        if target is not None and not stands_in(target, allowed):
            found.append(
                f"{name}, line {line}: '{subpackage}' imports '{module}'; allowed:"
                f" {', '.join(sorted(allowed))}"
            )
    return found


@pytest.mark.parametrize("subpackage", sorted({subpackage_of(name) for name in modules()}))
def test_a_subpackage_imports_only_its_neighbours(subpackage):
    assert subpackage in ALLOWED, f"'{subpackage}' is new: say in ALLOWED what it may import"
    mine = [name for name in modules() if subpackage_of(name) == subpackage]
    found = [one for name in mine for one in violations(subpackage, name, read(name))]
    assert not found, "\n".join(["", *found])


def neighbours() -> dict[str, set[str]]:
    """Subpackage -> the subpackages that it imports, lazily or not."""
    found: dict[str, set[str]] = {}
    for name in modules():
        subpackages = {
            subpackage_of(f"fedjax_sim.{p}" if not p.startswith("agents") else p)
            for p in places(name)
        }
        found.setdefault(subpackage_of(name), set()).update(
            subpackages - {subpackage_of(name), "__init__"}
        )
    return found


def places(name: str) -> list[str]:
    return [at for one in read(name) if (at := place(one.module)) is not None]


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Subpackages that import each other in a circle; [] for none."""
    left = {subpackage: set(others) for subpackage, others in graph.items()}
    while free := [subpackage for subpackage, others in left.items() if not others & set(left)]:
        for subpackage in free:
            del left[subpackage]
    return sorted(left)


def test_no_subpackages_import_each_other_in_a_circle():
    """Imports inside functions count; the package's own file, which names everything, does not."""
    graph = {
        subpackage: others
        for subpackage, others in neighbours().items()
        if subpackage != "__init__"
    }
    assert len(graph) > 15 and "runner" in graph["api"] and "api" in graph["cli"]
    assert cycle(graph) == []
    assert cycle({"runner": {"cli"}, "cli": {"api"}, "api": {"runner"}, "data": set()}) == [
        "api",
        "cli",
        "runner",
    ]


@pytest.mark.parametrize("start", WITHOUT_JAX)
def test_no_jax_is_loaded_by(start):
    """Neither by itself nor by what it loads; a package's own file is loaded with any of its
    modules."""
    names = [name for name in modules() if stands_in(name.removeprefix("fedjax_sim."), {start})]
    way: dict[str, str] = {name: name for name in names}
    assert names, f"there is no '{start}'"
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        parents = [
            ".".join(name.split(".")[:n]) + ".__init__" for n in range(1, name.count(".") + 1)
        ]
        loaded = [one.module for one in read(name) if not one.lazy] + parents
        for module in loaded:
            assert module.split(".")[0] not in ("jax", "flax", "optax"), f"{way[name]} -> {module}"
            for target in (module, module + ".__init__", module.rpartition(".")[0]):
                if target in modules() and target not in way:
                    way[target] = f"{way[name]} -> {target}"
                    waiting.append(target)


SAMPLE = """
from typing import TYPE_CHECKING
import typing
if TYPE_CHECKING:
    from fedjax_sim.engine import round
elif typing.TYPE_CHECKING:
    import fedjax_sim.cli
else:
    import fedjax_sim.runner.files
from . import fedavg
from ..local import local_sgd
try:
    from fedjax_sim import models
except ImportError:
    pass
def later():
    from agents.types import Agent
    import_module("fedjax_sim.report.runs")
"""


# words of the methods' names that may stand elsewhere: the default method, and split protocols
# called after papers
ELSEWHERE = {
    "experiment.settings": {"fedavg"},
    "experiment.tree": {"fedavg"},
    "api": {"fedavg"},
    "data.protocols": {"fedpolicy", "pfedrlla", "qbandit"},
}
COMMON_WORDS = {"local", "full", "backbone", "head", "random"}


def test_no_methods_name_outside_methods():
    """No code decides by the name of a method: what is special about one is in its class."""
    from fedjax_sim.methods import METHODS

    found = []
    for name, file in modules().items():
        place = name.removeprefix("fedjax_sim.")
        if name.startswith("agents") or place.split(".")[0] in ("methods", "presets"):
            continue
        parts = {
            n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)
        }
        named = {w for w in parts if isinstance(w, str)} & set(
            METHODS
        ) - COMMON_WORDS - ELSEWHERE.get(place, set())
        found += [f"{name}: {word}" for word in sorted(named)]
    assert not found, found


def test_the_reader_sees_every_kind_of_import():
    seen = [
        (one.module, one.lazy)
        for one in imports_of(SAMPLE, "fedjax_sim.methods")
        if "typing" not in one.module
    ]
    assert seen == [
        ("fedjax_sim.runner.files", False),
        ("fedjax_sim.methods.fedavg", False),
        ("fedjax_sim.local.local_sgd", False),
        ("fedjax_sim.models", False),
        ("agents.types.Agent", True),
        ("fedjax_sim.report.runs", True),
    ]


@pytest.mark.parametrize(
    "subpackage, statement, said",
    [
        (
            "methods",
            "from fedjax_sim.engine.round import simulate",
            "'methods' imports 'fedjax_sim.engine.round.simulate'",
        ),
        ("methods", "import agents.sac", "'methods' imports 'agents.sac'"),
        (
            "methods",
            "from fedjax_sim.data.sources import load",
            "'methods' imports 'fedjax_sim.data.sources.load'",
        ),
        ("engine", "from fedjax_sim import methods", "'engine' imports 'fedjax_sim.methods'"),
        ("local", "def f():\n    import fedjax_sim.engine", "'local' imports 'fedjax_sim.engine'"),
        (
            "agents",
            "from fedjax_sim.errors import UserError",
            "'agents' imports 'fedjax_sim.errors.UserError'",
        ),
        (
            "runner",
            "from fedjax_sim.report import text as describe",
            "'runner' imports 'fedjax_sim.report.text'",
        ),
        ("data", "from fedjax_sim.models import build", "'data' imports 'fedjax_sim.models.build'"),
    ],
)
def test_a_forbidden_import_is_named(subpackage, statement, said):
    (found,) = violations(
        subpackage, "here", tuple(imports_of(statement, f"fedjax_sim.{subpackage}"))
    )
    assert said in found


def test_doors_that_are_open():
    for subpackage, statement in (
        ("methods", "def f():\n    import agents.sac"),
        ("methods", "from fedjax_sim.methods.fedavg import FedAvg"),
        ("engine", "from fedjax_sim.data.federation import Federation"),
        ("runner", "from fedjax_sim import __version__"),
        ("data", "import numpy, jax"),
    ):
        assert not violations(
            subpackage, "here", tuple(imports_of(statement, f"fedjax_sim.{subpackage}"))
        ), statement


def long_functions(source: str) -> list[str]:
    """Functions of a file that are longer than a reader keeps in mind."""
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    first = lambda node: min([node.lineno, *(d.lineno for d in node.decorator_list)])
    sizes = {node.name: node.end_lineno - first(node) + 1 for node in found}
    return [f"{name}: {lines} lines" for name, lines in sizes.items() if lines > LONGEST]


def test_no_function_is_longer_than_a_page():
    files = [
        path
        for subpackage in ("fedjax_sim", "agents")
        for path in sorted((ROOT / subpackage).rglob("*.py"))
    ]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): long_functions(path.read_text()) for path in files}
    assert not {path: names for path, names in found.items() if names}
    assert long_functions("@dec\ndef f():\n" + "    pass\n" * 59) == ["f: 61 lines"]
