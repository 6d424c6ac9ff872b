"""Real settings are arguments of the compiled program: another value is the same program, and gives its own numbers."""

from __future__ import annotations

import dataclasses

import jax
import pytest
import tiny
from cases import CASES

from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.local import optim
from fedjax_sim.methods import make_method

# options whose default is a word, or 0, which is another program
GIVEN = {"perfedavg": {"alpha": 0.1, "beta": 0.2}}


def options(name: str) -> dict:
    return {**CASES[name].options, **GIVEN.get(name, {})}


def halved(name: str) -> dict:
    """The options of a method's case with half the value of everything that is a number by the rule."""
    made = make_method(name, **options(name)).made
    return {**options(name), **{k: v / 2 for k, v in made.numbers.items()}}


def two(name: str, **layout) -> tuple[Simulation, Simulation]:
    """(a method's simulation, the same with half of every real setting)."""
    one = tiny.simulation(name, model=CASES[name].model, **layout, **options(name))
    env = dataclasses.replace(one.env, optimizer=optim.Sgd(0.45, 2.5e-4))
    rates = optim.schedule("constant", 0.025, 8)
    who = Participation(tiny.M, tiny.M, tuple(range(tiny.N)))
    more = dict(lr=rates, eval_every=one.eval_every, capacity=one.capacity, evaluations=one.stages.evaluations)
    return one, simulate(make_method(name, **halved(name)), env, tiny.federation(), who, one.layout, **more)


def texts(sim: Simulation, state, data) -> list[str]:
    """Rounds with their evaluations, and the fine-tuning of methods that do it, as they go to the compiler."""
    return [sim.run.lower(state, data, 1).as_text(), sim.adapt.lower(state, data).as_text()]


@pytest.mark.parametrize("name", CASES)
def test_another_value_is_the_same_program_and_gives_its_own_numbers(name):
    one, other = two(name)
    assert one.data.numbers.keys() == other.data.numbers.keys()
    assert all(other.data.numbers[k] == one.data.numbers[k] / 2 for k in one.data.numbers)
    state, data = tiny.start(other)
    assert texts(one, state, data) == texts(other, state, data)
    shared = jax.jit(one.round)
    compiled_in = jax.jit(lambda state, data: other.round(state, data._replace(numbers={})))
    want = state
    for _ in range(2):
        state, log = shared(state, data)
        want, want_log = compiled_in(want, data)
    tiny.assert_close(state, want, 1e-5)
    tiny.assert_close(log, want_log, 1e-5)
