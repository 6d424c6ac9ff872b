"""The personalised methods for three rounds against golden values of plain PyTorch loops, written
from the spec alone.

`golden/baselines/README.md` says what the numbers are and how they were made. Here the engine runs
the same federation: fixed cohorts, full-batch steps, double precision. Compared within 1e-9: the
shared model after every round, what clients keep at the end, every client's personal logits after
every round, floats on the wire. Every golden number of a method is compared with something, or the
test fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.baselines import settings
from golden.baselines.settings import OPTIONS
from paths import GOLDEN_FOLDER

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.keys import PERSONAL, stage_key
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.round import contexts
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.local import gather, losses, optim
from fedjax_sim.local.score import predict_net
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedpac import mixing
from fedjax_sim.methods.pfedfda import Gaussians, surface
from fedjax_sim.types import Env

GOLDEN = np.load(GOLDEN_FOLDER / "baselines" / "values.npz")
N = len(settings.SIZES)


# ---- the driver ----------------------------------------------------------------------------------
def whole_model(state) -> dict[str, np.ndarray]:
    return flat("server", {g: state.server.net["params"][g] for g in ("fc1", "fc")})


def backbone(state) -> dict[str, np.ndarray]:
    return flat("server", {"fc1": state.server.net["params"]["fc1"]})


def nothing(state) -> dict[str, np.ndarray]:
    return {}


class Case(NamedTuple):
    """How a State of ours reads in the golden names METHOD/server/… and METHOD/client/…"""

    method: str
    options: Mapping[str, Any]
    client: Callable = nothing  # (state) -> {name: [N, …]}, at the end
    server: Callable = whole_model  # (state) -> {name in values.npz: array}, after every round
    chunk: int = 1  # clients side by side
    start: Mapping[str, Any] = MappingProxyType({})  # the extra groups' initial weights
    golden: str = ""  # name in values.npz, if not the method's
    inside: tuple[str, Callable] | None = (
        None  # (name, (cohort) -> array): what a round computes and does not keep
    )


def flat(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """{"fc": {"bias": …}} -> {"prefix/fc/bias": …}"""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "/".join([prefix, *(str(k.key) for k in path)]): np.asarray(leaf) for path, leaf in leaves
    }


def federation() -> Federation:
    x, y, rows = settings.pool()
    return Federation.from_arrays(x, y, rows, classes=settings.CLASSES, mean=0.0, std=1.0)


def built(case: Case) -> tuple[Simulation, dict]:
    """(the simulation, the initial net): the same federation, model, optimiser and cohorts as in
    PyTorch."""
    fed, method = federation(), make_method(case.method, **case.options)
    if case.inside:
        name, value = case.inside

        class Logged(type(method)):
            def log(self, env, old, server, cohort):
                return {name: value(cohort)}

        method = Logged(**case.options)
    model = models.build("mlp", fed.shape, fed.classes, hidden=(settings.WIDTH,), dtype=jnp.float64)
    size = len(settings.COHORTS[0])
    env = Env(
        model=method.extend(model),
        loss=losses.make_loss("ce", fed.classes),
        optimizer=optim.Sgd(settings.MOMENTUM, settings.DECAY),
        num_clients=N,
        cohort=size,
        batch_size=settings.BATCH,
        epochs=float(settings.EPOCHS),
        max_epochs=max(float(settings.EPOCHS), method.max_epochs),
        rounds=settings.ROUNDS,
        dtype=jnp.float64,
    )
    who = Participation(size, size, tuple(range(N)), schedule=settings.COHORTS)
    lr = optim.schedule("constant", settings.LR, settings.ROUNDS)
    sim = simulate(method, env, fed, who, Layout(case.chunk), lr=lr, evaluations=())
    net = env.model.init(jax.random.key(0))
    given = jax.tree.map(
        lambda a: jnp.asarray(a, jnp.float64), {**settings.initial(), **case.start}
    )
    return sim, {**net, "params": {**net["params"], **given}}


def personal_logits(sim: Simulation, state, data) -> jax.Array:
    """[N, R, C] of every client's own predictor on its test rows."""
    method, env = sim.method, sim.open(data)
    ctxs = contexts(
        sim.stages, sim.env, stage_key(state, PERSONAL), jnp.arange(N, dtype=jnp.int32), state.t
    )

    def one(args):
        client, ctx = args
        predictor = method.personal(env, state.server, client, ctx)
        return (method.predict or predict_net)(
            env, predictor, gather(env, env.fed.rows["test"][ctx.id], ctx.t)[0]
        )

    return jax.lax.map(one, (jax.tree.map(lambda a: a[:N], state.clients), ctxs))


