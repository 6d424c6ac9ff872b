"""Evaluation modes: which model, on whose rows, for all N clients. Scores are the metrics' sums;
the host makes figures."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine.cohort import each_client
from fedjax_sim.engine.keys import PERSONAL, SERVER, stage_key
from fedjax_sim.engine.mesh import split_rows
from fedjax_sim.engine.records import Data, Round, in_its_precision
from fedjax_sim.engine.round import contexts
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.hooks import Around, Finishes, Method, Personal
from fedjax_sim.local import score
from fedjax_sim.types import Array, Client, Ctx, Env, State, Tree

EVALUATIONS = {
    "global": "the server's model on the global test set",
    "global@clients": "the server's model on every client's own split",
    "personal": "the model that each client uses, its own or else the global one, on its own split",
    "personal@global": "each client's own model on the global test set",
    "personal@train": "the model that each client uses on its own training rows",
    "resident": (
        "each client's resident model, with nothing sent to it, as its method predicts; on its own"
        " split"
    ),
}

# modes of clients' own models
ADAPTED = ("personal", "personal@global", "personal@train", "resident")


def client_split(fed: Federation) -> str:
    """Clients are scored on their own test rows where the protocol has them, else on their
    validation rows."""
    return "test" if "test" in fed.rows else "val" if "val" in fed.rows else "train"


def check_evaluations(method: Method, evaluations: tuple[str, ...], bn_local: bool) -> None:
    """Refuse modes that do not exist, and those that this method has no model for ('global' then
    shows as a dash)."""
    own = method.ask(Personal) is not None or bn_local
    possible = {
        "global@clients": method.has_global_model,
        "personal@global": own,
        "personal@train": own,
    }
    for mode in evaluations:
        if mode not in EVALUATIONS:
            raise unknown("evaluation", mode, EVALUATIONS)
        if not possible.get(mode, True):
            lacks = (
                "it has no global model"
                if mode == "global@clients"
                else "its clients have no models of their own"
            )
            allowed = ", ".join(m for m in EVALUATIONS if possible.get(m, True))
            raise UserError(
                f"evaluation '{mode}' is not possible with method '{method.name}': {lacks};"
                f" allowed: {allowed}"
            )


# ---- the server's model --------------------------------------------------------------------------
@in_its_precision
def score_server(r: Round, env: Env, state: State, data: Data) -> dict[str, Tree]:
    """What is measured with the server's model, {mode: {metric: {name: sums}}}: of a set, or [N, …]
    per client."""
    out: dict[str, Tree] = {}
    method = env.method
    if not method.has_global_model:
        return out
    net = method.global_model(env, state.server)
    last = method.ask(Finishes)
    if last is not None:  # the final model, computed once
        done = lambda: last.finish(env, state.server, stage_key(state, SERVER))
        net = lax.cond(state.t >= env.rounds, done, lambda: net)
    sets = (
        [name for name in ("test", "val") if name in env.fed.server_rows]
        if "global" in r.evaluations
        else []
    )
    same = method.ask(Personal) is None and not env.bn_local
    clients = "global@clients" in r.evaluations or (same and "personal" in r.evaluations)
    wanted = [env.fed.server_rows[name] for name in sets] + ([data.flat_rows] if clients else [])
    if not wanted:
        return out
    # all rows in one pass: a model is compiled once, not once per set
    edges = np.cumsum([0, *(len(rows) for rows in wanted)]).tolist()
    found = row_by_row(r, env, net, jnp.concatenate(wanted))
    parts = [
        jax.tree.map(lambda a, one=one: a[slice(*one)], found) for one in itertools.pairwise(edges)
    ]
    for i, name in enumerate(sets):
        out["global" if name == "test" else name] = score.counted(
            jax.tree.map(lambda a: a.sum(0), parts[i]), jnp.asarray(len(wanted[i]), env.dtype)
        )
    if clients:
        found = score.by_owner(parts[-1], data.flat_owner, env.num_clients)
        out["global@clients"] = score.counted(found, env.fed.size[r.split].astype(env.dtype))
    if same and "personal" in r.evaluations:
        out["personal"] = out["global@clients"]
    return out


def row_by_row(r: Round, env: Env, net: Tree, rows: Int[Array, " examples"]) -> score.Scores:
    """{metric: {name: [R, …]}} of one net, the rows shared out over the devices."""

    def fn(everywhere: tuple, rows: Int[Array, " examples"]) -> score.Scores:
        env, net = everywhere
        return score.score_each_row(env, lambda x: score.predict_net(env, net, x), rows)

    return split_rows(r.layout, fn, (env, net), rows)


# ---- the clients' models -------------------------------------------------------------------------
@in_its_precision
def score_stored(
    r: Round, env: Env, state: State, who: Int[Array, " some_clients"], adapting: bool = False
) -> dict[str, Tree]:
    """What is measured client by client on the stored clients, which are `who` [B]: sums [B,
    …].

    adapting: the models of methods that fine-tune at evaluation, and only these.
    """
    out: dict[str, Tree] = {}
    own = own_model(env)
    if own is not None and own.adapts == adapting:
        for mode in ("personal", "personal@global"):
            if mode in r.evaluations:
                out[mode] = score_each(r, env, state, who, own_model, mode == "personal@global")
        if "personal@train" in r.evaluations:
            out["personal@train"] = score_each(r, env, state, who, own_model, False, "train")
    if "resident" in r.evaluations and holder(env).adapts == adapting:
        own = holder(env)
        same = (
            type(own).personal is Personal.personal
            and type(own).resident is Personal.resident
            and "personal" in out
        )
        out["resident"] = out["personal"] if same else score_each(r, env, state, who, holder, False)
    return out


def after_training(r: Round, env: Env, state: State, who: Int[Array, " some_clients"]) -> Ctx:
    """[B] contexts of clients when they are scored: fine-tuning uses the rate of the last
    round trained."""
    last = jnp.maximum(state.t - 1, 0)
    return contexts(r, env, stage_key(state, PERSONAL), who, state.t, trained=last)


class CommonModel(Personal):
    """A client's model is the global one, with its own BatchNorm statistics where these stay with
    it."""

    def personal(self, env: Env, server: Tree, client: Client, ctx: Ctx) -> Tree:
        return env.method.global_model(env, server)


def own_model(env: Env) -> Personal | None:
    """What a client predicts with: the method, where it is `Personal`."""
    own = env.method.ask(Personal)
    return CommonModel() if own is None and env.method.has_global_model and env.bn_local else own


def holder(env: Env) -> Personal:
    """How a client predicts with what it holds: as its method says, else with the plain net."""
    return env.method.ask(Personal) or Personal()


def adapted_modes(method: Method, evaluations: tuple[str, ...]) -> tuple[str, ...]:
    """The evaluations that train (fine-tuning), which are made at --personal-every and at the end
    only."""
    return tuple(mode for mode in evaluations if mode in ADAPTED) if method.adapts else ()


def with_own_statistics(env: Env, server: Tree, client: Client) -> Tree:
    """The server's state as ONE client uses it: its net with the client's BatchNorm statistics,
    where these stay local."""
    if isinstance(server, Around):
        return server._replace(inner=with_own_statistics(env, server.inner, client))
    if not env.bn_local or not hasattr(server, "net"):
        return server
    return server._replace(net={**server.net, "batch_stats": client.batch_stats})


def score_each(
    r: Round,
    env: Env,
    state: State,
    who: Int[Array, " some_clients"],
    model_of: Callable[[Env], Any],
    on_global: bool,
    split: str = "",
) -> score.Scores:
    """Each client's own predictor, on its own rows (of `split`) or on the global test set.
    model_of: (env) -> Personal."""

    def fn(env: Env, server: Tree, client: Client, ctx: Ctx) -> tuple[Tree, None]:
        own = model_of(env)
        make = own.resident if model_of is holder else own.personal
        predictor = make(env, with_own_statistics(env, server, client), client, ctx)
        logits = lambda x: own.predict(env, predictor, x)
        if on_global:
            rows = env.fed.server_rows["test"]
            return (
                score.score_rows(env, logits, rows, jnp.int32(rows.shape[0]), score.EVAL_BATCH),
                None,
            )
        return score.score_client(env, logits, ctx, split or r.split), None

    ctxs = after_training(r, env, state, who)
    return each_client(env, r.layout, fn, state.server, state.clients, ctxs)[0]
