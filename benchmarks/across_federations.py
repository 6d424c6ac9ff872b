"""Does a controller trained across federations win on federations it never saw?

    python -m benchmarks.across_federations score --trained DIR … --work WORK --data-dir DATA
    python -m benchmarks.across_federations transfer --trained DIR … --work WORK --data-dir DATA
    python -m benchmarks.across_federations selection --trained DIR --work WORK --data-dir DATA
    python -m benchmarks.across_federations speed --work WORK
    python -m benchmarks.across_federations cycles --device v5e,h100 --work WORK
    python -m benchmarks.across_federations page --work WORK --out docs/results

DIR: what `fedjax-sim train fedpolicy --over …` left, one per goal (--trained may be given several
times). Every row is paired with `full` on the same federations and seeds. For every goal and every
suite of federations, rate and schedule of `full`, of the controller, of every rule and of every
other method are chosen on tuning federations of that suite, from the same values. Scores are means
of the last five evaluations of a run. Finished parts are files in WORK: a stopped table goes on
where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import across_page
from benchmarks.across_page import MINE, has_bias
from fedjax_sim.engine import episode as episodes
from fedjax_sim.engine.episode import Length, Scores
from fedjax_sim.experiment import Experiment
from fedjax_sim.methods.fedpolicy.rules import boxes
from fedjax_sim.runner.across import evolve
from fedjax_sim.runner.across.evolve import HELD_OUT, TUNING, Problem, value_of, with_rate
from fedjax_sim.runner.across.over import parse_over
from fedjax_sim.runner.compilation import start_jax

SIZES = "clients:20..50, participation:0.1..0.3, examples:60..150"
COMMON = "test:350, pool:mnist|fashion_mnist|digits|cifar10, side:8"
SUITES = {
    "other seeds": f"dirichlet:0.05..1, {SIZES}, data:mnist|fashion_mnist, {COMMON}",
    "stronger skew": f"dirichlet:0.02..0.05, {SIZES}, data:mnist|fashion_mnist, {COMMON}",
    "CIFAR-10": f"dirichlet:0.05..1, {SIZES}, data:cifar10, {COMMON}",
    "digits": (
        "dirichlet:0.05..1, clients:20..25, participation:0.1..0.3, examples:50, data:digits, "
        + COMMON
    ),
    "USPS": (
        "dirichlet:0.05..1, clients:20..40, participation:0.1..0.3, examples:60..150, data:usps,"
        " test:350, side:8"
    ),
    "MNIST-M": f"dirichlet:0.05..1, {SIZES}, data:mnist_m, test:350, side:8",
}
SHAPE = parse_over(SUITES["other seeds"])
RATES, SCHEDULES = (0.1, 0.2, 0.4, 0.8), ("constant", "cosine")
LAST_FIFTH = "progress>0.8"
RULES = {
    "full": "",
    "backbone after 0.8": f"keep_head: {LAST_FIFTH}",
    "backbone after 0.8, taken": f"keep_head: {LAST_FIFTH}; withhold_head: {LAST_FIFTH}",
    "backbone after 0.9": "keep_head: progress>0.9",
    "backbone after 0.9, taken": "keep_head: progress>0.9; withhold_head: progress>0.9",
    "backbone after 0.5, taken": "keep_head: progress>0.5; withhold_head: progress>0.5",
    "nothing after 0.9": "keep_head: progress>0.9; keep_backbone: progress>0.9",
    "few classes < 2.5 keep head, taken": (
        "keep_head: effective_classes<2.5; withhold_head: effective_classes<2.5"
    ),
    "few classes < 2.5 keep head": "keep_head: effective_classes<2.5",
    "20 % keep head, taken": "keep_head: chance<0.2; withhold_head: chance<0.2",
    "few < 2.5 keep head after 0.8": f"keep_head: effective_classes<2.5 & {LAST_FIFTH}",
    "many > 2.5 keep head after 0.8": f"keep_head: effective_classes>2.5 & {LAST_FIFTH}",
}
# Rules that save bytes, beside RULES where bytes are part of the goal: a participant exchanges only
# heads, or nothing.
HEADS = "keep_backbone: {0}; withhold_backbone: {0}"
NOTHING = f"{HEADS}; keep_head: {{0}}; withhold_head: {{0}}"
WHEN = (
    "chance<0.25", "chance<0.5", "chance<0.75", "relative_staleness<0.4", "relative_staleness<0.6",
    "relative_size<0.5", "relative_size<0.8", "effective_classes<2.5", "progress>0.5",
    "progress<0.3",
)  # fmt: skip
FRUGAL = {
    f"{name} if {when}": rule.format(when)
    for name, rule in (("heads", HEADS), ("nothing", NOTHING))
    for when in WHEN
}
FEWER = (0.5, 0.75)  # shares of the rounds in which `full` may stop, with a schedule of its own
METHODS = ("fedper", "ditto", "fedrod")
CONFIG = Experiment.of(
    "fedpolicy",
    options={"agent": "evolved"},
    model="mlp",
    model_options={"hidden": (32,)},
    loss="ce",
    rounds=50,
    epochs=2,
    momentum=0.0,
    weight_decay=0.0,
)


@dataclasses.dataclass(frozen=True)
class Table:
    """One suite: programs by method and schedule, scores of entries on its federations."""

    problem: Problem
    tuning: int
    held_out: int

    def scores(
        self, method: dict[str, Any], schedule: str, agents: Any, rates: Iterable[float],
        parts: str, stream: int,
    ) -> Scores:  # fmt: skip
        """[F, P] of agents [P, …], each at its rate; agents None: as the method begins."""
        problem = dataclasses.replace(self.problem, config=self.problem.config.replace(**method))
        sim = problem.simulation(schedule=schedule)
        number = self.tuning if stream == TUNING else self.held_out
        drawn = problem.draws(sim, stream, 0, number)
        inner = episodes.make_episode(sim, problem.length, parts=parts)
        one = lambda variant, draw, key: inner(variant[0], with_rate(draw, variant[1]), key)
        program = jax.jit(episodes.each(one, population=True))
        dtype = sim.env.dtype
        rates = jnp.asarray(list(rates), dtype)
        agents = None if agents is None else jax.tree.map(lambda a: jnp.asarray(a, dtype), agents)
        return jax.tree.map(np.asarray, program((agents, rates), drawn.draw, drawn.keys))


RULE = dict(options={"agent": "rule", "rule": RULES["backbone after 0.8"]})


def rule_agents(names: Iterable[str]) -> Any:
    """Boxes [P, …] of rules."""
    known = RULES | FRUGAL
    return jax.tree.map(lambda *a: np.stack(a), *[boxes(known[name], 1) for name in names])


def tuned_rules(table: Table, names: Iterable[str]) -> dict[str, Any]:
    """Scores of every rule at every rate and schedule on the tuning federations."""
    pairs = [(name, rate) for name in names for rate in RATES]
    out = {}
    for schedule in SCHEDULES:
        found = table.scores(
            RULE, schedule, rule_agents(n for n, _ in pairs), [r for _, r in pairs], "agent", TUNING
        )
        for i, (name, rate) in enumerate(pairs):
            out[f"{name}|{rate}|{schedule}"] = means(found, i)
    return out


def tuned_method(table: Table, method: str) -> dict[str, Any]:
    out = {}
    for schedule in SCHEDULES:
        how = dict(method=method, options={})
        found = table.scores(how, schedule, None, RATES, "agent", TUNING)
        out |= {f"{method}|{r}|{schedule}": means(found, i) for i, r in enumerate(RATES)}
    return out


def evolved(parameters: np.ndarray) -> dict[str, Any]:
    """The settings of a controller with these parameters."""
    return dict(options={"agent": "evolved", "agent.bias": has_bias(parameters)})


def tuned_controller(table: Table, goal: str, parameters: np.ndarray) -> dict[str, Any]:
    """Scores of a trained controller, at as many rates and schedules as the rules have."""
    out = {}
    for schedule in SCHEDULES:
        values = np.repeat(parameters[None], len(RATES), 0)
        how = evolved(parameters)
        found = table.scores(how, schedule, values, RATES, "agent.parameters", TUNING)
        out |= {f"{goal}|{r}|{schedule}": means(found, i) for i, r in enumerate(RATES)}
    return out


def shorter(table: Table, share: float) -> Table:
    """The same suite with fewer rounds."""
    length = Length(round(share * table.problem.length.rounds))
    return dataclasses.replace(table, problem=dataclasses.replace(table.problem, length=length))


def in_part(scores: Scores, share: float) -> Scores:
    """Scores of shorter runs: bytes count as a share of those of all rounds."""
    return scores._replace(down=share * scores.down, up=share * scores.up)


def tuned_shorter(table: Table) -> dict[str, Any]:
    """Scores of `full` in fewer rounds, at every rate and schedule."""
    out = {}
    for share in FEWER:
        for schedule in SCHEDULES:
            values = rule_agents(["full"] * len(RATES))
            found = shorter(table, share).scores(RULE, schedule, values, RATES, "agent", TUNING)
            found = in_part(found, share)
            out |= {f"{share}|{r}|{schedule}": means(found, i) for i, r in enumerate(RATES)}
    return out


def means(scores: Scores, i: int) -> dict[str, float]:
    return {k: float(np.nan_to_num(v[:, i]).mean()) for k, v in scores._asdict().items()}


def costly(goal: str) -> bool:
    """Whether bytes are part of the goal."""
    return "bytes" in evolve.parse_goal(goal)


def best(tuned: dict[str, dict[str, float]], goal: str, keep: Callable) -> tuple[str, float, str]:
    """(name, rate, schedule) of the largest value of the goal."""
    mixture = evolve.parse_goal(goal)
    worth = lambda key: value_of(Scores(**tuned[key]), mixture)
    name, rate, schedule = max((k for k in tuned if keep(k.split("|")[0])), key=worth).split("|")
    return name, float(rate), schedule


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of the table of a goal."""

    goal: str
    row: str
    kind: str  # controller, rule, fewer (rounds of `full`), agent or method
    name: str
    rate: float
    schedule: str

    @property
    def label(self) -> str:
        return f"full, {float(self.name):.0%} of the rounds" if self.kind == "fewer" else self.name


