"""Is there anything for the Q-bandit to find? The best fixed depth and epochs of every client
within its budgets, and the controllers, on the same draws.

    python -m benchmarks.headroom_qbandit [--data-dir DATA] [--out docs/results] [--seeds 5]
    [--scale small|smoke]

Ten clients with the budgets of the paper's Table 1, all in every round, labels by Dirichlet 1,
images averaged over squares, six fully connected layers. The figure is the paper's: the mean over
clients of the accuracy of their composed models on the common test set, over the last evaluations;
differences are to `compliant` (the largest depth and epochs within budget), seed by seed.

best fixed: chosen on federations of other seeds, client by client: first the depth, then the
epochs, the others as they are then; one pass. late exceedances: (client, round) pairs beyond a
budget in the last third of the rounds.
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
from fedjax_sim.errors import UserError
from fedjax_sim.methods.qbandit import TABLE_1, Budgets

WORKS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0)
MODE = "personal@global"
TUNING = 1000  # seeds of the federations by which the fixed choice is made
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


def played(scale: dict[str, Any], compiled: small.Program, fed: Any, seed: int) -> dict[str, float]:
    accuracy, log = compiled.run(fed, seed, scale["last"])
    over = log["exceed_compute"] + log["exceed_comm"]
    late = over[-len(over) // 3 :].sum()
    return dict(accuracy=accuracy, exceeded=int(over.sum()), late=int(late))


# ---- the best fixed choice -----------------------------------------------------------------------
class Fixed:
    """Runs of given epochs and depths [N]: what `compliant` does with such budgets, which are part
    of the State."""

    def __init__(self, scale: dict[str, Any], fed: Any):
        self.last, self.compiled = scale["last"], program(scale, "compliant", fed)

    def accuracy(self, fed: Any, seed: int, pairs: Sequence[tuple[float, int]]) -> float:
        works, depths = (np.array(column) for column in zip(*pairs, strict=True))
        budgets = Budgets(jnp.asarray(works, jnp.float32), jnp.asarray(depths, jnp.int32))
        change = lambda state: state._replace(server=state.server._replace(budgets=budgets))
        return self.compiled.run(fed, seed, self.last, change)[0]


def best_fixed(
    scale: dict[str, Any], worth: Callable[[list], float], there: dict[str, Any], keep: Callable
) -> list[tuple]:
    """[(epochs, layers)] of the clients, chosen one after another; what is known so far is in
    `there`, which `keep` writes down."""
    most = [(c, min(b, scale["layers"])) for c, b in TABLE_1]
    known = there.setdefault("choosing", {"pairs": most, "clients": 0, "value": None})
    chosen = [(float(c), int(b)) for c, b in known["pairs"]]
    now = worth(chosen) if known["value"] is None else known["value"]
    for k in range(known["clients"], len(most)):
        c, b = most[k]
        tries = [(c, depth) for depth in range(1, b)] + [(work, b) for work in WORKS if work < c]
        for one in tries:
            other = [*chosen[:k], one, *chosen[k + 1 :]]
            value = worth(other)
            if value > now:
                chosen, now = other, value
        known.update(pairs=chosen, clients=k + 1, value=float(now))
        keep()
        print(f"client {k}: {chosen[k]}, {now:.2f}", flush=True)
    return chosen


def fixed_rows(
    scale: dict[str, Any], feds: Sequence[Any], tuning: Sequence[Any], there: Any, keep: Callable
) -> list[dict[str, Any]]:
    """The fixed choice that is best on the federations `tuning`, on `feds`."""
    fixed = Fixed(scale, feds[0])
    worth = lambda pairs: float(
        np.mean([fixed.accuracy(fed, TUNING + i, pairs) for i, fed in enumerate(tuning)])
    )
    if "told" not in there:
        there["told"] = best_fixed(scale, worth, there, keep)
        del there["choosing"]
        keep()
    pairs = [(float(c), int(b)) for c, b in there["told"]]
    return [
        dict(accuracy=fixed.accuracy(fed, seed, pairs), exceeded=0, late=0)
        for seed, fed in enumerate(feds)
    ]


# ---- all of it -----------------------------------------------------------------------------------
def measure(args: argparse.Namespace, path: pathlib.Path) -> dict[str, Any]:
    scale, found = SCALES[args.scale], small.read(path)
    for name in scale["settings"]:
        feds = list(federations(scale, name, args.data_dir, range(args.seeds)))
        there = found.setdefault(name, {})
        for policy in POLICIES:
            values = there.setdefault(policy, [])
            if len(values) >= args.seeds:
                continue
            compiled = program(scale, policy, feds[0])
            for seed in range(len(values), args.seeds):
                values.append(played(scale, compiled, feds[seed], seed))
            small.write(path, found)
            print(f"{name}: {policy}: {values}", flush=True)
        if len(there.setdefault("best fixed", [])) < args.seeds:
            others = range(TUNING, TUNING + scale["tuning"])
            tuning = list(federations(scale, name, args.data_dir, others))
            keep = lambda: small.write(path, found)
            there["best fixed"] = fixed_rows(scale, feds, tuning, there, keep)
            keep()
    return found


def page(found: dict[str, Any], scale: str) -> str:
    lines = ["# What can be won within budgets (Q-bandit)", "",
             f"`python -m benchmarks.headroom_qbandit --scale {scale} --data-dir DATA`: see its"
             " docstring for the setting. Accuracy of the clients' composed models on the common"
             " test set; paired differences with 95 % intervals over seeds."]  # fmt: skip
    for name, there in found.items():
        policies = {p: v for p, v in there.items() if p not in ("told", "choosing") and v}
        accuracy = {p: [one["accuracy"] for one in v] for p, v in policies.items()}
        rows = small.table(accuracy, "compliant")
        lines += ["", f"## {name}", "", rows[0] + " exceeded | late |", rows[1] + "---|---|"]
        for line, values in zip(rows[2:], policies.values(), strict=True):
            mean = lambda what, values=values: np.mean([one[what] for one in values])
            lines.append(f"{line} {mean('exceeded'):.0f} | {mean('late'):.1f} |")
        pairs = ", ".join(f"{c:g}/{b}" for c, b in there.get("told", []))
        if pairs:
            lines += ["", f"Best fixed, epochs/layers client by client: {pairs}."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Is there anything for the Q-bandit to find?")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--out", default="docs/results")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scale", choices=tuple(SCALES), default="small")
    args = parser.parse_args(argv)
    folder = pathlib.Path(args.out)
    try:
        found = measure(args, folder / "headroom-qbandit.json")
    except UserError as problem:
        print(f"benchmarks.headroom_qbandit: {problem}", file=sys.stderr)
        return 2
    (folder / "headroom-qbandit.md").write_text(page(found, args.scale), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
