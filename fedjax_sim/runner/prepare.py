"""From a Config to a compiled simulation: data, model, method, layout. Everything a run needs,
nothing it writes."""

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
from fedjax_sim.engine.participation import Participation, parse_participation, unseen_clients
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method, Peers
from fedjax_sim.local import optim
from fedjax_sim.methods import make_method
from fedjax_sim.metrics import make_metrics
from fedjax_sim.metrics.base import Metric, described
from fedjax_sim.platform import floats
from fedjax_sim.runner import autotune, checkpoint, interrupts, provenance, training, weights
from fedjax_sim.runner.compilation import host_devices_missing, start_jax, want_host_devices
from fedjax_sim.runner.config import FULL, Config, check, straggler_terms
from fedjax_sim.runner.weights import initial_net, load_net, save_net
from fedjax_sim.tasks import TOKENS, task_called
from fedjax_sim.transforms import transformed
from fedjax_sim.types import Env, State, Tree


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run, ready to start."""

    config: Config
    fed: Federation
    simulation: Simulation
    net: Tree  # initial weights
    participation: Participation
    unseen: tuple[int, ...]
    resolved: dict[str, Any]  # what `auto` became, and what the method replaces
    given_net: bool = False  # the weights come from the caller or a file, not from the seed
    parts: checkpoint.Parts | None = None  # of another run's state, to start from

    def first_state(self) -> State:
        """The State before round 1."""
        state = self.simulation.init(self.config.seed, self.net)
        return state if self.parts is None else checkpoint.load_parts(self.parts, state)


def in_its_floats(fn: Callable) -> Callable:
    """`fn(setup, …)` with JAX's 64-bit mode as the run wants it."""

    @functools.wraps(fn)
    def inside(setup: Setup, *rest: Any) -> Any:
        with floats(setup.config.dtype):
            return fn(setup, *rest)

    return inside


def load_federation(config: Config) -> Federation:
    return federate(
        config.dataset,
        config.partition,
        config.clients,
        config.protocol,
        config.data_seed,
        data_dir=config.data_dir,
        download=config.download,
        norm=config.norm,
        batch_size=BATCH if config.batch_size == FULL else int(config.batch_size),
        server_val=config.server_val,
        val_fraction=config.val_fraction,
        task=config.task,
    )


def batch_size(config: Config, fed: Federation) -> int:
    """Rows of a minibatch; "full" is as many as the largest client has, so that everybody's data
    are one masked batch."""
    return (
        int(np.asarray(fed.size["train"]).max())
        if config.batch_size == FULL
        else int(config.batch_size)
    )


def make_env(
    config: Config,
    fed: Federation,
    model: models.Model,
    method: Method,
    dtype: Any,
    high: int,
    kept_out: int,
    optimizer: Any = None,
    given_loss: Any = None,
) -> Env:
    loss = training.make_loss(config, fed, given_loss)
    return Env(
        model=model,
        loss=loss,
        optimizer=training.make_optimizer(config, model.groups, optimizer),
        keeps_optimizer=config.optimizer_state == "client",
        num_clients=fed.num_clients,
        cohort=high,
        batch_size=batch_size(config, fed),
        shuffle=config.shuffle == "on",
        epochs=config.epochs,
        max_epochs=max(config.epochs, method.max_epochs),
        kept_out=kept_out,
        rounds=config.rounds,
        started=tuple(config.started_with.split("@")[0].split(",")) if config.started_with else (),
        track_confusion=loss.uses_confusion or "confusion" in method.needs,
        bn_local=config.bn_stats == "local"
        and "batch_stats" in jax.eval_shape(model.init, jax.random.key(0))
        and bool(jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))["batch_stats"])),
        dtype=dtype,
    )


