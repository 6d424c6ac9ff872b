"""Sizes of a prepared run (memory, bytes, steps) from shapes alone. Numbers only; `cli.describe` tells them to people."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedjax_sim.plans import BYTES_PER_PARAMETER
from fedjax_sim.runner.prepare import Setup
from fedjax_sim.types import Ctx


def tree_bytes(tree: Any) -> int:
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def facts(setup: Setup) -> dict[str, Any]:
    """Sizes of a run from shapes alone; nothing is computed."""
    sim, config = setup.simulation, setup.config
    env, method, fed = sim.env, sim.method, setup.fed
    net = jax.eval_shape(lambda: setup.net)
    server, client = sim.shapes(net)
    per_client = tree_bytes(client)
    state = per_client * env.num_clients + tree_bytes(server)
    lanes = min(sim.layout.chunk * sim.layout.devices, env.cohort)
    x = jax.ShapeDtypeStruct((env.batch_size, *fed.shape), env.dtype)
    mask = jax.ShapeDtypeStruct((env.batch_size,), bool)

    def residuals(net, x, mask):  # what the backward pass keeps from the forward pass
        features = lambda p: env.model.head(
            {**net, "params": p}, env.model.features({**net, "params": p}, x, train=True, mask=mask)[0]
        )
        return jax.vjp(features, net["params"])[1]

    lane = tree_bytes(jax.eval_shape(residuals, net, x, mask)) + 5 * tree_bytes(net)
    data = tree_bytes(jax.eval_shape(lambda: (fed.x, fed.y)))
    steps = np.asarray(fed.size["train"])[list(setup.participation.seen)]
    per_epoch = -(-steps // env.batch_size)
    needed = np.maximum(np.round(env.epochs * per_epoch), 1).mean()
    needed *= (setup.participation.low + setup.participation.high) / 2
    extra = method.extra_floats(env, setup.net)
    floats = env.group_floats(setup.net)
    if method.plan is not None:
        # a plan may be drawn at random: the mean over some draws
        start = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), server)
        number = lambda v: np.asarray(v, env.dtype)
        key = lambda i: jax.random.key_data(jax.random.key(i))
        ctx = lambda i: Ctx(np.int32(0), key(i), np.int32(0), number(env.epochs), number(config.lr))
        draws = [method.plan(env, start, ctx(i)) for i in range(24)]
        take, send = (np.mean([np.asarray(getattr(p, side)) > 0 for p in draws], 0) for side in ("take", "send"))
    else:
        take = send = np.ones(len(floats))
    several = setup.participation.high
    return dict(
        floats=dict(zip(env.model.groups, floats, strict=True)),
        parameters=sum(floats),
        per_client=per_client,
        client_state=per_client * env.num_clients,
        state=state,
        data=data,
        lanes=lanes,
        lane=lane,
        peak=state
        + data * sim.layout.devices
        + lanes * lane
        + tree_bytes(net) * (2 * sim.layout.devices)
        + (several * per_client if sim.layout.devices > 1 else 0),
        down=BYTES_PER_PARAMETER * several * (float(np.asarray(floats) @ take) + extra[0]),
        up=BYTES_PER_PARAMETER * several * (float(np.asarray(floats) @ send) + extra[1]),
        steps=float(needed),
        controlled=method.control is not None,
    )