def entries_of(tuned: dict[str, Any], goals: Iterable[str], methods: Iterable[str]) -> list[Entry]:
    """For every goal: `full`, the controller, the best rule and the methods, each at the rate and
    schedule that are best for it; SAC at those of `full`."""
    out = []
    for goal in goals:
        chosen = lambda keep, goal=goal: best(tuned, goal, keep)
        full = chosen(lambda name: name == "full")
        rules = {*RULES, *FRUGAL} - {"full"}
        out += [
            Entry(goal, "full", "rule", *full),
            Entry(goal, MINE, "controller", *chosen(lambda name, goal=goal: name == goal)),
            Entry(goal, "best rule", "rule", *chosen(lambda name: name in rules)),
        ]
        if costly(goal):
            some = [str(share) for share in FEWER]
            fewer = chosen(lambda name: name in some)
            out += [Entry(goal, "full, fewer rounds", "fewer", *fewer)]
        if methods:
            out += [Entry(goal, "SAC, as published", "agent", "sac", *full[1:])]
        for method in methods:
            out += [Entry(goal, method, "method", *chosen(lambda name, m=method: name == m))]
    return out


def run_entries(
    table: Table, entries: list[Entry], trained: dict[str, np.ndarray]
) -> dict[Entry, Any]:
    """Scores [F] of every entry on the held-out federations; entries of one program together."""
    groups: dict[tuple, list[Entry]] = {}
    for entry in entries:
        program = entry.name if entry.kind in ("method", "agent", "fewer") else ""
        if entry.kind == "controller":
            program = "with bias" if has_bias(trained[entry.name]) else "without bias"
        groups.setdefault((entry.kind, program, entry.schedule), []).append(entry)
    out = {}
    for (kind, program, schedule), some in groups.items():
        values, how, parts, where = None, {}, "agent", table
        if kind == "controller":
            values, parts = np.stack([trained[entry.name] for entry in some]), "agent.parameters"
            how = evolved(values[0])
        elif kind == "rule":
            values, how = rule_agents(entry.name for entry in some), RULE
        elif kind == "fewer":
            values, how = rule_agents("full" for _ in some), RULE
            where = shorter(table, float(program))
        elif kind == "agent":
            how = dict(options={"agent": program})
        else:
            how = dict(method=program, options={})
        rates = [entry.rate for entry in some]
        found = where.scores(how, schedule, values, rates, parts, HELD_OUT)
        if kind == "fewer":
            found = in_part(found, float(program))
        for i, entry in enumerate(some):
            out[entry] = jax.tree.map(lambda a, i=i: a[:, i], found)
    return out


