"""Sizes of a prepared run (memory, bytes, steps) from shapes alone. Numbers only; `cli.describe`
tells them to people."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.data import memory
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Peers
from fedjax_sim.local.score import counted, predict_net, sums_of
from fedjax_sim.models import batch_of
from fedjax_sim.runner.prepare import Setup, in_its_floats
from fedjax_sim.types import Array, Ctx, Tree

MB = 10**6
# What a process holds beside its arrays, chosen by hand for runs of the command line on a CPU that
# compile afresh (a program from the cache needs 150 to 700 MB less). Estimate ÷ measured peak:
# lenet5 with fedavg 1.00, scaffold 0.98, fedpolicy 0.96; mlp with fedavg 0.98; cnn4 with ditto
# 1.01. Of runs that the numbers were not chosen for: lenet5 with fedper 1.03, apfl 1.07; cnn4 with
# fedprox 0.91, fedrep 0.95; ditto with 1,000 clients 1.07; fedpam with cnn4 0.78 to 0.86.
RUNTIME = (
    390 * MB
    # Python, JAX and XLA with nothing in them, the command line, and the tables of a small
    # federation
)
SAVED = 256 * MB  # of the state are copied at once for a checkpoint
PROGRAM = 95 * MB  # the compiler's workspace and the compiled rounds
PER_GROUP = 45 * MB  # and what each group of parameters adds to them
PER_CONVOLUTION = 30 * MB  # … more, if it is a convolution
WITH_MODELS = (
    200 * MB
)  # clients that keep a model each: it is read, changed and written in the program
WITH_AGENT = 450 * MB  # an agent and its updates: the program is more than twice as long
IN_A_STEP = (
    3  # times what the backward pass keeps: its gradients, and the unfolded inputs of convolutions
)
MOST_STEPS = 2**31 - 1  # counters of steps, rounds and batches are 32-bit


def tree_bytes(tree: Any) -> int:
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


@in_its_floats
def facts(setup: Setup) -> dict[str, Any]:
    """Sizes of a run from shapes alone; nothing is computed."""
    sim, config = setup.simulation, setup.config
    env, method, fed = sim.env, sim.method, setup.fed
    net = jax.eval_shape(lambda: setup.net)
    server, client = sim.shapes(net)
    per_client = tree_bytes(client)
    agent = sim.agent()
    controller = (
        tree_bytes(jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0))))
        if agent
        else 0
    )
    state = per_client * env.num_clients + tree_bytes(server) + controller
    lanes = min(sim.layout.chunk * sim.layout.devices, env.cohort)
    lane = lane_bytes(setup, net)
    data = tree_bytes(jax.eval_shape(lambda: (fed.x, fed.y)))
    steps = np.asarray(fed.size["train"])[list(setup.participation.seen)]
    per_epoch = -(-steps // env.batch_size)
    needed = np.maximum(np.round(env.epochs * per_epoch), 1).mean()
    needed *= (setup.participation.low + setup.participation.high) / 2
    wire = method.wire(env, setup.net)
    floats = env.group_floats(setup.net)
    take, send = mean_masks(setup, server)
    several = setup.participation.high
    ids = jax.ShapeDtypeStruct((several,), np.int32)
    copied = 0  # bytes of the rows that a round reads beside the cohort's
    if (reader := method.ask(Peers)) is not None:
        peers = jax.eval_shape(
            lambda d, s, i: reader.peer_ids(sim.open(d), s, i), sim.data, server, ids
        )
        copied = per_client * peers.shape[0]
    per_round = 4 * (
        20 + 4 * len(floats) + (4 * several if config.probe else 0)
    )  # a row of the log
    scored = len(config.evaluations) * env.num_clients * tree_bytes(sums_shape(setup))
    logs = sim.most_rounds * per_round + sim.capacity * scored
    wide = [
        g for g in net["params"].values() if any(len(leaf.shape) > 2 for leaf in jax.tree.leaves(g))
    ]
    program = PROGRAM + PER_GROUP * len(floats) + PER_CONVOLUTION * len(wide)
    program += (WITH_MODELS if per_client >= tree_bytes(net) else 0) + (WITH_AGENT if agent else 0)
    return dict(
        runtime=RUNTIME,
        program=program,
        logs=logs,
        floats=dict(zip(env.model.groups, floats, strict=True)),
        parameters=sum(floats),
        per_client=per_client,
        client_state=per_client * env.num_clients,
        state=state,
        data=data,
        lanes=lanes,
        lane=lane,
        peak=RUNTIME
        + program
        + logs
        + state * (2 if sim.layout.devices > 1 else 1)  # made in one place, then shared out
        + data * sim.layout.devices
        + min(state, SAVED)
        + lanes * lane
        + copied * sim.layout.devices
        + tree_bytes(net) * (2 * sim.layout.devices)
        + (several * per_client if sim.layout.devices > 1 else 0),
        down=several * (float(np.asarray(wire.down) @ take) + wire.beside_down) / 8,
        up=several * (float(np.asarray(wire.up) @ send) + wire.beside_up) / 8,
        steps=float(needed),
        controlled=agent is not None,
    )


def lane_bytes(setup: Setup, net: Tree) -> int:
    """What training ONE client takes beside its state: what the backward pass keeps, gradients, the
    optimiser's memory."""
    env = setup.simulation.env
    x = batch_of(setup.fed.shape, env.batch_size, env.dtype)
    mask = jax.ShapeDtypeStruct((env.batch_size,), bool)

    def residuals(net, x, mask):  # what the backward pass keeps from the forward pass
        features = lambda p: env.model.head(
            {**net, "params": p},
            env.model.features({**net, "params": p}, x, train=True, mask=mask)[0],
        )
        return jax.vjp(features, net["params"])[1]

    return IN_A_STEP * tree_bytes(jax.eval_shape(residuals, net, x, mask)) + 5 * tree_bytes(net)