def step_flops(env: Env, fed: Federation, net: Tree) -> float:
    """Floating-point operations of one gradient step, from the unoptimised program; nothing is
    compiled or run."""
    x = models.batch_of(fed.shape, env.batch_size, env.dtype)
    y = jax.ShapeDtypeStruct((env.batch_size, *fed.y.shape[1:]), fed.y.dtype)

    def loss(params, x, y):
        features, _ = env.model.features({**net, "params": params}, x, train=True)
        outputs = env.model.head({**net, "params": params}, features)
        if fed.task != "classification":
            return jnp.square(outputs).mean()
        return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()

    cost = (
        jax.jit(jax.grad(loss)).lower(jax.eval_shape(lambda: net["params"]), x, y).cost_analysis()
    )
    return float((cost or {}).get("flops", 0.0))


def prepare(
    config: Config,
    *,
    fed: Federation | None = None,
    model: Any = None,
    net: Tree | None = None,
    method: Method | None = None,
    optimizer: Any = None,
    loss: Any = None,
    layout: layouts.Layout | None = None,
    capacity: int = 32,
    cohorts: tuple[tuple[int, ...], ...] = (),
    say: Callable[[str], None] | None = None,
    measure: bool = True,
    loaded: bool = False,
    going_on: bool = False,
) -> Setup:
    """Everything a run needs. Own data, model, initial weights, method or optimiser may be given
    instead of names.

    cohorts: fixed participants round by round (an availability trace), repeated when it ends,
    instead of drawn ones; the same as `Config.cohorts`. measure: whether `--chunk auto` may time
    layouts for a long run. loaded: `fed` is what `load_federation(config)` returned. going_on:
    `config` is that of a run directory; initial weights are not needed, and data, method and model
    must be those it names.
    """
    check(config)
    start_jax(config)
    with interrupts.guard(), interrupts.at_once(), floats(config.dtype):
        return _prepare(
            config,
            fed,
            model,
            net,
            method,
            optimizer,
            loss,
            layout,
            capacity,
            cohorts,
            say,
            measure,
            loaded,
            going_on,
        )


def _prepare(
    config: Config,
    fed: Federation | None,
    model: Any,
    net: Tree | None,
    method: Method | None,
    optimizer: Any,
    loss: Any,
    layout: layouts.Layout | None,
    capacity: int,
    cohorts: tuple[tuple[int, ...], ...],
    say: Callable[[str], None] | None,
    measure: bool,
    loaded: bool,
    going_on: bool,
) -> Setup:
    stored = config
    cohorts = config.cohorts if isinstance(cohorts, tuple) and not cohorts else cohorts
    parts = checkpoint.find_parts(config.start_from) if config.start_from else None
    if parts is not None:
        config = dataclasses.replace(config, started_with=parts.fingerprint())
    dtype = jnp.dtype(config.dtype).type
    own_data = fed is not None and not loaded and not (going_on and not config.own_data)
    fed = load_federation(config) if fed is None else fed
    interrupts.check()
    if not going_on:
        config = provenance.with_data(config, fed, own_data)
    config = dataclasses.replace(config, schedule_rounds=config.schedule_rounds or config.rounds)
    if method is not None:
        config = provenance.with_method(config, method)
    method = method or transformed(make_method(config.method, **config.options), config.transforms)
    config = training.with_optimizer(
        training.with_loss(config, method, fed, loss), method, optimizer
    )
    config, model = with_model(config, model, fed)
    if going_on:
        provenance.check_same(stored, config, fed)
    model = method.extend(model)
    unseen = unseen_clients(config.unseen, fed.num_clients, config.data_seed)
    config, participation = with_participants(config, cohorts, fed.num_clients, unseen)
    given_net = not going_on and (net is not None or bool(config.init))
    config, net = with_net(config, model, net, given_net)
    env = make_env(
        config, fed, model, method, dtype, participation.high, len(unseen), optimizer, loss
    )
    training.check_task(method, fed, env)
    training.check_method(method, config, env.optimizer)
    check_kept_state(config, env, net)
    check_evaluations(method, config.evaluations, env.bn_local)
    metrics = make_metrics(config.metrics, fed.classes, task_called(fed.task).metrics)
    host_devices_missing(config)

    on = functools.partial(simulated, config, method, env, fed, participation, metrics, capacity)
    resolved: dict[str, Any] = {}
    if layout is None:
        # timed on a cohort's rows alone: the stopwatch needs no second copy of everybody's
        some = "all" if method.ask(Peers) is not None else "cohort"
        layout, resolved = resolve_layout(
            config, env, fed, net, participation, lambda layout: on(layout, some), say, measure
        )
    resolved |= told_of(method, config, env) | dict(
        client_rows=client_rows(fed, participation.seen)
    )
    resolved |= described(metrics, config.evaluations)  # what is measured, and how it is read
    simulation = (
        host_clients.on_host(on(layout, "cohort"))
        if config.state_on == "host"
        else on(layout, "all")
    )
    return Setup(config, fed, simulation, net, participation, unseen, resolved, given_net, parts)


