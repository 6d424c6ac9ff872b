"""The controller's side of pFedRLLA: what the agent sees of ONE client, what its weights do, and what they are worth."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Control
from fedjax_sim.methods.controllers import make_agent
from fedjax_sim.methods.pfedrlla import reward as rewards
from fedjax_sim.methods.pfedrlla.mixing import RULES, part_weights
from fedjax_sim.methods.pfedrlla.regimes import Schedule
from fedjax_sim.methods.pfedrlla.settings import Settings
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree

# With 1e-3 for both networks and nothing else, as published, the critic does not see the few weights beside 1,408 numbers of
# state, and the actor runs into a corner of the simplex, where a softmax has no gradient: all clients copy one model.
ALIVE = dict(lr=1e-4, critic_lr=1e-3, logit_penalty=1e-3, gamma=0.9)
HEAD_START = 250  # gradient steps of the critic before the actor moves; a fifth where updates are ten times rarer
STILL = 1e-3  # an entry of the embedding that varies less than this over a cohort says nothing


class Server(NamedTuple):
    encoder: Tree  # Encoder; () without an agent
    previous: Array  # [m] client numbers of K'
    reported: Array  # [m] who of them reported; nobody before round 1
    embedded: Tree  # [m, E] embeddings of K'; () without an agent
    frame: Tree = ()  # Frame, with a shared basis


class Report(NamedTuple):
    """What ONE client's mixture was like, and its head afterwards."""

    features: Array  # [L, side²] its projected head after training
    before: Array  # []  acc_pre
    mixed: Array  # []  acc_agg
    wanted: Array  # [m+1] V_k


def usable(server: Server) -> Array:
    """[m+1] whose models may be mixed: who reported, and the client itself."""
    return jnp.append(server.reported, True)


def make_plan(s: Settings, env: Env, action: Array, server: Server, ctx: Ctx) -> Plan:
    """Mixing weights [G, m+1], part by part; a part that stays local does not travel."""
    who = jnp.append(server.previous, ctx.id)
    sizes = env.fed.size["train"][who].astype(env.dtype)
    parts = {rule: part_weights(rule, action, sizes, usable(server)) for rule in RULES}
    rules = s.rules(env)
    travels = jnp.array([float(rule != "local") for rule in rules])
    return Plan(travels, travels, ctx.epochs, jnp.stack([parts[rule] for rule in rules]))


def ddpg_defaults(timing: Schedule, size: int) -> dict[str, Any]:
    """What pFedRLLA gives DDPG unless told otherwise; size: m + 1 weights."""
    return ALIVE | dict(
        random_rounds=timing.random_rounds,
        update_every=timing.every,
        critic_steps=HEAD_START if timing.regime == "pretrain" else HEAD_START // 5,
        action_scale=10.0 * size,
    )


def make_control(s: Settings) -> Control:
    def agent(env: Env) -> Any:
        if "val" not in env.fed.rows:
            raise UserError(
                f"pfedrlla rewards mixtures on validation rows of every client and '{env.fed.name}' was split without; "
                f"allowed: --protocol pfedrlla, or --val-fraction above 0"
            )
        size = env.cohort + 1
        return make_agent("ddpg", s.embedding * size, size, dict(s.agent), ddpg_defaults(s.timing(env), size), env.dtype)

    def observe(env: Env, server: Server, client: Client, ctx: Ctx) -> Array:
        own = s.embedded(env, server, s.resident_features(env, server, client))
        others = jnp.where(server.reported[:, None], server.embedded, 0)
        return jnp.concatenate([others.reshape(-1), own])

    def reward(env: Env, old: Server, server: Server, report: Report, action: Array, ctx: Ctx) -> Array:
        found = rewards.terms(report.mixed, report.before, action, report.wanted, s.acc_tar, s.r3)
        return s.beta1 * found[0] + s.beta2 * found[1] + s.beta3 * found[2]

    def centred(env: Env, old: Server, server: Server, values: Array, cohort: Cohort) -> Array:
        """r1 = exp(acc − acc_tar) − its mean over the round, instead of − 1."""
        gains = jnp.where(cohort.ok, jnp.exp(cohort.reports.mixed - s.acc_tar), 0)
        return values + s.beta1 * (1 - gains.sum() / jnp.maximum(cohort.count, 1))

    return Control(
        agent,
        observe,
        lambda env, action, server, ctx: make_plan(s, env, action, server, ctx),
        reward,
        available=lambda env, server, client, ctx: usable(server),
        combine=centred if s.reward_baseline else None,
    )


def diagnostics(s: Settings, env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
    """Means over the cohort: the parts of the reward, the weights, and whether the encoder tells clients apart."""
    count, ok = jnp.maximum(cohort.count, 1), cohort.ok
    mean = lambda v: jnp.where(ok, v, 0).sum() / count
    action = cohort.plan.weights[:, s.rules(env).index("agent")]  # [M, m+1]
    report = cohort.reports
    r1, r2, r3 = rewards.terms(report.mixed, report.before, action, report.wanted, s.acc_tar, s.r3)
    entropy = -jax.scipy.special.xlogy(action, action).sum(-1) / jnp.log(jnp.asarray(action.shape[1], env.dtype))
    seen = jnp.where(ok[:, None], server.embedded, 0)  # [M, E]
    spread = jnp.sqrt(jnp.where(ok[:, None], jnp.square(seen - seen.sum(0) / count), 0).sum(0) / count)
    alike = jax.vmap(lambda e: rewards.cosine(e, seen))(seen)
    pairs = ok[:, None] & ok & ~jnp.eye(ok.shape[0], dtype=bool)
    return dict(
        val_before=mean(report.before),
        val_mixed=mean(report.mixed),
        r1=mean(r1),
        r2=mean(r2),
        r3=mean(r3),
        weight_self=mean(action[:, -1]),
        weight_entropy=mean(entropy),
        encoder_loss=server.encoder.loss,
        encoder_live=(spread > STILL).mean(dtype=env.dtype),
        embedding_cosine=jnp.where(pairs, alike, 0).sum() / jnp.maximum(pairs.sum(), 1),
    )