def mean_masks(setup: Setup, server: Tree) -> tuple[np.ndarray, ...]:
    """([G], [G]) how often a group goes down and up: a plan may be drawn at random, so the mean
    over some draws."""
    sim = setup.simulation
    start = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), server)
    number = lambda v: np.asarray(v, sim.env.dtype)
    key = lambda i: jax.random.key_data(jax.random.key(i))
    rates: Any = number(sim.env.epochs), number(setup.config.lr)
    none: Any = np.int32(0)
    ctx = lambda i: Ctx(none, key(i), none, *rates)
    draws = [sim.method.plan(sim.open(sim.data), start, ctx(i)) for i in range(24)]
    return tuple(
        np.mean([np.asarray(getattr(p, side)) > 0 for p in draws], 0) for side in ("take", "send")
    )


def sums_shape(setup: Setup) -> Tree:
    """Shapes of the metrics' sums of one model on some rows."""
    env, fed = setup.simulation.env, setup.fed

    def some(net: Tree, y: Array) -> Tree:
        like = batch_of(fed.shape, 1, env.dtype)
        x = jnp.zeros(like.shape, like.dtype)
        one = jnp.ones(1, env.dtype)
        return counted(sums_of(env.metrics, predict_net(env, net, x), y, one), one[0])

    return jax.eval_shape(some, setup.net, np.asarray(fed.y[:1]))


def check_counters(setup: Setup) -> None:
    """Refuse what 32-bit counters cannot hold."""
    env, size = setup.simulation.env, int(np.asarray(setup.fed.size["train"]).max())
    counted = {
        n: getattr(setup.config, n)
        for n in ("rounds", "eval_every", "personal_every", "checkpoint_every")
    }
    for name, value in {**counted, "batch_size": env.batch_size}.items():
        if value > MOST_STEPS:
            raise UserError(
                f"{name.replace('_', '-')} {value} is too large; allowed: {MOST_STEPS} or less"
            )
    steps = float(env.max_epochs) * -(-size // env.batch_size)
    if steps > MOST_STEPS:
        most = MOST_STEPS // -(-size // env.batch_size)
        raise UserError(
            f"epochs {env.max_epochs:g} are too many steps for the largest client; allowed: {most}"
            " or less"
        )


def check_reach(setup: Setup) -> None:
    """Refuse, before anything is allocated, what 32-bit counters or this machine's memory cannot
    hold."""
    check_counters(setup)
    if jax.default_backend() != "cpu":
        # the arrays are in the accelerator's memory, whose size nobody can ask for beforehand
        return
    sizes = facts(setup)
    memory.refuse_if_too_large(
        int(sizes["peak"] - sizes["runtime"]),  # the runtime is there already
        f"this run ({setup.config.method}, {setup.fed.num_clients} clients, model"
        f" {setup.simulation.env.model.name})",
        "use fewer clients, a smaller model, batch, chunk or eval-every, or state-on host",
    )
