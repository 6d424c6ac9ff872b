"""Small methods that use the hooks no registered method uses yet; they go through the same contract
as all others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from paths import ROOT

from fedjax_sim.hooks import Method, Peers, Personal, Server
from fedjax_sim.local import forward, local_loss, local_sgd
from fedjax_sim.local.sgd import Aux
from fedjax_sim.methods.pfedrlla import PFedRLLA
from fedjax_sim.models import with_group
from fedjax_sim.plans import masked_plan, mix
from fedjax_sim.types import Plan


class Neighbourhood(Peers, Personal, Method):
    """Each participant starts from ¾ of its own model and ¼ of the next participant's, the head
    half and half.

    peers: the cohort, shifted by one; prepare counts the rows it was given.
    """

    name = "neighbourhood"
    has_global_model = False
    needs = frozenset({"resident"})

    def init(self, env, net):
        return {"seen": jnp.int32(0), "ids": jnp.arange(env.cohort), "norm": jnp.zeros(())}, ()

    def peer_ids(self, env, server, ids):
        return jnp.roll(ids, -1)

    def prepare(self, env, server, ids, peers):
        norm = sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(peers.resident))
        return {"seen": server["seen"] + ids.shape[0], "ids": ids, "norm": norm}

    def plan(self, env, server, ctx):
        k, ones = env.cohort, jnp.ones(env.num_groups)
        # [K] one-hot: row j of the peers follows participant j
        mine = jnp.where(server["ids"] == ctx.id, 1.0, 0.0)
        is_head = jnp.array([g == env.model.head_group for g in env.model.groups])
        share = jnp.where(is_head, 0.5, 0.25)[:, None]  # [G, 1]
        return Plan(ones, ones, ctx.epochs, jnp.concatenate([share * mine[None, :k], 1 - share], 1))

    def receive(self, env, server, client, plan, ctx):
        return client, mix(env, plan.weights, env.peers.resident, client.resident)

    def aggregate(self, env, server, cohort):
        return server


class PrivateScale(Personal, Method):
    """FedAvg with a private scale of every class's logits: `extend`, `predict`, `resident` and a
    private group."""

    name = "private_scale"

    def extend(self, model):
        return with_group(model, "scale", lambda key: {"by": jnp.ones(model.classes)})

    def public(self, env):
        return tuple(g for g in env.model.groups if g != "scale")

    def init(self, env, net):
        return Server(net), net["params"]["scale"]

    def plan(self, env, server, ctx):
        return masked_plan(env, ctx.epochs, self.public(env), self.public(env))

    def receive(self, env, server, client, plan, ctx):
        return client, {**server.net, "params": {**server.net["params"], "scale": client.own}}

    def local(self, env, net, server, client, ctx):
        def objective(net, batch, confusion):
            logits, _, stats = forward(env, net, batch)
            logits = logits * net["params"]["scale"]["by"]
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            return loss, Aux(logits, stats, confusion)

        optimizer = env.optimizer._replace(groups=self.public(env))
        client, done = local_sgd(env, net, client, ctx, objective=objective, optimizer=optimizer)
        sent = {
            **done.net,
            "params": {**done.net["params"], "scale": server.net["params"]["scale"]},
        }
        own = done.net["params"]["scale"]
        return client._replace(own=own), self.upload(
            env, ctx, done._replace(net=sent), resident=done.net
        )

    def personal(self, env, server, client, ctx):
        return server.net, client.own

    def predict(self, env, predictor, x):
        net, scale = predictor
        return env.model.head(net, env.model.features(net, x, train=False)[0]) * scale["by"]


def from_the_docs() -> Method:
    """The skeleton of docs/add-a-method.md, as it stands there."""
    from fedjax_sim.methods import _KINDS, METHODS

    text = (ROOT / "docs" / "add-a-method.md").read_text()
    names: dict = {"__name__": "docs"}
    exec(text.split("```python\n")[1].split("```")[0], names)
    _KINDS.pop("my_method"), METHODS.pop("my_method")
    return names["MyMethod"]()


class ByLabelsAndModels(PFedRLLA):
    """pFedRLLA without an agent, its parts by rules that look at labels and at models."""

    name = "pfedrlla_similarity"
    body: str = "same_classes"
    head: str = "similarity"
    head_layers: str = "last"


class ByGradient(ByLabelsAndModels):
    name = "pfedrlla_gradient"
    body: str = "similarity"
    head: str = "gradient"


class ByPairs(ByLabelsAndModels):
    name = "pfedrlla_pairs"
    body: str = "weighted"
    head: str = "pairs"


DUMMIES = {
    "pfedrlla_pairs": ByPairs,
    "pfedrlla_similarity": ByLabelsAndModels,
    "pfedrlla_gradient": ByGradient,
    "neighbourhood": Neighbourhood,
    "private_scale": PrivateScale,
    "my_method": from_the_docs,
}
