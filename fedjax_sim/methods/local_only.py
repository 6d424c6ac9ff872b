"""Local-only: the lower bound without collaboration. A sampled client trains its own model; nothing is exchanged.

    w_k ← SGD_E(w_k)        whenever client k would have been selected

Wire: 0 down, 0 up.  State: w_k (the resident model).  Evaluated: personal.
"""

from __future__ import annotations

from fedjax_sim.hooks import Method, resident_net
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.plans import masked_plan


def local_only() -> Method:
    return fedavg()._replace(
        name="local",
        init=lambda env, net: ((), ()),
        plan=lambda env, server, ctx: masked_plan(env, ctx.epochs, (), ()),
        receive=lambda env, server, client, plan, ctx: (client, client.resident),
        aggregate=lambda env, server, cohort: server,
        personal=resident_net,
        global_model=None,
        needs=frozenset({"resident"}),
    )
