"""Real settings are arguments of the compiled program: another value is the same program, and gives its own numbers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny
from cases import CASES

from fedjax_sim import methods
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method
from fedjax_sim.local import optim
from fedjax_sim.methods import make_method, register
from fedjax_sim.methods.fedavg import fedavg
from fedjax_sim.methods.fedprox import fedprox
from fedjax_sim.types import Real

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
def test_another_value_is_the_same_program(name):
    one, other = two(name)
    assert one.data.numbers.keys() == other.data.numbers.keys()
    assert all(other.data.numbers[k] == one.data.numbers[k] / 2 for k in one.data.numbers)
    state, data = tiny.start(other)
    assert texts(one, state, data) == texts(other, state, data)


QUICK = ("fedprox", "ditto", "fedpam", "fedpolicy")  # one of each kind: compiling every method twice takes minutes


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_another_value_gives_its_own_numbers(name):
    one, other = two(name)
    state, data = tiny.start(other)
    shared = jax.jit(one.round)
    compiled_in = jax.jit(lambda state, data: other.round(state, data._replace(numbers={})))
    want = state
    for _ in range(2):
        state, log = shared(state, data)
        want, want_log = compiled_in(want, data)
    tiny.assert_close(state, want, 1e-5)
    tiny.assert_close(log, want_log, 1e-5)


@pytest.mark.parametrize("layout", [dict(chunk=2), dict(devices=2)])
def test_numbers_reach_every_lane_and_every_device(layout):
    one, other = two("fedprox", **layout)
    state, data = tiny.start(other)
    want, log = jax.jit(lambda state, data: other.round(state, data._replace(numbers={})))(state, data)
    tiny.assert_close(jax.jit(one.round)(state, data), (want, log), 1e-5)


@pytest.mark.parametrize("text", ["step:every=2,gamma=0.5", "cosine:end=0.01"])
def test_the_numbers_of_a_schedule(text):
    made, other = optim.schedule(text, 0.1, 8), optim.schedule(text.replace("0.5", "0.25").replace("0.01", "0.02"), 0.2, 8)
    rates = jax.jit(lambda numbers, t: made.bound(numbers)(t))
    for t in (0.0, 3.0, 8.0):
        assert float(rates(other.numbers, t)) == pytest.approx(float(other(t)), rel=1e-6)


def test_zero_leaves_the_term_out():
    rule = optim.Sgd(0.0, 0.1)
    assert list(rule.numbers) == ["weight_decay"] and jax.tree.leaves(rule) == [0.1]
    state = jax.jit(lambda rule, w: rule.transform().init(w))(rule, jnp.ones(3))
    assert not jax.tree.leaves(state)  # no velocity is carried
    assert make_method("fedprox", mu=0.0).made.numbers == {}
    assert make_method("ditto", personal_epochs=2).made.numbers == {"lam": 0.5}  # epochs size the shuffles


# ---- methods of one's own -------------------------------------------------------------------------------------------
def proximal(mu: Real = 0.1, width: float = 1.0) -> Method:
    return fedprox(mu * width)


def hesitant(mu: Real = 0.1) -> Method:
    """Decides by the value of an option that it calls Real."""

    def local(env, net, server, client, ctx):
        return fedavg().local(env, net, server, client, ctx) if mu > 1 else fedprox(mu).local(env, net, server, client, ctx)

    return fedavg()._replace(local=local)


def shaped(mu: Real = 0.1) -> Method:
    """The model itself depends on the option."""
    return fedprox(mu)._replace(extend=lambda model: model._replace(name=f"{model.name} {mu:g}"))


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(methods, "_OWN", dict(methods._OWN))
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
    for builder in (proximal, hesitant, shaped):
        register(builder.__name__, builder)


def simulation_of(method: Method) -> Simulation:
    base = tiny.simulation("fedavg")
    who = Participation(tiny.M, tiny.M, tuple(range(tiny.N)))
    return simulate(method, base.env, tiny.federation(), who, lr=optim.schedule("constant", 0.05, 8), evaluations=())


def test_what_is_a_number_of_an_own_method(own):
    assert make_method("proximal", mu=0.2, width=3).made.numbers == {"mu": 0.2}  # float: a constant of the program
    assert make_method("shaped", mu=0.2).made.numbers == {}  # read before anything is compiled
    assert simulation_of(fedprox(0.3)).data.numbers.keys() == {"lr", "momentum", "weight_decay"}  # built without a name


def test_a_method_that_decides_by_a_number_is_refused(own):
    sim = simulation_of(make_method("hesitant"))
    with pytest.raises(UserError, match=r"method 'hesitant' asks for a value .* as float, not Real \(mu\)"):
        jax.jit(sim.round)(*tiny.start(sim))


def test_an_exchanged_hook_stays_exchanged():
    plain = make_method("fedavg")
    sim = simulation_of(make_method("fedprox", mu=5.0)._replace(local=plain.local))
    want = simulation_of(plain)
    state, data = tiny.start(sim)
    tiny.assert_close(jax.jit(sim.round)(state, data)[0], jax.jit(want.round)(state, want.data)[0], 1e-6)
