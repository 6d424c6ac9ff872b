"""Runs side by side in one program: arrays that are the same for all stay single, the others get a
leading axis.

Seeds differ in their key and everything that depends on it; values of a real setting (`--vmap`)
differ in that number only: cohorts, minibatches and the number of steps are then the same for all
and are computed once. The round number is always shared, so the loop over rounds has one condition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fedjax_sim.engine.records import Data
from fedjax_sim.errors import UserError
from fedjax_sim.types import State, Tree

if TYPE_CHECKING:
    from fedjax_sim.runner.prepare import Setup


def check(setups: Sequence[Setup]) -> None:
    """Refuse set-ups that cannot run side by side."""
    if len(setups) == 1:
        return
    compute, layout = setups[0].experiment.compute, setups[0].simulation.layout
    seeds = differ([s.experiment.training.seed for s in setups])
    what, instead = (
        ("seeds-mode 'vmap'", "allowed: loop")
        if seeds
        else ("--vmap", "run the values one after another")
    )
    if compute.state_on == "host":
        raise UserError(f"state-on host is not possible with {what}; {instead}")
    if compute.backend == "loop":
        raise UserError(f"backend loop is not possible with {what}; {instead}")
    if layout.devices > 1:
        what, instead = (
            ("seeds-mode vmap", "use seeds-mode loop") if seeds else ("--vmap", "use --devices 1")
        )
        raise UserError(f"{what} runs on one device, not {layout.devices}; {instead}")


def differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values[1:])


def state_axes(setups: Sequence[Setup]) -> State:
    """Which parts of a State have a leading axis."""
    if len(setups) == 1:
        return State(None, None, None, None, None)  # type: ignore[arg-type]
    return State(None, 0 if differ([s.experiment.training.seed for s in setups]) else None, 0, 0, 0)  # type: ignore[arg-type]


def stack(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def stack_states(setups: Sequence[Setup], states: Sequence[State]) -> State:
    parts = zip(state_axes(setups), zip(*states, strict=True), strict=True)
    return State(*(part[0] if axis is None else stack(part) for axis, part in parts))


def stack_data(several: Sequence[Data]) -> Data:
    """The shared data with the numbers of every run."""
    one = several[0]
    together = lambda *values: jnp.stack(values) if differ(values) else values[0]
    return one._replace(numbers=jax.tree.map(together, *(data.numbers for data in several)))


def side_by_side(setups: Sequence[Setup], run: Callable) -> Any:
    """`run` of one simulation for all runs, jitted but not yet compiled."""
    state, one = state_axes(setups), getattr(run, "__wrapped__", run)
    each = zip(*(jax.tree.leaves(s.simulation.data.numbers) for s in setups), strict=True)
    axes = [0 if differ(values) else None for values in each]

    def many(states: State, data: Data, rounds: Any, ends: Any) -> Any:
        leaves, tree = jax.tree.flatten(data.numbers)
        alone = lambda s, numbers: one(
            s, data._replace(numbers=jax.tree.unflatten(tree, numbers)), rounds, ends
        )
        return jax.vmap(alone, in_axes=(state, axes), out_axes=(state, 0, 0))(states, leaves)

    return jax.jit(many, donate_argnums=0)


def pick(tree: Tree, run: int, width: int) -> Tree:
    """One run's part of the program's results; width: the number of runs."""
    return tree if width == 1 else jax.tree.map(lambda a: a[run], tree)


def pick_state(axes: State, state: State, run: int) -> State:
    one = lambda part: jax.tree.map(lambda a: a[run], part)
    return State(
        *(part if axis is None else one(part) for axis, part in zip(axes, state, strict=True))
    )
