"""pFedRLLA: no global model; each participant's next model is a mixture of its own and of the previous participants' models.

K': the m participants of the previous round (round 1: this round's); e: embeddings of heads (`encoder`); part by part

    body     Ψ_k ← ρ_k Ψ_k + Σ_{K'} ρ_j Ψ_j,    ρ_j = n_j / (n_k + Σ_{K'} n_j)            convolutions
    state    s_k = (e_{k'_1}, …, e_{k'_m}, e_k)                                           128 (m + 1) numbers
    head     Φ_k ← p_k Φ_k + Σ_{K'} p_j Φ_j,    (p_{k'_1}, …, p_{k'_m}, p_k) = A_k = μ(s_k)    all fully connected layers
    reward   β1 r1 + β2 r2 + β3 r3 of the mixture on validation rows, before training     (`reward`)
    client   w_k ← SGD_E((Ψ_k, Φ_k)), uploaded; K' ← this round's participants

One DDPG agent with a softmax actor serves all clients; episodes have one step. A previous participant that failed to report
is masked: its logit, its size and its similarity count nothing. Before round 1 every client trains E epochs from the common
start (not counted as a round). Models are read from the clients' stored rows, m of them per round. When agent and encoder
learn, and what pre-training is: `regimes`. A model of fully connected layers only is all head.

Ablations of the paper, as (body, head): None (mean, mean), Body (weighted, mean), Head (mean, agent), Both (weighted,
agent), DRL (agent, agent). Where neither part asks the agent there is none, nor an encoder.

Wire: |w| down, |w| up (a part with the rule local: 0).  State: w_k (the resident model), the projected head [L, 1024]; in
the regime scratch a second model.  Evaluated: w_k (personal = resident); before local training (BP): --probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_sim.hooks import Method, resident_net
from fedjax_sim.local import descend, upload
from fedjax_sim.local.score import accuracy, predict_net, score_rows
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.methods.pfedrlla.control import Report, Server, diagnostics, make_control, make_plan, usable
from fedjax_sim.methods.pfedrlla.encoder import RATE, follow, make_frame, no_frame, placed
from fedjax_sim.methods.pfedrlla.regimes import Own, compared
from fedjax_sim.methods.pfedrlla.reward import preferred
from fedjax_sim.methods.pfedrlla.settings import Settings
from fedjax_sim.plans import mix, with_own_statistics
from fedjax_sim.tree import square_norm
from fedjax_sim.types import Array, Client, Cohort, Ctx, Env, Plan, Real, Tree, Upload

FIRST = 2000  # tells the shuffles before round 1 from those of training
VAL_ROWS = 128  # validation rows scored at once, at most


def val_accuracy(env: Env, net: Tree, ctx: Ctx) -> Array:
    """Of ONE client, in as few and as even pieces as possible: every row of padding is paid for twice a round."""
    rows, n = env.fed.rows["val"][ctx.id], env.fed.size["val"][ctx.id]
    pieces = max(1, -(-rows.shape[0] // VAL_ROWS))
    return accuracy(score_rows(env, lambda x: predict_net(env, net, x), rows, n, -(-rows.shape[0] // pieces)))


def pfedrlla(
    regime: str = "auto",
    body: str = "auto",
    head: str = "agent",
    head_layers: str = "all_fc",
    beta1: Real = 1.0,
    beta2: Real = 1.0,
    beta3: Real = 2.0,
    acc_tar: Real = 1.0,
    acc_pre: str = "before",
    r3: str = "paper",
    reward_baseline: bool = False,
    initial_training: bool = True,
    random_rounds: int = 50,
    every: int = 0,
    basis: str = "shared",
    side: int = 32,
    embedding: int = 128,
    encoder_lr: Real = RATE,
    agent_options: Mapping[str, Any] | None = None,
) -> Method:
    """regime: auto (finetune after --start-from RUN:agent,server.encoder, else scratch), pretrain, finetune, scratch.
    body, head: how a part is mixed: weighted (data sizes), agent, even, mean (without itself), local; body=auto is
    weighted, or local in pretrain.  head_layers: all_fc, or last (the classifier alone).
    beta1, beta2, beta3: weights of the reward.  acc_tar: its target.  r3: paper or code.
    acc_pre: before (the mixture), or previous (after the client's previous mixture).
    reward_baseline: exp(acc − acc_tar) counts from its mean over the round instead of from 1.
    initial_training: every client trains before round 1.  random_rounds: an agent's first rounds, with random weights.
    every: rounds between updates of agent and encoder afterwards (0: 1 in pretrain, else 10).
    basis: what layers are projected to before they are encoded: shared (one basis per run, from the first cohort), or own
    (each head's own singular vectors, as in the paper).
    side, embedding: layers are projected to side × side, heads to `embedding` numbers.  encoder_lr: of the MHAE.
    agent_options: hyper-parameters of DDPG; on the command line --set pfedrlla.agent.noise=0.03.
    """
    values = {k: v for k, v in locals().items() if k != "agent_options"}
    s = Settings(**values, agent=tuple((agent_options or {}).items()))
    steered = s.steered

    def init(env: Env, net: Tree) -> tuple[Server, Tree]:
        m = env.cohort
        server = Server((), jnp.arange(m, dtype=jnp.int32), jnp.zeros(m, bool), ())
        if not steered:
            return server, ()
        frame: Any = ()
        if basis == "shared":
            frame = no_frame(net["params"], s.head_groups(env), side)
        own = Own(s.projected(env, net, frame), () if basis == "own" else jnp.zeros((), bool))
        if s.timing(env).regime == "scratch":
            own = own._replace(second=net, version=jnp.int32(0))
        if acc_pre == "previous":
            own = own._replace(last=jnp.zeros((), env.dtype))
        encoder = s.autoencoder(env).init(own.features.shape[0])
        return server._replace(encoder=encoder, embedded=jnp.zeros((m, embedding), env.dtype), frame=frame), own

    def setup(env: Env, server: Server, client: Client, ctx: Ctx) -> Client:
        net = with_own_statistics(env, client.resident, client)
        if initial_training:
            client, done = descend(env, net, client, ctx, salt=FIRST)
            sound = jnp.isfinite(square_norm(done.net))  # others will mix this model
            net = jax.tree.map(lambda new, old: jnp.where(sound, new, old), done.net, net)
            client = client._replace(resident=net, batch_stats=net["batch_stats"] if env.bn_local else ())
        if not steered:
            return client
        own = client.own
        if basis == "own":
            own = own._replace(features=s.projected(env, net, ()))
        if s.timing(env).regime == "scratch":
            own = own._replace(second=net)
        if acc_pre == "previous":
            own = own._replace(last=val_accuracy(env, net, ctx))
        return client._replace(own=own)

    def peers(env: Env, server: Server, ids: Array) -> Array:
        return jnp.where(server.reported.any(), server.previous, ids.astype(jnp.int32))

    def prepare(env: Env, server: Server, ids: Array, rows: Client) -> Server:
        first = ~server.reported.any()
        server = server._replace(previous=peers(env, server, ids), reported=server.reported | first)
        if not steered:
            return server
        frame, seen = server.frame, rows.own.features
        if basis == "shared":
            fresh = lambda: make_frame(rows.resident["params"], s.head_groups(env), side)
            frame, seen = lax.cond(first, fresh, lambda: (frame, seen))
        server = server._replace(frame=frame)
        return server._replace(embedded=s.embedded(env, server, seen))

    def receive(env: Env, server: Server, client: Client, plan: Plan, ctx: Ctx) -> tuple[Client, Tree]:
        return client, mix(env, plan.weights, env.rows.resident, client.resident)

    def judge(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Own, Report]:
        """The mixture `net` of ONE client, before it is trained."""
        before, after, own = compared(s.timing(env), s.body_groups(env), server.encoder.rounds, client, net)
        score = lambda net: val_accuracy(env, with_own_statistics(env, net, client), ctx)
        mixed = score(after)
        was = own.last if acc_pre == "previous" else score(before)
        own = own._replace(last=mixed) if acc_pre == "previous" else own
        seen = s.resident_features(env, server, client)
        embedded = s.embedded(env, server, seen)
        return own, Report(seen, was, mixed, preferred(embedded, server.embedded, usable(server), r3))

    def local(env: Env, net: Tree, server: Server, client: Client, ctx: Ctx) -> tuple[Client, Upload]:
        own: Any = ()
        report: Any = ()
        if steered:
            own, report = judge(env, net, server, client, ctx)
            # Always so; but training has to wait for the scores, which read the row that it will replace. Where the compiler
            # sees no order between the two it copies the rows of all clients, for each client.
            judged = (report.before >= 0) & (report.wanted[-1] >= 0)
            ctx = ctx._replace(epochs=jnp.where(judged, ctx.epochs, 0))
        client, done = descend(env, net, client, ctx)
        if steered:
            now = s.projected(env, done.net, server.frame)
            own, report = own._replace(features=now), report._replace(features=now)
            if basis == "shared":
                own = own._replace(known=jnp.ones((), bool))
        return client._replace(own=own), upload(env, ctx, done, report=report)

    def aggregate(env: Env, server: Server, cohort: Cohort) -> Server:
        server = server._replace(previous=cohort.ids.astype(jnp.int32), reported=cohort.ok)
        if not steered:
            return server
        autoencoder, encoder = s.autoencoder(env), server.encoder
        heads = jnp.where(cohort.ok[:, None, None], cohort.reports.features, 0)
        if basis == "shared":
            server = server._replace(frame=follow(server.frame, heads, cohort.ok))
        encoder = autoencoder.train(
            encoder, placed(server.frame, heads), cohort.ok & s.timing(env).encoder_due(encoder.rounds)
        )
        encoder = encoder._replace(rounds=encoder.rounds + 1)
        server = server._replace(encoder=encoder)
        return server._replace(embedded=s.embedded(env, server, heads))

    nothing = lambda env: jnp.zeros(env.cohort + 1, env.dtype)  # the action where nobody acts
    return fedavg()._replace(
        name="pfedrlla",
        init=init,
        setup=setup if steered or initial_training else None,
        setup_trains=initial_training,
        peers=peers,
        prepare=prepare,
        plan=lambda env, server, ctx: make_plan(s, env, nothing(env), server, ctx),
        receive=receive,
        local=local,
        aggregate=aggregate,
        personal=resident_net,
        global_model=None,
        control=make_control(s) if steered else None,
        log=(lambda *seen: diagnostics(s, *seen)) if steered else None,
        needs=frozenset({"resident"}),
    )
