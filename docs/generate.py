"""Writes docs/methods.md from the methods' own docstrings: `python docs/generate.py`. A test keeps it up to date."""

from __future__ import annotations

import inspect
import pathlib

from fedjax_sim import methods

PAGE = pathlib.Path(__file__).with_name("methods.md")
HEAD = """# The methods

Every method with its equations, what travels, what a client keeps and what is evaluated, as its own file says it. Options
are given as `--set METHOD.OPTION=VALUE` or as keywords of `fedjax_sim.run`. Made by `python docs/generate.py`.

Wire: floats per participant and round; |w| the model, |φ| the backbone, |ψ| the head, C classes, d feature width.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    by_module: dict[str, list[str]] = {}
    for name in methods.METHODS:
        by_module.setdefault(module_of(name).__name__, []).append(name)
    for names in by_module.values():
        parts.append(section(names))
    return "\n".join(parts)


def module_of(name: str):
    made = methods.builder(name)
    return inspect.getmodule(getattr(made, "func", made))


def section(names: list[str]) -> str:
    """One file's methods."""
    text = inspect.cleandoc(module_of(names[0]).__doc__ or "")
    lines = [f"## {', '.join(f'`{name}`' for name in names)}", "", "```text", text, "```", ""]
    for name in names:
        made = methods.builder(name)
        known = methods.options_of(name)
        shown = ", ".join(f"`{option}={default}`" for option, default in known.items()) or "none"
        lines.append(f"* `{name}`: {methods.METHODS[name]}. Options: {shown}.")
        about = inspect.getdoc(getattr(made, "func", made))
        if about and known:
            lines.append(f"  {' '.join(about.split())}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