@functools.cache
def played(name: str) -> tuple[dict[str, np.ndarray], Any]:
    """(our values under the golden names, the last state)."""
    case = CASES[name]
    with jax.enable_x64(True):
        sim, net = built(case)
        state, data = sim.init(0, net), sim.data
        logits = jax.jit(lambda s, d: personal_logits(sim, s, d))
        rounds, seen = [], []
        for _ in range(settings.ROUNDS):
            state, log, _, _ = sim.examine(state, data)
            inside = {case.inside[0]: np.asarray(log[case.inside[0]])} if case.inside else {}
            rounds.append(case.server(state) | inside)
            seen.append(np.asarray(logits(state, data)))
        floats, extra = np.array(sim.env.group_floats(net)), sim.method.extra_floats(sim.env, net)
        ways = zip(("taken", "sent"), ("down", "up"), extra, strict=True)
        wire = [np.asarray(log[way]) @ floats / log[count] + more for way, count, more in ways]
        ours = {key: np.stack([r[key] for r in rounds]) for key in rounds[0]}
        return {
            **ours,
            **case.client(state),
            "logits": np.stack(seen),
            "floats": np.array(wire),
        }, state


# ---- the table -----------------------------------------------------------------------------------
def own(name: str, read: Callable = lambda kept: kept) -> Callable:
    """What clients keep of their own, under client/NAME."""
    return lambda state: flat(
        f"client/{name}", jax.tree.map(lambda a: a[:N], read(state.clients.own))
    )


def resident(name: str) -> Callable:
    return lambda state: flat(f"client/{name}", state.clients.resident["params"])


def apfl(state) -> dict[str, np.ndarray]:
    return own("v", lambda kept: kept.net["params"])(state) | own("alpha", lambda kept: kept.alpha)(
        state
    )


def ala(state) -> dict[str, np.ndarray]:
    return resident("theta")(state) | flat("client/weights", state.clients.own.weights)


def fedcp_server(state) -> dict[str, np.ndarray]:
    policy = state.server.net["params"]["policy"]
    dense = dict(kernel=policy["kernel"], bias=policy["bias"])
    norm = dict(scale=policy["scale"], bias=policy["shift"])
    return whole_model(state) | flat("server", dict(cpn_dense=dense, cpn_norm=norm))


def fedcp_policy() -> dict[str, np.ndarray]:
    dense, norm = settings.policy()["cpn_dense"], settings.policy()["cpn_norm"]
    return dict(kernel=dense["kernel"], bias=dense["bias"], scale=norm["scale"], shift=norm["bias"])


def fedpac_server(state) -> dict[str, np.ndarray]:
    known = np.asarray(state.server.known).astype(float)
    return backbone(state) | {
        "server/prototypes": np.asarray(state.server.centroids),
        "server/known": known,
    }


def pfedfda_server(state) -> dict[str, np.ndarray]:
    both = state.server.net["params"]["gaussians"]
    return backbone(state) | {
        "server/mu": np.asarray(both["mean"]),
        "server/sigma": np.asarray(both["covariance"]),
    }


def mixing_of(cohort) -> jax.Array:
    """[N, N] FedPAC's α of the round."""
    reports, ids = cohort.reports, cohort.ids
    alpha = mixing(reports["variance"], reports["shares"].reshape(len(ids), -1), cohort.ok)
    return jnp.zeros((N, N)).at[ids[:, None], ids].set(alpha)


def weights_of(cohort) -> jax.Array:
    """[N] of the round's aggregation."""
    return jnp.zeros(N).at[cohort.ids].set(cohort.weights)


def chosen(method: str, *names: str, **more: Any) -> dict[str, Any]:
    return {name: OPTIONS[method][name] for name in names} | more