def paired(found: dict[Entry, Any], goal: str) -> dict[str, Any]:
    """Rows of a goal: means, and differences to `full` and to the best rule as intervals."""
    mixture = evolve.parse_goal(goal)
    rows = {entry.row: (entry, scores) for entry, scores in found.items() if entry.goal == goal}
    out: dict[str, Any] = {}
    for row, (entry, scores) in rows.items():
        less = lambda other, scores=scores: evolve.compared(
            jax.tree.map(np.subtract, scores, rows[other][1]), mixture
        )
        out[row] = dict(
            setting=f"{entry.label}, lr {entry.rate:g}, {entry.schedule}",
            means={k: float(v.mean()) for k, v in scores._asdict().items()},
            over_full=less("full"),
            over_rule=less("best rule"),
        )
    return out


def kept(path: pathlib.Path, make: Callable[[], Any]) -> Any:
    """What `make` gave when it was called first."""
    if not path.is_file():
        began = time.perf_counter()
        result = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return json.loads(path.read_text())


def read_trained(folders: Iterable[str]) -> dict[str, np.ndarray]:
    """goal -> parameters."""
    out = {}
    for folder in folders:
        stored = json.loads((pathlib.Path(folder) / "result.json").read_text())
        out[evolve.parse(stored["over"])[1].goal] = np.float32(stored["parameters"])
    return out


