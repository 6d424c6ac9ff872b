"""pFedRLLA: no global model; each participant's next model is a mixture of its own and of the
previous participants' models.

K' are the m participants of the previous round (in round 1 those of this round), e embeddings of
heads. Part by part:

    body     Ψ_k ← ρ_k Ψ_k + Σ_{K'} ρ_j Ψ_j,    ρ_j = n_j / (n_k + Σ_{K'} n_j)      convolutions
    state    s_k = (e_{k'_1}, …, e_{k'_m}, e_k)                                  128 (m + 1) numbers
    head     Φ_k ← p_k Φ_k + Σ_{K'} p_j Φ_j,    (p_{k'_1}, …, p_{k'_m}, p_k) = A_k = μ(s_k),
             all fully connected layers
    reward   β1 r1 + β2 r2 + β3 r3 of the mixture on validation rows, before training     (`reward`)
    client   w_k ← SGD_E((Ψ_k, Φ_k)), uploaded; K' ← this round's participants

One DDPG agent with a softmax actor serves all clients; episodes have one step. It is shown K' in
the order of their similarity to the client (cosines of embeddings), so that its weights do not
depend on the order in which a cohort was drawn (`agents.ranked`); the paper leaves that order open.
A previous participant that failed to report is masked, with its logit, its size and its similarity.

Before round 1 every client trains E epochs from the common start; this is not counted as a round.
The models of K' are read from the clients' states. `pfedrlla/regimes.py` explains when
agent and encoder learn, and what pre-training is. A model without convolutions is all head.

Other rules for heads, beside the paper's data sizes and agent: similarity; the classes that clients
share (an oracle: the server knows all labels); mirror descent on the client's validation loss
(`gradient`); and two small controllers that learn without DDPG (`bandit`, `pairs`).

Ablations of the paper, as (body, head): None (mean, mean), Body (weighted, mean), Head (mean,
agent), Both (weighted, agent), DRL (agent, agent). If neither part asks the agent, there is no
agent and no encoder.

Wire: |w| down, |w| up (a part with the rule local: 0).  State: w_k (the resident model), the
projected head [L, 1024]; in the regime scratch a second model.  Evaluated: w_k (personal =
resident); before local training (BP): --probe.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.hooks import Peers, Personal, SetsUp
from fedjax_sim.local import local_sgd
from fedjax_sim.local.score import merit
from fedjax_sim.methods import register
from fedjax_sim.methods.pfedrlla.by_model import by_gradient, by_similarity, cosines, pieces
from fedjax_sim.methods.pfedrlla.control import Mixer, Report, Server, make_plan, need_val, usable
from fedjax_sim.methods.pfedrlla.encoder import follow, make_frame, no_frame, placed
from fedjax_sim.methods.pfedrlla.mixing import HEADS_ALONE
from fedjax_sim.methods.pfedrlla.regimes import Own, compared
from fedjax_sim.methods.pfedrlla.reward import preferred
from fedjax_sim.methods.pfedrlla.trials import Trials
from fedjax_sim.plans import mix, part, with_own_statistics
from fedjax_sim.tree import square_norm
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Tree, Upload

FIRST = 2000  # tells the shuffles before round 1 from those of training


def val_accuracy(env: Env, net: Tree, ctx: Ctx) -> Array:
    """Of ONE client."""
    rows, n = env.fed.rows["val"][ctx.id], env.fed.size["val"][ctx.id]
    return merit(env, net, rows, n, pieces(rows.shape[0]))


@register("pfedrlla")
class PFedRLLA(Peers, Personal, SetsUp, Trials, Mixer):
    """An agent mixes each client's head from previous participants' heads.

    body, head: how a part is mixed: weighted (data sizes), agent, even, mean (without itself),
    local, similarity, same_classes; the head also by gradient, bandit or pairs.
    """

    has_global_model = False
    needs = frozenset({"resident"})

    @property
    def setup_trains(self) -> bool:  # type: ignore[override]
        return self.initial_training

    def init(self, env: Env, net: Tree) -> tuple[Server, Tree]:
        m = env.cohort
        if self.head.startswith("gradient"):
            need_val(env, "pfedrlla.head=gradient descends on")
        server = Server((), jnp.arange(m, dtype=jnp.int32), jnp.zeros(m, bool), ())
        if self.learned:
            need_val(env, f"pfedrlla.head={self.head} is scored on")
            return self.learned_init(env, server)
        if not self.steered:
            return server, ()
        frame: Any = ()
        if self.basis == "shared":
            frame = no_frame(net["params"], self.head_groups(env), self.side)
        own = Own(
            self.projected(env, net, frame), () if self.basis == "own" else jnp.zeros((), bool)
        )
        if self.timing(env).regime == "scratch":
            own = own._replace(second=net, version=jnp.int32(0))
        if self.acc_pre == "previous":
            own = own._replace(last=jnp.zeros((), env.dtype))
        if self.target == "following":
            server = server._replace(target=-jnp.ones((), env.dtype))
        encoder = self.autoencoder(env).init(own.features.shape[0])
        return (
            server._replace(
                encoder=encoder, embedded=jnp.zeros((m, self.embedding), env.dtype), frame=frame
            ),
            own,
        )

    def setup(self, env: Env, server: Server, client: Client, ctx: Ctx) -> Client:
        net = with_own_statistics(env, client.resident, client)
        if self.initial_training:
            client, done = local_sgd(env, net, client, ctx, salt=FIRST)
            sound = jnp.isfinite(square_norm(done.net))  # others will mix this model
            net = jax.tree.map(lambda new, old: jnp.where(sound, new, old), done.net, net)
            client = client._replace(
                resident=net, batch_stats=net["batch_stats"] if env.bn_local else ()
            )
        if not self.steered:
            return client
        own = client.own
        if self.basis == "own":
            own = own._replace(features=self.projected(env, net, ()))
        if self.timing(env).regime == "scratch":
            own = own._replace(second=net)
        if self.acc_pre == "previous":
            own = own._replace(last=val_accuracy(env, net, ctx))
        return client._replace(own=own)

    def peer_ids(self, env: Env, server: Server, ids: Array) -> Array:
        return jnp.where(server.reported.any(), server.previous, ids.astype(jnp.int32))

    def prepare(self, env: Env, server: Server, ids: Array, peers: Client) -> Server:
        first = ~server.reported.any()
        server = server._replace(
            previous=self.peer_ids(env, server, ids), reported=server.reported | first
        )
        if not self.steered:
            return server
        frame, seen = server.frame, peers.own.features
        if self.basis == "shared":
            fresh = lambda: make_frame(peers.resident["params"], self.head_groups(env), self.side)
            if "server.frame" in env.started:  # the agent knows its heads in another run's frame
                fresh = lambda: (
                    frame,
                    jax.vmap(lambda net: self.projected(env, net, frame))(peers.resident),
                )
            frame, seen = lax.cond(first, fresh, lambda: (frame, seen))
        server = server._replace(frame=frame)
        return server._replace(embedded=self.embedded(env, server, seen))

    def receive(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> tuple[Client, Tree]:
        client = self.with_trial(env, server, client, ctx) if self.learned else client
        weights = self.weights_by_model(env, server, client, plan, ctx)
        return client, mix(env, weights, env.peers.resident, client.resident)

    def weights_by_model(
        self, env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx
    ) -> Array:
        """[G, m+1] the plan's weights of ONE client, with those that follow from models."""
        rules, weights, may = self.rules(env), plan.weights, usable(server)
        groups, peers, own = self.head_groups(env), env.peers.resident, client.resident
        heads = part(peers, groups), part(own, groups)
        similar = {rule.p for rule in rules if rule.name == "similarity"}
        if similar:
            alike = cosines(env, *heads, may)
            found = {p: by_similarity(p, alike, may) for p in similar}
            weights = jnp.stack(
                [
                    found[rule.p] if rule.name == "similarity" else row
                    for rule, row in zip(rules, weights, strict=True)
                ]
            ).astype(env.dtype)
        best = None
        if self.learned:
            alike = cosines(env, *heads, may)
            best = self.learned_weights(env, server, client, alike, ctx)
        for steps in {rule.p for rule in rules if rule.name == "gradient"}:
            net = with_own_statistics(env, mix(env, weights, peers, own), client)
            best = by_gradient(env, net, *heads, may, int(steps), ctx)
        if best is None:
            return weights
        in_head = jnp.array([rule.name in HEADS_ALONE for rule in rules])
        return jnp.where(in_head[:, None], best, weights)

    def judge(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Own, Report]:
        """The mixture `net` of ONE client, before it is trained."""
        before, after, own = compared(
            self.timing(env), self.body_groups(env), server.encoder.rounds, client, net
        )
        score = lambda net: val_accuracy(env, with_own_statistics(env, net, client), ctx)
        mixed = score(after)
        was = own.last if self.acc_pre == "previous" else score(before)
        own = own._replace(last=mixed) if self.acc_pre == "previous" else own
        seen = self.resident_features(env, server, client)
        embedded = self.embedded(env, server, seen)
        return own, Report(
            seen, was, mixed, preferred(embedded, server.embedded, usable(server), self.r3)
        )

    def local(
        self, env: Env, net: Tree, server: Server, client: Client, ctx: Ctx
    ) -> tuple[Client, Upload]:
        own: Any = ()
        report: Any = ()
        if self.steered:
            own, report = self.judge(env, net, server, client, ctx)
            # Always so; but training has to wait for the scores, which read the row that it will
            # replace. Where the compiler sees no order between the two it copies the rows of all
            # clients, for each client.
            judged = (report.before >= 0) & (report.wanted[-1] >= 0)
            ctx = ctx._replace(epochs=jnp.where(judged, ctx.epochs, 0))
        client, done = local_sgd(env, net, client, ctx)
        if self.learned:
            own, report = self.score_trial(env, done.net, client, ctx)
        if self.steered:
            now = self.projected(env, done.net, server.frame)
            own, report = own._replace(features=now), report._replace(features=now)
            if self.basis == "shared":
                own = own._replace(known=jnp.ones((), bool))
        return client._replace(own=own), self.upload(env, ctx, done, report=report)

    def aggregate(self, env: Env, server: Server, cohort: Cohort) -> Server:
        server = server._replace(previous=cohort.ids.astype(jnp.int32), reported=cohort.ok)
        if self.learned:
            return self.learn_heads(server, cohort)
        if not self.steered:
            return server
        autoencoder, encoder = self.autoencoder(env), server.encoder
        heads = jnp.where(cohort.ok[:, None, None], cohort.reports.features, 0)
        if self.basis == "shared":
            server = server._replace(frame=follow(server.frame, heads, cohort.ok))
        encoder = autoencoder.train(
            encoder,
            placed(server.frame, heads),
            cohort.ok & self.timing(env).encoder_due(encoder.rounds),
        )
        encoder = encoder._replace(rounds=encoder.rounds + 1)
        server = server._replace(encoder=encoder, target=self.followed(server, cohort))
        return server._replace(embedded=self.embedded(env, server, heads))

    def log(self, env: Env, old: Server, server: Server, cohort: Cohort) -> dict[str, Array]:
        if self.learned:
            return self.log_trials(env, server)
        return super().log(env, old, server, cohort)

    def plan(self, env: Env, server: Server, ctx: Ctx) -> Plan:
        nothing = jnp.zeros(env.cohort + 1, env.dtype)  # the action where nobody acts
        return make_plan(self, env, nothing, server, ctx)