PARAMS = lambda kept: kept["params"]
AFFINITY = lambda state: {"server/affinity": np.asarray(state.server.affinity)}
ALA = chosen("fedala", "lr_weights", "share", "window", "threshold", "cap")
FDA_START = {"gaussians": {"mean": settings.class_means(), "covariance": np.eye(settings.WIDTH)}}
HEADS = lambda state: flat("client/head/fc", state.server.heads)
BETA = lambda state: {"client/beta": np.asarray(state.clients.own)}
CASES: dict[str, Case] = {
    "fedper": Case("fedper", {}, own("head", PARAMS), backbone),
    "fedrep": Case("fedrep", OPTIONS["fedrep"], own("head", PARAMS), backbone),
    "fedbabu": Case("fedbabu", {"ft_epochs": OPTIONS["fedbabu"]["tune_epochs"]}, nothing, backbone),
    "apfl": Case("apfl", OPTIONS["apfl"], apfl),
    "perfedavg": Case("perfedavg", OPTIONS["perfedavg"]),
    "pfedme": Case("pfedme", OPTIONS["pfedme"], own("theta", PARAMS)),
    "fedrod": Case("fedrod", OPTIONS["fedrod"], own("head/fc")),
    "fedphp": Case("fedphp", OPTIONS["fedphp"], own("p", PARAMS)),
    "fedamp": Case("fedamp", OPTIONS["fedamp"], resident("w"), nothing),
    "fedfomo": Case("fedfomo", OPTIONS["fedfomo"], resident("theta"), AFFINITY),
    "fedpac": Case("fedpac", OPTIONS["fedpac"], HEADS, fedpac_server, inside=("mixing", mixing_of)),
    "fedala": Case("fedala", ALA, ala),
    "fedala, side by side": Case("fedala", ALA, ala, chunk=3),
    "fedala_top": Case("fedala", chosen("fedala_top", *ALA, layers=1), ala, golden="fedala_top"),
    "fedas": Case(
        "fedas", chosen("fedas", "align_lr"), resident("model"), inside=("fisher", weights_of)
    ),
    "pfedfda": Case("pfedfda", chosen("pfedfda", "grid"), BETA, pfedfda_server, start=FDA_START),
    "fedcp": Case(
        "fedcp",
        chosen("fedcp", "lam", gate="soft"),
        lambda state: flat("client/head/fc", state.clients.own),
        fedcp_server,
        start={"policy": fedcp_policy()},
    ),
}

# arrays of the file that are not compared here: the numbers that follow from them are, or they have
# a test of their own
INSIDE = {
    "fedala": {"passes"},
    "fedala_top": {"passes"},
    "pfedfda": {"evaluation_beta", "evaluation_surface", "lead"},
}


@pytest.mark.parametrize("name", CASES)
def test_three_rounds(name):
    ours, _ = played(name)
    golden = CASES[name].golden or CASES[name].method
    theirs = {
        key.removeprefix(golden + "/"): GOLDEN[key]
        for key in GOLDEN.files
        if key.startswith(golden + "/")
    }
    assert set(theirs) - set(ours) == INSIDE.get(golden, set()) and set(ours) <= set(theirs)
    for key, value in ours.items():
        assert value.dtype == np.float64, key
        np.testing.assert_allclose(value, theirs[key], rtol=0, atol=1e-9, err_msg=key)
    # not two standstills
    assert not np.allclose(theirs["logits"][0], theirs["logits"][-1], atol=1e-3)


def test_the_surface_of_the_interpolation_search():
    """Two-fold losses over the whole grid, after round 3."""
    _, state = played("pfedfda")
    with jax.enable_x64(True):
        fed = federation()
        both, layer = state.server.net["params"]["gaussians"], state.server.net["params"]["fc1"]
        for k in range(N):
            rows = fed.client_rows(k)
            features = jax.nn.relu(
                fed.x[rows].reshape(len(rows), -1) @ layer["kernel"] + layer["bias"]
            )
            prior = jnp.asarray(fed.label_counts()[k] / len(rows) + 1e-4)
            grid, real = jnp.linspace(0, 1, 21), jnp.ones(len(rows), bool)
            got = surface(
                features, jnp.asarray(fed.y[rows]), real, Gaussians(**both), prior, grid, False
            )
            np.testing.assert_allclose(
                got, GOLDEN["pfedfda/evaluation_surface"][k], rtol=0, atol=1e-9
            )
