"""From an Experiment to a simulation that is ready to run: data, model, method, layout. Nothing is
written."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.data.protocols import BATCH, federate
from fedjax_sim.engine import host_clients
from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.evaluation import check_evaluations, client_split
from fedjax_sim.engine.participation import Participation, cohort_size, unseen_clients
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment, Found
from fedjax_sim.experiment.kinds import range_text
from fedjax_sim.experiment.settings import Training
from fedjax_sim.hooks import Method, Peers
from fedjax_sim.local import optim
from fedjax_sim.methods import make_method
from fedjax_sim.metrics import make_metrics
from fedjax_sim.metrics.base import Metric, described
from fedjax_sim.platform import floats
from fedjax_sim.runner import autotune, checkpoint, interrupts, provenance, training, weights
from fedjax_sim.runner.compilation import check_host_devices, start_jax
from fedjax_sim.runner.weights import initial_net, load_net
from fedjax_sim.tasks import TOKENS, task_called
from fedjax_sim.transforms import transformed
from fedjax_sim.types import Env, State, Tree


@dataclasses.dataclass(frozen=True)
class Objects:
    """What was given from Python instead of names."""

    fed: Federation | None = None
    model: Any = None
    net: Tree | None = None
    method: Method | None = None
    optimizer: Any = None
    loss: Any = None


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run, ready to start."""

    experiment: Experiment  # all of its settings, resolved
    found: Found
    fed: Federation
    simulation: Simulation
    net: Tree  # initial weights
    participation: Participation
    unseen: tuple[int, ...]
    resolved: dict[str, Any]  # values of `auto`, and what the method replaces
    given_net: bool = False  # the weights come from the caller or a file, not from the seed
    parts: checkpoint.Parts | None = None  # of another run's State, to start from
    given: Objects = Objects()

    @property
    def hash(self) -> str:
        """Hash of everything that decides the run's numbers."""
        return self.experiment.hash(self.found)

    def first_state(self) -> State:
        """The State before round 1."""
        state = self.simulation.init(self.experiment.training.seed, self.net)
        return state if self.parts is None else checkpoint.load_parts(self.parts, state)


def in_its_floats(fn: Callable) -> Callable:
    """`fn(setup, …)` in JAX's 64-bit mode if the run is in float64."""

    @functools.wraps(fn)
    def inside(setup: Setup, *rest: Any) -> Any:
        with floats(setup.experiment.compute.dtype):
            return fn(setup, *rest)

    return inside


def load_federation(experiment: Experiment) -> Federation:
    data, batch = experiment.data, experiment.training.batch_size
    return federate(
        data.dataset,
        data.partition,
        data.clients,
        data.protocol,
        data.data_seed,
        data_dir=data.data_dir,
        download=data.download,
        norm=data.norm,
        batch_size=batch if isinstance(batch, int) else BATCH,
        server_val=data.server_val,
        val_fraction=data.val_fraction,
        task=data.task,
    )


def make_env(
    experiment: Experiment,
    fed: Federation,
    model: models.Model,
    method: Method,
    cohort: int,
    unseen: int,
    found: Found,
    given: Objects,
) -> Env:
    """The environment of ONE client's hooks. A batch size "full" is the number of rows of the
    largest client, so that the data of every client are one masked batch."""
    train, loss = experiment.training, training.make_loss(experiment, fed, given.loss)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    largest = int(np.asarray(fed.size["train"]).max())
    return Env(
        model=model,
        loss=loss,
        optimizer=training.make_optimizer(experiment, model.groups, given.optimizer),
        keeps_optimizer=train.optimizer_state == "client",
        num_clients=fed.num_clients,
        cohort=cohort,
        batch_size=largest if isinstance(train.batch_size, str) else train.batch_size,
        shuffle=train.shuffle,
        epochs=train.epochs,
        max_epochs=max(train.epochs, method.max_epochs),
        kept_out=unseen,
        rounds=train.rounds,
        started=tuple(found.started_with.split("@")[0].split(",")) if found.started_with else (),
        track_confusion=loss.uses_confusion or "confusion" in method.needs,
        bn_local=experiment.model.bn_stats == "local"
        and bool(jax.tree.leaves(shapes.get("batch_stats", {}))),
        dtype=jnp.dtype(experiment.compute.dtype).type,
    )


