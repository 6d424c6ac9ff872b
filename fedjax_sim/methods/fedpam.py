"""FedPAM: FedAvg, and on every client a private matrix P_k that turns the shared head's class vectors into its own.

    anchors:  (W P_k)_c,  features  z = f_θ(x) ∈ R^m,  logits  W z + b
    client:   L = L_local(W z + b, y) + λ·L_pcl(z, W P_k, y)        one step on θ, W, b and P_k together; P_k = I at first
              L_pcl of `local.contrast`: −log [ e^{z̃·w̃_y/τ} / (Σ_c e^{z̃·w̃_c/τ} + Σ_{j: y_j≠y} e^{z̃·z̃_j/τ}) ]
    server:   Θ ← Σ_k (n_k / Σ_j n_j) (θ_k, W_k, b_k)
    decides:  argmax_c (W P_k z + b)_c, or the anchor nearest in angle, with the Θ of now

L_local is the run's loss (CE). P_k has the optimiser of the rest, without weight decay.
m ≠ d: the common model gets a layer z = ReLU(V f_θ(x) + v), V ∈ R^{m×d}, before a head on m features.
variant pcl: P_k stays I.  variant pam: L = L_local(W z + b, y) + L_local(W P_k z + b, y), because without the contrast
P_k would have no gradient.  λ = 0 is FedAvg.
λ = 30 multiplies the contrast's step: on CIFAR-10 (cnn4, B = 10, lr 0.005) momentum 0.9 stays finite but silences a
quarter of the features, leaves P_k nearly singular and costs 8 points; with 0.5 (the presets) or none, none fall silent.
Wire: |w| down, |w| up.  State: P_k [m, m] (none for pcl).  Evaluated: personal.
Logged: private_parameters of a client, live_features (share of the common model's), adjust_distance (mean ‖P_k − I‖).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.errors import UserError, unknown
from fedjax_sim.hooks import Method, Server
from fedjax_sim.local import Aux, Batch, descend, forward, local_loss, upload
from fedjax_sim.local.contrast import anchor_contrast, unit
from fedjax_sim.local.features import live_features
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.models.projection import check_width, with_projection
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Real, Tree, Upload, concrete, is_off

PRIVATE = "adjust"  # where P_k stands among the parameters while a client trains; no group of the model
VARIANTS = ("full", "pcl", "pam")
INFER = ("dot", "cosine")
# with the run's usual 0.02 and 0.9, λ = 30 kills two thirds of the features at once
PREFERRED = (("lr", 0.005), ("momentum", 0.5))


def fedpam(
    lam: Real = 30.0, tau: Real = 0.5, m: int = 0, variant: str = "full", infer: str = "dot", weights: str = "size"
) -> Method:
    """lam: λ, weight of the contrast; tau: τ, its temperature; m: width of the features (0: the model's own);
    variant: 'full', 'pcl' (P_k stays the identity) or 'pam' (no contrast); infer: 'dot' or 'cosine' (no bias, over τ);
    weights: 'size' or 'uniform'."""
    if concrete(lam, tau) and not (0 <= lam < math.inf and 0 < tau < math.inf):
        raise UserError(f"fedpam has lam={lam:g}, tau={tau:g}; allowed: finite numbers, lam at least 0, tau above 0")
    for name, value, allowed in (("variant", variant, VARIANTS), ("infer", infer, INFER)):
        if value not in allowed:
            raise unknown(f"{name} of fedpam", value, allowed)
    check_width(m)
    adjusts = variant != "pcl"

    def extend(model: Any) -> Any:
        if PRIVATE in model.groups:
            raise UserError(f"fedpam needs the group name '{PRIVATE}', which model '{model.name}' has; rename that group")
        head = jax.eval_shape(model.init, jax.random.key(0))["params"][model.head_group]
        if getattr(head.get("kernel"), "shape", None) != (model.width, model.classes) or not set(head) <= {"kernel", "bias"}:
            raise UserError(
                f"fedpam needs a linear head with a kernel [{model.width}, {model.classes}] and at most a bias; "
                f"that of model '{model.name}' has {', '.join(head)}"
            )
        return with_projection(model, m)

    def init(env: Env, net: Tree) -> tuple[Server, Tree]:
        return Server(net), jnp.eye(env.model.width, dtype=env.dtype) if adjusts else ()

    def anchors(env: Env, net: Tree, private: Tree) -> Array:
        """(W P_k)ᵀ [m, C]; the head's kernel is Wᵀ."""
        kernel = net["params"][env.model.head_group]["kernel"]
        return private.T @ kernel if adjusts else kernel

    def adjusted(env: Env, net: Tree, private: Tree, z: Array) -> Array:
        """W P_k z + b, [B, C]."""
        return z @ anchors(env, net, private) + net["params"][env.model.head_group].get("bias", 0)

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        def objective(now: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
            logits, z, stats = forward(env, now, batch)
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            private = now["params"].get(PRIVATE)
            if variant == "pam":
                own = adjusted(env, now, private, z)
                loss = loss + env.loss.value(own, batch.y, batch.mask, env.counts[ctx.id], confusion)
            elif not is_off(lam):
                loss = loss + lam * anchor_contrast(z, anchors(env, now, private).T, batch.y, batch.mask, tau)
            return loss, Aux(logits, stats, confusion)

        start = {**net, "params": {**net["params"], PRIVATE: client.own}} if adjusts else net
        decaying = env.model.groups if env.optimizer.groups is None else env.optimizer.groups
        client, done = descend(
            env, start, client, ctx, objective=objective, optimizer=env.optimizer._replace(groups=decaying)
        )
        if not adjusts:
            return client, upload(env, ctx, done, weights)
        params = dict(done.net["params"])
        private = params.pop(PRIVATE)
        moved = jnp.linalg.norm(private - jnp.eye(env.model.width, dtype=env.dtype))
        # for the log only; as a sum it is also guarded: a client whose P_k is not finite has diverged
        up = upload(env, ctx, done._replace(net={**done.net, "params": params}), weights, sums=moved)
        return client._replace(own=private), up

    def personal(env: Env, server: Server, client: Client, ctx: Ctx) -> tuple[Tree, Tree]:
        net = {**server.net, "batch_stats": client.batch_stats} if env.bn_local else server.net
        return net, client.own

    def predict(env: Env, predictor: tuple[Tree, Tree], x: Array) -> Array:
        net, private = predictor
        z, _ = env.model.features(net, x, train=False)
        if infer == "cosine":
            return unit(z) @ unit(anchors(env, net, private).T).T / tau
        return adjusted(env, net, private, z)

    def log(env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
        out = {"private_parameters": jnp.int32(env.model.width**2 if adjusts else 0)}  # of ONE client
        out["live_features"] = live_features(env, server.net, cohort.ids)
        return out | {"adjust_distance": cohort.sums / jnp.maximum(cohort.count, 1)} if adjusts else out  # mean ‖P_k − I‖

    return fedavg(weights)._replace(
        name="fedpam",
        extend=extend,
        init=init,
        local=local,
        personal=personal,
        predict=predict,
        log=log,
        prefers=() if is_off(lam) or variant == "pam" else PREFERRED,
    )
