"""Evaluation modes: which model, on whose rows, for all N clients. Scores are counts; the host makes figures of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_sim.data.federation import Federation
from fedjax_sim.engine import cohort
from fedjax_sim.engine.layout import Layout
from fedjax_sim.local import score as scoring
from fedjax_sim.types import Array, Client, Ctx, Env, Method, State, Tree

EVALUATIONS = {
    "global": "the server's model on the global test set",
    "global@clients": "the server's model on every client's own split",
    "personal": "each client's own model on its own split",
    "personal@global": "each client's own model on the global test set",
    "resident": "what each client last held, on its own split",
}


class Data(NamedTuple):
    """Everything the compiled program reads: an argument, never a constant."""

    fed: Federation
    flat_rows: Array  # [R] evaluation rows of all clients, one after another
    flat_owner: Array  # [R] whose they are
    dropout: Array  # []  chance that a participant fails to report


def client_split(fed: Federation) -> str:
    """Clients are scored on their own test rows where the protocol has them, else on their validation rows."""
    return "test" if "test" in fed.rows else "val" if "val" in fed.rows else "train"


def flatten(fed: Federation, split: str) -> tuple[np.ndarray, np.ndarray]:
    rows, size = np.asarray(fed.rows[split]), np.asarray(fed.size[split])
    real = np.arange(rows.shape[1]) < size[:, None]
    return rows[real].astype(np.int32), np.nonzero(real)[0].astype(np.int32)


class Scores(NamedTuple):
    """Evaluation as functions of (env, state, …); names of modes -> acc and loss, or correct, loss, count per client."""

    server: Callable  # (env, state, data) -> dict
    stored: Callable  # (env, state, who [B], adapting=False) -> dict; the stored rows are those of `who`


def make_scores(
    method: Method,
    env: Env,
    fed: Federation,
    layout: Layout,
    evaluations: tuple[str, ...],
    of_clients: Callable[[State, Array], Ctx],
    server_key: Callable[[State], Array],
) -> Scores:
    """of_clients gives the contexts of personal models; server_key the key of a method's `finish`."""
    predict_of = method.predict or scoring.predict_net
    split = client_split(fed)

    def score_held(here: Env, net: Tree, which: str) -> dict[str, Array]:
        rows = here.fed.held[which]
        fn = lambda net, fed, rows: scoring.hits_per_row(
            dataclasses.replace(here, fed=fed), lambda x: scoring.predict_net(here, net, x), rows
        )
        hit, loss = cohort.split_rows(layout, fn, net, here.fed, rows)
        return dict(acc=hit.mean(), loss=loss.mean())

    def own_predictor(here: Env, server: Tree, client: Client, ctx: Ctx) -> Tree:
        assert method.personal is not None
        predictor = method.personal(here, server, client, ctx)
        if here.bn_local and method.predict is None:
            predictor = {**predictor, "batch_stats": client.batch_stats}
        return predictor

    def score_personal(here: Env, state: State, who: Array, on_global: bool) -> dict[str, Array]:
        def fn(env: Env, server: Tree, client: Client, ctx: Ctx) -> tuple[Tree, None]:
            predictor = own_predictor(env, server, client, ctx)
            predict = lambda x: predict_of(env, predictor, x)
            rows = env.fed.held["test"]
            score = (
                scoring.score_rows(env, predict, rows, jnp.int32(rows.shape[0]), scoring.EVAL_BATCH)
                if on_global
                else scoring.score_client(env, predict, ctx, split)
            )
            return score, None

        return score_each(here, state, who, fn)

    def score_resident(here: Env, state: State, who: Array) -> dict[str, Array]:
        return score_each(
            here,
            state,
            who,
            lambda env, server, client, ctx: (
                scoring.score_client(env, lambda x: scoring.predict_net(env, client.resident, x), ctx, split),
                None,
            ),
        )

    def score_each(here: Env, state: State, who: Array, fn: Callable) -> dict[str, Array]:
        ctxs = of_clients(state, who)
        return cohort.each_client(here, layout, fn, state.server, state.clients, ctxs)[0]._asdict()

    def score_global_at_clients(here: Env, net: Tree, data: Data) -> dict[str, Array]:
        fn = lambda net, fed, rows: scoring.hits_per_row(
            dataclasses.replace(here, fed=fed), lambda x: scoring.predict_net(here, net, x), rows
        )
        hit, loss = cohort.split_rows(layout, fn, net, here.fed, data.flat_rows)
        add = lambda v: scoring.by_owner(v, data.flat_owner, env.num_clients)
        return dict(correct=add(hit), loss=add(loss), count=here.fed.size[split].astype(env.dtype))

    def server(here: Env, state: State, data: Data) -> dict[str, Tree]:
        """What is measured with the server's model."""
        out: dict[str, Tree] = {}
        net = method.global_model(here, state.server) if method.global_model else None
        finish = method.finish
        if finish is not None:  # the model that is handed over, made once
            net = lax.cond(state.t >= env.rounds, lambda: finish(here, state.server, server_key(state)), lambda: net)
        if net is not None and "global" in evaluations:
            out["global"] = score_held(here, net, "test")
            if "val" in fed.held:
                out["val"] = score_held(here, net, "val")
        same = method.personal is None
        if net is not None and ("global@clients" in evaluations or (same and "personal" in evaluations)):
            out["global@clients"] = score_global_at_clients(here, net, data)
        if same and "personal" in evaluations:
            out["personal"] = out["global@clients"]
        return out

    def stored(here: Env, state: State, who: Array, adapting: bool = False) -> dict[str, Tree]:
        """What is measured client by client on the stored rows, which are those of `who`."""
        own = method.personal is not None and method.adapts == adapting
        out: dict[str, Tree] = {
            name: score_personal(here, state, who, name != "personal")
            for name in ("personal", "personal@global")
            if own and name in evaluations
        }
        if "resident" in evaluations and not adapting:
            out["resident"] = score_resident(here, state, who)
        return out

    return Scores(server, stored)