def table_of(suite: str, args: argparse.Namespace) -> Table:
    config = CONFIG.replace(data_dir=args.data_dir)
    problem = Problem(
        parse_over(SUITES[suite]),
        config,
        Length(config.training.rounds),
        args.seed,
        args.data_dir,
        SHAPE,
    )
    return Table(problem, args.tuning, args.held_out)


def score(args: argparse.Namespace) -> None:
    """All suites, goal by goal."""
    trained = read_trained(args.trained)
    start_jax(CONFIG)
    for suite in args.suites or SUITES:
        table, stem = table_of(suite, args), suite.replace(" ", "-")
        methods = METHODS if suite in args.with_methods else ()
        for goal, parameters in trained.items():
            tuned = tuned_for(table, stem, goal, parameters, methods, args.work)

            def rows(goal: str = goal, table: Table = table, tuned: Any = tuned) -> Any:
                return paired(run_entries(table, entries_of(tuned, [goal], methods), trained), goal)

            kept(args.work / f"scores-{stem}--{goal}.json", rows)


def tuned_for(
    table: Table, stem: str, goal: str, parameters: np.ndarray, methods: Iterable[str],
    work: pathlib.Path,
) -> dict[str, Any]:  # fmt: skip
    """Scores on the tuning federations of all that is compared for a goal."""
    path = lambda what: work / f"tuned-{stem}{what}.json"
    tuned = kept(path(""), lambda: tuned_rules(table, RULES))
    tuned |= kept(path(f"--{goal}"), lambda: tuned_controller(table, goal, parameters))
    if costly(goal):
        tuned |= kept(path("-frugal"), lambda: tuned_rules(table, FRUGAL))
        tuned |= kept(path("-shorter"), lambda: tuned_shorter(table))
    for method in methods:
        tuned |= kept(path(f"-{method}"), lambda m=method: tuned_method(table, m))
    return tuned


