"""FedPAM: FedAvg, and on every client a private matrix P_k that turns the shared head's class
vectors into its own.

    anchors:  (W P_k)_c,  features  z = f_θ(x) ∈ R^m,  logits  W z + b
    client:   L = L_local(W z + b, y) + λ·L_pcl(z, W P_k, y)
              one step on θ, W, b and P_k together; P_k = I at first
              L_pcl (`local.contrast`):
              −log [ e^{z̃·w̃_y/τ} / (Σ_c e^{z̃·w̃_c/τ} + Σ_{j: y_j≠y} e^{z̃·z̃_j/τ}) ]
    server:   Θ ← Σ_k (n_k / Σ_j n_j) (θ_k, W_k, b_k)
    predicts: argmax_c (W P_k z + b)_c, or the anchor nearest in angle, with the Θ of now

L_local is the run's loss (CE). P_k has the optimiser of the rest, without weight decay. If m ≠ d,
the common model gets a layer z = ReLU(V f_θ(x) + v), V ∈ R^{m×d}, before a head on m features.
λ = 0 is FedAvg.

variant=pcl: P_k stays I. variant=pam: L = L_local(W z + b, y) + L_local(W P_k z + b, y), because
without the contrast P_k would have no gradient.

λ = 30 multiplies the step of the contrast. On CIFAR-10 (cnn4, B = 10, lr 0.005) momentum 0.9 stays
finite, but a quarter of the features die, P_k becomes nearly singular, and accuracy is 8 points
lower; with 0.5 (the presets) or without momentum no feature dies.

Wire: |w| down, |w| up.  State: P_k [m, m] (none for pcl).  Evaluated:
personal. Logged: private_parameters of a client, live_features (share of the common model's),
adjust_distance (mean ‖P_k − I‖).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.errors import UserError
from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Personal, Server
from fedjax_sim.local import Aux, Batch, forward, local_loss, local_sgd
from fedjax_sim.local.contrast import anchor_contrast, unit
from fedjax_sim.local.features import live_features
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.models.projection import check_width, with_projection
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Tree, Upload

# a run with a smaller share of live features warns; healthy ones had 0.5
SILENT, SILENT_FOR = (0.4, 10)
PRIVATE = (  # where P_k stands among the parameters while a client trains; no group of the model
    "adjust"
)
VARIANTS = ("full", "pcl", "pam")
INFER = ("dot", "cosine")
# with the run's usual 0.02 and 0.9, λ = 30 kills two thirds of the features at once
PREFERRED = (("lr", 0.005), ("momentum", 0.5))


@register("fedpam")
class FedPAM(Personal, FedAvg):
    """A private matrix turns the shared head into each client's own."""

    needs_classes = "its anchors are the head's vectors of classes"

    lam: Real = field(30.0, ge=0, off=True, help="λ, weight of the contrast")
    tau: Real = field(0.5, gt=0, help="τ, temperature of the contrast")
    m: int = field(0, help="width of the features (0: the model's own)")
    variant: str = field(
        "full", choices=VARIANTS, help="pcl: P_k stays the identity; pam: no contrast"
    )
    infer: str = field(
        "dot", choices=INFER, help="logits at evaluation; cosine: no bias, divided by τ"
    )
    prefers = PREFERRED  # whatever λ and the variant are: they are compared with each other

    def check(self) -> None:
        check_width(self.m)

    @property
    def adjusts(self) -> bool:
        return self.variant != "pcl"

    def extend(self, model: Any) -> Any:
        if PRIVATE in model.groups:
            raise UserError(
                f"fedpam needs the group name '{PRIVATE}', which model '{model.name}' has; rename"
                " that group"
            )
        head = jax.eval_shape(model.init, jax.random.key(0))["params"][model.head_group]
        if getattr(head.get("kernel"), "shape", None) != (model.width, model.classes) or not set(
            head
        ) <= {"kernel", "bias"}:
            raise UserError(
                f"fedpam needs a linear head with a kernel [{model.width}, {model.classes}] and at"
                f" most a bias; that of model '{model.name}' has {', '.join(head)}"
            )
        return with_projection(model, self.m)

    def init(self, env: Env, net: Tree) -> tuple[Server, Tree]:
        return Server(net), jnp.eye(env.model.width, dtype=env.dtype) if self.adjusts else ()

    def anchors(self, env: Env, net: Tree, private: Tree) -> Array:
        """(W P_k)ᵀ [m, C]; the head's kernel is Wᵀ."""
        kernel = net["params"][env.model.head_group]["kernel"]
        return private.T @ kernel if self.adjusts else kernel

    def adjusted(self, env: Env, net: Tree, private: Tree, z: Array) -> Array:
        """W P_k z + b, [B, C]."""
        return z @ self.anchors(env, net, private) + net["params"][env.model.head_group].get(
            "bias", 0
        )

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        def objective(now: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
            logits, z, stats = forward(env, now, batch)
            loss, confusion = local_loss(env, ctx, logits, batch, confusion)
            private = now["params"].get(PRIVATE)
            if self.variant == "pam":
                own = self.adjusted(env, now, private, z)
                loss = loss + env.loss.value(
                    own, batch.y, batch.mask, env.counts[ctx.id], confusion
                )
            elif self.has("lam"):
                loss = loss + self.lam * anchor_contrast(
                    z, self.anchors(env, now, private).T, batch.y, batch.mask, self.tau
                )
            return loss, Aux(logits, stats, confusion)

        start = {**net, "params": {**net["params"], PRIVATE: client.own}} if self.adjusts else net
        decaying = env.model.groups if env.optimizer.groups is None else env.optimizer.groups
        client, done = local_sgd(
            env,
            start,
            client,
            ctx,
            objective=objective,
            optimizer=env.optimizer._replace(groups=decaying),
        )
        if not self.adjusts:
            return client, self.upload(env, ctx, done)
        params = dict(done.net["params"])
        private = params.pop(PRIVATE)
        moved = jnp.linalg.norm(private - jnp.eye(env.model.width, dtype=env.dtype))
        # for the log only; as a sum it is also guarded: a client whose P_k is not finite has
        # diverged
        up = self.upload(env, ctx, done._replace(net={**done.net, "params": params}), sums=moved)
        return client._replace(own=private), up

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> tuple[Tree, Tree]:
        net = {**server.net, "batch_stats": client.batch_stats} if env.bn_local else server.net
        return net, client.own

    def predict(self, env: Env, predictor: tuple[Tree, Tree], x: Array) -> Array:
        net, private = predictor
        z, _ = env.model.features(net, x, train=False)
        if self.infer == "cosine":
            return unit(z) @ unit(self.anchors(env, net, private).T).T / self.tau
        return self.adjusted(env, net, private, z)

    def warnings(self, rounds: Sequence[dict[str, Any]]) -> list[str]:
        last = [r.get("live_features", 1) for r in rounds[-SILENT_FOR:]]
        if len(last) < SILENT_FOR or max(last) >= SILENT:
            return []
        return [
            f"features of the common model are dead: {100 * (1 - last[-1]):.0f} % are 0 for every"
            " image that was tested and learn no more; try a smaller --momentum, --lr or weight of"
            " its own loss (fedpam.lam)"
        ]

    def log(self, env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
        # of ONE client
        out = {"private_parameters": jnp.int32(env.model.width**2 if self.adjusts else 0)}
        out["live_features"] = live_features(env, server.net, cohort.ids)
        if self.adjusts:
            out["adjust_distance"] = cohort.sums / jnp.maximum(cohort.count, 1)  # mean ‖P_k − I‖
        return out
