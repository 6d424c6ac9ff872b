"""The description of a run before it starts: sizes, layout, stages of a round."""

from __future__ import annotations

from typing import Any

from fedjax_sim.metrics.base import on_rows
from fedjax_sim.options import shown
from fedjax_sim.report.text import method_defaults, size
from fedjax_sim.runner.facts import facts
from fedjax_sim.runner.prepare import Setup


def report(setup: Setup) -> str:
    """The lines printed before a run (all that --dry-run prints)."""
    f, config, sim = facts(setup), setup.experiment, setup.simulation
    part = setup.participation
    who = f"{part.high}" if part.low == part.high else f"{part.low} to {part.high}"
    groups = ", ".join(f"{name} {count:,}" for name, count in f["floats"].items())
    name, fed, layout = config.method.name, setup.fed, sim.layout
    apart = f", {len(setup.unseen)} kept out of training" if setup.unseen else ""
    why = f" ({setup.resolved['chunk_why']})" if "chunk_why" in setup.resolved else ""
    trained = ": training accuracies, since clients have no validation or test rows"
    lines = [
        f"{name} on {shown(fed.name)} ({config.data.partition}, {fed.num_clients} clients, {who}"
        f" per round{apart}), model {sim.env.model.name}, {config.training.rounds} rounds, seed"
        f" {config.training.seed}, config {setup.hash}"
    ]
    if fed.origin.columns:
        lines.append(f"  columns of {shown(fed.name)}: {fed.origin.columns}")
    lines += [
        *task_lines(setup),
        f"  parameters: {f['parameters']:,} ({groups})",
        f"  client state: {size(f['client_state'])} (N x {size(f['per_client'])});"
        f" estimated peak memory: {size(f['peak'])} (runtime {size(f['runtime'])}, program"
        f" {size(f['program'])}, state {size(f['state'])}, data {size(f['data'])} per"
        f" device, {f['side_by_side']} clients side by side of {size(f['training'])} each,"
        f" logs {size(f['logs'])})",
        f"  per round: {size(f['down'])} down{' at most' if f['controlled'] else ''},"
        f" {size(f['up'])} up, {f['steps']:.0f} steps on average; layout: {layout.devices}"
        f" device(s), chunk {layout.chunk}{why}",
    ]
    lines += [f"  {sentence}" for sentence in method_defaults(name, setup.resolved["prefers"])]
    for option, how in sim.method.replaces:
        lines.append(f"  {name} replaces {option} {config.flat().get(option, '')} by {how}")
    rows = f"  clients are scored on {on_rows(setup.resolved)}"
    return "\n".join([*lines, f"{rows}{trained if sim.client_split == 'train' else ''}"])


def task_lines(setup: Setup) -> list[str]:
    """Lines about the task if it is not classification, the vocabulary, and the optimiser if it is
    not SGD."""
    fed, config = setup.fed, setup.experiment
    lines = []
    if fed.task != "classification":
        lines.append(
            f"  task: {fed.task}, {'x'.join(map(str, fed.shape))} in, {fed.classes} out, loss"
            f" {config.training.loss}"
        )
    if fed.vocabulary:
        text = shown("".join(fed.vocabulary), 300)
        lines.append(f"  vocabulary of {len(fed.vocabulary)}: {text}")
    train = config.training
    if train.optimizer != "sgd":
        kept = ", its state stays with the client" if train.optimizer_state == "client" else ""
        lines.append(f"  optimizer: {train.optimizer}, lr {train.lr:g}{kept}")
    return lines


def fits_line(found: dict[str, Any]) -> str:
    """The result of `runner.ahead.fits` as a line."""
    each = f"each of {found['devices']} x " if found["devices"] > 1 else ""
    verdict = f"  {'fits' if found['fits'] else 'does not fit'} {each}{found['title']}:"
    has = size(found["memory"])
    if found["arguments"] is None and not found["needed"]:
        return f"{verdict} its compiler finds no room, of {has}"
    if found["arguments"] is None:
        return f"{verdict} its compiler needs {size(found['needed'])}, of {has}"
    return (
        f"{verdict} {size(found['needed'])} of {has} (arguments {size(found['arguments'])} +"
        f" scratch {size(found['scratch'])} + results {size(found['results'])} - donated"
        f" {size(found['donated'])})"
    )


def stage_table(setup: Setup, seconds: dict[str, float], repeats: int) -> str:
    """Seconds and bytes of each stage of a round as a table; see `runner.profile`."""
    sizes, whole = facts(setup), seconds["round (fused, no evaluation)"]
    rows = [
        f"{setup.experiment.method.name}: one round of {setup.participation.high} clients, best of"
        f" {repeats}"
    ]
    rows += [
        f"  {name:30s} {1e3 * value:10.2f} ms  {100 * value / whole:6.2f} % of the fused round"
        for name, value in seconds.items()
    ]
    rows.append(f"  {'bytes down':30s} {size(sizes['down']):>13s}")
    rows.append(f"  {'bytes up':30s} {size(sizes['up']):>13s}")
    rows.append(f"  {'persistent client state':30s} {size(sizes['client_state']):>13s}")
    return "\n".join(rows)
