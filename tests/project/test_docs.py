"""What the documentation shows runs: docstring examples, the README's Python; and nothing names a
machine."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import io
import os
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys

import jax
import pytest
from paths import ROOT

import agents
import fedjax_sim
from fedjax_sim.cli.main import main, make_parser
from fedjax_sim.methods import METHODS

jax.devices()
MODULES = sorted(
    [
        "fedjax_sim",
        "agents",
        *(
            module.name
            for package in (fedjax_sim, agents)
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
            if not module.name.endswith("__main__")
        ),
    ]
)


def tracked() -> list[pathlib.Path]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    report = io.StringIO()
    runner = doctest.DocTestRunner(
        verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(example, out=report.write)
    assert runner.failures == 0, report.getvalue()


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [
    *PAGES,
    *sorted((ROOT / "docs" / "results").glob("*.md")),
    *(ROOT / d / "README.md" for d in ("agents", "benchmarks")),
]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Files and headings of this checkout; pages elsewhere are not asked."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            assert anchor in {
                re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads
            }, target


def test_every_page_is_in_the_table_of_contents():
    """Sphinx warns of a page in no toctree, and `make docs` then fails."""
    docs = ROOT / "docs"
    blocks = re.findall(r"^```{toctree}\n(.*?)^```", (docs / "index.md").read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    listed = {re.sub(r".*<(.*)>", r"\1", line) for line in lines if line[:1] not in ("", ":")}
    pages = {str(p.relative_to(docs).with_suffix("")) for p in ALL_PAGES if docs in p.parents}
    assert listed == pages - {"README", "index"}


def python_blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", [str(p.relative_to(ROOT)) for p in PAGES if python_blocks(p)])
def test_documented_python_runs(page, tmp_path, monkeypatch):
    """Every Python block of the README and of docs/; those of one page one after another, as one
    would type them."""
    from fedjax_sim import metrics, transforms
    from fedjax_sim.methods import _KINDS

    monkeypatch.chdir(tmp_path)
    path = ROOT / page
    # the project's own are known before anything is forgotten
    metrics.make_metrics(tuple(metrics.METRICS), 3)
    tables = (
        METHODS,
        _KINDS,
        transforms.TRANSFORMS,
        transforms._KINDS,
        metrics.METRICS,
        metrics._FACTORIES,
    )
    before = [dict(table) for table in tables]
    names: dict = {"__name__": "docs"}
    try:
        for number, block in enumerate(python_blocks(path), 1):
            exec(compile(block, f"{page}, Python block {number}", "exec"), names)
        for name in set(METHODS) - set(before[0]):  # to be registered is not yet to work
            fedjax_sim.run(
                name,
                model="mlp",
                clients=4,
                participation="1",
                rounds=1,
                epochs=1,
                devices="1",
                chunk="1",
            )
    finally:  # what a page registers is not a method of the project
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)


def test_readme_shows_python_in_ten_lines():
    blocks = python_blocks(ROOT / "README.md")
    assert blocks, "the README shows the Python form"
    shown = [b for b in blocks if ".run(" in b]
    assert shown and all(
        len([line for line in b.splitlines() if line.strip()]) <= 10 for b in shown
    )


def commands_in(page: pathlib.Path) -> list[list[str]]:
    """Every fedjax-sim line of a page's code blocks, without the program's name."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```", text, re.M | re.S)
    lines = [
        line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
        for block in blocks
        for line in block.splitlines()
    ]
    mentions = [
        line
        for line in lines
        if line.startswith("fedjax-sim ") and not {"…", "METHOD", "["} & {*line, *line.split()}
    ]
    return [
        argv
        for line in mentions
        if not {"--help", "--version"} & set(argv := shlex.split(line, comments=True)[1:])
    ]


def test_documented_commands_parse():
    assert len(commands_in(ROOT / "README.md")) >= 9
    for page in PAGES:
        for argv in commands_in(page):
            make_parser().parse_args(argv)


@pytest.mark.slow
def test_readme_commands_run(tmp_path):
    """As written, one after another, as a user's processes; a dataset from a folder where there is
    one, for two rounds."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    data = os.environ.get("FEDJAX_SIM_DATA")
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "PYTHONPATH": str(ROOT)
    }
    for argv in commands_in(ROOT / "README.md"):
        if "--device" in argv and importlib.util.find_spec("libtpu") is None:
            continue  # the compiler comes with the extra [aot]
        if "--data-dir" in argv:
            if not data:
                continue
            argv = [*(data if word == "DATA" else word for word in argv), "--rounds", "2"]
        done = subprocess.run(
            [sys.executable, "-m", "fedjax_sim", *argv],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (argv, done.stderr[-500:])


def test_generated_pages_are_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, page in generate.PAGES.items():
        assert path.read_text() == page(), f"{path.name}: run python docs/generate.py"


def test_the_skeletons_are_short():
    blocks = python_blocks(ROOT / "docs" / "add-a-method.md")
    assert blocks and all(len(block.splitlines()) <= 40 for block in blocks)


def test_every_method_is_named(capsys):
    assert main(["list", "methods"]) == 0
    listed = capsys.readouterr().out
    readme = (ROOT / "README.md").read_text()
    for name in METHODS:
        assert re.search(rf"^  {name}\s+\S", listed, re.M), f"{name} is not listed"
        assert re.search(rf"\b{name}\b", readme), f"{name} is not in the README"


def test_no_machine_paths():
    """No path of a particular machine in any tracked file outside the tests."""
    pattern = re.compile(r"(?<![\w.])/(?:work|tmp|home|root)/")
    bad = []
    for path in tracked():
        if "tests" in path.relative_to(ROOT).parts:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        bad += [
            f"{path.relative_to(ROOT)}:{i}"
            for i, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert not bad


def test_source_files_are_small():
    large = [
        str(p.relative_to(ROOT))
        for p in tracked()
        if p.suffix == ".py" and p.stat().st_size > 26 * 1024
    ]
    assert not large
