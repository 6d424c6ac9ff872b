"""FedCP (Zhang et al., 2023): a conditional policy splits every feature vector between a global and
a private head.

    z = f(x),   v = Σ_c W_p,c / ‖Σ_c W_p,c‖          private head's class rows, fixed during a round
    policy:  a = ReLU(LayerNorm(Linear_{d→2d}(z ⊙ v))), read as (2, d)
             (r, s) = softmax over the pair of a + Gumbel noise
    logits = h_p(r ⊙ z) + h_g(s ⊙ z)                 r + s = 1;  h_g frozen
    loss   = L + λ·MMD²(z, f_received(x))            kernels as in `local.mmd`
    trained: f, h_p, policy;  then  h_g ← ½h_p + ½h_g
    upload:  f, h_g, policy;  size-weighted averages

Wire: |w| + 2d² + 6d down and up (the policy is a group of its own).  State: h_p (the resident model
has h_g). Evaluated: the latest f, h_g, policy with the client's h_p (personal), gates without noise
(test_gate=soft) or with it; f with h_g (global).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Personal, Server
from fedjax_sim.local import Aux, Batch, local_loss, local_sgd
from fedjax_sim.local.mmd import mmd_rbf
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.models import Model, with_group
from fedjax_sim.plans import with_own_statistics
from fedjax_sim.types import Array, Client, Ctx, Env, Plan, Tree, Upload

GROUP = "policy"
GATES = ("gumbel", "soft")
EPSILON = 1e-5  # LayerNorm's
NOISE = 5  # tells the noise of the gates from that of the minibatches


def context(env: Env, net: Tree) -> Array:
    """v [d]: the sum of the head's class rows, of length one; the head is linear, whatever its
    leaves are called."""
    width = env.model.width
    points = jnp.concatenate([jnp.eye(width, dtype=env.dtype), jnp.zeros((1, width), env.dtype)])
    logits = env.model.head(net, points)  # rows of the kernel plus the bias, and the bias
    total = (logits[:-1] - logits[-1]).sum(1)
    return total / jnp.maximum(jnp.linalg.norm(total), 1e-12)


def gates(policy: Tree, z: Array, v: Array, key: Array | None) -> tuple[Array, Array]:
    """(r, s), each [B, d], r + s = 1; without a key there is no noise."""
    a = (z * v) @ policy["kernel"] + policy["bias"]  # [B, 2d]
    a = (a - a.mean(1, keepdims=True)) / jnp.sqrt(a.var(1, keepdims=True) + EPSILON)
    a = jax.nn.relu(a * policy["scale"] + policy["shift"]).reshape(z.shape[0], 2, z.shape[1])
    if key is not None:
        a = a + jax.random.gumbel(key, a.shape, a.dtype)
    pair = jax.nn.softmax(a, axis=1)
    return pair[:, 0], pair[:, 1]


@register("fedcp")
class FedCP(Personal, FedAvg):
    """A policy splits each feature vector between a global and a private head."""

    needs_classes = "its policy weighs one vector of features per example"

    lam: Real = field(5.0, ge=0, help="λ, weight of MMD")
    gate: str = field(
        "gumbel", choices=GATES, help="gates in training: with Gumbel noise, or without"
    )
    test_gate: str = field("soft", choices=GATES, help="gates at evaluation")

    def extend(self, model: Model) -> Model:
        dtype = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))["params"])[0].dtype
        d = model.width

        def start(key: Array) -> dict[str, Array]:  # PyTorch's Linear and LayerNorm
            uniform = lambda key, shape: jax.random.uniform(key, shape, dtype, -1, 1) / math.sqrt(d)
            one, two = jax.random.split(key)
            flat = dict(scale=jnp.ones(2 * d, dtype), shift=jnp.zeros(2 * d, dtype))
            return dict(kernel=uniform(one, (d, 2 * d)), bias=uniform(two, (2 * d,)), **flat)

        return with_group(model, GROUP, start)

    def with_head(self, env: Env, net: Tree, head: Tree) -> Tree:
        return {**net, "params": {**net["params"], env.model.head_group: head}}

    def logits_of(
        self, env: Env, net: Tree, common: Tree, z: Array, v: Array, key: Array | None
    ) -> Array:
        """net with the private head, `common` with the global one."""
        r, s = gates(net["params"][GROUP], z, v, key)
        return env.model.head(net, r * z) + env.model.head(common, s * z)

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        return client, self.with_head(env, server.net, client.own)

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        head, received, v = env.model.head_group, net, context(env, net)

        def objective(now: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
            z, stats = env.model.features(now, batch.x, train=True, mask=batch.mask)
            key = jax.random.fold_in(batch.key, NOISE) if self.gate == "gumbel" else None
            logits = self.logits_of(env, now, server.net, z, v, key)
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            theirs = lax.stop_gradient(env.model.features(received, batch.x, train=False)[0])
            return loss + self.lam * mmd_rbf(z, theirs, batch.mask), Aux(logits, stats, confusion)

        client, done = local_sgd(env, net, client, ctx, objective=objective)
        own = done.net["params"][head]
        middle = jax.tree.map(lambda a, b: (a + b) / 2, own, server.net["params"][head])
        sent = done._replace(net=self.with_head(env, done.net, middle))
        return client._replace(own=own), self.upload(env, ctx, sent)

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        net = with_own_statistics(env, self.with_head(env, server.net, client.own), client)
        return net, server.net, context(env, net), jax.random.key_data(ctx.key)

    def predict(self, env: Env, predictor: Tree, x: Array) -> Array:
        net, common, v, key = predictor
        z = env.model.features(net, x, train=False)[0]
        return self.logits_of(
            env,
            net,
            common,
            z,
            v,
            jax.random.wrap_key_data(key) if self.test_gate == "gumbel" else None,
        )

    def init(self, env: Env, net: Tree) -> tuple[Server, Tree]:
        return Server(net), net["params"][env.model.head_group]
