"""The options of pFedRLLA, checked, and what follows from them for a model and a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax

from fedjax_sim.errors import UserError
from fedjax_sim.fields import Real, field
from fedjax_sim.hooks import Method
from fedjax_sim.methods.controllers import Named, Steered
from fedjax_sim.methods.pfedrlla.encoder import BASES, RATE, Functions, features, mhae, placed
from fedjax_sim.methods.pfedrlla.mixing import HEADS_ALONE, LEARNED, RULES, Rule, read_rule
from fedjax_sim.methods.pfedrlla.regimes import REGIMES, Schedule, schedule
from fedjax_sim.methods.pfedrlla.reward import FORMS, TARGETS
from fedjax_sim.types import Array, Client, Env, Tree

HEADS = ("all_fc", "last")
BEFORE = ("before", "previous")
BODY_RULES = tuple(rule for rule in RULES if rule not in HEADS_ALONE)
SCHEDULED = ("random_rounds", "update_every")  # of the agent: the encoder keeps step with them
MANY = 2**30
# With 1e-3 for both networks and nothing else, as published, the critic does not see the few
# weights beside 1,408 numbers of state, and the actor runs into a corner of the simplex, where a
# softmax has no gradient: all clients copy one model.
ALIVE = dict(lr=1e-4, critic_lr=1e-3, logit_penalty=1e-3, gamma=0.9)
# say something without an agent, or nothing
FREE = ("body", "head", "head_layers", "initial_training", "pair_rate", "agent")


class Settings(Steered, Method):
    """The options."""

    training = (("regime", "pretrain"),)

    pair_rate: Real = field(
        0.3, ge=0, off=True, help="learning rate of head=pairs; 0: its network is fixed"
    )
    regime: str = field(
        "auto", choices=REGIMES, help="auto: finetune after --start-from, else scratch"
    )
    body: str = field(
        "auto",
        help=f"how bodies are mixed: {', '.join(BODY_RULES)}; auto: weighted, or local in pretrain",
    )
    head: str = field("agent", help=f"how heads are mixed: {', '.join(RULES)}")
    head_layers: str = field(
        "all_fc", choices=HEADS, help="all fully connected layers, or the classifier alone"
    )
    beta1: Real = field(1.0, ge=0, help="weight of r1")
    beta2: Real = field(1.0, ge=0, help="weight of r2")
    beta3: Real = field(2.0, ge=0, help="weight of r3")
    acc_tar: Real = field(1.0, ge=0, help="target accuracy of the reward, with target=constant")
    target: str = field(
        "constant", choices=TARGETS, help="acc_tar, or a running mean of the mixtures' accuracy"
    )
    acc_pre: str = field(
        "before",
        choices=BEFORE,
        help="accuracy to improve on: before mixing, or of the last mixture",
    )
    r3: str = field("paper", choices=FORMS, help="r3 as in the paper, or as in the authors' code")
    reward_baseline: bool = field(
        False, help="subtract the round's mean from exp(acc − acc_tar) instead of 1"
    )
    initial_training: bool = field(True, help="every client trains before round 1")
    random_rounds: int = field(
        50, ge=0, le=MANY, help="first rounds of an agent, with random weights"
    )
    every: int = field(
        0,
        ge=0,
        le=MANY,
        help="rounds between updates of agent and encoder (0: 1 in pretrain, else 10)",
    )
    basis: str = field(
        "shared", choices=BASES, help="one basis per run from the first cohort, or each head's own"
    )
    side: int = field(32, ge=2, le=256, help="layers are projected to side × side")
    embedding: int = field(128, ge=1, le=4096, help="length of a head's embedding")
    encoder_lr: Real = field(RATE, gt=0, help="learning rate of the MHAE")
    agent: Any = field("ddpg", help="an agent; hyper-parameters: --set pfedrlla.agent.noise=0.03")  # type: ignore[misc]

    def agents_allowed(self) -> Iterable[str]:
        return ("ddpg",)

    def agent_defaults(self, name: str) -> dict[str, Any]:
        known_later = (
            "random_rounds",
            "update_every",
            "gradient_steps",
            "critic_steps",
            "action_scale",
        )
        return ALIVE | dict.fromkeys(known_later)

    def check(self) -> None:
        read_rule("head", self.head)
        if self.body != "auto":
            read_rule("body", self.body, BODY_RULES)
        if self.learned and self.steered:
            raise UserError(
                f"pfedrlla.head={self.head} learns by itself and body=agent asks an agent; use"
                " another body, or head=agent"
            )
        if self.head != "pairs" and not isinstance(self.pair_rate, jax.Array):
            usual = {one.name: one.default for one in dataclasses.fields(self)}["pair_rate"]
            if self.pair_rate != usual:
                raise UserError(
                    f"pfedrlla.pair_rate has no effect with head={self.head}; leave it out, or use"
                    " head=pairs"
                )
        given = dict(self.agent.options) if isinstance(self.agent, Named) else {}
        for name, ours in zip(SCHEDULED, ("random_rounds", "every"), strict=True):
            if name in given:
                raise UserError(
                    f"agent.{name} is set by pfedrlla.{ours}, which the encoder follows too; use"
                    " that"
                )
        self.resolve_agent("ddpg")
        # given as an object: these are ours all the same
        agent = dataclasses.replace(self.agent, **dict.fromkeys(SCHEDULED))
        object.__setattr__(self, "agent", agent)
        if self.steered:
            return
        changed = [
            one.name
            for one in dataclasses.fields(self)
            if one.name not in FREE
            and not isinstance(value := getattr(self, one.name), jax.Array)
            and value != one.default
        ]
        for name in [*changed, *(["agent"] if given else [])]:
            raise UserError(
                f"pfedrlla.{name} is the agent's, and body={self.body_rule}, head={self.head} ask"
                " no agent; leave it out, or use head=agent"
            )

    @property
    def body_rule(self) -> str:
        if self.body != "auto":
            return self.body
        return "local" if self.regime == "pretrain" else "weighted"

    @property
    def steered(self) -> bool:
        """Whether an agent is asked at all."""
        return "agent" in (self.body_rule, self.head)

    @property
    def learned(self) -> str:
        """The rule of heads that learns without an agent, if it is one."""
        return self.head if self.head in LEARNED else ""

    @property
    def hands_over(self) -> tuple[str, ...]:
        """What acts and what it sees through; not the experience of another federation."""
        watched = ("agent.statistics",) if getattr(self.agent, "normalise", False) else ()
        framed = ("server.frame",) if self.basis == "shared" else ()
        return ("agent.learner", "agent.rounds", *watched, "server.encoder", *framed)

    def head_groups(self, env: Env) -> tuple[str, ...]:
        return env.model.dense if self.head_layers == "all_fc" else (env.model.head_group,)

    def body_groups(self, env: Env) -> tuple[str, ...]:
        return tuple(g for g in env.model.groups if g not in self.head_groups(env))

    def rules(self, env: Env) -> list[Rule]:
        """[G] how each parameter group is mixed."""
        head, body = read_rule("head", self.head), read_rule("body", self.body_rule)
        return [head if g in self.head_groups(env) else body for g in env.model.groups]

    def timing(self, env: Env) -> Schedule:
        return schedule(env, self.regime, self.random_rounds, self.every, self.hands_over)

    def autoencoder(self, env: Env) -> Functions:
        return mhae(self.side, self.embedding, self.encoder_lr, env.dtype)

    def projected(self, env: Env, net: Tree, frame: Any) -> Array:
        """[L, side²] of ONE net."""
        return features(net["params"], self.head_groups(env), self.side, frame).astype(env.dtype)

    def embedded(self, env: Env, server: Any, seen: Array) -> Array:
        """[..., E] of projected heads [..., L, side²]."""
        return self.autoencoder(env).embed(server.encoder, placed(server.frame, seen))

    def resident_features(self, env: Env, server: Any, client: Client) -> Array:
        """[L, side²] of ONE client's model between two participations; projected where it has not
        been."""
        own: Any = client.own
        if self.basis == "own":
            return own.features
        return lax.cond(
            own.known,
            lambda: own.features,
            lambda: self.projected(env, client.resident, server.frame),
        )
