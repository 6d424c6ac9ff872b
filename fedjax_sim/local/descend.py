"""Local training of ONE client: epochs of reshuffled minibatches over its rows of the pool, ragged,
with plugs.

One step is that of the run's optimiser. PyTorch's SGD, unless it names another:  g ← g + wd·w;  v ←
momentum·v + g; w ← w − lr·v. Its state (v) begins anew in every call, or stays with the client
(`--optimizer-state client`).

The loop has a data-dependent bound: a client costs what it holds. Side by side (vmap over
`env.lanes` clients) the bound is that of the longest lane, as an unbatched scalar, and a finished
lane's learning rate is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.errors import UserError
from fedjax_sim.local.batches import Batch, Turns, most_steps, repeat, steps_for, stream, turns
from fedjax_sim.local.losses import update_confusion
from fedjax_sim.local.optim import Optimizer
from fedjax_sim.models.randomness import randomness
from fedjax_sim.tasks import task_called
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


# ---- objectives ----------------------------------------------------------------------------------
def forward(
    env: Env, net: Tree, batch: Batch, *, train: bool = True, tap: Callable | None = None
) -> tuple[Array, Array, Tree]:
    """(logits [B, C], features [B, d], batch_stats) of one minibatch."""
    features, stats = env.model.features(net, batch.x, train=train, mask=batch.mask, tap=tap)
    return env.model.head(net, features), features, stats


def local_loss(
    env: Env, ctx: Ctx, logits: Array, batch: Batch, confusion: Tree
) -> tuple[Array, Tree]:
    """The run's local loss of one minibatch; the soft confusion is updated first, without
    gradient."""
    if env.track_confusion:
        confusion = update_confusion(
            confusion,
            lax.stop_gradient(logits),
            batch.y,
            batch.mask,
            env.loss.decay,
            batch_size=env.batch_size,
        )
    return env.loss.value(logits, batch.y, batch.mask, env.counts[ctx.id], confusion), confusion


def supervised(
    env: Env, ctx: Ctx, penalty: Callable[[Tree], Array] | None = None, tap: Callable | None = None
) -> Callable:
    """The default objective: the local loss of the model's logits, plus an optional penalty on the
    parameters."""

    def objective(net: Tree, batch: Batch, confusion: Tree, carry: Tree = ()) -> tuple[Array, Aux]:
        logits, _, stats = forward(env, net, batch, tap=tap)
        loss, confusion = local_loss(env, ctx, logits, batch, confusion)
        if penalty is not None:
            loss = loss + penalty(net["params"])
        return loss, Aux(logits, stats, confusion, carry)

    return objective


# ---- an optimiser's state that stays with the client ---------------------------------------------
class Used(NamedTuple):
    """The optimiser's state after the pass of a round that it served."""

    state: Tree


def begin(rule: Optimizer, client: Client, params: Tree) -> tuple[Tree, bool]:
    """(the optimiser's state that a pass begins with, whether it is the client's own)."""
    kept, fresh = client.optimizer, rule.init(params)
    if not jax.tree.leaves(kept):
        return fresh, False
    if isinstance(kept, Used):
        raise UserError(
            f"{ONE_STATE}: this method trains more than once in a round; use optimizer-state round"
        )
    like = lambda tree: (
        str(jax.tree.structure(tree)),
        [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)],
    )
    if like(kept) != like(fresh):
        raise UserError(
            f"{ONE_STATE}: this method trains some groups, two nets at once, or by an optimiser of"
            " its own; use optimizer-state round"
        )
    return kept, True


ONE_STATE = (
    "with optimizer-state client a client keeps one state, of the run's optimiser for the whole"
    " model"
)


def put_away(client: Client, had: Client) -> Client:
    """The client as it is stored; `had` is how it was before the round."""
    if not jax.tree.leaves(had.optimizer):
        return client
    if not isinstance(client.optimizer, Used):
        raise UserError(f"{ONE_STATE}: this method has no use for it; use optimizer-state round")
    return client._replace(optimizer=client.optimizer.state)