def step_flops(env: Env, fed: Federation, net: Tree) -> float:
    """Floating-point operations of one gradient step, from the unoptimised program; it is neither
    compiled nor run."""
    x = models.batch_of(fed.shape, env.batch_size, env.dtype)
    y = jax.ShapeDtypeStruct((env.batch_size, *fed.y.shape[1:]), fed.y.dtype)

    def loss(params, x, y):
        features, _ = env.model.features({**net, "params": params}, x, train=True)
        outputs = env.model.head({**net, "params": params}, features)
        if fed.task != "classification":
            return jnp.square(outputs).mean()
        return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()

    params = jax.eval_shape(lambda: net["params"])
    cost = jax.jit(jax.grad(loss)).lower(params, x, y).cost_analysis()
    return float((cost or {}).get("flops", 0.0))


def prepare(
    experiment: Experiment,
    *,
    fed: Federation | None = None,
    model: Any = None,
    net: Tree | None = None,
    method: Method | None = None,
    optimizer: Any = None,
    loss: Any = None,
    layout: layouts.Layout | None = None,
    capacity: int = 32,
    say: Callable[[str], None] | None = None,
    measure: bool = True,
    loaded: bool = False,
    stored: Found | None = None,
) -> Setup:
    """A run, ready to start. Data, model, initial weights, method, optimiser or loss may be given
    as objects instead of names.

    measure: whether `--chunk auto` may time layouts for a long run. loaded: `fed` was returned by
    `load_federation(experiment)`. stored: the `Found` of a run directory whose experiment this is;
    then data, method and model must be the same, and initial weights are not needed.
    """
    start_jax(experiment)
    given = Objects(fed, model, net, method, optimizer, loss)
    with interrupts.guard(), interrupts.immediate(), floats(experiment.compute.dtype):
        source = experiment.model.start_from
        parts = checkpoint.find_parts(source) if source else None
        data = load_federation(experiment) if fed is None else fed
        interrupts.check()
        found = stored or provenance.found_data(data, fed is not None and not loaded)
        if parts is not None:
            found = dataclasses.replace(found, started_with=parts.fingerprint())
        names = resolve(experiment, found, data, given, stored)
        setup = compose(*names, data, given, stored is None, layout, capacity, say, measure)
        objects = dataclasses.replace(given, fed=None) if loaded else given
        return dataclasses.replace(setup, parts=parts, given=objects)


def resolve(
    experiment: Experiment, found: Found, fed: Federation, given: Objects, stored: Found | None
) -> tuple[Experiment, Found, Method, models.Model]:
    """Resolve names, defaults and objects: settings, `Found`, method and model."""
    unresolved = experiment
    if stored is None:
        experiment = provenance.with_data(experiment, found, fed)
    rounds = experiment.training.schedule_rounds or experiment.training.rounds
    experiment = experiment.replace(schedule_rounds=rounds)
    if given.method is not None:
        experiment, found = provenance.with_method(experiment, found, given.method)
    chosen = experiment.method
    method = given.method or transformed(
        make_method(chosen.name, **chosen.options), chosen.transforms
    )
    experiment, found = training.with_loss(experiment, found, method, fed, given.loss)
    experiment, found = training.with_optimizer(experiment, found, method, given.optimizer)
    experiment, found, model = with_model(experiment, found, given.model, fed)
    if stored is not None:
        provenance.check_same((unresolved, stored), (experiment, found), fed)
    return experiment, found, method, method.extend(model)


