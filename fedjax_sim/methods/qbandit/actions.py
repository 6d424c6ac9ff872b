"""What an action stands for: a depth and a number of epochs, from menus, by a fixed policy, or cut
to the budgets."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from fedjax_sim.errors import UserError
from fedjax_sim.methods.qbandit.budgets import LEAST_EPOCHS, MOST_EPOCHS, Budgets
from fedjax_sim.options import at_least, at_most, convert, real, shown
from fedjax_sim.types import Array, Env

MENU = "0.01,0.1,0.5,1,2,5"
CONTROLS = {"joint": ("layers", "epochs"), "layers": ("layers",), "epochs": ("epochs",)}


def read_menu(menu: Any) -> tuple[float, ...]:
    """Choices of epochs, ascending: text with commas, or numbers.

    >>> read_menu("0.5, 1"), read_menu((1, 2))
    ((0.5, 1.0), (1.0, 2.0))
    """
    items = menu if isinstance(menu, (tuple, list)) else str(menu).split(",")
    number = at_least(LEAST_EPOCHS, at_most(MOST_EPOCHS, real))
    found = tuple(convert("an entry of qbandit.menu,", str(item).strip(), number) for item in items)
    if not found or list(found) != sorted(set(found)):
        raise UserError(
            f"qbandit.menu '{shown(str(menu))}' is not allowed; use ascending epochs such as {MENU}"
        )
    return found


def check_depths(depths: tuple[int, ...], env: Env) -> tuple[int, ...]:
    """The choices of depth: those given, or every depth of the model."""
    most = env.num_groups
    if list(depths) != sorted(set(depths)) or not all(1 <= d <= most for d in depths):
        raise UserError(
            f"qbandit.depths {'x'.join(map(str, depths))} is not allowed; model '{env.model.name}'"
            f" has {most} parameter groups, use ascending depths from 1 to {most} joined by x"
        )
    return depths or tuple(range(1, most + 1))


def prefix(env: Env, depth: Array) -> Array:
    """[G] 1 for the first `depth` groups."""
    return (jnp.arange(env.num_groups) < depth).astype(env.dtype)


def largest(menu: Array, limit: Array) -> Array:
    """The largest entry of an ascending menu that is within a limit; the first one where none
    is."""
    return menu[jnp.maximum((menu <= limit).sum() - 1, 0)]


class Actions(NamedTuple):
    """Flat actions: all pairs of a depth and a number of epochs, the epochs varying fastest."""

    policy: str  # full and compliant do not ask the action; every other name does
    steers: tuple[str, ...]  # of layers, epochs: what the agent decides
    depths: tuple[int, ...]  # () for all of the model's
    menu: tuple[float, ...]  # of epochs
    clip: bool

    def choices(self, env: Env) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """(depths, epochs) that an action chooses from; what it does not decide is as in FedAvg."""
        return (
            check_depths(self.depths, env) if "layers" in self.steers else (env.num_groups,),
            self.menu if "epochs" in self.steers else (env.epochs,),
        )

    def order(self, env: Env, action: Array, most: Budgets) -> Budgets:
        """ONE client with the budgets `most`: (E_k, L_k)."""
        depths, menu = self.choices(env)
        layers, epochs = jnp.asarray(depths, jnp.int32), jnp.asarray(menu, env.dtype)
        if self.policy == "full":
            budgets = Budgets(jnp.asarray(env.epochs, env.dtype), jnp.int32(env.num_groups))
        elif self.policy == "compliant":
            budgets = Budgets(largest(epochs, most.epochs), largest(layers, most.layers))
        else:
            budgets = Budgets(epochs[action % len(epochs)], layers[action // len(epochs)])
        if (
            self.clip or self.policy == "compliant"
        ):  # where nothing of the menu is within budget, the budget itself
            budgets = budgets._replace(
                **{
                    word: jnp.minimum(getattr(budgets, word), getattr(most, word))
                    for word in self.steers
                }
            )
        return budgets

    def excess(self, env: Env, most: Budgets) -> dict[str, Array]:
        """{layers, epochs: [A]} how far each action is beyond the budgets `most` of ONE client."""
        depths, menu = self.choices(env)
        layers = jnp.maximum(jnp.asarray(depths, env.dtype) - most.layers, 0)
        epochs = jnp.maximum(jnp.asarray(menu, env.dtype) - most.epochs, 0)
        return dict(layers=jnp.repeat(layers, len(menu)), epochs=jnp.tile(epochs, len(depths)))