# ---- the loop ------------------------------------------------------------------------------------
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
    rule: Optimizer,
    draw: Callable[[Array], Batch],
    frozen: Tree,
    steps: Array,
    planned: Turns,
    rate_of: Callable[[Array], Array],
    stays: bool,
) -> Callable:
    """(k, carry) -> carry: the k-th step of `descend`; stays: the optimiser's state is the client's
    own."""

    def step(k: Array, carry):
        params, stats, opt_state, confusion, running, totals, rate = carry
        own = (running,) if jax.tree.leaves(running) else ()

        def value(params, batch):
            with randomness(batch.key):  # dropout inside the model
                return plugs.objective(
                    {"params": {**frozen, **params}, "batch_stats": stats}, batch, confusion, *own
                )

        grad_of = jax.value_and_grad(value, has_aux=True)
        if plugs.gradient is None:
            batch = draw(k)
            (loss, aux), grads = grad_of(params, batch)
            more = dict(
                value=loss, grad=grads, value_fn=lambda p: value(p, batch)[0]
            )  # for line searches
        else:
            (loss, aux), grads, batch = plugs.gradient(grad_of, params, k, draw, running)
            more = dict(value=loss, grad=grads)
        force = grads if plugs.adjust is None else plugs.adjust(grads, params)
        keep = (
            (lambda new, old: jax.tree.map(lambda a, b: jnp.where(k < steps, a, b), new, old))
            if planned.masked
            else (lambda new, old: new)
        )
        moved, opt_after = rule.step(force, opt_state, params, rate, **more)
        params = moved if rule.stands_still else keep(moved, params)
        opt_state = keep(opt_after, opt_state) if stays else opt_after
        if plugs.project is not None:
            params = keep(plugs.project(params), params)
        then = aux.carry if plugs.after is None else plugs.after(aux.carry, grads, params)
        seen = (
            batch.mask * (k < steps).astype(env.dtype)
            if planned.masked
            else batch.mask.astype(env.dtype)
        )
        n = seen.sum()
        hits = (task_called(env.fed.task).hits(aux.logits, batch.y) * seen).sum()
        totals = totals + jnp.stack([loss * n, hits, n])
        kept = (
            keep(aux.batch_stats, stats),
            opt_state,
            keep(aux.confusion, confusion),
            keep(then, running),
        )
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
    optimizer: Optimizer | None = None,
    lr: Array | None = None,
    salt: int = 0,
    track: bool = True,
    carry: Tree = (),
) -> tuple[Client, Trained]:
    """Training of ONE client; returns the client with its loss statistics brought up to date, and
    what was trained.

    objective: (net, batch, confusion) -> (loss, Aux); default `supervised(env, ctx)`.
    gradient:  (grad_of, params, step, draw, carry) -> ((loss, Aux), grads, batch), where
    grad_of(params, batch)
               differentiates the objective; default: one gradient on draw(step). Sharpness-aware,
               meta-learning and two-model steps plug in here.
    adjust:    (grads, params) -> grads, before weight decay and momentum (control variates,
               proximal terms).
    project:   (params) -> params, after every step (a box, a simplex, …).
    after:     (carry, grads, params) -> carry, after every step: the objective's gradient at the
               old parameters, the new
               parameters (a mixing weight that is learned beside them, …).
    trainable: names of the groups that move; the others cost no gradient. Default: all.
    epochs:    a Python number, for passes that are not the Plan's; default `ctx.epochs` (at most
    env.max_epochs). optimizer: another than the run's, e.g. `env.optimizer._replace(momentum=0.0)`.
    salt:      tells the shuffles of several passes of one round apart.  track=False keeps the
               client's confusion.
    carry:     start of the running values of the objective or of `gradient`, if they have any: the
               objective is then
               called as objective(net, batch, confusion, carry); the new ones are in `Aux.carry`.
    """
    objective = objective or supervised(env, ctx)
    rule = optimizer or env.optimizer
    lr = ctx.lr if lr is None else jnp.asarray(lr, env.dtype)
    draw = stream(
        env, ctx, jax.random.fold_in(ctx.key, salt), env.max_epochs if epochs is None else epochs
    )
    steps = steps_for(env, env.fed.size["train"][ctx.id], ctx.epochs if epochs is None else epochs)
    planned = turns(env, steps, *most_steps(env, epochs))
    at = lambda k: rule.rate(lr, k, steps, env.dtype)
    rate_of = lambda k: (
        jnp.where(k < steps, at(k), 0) if planned.masked else at(k)
    )  # a finished lane stands still
    frozen = (
        {} if trainable is None else {g: p for g, p in net["params"].items() if g not in trainable}
    )
    moving = {g: p for g, p in net["params"].items() if g not in frozen}
    opt_start, stays = begin(rule, client, moving)

    plugs = Plugs(objective, gradient, adjust, project, after)
    step = one_step(env, plugs, rule, draw, frozen, steps, planned, rate_of, stays)
    # the rate of a step is known before it: XLA then writes w − lr·v where it computes a gradient
    start = (
        moving,
        net["batch_stats"],
        opt_start,
        client.confusion,
        carry,
        jnp.zeros(3, env.dtype),
        rate_of(0),
    )
    params, stats, opt_end, confusion, carry, (loss, hits, n), _ = repeat(planned, step, start)
    trained, many = {"params": {**frozen, **params}, "batch_stats": stats}, jnp.maximum(n, 1)
    done = Trained(trained, loss / many, hits / many, steps, carry)
    if stays:
        client = client._replace(optimizer=Used(opt_end))
    if jax.tree.leaves(client.spent):
        client = client._replace(spent=client.spent + jnp.stack([steps, jnp.int32(planned.total)]))
    return (client._replace(confusion=confusion) if track else client), done


def upload(env: Env, ctx: Ctx, done: Trained, weights: str = "size", **more) -> Upload:
    """The usual upload of ONE client: its trained net, weighted by its data (`size`) or equally
    (`uniform`)."""
    weight = (
        env.fed.size["train"][ctx.id].astype(env.dtype)
        if weights == "size"
        else jnp.ones((), env.dtype)
    )
    return Upload(done.net, weight, loss=done.loss, accuracy=done.accuracy, **more)
