"""ONE client's local training outside of any round.

Client 1 of the tiny federation holds three examples and a batch four: every epoch is one masked
batch with all of them, so a whole local training is known without sharing a single random draw.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from golden.stored import torch_values
from tiny import CLASSES, close, simulation

from fedjax_sim.local import VMAP_AXIS
from fedjax_sim.local.losses import init_confusion
from fedjax_sim.models import Model, from_module
from fedjax_sim.models.nets import PlainNet, plain_groups
from fedjax_sim.types import Client, Ctx

LR = 0.05  # of tiny.simulation


RNG = lambda seed=0: np.random.default_rng(seed)


def small_conv() -> Model:
    """Two convolution blocks of 2 and 3 channels, quick to compile."""
    convs, hidden = ((2, 3, 1, False), (3, 3, 1, True)), (5,)
    names, dense = plain_groups(convs, hidden)
    return from_module(
        "small",
        PlainNet(convs, hidden, CLASSES, "patches"),
        shape=(4, 4, 1),
        groups=names + dense,
        dense=dense,
        width=5,
        classes=CLASSES,
        stages=(("conv1", 2), ("conv2", 3)),
        dtype=jnp.float32,
    )


def train_one(
    name: str,
    client: int = 1,
    epochs: float = 2.0,
    loss: str = "ce",
    conv: bool = False,
    neighbour: int | None = None,
    given: dict[str, dict[str, np.ndarray]] | None = None,
    **options,
):
    """(starting net, client after, upload) of ONE client's local training, outside of any round.

    With a neighbour the two are trained side by side. Parameter groups in `given` replace the drawn
    ones.
    """
    sim = simulation(name, loss=loss, **options)
    env = sim.open(jax.device_put(sim.data))
    env = dataclasses.replace(env, model=small_conv()) if conv or name == "fedfa" else env
    net = env.model.init(jax.random.key(0))
    net["params"] |= jax.tree.map(jnp.float32, given or {})
    server, own = sim.method.init(env, net)
    row = Client(own, init_confusion(CLASSES) if env.track_confusion else ())
    ctx = Ctx(
        jnp.int32(client), jax.random.PRNGKey(5), jnp.int32(0), jnp.float32(epochs), jnp.float32(LR)
    )
    if neighbour is None:
        after, up = jax.jit(lambda row, ctx: sim.method.local(env, net, server, row, ctx))(row, ctx)
        return net, after, up
    env = dataclasses.replace(env, vmap_width=2)
    rows, both = jax.tree.map(lambda a: jnp.stack([a, a]), (row, ctx))
    many = jax.jit(
        jax.vmap(lambda row, ctx: sim.method.local(env, net, server, row, ctx), axis_name=VMAP_AXIS)
    )
    return net, *jax.tree.map(
        lambda a: a[0], many(rows, both._replace(id=jnp.array([client, neighbour])))
    )


def rows_of(client: int) -> tuple[np.ndarray, np.ndarray]:
    fed = tiny.federation()
    rows = fed.client_rows(client)
    return np.asarray(fed.x)[rows], np.asarray(fed.y)[rows]


def torch_net(name: str) -> dict[str, dict[str, np.ndarray]]:
    """{group: {leaf: array}} of one stored network: `start`, or what a training made of it in two
    steps."""
    values, out = torch_values("methods_global"), {}
    for key in (key for key in values if key.startswith(name + "/")):
        group, leaf = key.removeprefix(name + "/").split(".")
        out.setdefault(group, {})[leaf] = values[key]
    return out


def agrees(net, wanted: str, tolerance: float = 2e-5) -> bool:
    return close(net["params"], torch_net(wanted), tolerance)
