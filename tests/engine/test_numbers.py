"""Real settings are arguments of the compiled program: another value is the same program, and gives
its own numbers."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest
import tiny
from cases import CASES

import fedjax_sim as fs
from agents import DDPG, SAC
from fedjax_sim.engine.participation import Participation
from fedjax_sim.engine.records import Numbers
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method
from fedjax_sim.local import optim
from fedjax_sim.methods import make_method
from fedjax_sim.methods.fedprox import FedProx

# options whose default is a word, which is another program
GIVEN = {"perfedavg": {"alpha": 0.1, "beta": 0.2}}


def options(name: str) -> dict:
    return {**CASES[name].options, **GIVEN.get(name, {})}


def halved(record):
    """The same method, loss or schedule with half of every number."""
    return jax.tree.map(lambda value: value / 2, record)


def two(name: str, **layout) -> tuple[Simulation, Simulation]:
    """(a method's simulation, the same with half of every real setting)."""
    one = tiny.simulation(name, model=CASES[name].model, **layout, **options(name))
    env = dataclasses.replace(one.env, optimizer=optim.Sgd(0.45, 2.5e-4), loss=halved(one.env.loss))
    rates = halved(optim.schedule("constant", 0.05, 8))
    who = Participation(tiny.M, tiny.M, tuple(range(tiny.N)))
    more = dict(
        lr=rates,
        eval_every=one.eval_every,
        capacity=one.capacity,
        evaluations=one.stages.evaluations,
    )
    return one, simulate(halved(one.method), env, tiny.federation(), who, one.layout, **more)


def compiled_in(sim: Simulation):
    """A round whose numbers are constants of the program."""
    values = Numbers(sim.method, sim.env.loss, sim.env.optimizer, sim.stages.lr)
    return jax.jit(lambda state, data: sim.round(state, data._replace(numbers=values)))


def texts(sim: Simulation, state, data) -> list[str]:
    """Rounds with their evaluations, and the fine-tuning of methods that do it, as they go to the
    compiler."""
    return [sim.run.lower(state, data, 1).as_text(), sim.adapt.lower(state, data).as_text()]


@pytest.mark.parametrize("name", CASES)
def test_another_value_is_the_same_program(name):
    one, other = two(name)
    assert jax.tree.structure(one.data.numbers) == jax.tree.structure(other.data.numbers)
    tiny.assert_close(halved(one.data.numbers), other.data.numbers, 1e-6)
    state, data = tiny.start(other)
    assert texts(one, state, data) == texts(other, state, data)


# one of each kind: compiling every method twice takes minutes
QUICK = ("fedprox", "ditto", "fedpam", "fedpolicy")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_another_value_gives_its_own_numbers(name):
    one, other = two(name)
    state, data = tiny.start(other)
    shared = jax.jit(one.round)
    constant = compiled_in(other)
    want = state
    for _ in range(2):
        state, log = shared(state, data)
        want, want_log = constant(want, data)
    tiny.assert_close(state, want, 1e-5)
    tiny.assert_close(log, want_log, 1e-5)


@pytest.mark.parametrize("layout", [dict(chunk=2), dict(devices=2)])
def test_numbers_reach_every_client_and_every_device(layout):
    one, other = two("fedprox", **layout)
    state, data = tiny.start(other)
    want, log = compiled_in(other)(state, data)
    tiny.assert_close(jax.jit(one.round)(state, data), (want, log), 1e-5)


@pytest.mark.parametrize("text", ["step:every=2,gamma=0.5", "cosine:end=0.01"])
def test_the_numbers_of_a_schedule(text):
    other = optim.schedule(text.replace("0.5", "0.25").replace("0.01", "0.02"), 0.2, 8)
    rates = jax.jit(lambda schedule, t: schedule(t))
    for t in (0.0, 3.0, 8.0):
        assert float(rates(other, t)) == pytest.approx(float(other(t)), rel=1e-6)
    assert optim.schedule(text, 0.1, 8).numbers["lr"] == 0.1


def test_zero_leaves_the_term_out_where_the_field_says_so():
    rule = optim.Sgd(0.0, 0.1)
    assert list(rule.numbers) == ["weight_decay"] and jax.tree.leaves(rule) == [0.1]
    state = jax.jit(lambda rule, w: rule.transform().init(w))(rule, jnp.ones(3))
    assert not jax.tree.leaves(state)  # no velocity is carried
    # a pull of 0 is a number as any other
    assert make_method("fedprox", mu=0.0).numbers == {"mu": 0.0}
    assert (
        "lam" not in make_method("fedpam", lam=0.0).numbers
        and make_method("fedpam").numbers["lam"] == 30.0
    )
    # epochs size the shuffles
    assert make_method("ditto", personal_epochs=2).numbers == {"lam": 0.5}
    assert make_method("perfedavg", beta=0.1).numbers == {"beta": 0.1}  # the word lr is none


def test_an_agents_numbers_are_its_methods():
    method = fs.FedPolicy(agent=SAC(lr=0.01), lam=0.5)
    assert (
        method.numbers["agent.lr"] == 0.01
        and method.numbers["lam"] == 0.5
        and "agent.batch" not in method.numbers
    )
    assert make_method("fedpolicy", **{"agent.lr": "0.01"}).agent.lr == 0.01
    other = dataclasses.replace(method, agent=dataclasses.replace(method.agent, lr=0.1))
    assert (
        jax.tree.structure(method)
        == jax.tree.structure(other)
        != jax.tree.structure(fs.FedPolicy(agent=SAC(batch=8)))
    )
    assert fs.PFedRLLA(agent=DDPG(noise=0.5)).numbers["agent.noise"] == 0.5


# ---- records -------------------------------------------------------------------------------------
def test_a_method_is_a_frozen_record():
    method = FedProx(0.1)
    assert repr(method) == "FedProx(weights='size', mu=0.1)" and method == FedProx(
        mu="0.1"
    ) != FedProx(mu=0.2)
    assert dataclasses.replace(method, mu=1).mu == 1.0 and fs.FedProx is FedProx
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.mu = 0.2
    with pytest.raises(UserError, match=r"fedprox.mu=-1 is not allowed; use 0 or more"):
        dataclasses.replace(method, mu=-1)
    with pytest.raises(UserError, match=r"unknown weights of fedprox 'sizes' .did you mean 'size'"):
        FedProx(weights="sizes")
    with pytest.raises(UserError, match=r"fedprox.mu 'big' is not a number"):
        FedProx(mu="big")


def test_editors_know_every_class():
    from fedjax_sim import methods, transforms

    source = pathlib.Path(fs.__file__).read_text()
    for kind in (*methods.CLASSES, *transforms.CLASSES):
        assert (
            f" import {kind} as {kind}\n" in source
            and kind in dir(fs)
            and getattr(fs, kind).__name__ == kind
        )


def test_vmap_over_methods_is_a_sweep():
    """A stack of methods, mapped: each of them is the method alone."""
    sim = simulation_of(FedProx(0.1))
    state, data = tiny.start(sim)
    stack = jax.tree.map(lambda *a: jnp.stack(a), *(FedProx(mu) for mu in (0.1, 5.0)))
    one = lambda method: (
        sim.round(state, data._replace(numbers=data.numbers._replace(method=method)))[0].server.net
    )
    both = jax.jit(jax.vmap(one))(stack)
    for i, mu in enumerate((0.1, 5.0)):
        tiny.assert_close(jax.tree.map(lambda a: a[i], both), jax.jit(one)(FedProx(mu)), 1e-5)


# ---- methods of one's own ------------------------------------------------------------------------
class Scaled(FedProx):
    width: float = 1.0  # a constant of the program


class Hesitant(FedProx):
    """Decides by the value of a field that it calls Real."""

    def local(self, env, net, server, client, ctx):
        return (
            super().local(env, net, server, client, ctx)
            if self.mu > 1
            else Method.local(self, env, net, server, client, ctx)
        )


def simulation_of(method: Method) -> Simulation:
    base = tiny.simulation("fedavg")
    who = Participation(tiny.M, tiny.M, tuple(range(tiny.N)))
    return simulate(
        method,
        base.env,
        tiny.federation(),
        who,
        lr=optim.schedule("constant", 0.05, 8),
        evaluations=(),
    )


def test_what_is_a_number_of_a_user_method():
    assert simulation_of(Scaled(mu=0.2, width=3)).data.numbers.method.numbers == {
        "mu": pytest.approx(0.2)
    }


def test_a_method_that_decides_by_a_number_is_refused():
    sim = simulation_of(Hesitant())
    with pytest.raises(
        UserError, match=r"method 'Hesitant' decides by a value .* as float, not Real \(mu\)"
    ):
        jax.jit(sim.round)(*tiny.start(sim))
