"""Sizes of a prepared run (memory, bytes, steps) from shapes alone. Numbers only; `cli.describe`
prints them."""

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
# Memory of a process beside its arrays. The numbers are fitted by hand to runs of the command line
# on a CPU that compile afresh (a program from the cache needs 150 to 700 MB less). Estimate ÷
# measured peak: lenet5 with fedavg 1.00, scaffold 0.98, fedpolicy 0.96; mlp with fedavg 0.98; cnn4
# with ditto 1.01. Runs that were not fitted: lenet5 with fedper 1.03, apfl 1.07; cnn4 with
# fedprox 0.91, fedrep 0.95; ditto with 1,000 clients 1.07; fedpam with cnn4 0.78 to 0.86.
RUNTIME = 390 * MB  # empty Python, JAX and XLA, the command line, tables of a small federation
SAVED = 256 * MB  # of the state are copied at once for a checkpoint
PROGRAM = 95 * MB  # the compiler's workspace and the compiled rounds
PER_GROUP = 45 * MB  # what each group of parameters adds to them
PER_CONVOLUTION = 30 * MB  # what it adds in addition if it is a convolution
WITH_MODELS = 200 * MB  # clients that keep a model each: the program reads and writes it
WITH_AGENT = 450 * MB  # an agent and its updates: the program is more than twice as long
IN_A_STEP = 3  # times the residuals of the backward pass: gradients, unfolded convolution inputs
MOST_STEPS = 2**31 - 1  # counters of steps, rounds and batches are 32-bit


def tree_bytes(tree: Any) -> int:
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


@in_its_floats
def facts(setup: Setup) -> dict[str, Any]:
    """Sizes of a run from shapes alone; nothing is computed."""
    sim, env = setup.simulation, setup.simulation.env
    net = jax.eval_shape(lambda: setup.net)
    server, client = sim.shapes(net)
    agent, per_client = sim.agent(), tree_bytes(client)
    key = jax.eval_shape(lambda: jax.random.key(0))
    controller = tree_bytes(jax.eval_shape(agent.init, key)) if agent else 0
    sizes = dict(
        runtime=RUNTIME,
        program=program_bytes(net, agent is not None, per_client),
        logs=log_bytes(setup),
        per_client=per_client,
        client_state=per_client * env.num_clients,
        state=per_client * env.num_clients + tree_bytes(server) + controller,
        data=tree_bytes(jax.eval_shape(lambda: (setup.fed.x, setup.fed.y))),
        side_by_side=min(sim.layout.chunk * sim.layout.devices, env.cohort),
        training=training_bytes(setup, net),
    )
    floats = env.group_floats(setup.net)
    return dict(
        **sizes,
        floats=dict(zip(env.model.groups, floats, strict=True)),
        parameters=sum(floats),
        peak=peak_bytes(setup, sizes, tree_bytes(net), peers_bytes(setup, server, per_client)),
        **traffic(setup, server),
        steps=mean_steps(setup),
        controlled=agent is not None,
    )


def peak_bytes(setup: Setup, sizes: dict[str, int], net: int, copied: int) -> int:
    """Peak memory of a process; copied: bytes of the peers' rows."""
    devices, state = setup.simulation.layout.devices, sizes["state"]
    several = devices > 1
    return (
        sizes["runtime"]
        + sizes["program"]
        + sizes["logs"]
        + state * (2 if several else 1)  # made in one place, then shared out
        + sizes["data"] * devices
        + min(state, SAVED)
        + sizes["side_by_side"] * sizes["training"]
        + (copied + 2 * net) * devices
        + (setup.participation.high * sizes["per_client"] if several else 0)
    )


def program_bytes(net: Tree, controlled: bool, per_client: int) -> int:
    groups = net["params"].values()
    wide = [g for g in groups if any(len(leaf.shape) > 2 for leaf in jax.tree.leaves(g))]
    program = PROGRAM + PER_GROUP * len(groups) + PER_CONVOLUTION * len(wide)
    models = WITH_MODELS if per_client >= tree_bytes(net) else 0
    return program + models + (WITH_AGENT if controlled else 0)


def log_bytes(setup: Setup) -> int:
    """Bytes of the buffers for log rows and scores of one segment."""
    sim, score, cohort = setup.simulation, setup.experiment.evaluation, setup.participation.high
    groups = len(sim.env.group_floats(setup.net))
    per_round = 4 * (20 + 4 * groups + (4 * cohort if score.probe else 0))
    scored = len(score.evaluations) * sim.env.num_clients * tree_bytes(sums_shape(setup))
    return sim.most_rounds * per_round + sim.capacity * scored


