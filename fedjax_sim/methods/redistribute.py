"""Redistribution with a fixed policy: which block of the aggregate each participant gets back.

    full       init = {Φ, Ψ}            FedAvg with uniform weights
    backbone   init = {Φ, ψ_k}          the client keeps its head
    head       init = {φ_k, Ψ}          the client keeps its backbone
    random     one of the three, uniformly, per client and round

φ_k, ψ_k: what client k held after its last local training (Θ⁰ before). Server: Θ ← (1/|K|) Σ_k trained_k.
Wire: |block| down, |w| up.  State: the resident model.  Evaluated: global; personal = resident.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Server, into_resident, resident_net
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.types import Array, Ctx, Env, Plan

BLOCKS = ("full", "backbone", "head")
POLICY = 17  # tells the policy's draws from the shuffles


def block_masks(env: Env) -> Array:
    """[3, G]: the groups sent down for full, backbone, head. The head is `model.head_group`."""
    groups = env.num_groups
    if groups < 2:
        raise UserError(
            f"model '{env.model.name}' has one parameter group, so there is no backbone and head to tell "
            f"apart; allowed: a model with at least 2 groups"
        )
    head = jnp.array([name == env.model.head_group for name in env.model.groups])
    return jnp.stack([jnp.ones(groups), 1.0 - head, 1.0 * head])


def redistribute(policy: str = "full", weights: str = "uniform") -> Method:
    """policy: full, backbone, head or random; weights: 'uniform' or 'size'."""
    if policy not in (*BLOCKS, "random"):
        raise UserError(f"unknown policy '{policy}'; allowed: full, backbone, head, random")

    def plan(env: Env, server: Server, ctx: Ctx) -> Plan:
        choice = (
            jax.random.randint(jax.random.fold_in(ctx.key, POLICY), (), 0, 3) if policy == "random" else BLOCKS.index(policy)
        )
        return Plan(block_masks(env)[choice], jnp.ones(env.num_groups), ctx.epochs)

    return fedavg(weights)._replace(
        name=policy, receive=into_resident, plan=plan, needs=frozenset({"resident"}), personal=resident_net
    )
