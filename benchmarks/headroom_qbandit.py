"""Can the Q-bandit win anything? The best fixed depth and epochs of every client within its
budgets, and the controllers, compared on the same draws.

    python -m benchmarks.headroom_qbandit [--data-dir DATA] [--out docs/results] [--seeds 5]
    [--scale small|smoke]

Ten clients with the budgets of the paper's Table 1, all in every round, labels by Dirichlet 1,
images averaged over squares, six fully connected layers. The figure is the paper's: the mean over
clients of the accuracy of their composed models on the common test set, over the last evaluations;
differences are to `compliant` (the largest depth and epochs within budget), seed by seed.

Best fixed: one pass of coordinate descent over the clients on federations of other seeds; for each
client first the depth, then the epochs. `exceeded` counts the (client, round) pairs beyond a
budget, `last_third` those in the last third of the rounds.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import headroom_small as small
from fedjax_sim.methods.qbandit import TABLE_1, Budgets

WORKS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0)
MODE = "personal@global"
TUNING = 1000  # first seed of the federations on which the fixed actions are chosen
POLICIES: dict[str, dict[str, Any]] = {
    "compliant": dict(agent="compliant"),
    "full": dict(agent="full"),
    "random": dict(agent="random"),
    "q_bandit": dict(agent="q_bandit"),
    "ridge_bandit": dict(agent="ridge_bandit", lam_dist=0.0),
    "ridge_bandit, gain": dict(agent="ridge_bandit", lam_dist=0.0, reward="gain", dual=0.1),
}
SCALES: dict[str, dict[str, Any]] = {
    "small": dict(
        settings={"digits": ("digits", 1), "mnist": ("mnist", 2)},
        rounds=60, every=5, last=3, hidden=32, rows=100, tuning=2, layers=6,
    ),
    "smoke": dict(
        settings={"digits": ("digits", 2)},
        rounds=3, every=1, last=1, hidden=4, rows=10, tuning=1, layers=3,
    ),
}  # fmt: skip


def federations(scale: dict[str, Any], name: str, data_dir: str | None, seeds: Sequence[int]):
    dataset, pool = scale["settings"][name]
    data = small.images(dataset, data_dir, pool)
    sizes = [(scale["rows"], max(4, scale["rows"] // 5), 2)] * len(TABLE_1)
    for seed in seeds:
        rng = np.random.default_rng([seed, 77])
        shares = rng.dirichlet(np.ones(10), len(TABLE_1))
        limited = np.minimum(shares, 0.5)  # digits has few of a class
        shares = limited / limited.sum(1, keepdims=True)
        yield small.federation(data, shares, sizes, rng, test=300)


def settings(scale: dict[str, Any]) -> dict[str, Any]:
    return dict(
        model="mlp", model_options={"hidden": (scale["hidden"],) * (scale["layers"] - 1)},
        participation="1", rounds=scale["rounds"], batch_size=20, lr=0.05, momentum=0.9,
        weight_decay=0.0, eval_every=scale["every"], chunk="10",
    )  # fmt: skip


def program(scale: dict[str, Any], policy: str, fed: Any) -> small.Program:
    return small.Program("qbandit", fed, MODE, **settings(scale), **POLICIES[policy])


def run_seed(
    scale: dict[str, Any], compiled: small.Program, fed: Any, seed: int
) -> dict[str, float]:
    accuracy, log = compiled.run(fed, seed, scale["last"])
    over = log["exceed_compute"] + log["exceed_comm"]
    last_third = over[-len(over) // 3 :]
    return dict(accuracy=accuracy, exceeded=int(over.sum()), last_third=int(last_third.sum()))


# ---- the best fixed actions ----------------------------------------------------------------------
class Fixed:
    """Runs with given epochs and depths [N]. `compliant` uses its budgets to the full and the
    budgets are part of the State, so the given actions replace the budgets."""

    def __init__(self, scale: dict[str, Any], fed: Any):
        self.last, self.compiled = scale["last"], program(scale, "compliant", fed)

    def accuracy(self, fed: Any, seed: int, pairs: Sequence[tuple[float, int]]) -> float:
        works, depths = (np.array(column) for column in zip(*pairs, strict=True))
        budgets = Budgets(jnp.asarray(works, jnp.float32), jnp.asarray(depths, jnp.int32))
        change = lambda state: state._replace(server=state.server._replace(budgets=budgets))
        return self.compiled.run(fed, seed, self.last, change)[0]


def best_fixed(
    scale: dict[str, Any], score: Callable[[list], float], results: dict[str, Any], save: Callable
) -> list[tuple]:
    """[(epochs, layers)] of the clients, chosen one client after another. The progress is
    results["choosing"]; `save` stores it after each client."""
    most = [(c, min(b, scale["layers"])) for c, b in TABLE_1]
    progress = results.setdefault("choosing", {"pairs": most, "clients": 0, "value": None})
    chosen = [(float(c), int(b)) for c, b in progress["pairs"]]
    best = score(chosen) if progress["value"] is None else progress["value"]
    for k in range(progress["clients"], len(most)):
        c, b = most[k]
        tries = [(c, depth) for depth in range(1, b)] + [(work, b) for work in WORKS if work < c]
        for pair in tries:
            candidate = [*chosen[:k], pair, *chosen[k + 1 :]]
            value = score(candidate)
            if value > best:
                chosen, best = candidate, value
        progress.update(pairs=chosen, clients=k + 1, value=float(best))
        save()
        print(f"client {k}: {chosen[k]}, {best:.2f}", flush=True)
    return chosen


def fixed_rows(
    scale: dict[str, Any],
    feds: Sequence[Any],
    tuning: Sequence[Any],
    results: dict[str, Any],
    save: Callable,
) -> list[dict[str, Any]]:
    """Scores on `feds` of the fixed actions that are best on the federations `tuning`."""
    fixed = Fixed(scale, feds[0])
    score = lambda pairs: float(
        np.mean([fixed.accuracy(fed, TUNING + i, pairs) for i, fed in enumerate(tuning)])
    )
    if "best_fixed_actions" not in results:
        results["best_fixed_actions"] = best_fixed(scale, score, results, save)
        del results["choosing"]
        save()
    pairs = [(float(c), int(b)) for c, b in results["best_fixed_actions"]]
    return [
        dict(accuracy=fixed.accuracy(fed, seed, pairs), exceeded=0, last_third=0)
        for seed, fed in enumerate(feds)
    ]


# ---- the measurement and its page ----------------------------------------------------------------
def measure(args: argparse.Namespace, path: pathlib.Path) -> dict[str, Any]:
    scale, found = SCALES[args.scale], small.read(path)
    for name in scale["settings"]:
        feds = list(federations(scale, name, args.data_dir, range(args.seeds)))
        results = found.setdefault(name, {})
        for policy in POLICIES:
            values = results.setdefault(policy, [])
            if len(values) >= args.seeds:
                continue
            compiled = program(scale, policy, feds[0])
            for seed in range(len(values), args.seeds):
                values.append(run_seed(scale, compiled, feds[seed], seed))
            small.write(path, found)
            print(f"{name}: {policy}: {values}", flush=True)
        if len(results.setdefault("best fixed", [])) < args.seeds:
            others = range(TUNING, TUNING + scale["tuning"])
            tuning = list(federations(scale, name, args.data_dir, others))
            save = lambda: small.write(path, found)
            results["best fixed"] = fixed_rows(scale, feds, tuning, results, save)
            save()
    return found


def lines(found: dict[str, Any], scale: str) -> list[str]:
    """The tables in Markdown."""
    out = [f"`python -m benchmarks.headroom_qbandit --scale {scale} --data-dir DATA`: see its"
           " docstring for the setting. Accuracy of the clients' composed models on the common"
           " test set; paired differences with 95 % intervals over seeds."]  # fmt: skip
    for name, results in found.items():
        policies = {
            p: v for p, v in results.items() if p not in ("best_fixed_actions", "choosing") and v
        }
        accuracy = {p: [one["accuracy"] for one in v] for p, v in policies.items()}
        rows = small.table(accuracy, "compliant")
        out += [
            "",
            f"## {name}",
            "",
            rows[0] + " exceeded | in the last third |",
            rows[1] + "---|---|",
        ]
        for line, values in zip(rows[2:], policies.values(), strict=True):
            mean = lambda key, values=values: np.mean([one[key] for one in values])
            out.append(f"{line} {mean('exceeded'):.0f} | {mean('last_third'):.1f} |")
        pairs = ", ".join(f"{c:g}/{b}" for c, b in results.get("best_fixed_actions", []))
        if pairs:
            out += ["", f"Best fixed, epochs/layers client by client: {pairs}."]
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = small.parser("Can the Q-bandit win anything?", SCALES).parse_args(argv)
    title = "What can be won within budgets (Q-bandit)"
    return small.main(args, "qbandit", title, measure, lines)


if __name__ == "__main__":
    sys.exit(main())