# ---- transfer, selection, speed ------------------------------------------------------------------
TRANSFERS = {
    "LeNet-5 on Fashion-MNIST": ("lenet5", "data:fashion_mnist"),
    "cnn4 on CIFAR-10": ("cnn4", "data:cifar10"),
}


def transfer(args: argparse.Namespace) -> None:
    """Controllers trained on MLPs and small grey images, on other networks and whole images."""
    trained = read_trained(args.trained)
    start_jax(CONFIG)
    for name, (model, data) in TRANSFERS.items():
        if args.suites and name not in args.suites:
            continue
        over = parse_over(
            f"dirichlet:0.05..0.5, clients:20, participation:0.2, examples:120, {data}, side:0,"
            " test:350"
        )
        config = CONFIG.replace(
            model=model, model_options={}, data_dir=args.data_dir, rounds=args.rounds
        )
        problem = Problem(over, config, Length(args.rounds), args.seed, args.data_dir)
        table = Table(problem, 2, args.federations)

        def rows(table: Table = table) -> Any:
            tuned = {}
            for schedule in SCHEDULES:
                rates = (0.05, 0.1, 0.2)
                found = table.scores(
                    RULE, schedule, rule_agents(["full"] * 3), rates, "agent", TUNING
                )
                tuned |= {f"full|{r}|{schedule}": means(found, i) for i, r in enumerate(rates)}
            entries = []
            for goal in trained:
                at = best(tuned, goal, lambda name: True)[1:]
                entries += [Entry(goal, "full", "rule", "full", *at)]
                entries += [Entry(goal, "best rule", "rule", "backbone after 0.8, taken", *at)]
                entries += [Entry(goal, MINE, "controller", goal, *at)]
            found = run_entries(table, entries, trained)
            return {goal: paired(found, goal) for goal in trained}

        kept(args.work / f"transfer-{model}.json", rows)


SELECTION = (
    "dirichlet:0.05..1, clients:30, participation:0.2, examples:60..150, test:350,"
    " pool:mnist|fashion_mnist|cifar10, side:8"
)


def selection(args: argparse.Namespace) -> None:
    """Who takes part: uniform, power-of-choice, and the trained controller, FedAvg's rounds."""
    stored = json.loads((pathlib.Path(args.trained[0]) / "result.json").read_text())
    start_jax(CONFIG)
    base = dict(method="fedavg", options={})
    parameters = np.float32(stored["parameters"])[None]
    alone = lambda feature: 10 * np.eye(parameters.shape[1], dtype=np.float32)[[feature]]
    policy = base | dict(transforms=("agent_selection:agent=evolved",))
    ways = {
        "uniform": (base, None),
        "power of choice": (base | dict(transforms=("power_of_choice",)), None),
        "longest away first": (policy, alone(3)),  # rules: a weight on one feature alone
        "most even labels first": (policy, alone(4)),
        MINE: (policy, parameters),
    }
    for suite, data in {"other seeds": "mnist|fashion_mnist", "CIFAR-10": "cifar10"}.items():
        problem = Problem(
            parse_over(f"{SELECTION}, data:{data}"),
            CONFIG.replace(data_dir=args.data_dir),
            Length(CONFIG.training.rounds),
            args.seed,
            args.data_dir,
        )
        table = Table(problem, args.tuning, args.held_out)

        def rows(table: Table = table) -> Any:
            out, plain = {}, None
            for name, (how, values) in ways.items():
                tuned = {}
                for schedule in SCHEDULES:
                    wide = None if values is None else np.repeat(values, len(RATES), 0)
                    parts = stored["parts"]
                    found = table.scores(how, schedule, wide, RATES, parts, TUNING)
                    tuned |= {
                        f"{name}|{r}|{schedule}": means(found, i) for i, r in enumerate(RATES)
                    }
                _, rate, schedule = best(tuned, "global", lambda n: True)
                found = table.scores(how, schedule, values, [rate], stored["parts"], HELD_OUT)
                found = jax.tree.map(lambda a: a[:, 0], found)
                plain = found if plain is None else plain
                gains = evolve.compared(jax.tree.map(np.subtract, found, plain), {"global": 1.0})
                mean = {k: float(v.mean()) for k, v in found._asdict().items()}
                setting = f"lr {rate:g}, {schedule}"
                out[name] = dict(setting=setting, means=mean, over_uniform=gains)
            return out

        kept(args.work / f"selection-{suite.replace(' ', '-')}.json", rows)


