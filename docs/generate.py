"""Writes docs/methods.md and docs/api.md from docstrings: `python docs/generate.py`. A test keeps
them up to date."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # this checkout's package, whatever else is installed

import fedjax_sim  # noqa: E402
from agents.node import allowed_range, limits_of  # noqa: E402
from fedjax_sim import methods  # noqa: E402

METHODS_HEAD = """<!-- Written by `python docs/generate.py` from the docstrings. -->
# The methods

Each method with its equations, its options, and three facts:

* **Wire**: the floats that a participant receives and sends in a round. |w| is the size of the
  model, |φ| of the backbone, |ψ| of the head; C is the number of classes, d the feature width.
* **State**: what a client keeps between rounds.
* **Evaluated**: which models are scored.

In the equations k is a client, n_k its number of training examples and Θ the common model. Set an
option on the command line with `--set METHOD.OPTION=VALUE`, in Python as a field
(`fs.FedProx(mu=0.1)`) or as a keyword of `fs.run`.
"""
API_HEAD = """<!-- Written by `python docs/generate.py` from the docstrings. -->
# The Python interface

Everything that `import fedjax_sim as fs` offers. To write a method you also need
`fedjax_sim.hooks`, `.local`, `.plans` and `.types`: see [a new method](add-a-method.md).
"""


# ---- methods.md ----------------------------------------------------------------------------------
def methods_page() -> str:
    """The whole page."""
    parts = [METHODS_HEAD]
    by_module: dict[str, list[str]] = {}
    for name in methods.METHODS:
        by_module.setdefault(module_of(name).__name__, []).append(name)
    for names in by_module.values():
        parts.append(section(names))
    return "\n".join(parts)


def module_of(name: str):
    return inspect.getmodule(methods.method_class(name))


def section(names: list[str]) -> str:
    """One file's methods."""
    text = inspect.cleandoc(module_of(names[0]).__doc__ or "")
    lines = [f"## {', '.join(f'`{name}`' for name in names)}", "", *rendered(text)]
    for name in names:
        method = methods.method_class(name)
        lines += [f"`{name}`, in Python `fs.{method.__name__}`: {methods.METHODS[name]}.", ""]
        if options := [option(one) for one in dataclasses.fields(method)]:
            lines += ["| option | default | allowed | |", "|---|---|---|---|", *options, ""]
        more = (inspect.getdoc(method) or "").split("\n\n", 1)[1:]
        if more:
            lines += rendered(more[0])
    return "\n".join(lines)


# ---- docstrings as Markdown ----------------------------------------------------------------------
def rendered(text: str) -> list[str]:
    """A docstring as lines of Markdown: its sentences as text, equations and examples as code."""
    lines: list[str] = []
    for kind, group in itertools.groupby(text.split("\n\n"), kind_of):
        paragraphs = list(group)
        if kind == "prose":
            for paragraph in paragraphs:
                lines += [*prose(paragraph), ""]
        else:
            code = textwrap.dedent("\n\n".join(paragraphs)).strip("\n")
            lines += [f"```{kind}", code, "```", ""]
    return lines


def kind_of(paragraph: str) -> str:
    """The language of a paragraph: what is indented or aligned in columns keeps its form."""
    if paragraph.startswith(">>>"):
        return "pycon"
    return "text" if re.search(r"^ |\S {3,}\S", paragraph, re.M) else "prose"


def prose(paragraph: str) -> list[str]:
    """Sentences, with the facts about a method on lines of their own."""
    out = []
    for part in re.split(r"\s+(?=(?:Wire|State|Evaluated|Logged): )", " ".join(paragraph.split())):
        fact = re.match(r"(Wire|State|Evaluated|Logged): (.*)", part)
        text = f"* **{fact[1]}**: {escaped(fact[2])}" if fact else escaped(part)
        if out and fact and not out[-1].startswith(("* ", "  ")):
            out.append("")
        hanging = "  " if fact else ""
        out += textwrap.wrap(text, 100, subsequent_indent=hanging, break_on_hyphens=False)
    return out


def escaped(text: str) -> str:
    """Text whose signs Markdown would read as its own, outside of `code`."""
    parts = text.split("`")
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"(?<!\w)_|_(?!\w)|<(?=\w)", r"\\\g<0>", parts[at])
    return "`".join(parts)


