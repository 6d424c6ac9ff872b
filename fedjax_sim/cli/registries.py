"""The registries of names, for `fedjax-sim list` and for the help texts.

A help text must not wait for JAX, and most registries are in modules that import it. `names`
therefore reads the keys from the source of a module that is not imported yet; `catalog` imports it.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys

import fedjax_sim

# registry -> (module, variable)
REGISTRIES = {
    "methods": ("fedjax_sim.methods", "METHODS"),
    "transforms": ("fedjax_sim.transforms", "TRANSFORMS"),
    "datasets": ("fedjax_sim.data.sources", "DATASETS"),
    "models": ("fedjax_sim.models.registry", "MODELS"),
    "partitions": ("fedjax_sim.data.partition", "PARTITIONS"),
    "protocols": ("fedjax_sim.data.protocols", "PROTOCOLS"),
    "tasks": ("fedjax_sim.tasks", "TASKS"),
    "losses": ("fedjax_sim.local.losses", "LOSSES"),
    "agents": ("agents", "DESCRIPTIONS"),
    "evaluations": ("fedjax_sim.engine.evaluation", "EVALUATIONS"),
    "metrics": ("fedjax_sim.metrics", "METRICS"),
    "optimizers": ("fedjax_sim.local.optimizers", "OPTIMIZERS"),
    "local_schedules": ("fedjax_sim.local.optim", "LOCAL_SCHEDULES"),
    "schedules": ("fedjax_sim.local.optim", "SCHEDULES"),
    "presets": ("fedjax_sim.presets", "PRESETS"),
    "logs": ("fedjax_sim.runner.sinks", "SINKS"),
    "convolutions": ("fedjax_sim.models.layers", "FORMS"),
    "accelerators": ("fedjax_sim.accelerators", "DEVICES"),
}
LISTED = (
    *("methods", "transforms", "datasets", "models", "partitions", "protocols", "tasks", "losses"),
    *("optimizers", "agents", "evaluations", "metrics", "presets", "logs"),
)
# these import no JAX
LIGHT = ("methods", "transforms", "metrics", "models", "agents", "presets")


def names(what: str) -> list[str]:
    """The names in a registry, in its order, without importing JAX.

    >>> names("losses")[:2], "fedavg" in names("methods")
    (['ce', 'focal'], True)
    """
    module, variable = REGISTRIES[what]
    if what not in LIGHT and module not in sys.modules:
        found = _keys_in_source(module, variable)
        if found:
            return found
    return list(getattr(importlib.import_module(module), variable))


def _keys_in_source(module: str, variable: str) -> list[str]:
    """The string keys (or items) of the dict (or tuple) that a module assigns to `variable`; [] if
    they cannot be read."""
    root = pathlib.Path(fedjax_sim.__file__).parent.joinpath(*module.split(".")[1:])
    file = root / "__init__.py" if root.is_dir() else root.with_suffix(".py")
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return []
    for line in body:
        if not isinstance(line, (ast.Assign, ast.AnnAssign)):
            continue
        targets = line.targets if isinstance(line, ast.Assign) else [line.target]
        if any(isinstance(target, ast.Name) and target.id == variable for target in targets):
            value = line.value
            items = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
            values = [item.value for item in items if isinstance(item, ast.Constant)]
            found = [value for value in values if isinstance(value, str)]
            return found if len(found) == len(items) else []
    return []


def catalog(what: str) -> dict[str, str]:
    """{name: description} of a registry; methods with their options.

    >>> catalog("losses")["ce"]
    'cross-entropy'
    """
    module, variable = REGISTRIES[what]
    table = getattr(importlib.import_module(module), variable)
    texts = {
        name: getattr(entry, "help", entry[-1] if isinstance(entry, tuple) else str(entry))
        for name, entry in table.items()
    }
    if what == "methods":
        from fedjax_sim.methods import options_of

        for name in texts:
            shown = ", ".join(f"{option}={default}" for option, default in options_of(name).items())
            texts[name] += f" [{shown}]" if shown else ""
    return texts
