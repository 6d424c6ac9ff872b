"""FedAMP, FedFomo, FedPAC, FedALA, FedAS, pFedFDA and FedCP for three rounds against plain PyTorch loops, to 1e-9.

The values are in `golden/baselines/values.npz`; its README says what every method does there. Fixed cohorts, full
batches, float64: the shared model after every round, what clients keep at the end, the logits of every client's own
predictor on its test rows after every round, and the floats on the wire.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.baselines import settings

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.layout import Layout
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.round import PERSONAL, contexts, stage_key
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.local import gather, losses, optim
from fedjax_sim.local.score import predict_net
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedpac import mixing
from fedjax_sim.methods.pfedfda import Gaussians, surface
from fedjax_sim.types import Env

GOLDEN = np.load(pathlib.Path(settings.__file__).parent / "values.npz")
N = len(settings.SIZES)


# ---- the driver ---------------------------------------------------------------------------------------------------
class Case(NamedTuple):
    method: str
    options: dict[str, Any]
    server: Callable  # (state) -> {name in values.npz: array}, after every round
    client: Callable  # (state) -> {name: [N, …]}, at the end
    chunk: int = 1  # clients side by side
    start: Mapping[str, Any] = MappingProxyType({})  # the extra groups' initial weights
    golden: str = ""  # name in values.npz, if not the method's
    inside: tuple[str, Callable] | None = None  # (name, (cohort) -> array): what a round computes and does not keep


def flat(prefix: str, tree: dict) -> dict[str, np.ndarray]:
    """{"fc": {"bias": …}} -> {"prefix/fc/bias": …}"""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join([prefix, *(str(k.key) for k in path)]): np.asarray(leaf) for path, leaf in leaves}


def federation() -> Federation:
    x, y, rows = settings.pool()
    return Federation.from_arrays(x, y, rows, classes=settings.CLASSES, mean=0.0, std=1.0)


def built(case: Case) -> tuple[Simulation, dict]:
    """(the simulation, the initial net)."""
    method = make_method(case.method, **case.options)
    if case.inside:
        name, value = case.inside

        class Logged(type(method)):
            def log(self, env, old, server, cohort):
                return {name: value(cohort)}

        method = Logged(**case.options)
    model = models.build("mlp", settings.SHAPE, settings.CLASSES, hidden=(settings.WIDTH,), dtype=jnp.float64)
    model = method.extend(model)
    env = Env(
        model,
        losses.make_loss("ce", settings.CLASSES),
        optim.Sgd(settings.MOMENTUM, settings.DECAY),
        N,
        len(settings.COHORTS[0]),
        settings.BATCH,
        float(settings.EPOCHS),
        float(settings.EPOCHS),
        rounds=settings.ROUNDS,
        dtype=jnp.float64,
    )
    size = len(settings.COHORTS[0])
    sim = simulate(
        method,
        env,
        federation(),
        Participation(size, size, tuple(range(N)), schedule=settings.COHORTS),
        Layout(case.chunk),
        lr=optim.schedule("constant", settings.LR, settings.ROUNDS),
        evaluations=(),
    )
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), {**settings.initial(), **case.start})
    return sim, {"params": params, "batch_stats": {}}


def personal_logits(sim: Simulation, state, data) -> jax.Array:
    """[N, R, C] of every client's own predictor on its test rows."""
    method, env = sim.method, sim.open(data)
    ctxs = contexts(sim.stages, sim.env, stage_key(state, PERSONAL), jnp.arange(N), state.t)
    predict = method.predict or predict_net

    def one(args):
        client, ctx = args
        predictor = method.personal(env, state.server, client, ctx)
        return predict(env, predictor, gather(env, env.fed.rows["test"][ctx.id], ctx.t)[0])

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
        floats = np.array(sim.env.group_floats(net))
        extra = sim.method.extra_floats(sim.env, net)
        members = len(settings.COHORTS[0])
        wire = [np.asarray(log[k]) @ floats // members + extra[i] for i, k in enumerate(("taken", "sent"))]
        ours = {key: np.stack([r[key] for r in rounds]) for key in rounds[0]}
        return {**ours, **case.client(state), "logits": np.stack(seen), "floats": np.array(wire)}, state


# ---- the table ----------------------------------------------------------------------------------------------------
def net_of(*groups: str) -> Callable:
    return lambda state: flat("server", {g: state.server.net["params"][g] for g in groups or ("fc1", "fc")})


def resident(name: str) -> Callable:
    return lambda state: flat(f"client/{name}", state.clients.resident["params"])


def ala(state) -> dict[str, np.ndarray]:
    return resident("theta")(state) | flat("client/weights", state.clients.own.weights)


def fedcp_server(state) -> dict[str, np.ndarray]:
    policy = state.server.net["params"]["policy"]
    dense = dict(kernel=policy["kernel"], bias=policy["bias"])
    norm = dict(scale=policy["scale"], bias=policy["shift"])
    return net_of()(state) | flat("server", dict(cpn_dense=dense, cpn_norm=norm))


def fedcp_policy() -> dict[str, np.ndarray]:
    dense, norm = settings.policy()["cpn_dense"], settings.policy()["cpn_norm"]
    return dict(kernel=dense["kernel"], bias=dense["bias"], scale=norm["scale"], shift=norm["bias"])


def fedpac_server(state) -> dict[str, np.ndarray]:
    server = state.server
    known = np.asarray(server.known).astype(float)
    return net_of("fc1")(state) | {"server/prototypes": np.asarray(server.centroids), "server/known": known}


def pfedfda_server(state) -> dict[str, np.ndarray]:
    both = state.server.net["params"]["gaussians"]
    return net_of("fc1")(state) | {"server/mu": np.asarray(both["mean"]), "server/sigma": np.asarray(both["covariance"])}


def mixing_of(cohort) -> jax.Array:
    """[N, N] FedPAC's α of the round."""
    reports, ids = cohort.reports, cohort.ids
    alpha = mixing(reports["variance"], reports["shares"].reshape(len(ids), -1), cohort.ok)
    return jnp.zeros((N, N)).at[ids[:, None], ids].set(alpha)


def weights_of(cohort) -> jax.Array:
    """[N] of the round's aggregation."""
    return jnp.zeros(N).at[cohort.ids].set(cohort.weights)


def chosen(method: str, *names: str, **more: Any) -> dict[str, Any]:
    return {name: settings.OPTIONS[method][name] for name in names} | more


ALA = ("lr_weights", "share", "window", "threshold", "cap")
FDA_START = {"gaussians": {"mean": settings.class_means(), "covariance": np.eye(settings.WIDTH)}}
nothing = lambda state: {}

CASES: dict[str, Case] = {
    "fedamp": Case("fedamp", settings.OPTIONS["fedamp"], nothing, resident("w")),
    "fedfomo": Case(
        "fedfomo",
        settings.OPTIONS["fedfomo"],
        lambda state: {"server/affinity": np.asarray(state.server.affinity)},
        resident("theta"),
    ),
    "fedpac": Case(
        "fedpac",
        settings.OPTIONS["fedpac"],
        fedpac_server,
        lambda state: flat("client/head/fc", state.server.heads),
        inside=("mixing", mixing_of),
    ),
    "fedala": Case("fedala", chosen("fedala", *ALA), net_of(), ala),
    "fedala, lanes": Case("fedala", chosen("fedala", *ALA), net_of(), ala, chunk=3),
    "fedala_top": Case("fedala", chosen("fedala_top", *ALA, layers=1), net_of(), ala, golden="fedala_top"),
    "fedas": Case("fedas", chosen("fedas", "align_lr"), net_of(), resident("model"), inside=("fisher", weights_of)),
    "pfedfda": Case(
        "pfedfda",
        chosen("pfedfda", "grid"),
        pfedfda_server,
        lambda state: {"client/beta": np.asarray(state.clients.own)},
        start=FDA_START,
    ),
    "fedcp": Case(
        "fedcp",
        chosen("fedcp", "lam", gate="soft"),
        fedcp_server,
        lambda state: flat("client/head/fc", state.clients.own),
        start={"policy": fedcp_policy()},
    ),
}

# arrays of the file that are not compared here: the numbers that follow from them are, or they have a test of their own
INSIDE = {"fedala": {"passes"}, "fedala_top": {"passes"}, "pfedfda": {"evaluation_beta", "evaluation_surface", "lead"}}


@pytest.mark.parametrize("name", CASES)
def test_three_rounds(name):
    ours, _ = played(name)
    golden = CASES[name].golden or CASES[name].method
    theirs = {key.removeprefix(golden + "/"): GOLDEN[key] for key in GOLDEN.files if key.startswith(golden + "/")}
    assert set(theirs) - set(ours) == INSIDE.get(golden, set()) and set(ours) <= set(theirs)
    for key, value in ours.items():
        np.testing.assert_allclose(value, theirs[key], rtol=0, atol=1e-9, err_msg=key)


def test_the_surface_of_the_interpolation_search():
    """Two-fold losses over the whole grid, after round 3."""
    _, state = played("pfedfda")
    with jax.enable_x64(True):
        fed = federation()
        both, layer = state.server.net["params"]["gaussians"], state.server.net["params"]["fc1"]
        for k in range(N):
            rows = fed.client_rows(k)
            features = jax.nn.relu(fed.x[rows].reshape(len(rows), -1) @ layer["kernel"] + layer["bias"])
            prior = jnp.asarray(fed.label_counts()[k] / len(rows) + 1e-4)
            grid, real = jnp.linspace(0, 1, 21), jnp.ones(len(rows), bool)
            got = surface(features, jnp.asarray(fed.y[rows]), real, Gaussians(**both), prior, grid, False)
            np.testing.assert_allclose(got, GOLDEN["pfedfda/evaluation_surface"][k], rtol=0, atol=1e-9)
