"""What other weights would have been worth: the reward's landscape around a trained agent of
pFedRLLA.

For the coming round of a finished run, before anybody trains: the head of every participant is
mixed by each candidate rule, and r1, r2, r3 of that mixture are taken on the client's validation
rows.

agent        what the actor says, without noise          uniform    all m + 1 alike
wanted       V_k, the similarities that r3 asks for      self       its own head alone
wanted^p     V_k to the power p, renormalised            group   all of its own group alike: of a
                                                                 designed group, or with the same
                                                                 classes

If rules that differ as much as `uniform` and `self` are worth nearly the same, there is nothing for
an agent to find.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_sim.engine import layout as layouts
from fedjax_sim.methods.pfedrlla.control import make_plan, usable
from fedjax_sim.methods.pfedrlla.method import val_accuracy
from fedjax_sim.methods.pfedrlla.reward import preferred, terms
from fedjax_sim.plans import mix
from fedjax_sim.runner.prepare import Setup

POWERS = (4, 16)


def candidates(
    policy: np.ndarray, wanted: np.ndarray, may: np.ndarray, same: np.ndarray | None
) -> dict[str, np.ndarray]:
    """name -> weights [M, m+1]; may [m+1]: who can be mixed; same [M, m+1]: who is of the client's
    group."""
    whole = lambda w: w / w.sum(-1, keepdims=True)
    myself = np.zeros_like(policy)
    myself[:, -1] = 1
    rules = dict(
        agent=policy,
        uniform=whole(np.broadcast_to(may, policy.shape).astype(policy.dtype)),
        wanted=wanted,
    )
    rules |= {f"wanted^{p}": whole(np.power(wanted, p)) for p in POWERS} | {"self": myself}
    return rules | ({} if same is None else {"group": whole((same & may).astype(policy.dtype))})


def landscape(setup: Setup, state: Any, group: np.ndarray | None = None) -> list[dict[str, Any]]:
    """One row per rule: means over the participants of r1, r2, r3, their sum as the run weighs
    them, and the weights."""
    sim = setup.simulation
    s: Any = sim.method
    state, data = layouts.place(sim.layout, jax.tree.map(jnp.copy, state), sim.data)

    def announced(state: Any, data: Any) -> tuple:
        round_plan = sim.plan_round(state, data)
        may = usable(round_plan.server)
        mine = round_plan.observed.reshape(
            len(round_plan.observed), -1, round_plan.server.embedded.shape[1]
        )[:, -1]  # e_k
        wanted = jax.vmap(lambda e: preferred(e, round_plan.server.embedded, may, s.r3))(mine)
        return (
            round_plan.info.policy,
            wanted,
            may,
            round_plan.server.previous,
            round_plan.slots.ctx.id,
        )

    def scored(state: Any, data: Any, weights: Any) -> tuple:
        """[M] accuracies of the models before and after the mixture."""
        round_plan = sim.plan_round(state, data)
        env = dataclasses.replace(sim.open(data), peers=round_plan.peers)

        def one(pair: tuple) -> tuple:
            action, ctx = pair
            own = jax.tree.map(lambda a: a[ctx.id], state.clients.resident)
            plan = make_plan(s, env, action, round_plan.server, ctx)
            mixed = mix(env, plan.weights, round_plan.peers.resident, own)
            return val_accuracy(env, own, ctx), val_accuracy(env, mixed, ctx)

        return lax.map(one, (weights, round_plan.slots.ctx))

    policy, wanted, may, peers, ids = layouts.as_numpy(jax.jit(announced)(state, data))
    same = None if group is None else group[ids][:, None] == group[np.append(peers, 0)][None]
    if same is not None:
        same[:, -1] = True
    score = jax.jit(scored)
    rows = []
    for name, weights in candidates(policy, wanted, may, same).items():
        before, mixed = layouts.as_numpy(score(state, data, weights))
        r1, r2, r3 = (np.asarray(r) for r in terms(mixed, before, weights, wanted, s.acc_tar, s.r3))
        total = s.beta1 * r1 + s.beta2 * r2 + s.beta3 * r3
        entropy = -np.sum(weights * np.log(np.maximum(weights, 1e-12)), -1) / np.log(
            weights.shape[1]
        )
        rows.append(
            dict(
                rule=name,
                val_before=float(before.mean()),
                val_mixed=float(mixed.mean()),
                **{k: float(v.mean()) for k, v in dict(r1=r1, r2=r2, r3=r3, reward=total).items()},
                reward_deviation=float(total.std()),
                entropy=float(entropy.mean()),
                itself=float(weights[:, -1].mean()),
            )
        )
    return rows
