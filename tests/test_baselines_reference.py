"""The personalised baselines for three rounds against golden values of plain PyTorch loops, written from the spec alone.

`golden/baselines/README.md` says what the numbers are and how they were made. Here the engine runs the same federation:
fixed cohorts, full-batch steps, double precision. Compared within 1e-9: the shared model after every round, what clients
keep at the end, every client's personal logits after every round, floats on the wire. Every golden number of a method is
compared with something, or the test fails.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.baselines import settings
from jax import lax

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.round import PERSONAL, contexts, stage_key
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.local import gather, losses, optim
from fedjax_sim.local.score import predict_net
from fedjax_sim.methods import make_method
from fedjax_sim.types import Env, State

N = len(settings.SIZES)
GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "baselines" / "values.npz")
TOLERANCE = 1e-9


def whole_model(server: Any) -> Any:
    return server.net["params"]


def backbone(server: Any) -> Any:
    return {name: leaf for name, leaf in server.net["params"].items() if name != "fc"}


class Check(NamedTuple):
    """How a State of ours reads in the golden names METHOD/server/… and METHOD/client/…"""

    options: Mapping[str, Any]  # of our method
    kept: Callable[[Any], Any] = lambda own: {}  # clients' own state [N, …] -> tree of golden names
    server: Callable[[Any], Any] = whole_model
    start: Callable[[State], State] = lambda state: state  # where the method draws something itself


OPTIONS = settings.OPTIONS
CHECKS: dict[str, Check] = {
    "fedper": Check({}, lambda own: {"head": own["params"]}, backbone),
    "fedrep": Check(OPTIONS["fedrep"], lambda own: {"head": own["params"]}, backbone),
    "fedbabu": Check({"ft_epochs": OPTIONS["fedbabu"]["tune_epochs"]}, server=backbone),
    "apfl": Check(OPTIONS["apfl"], lambda own: {"v": own.net["params"], "alpha": own.alpha}),
    "perfedavg": Check(OPTIONS["perfedavg"]),
    "pfedme": Check(OPTIONS["pfedme"], lambda own: {"theta": own["params"]}),
    "fedrod": Check(OPTIONS["fedrod"], lambda own: {"head": {"fc": own}}),
    "fedphp": Check(OPTIONS["fedphp"], lambda own: {"p": own["params"]}),
}


# ---- the driver -------------------------------------------------------------------------------------------------
def federation() -> Federation:
    x, y, rows = settings.pool()
    return Federation.from_arrays(x, y, rows, classes=settings.CLASSES, mean=0.0, std=1.0)


def engine(name: str, options: Mapping[str, Any]) -> Simulation:
    """Our side: the same federation, model, optimiser and cohorts."""
    fed, method = federation(), make_method(name, **options)
    model = models.build("mlp", fed.shape, fed.classes, dtype=jnp.float64, hidden=(settings.WIDTH,))
    env = Env(
        model=method.extend(model),
        loss=losses.make_loss("ce", fed.classes),
        optimizer=optim.Sgd(settings.MOMENTUM, settings.DECAY),
        num_clients=N,
        cohort=len(settings.COHORTS[0]),
        batch_size=settings.BATCH,
        epochs=settings.EPOCHS,
        max_epochs=max(settings.EPOCHS, method.max_epochs),
        rounds=settings.ROUNDS,
        dtype=jnp.float64,
    )
    size = len(settings.COHORTS[0])
    everybody = Participation(size, size, tuple(range(N)), schedule=settings.COHORTS)
    return simulate(method, env, fed, everybody, lr=optim.schedule("constant", settings.LR, settings.ROUNDS), evaluations=())


def personal_logits(sim: Simulation, state: State, data: Any) -> jax.Array:
    """[N, test rows, C]: every client's personal predictor on its own test rows."""
    env, method = sim.open(data), sim.method
    ctxs = contexts(sim.stages, sim.env, stage_key(state, PERSONAL), jnp.arange(N, dtype=jnp.int32), state.t)

    def one(args):
        client, ctx = args
        predictor = method.personal(env, state.server, client, ctx)
        x, _ = gather(env, env.fed.rows["test"][ctx.id], jnp.int32(0))
        return (method.predict or predict_net)(env, predictor, x)

    return lax.map(one, (state.clients, ctxs))


def named(tree: Any, prefix: str) -> dict[str, np.ndarray]:
    """{"prefix/group/leaf": array} of nested dicts."""
    if isinstance(tree, dict):
        return {name: leaf for key, sub in tree.items() for name, leaf in named(sub, f"{prefix}/{key}").items()}
    return {prefix: np.asarray(tree)}


def ours(name: str, check: Check) -> dict[str, np.ndarray]:
    """Everything the golden file has of a method, as the engine computes it."""
    sim = engine(name, check.options)
    net = sim.env.model.init(jax.random.key(0))
    net = {**net, "params": {**net["params"], **jax.tree.map(jnp.asarray, settings.initial())}}

    @jax.jit
    def step(state: State, data: Any) -> tuple:
        state, log = sim.round(state, data)
        return state, log, personal_logits(sim, state, data)

    state, servers, logits = check.start(sim.init(0, net)), [], []
    for _ in range(settings.ROUNDS):
        state, log, scores = step(state, sim.data)
        servers.append(named(check.server(state.server), "server"))
        logits.append(np.asarray(scores))
    floats, extra = np.array(sim.env.group_floats(net)), sim.method.extra_floats(sim.env, net)
    wire = [
        np.asarray(log[way]) @ floats / log[count] + more
        for way, count, more in zip(("taken", "sent"), ("down", "up"), extra, strict=True)
    ]
    return {
        **{key: np.stack([now[key] for now in servers]) for key in servers[0]},
        **named(check.kept(jax.tree.map(lambda a: a[:N], state.clients.own)), "client"),
        "logits": np.stack(logits),
        "floats": np.array(wire),
    }


def compare(name: str, check: Check, golden: str = "", beside: tuple[str, ...] = ()) -> None:
    """Ours against the golden values of method `golden` (default: name), except those in `beside`."""
    prefix = (golden or name) + "/"
    theirs = {key.removeprefix(prefix): GOLDEN[key] for key in GOLDEN.files if key.startswith(prefix)}
    with jax.enable_x64(True):
        got = ours(name, check)
    assert set(got) == set(theirs) - set(beside)
    for key in sorted(got):
        assert got[key].dtype == np.float64
        np.testing.assert_allclose(got[key], theirs[key], rtol=0, atol=TOLERANCE, err_msg=f"{name}: {key}")
    assert not np.allclose(theirs["logits"][0], theirs["logits"][-1], atol=1e-3)  # not two standstills


@pytest.mark.parametrize("name", CHECKS)
def test_three_rounds_as_in_pytorch(name):
    compare(name, CHECKS[name])
