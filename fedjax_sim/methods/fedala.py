"""FedALA (Zhang et al., 2023): every weight of the start is a learned mixture of the old local and
the received model.

    θ̂ = θ_old + (Θ − θ_old) ⊙ W,   W ∈ [0, 1]      in the last `layers` groups; the others are Θ's
    W ← clip(W − η_w ∇_θ̂ f ⊙ (Θ − θ_old), 0, 1)    by batch; a random contiguous `share` % of rows
    then E epochs from θ̂;  Θ ← Σ_k (n_k/Σn) w_k

The first time W is learned, passes go on until the standard deviation of the last `window` losses
is below `threshold`; afterwards one pass per round; none in round 1, where Θ = θ_old. As in the
authors' code and in PFLlib it is asked for only after more than `window` passes, so the first time
takes at least 11 of them with window = 10; at most `cap`.

lr_weights = 0 is FedAvg.  Wire: |w| down, |w| up.  State: θ_old (the resident model), W.
Evaluated: the resident model (tested=trained), or the latest Θ mixed anew at evaluation
(tested=start), both personal.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Personal, Server
from fedjax_sim.local import (
    batches_per_epoch,
    forward,
    local_loss,
    longest,
    most_steps,
    repeat,
    stream,
    turns,
)
from fedjax_sim.methods import register
from fedjax_sim.methods.fedavg import FedAvg
from fedjax_sim.plans import with_own_statistics
from fedjax_sim.types import Array, Client, Ctx, Env, Plan, Tree

TESTED = ("trained", "start")
MIXING = 2  # tells the draws of W's rows from those of training


class Own(NamedTuple):
    weights: Tree  # W of the mixed groups
    begun: Array  # []  has learned W before


@register("fedala")
class FedALA(Personal, FedAvg):
    """Every weight of the start is a learned mixture of old local and received model."""

    lr_weights: Real = field(1.0, ge=0, help="η_w, learning rate of W")
    share: Real = field(80.0, gt=0, le=100, help="% of the local rows that W is learned on")
    layers: int = field(0, ge=0, help="mixed groups, from the last (0: all)")
    threshold: Real = field(
        0.1, ge=0, help="the first loop ends when its last losses have a smaller deviation"
    )
    window: int = field(
        10, ge=1, help="how many last losses that are; the first loop makes more passes"
    )
    cap: int = field(50, ge=1, help="most passes of the first loop")
    tested: str = field(
        "trained", choices=TESTED, help="evaluate the resident model, or Θ mixed anew"
    )
    needs = frozenset({"resident"})

    @property
    def adapts(self) -> bool:  # type: ignore[override]
        return self.tested == "start"

    def init(self, env: Env, net: Tree) -> tuple[Server, Own]:
        top = env.model.groups[-self.layers :] if self.layers else env.model.groups
        return Server(net), Own(
            {g: jax.tree.map(jnp.ones_like, net["params"][g]) for g in top}, jnp.zeros((), bool)
        )

    def mixed(self, env: Env, server: Server, client: Client, ctx: Ctx) -> tuple[Own, Tree]:
        """(W brought up to date, θ̂) of ONE client."""
        old, new = client.resident["params"], server.net["params"]
        # Θ − θ_old
        apart = {g: jax.tree.map(jnp.subtract, new[g], old[g]) for g in client.own.weights}
        n = env.fed.size["train"][ctx.id]
        some = jnp.maximum(jnp.floor(n * (self.share / 100)), 1).astype(jnp.int32)
        key = jax.random.fold_in(ctx.key, MIXING)
        first = jax.random.randint(jax.random.fold_in(key, 0), (), 0, jnp.maximum(n - some, 0) + 1)
        draw = stream(
            env, ctx, key, 1, rows=jnp.roll(env.fed.rows["train"][ctx.id], -first), n=some
        )
        batches = batches_per_epoch(env, some)

        def start(w: Tree) -> Tree:
            top = {g: jax.tree.map(lambda a, d, w: a + d * w, old[g], apart[g], w[g]) for g in w}
            return with_own_statistics(env, {**server.net, "params": {**new, **top}}, client)

        def one_pass(w: Tree, running: Array) -> tuple[Tree, Array]:
            def step(k: Array, carry: tuple) -> tuple:
                w, last = carry
                net, batch = start(w), draw(k)

                def value(top: Tree) -> Array:
                    logits = forward(env, {**net, "params": {**net["params"], **top}}, batch)[0]
                    return local_loss(env, ctx, logits, batch, client.confusion)[0]

                loss, slope = jax.value_and_grad(value)({g: net["params"][g] for g in w})
                move = lambda w, g, d: jnp.clip(w - self.lr_weights * g * d, 0, 1)
                on = running & (k < batches)  # a finished client stands still
                w = jax.tree.map(lambda a, g, d: jnp.where(on, move(a, g, d), a), w, slope, apart)
                return w, jnp.where(on, loss, last)

            return repeat(
                turns(env, batches, most_steps(env, 1)[0]), step, (w, jnp.zeros((), env.dtype))
            )

        def again(carry: tuple) -> tuple:
            w, losses, passes, running = carry
            w, loss = one_pass(w, running)
            losses = jnp.where(running, jnp.roll(losses, -1).at[-1].set(loss), losses)
            passes = passes + running
            converged = (passes > self.window) & (losses.std() < self.threshold)
            return w, losses, passes, running & ~client.own.begun & ~converged & (passes < self.cap)

        begin = (client.own.weights, jnp.zeros(self.window, env.dtype), jnp.int32(0), ctx.t > 0)
        w = lax.while_loop(
            lambda carry: longest(env, carry[3].astype(jnp.int32)) > 0, again, begin
        )[0]
        return Own(w, client.own.begun | (ctx.t > 0)), start(w)

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        own, net = self.mixed(env, server, client, ctx)
        return client._replace(own=own), net

    def personal(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Tree:
        return (
            client.resident if self.tested == "trained" else self.mixed(env, server, client, ctx)[1]
        )
