"""The controller's side of pFedRLLA: what the agent sees of ONE client, what its weights do, and
what they are worth."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Controlled, Kind
from fedjax_sim.methods.pfedrlla import reward as rewards
from fedjax_sim.methods.pfedrlla.mixing import Rule, overlaps, part_weights
from fedjax_sim.methods.pfedrlla.regimes import Schedule
from fedjax_sim.methods.pfedrlla.settings import Settings
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree

# gradient steps of the critic before the actor moves; a fifth in fine-tuning, where they are ten
# times rarer
HEAD_START = 250
# gradient steps of the agent per update; in the regime scratch per round that has passed since the
# last one
STEPS = 5
FADES = 0.1  # how much of a following target a round renews
STILL = 1e-3  # an entry of the embedding that varies less than this over a cohort says nothing


class Server(NamedTuple):
    encoder: Tree  # Encoder; () without an agent
    previous: Array  # [m] client numbers of K'
    reported: Array  # [m] who of them reported; nobody before round 1
    embedded: Tree  # [m, E] embeddings of K'; () without an agent
    frame: Tree = ()  # Frame, with a shared basis
    target: Tree = ()  # []  a target that follows training, below 0 before round 1
    heads: Tree = ()  # of a rule that learns without an agent: Arms, or θ [P]


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
    rules = s.rules(env)
    known = any(rule.name == "same_classes" for rule in rules)
    shared = overlaps(env.counts[who].astype(env.dtype)) if known else None
    parts = {rule: part_weights(rule, action, sizes, usable(server), shared) for rule in rules}
    travels = jnp.array([float(rule.name != "local") for rule in rules])
    return Plan(travels, travels, ctx.epochs, jnp.stack([parts[rule] for rule in rules]))


def need_val(env: Env, why: str) -> None:
    """why: who does what with validation rows."""
    if "val" not in env.fed.rows:
        raise UserError(
            f"{why} validation rows of every client and '{env.fed.name}'"
            " was split without; allowed: --protocol pfedrlla, or --val-fraction above 0"
        )


def for_the_run(timing: Schedule, size: int) -> dict[str, Any]:
    """pFedRLLA's defaults for DDPG in this run; size: m + 1 weights."""
    return dict(
        random_rounds=timing.random_rounds,
        update_every=timing.every,
        gradient_steps=STEPS * (timing.every if timing.regime == "scratch" else 1),
        critic_steps=HEAD_START // 5 if timing.regime == "finetune" else HEAD_START,
        action_scale=10.0 * size,
    )


class Mixer(Settings):
    """The hooks of the controller."""

    def ask(self, kind: type[Kind]) -> Kind | None:
        return None if kind is Controlled and not self.steered else super().ask(kind)

    def make_agent(self, env: Env) -> Any:
        from agents.ranked import Ranked

        need_val(env, "pfedrlla rewards mixtures on")
        size = env.cohort + 1
        agent = self.for_run(
            self.embedding * size, size, env, **for_the_run(self.timing(env), size)
        )
        return Ranked(inner=agent)

    def observe(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Array:
        own = self.embedded(env, server, self.resident_features(env, server, client))
        others = jnp.where(server.reported[:, None], server.embedded, 0)
        return jnp.concatenate([others.reshape(-1), own])

    def available(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Array:
        return usable(server)

    def plan_of(self, env: Env, action: Array, server: Server, ctx: Ctx) -> Plan:
        return make_plan(self, env, action, server, ctx)

    def reward_of(
        self, env: Env, old: Server, server: Server, report: Report, action: Array, ctx: Ctx
    ) -> Array:
        target = self.target_of(old, server)
        found = rewards.terms(report.mixed, report.before, action, report.wanted, target, self.r3)
        return self.beta1 * found[0] + self.beta2 * found[1] + self.beta3 * found[2]

    def target_of(self, old: Server, server: Server) -> Array | float:
        """acc_tar; following: as it was before this round, which in round 1 is that of the round
        itself."""
        return (
            self.acc_tar
            if self.target == "constant"
            else jnp.where(old.target < 0, server.target, old.target)
        )

    def followed(self, server: Server, cohort: Cohort) -> Tree:
        """Of the server after this round: a following target."""
        if self.target == "constant":
            return ()
        now = jnp.where(cohort.ok, cohort.reports.mixed, 0).sum() / jnp.maximum(cohort.count, 1)
        return jnp.where(server.target < 0, now, server.target + FADES * (now - server.target))

    def combine(
        self, env: Env, old: Server, server: Server, values: Array, cohort: Cohort
    ) -> Array:
        """With a baseline r1 = exp(acc − acc_tar) − its mean over the round, instead of − 1."""
        if not self.reward_baseline:
            return values
        gains = jnp.where(cohort.ok, jnp.exp(cohort.reports.mixed - self.target_of(old, server)), 0)
        return values + self.beta1 * (1 - gains.sum() / jnp.maximum(cohort.count, 1))

    def log(self, env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
        return diagnostics(self, env, old, server, cohort) if self.steered else {}


def diagnostics(
    s: Mixer, env: Env, old: Server, server: Server, cohort: Cohort
) -> dict[str, Array]:
    """Means over the cohort: the parts of the reward, the weights, and whether the encoder tells
    clients apart."""
    count, ok = jnp.maximum(cohort.count, 1), cohort.ok
    mean = lambda v: jnp.where(ok, v, 0).sum() / count
    action = cohort.plan.weights[:, s.rules(env).index(Rule("agent"))]  # [M, m+1]
    report = cohort.reports
    target = s.target_of(old, server)
    r1, r2, r3 = rewards.terms(report.mixed, report.before, action, report.wanted, target, s.r3)
    entropy = -jax.scipy.special.xlogy(action, action).sum(-1) / jnp.log(
        jnp.asarray(action.shape[1], env.dtype)
    )
    seen = jnp.where(ok[:, None], server.embedded, 0)  # [M, E]
    spread = jnp.sqrt(
        jnp.where(ok[:, None], jnp.square(seen - seen.sum(0) / count), 0).sum(0) / count
    )
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
        target=jnp.asarray(target, env.dtype),
        encoder_loss=server.encoder.loss,
        encoder_live=(spread > STILL).mean(dtype=env.dtype),
        embedding_cosine=jnp.where(pairs, alike, 0).sum() / jnp.maximum(pairs.sum(), 1),
    )
