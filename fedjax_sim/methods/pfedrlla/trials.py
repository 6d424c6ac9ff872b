"""The hooks' part of the controllers in `learned`: what a client tries, and what it scored."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.local.score import mean_loss
from fedjax_sim.methods.pfedrlla import learned
from fedjax_sim.methods.pfedrlla.control import Server, usable
from fedjax_sim.methods.pfedrlla.learned import Score, Tried
from fedjax_sim.methods.pfedrlla.settings import Settings
from fedjax_sim.plans import with_own_statistics
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Tree

TRY = 2100  # tells its draws from those of training


class Trials(Settings):
    """Of heads by `bandit` and `pairs`."""

    def learned_init(self, env: Env, server: Server) -> tuple[Server, Tried]:
        heads: Tree = learned.no_pairs(env.dtype)
        what = jnp.zeros_like(heads)
        if self.learned == "bandit":
            heads, what = learned.no_scores(env.dtype), jnp.int32(0)
        nothing = Tried(jnp.zeros((), env.dtype), jnp.zeros((), bool), what)
        return server._replace(heads=heads), nothing

    def with_trial(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Client:
        """ONE client, with what it tries in this round."""
        key = jax.random.fold_in(ctx.key, TRY)
        if self.learned == "bandit":
            what = learned.draw_arm(server.heads, key)
        elif self.has("pair_rate"):
            what = learned.TRIES * jax.random.normal(key, server.heads.shape, env.dtype)
        else:
            what = jnp.zeros_like(server.heads)
        return client._replace(own=client.own._replace(what=what))

    def learned_weights(
        self, env: Env, server: Server, client: Client, alike: Array, ctx: Ctx
    ) -> Array:
        """[m+1] for ONE client."""
        if self.learned == "bandit":
            return learned.arm_weights(client.own.what, alike, usable(server))
        sizes = env.fed.size["train"][jnp.append(server.previous, ctx.id)].astype(env.dtype)
        theta = server.heads + client.own.what
        return learned.pair_weights(theta, alike, sizes, usable(server))

    def score_trial(self, env: Env, net: Tree, client: Client, ctx: Ctx) -> tuple[Tried, Score]:
        """ONE client after training."""
        own: Tried = client.own
        rows, n = env.fed.rows["val"][ctx.id], env.fed.size["val"][ctx.id]
        loss = mean_loss(env, with_own_statistics(env, net, client), rows, n)
        after = Tried(loss, jnp.ones((), bool), own.what)
        return after, Score(own.loss - loss, own.known & (n > 0), own.what)

    def learn_heads(self, server: Server, cohort: Cohort) -> Server:
        reports: Score = cohort.reports
        use = cohort.ok & reports.use
        scores = learned.standard(reports.fell, use)
        if self.learned == "bandit":
            return server._replace(heads=learned.scored(server.heads, reports.what, scores, use))
        if not self.has("pair_rate"):
            return server
        tried = jnp.where(use[:, None], reports.what, 0)
        heads = learned.moved(server.heads, self.pair_rate, tried, scores, use)
        return server._replace(heads=heads)

    def log_trials(self, env: Env, server: Server) -> dict[str, Array]:
        """For rounds.csv: the arm of the highest mean, or how far θ is from where it began."""
        if self.learned == "bandit":
            best = jnp.argmax(server.heads.total / (server.heads.tries + 1))
            kappas, shares = (jnp.asarray(c, env.dtype) for c in zip(*learned.ARMS, strict=True))
            return dict(head_kappa=kappas[best], head_share=shares[best])
        return dict(head_moved=jnp.linalg.norm(server.heads - learned.no_pairs(env.dtype)))