def check_kept_state(config: Config, env: Env, net: Tree) -> None:
    if env.keeps_optimizer and not jax.tree.leaves(
        jax.eval_shape(env.optimizer.init, net["params"])
    ):
        raise UserError(
            f"optimizer-state client means nothing here: optimizer {config.optimizer} has no state"
            " to keep"
        )


def with_model(config: Config, model: Any, fed: Federation) -> tuple[Config, models.Model]:
    """The model, given as an object or by its name, and what the configuration says of it."""
    dtype = jnp.dtype(config.dtype).type
    if model is not None:
        if config.activation_type != config.dtype:
            raise UserError(
                f"activations {config.activations} are for models known by name, and model= is an"
                f" object; build it so: fedjax_sim.build(…, activations='{config.activations}'), or"
                " a flax module with a dtype of its own"
            )
        model = models.as_model(
            model, fed.shape, fed.classes, dtype, places=task_called(fed.task).target == TOKENS
        )
        provenance.check_model(model, fed, dtype)
        config = dataclasses.replace(config, model=model.name, own_model=True)
    else:
        models.check_options(config.model, config.model_options)
        how: dict[str, Any] = dict(
            dtype=dtype, conv=config.conv, activations=config.activation_type
        )
        if len(fed.shape) == 1:
            how |= dict(
                vocabulary=int(np.max(fed.x)) + 1, places=task_called(fed.task).target == TOKENS
            )
        model = models.build(config.model, fed.shape, fed.classes, **how, **config.model_options)
    return dataclasses.replace(config, model_shapes=provenance.shapes_of(model)), model


def with_net(
    config: Config, model: models.Model, net: Tree | None, given: bool
) -> tuple[Config, Tree]:
    """The initial weights: those that were given, or the seed's."""
    if not given:
        return config, initial_net(model, config.seed)
    like = jax.eval_shape(model.init, jax.random.key(0))
    net = weights.given_net(net, like) if net is not None else load_net(config.init or "", like)
    return dataclasses.replace(config, initial_weights=weights.checksum(net)), net


def with_participants(
    config: Config, cohorts: tuple[tuple[int, ...], ...], clients: int, unseen: tuple[int, ...]
) -> tuple[Config, Participation]:
    """Who takes part, and what the configuration says of it."""
    seen = tuple(i for i in range(clients) if i not in set(unseen))
    config = with_cohorts(config, cohorts, clients, unseen)
    low, high = parse_participation(config.participation, clients, len(seen))
    return config, Participation(
        low, high, seen, config.dropout, straggler_terms(config.stragglers), config.cohorts
    )