def compose(
    experiment: Experiment,
    found: Found,
    method: Method,
    model: models.Model,
    fed: Federation,
    given: Objects,
    fresh: bool,
    layout: layouts.Layout | None,
    capacity: int,
    say: Callable[[str], None] | None,
    measure: bool,
) -> Setup:
    """The set-up of a method, a model and data; fresh: the run is not resumed."""
    unseen = unseen_clients(experiment.data.unseen, fed.num_clients, experiment.data.data_seed)
    experiment, participation = with_participants(experiment, fed.num_clients, unseen)
    given_net = fresh and (given.net is not None or bool(experiment.model.init))
    net = given_weights(experiment, model, given.net) if given_net else None
    if net is not None:
        found = dataclasses.replace(found, initial_weights=weights.checksum(net))
    else:
        net = initial_net(model, experiment.training.seed)
    env = make_env(experiment, fed, model, method, participation.high, len(unseen), found, given)
    training.check_task(method, fed, env)
    training.check_method(method, experiment, env.optimizer)
    check_kept_state(experiment, env, net)
    modes = experiment.evaluation.evaluations
    check_evaluations(method, modes, env.bn_local)
    score, task = experiment.evaluation, task_called(fed.task)
    metrics = make_metrics(score.metrics, fed.classes, task.metrics)
    check_host_devices(experiment)

    one = (experiment, method, env, fed, participation, metrics, capacity)
    on = functools.partial(simulated, *one)
    resolved: dict[str, Any] = {}
    if layout is None:
        # timed with the cohort's client states alone, to save memory
        rows = "all" if method.ask(Peers) is not None else "cohort"
        try_on = lambda layout: on(layout, rows)
        layout, resolved = resolve_layout(
            experiment, env, fed, net, participation, try_on, say, measure
        )
    resolved |= declared(method, experiment, env)
    resolved |= dict(client_rows=client_rows(fed, participation.seen))
    resolved |= described(metrics, modes)
    on_host = experiment.compute.state_on == "host"
    simulation = host_clients.on_host(on(layout, "cohort")) if on_host else on(layout, "all")
    return Setup(
        experiment, found, fed, simulation, net, participation, unseen, resolved, given_net
    )


def check_kept_state(experiment: Experiment, env: Env, net: Tree) -> None:
    state = lambda: jax.eval_shape(env.optimizer.init, net["params"])
    if env.keeps_optimizer and not jax.tree.leaves(state()):
        raise UserError(
            "optimizer-state client has no effect here: optimizer"
            f" {experiment.training.optimizer} has no state to keep"
        )


def with_model(
    experiment: Experiment, found: Found, model: Any, fed: Federation
) -> tuple[Experiment, Found, models.Model]:
    """The model, given as an object or by its name, and the settings that describe it."""
    chosen, compute = experiment.model, experiment.compute
    dtype = jnp.dtype(compute.dtype).type
    places = task_called(fed.task).target == TOKENS
    if model is not None:
        if compute.activation_type != compute.dtype:
            raise UserError(
                f"activations {compute.activations} is for models known by name, and model= is an"
                f" object; use fedjax_sim.build(…, activations='{compute.activations}'), or a flax"
                " module with its own dtype"
            )
        model = models.as_model(model, fed.shape, fed.classes, dtype, places=places)
        provenance.check_model(model, fed, dtype)
        experiment = experiment.replace(model=model.name)
        found = dataclasses.replace(found, custom_model=True)
    else:
        models.check_options(chosen.name, chosen.options)
        more = dict(chosen.options, conv=chosen.conv, activations=compute.activation_type)
        if len(fed.shape) == 1:
            more |= dict(vocabulary=int(np.max(fed.x)) + 1, places=places)
        model = models.build(chosen.name, fed.shape, fed.classes, dtype=dtype, **more)
    return experiment, dataclasses.replace(found, model_shapes=provenance.shapes_of(model)), model


def given_weights(experiment: Experiment, model: models.Model, net: Tree | None) -> Tree:
    """The initial weights given by the caller, or in the file named by `init`."""
    like = jax.eval_shape(model.init, jax.random.key(0))
    if net is not None:
        return weights.given_net(net, like)
    return load_net(experiment.model.init or "", like)


def with_participants(
    experiment: Experiment, clients: int, unseen: tuple[int, ...]
) -> tuple[Experiment, Participation]:
    """Who takes part, and the settings that describe it."""
    seen = tuple(i for i in range(clients) if i not in set(unseen))
    experiment = with_cohorts(experiment, clients, unseen)
    train = experiment.training
    sizes = cohort_size(train.participation, clients, len(seen))
    who = Participation(*sizes, seen, train.dropout, train.stragglers, train.cohorts)
    return experiment, who


