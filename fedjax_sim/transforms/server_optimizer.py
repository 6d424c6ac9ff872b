"""Adaptive federated optimisation (Reddi et al., 2021; Hsu et al., 2019): the mean update as a
gradient.

    g = Θ − Θ⁺            Θ⁺: what the method would have made of the round
    Θ ← Θ + u,            u = −lr · rule(g), a transformation of optax with its state on the server

rule sgd with lr 1 is the method itself up to rounding. momentum: v ← β₁ v + g (FedAvgM). adam,
yogi, adagrad: with β₁, β₂ and the adaptivity τ as optax has them (Adam and Yogi correct their bias,
which the paper's pseudo-code does not). Only parameters step; BatchNorm's running statistics are
the mean's. The server's other state is the method's own. Wire: the method's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.errors import UserError
from fedjax_sim.fields import Real, field
from fedjax_sim.transforms import register_transform
from fedjax_sim.transforms.base import Transform
from fedjax_sim.types import Cohort, Env, Tree

RULES = ("sgd", "momentum", "adam", "yogi", "adagrad")


@register_transform("server_optimizer")
class ServerOptimizer(Transform):
    """The server steps along the mean update by a rule of optax."""

    rule: str = field("sgd", choices=RULES)
    lr: Real = field(1.0, ge=0, help="the server's learning rate")
    beta1: Real = field(0.9, ge=0, le=1, help="β₁ of momentum, Adam and Yogi")
    beta2: Real = field(0.99, ge=0, le=1, help="β₂ of Adam and Yogi")
    tau: Real = field(1e-3, gt=0, help="adaptivity of Adam, Yogi and Adagrad")

    def check(self) -> None:
        super().check()
        if not self.inner.has_global_model:
            raise UserError(
                f"transform '{self.name}' steps from a common model, and method '{self.inner.name}'"
                " has none; allowed: a method with a global model"
            )

    @property
    def rule_of_optax(self) -> optax.GradientTransformation:
        return {
            "sgd": optax.identity,
            "momentum": lambda: optax.trace(decay=self.beta1),
            "adam": lambda: optax.scale_by_adam(self.beta1, self.beta2, eps=self.tau),
            "yogi": lambda: optax.scale_by_yogi(self.beta1, self.beta2, eps=self.tau),
            "adagrad": lambda: optax.scale_by_rss(initial_accumulator_value=0.0, eps=self.tau),
        }[self.rule]()

    def begin_server(self, env: Env, net: Tree) -> Tree:
        return self.rule_of_optax.init(net["params"])

    def step(self, env: Env, mine: Tree, old: Any, new: Any, cohort: Cohort) -> tuple[Tree, Any]:
        params, mean = (self.inner.global_model(env, server)["params"] for server in (old, new))
        slope = jax.tree.map(jnp.subtract, params, mean)
        change, mine = self.rule_of_optax.update(slope, mine, params)
        stepped = jax.tree.map(lambda w, u: (w - self.lr * u).astype(w.dtype), params, change)
        return mine, with_params(new, stepped)


def with_params(server: Any, params: Tree) -> Any:
    """A server's state with other parameters of its common net, however deep it lies."""
    if hasattr(server, "inner"):
        return server._replace(inner=with_params(server.inner, params))
    return server._replace(net={**server.net, "params": params})


@register_transform("fedavgm")
class FedAvgM(ServerOptimizer):
    """server_optimizer with momentum."""

    rule: str = field("momentum", choices=RULES)


@register_transform("fedadam")
class FedAdam(ServerOptimizer):
    """server_optimizer with Adam."""

    rule: str = field("adam", choices=RULES)
    lr: Real = field(0.01, ge=0, help="the server's learning rate")


@register_transform("fedyogi")
class FedYogi(ServerOptimizer):
    """server_optimizer with Yogi."""

    rule: str = field("yogi", choices=RULES)
    lr: Real = field(0.01, ge=0, help="the server's learning rate")


@register_transform("fedadagrad")
class FedAdagrad(ServerOptimizer):
    """server_optimizer with Adagrad."""

    rule: str = field("adagrad", choices=RULES)
    lr: Real = field(0.01, ge=0, help="the server's learning rate")
