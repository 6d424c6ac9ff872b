"""FedALA (Zhang et al., 2023): every weight of the start is a learned mixture of the old local and the received model.

    θ̂ = θ_old + (Θ − θ_old) ⊙ W,   W ∈ [0, 1]      in the last `layers` groups; the other groups are Θ's
    W ← clip(W − η_w ∇_θ̂ f ⊙ (Θ − θ_old), 0, 1)    batch by batch over a random contiguous `share` % of the local rows
    then E epochs from θ̂;  Θ ← Σ_k (n_k/Σn) w_k

The first time W is learned, passes go on until the standard deviation of the last `window` losses is below `threshold`
(at least `window` passes, at most `cap`); afterwards one pass per round; none in round 1, where Θ = θ_old.

lr_weights = 0 is FedAvg.  Wire: |w| down, |w| up.  State: θ_old (the resident model), W.
Evaluated: the resident model (tested=trained), or the latest Θ mixed anew at evaluation (tested=start), both personal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Server, resident_net
from fedjax_sim.local import (
    batches_per_epoch,
    descend,
    forward,
    local_loss,
    longest,
    most_steps,
    repeat,
    stream,
    turns,
    upload,
)
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.plans import with_own_statistics
from fedjax_sim.types import Array, Client, Ctx, Env, Plan, Real, Tree, Upload, concrete

TESTED = ("trained", "start")
MIXING = 2  # tells the draws of W's rows from those of training


class Own(NamedTuple):
    weights: Tree  # W of the mixed groups
    begun: Array  # []  has learned W before


def fedala(
    lr_weights: Real = 1.0,
    share: Real = 80.0,
    layers: int = 0,
    threshold: Real = 0.1,
    window: int = 10,
    cap: int = 50,
    tested: str = "trained",
    weights: str = "size",
) -> Method:
    """lr_weights: η_w; share: % of the local rows; layers: mixed groups, from the last (0: all); threshold, window and
    cap: of the first loop; tested: 'trained' or 'start'; weights: 'size' or 'uniform'."""
    if concrete(lr_weights, share, threshold) and not (
        0 <= lr_weights < math.inf and 0 < share <= 100 and layers >= 0 and threshold >= 0 and window >= 1 and cap >= 1
    ):
        raise UserError(
            f"fedala has lr_weights={lr_weights:g}, share={share:g}, layers={layers}, threshold={threshold:g}, "
            f"window={window}, cap={cap}; allowed: finite and at least 0, above 0 to 100, 0 or more, at least 0, "
            f"1 or more, 1 or more"
        )
    if tested not in TESTED:
        raise UserError(f"fedala.tested={tested} is unknown; allowed: {', '.join(TESTED)}")

    def init(env: Env, net: Tree):
        top = env.model.groups[-layers:] if layers else env.model.groups
        return Server(net), Own({g: jax.tree.map(jnp.ones_like, net["params"][g]) for g in top}, jnp.zeros((), bool))

    def mixed(env: Env, server: Server, client: Client, ctx: Ctx) -> tuple[Own, Tree]:
        """(W brought up to date, θ̂) of ONE client."""
        old, new = client.resident["params"], server.net["params"]
        apart = {g: jax.tree.map(jnp.subtract, new[g], old[g]) for g in client.own.weights}  # Θ − θ_old
        n = env.fed.size["train"][ctx.id]
        some = jnp.maximum(jnp.floor(n * (share / 100)), 1).astype(jnp.int32)
        key = jax.random.fold_in(ctx.key, MIXING)
        first = jax.random.randint(jax.random.fold_in(key, 0), (), 0, jnp.maximum(n - some, 0) + 1)
        draw = stream(env, ctx, key, 1, rows=jnp.roll(env.fed.rows["train"][ctx.id], -first), n=some)
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
                move = lambda w, g, d: jnp.clip(w - lr_weights * g * d, 0, 1)
                on = running & (k < batches)  # a finished lane stands still
                w = jax.tree.map(lambda a, g, d: jnp.where(on, move(a, g, d), a), w, slope, apart)
                return w, jnp.where(on, loss, last)

            return repeat(turns(env, batches, most_steps(env, 1)[0]), step, (w, jnp.zeros((), env.dtype)))

        def again(carry: tuple) -> tuple:
            w, losses, passes, running = carry
            w, loss = one_pass(w, running)
            losses = jnp.where(running, jnp.roll(losses, -1).at[-1].set(loss), losses)
            passes = passes + running
            settled = (passes >= window) & (losses.std() < threshold)
            return w, losses, passes, running & ~client.own.begun & ~settled & (passes < cap)

        begin = (client.own.weights, jnp.zeros(window, env.dtype), jnp.int32(0), ctx.t > 0)
        w = lax.while_loop(lambda carry: longest(env, carry[3].astype(jnp.int32)) > 0, again, begin)[0]
        return Own(w, client.own.begun | (ctx.t > 0)), start(w)

    def receive(env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx) -> tuple[Client, Tree]:
        own, net = mixed(env, server, client, ctx)
        return client._replace(own=own), net

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        client, done = descend(env, net, client, ctx)
        return client, upload(env, ctx, done, weights)

    return fedavg(weights)._replace(
        name="fedala",
        init=init,
        receive=receive,
        local=local,
        personal=resident_net
        if tested == "trained"
        else lambda env, server, client, ctx: mixed(env, server, client, ctx)[1],
        adapts=tested == "start",
        needs=frozenset({"resident"}),
    )
