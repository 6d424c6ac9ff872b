"""The options of pFedRLLA, checked, and what follows from them for a model and a run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax import lax

from fedjax_sim.errors import UserError, lookup
from fedjax_sim.methods.controllers import check_agent
from fedjax_sim.methods.pfedrlla.encoder import BASES, RATE, Functions, features, mhae, placed
from fedjax_sim.methods.pfedrlla.mixing import RULES
from fedjax_sim.methods.pfedrlla.regimes import REGIMES, Schedule, schedule
from fedjax_sim.methods.pfedrlla.reward import FORMS
from fedjax_sim.types import Array, Client, Env, Real, Tree, concrete

HEADS = ("all_fc", "last")
BEFORE = ("before", "previous")
SCHEDULED = ("random_rounds", "update_every")  # of the agent: the encoder keeps step with them


@dataclasses.dataclass(frozen=True)
class Settings:
    """See `pfedrlla` for what they mean."""

    regime: str = "auto"
    body: str = "auto"
    head: str = "agent"
    head_layers: str = "all_fc"
    beta1: Real = 1.0
    beta2: Real = 1.0
    beta3: Real = 2.0
    acc_tar: Real = 1.0
    acc_pre: str = "before"
    r3: str = "paper"
    reward_baseline: bool = False
    initial_training: bool = True
    random_rounds: int = 50
    every: int = 0
    basis: str = "shared"
    side: int = 32
    embedding: int = 128
    encoder_lr: Real = RATE
    agent: tuple[tuple[str, Any], ...] = ()  # options of DDPG

    def __post_init__(self) -> None:
        check(self)

    @property
    def body_rule(self) -> str:
        if self.body != "auto":
            return self.body
        return "local" if self.regime == "pretrain" else "weighted"

    @property
    def steered(self) -> bool:
        """Whether an agent is asked at all."""
        return "agent" in (self.body_rule, self.head)

    def head_groups(self, env: Env) -> tuple[str, ...]:
        return env.model.dense if self.head_layers == "all_fc" else (env.model.head_group,)

    def body_groups(self, env: Env) -> tuple[str, ...]:
        return tuple(g for g in env.model.groups if g not in self.head_groups(env))

    def rules(self, env: Env) -> list[str]:
        """[G] how each parameter group is mixed."""
        return [self.head if g in self.head_groups(env) else self.body_rule for g in env.model.groups]

    def timing(self, env: Env) -> Schedule:
        return schedule(env, self.regime, self.random_rounds, self.every)

    def autoencoder(self, env: Env) -> Functions:
        return mhae(self.side, self.embedding, self.encoder_lr, env.dtype)

    def projected(self, env: Env, net: Tree, frame: Any) -> Array:
        """[L, side²] of ONE net."""
        return features(net["params"], self.head_groups(env), self.side, frame).astype(env.dtype)

    def embedded(self, env: Env, server: Any, seen: Array) -> Array:
        """[..., E] of projected heads [..., L, side²]."""
        return self.autoencoder(env).embed(server.encoder, placed(server.frame, seen))

    def resident_features(self, env: Env, server: Any, client: Client) -> Array:
        """[L, side²] of ONE client's model between two participations; projected where it has not been."""
        own: Any = client.own
        if self.basis == "own":
            return own.features
        return lax.cond(own.known, lambda: own.features, lambda: self.projected(env, client.resident, server.frame))


def check(s: Settings) -> None:
    for name, allowed in (
        ("regime", REGIMES),
        ("body", ("auto", *RULES)),
        ("head", tuple(RULES)),
        ("head_layers", HEADS),
        ("acc_pre", BEFORE),
        ("r3", FORMS),
        ("basis", BASES),
    ):
        lookup(f"{name} of pfedrlla", getattr(s, name), dict.fromkeys(allowed))
    for name in ("beta1", "beta2", "beta3", "acc_tar"):
        if concrete(getattr(s, name)) and not 0 <= getattr(s, name) < math.inf:
            raise UserError(f"pfedrlla.{name}={getattr(s, name):g} is not allowed; use 0 or more")
    if concrete(s.encoder_lr) and not 0 < s.encoder_lr < math.inf:
        raise UserError(f"pfedrlla.encoder_lr={s.encoder_lr:g} is not allowed; use a number above 0")
    for name, least, most in (("random_rounds", 0, 2**30), ("every", 0, 2**30), ("side", 2, 256), ("embedding", 1, 4096)):
        if not least <= getattr(s, name) <= most:
            raise UserError(f"pfedrlla.{name}={getattr(s, name)} is not allowed; use {least} to {most}")
    given = dict(s.agent)
    for name, ours in zip(SCHEDULED, ("random_rounds", "every"), strict=True):
        if name in given:
            raise UserError(f"agent.{name} is set by pfedrlla.{ours}, which the encoder follows too; use that")
    check_agent("pfedrlla", "ddpg", ("ddpg",), given)
    if s.steered:
        return
    free = ("body", "head", "head_layers", "initial_training")
    for field in dataclasses.fields(s):
        value = getattr(s, field.name)
        if field.name not in free and not isinstance(value, jax.Array) and value != field.default:
            raise UserError(
                f"pfedrlla.{field.name} is the agent's, and body={s.body_rule}, head={s.head} ask no agent; "
                f"leave it out, or use head=agent"
            )
