"""Local training of ONE client: epochs of reshuffled minibatches over its rows of the pool, ragged, with plugs.

One step is PyTorch's SGD:  g ← g + wd·w;  v ← momentum·v + g;  w ← w − lr·v,  v = 0 at the start of every call.

The loop has a data-dependent bound: a client costs what it holds. Side by side (vmap over `env.lanes` clients) the
bound is that of the longest lane, as an unbatched scalar, and a finished lane's learning rate is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_sim.local.batches import Batch, Turns, most_steps, repeat, steps_for, stream, turns
from fedjax_sim.local.losses import update_confusion
from fedjax_sim.local.optim import Sgd
from fedjax_sim.models.randomness import randomness
from fedjax_sim.types import Array, Client, Ctx, Env, Tree, Upload


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

    def objective(net: Tree, batch: Batch, confusion: Tree, carry: Tree = ()) -> tuple[Array, Aux]:
        logits, _, stats = forward(env, net, batch, tap=tap)
        loss, confusion = local_loss(env, ctx, logits, batch, confusion)
        if penalty is not None:
            loss = loss + penalty(net["params"])
        return loss, Aux(logits, stats, confusion, carry)

    return objective


# ---- the loop ---------------------------------------------------------------------------------------------------
class Plugs(NamedTuple):
    """What a method does otherwise in a step; see `descend`."""

    objective: Callable
    gradient: Callable | None
    adjust: Callable | None
    project: Callable | None
    after: Callable | None


def one_step(
    env: Env,
    plugs: Plugs,
    rule: optax.GradientTransformation,
    draw: Callable[[Array], Batch],
    frozen: Tree,
    steps: Array,
    planned: Turns,
    rate_of: Callable[[Array], Array],
) -> Callable:
    """(k, carry) -> carry: the k-th step of `descend`."""

    def step(k: Array, carry):
        params, stats, opt_state, confusion, running, totals, rate = carry
        own = (running,) if jax.tree.leaves(running) else ()

        def value(params, batch):
            with randomness(batch.key):  # dropout inside the model
                return plugs.objective({"params": {**frozen, **params}, "batch_stats": stats}, batch, confusion, *own)

        grad_of = jax.value_and_grad(value, has_aux=True)
        if plugs.gradient is None:
            batch = draw(k)
            (loss, aux), grads = grad_of(params, batch)
        else:
            (loss, aux), grads, batch = plugs.gradient(grad_of, params, k, draw, running)
        force = grads if plugs.adjust is None else plugs.adjust(grads, params)
        direction, opt_state = rule.update(force, opt_state, params)
        keep = (
            (lambda new, old: jax.tree.map(lambda a, b: jnp.where(k < steps, a, b), new, old))
            if planned.masked
            else (lambda new, old: new)
        )
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
        if plugs.project is not None:
            params = keep(plugs.project(params), params)
        then = aux.carry if plugs.after is None else plugs.after(aux.carry, grads, params)
        seen = batch.mask * (k < steps).astype(env.dtype) if planned.masked else batch.mask.astype(env.dtype)
        n = seen.sum()
        hits = ((aux.logits.argmax(-1) == batch.y) * seen).sum()
        totals = totals + jnp.stack([loss * n, hits, n])
        kept = keep(aux.batch_stats, stats), opt_state, keep(aux.confusion, confusion), keep(then, running)
        return params, *kept, totals, rate_of(k + 1)

    return step


def descend(
    env: Env,
    net: Tree,
    client: Client,
    ctx: Ctx,
    *,
    objective: Callable | None = None,
    gradient: Callable | None = None,
    adjust: Callable | None = None,
    project: Callable | None = None,
    after: Callable | None = None,
    trainable: tuple[str, ...] | None = None,
    epochs: float | None = None,
    optimizer: Sgd | None = None,
    lr: Array | None = None,
    salt: int = 0,
    track: bool = True,
    carry: Tree = (),
) -> tuple[Client, Trained]:
    """SGD for ONE client; returns the client with its loss statistics brought up to date, and what was trained.

    objective: (net, batch, confusion) -> (loss, Aux); default `supervised(env, ctx)`.
    gradient:  (grad_of, params, step, draw, carry) -> ((loss, Aux), grads, batch), where grad_of(params, batch)
               differentiates the objective; default: one gradient on draw(step). Sharpness-aware, meta-learning and
               two-model steps plug in here.
    adjust:    (grads, params) -> grads, before weight decay and momentum (control variates, proximal terms).
    project:   (params) -> params, after every step (a box, a simplex, …).
    after:     (carry, grads, params) -> carry, after every step: the objective's gradient at the old parameters, the new
               parameters (a mixing weight that is learned beside them, …).
    trainable: names of the groups that move; the others cost no gradient. Default: all.
    epochs:    a Python number, for passes that are not the Plan's; default `ctx.epochs` (at most env.max_epochs).
    optimizer: another than the run's, e.g. `env.optimizer._replace(momentum=0.0)`.
    salt:      tells the shuffles of several passes of one round apart.  track=False keeps the client's confusion.
    carry:     start of the running values of the objective or of `gradient`, if they have any: the objective is then
               called as objective(net, batch, confusion, carry); the new ones are in `Aux.carry`.
    """
    objective = objective or supervised(env, ctx)
    rule = (optimizer or env.optimizer).transform()
    lr = ctx.lr if lr is None else jnp.asarray(lr, env.dtype)
    draw = stream(env, ctx, jax.random.fold_in(ctx.key, salt), env.max_epochs if epochs is None else epochs)
    steps = steps_for(env, env.fed.size["train"][ctx.id], ctx.epochs if epochs is None else epochs)
    planned = turns(env, steps, *most_steps(env, epochs))
    rate_of = lambda k: jnp.where(k < steps, lr, 0) if planned.masked else lr  # a finished lane stands still
    frozen = {} if trainable is None else {g: p for g, p in net["params"].items() if g not in trainable}
    moving = {g: p for g, p in net["params"].items() if g not in frozen}

    step = one_step(env, Plugs(objective, gradient, adjust, project, after), rule, draw, frozen, steps, planned, rate_of)
    # the rate of a step is known before it: XLA then writes w − lr·v where it computes a gradient
    start = (moving, net["batch_stats"], rule.init(moving), client.confusion, carry, jnp.zeros(3, env.dtype), rate_of(0))
    params, stats, _, confusion, carry, (loss, hits, n), _ = repeat(planned, step, start)
    done = Trained(
        {"params": {**frozen, **params}, "batch_stats": stats},
        loss / jnp.maximum(n, 1),
        hits / jnp.maximum(n, 1),
        steps,
        carry,
    )
    if jax.tree.leaves(client.spent):
        client = client._replace(spent=client.spent + jnp.stack([steps, jnp.int32(planned.total)]))
    return (client._replace(confusion=confusion) if track else client), done


def upload(env: Env, ctx: Ctx, done: Trained, weights: str = "size", **more) -> Upload:
    """The usual upload of ONE client: its trained net, weighted by its data (`size`) or equally (`uniform`)."""
    weight = env.fed.size["train"][ctx.id].astype(env.dtype) if weights == "size" else jnp.ones((), env.dtype)
    return Upload(done.net, weight, loss=done.loss, accuracy=done.accuracy, **more)
