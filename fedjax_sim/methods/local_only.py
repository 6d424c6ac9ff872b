"""Local-only: the lower bound without collaboration. A sampled client trains its own model; nothing is exchanged.

    w_k ← SGD_E(w_k)        whenever client k would have been selected

Wire: 0 down, 0 up.  State: w_k (the resident model).  Evaluated: personal.
"""

from __future__ import annotations

from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.plans import masked_plan
from fedjax_sim.types import Client, Cohort, Ctx, Env, Method, Plan, Tree


def local_only() -> Method:
    def init(env: Env, net: Tree):
        return (), ()

    def receive(env: Env, server: Tree, client: Client, plan: Plan, ctx: Ctx):  # ONE client
        return client, client.resident

    def aggregate(env: Env, server: Tree, cohort: Cohort) -> Tree:
        return server

    return fedavg()._replace(
        name="local",
        init=init,
        receive=receive,
        aggregate=aggregate,
        global_model=None,
        personal=lambda env, server, client, ctx: client.resident,
        plan=lambda env, ctx: masked_plan(env, ctx.epochs, (), ()),
        needs=frozenset({"resident"}),
    )
