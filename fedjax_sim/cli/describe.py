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
    return "\n".join(
        [
            f"{config.method.name} on {shown(setup.fed.name)} ({config.data.partition},"
            f" {setup.fed.num_clients} clients, "
            + f"{who} per round"
            + (f", {len(setup.unseen)} kept out of training" if setup.unseen else "")
            + f"), model {sim.env.model.name}, "
            f"{config.training.rounds} rounds, seed {config.training.seed}, config {setup.hash}",
            *(
                [f"  columns of {shown(setup.fed.name)}: {setup.fed.origin.columns}"]
                if setup.fed.origin.columns
                else []
            ),
            *task_lines(setup),
            f"  parameters: {f['parameters']:,} ({groups})",
            (
                f"  client state: {size(f['client_state'])} (N x {size(f['per_client'])});"
                f" estimated peak memory: {size(f['peak'])} (runtime {size(f['runtime'])}, program"
                f" {size(f['program'])}, state {size(f['state'])}, data {size(f['data'])} per"
                f" device, {f['side_by_side']} clients side by side of {size(f['training'])} each,"
                f" logs {size(f['logs'])})"
            ),
            f"  per round: {size(f['down'])} down{' at most' if f['controlled'] else ''},"
            f" {size(f['up'])} up, {f['steps']:.0f} steps on average; layout: {sim.layout.devices}"
            f" device(s), chunk {sim.layout.chunk}"
            + (f" ({setup.resolved['chunk_why']})" if "chunk_why" in setup.resolved else ""),
            *(
                f"  {sentence}"
                for sentence in method_defaults(config.method.name, setup.resolved["prefers"])
            ),
            *(
                f"  {config.method.name} replaces {option} {config.flat().get(option, '')} by {why}"
                for option, why in sim.method.replaces
            ),
            f"  clients are scored on {on_rows(setup.resolved)}"
            + (
                ": training accuracies, since clients have no validation or test rows"
                if sim.client_split == "train"
                else ""
            ),
        ]
    )


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
        lines.append(
            f"  vocabulary of {len(fed.vocabulary)}: {shown(''.join(fed.vocabulary), 300)}"
        )
    if config.training.optimizer != "sgd":
        kept = (
            ", its state stays with the client"
            if config.training.optimizer_state == "client"
            else ""
        )
        lines.append(f"  optimizer: {config.training.optimizer}, lr {config.training.lr:g}{kept}")
    return lines


def fits_line(found: dict[str, Any]) -> str:
    """The result of `runner.ahead.fits` as a line."""
    where = (
        f"each of {found['devices']} x {found['title']}" if found["devices"] > 1 else found["title"]
    )
    has, verdict = size(found["memory"]), "fits" if found["fits"] else "does not fit"
    if found["arguments"] is None:
        needs = (
            f"its compiler needs {size(found['needed'])}"
            if found["needed"]
            else "its compiler finds no room"
        )
        return f"  {verdict} {where}: {needs}, of {has}"
    return (
        f"  {verdict} {where}: {size(found['needed'])} of {has} (arguments"
        f" {size(found['arguments'])} + scratch {size(found['scratch'])} + results"
        f" {size(found['results'])} - donated {size(found['donated'])})"
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
