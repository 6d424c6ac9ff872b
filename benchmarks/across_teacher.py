"""Where a search across federations may start: at a linear policy that imitates the oracle on many
federations, or at one with given weights.

    python -m benchmarks.across_teacher --over "dirichlet:0.05..1, data:mnist, federations:16" \\
        --weight 0 --price 0.02 --data-dir DATA --out DIR
    python -m benchmarks.across_teacher --weights take_backbone.relative_staleness=7 --out DIR
    fedjax-sim train fedpolicy --over "…" --start-from DIR:agent        fine-tuning

The oracle (`benchmarks.oracle`) sees the validation loss of every exchange of a round, the policy
only what FedPolicy's agent `evolved` sees. Least squares of what the oracle took and sent (-1 or
1, for each block of each participant that has a model of its own) on these features. Printed: how
often the policy decides as the oracle does, beside the more frequent choice. --price: what a whole
model on the wire costs, in units of the validation loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.across_federations import CONFIG
from benchmarks.oracle import decided
from fedjax_sim.engine import episode as episodes
from fedjax_sim.engine.episode import Draw, Length
from fedjax_sim.engine.round import plan_round
from fedjax_sim.engine.simulation import Simulation, everyone, set_up
from fedjax_sim.errors import UserError, lookup
from fedjax_sim.methods.fedpolicy.actions import PARTS, block_masks
from fedjax_sim.methods.fedpolicy.state import STATES
from fedjax_sim.options import convert, real
from fedjax_sim.runner.across import evolve
from fedjax_sim.runner.across.evolve import TRAINING, Problem
from fedjax_sim.runner.compilation import start_jax
from fedjax_sim.runner.files import write_json
from fedjax_sim.types import Array, State

RIDGE = 1e-3
BIAS = "bias"  # a feature that is always 1; for fedpolicy.agent.bias=true


def demonstration(
    sim: Simulation, length: Length, weight: float, price: float, draw: Draw, key: Array
) -> dict[str, Array]:
    """What was seen [T, M, S] and decided [T, M, 4] in a run of the oracle, and where it counts."""
    here, env, state = episodes.start_run(sim.stages, draw, key)
    state = state._replace(clients=set_up(here, env, state, everyone(here)))
    backbone, head = block_masks(env)[1:]

    def one(state: State, _: Any) -> tuple:
        planned = plan_round(here, env, state, draw.data.dropout)
        state, log = decided(here, env, state, planned, weight, price)
        pair = lambda part: [part @ backbone / backbone.sum(), part @ head / head.sum()]
        decisions = jnp.stack([*pair(log["take"]), *pair(log["send"])], -1)
        counts = log["joined"] & (log["weight"] > 0)
        return state, dict(seen=log["observed"], decisions=2 * decisions - 1, counts=counts)

    return lax.scan(one, state, None, length.rounds)[1]


def demonstrations(
    problem: Problem, number: int, weight: float, price: float, lr: float, schedule: str
) -> tuple[np.ndarray, np.ndarray]:
    """(features [n, S], decisions [n, 4] of -1 or 1) of `number` federations."""
    sim = problem.simulation(lr=lr, schedule=schedule)
    drawn = problem.draws(sim, TRAINING, 0, number)
    teach = lambda _, draw, key: demonstration(sim, problem.length, weight, price, draw, key)
    found = jax.device_get(jax.jit(episodes.each(teach))(None, drawn.draw, drawn.keys))
    counts = found["counts"]
    return found["seen"][counts], found["decisions"][counts]


def imitate(seen: np.ndarray, decisions: np.ndarray, rest: float = 1.0) -> np.ndarray:
    """[S * 4] parameters of the linear policy that is nearest to the decisions: it says rest + F W.

    >>> seen = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> imitate(seen, 1 + seen @ np.array([[-2.0], [0.0]])).round(2).tolist()
    [-2.0, 0.0]
    """
    normal = seen.T @ seen + RIDGE * np.eye(seen.shape[1])
    return np.linalg.solve(normal, seen.T @ (decisions - rest)).ravel()


def weighted(text: str) -> np.ndarray:
    """[S * 4] parameters of the linear policy with these weights; [S * 4 + 4] if any is a bias.

    >>> weighted("take_head.progress=-2").reshape(-1, 4)[-1].tolist()
    [0.0, -2.0, 0.0, 0.0]
    >>> weighted("send_head.bias=3")[-4:].tolist()
    [0.0, 0.0, 0.0, 3.0]
    """
    seen = [*STATES["portable"], BIAS]
    found = np.zeros((len(seen), len(PARTS)), np.float32)
    for item in text.split(","):
        name, _, number = (part.strip() for part in item.partition("="))
        decision, _, feature = name.partition(".")
        at = lookup("feature", feature, {name: i for i, name in enumerate(seen)})
        column = lookup("decision", decision, {name: i for i, name in enumerate(PARTS)})
        found[at, column] = convert(f"weight of {name}", number, real)
    return found.ravel() if found[-1].any() else found[:-1].ravel()


def agreement(
    parameters: np.ndarray, seen: np.ndarray, decisions: np.ndarray
) -> dict[str, dict[str, float]]:
    """Of every decision: the share of yes, and how often the policy decides alike."""
    said = 1 + seen @ parameters.reshape(seen.shape[1], -1) > 0
    return {
        name: dict(
            yes=float((decisions[:, k] > 0).mean()),
            alike=float((said[:, k] == (decisions[:, k] > 0)).mean()),
        )
        for k, name in enumerate(PARTS)
    }


def taught(args: argparse.Namespace) -> np.ndarray:
    """[S * 4] parameters that imitate the oracle; teacher.json says how well."""
    over, search = evolve.parse(args.over)
    config = CONFIG.replace(data_dir=args.data_dir, rounds=args.rounds)
    length = Length(args.rounds, last=min(search.last, (args.rounds + 1) // 2))
    problem = Problem(over, config, length, args.seed, args.data_dir)
    began = time.perf_counter()
    seen, decisions = demonstrations(
        problem, search.federations, args.weight, args.price, args.lr, args.schedule
    )
    parameters = imitate(seen, decisions)
    found = agreement(parameters, seen, decisions)
    print(f"{len(seen)} decisions of the oracle in {time.perf_counter() - began:.0f} s")
    for name, one in found.items():
        usual = max(one["yes"], 1 - one["yes"])
        print(f"{name:14} yes {one['yes']:6.1%}  alike {one['alike']:6.1%}  (usual: {usual:.1%})")
    settings = {k: str(v) for k, v in vars(args).items() if k not in ("out", "data_dir", "weights")}
    record = dict(parameters=[float(v) for v in parameters], agreement=found, settings=settings)
    write_json(args.out / "teacher.json", record | {"search": dataclasses.asdict(search)})
    return parameters


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--over", help="as of `fedjax-sim train`: imitate the oracle on these")
    how.add_argument("--weights", metavar="DECISION.FEATURE=NUMBER,…")
    parser.add_argument("--weight", type=float, default=0.0, help="w of the oracle")
    parser.add_argument("--price", type=float, default=0.0, help="of the traffic, per whole model")
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--schedule", default="cosine")
    parser.add_argument("--rounds", type=int, default=CONFIG.training.rounds)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args(given)
    start_jax(CONFIG)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        parameters = taught(args) if args.weights is None else weighted(args.weights)
    except UserError as problem:
        parser.error(str(problem))
    evolve.save_agent(args.out, "agent.parameters", np.float32(parameters), CONFIG.hash())


if __name__ == "__main__":
    main()