def peers_bytes(setup: Setup, server: Tree, per_client: int) -> int:
    """Bytes of the peers' rows that a round copies."""
    sim = setup.simulation
    if (reader := sim.method.ask(Peers)) is None:
        return 0
    ids = jax.ShapeDtypeStruct((setup.participation.high,), np.int32)
    named = lambda data, state, ids: reader.peer_ids(sim.open(data), state, ids)
    return per_client * jax.eval_shape(named, sim.data, server, ids).shape[0]


def traffic(setup: Setup, server: Tree) -> dict[str, float]:
    """Bytes of a round, down and up."""
    wire = setup.simulation.method.wire(setup.simulation.env, setup.net)
    take, send = mean_masks(setup, server)
    cohort = setup.participation.high
    return dict(
        down=cohort * (float(np.asarray(wire.down) @ take) + wire.beside_down) / 8,
        up=cohort * (float(np.asarray(wire.up) @ send) + wire.beside_up) / 8,
    )


def mean_steps(setup: Setup) -> float:
    """Local steps of a round on average, all participants together."""
    env, part = setup.simulation.env, setup.participation
    rows = np.asarray(setup.fed.size["train"])[list(part.seen)]
    each = np.maximum(np.round(env.epochs * -(-rows // env.batch_size)), 1).mean()
    return float(each * (part.low + part.high) / 2)


def training_bytes(setup: Setup, net: Tree) -> int:
    """Bytes to train ONE client beside its state: residuals of the backward pass, gradients,
    optimiser state."""
    env = setup.simulation.env
    x = batch_of(setup.fed.shape, env.batch_size, env.dtype)
    mask = jax.ShapeDtypeStruct((env.batch_size,), bool)

    def residuals(net, x, mask):
        features = lambda p: env.model.head(
            {**net, "params": p},
            env.model.features({**net, "params": p}, x, train=True, mask=mask)[0],
        )
        return jax.vjp(features, net["params"])[1]

    return IN_A_STEP * tree_bytes(jax.eval_shape(residuals, net, x, mask)) + 5 * tree_bytes(net)


def mean_masks(setup: Setup, server: Tree) -> tuple[np.ndarray, ...]:
    """([G], [G]) how often each group goes down and up: a mean over 24 draws, since plans may be
    random."""
    sim = setup.simulation
    start = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), server)
    number = lambda v: np.asarray(v, sim.env.dtype)
    key = lambda i: jax.random.key_data(jax.random.key(i))
    rates: Any = number(sim.env.epochs), number(setup.experiment.training.lr)
    none: Any = np.int32(0)
    ctx = lambda i: Ctx(none, key(i), none, *rates)
    draws = [sim.method.plan(sim.open(sim.data), start, ctx(i)) for i in range(24)]
    return tuple(
        np.mean([np.asarray(getattr(p, side)) > 0 for p in draws], 0) for side in ("take", "send")
    )


def sums_shape(setup: Setup) -> Tree:
    """Shapes of the metrics' sums of one model."""
    env, fed = setup.simulation.env, setup.fed

    def sums(net: Tree, y: Array) -> Tree:
        like = batch_of(fed.shape, 1, env.dtype)
        x = jnp.zeros(like.shape, like.dtype)
        one = jnp.ones(1, env.dtype)
        return counted(sums_of(env.metrics, predict_net(env, net, x), y, one), one[0])

    return jax.eval_shape(sums, setup.net, np.asarray(fed.y[:1]))


def check_counters(setup: Setup) -> None:
    """Refuse more steps than a 32-bit counter can hold."""
    env, size = setup.simulation.env, int(np.asarray(setup.fed.size["train"]).max())
    steps = float(env.max_epochs) * -(-size // env.batch_size)
    if steps > MOST_STEPS:
        most = MOST_STEPS // -(-size // env.batch_size)
        raise UserError(
            f"epochs {env.max_epochs:g} are too many steps for the largest client; allowed: {most}"
            " or less"
        )


def check_reach(setup: Setup) -> None:
    """Refuse, before anything is allocated, a run too large for 32-bit counters or for this
    machine's memory."""
    check_counters(setup)
    if jax.default_backend() != "cpu":  # the size of an accelerator's memory is not known here
        return
    sizes = facts(setup)
    memory.refuse_if_too_large(
        int(sizes["peak"] - sizes["runtime"]),  # the runtime is there already
        f"this run ({setup.experiment.method.name}, {setup.fed.num_clients} clients, model"
        f" {setup.simulation.env.model.name})",
        "use fewer clients, a smaller model, batch, chunk or eval-every, or state-on host",
    )