def simulated(
    config: Config,
    method: Method,
    env: Env,
    fed: Federation,
    participation: Participation,
    metrics: tuple[Metric, ...],
    capacity: int,
    layout: layouts.Layout,
    stored: str,
) -> Simulation:
    """The compiled functions of a run on a layout; stored: as in `simulate`."""
    return simulate(
        method,
        env,
        fed,
        participation,
        layout,
        evaluations=config.evaluations,
        lr=optim.schedule(config.schedule, config.lr, config.schedule_rounds),
        eval_every=config.eval_every,
        metrics=metrics,
        probe=config.probe,
        stored=stored,
        precision=config.precision,
        capacity=max(1, min(capacity, -(-config.rounds // config.eval_every))),
    )


def told_of(method: Method, config: Config, env: Env) -> dict[str, Any]:
    """What a method declares, for the files of a run."""
    prefers = method.prefers if isinstance(env.optimizer, optim.Sgd) else ()  # numbers of SGD
    return dict(
        prefers={k: v for k, v in prefers if getattr(config, k) == v},  # in force
        panels={
            name: list(panel) for name, panel in method.panels.items()
        },  # what the report draws of its log
        replaces=dict(method.replaces),  # beside what was asked for: what the method does instead
    )


def client_rows(fed: Federation, seen: tuple[int, ...]) -> dict[str, Any]:
    """What the figures over clients stand on: the split, and how many rows of it the clients
    have."""
    split = client_split(fed)
    size = np.asarray(fed.size[split])[list(seen)]
    return dict(split=split, least=int(size.min()), mean=float(size.mean()), most=int(size.max()))


def with_cohorts(
    config: Config, cohorts: tuple[tuple[int, ...], ...], clients: int, unseen: tuple[int, ...]
) -> Config:
    """`config` with fixed cohorts, checked; their size is the participation."""
    if isinstance(cohorts, (tuple, list)) and not cohorts:
        return config
    cohorts = provenance.check_cohorts(cohorts, clients, unseen)
    words = f"{len(cohorts[0])}/{clients}"
    if config.participation != Config.participation:  # somebody said something
        seen = clients - len(unseen)
        if parse_participation(config.participation, clients, seen) != (len(cohorts[0]),) * 2:
            raise UserError(
                f"participation '{config.participation}' does not fit cohorts of {len(cohorts[0])}"
                f" clients; use {words}, or leave it out"
            )
    return dataclasses.replace(config, cohorts=cohorts, participation=words)


def resolve_layout(
    config: Config,
    env: Env,
    fed: Federation,
    net: Tree,
    participation: Participation,
    on: Callable[[layouts.Layout], Simulation],
    say: Callable[[str], None] | None,
    measure: bool = True,
) -> tuple[layouts.Layout, dict[str, Any]]:
    """What `auto` becomes, and why; see `autotune`."""
    flops = step_flops(env, fed, net)
    sizes = np.asarray(fed.size["train"])[list(participation.seen)]
    steps = float((env.epochs * -(-sizes // env.batch_size)).mean() * participation.high)

    def place(choice: autotune.Choice) -> layouts.Layout:
        if (
            config.backend == "sharded" and choice.devices == 1
        ):  # as said: the sharded program, on a mesh of one
            mesh = jax.make_mesh(
                (1,), (layouts.CLIENTS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
            )
            return layouts.Layout(choice.chunk, mesh)
        return layouts.make_layout(choice.chunk, choice.devices)

    def stopwatch(choice: autotune.Choice) -> Callable[[], float]:
        interrupts.check()
        clock = autotune.stopwatch(on(place(choice)), config.seed, net)

        def seconds() -> float:
            interrupts.check()
            return clock()

        return seconds

    choice = autotune.choose(
        config,
        participation.high,
        sum(env.group_floats(net)),
        flops,
        flops * steps * config.rounds if measure else 0,
        stopwatch,
        say or (lambda text: None),
    )
    return place(choice), dict(
        chunk=choice.chunk,
        devices=choice.devices,
        device_kind=jax.default_backend(),
        chunk_why=choice.why,
    )


__all__ = ["Setup", "load_federation", "load_net", "prepare", "save_net", "want_host_devices"]
