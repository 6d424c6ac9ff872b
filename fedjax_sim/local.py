"""Local training of ONE client: epochs of reshuffled minibatches over its rows of the pool, ragged, with plugs.

Semantics are those of the papers' data loaders: every epoch is a fresh permutation, the last partial batch is kept
and masked, fractional epochs are counted in steps (`steps = max(1, round(epochs·⌈n/B⌉))`, 0 for a client without
data), and one step is PyTorch's SGD:  g ← g + wd·w;  v ← momentum·v + g;  w ← w − lr·v,  v = 0 at the start.

The loop has a data-dependent bound: a client costs what it holds. Side by side (vmap over `env.lanes` clients) the
bound is that of the longest lane, as an unbatched scalar, and a finished lane's learning rate is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.augment import AUGMENTATIONS
from fedjax_sim.losses import update_confusion
from fedjax_sim.threefry import small_bits
from fedjax_sim.types import Array, Client, Ctx, Env, Tree, Upload

LANES = "lanes"  # the name of the vmap axis over clients that are trained side by side


class Batch(NamedTuple):
    x: Array  # [B, H, W, C] normalised
    y: Array  # [B]
    mask: Array  # [B] True for real examples
    key: Array  # []  PRNG key of this step (noise in an objective)


class Aux(NamedTuple):
    """What an objective returns beside its value."""

    logits: Array  # [B, C]
    batch_stats: Tree  # BatchNorm statistics after this batch
    confusion: Tree  # running soft confusion after this batch, () when not tracked
    carry: Tree = ()  # the objective's own running values after this batch; see `descend`


class Trained(NamedTuple):
    net: Tree
    loss: Array  # []  mean over the examples of this training call
    accuracy: Array  # []  of the predictions made while training
    steps: Array  # []  steps of this client (not of its lane neighbours)
    carry: Tree = ()  # the objective's own running values at the end


# ---- minibatches ------------------------------------------------------------------------------------------------
def batches_per_epoch(env: Env, n: Array) -> Array:
    return -(-n // env.batch_size)


def steps_for(env: Env, n: Array, epochs: Array | float) -> Array:
    """Steps of a client with n examples; fractional epochs round to whole steps, at least one if there is any work."""
    epochs = jnp.asarray(epochs, env.dtype)
    steps = jnp.round(epochs * batches_per_epoch(env, n).astype(env.dtype)).astype(jnp.int32)
    return jnp.where((n > 0) & (epochs > 0), jnp.maximum(steps, 1), 0)


def epoch_orders(key: Array, n: Array, padded: int, epochs: int) -> Array:
    """[epochs, padded] int32: per epoch a permutation of 0..n−1 in the first n places (the rest is padding)."""
    noise = small_bits(key, (epochs, padded)) >> 1
    place = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32), (epochs, padded))
    noise = jnp.where(place < n, noise, jnp.uint32(0xFFFFFFFF))  # padding sorts last
    bits = max(1, (padded - 1).bit_length())
    if bits > 12:
        return lax.sort((noise, place), dimension=1, num_keys=1)[1]
    # random number and place in one word: XLA-CPU sorts one array 7 times faster than two. 19 random bits or more are
    # left; equal ones keep their order, as in a stable sort
    word = lax.sort((noise >> bits << bits) | place.astype(jnp.uint32), dimension=1, is_stable=False)
    return (word & jnp.uint32(2**bits - 1)).astype(jnp.int32)


def longest(env: Env, steps: Array) -> Array:
    """The bound of a loop over the lanes of a chunk: an unbatched scalar, so nothing is selected away."""
    return lax.pmax(steps, LANES) if env.lanes > 1 else steps


def by_itself(make: Callable[[], Array], counter: Array) -> Array:
    """`make()`, kept out of the loops that use it; `counter` is any scalar that is never negative and the same in all lanes.

    XLA-CPU fuses a gather into what reads it, where the row is then looked up for every element and padding becomes a
    branch: 0.4 ms of a LeNet-5 step, 0.04 ms apart. Neither a barrier nor `settle` keeps a single reader apart; the
    branch of a conditional does. Accelerators fuse well, and a conditional costs them.
    """
    if jax.default_backend() != "cpu":
        return make()
    like = jax.eval_shape(make)
    return lax.cond(counter >= 0, make, lambda: jnp.zeros(like.shape, like.dtype))


def gather(env: Env, rows: Array, counter: Array) -> tuple[Array, Array]:
    """Examples of the pool, normalised: (x [B, H, W, C], y [B]); `counter` as in `by_itself`."""
    fed = env.fed
    # one row = one flat slice: the gather stays a copy of contiguous bytes
    x = by_itself(lambda: fed.x.reshape(fed.x.shape[0], -1)[rows], counter)
    x = x.reshape(*rows.shape, *fed.x.shape[1:]).astype(env.dtype)
    x = (x * fed.scale.astype(env.dtype) - fed.mean.astype(env.dtype)) / fed.std.astype(env.dtype)
    return x, fed.y[rows]


def stream(env: Env, ctx: Ctx, key: Array, epochs: float, split: str = "train") -> Callable[[Array], Batch]:
    """The client's minibatches as a function of the step number: reshuffled each epoch, the last one masked."""
    rows, n = env.fed.rows[split][ctx.id], env.fed.size[split][ctx.id]
    per_epoch, size = batches_per_epoch(env, n), env.batch_size
    padded = -(-rows.shape[0] // size) * size
    order = epoch_orders(key, n, padded, max(1, math.ceil(epochs - 1e-9)))
    # [epochs, padded] rows of the pool; padding repeats the client's own first row: nothing of others is ever read,
    # so that a NaN in somebody else's data (0·nan is nan) stays with its owner
    table = rows[jnp.where(order < n, order, 0)]
    augment = AUGMENTATIONS[env.fed.augment]

    def draw(step: Array) -> Batch:
        epoch, start = step // jnp.maximum(per_epoch, 1), (step % jnp.maximum(per_epoch, 1)) * size
        x, y = gather(env, lax.dynamic_slice(table, (epoch, start), (1, size))[0], step)
        step_key = jax.random.fold_in(key, step)
        return Batch(augment(step_key, x), y, start + jnp.arange(size) < n, step_key)

    return draw


# ---- objectives -------------------------------------------------------------------------------------------------
def forward(
    env: Env, net: Tree, batch: Batch, *, train: bool = True, tap: Callable | None = None
) -> tuple[Array, Array, Tree]:
    """(logits [B, C], features [B, d], batch_stats) of one minibatch."""
    features, stats = env.model.features(net, batch.x, train=train, mask=batch.mask, tap=tap)
    return env.model.head(net, features), features, stats


def local_loss(env: Env, ctx: Ctx, logits: Array, batch: Batch, confusion: Tree) -> tuple[Array, Tree]:
    """The run's local loss of one minibatch; the soft confusion is updated first, without gradient."""
    if env.track_confusion:
        confusion = update_confusion(
            confusion, lax.stop_gradient(logits), batch.y, batch.mask, env.loss.decay, batch_size=env.batch_size
        )
    return env.loss.value(logits, batch.y, batch.mask, env.counts[ctx.id], confusion), confusion


def supervised(env: Env, ctx: Ctx, penalty: Callable[[Tree], Array] | None = None, tap: Callable | None = None) -> Callable:
    """The default objective: the local loss of the model's logits, plus an optional penalty on the parameters."""

    def objective(net: Tree, batch: Batch, confusion: Tree) -> tuple[Array, Aux]:
        logits, _, stats = forward(env, net, batch, tap=tap)
        loss, confusion = local_loss(env, ctx, logits, batch, confusion)
        if penalty is not None:
            loss = loss + penalty(net["params"])
        return loss, Aux(logits, stats, confusion)

    return objective


# ---- the loop ---------------------------------------------------------------------------------------------------
def descend(
    env: Env,
    net: Tree,
    client: Client,
    ctx: Ctx,
    *,
    objective: Callable | None = None,
    gradient: Callable | None = None,
    adjust: Callable | None = None,
    trainable: tuple[str, ...] | None = None,
    epochs: float | None = None,
    optimizer=None,
    lr: Array | None = None,
    salt: int = 0,
    track: bool = True,
    carry: Tree = (),
) -> tuple[Client, Trained]:
    """SGD for ONE client; returns the client with its loss statistics brought up to date, and what was trained.

    objective: (net, batch, confusion) -> (loss, Aux); default `supervised(env, ctx)`.
    gradient:  (grad_of, params, step, draw) -> ((loss, Aux), grads, batch), where grad_of(params, batch)
               differentiates the objective; default: one gradient on draw(step). Sharpness-aware and meta-learning
               steps plug in here.
    adjust:    (grads, params) -> grads, before weight decay and momentum (control variates, proximal terms).
    trainable: names of the groups that move; the others cost no gradient. Default: all.
    epochs:    a Python number, for passes that are not the Plan's; default `ctx.epochs` (at most env.max_epochs).
    salt:      tells the shuffles of several passes of one round apart.  track=False keeps the client's statistics.
    carry:     start of the objective's own running values, if it has any: it is then called as
               objective(net, batch, confusion, carry) and returns the new ones in `Aux.carry`.
    """
    objective = objective or supervised(env, ctx)
    optimizer = optimizer or env.optimizer
    lr = ctx.lr if lr is None else jnp.asarray(lr, env.dtype)
    draw = stream(env, ctx, jax.random.fold_in(ctx.key, salt), env.max_epochs if epochs is None else epochs)
    steps = steps_for(env, env.fed.size["train"][ctx.id], ctx.epochs if epochs is None else epochs)
    frozen = {} if trainable is None else {g: p for g, p in net["params"].items() if g not in trainable}
    moving = {g: p for g, p in net["params"].items() if g not in frozen}

    def step(k: Array, carry):
        params, stats, opt_state, confusion, running, totals = carry
        own = (running,) if jax.tree.leaves(running) else ()

        def value(params, batch):
            return objective({"params": {**frozen, **params}, "batch_stats": stats}, batch, confusion, *own)

        grad_of = jax.value_and_grad(value, has_aux=True)
        if gradient is None:
            batch = draw(k)
            (loss, aux), grads = grad_of(params, batch)
        else:
            (loss, aux), grads, batch = gradient(grad_of, params, k, draw)
        if adjust is not None:
            grads = adjust(grads, params)
        direction, opt_state = optimizer.update(grads, opt_state, params)
        rate = lr if env.lanes == 1 else jnp.where(k < steps, lr, 0)  # a finished lane stands still
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
        seen = batch.mask.astype(env.dtype) if env.lanes == 1 else batch.mask * (k < steps).astype(env.dtype)
        n = seen.sum()
        hits = ((aux.logits.argmax(-1) == batch.y) * seen).sum()
        totals = (totals[0] + loss * n, totals[1] + hits, totals[2] + n)
        keep = (
            (lambda new, old: new)
            if env.lanes == 1
            else (lambda new, old: jax.tree.map(lambda a, b: jnp.where(k < steps, a, b), new, old))
        )
        return (
            params,
            keep(aux.batch_stats, stats),
            opt_state,
            keep(aux.confusion, confusion),
            keep(aux.carry, running),
            totals,
        )

    zero = jnp.zeros((), env.dtype)
    start = (moving, net["batch_stats"], optimizer.init(moving), client.confusion, carry, (zero, zero, zero))
    params, stats, _, confusion, carry, (loss, hits, n) = lax.fori_loop(0, longest(env, steps), step, start)
    done = Trained(
        {"params": {**frozen, **params}, "batch_stats": stats},
        loss / jnp.maximum(n, 1),
        hits / jnp.maximum(n, 1),
        steps,
        carry,
    )
    return (client._replace(confusion=confusion) if track else client), done


def upload(env: Env, ctx: Ctx, done: Trained, weights: str = "size", **more) -> Upload:
    """The usual upload of ONE client: its trained net, weighted by its data (`size`) or equally (`uniform`)."""
    weight = env.fed.size["train"][ctx.id].astype(env.dtype) if weights == "size" else jnp.ones((), env.dtype)
    return Upload(done.net, weight, loss=done.loss, accuracy=done.accuracy, **more)
