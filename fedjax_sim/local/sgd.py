"""Local training of ONE client: epochs of reshuffled minibatches over its rows of the pool, ragged,
with plugs.

One step is that of the run's optimiser. PyTorch's SGD, unless it names another:  g ← g + wd·w;  v ←
momentum·v + g; w ← w − lr·v. Its state (v) begins anew in every call, or stays with the client
(`--optimizer-state client`).

The loop has a data-dependent bound: a client costs what it holds. Side by side (vmap over
`env.vmap_width` clients) the bound is that of the longest, as an unbatched scalar, and a finished
client's learning rate is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from fedjax_sim.errors import UserError
from fedjax_sim.local.batches import Batch, Turns, most_steps, repeat, steps_for, stream, turns
from fedjax_sim.local.losses import update_confusion
from fedjax_sim.local.optim import Optimizer
from fedjax_sim.models.randomness import randomness
from fedjax_sim.tasks import task_called
from fedjax_sim.types import Array, Client, Count, Ctx, Env, Scalar, Tree, Upload


class Aux(NamedTuple):
    """What an objective returns beside its value."""

    logits: Float[Array, " batch *outputs"]
    batch_stats: Tree  # BatchNorm statistics after this batch
    confusion: Tree  # running soft confusion after this batch, () when not tracked
    carry: Tree = ()  # the objective's own running values after this batch; see `local_sgd`


class Trained(NamedTuple):
    net: Tree
    loss: Scalar  # mean over the examples of this training call
    accuracy: Scalar  # of the predictions made while training
    steps: Count  # steps of this client (not of the others in its chunk)
    carry: Tree = ()  # the objective's own running values at the end


# ---- objectives ----------------------------------------------------------------------------------
def forward(
    env: Env, net: Tree, batch: Batch, *, train: bool = True, tap: Callable | None = None
) -> tuple[Float[Array, " batch *outputs"], Float[Array, " batch *features"], Tree]:
    """(logits, features, batch_stats) of one minibatch."""
    features, stats = env.model.features(net, batch.x, train=train, mask=batch.mask, tap=tap)
    return env.model.head(net, features), features, stats


def local_loss(
    env: Env, ctx: Ctx, logits: Float[Array, " batch *outputs"], batch: Batch, confusion: Tree
) -> tuple[Scalar, Tree]:
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
    env: Env, ctx: Ctx, penalty: Callable[[Tree], Scalar] | None = None, tap: Callable | None = None
) -> Callable:
    """The default objective: the local loss of the model's logits, plus an optional penalty on the
    parameters."""

    def objective(net: Tree, batch: Batch, confusion: Tree, carry: Tree = ()) -> tuple[Scalar, Aux]:
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


def as_stored(client: Client, had: Client) -> Client:
    """The client as it is stored; `had` is how it was before the round."""
    if not jax.tree.leaves(had.optimizer):
        return client
    if not isinstance(client.optimizer, Used):
        raise UserError(f"{ONE_STATE}: this method has no use for it; use optimizer-state round")
    return client._replace(optimizer=client.optimizer.state)


# ---- the loop ------------------------------------------------------------------------------------
class Plugs(NamedTuple):
    """What a method changes in a step; see `local_sgd`."""

    objective: Callable
    gradient: Callable | None
    adjust: Callable | None
    project: Callable | None
    after: Callable | None


class Pass(NamedTuple):
    """One training call of ONE client, as its steps see it."""

    env: Env
    plugs: Plugs
    rule: Optimizer
    lr: Scalar
    draw: Callable[[Count], Batch]
    steps: Count  # steps of this client
    planned: Turns
    frozen: Tree  # parameter groups that do not move
    stays: bool  # the optimiser's state is the client's own

    def rate(self, k: Count | int) -> Scalar:
        """The learning rate of step k; a finished client stands still."""
        rate = self.rule.rate(self.lr, k, self.steps, self.env.dtype)
        return jnp.where(k < self.steps, rate, 0) if self.planned.masked else rate

    def keep(self, k: Count, new: Tree, old: Tree) -> Tree:
        """`new`, but `old` where the client has no step k."""
        if not self.planned.masked:
            return new
        return jax.tree.map(lambda a, b: jnp.where(k < self.steps, a, b), new, old)


class Running(NamedTuple):
    """What one step hands to the next."""

    params: Tree
    batch_stats: Tree
    optimizer: Tree
    confusion: Tree
    carry: Tree  # the objective's own running values
    totals: Float[Array, " 3"]  # sums of loss, hits and examples
    rate: Scalar  # of the coming step


def gradient_of(p: Pass, k: Count, now: Running) -> tuple[Scalar, Aux, Tree, Batch, dict[str, Any]]:
    """(loss, Aux, gradients, batch, what a line search asks for) of the k-th step."""
    own = (now.carry,) if jax.tree.leaves(now.carry) else ()

    def value(params: Tree, batch: Batch) -> tuple[Scalar, Aux]:
        net = {"params": {**p.frozen, **params}, "batch_stats": now.batch_stats}
        with randomness(batch.key):  # dropout inside the model
            return p.plugs.objective(net, batch, now.confusion, *own)

    grad_of = jax.value_and_grad(value, has_aux=True)
    if p.plugs.gradient is None:
        batch = p.draw(k)
        (loss, aux), grads = grad_of(now.params, batch)
        more: dict[str, Any] = dict(value=loss, grad=grads)
        more |= dict(value_fn=lambda params: value(params, batch)[0])
    else:
        (loss, aux), grads, batch = p.plugs.gradient(grad_of, now.params, k, p.draw, now.carry)
        more = dict(value=loss, grad=grads)
    return loss, aux, grads, batch, more


def one_step(p: Pass, k: Count, now: Running) -> Running:
    """The k-th step of `local_sgd`."""
    loss, aux, grads, batch, more = gradient_of(p, k, now)
    force = grads if p.plugs.adjust is None else p.plugs.adjust(grads, now.params)
    params, optimizer = p.rule.step(force, now.optimizer, now.params, now.rate, **more)
    params = params if p.rule.stands_still else p.keep(k, params, now.params)
    optimizer = p.keep(k, optimizer, now.optimizer) if p.stays else optimizer
    if p.plugs.project is not None:
        params = p.keep(k, p.plugs.project(params), params)
    carry = aux.carry if p.plugs.after is None else p.plugs.after(aux.carry, grads, params)
    dtype = p.env.dtype
    mask = batch.mask
    seen = mask * (k < p.steps).astype(dtype) if p.planned.masked else mask.astype(dtype)
    n = seen.sum()
    hits = (task_called(p.env.fed.task).hits(aux.logits, batch.y) * seen).sum()
    return Running(
        params,
        totals=now.totals + jnp.stack([loss * n, hits, n]),
        batch_stats=p.keep(k, aux.batch_stats, now.batch_stats),
        optimizer=optimizer,
        confusion=p.keep(k, aux.confusion, now.confusion),
        carry=p.keep(k, carry, now.carry),
        rate=p.rate(k + 1),
    )


def local_sgd(
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
    lr: Scalar | float | None = None,
    salt: Count | int = 0,
    track: bool = True,
    carry: Tree = (),
) -> tuple[Client, Trained]:
    """Training of ONE client: (the client with its loss statistics brought up to date, what was
    trained).

    objective: (net, batch, confusion) -> (loss, Aux); default `supervised(env, ctx)`.
    gradient:  (grad_of, params, step, draw, carry) -> ((loss, Aux), grads, batch), where
               grad_of(params, batch) differentiates the objective; default: one gradient on
               draw(step). Sharpness-aware, meta-learning and two-model steps plug in here.
    adjust:    (grads, params) -> grads, before weight decay and momentum (control variates,
               proximal terms).
    project:   (params) -> params, after every step (a box, a simplex, …).
    after:     (carry, grads, params) -> carry, after every step: the objective's gradient at the
               old parameters, and the new parameters (a mixing weight learned beside them, …).
    trainable: names of the groups that move; the others cost no gradient. Default: all.
    epochs:    a Python number, for passes that are not the Plan's; default `ctx.epochs`.
    optimizer: another than the run's, e.g. `env.optimizer._replace(momentum=0.0)`.
    salt:      tells the shuffles of several passes of one round apart.
    track:     False keeps the client's confusion as it was.
    carry:     running values of the objective or of `gradient`, if they have any: the objective
               is called with them as its last argument, and returns new ones in `Aux.carry`.
    """
    plugs = Plugs(objective or supervised(env, ctx), gradient, adjust, project, after)
    lr = ctx.lr if lr is None else jnp.asarray(lr, env.dtype)
    key, rule = jax.random.fold_in(ctx.key, salt), optimizer or env.optimizer
    draw = stream(env, ctx, key, env.max_epochs if epochs is None else epochs)
    steps = steps_for(env, env.fed.size["train"][ctx.id], ctx.epochs if epochs is None else epochs)
    planned = turns(env, steps, *most_steps(env, epochs))
    params = net["params"]
    frozen = {} if trainable is None else {g: params[g] for g in params if g not in trainable}
    moving = {g: params[g] for g in params if g not in frozen}
    opt_start, stays = begin(rule, client, moving)

    p = Pass(env, plugs, rule, lr, draw, steps, planned, frozen, stays)
    zeros = jnp.zeros(3, env.dtype)
    # the rate of a step is known before it: XLA then writes w − lr·v where it computes a gradient
    start = Running(
        moving, net["batch_stats"], opt_start, client.confusion, carry, zeros, p.rate(0)
    )
    end = repeat(planned, functools.partial(one_step, p), start)
    return finish(p, client, end, track)


def finish(p: Pass, client: Client, end: Running, track: bool) -> tuple[Client, Trained]:
    """(the client after its last step, what was trained)."""
    net = {"params": {**p.frozen, **end.params}, "batch_stats": end.batch_stats}
    loss, hits, n = end.totals
    many = jnp.maximum(n, 1)
    done = Trained(net, loss / many, hits / many, p.steps, end.carry)
    if p.stays:
        client = client._replace(optimizer=Used(end.optimizer))
    if jax.tree.leaves(client.spent):
        taken = jnp.stack([p.steps, jnp.int32(p.planned.total)])
        client = client._replace(spent=client.spent + taken)
    return (client._replace(confusion=end.confusion) if track else client), done


def upload(env: Env, ctx: Ctx, done: Trained, weights: str = "size", **more) -> Upload:
    """The usual upload of ONE client: its trained net, weighted by its data (`size`) or equally
    (`uniform`)."""
    weight = (
        env.fed.size["train"][ctx.id].astype(env.dtype)
        if weights == "size"
        else jnp.ones((), env.dtype)
    )
    return Upload(done.net, weight, loss=done.loss, accuracy=done.accuracy, **more)