def with_cohorts(experiment: Experiment, clients: int, unseen: tuple[int, ...]) -> Experiment:
    """`experiment` with its fixed cohorts checked; their size is the participation."""
    cohorts, wanted = experiment.training.cohorts, experiment.training.participation
    if isinstance(cohorts, tuple) and not cohorts:
        return experiment
    cohorts = provenance.check_cohorts(cohorts, clients, unseen)
    text, size = f"{len(cohorts[0])}/{clients}", len(cohorts[0])
    fits = cohort_size(wanted, clients, clients - len(unseen)) == (size, size)
    if wanted != Training().participation and not fits:  # it was given
        raise UserError(
            f"participation '{range_text(wanted)}' does not fit cohorts of {size} clients; use"
            f" {text}, or leave it out"
        )
    return experiment.replace(cohorts=cohorts, participation=text)


def simulated(
    experiment: Experiment,
    method: Method,
    env: Env,
    fed: Federation,
    participation: Participation,
    metrics: tuple[Metric, ...],
    capacity: int,
    layout: layouts.Layout,
    stored: str,
) -> Simulation:
    """The simulation of a run on a layout; stored: as in `simulate`."""
    train, score = experiment.training, experiment.evaluation
    assert train.lr is not None  # resolved
    return simulate(
        method,
        env,
        fed,
        participation,
        layout,
        evaluations=score.evaluations,
        lr=optim.schedule(train.schedule, train.lr, train.schedule_rounds),
        eval_every=score.eval_every,
        metrics=metrics,
        probe=score.probe,
        stored=stored,
        precision=experiment.compute.precision,
        capacity=max(1, min(capacity, -(-train.rounds // score.eval_every))),
    )


def declared(method: Method, experiment: Experiment, env: Env) -> dict[str, Any]:
    """Declarations of a method for the files of a run."""
    prefers = method.prefers if isinstance(env.optimizer, optim.Sgd) else ()  # numbers of SGD
    return dict(
        prefers={k: v for k, v in prefers if experiment.get(k) == v},  # in force
        panels={name: list(panel) for name, panel in method.panels.items()},  # of the report
        replaces=dict(method.replaces),  # setting -> what the method does instead
    )


def client_rows(fed: Federation, seen: tuple[int, ...]) -> dict[str, Any]:
    """The split on which clients are scored, and how many rows of it they have."""
    split = client_split(fed)
    size = np.asarray(fed.size[split])[list(seen)]
    return dict(split=split, least=int(size.min()), mean=float(size.mean()), most=int(size.max()))


def resolve_layout(
    experiment: Experiment,
    env: Env,
    fed: Federation,
    net: Tree,
    participation: Participation,
    on: Callable[[layouts.Layout], Simulation],
    say: Callable[[str], None] | None,
    measure: bool = True,
) -> tuple[layouts.Layout, dict[str, Any]]:
    """The layout that `auto` stands for, and why; see `autotune`."""
    flops = step_flops(env, fed, net)
    sizes = np.asarray(fed.size["train"])[list(participation.seen)]
    steps = float((env.epochs * -(-sizes // env.batch_size)).mean() * participation.high)

    def place(choice: autotune.Choice) -> layouts.Layout:
        if experiment.compute.backend == "sharded" and choice.devices == 1:  # a mesh of one device
            mesh = jax.make_mesh(
                (1,), (layouts.CLIENTS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
            )
            return layouts.Layout(choice.chunk, mesh)
        return layouts.make_layout(choice.chunk, choice.devices)

    def stopwatch(choice: autotune.Choice) -> Callable[[], float]:
        return autotune.stopwatch(on(place(choice)), experiment.training.seed, net)

    choice = autotune.choose(
        experiment,
        participation.high,
        sum(env.group_floats(net)),
        flops,
        flops * steps * experiment.training.rounds if measure else 0,
        stopwatch,
        say or (lambda text: None),
    )
    return place(choice), dict(
        chunk=choice.chunk,
        devices=choice.devices,
        device_kind=jax.default_backend(),
        chunk_why=choice.why,
    )
