"""What a State predicts with: the common net, ONE client's own predictor, and their logits for raw
images."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.evaluation import own_model, with_own_statistics
from fedjax_sim.engine.keys import PERSONAL, SERVER, stage_key
from fedjax_sim.engine.round import contexts
from fedjax_sim.engine.simulation import Simulation
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Finishes, Personal
from fedjax_sim.local import score
from fedjax_sim.platform import floats, multiplying, run_once
from fedjax_sim.types import Client, State, Tree


def without_clients(state: State) -> State:
    return layouts.as_numpy(state._replace(clients=Client()))


def global_net(sim: Simulation, state: State) -> Tree:
    """The common net as it is evaluated: after the last planned round the one that the method hands
    over."""
    if not sim.method.has_global_model:
        raise UserError(
            f"method '{sim.method.name}' has no global model; ask for a client's own with client=k"
        )

    def make(state: State, data: Any) -> Tree:
        env = sim.open(data)
        last = env.method.ask(Finishes)
        if last is not None and done:
            return last.finish(env, state.server, stage_key(state, SERVER))
        return env.method.global_model(env, state.server)

    state = without_clients(state)
    done = int(state.t) >= sim.env.rounds
    with floats(sim.env.dtype):
        return layouts.as_numpy(run_once(multiplying(sim.stages.precision, make), state, sim.data))


def check_client(sim: Simulation, client: Any) -> int:
    clients = sim.env.num_clients
    if (
        isinstance(client, bool)
        or not isinstance(client, (int, np.integer))
        or not 0 <= client < clients
    ):
        raise UserError(f"there is no client {client!r}; allowed: 0 to {clients - 1}")
    return int(client)


def personal(sim: Simulation, state: State, client: int) -> Tree:
    """ONE client's own predictor, as evaluation uses it: a net, or what the method's `predict`
    reads.

    Methods that fine-tune at evaluation train here, at the rate of the last round. Without models
    of their own clients have the global one.
    """
    client = check_client(sim, client)
    r = sim.stages
    if own_model(sim.described) is None:
        return global_net(sim, state)

    def make(state: State, row: Client, data: Any) -> Tree:
        env, last = sim.open(data), jnp.maximum(state.t - 1, 0)
        ctxs = contexts(
            r, env, stage_key(state, PERSONAL), jnp.array([client]), state.t, trained=last
        )
        ctx = jax.tree.map(lambda a: a[0], ctxs)
        own = own_model(env)
        assert own is not None
        return own.personal(env, with_own_statistics(env, state.server, row), row, ctx)

    row = jax.tree.map(lambda a: np.asarray(a[client]), state.clients)
    with floats(sim.env.dtype):
        return layouts.as_numpy(
            run_once(multiplying(r.precision, make), without_clients(state), row, sim.data)
        )


def normalised(fed: Federation, x: np.ndarray, dtype: Any) -> np.ndarray:
    """Raw images [B, H, W, C] as training sees them: (x · scale − mean) / std."""
    if len(fed.shape) == 1:
        if x.shape[1:] != fed.shape or x.min(initial=0) < 0:
            raise UserError(
                f"x has tokens {x.shape[1:]}, but '{fed.name}' has {fed.shape}, whole numbers from"
                " 0 up"
            )
        return x.astype(np.int32)
    kind = "uint8 (0 to 255)" if fed.x.dtype == np.uint8 else "floating point"
    if (x.dtype == np.uint8) != (fed.x.dtype == np.uint8):
        raise UserError(
            f"x is {x.dtype}, but the images of '{fed.name}' are {kind}; give them as they are in"
            " the dataset"
        )
    if x.shape[1:] != fed.shape:
        raise UserError(f"x has images {x.shape[1:]}, but those of '{fed.name}' are {fed.shape}")
    return ((x * np.asarray(fed.scale) - np.asarray(fed.mean)) / np.asarray(fed.std)).astype(dtype)


def logits(sim: Simulation, predictor: Tree, x: np.ndarray, own: bool) -> np.ndarray:
    """[B, classes] of normalised images, a block at a time; own: the predictor is a client's, not
    the global net."""
    theirs = own and own_model(sim.described) is not None

    def predict(predictor: Tree, x: Any, data: Any) -> Any:
        env = sim.open(data)
        return ((own_model(env) if theirs else None) or Personal()).predict(env, predictor, x)

    run = jax.jit(multiplying(sim.stages.precision, predict))
    size = min(score.EVAL_BATCH, max(1, len(x)))
    blocks = [x[i : i + size] for i in range(0, len(x), size)]
    pad = lambda block: np.pad(block, ((0, size - len(block)), *[(0, 0)] * (x.ndim - 1)))
    with floats(sim.env.dtype):
        return np.concatenate(
            [np.asarray(run(predictor, pad(b), sim.data))[: len(b)] for b in blocks]
        )