def timed_problem() -> Problem:
    """What `speed` and `cycles` run."""
    over = parse_over(
        "dirichlet:0.1..0.5, clients:30, participation:0.17, examples:40, data:digits, test:300"
    )
    return Problem(over, CONFIG, Length(CONFIG.training.rounds))


def speed(args: argparse.Namespace) -> None:
    """Federation-rounds per second on this machine: policies and federations side by side."""
    start_jax(CONFIG)
    problem = timed_problem()
    sim = problem.simulation()
    plain = episodes.make_episode(sim, problem.length, parts="agent.parameters")
    across = episodes.make_episode(
        sim, problem.length, parts="agent.parameters", mapped=(episodes.FEDERATIONS,)
    )
    size = sim.agent().num_parameters
    rows = []
    for policies, federations, together in (
        (1, 4, False),
        (24, 4, False),
        (128, 2, False),
        (1, 16, True),
    ):
        drawn = problem.draws(sim, TUNING, 0, federations)
        episode = episodes.each(
            across if together else plain, population=True, side_by_side=together
        )
        values = jnp.zeros((policies, size))
        program = jax.jit(episode).lower(values, drawn.draw, drawn.keys).compile()
        took = []
        for _ in range(3):
            began = time.perf_counter()
            jax.block_until_ready(program(values, drawn.draw, drawn.keys))
            took.append(time.perf_counter() - began)
        runs = policies * federations * problem.length.rounds
        rows.append(
            dict(policies=policies, federations=federations, mapped=together, rate=runs / min(took))
        )
        print(rows[-1], flush=True)
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "speed.json").write_text(json.dumps(rows, indent=1))


def cycles(args: argparse.Namespace) -> None:
    """Cost of a federation-round by an accelerator's own compiler."""
    from benchmarks import across_cycles

    across_cycles.write(args.device.split(","), timed_problem(), args.work)


def page(args: argparse.Namespace) -> None:
    across_page.write(args.work, args.out, read_trained(args.trained), args.name)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = {
        "score": score,
        "transfer": transfer,
        "selection": selection,
        "speed": speed,
        "cycles": cycles,
        "page": page,
    }
    parser.add_argument("part", choices=tuple(parts))
    parser.add_argument("--device", default="v5e,h100", help="of cycles")
    parser.add_argument("--trained", action="append", default=[], metavar="DIR")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--name", default="across-federations", help="of the page")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--suites", action="append", default=[], metavar="NAME")
    parser.add_argument("--with-methods", action="append", default=[], metavar="SUITE")
    parser.add_argument("--tuning", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--federations", type=int, default=8, help="of transfer")
    parser.add_argument("--rounds", type=int, default=40, help="of transfer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    parts[args.part](args)


if __name__ == "__main__":
    main()