def option(one: dataclasses.Field) -> str:
    """An option as a row of the table: its default, what it may be and what it means."""
    limits = limits_of(one)
    allowed = ", ".join((*limits.choices, *limits.words))
    if any(bound is not None for bound in (limits.ge, limits.gt, limits.le)):
        allowed = ", ".join(part for part in (allowed_range(limits), allowed) if part)
    default = f"`{one.default}`" if one.default != "" else ""
    cells = (f"`{one.name}`", default, allowed, limits.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---- api.md --------------------------------------------------------------------------------------
def api_page() -> str:
    """Every public name."""
    return "\n".join(
        [API_HEAD, *(entry(name, getattr(fedjax_sim, name)) for name in fedjax_sim.__all__)]
    )


# what has no docstring of its own
TEXTS = {
    "Real": "Annotation of a field that is an argument of the compiled program: another value "
    "needs no new program."
}


def entry(name: str, value: object) -> str:
    """One name: its signature, its docstring, and the methods of a class."""
    lines = [f"## `{name}`", ""]
    if name in TEXTS:
        return "\n".join([*lines, *rendered(TEXTS[name])])
    if not inspect.isclass(value):
        return "\n".join(
            [*lines, *code(f"{name}{signature(value)}"), *rendered(inspect.getdoc(value) or "")]
        )
    lines += rendered(inspect.getdoc(value) or "")
    if fields := fields_of(value):
        lines += code(fields)
    for member, about in members(value):
        lines += [
            *code(f"{name}.{member}".replace("(self, ", "(").replace("(self)", "()")),
            *rendered(about),
        ]
    return "\n".join(lines)


def code(text: str) -> list[str]:
    return ["```py", text, "```", ""]


def signature(value: Callable) -> str:
    """Arguments and result, one per line where they are many."""
    shape, lines, kinds = inspect.signature(value), [], set()
    for p in shape.parameters.values():
        if (
            p.kind is not p.POSITIONAL_ONLY
            and inspect.Parameter.POSITIONAL_ONLY in kinds
            and "/" not in lines
        ):
            lines.append("/")
        if p.kind is p.KEYWORD_ONLY and not kinds & {p.KEYWORD_ONLY, p.VAR_POSITIONAL}:
            lines.append("*")
        kinds.add(p.kind)
        lines.append(parameter(p))
    back = "" if shape.return_annotation is shape.empty else f" -> {shape.return_annotation}"
    short = f"({', '.join(lines)}){back}"
    return (
        short
        if len(short) < 100
        else "(\n" + "".join(f"    {line},\n" for line in lines) + f"){back}"
    )


def parameter(p: inspect.Parameter) -> str:
    stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    kind = "" if p.annotation is p.empty else f": {p.annotation}"
    default = (
        "" if p.default is p.empty else f" = {getattr(p.default, '__name__', repr(p.default))}"
    )
    return f"{stars}{p.name}{kind}{default}"


def fields_of(value: type) -> str:
    """The fields of a record as its source has them, with their comments."""
    if not dataclasses.is_dataclass(value):
        return ""
    source = inspect.getsource(value)
    lines, known = source.splitlines(), {field.name for field in dataclasses.fields(value)}
    out: list[str] = []
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.target) not in known:
            continue
        above = node.lineno - 1
        while re.match(r"    # (?!---)", lines[above - 1]):
            above -= 1
        out += lines[above : node.lineno - 1]
        whole = node.lineno == node.end_lineno
        out.append(lines[node.lineno - 1] if whole else ast.unparse(node))
    return "\n".join(line.removeprefix("    ") for line in out)


def members(value: type) -> Iterator[tuple[str, str]]:
    """(method with its arguments, docstring) of everything public that is documented."""
    for name, member in vars(value).items():
        member = getattr(member, "__func__", member)
        call = getattr(member, "fget", None) or getattr(member, "func", None)
        if (
            name.startswith("_")
            or not inspect.getdoc(call or member)
            or not callable(call or member)
        ):
            continue
        yield name if call else f"{name}{signature(member)}", inspect.getdoc(call or member) or ""


PAGES: dict[pathlib.Path, Callable[[], str]] = {
    HERE / "methods.md": methods_page,
    HERE / "api.md": api_page,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
