"""Local-only: the lower bound without collaboration. A sampled client trains its own model; nothing
is exchanged.

    w_k ← SGD_E(w_k)        whenever client k would have been selected

Wire: 0 down, 0 up.  State: w_k (the resident model).  Evaluated: personal.
"""

from __future__ import annotations

from typing import Any

from fedjax_sim.hooks import Method, Personal
from fedjax_sim.methods import register
from fedjax_sim.plans import masked_plan
from fedjax_sim.types import Client, Cohort, Ctx, Env, Plan, Tree


@register("local")
class LocalOnly(Personal, Method):
    """No exchange at all: the lower bound."""

    has_global_model = False
    needs = frozenset({"resident"})

    def init(self, env: Env, net: Tree) -> tuple[tuple, tuple]:
        return (), ()

    def plan(self, env: Env, server: Any, ctx: Ctx) -> Plan:
        return masked_plan(env, ctx.epochs, (), ())

    def receive(
        self, env: Env, server: Any, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        return client, client.resident

    def aggregate(self, env: Env, server: Any, cohort: Cohort) -> Any:
        return server
