"""Small methods that use the hooks no registered method uses yet; they go through the same contract as all others."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

from fedjax_sim.hooks import Method, Server, resident_net
from fedjax_sim.local import descend, forward, local_loss, upload
from fedjax_sim.local.descend import Aux
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.models import with_group
from fedjax_sim.plans import masked_plan, mix
from fedjax_sim.types import Plan


def neighbourhood() -> Method:
    """Each participant starts from ¾ of its own model and ¼ of the next participant's, the head half and half.

    peers: the cohort, shifted by one; prepare counts the rows it was given.
    """

    def peers(env, server, ids):
        return jnp.roll(ids, -1)

    def prepare(env, server, ids, rows):
        norm = sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(rows.resident))
        return {"seen": server["seen"] + ids.shape[0], "ids": ids, "norm": norm}

    def plan(env, server, ctx):
        k, ones = env.cohort, jnp.ones(env.num_groups)
        mine = jnp.where(server["ids"] == ctx.id, 1.0, 0.0)  # [K] one-hot: row j of the peers follows participant j
        is_head = jnp.array([g == env.model.head_group for g in env.model.groups])
        share = jnp.where(is_head, 0.5, 0.25)[:, None]  # [G, 1]
        return Plan(ones, ones, ctx.epochs, jnp.concatenate([share * mine[None, :k], 1 - share], 1))

    def receive(env, server, client, plan, ctx):
        return client, mix(env, plan.weights, env.rows.resident, client.resident)

    return fedavg()._replace(
        name="neighbourhood",
        init=lambda env, net: ({"seen": jnp.int32(0), "ids": jnp.arange(env.cohort), "norm": jnp.zeros(())}, ()),
        peers=peers,
        prepare=prepare,
        plan=plan,
        receive=receive,
        aggregate=lambda env, server, cohort: server,
        global_model=None,
        personal=resident_net,
        needs=frozenset({"resident"}),
    )


def private_scale() -> Method:
    """FedAvg with a private scale of every class's logits: `extend`, `predict`, `held` and a private group."""

    def extend(model):
        return with_group(model, "scale", lambda key: {"by": jnp.ones(model.classes)})

    def public(env):
        return tuple(g for g in env.model.groups if g != "scale")

    def receive(env, server, client, plan, ctx):
        return client, {**server.net, "params": {**server.net["params"], "scale": client.own}}

    def local(env, net, server, client, ctx):
        def objective(net, batch, confusion):
            logits, _, stats = forward(env, net, batch)
            logits = logits * net["params"]["scale"]["by"]
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            return loss, Aux(logits, stats, confusion)

        optimizer = env.optimizer._replace(groups=public(env))
        client, done = descend(env, net, client, ctx, objective=objective, optimizer=optimizer)
        sent = {**done.net, "params": {**done.net["params"], "scale": server.net["params"]["scale"]}}
        return client._replace(own=done.net["params"]["scale"]), upload(env, ctx, done._replace(net=sent), held=done.net)

    def predict(env, predictor, x):
        net, scale = predictor
        return env.model.head(net, env.model.features(net, x, train=False)[0]) * scale["by"]

    return fedavg()._replace(
        name="private_scale",
        extend=extend,
        init=lambda env, net: (Server(net), net["params"]["scale"]),
        plan=lambda env, server, ctx: masked_plan(env, ctx.epochs, public(env), public(env)),
        receive=receive,
        local=local,
        personal=lambda env, server, client, ctx: (server.net, client.own),
        predict=predict,
    )


def from_the_docs() -> Method:
    """The skeleton of docs/add-a-method.md, as it stands there."""
    from fedjax_sim.methods import _OWN, METHODS

    text = (pathlib.Path(__file__).parents[1] / "docs" / "add-a-method.md").read_text()
    names: dict = {"__name__": "docs"}
    exec(text.split("```python\n")[1].split("```")[0], names)
    _OWN.pop("my_method"), METHODS.pop("my_method")
    return names["my_method"]()


DUMMIES = {"neighbourhood": neighbourhood, "private_scale": private_scale, "my_method": from_the_docs}
