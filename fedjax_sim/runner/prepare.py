"""From a Config to a compiled simulation: data, model, method, layout. Everything a run needs, nothing it writes."""

from __future__ import annotations

import dataclasses
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import models
from fedjax_sim.data.federation import Federation
from fedjax_sim.data.protocols import federate
from fedjax_sim.engine import host_rows
from fedjax_sim.engine import layout as layouts
from fedjax_sim.engine.evaluation import check_evaluations
from fedjax_sim.engine.participation import Participation, parse_participation, unseen_clients
from fedjax_sim.engine.round import seed_key
from fedjax_sim.engine.simulation import Simulation, simulate
from fedjax_sim.errors import UserError
from fedjax_sim.hooks import Method
from fedjax_sim.local import losses, optim
from fedjax_sim.methods import make_method
from fedjax_sim.runner import autotune, checkpoint
from fedjax_sim.runner.config import Config, check, number_or_auto, straggler_terms
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
    resolved: dict[str, Any]  # what `auto` became
    given_net: bool = False  # the weights come from the caller or a file, not from the seed
    parts: checkpoint.Parts | None = None  # of another run's state, to start from

    def first_state(self) -> State:
        """The State before round 1."""
        state = self.simulation.init(self.config.seed, self.net)
        return state if self.parts is None else checkpoint.load_parts(self.parts, state)


def float_type(config: Config) -> Any:
    if config.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
        return jnp.float64
    return jnp.float32


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
        batch_size=config.batch_size,
        server_val=config.server_val,
        val_fraction=config.val_fraction,
    )


def save_net(path: str | pathlib.Path, net: Tree) -> None:
    """Weights as a plain .npz: one array per leaf, named by its path, e.g. 'params/conv1/kernel'."""
    from fedjax_sim.runner.files import write_npz

    flat = {
        "/".join(str(k.key) for k in key): np.asarray(value) for key, value in jax.tree_util.tree_flatten_with_path(net)[0]
    }
    write_npz(pathlib.Path(path), flat)


def load_net(path: str | pathlib.Path, like: Tree) -> Tree:
    """Weights written by `save_net`; must have exactly the shapes of `like`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile):
        raise UserError(f"initial weights '{path}' cannot be read as .npz") from None

    def pick(key: Any, leaf: Any) -> Any:
        name = "/".join(str(k.key) for k in key)
        if name not in stored or stored[name].shape != leaf.shape:
            has = f"has shape {stored[name].shape}" if name in stored else "is missing"
            raise UserError(f"initial weights '{path}': '{name}' {has}; the model wants shape {leaf.shape}")
        return jnp.asarray(stored[name], leaf.dtype)

    return jax.tree_util.tree_map_with_path(pick, like)


def initial_net(model: models.Model, seed: int) -> Tree:
    """Initial weights: a function of the model and the seed alone, so every method starts from the same."""
    return jax.jit(model.init)(jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(seed_key(seed))), 0x1217))


def make_env(
    config: Config, fed: Federation, model: models.Model, method: Method, dtype: Any, high: int, kept_out: int
) -> Env:
    loss = losses.make_loss(config.loss, fed.classes, fed.name, **config.loss_options)
    return Env(
        model=model,
        loss=loss,
        optimizer=optim.Sgd(config.momentum, config.weight_decay, optim.decay_groups(config.decay_groups, model.groups)),
        num_clients=fed.num_clients,
        cohort=high,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_epochs=max(config.epochs, method.max_epochs),
        kept_out=kept_out,
        rounds=config.rounds,
        track_confusion=loss.uses_confusion or "confusion" in method.needs,
        bn_local=config.bn_stats == "local"
        and "batch_stats" in jax.eval_shape(model.init, jax.random.key(0))
        and bool(jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))["batch_stats"])),
        dtype=dtype,
    )


def want_host_devices(config: Config, processes: int = 1) -> None:
    """Ask for CPU devices before JAX starts its backend: as many as --devices says (in all), else one per core."""
    number = number_or_auto("devices", config.devices)
    wanted = max(1, number // processes) if number is not None else layouts.host_cores()
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:  # the backend runs already (a notebook, a test): take what is there
        pass


def step_flops(env: Env, fed: Federation, net: Tree) -> float:
    """Floating-point operations of one gradient step, from the unoptimised program; nothing is compiled or run."""
    x = jax.ShapeDtypeStruct((env.batch_size, *fed.shape), env.dtype)
    y = jax.ShapeDtypeStruct((env.batch_size,), jnp.int32)

    def loss(params, x, y):
        features, _ = env.model.features({**net, "params": params}, x, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(env.model.head({**net, "params": params}, features), y).mean()

    cost = jax.jit(jax.grad(loss)).lower(jax.eval_shape(lambda: net["params"]), x, y).cost_analysis()
    return float((cost or {}).get("flops", 0.0))


def host_devices_missing(config: Config) -> None:
    have, number = layouts.available_devices(), number_or_auto("devices", config.devices)
    if number is not None and number > have:
        raise UserError(f"devices {config.devices} is more than the {have} {jax.default_backend()} devices there are")


def prepare(
    config: Config,
    *,
    fed: Federation | None = None,
    model: models.Model | None = None,
    net: Tree | None = None,
    method: Method | None = None,
    layout: layouts.Layout | None = None,
    capacity: int = 32,
    cohorts: tuple[tuple[int, ...], ...] = (),
    say: Callable[[str], None] | None = None,
    measure: bool = True,
) -> Setup:
    """Everything a run needs. Own data, model, initial weights or method may be given instead of names.

    cohorts: fixed participants round by round (an availability trace), repeated when it ends, instead of drawn ones.
    measure: whether `--chunk auto` may time layouts for a long run.
    """
    check(config)
    parts = checkpoint.find_parts(config.start_from) if config.start_from else None
    if parts is not None:
        config = dataclasses.replace(config, started_with=parts.fingerprint())
    dtype = float_type(config)
    jax.config.update("jax_default_matmul_precision", None if config.precision == "default" else config.precision)
    if fed is None:
        fed = load_federation(config)
    config = dataclasses.replace(config, clients=fed.num_clients, schedule_rounds=config.schedule_rounds or config.rounds)
    method = method or make_method(config.method, **config.options)
    config = dataclasses.replace(config, loss=method.loss if config.loss == "auto" else config.loss)
    model = model or models.build(
        config.model, fed.shape, fed.classes, dtype=dtype, conv=config.conv, **config.model_options
    )
    if method.extend:
        model = method.extend(model)
    unseen = unseen_clients(config.unseen, fed.num_clients, config.data_seed)
    seen = tuple(i for i in range(fed.num_clients) if i not in set(unseen))
    low, high = parse_participation(config.participation, fed.num_clients, len(seen))
    participation = Participation(low, high, seen, config.dropout, straggler_terms(config.stragglers), cohorts)
    given_net = net is not None or bool(config.init)
    if net is None:
        net = initial_net(model, config.seed)
        if config.init:
            net = load_net(config.init, net)
    else:
        net = jax.tree.map(lambda a: jnp.asarray(a, dtype), net)
    env = make_env(config, fed, model, method, dtype, high, len(unseen))
    check_evaluations(method, config.evaluations, env.bn_local)
    host_devices_missing(config)

    def on(layout: layouts.Layout, stored: str) -> Simulation:
        return simulate(
            method,
            env,
            fed,
            participation,
            layout,
            evaluations=config.evaluations,
            lr=optim.schedule(config.schedule, config.lr, config.schedule_rounds),
            eval_every=config.eval_every,
            probe=config.probe,
            stored=stored,
            capacity=max(1, min(capacity, -(-config.rounds // config.eval_every))),
        )

    resolved: dict[str, Any] = {}
    if layout is None:
        # timed on a cohort's rows alone: the stopwatch needs no second copy of everybody's
        some = "all" if method.peers else "cohort"
        layout, resolved = resolve_layout(
            config, env, fed, net, participation, lambda layout: on(layout, some), say, measure
        )
    simulation = host_rows.on_host(on(layout, "cohort")) if config.state_on == "host" else on(layout, "all")
    return Setup(config, fed, simulation, net, participation, unseen, resolved, given_net, parts)


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
    choice = autotune.choose(
        config,
        participation.high,
        sum(env.group_floats(net)),
        flops,
        flops * steps * config.rounds if measure else 0,
        lambda c: autotune.stopwatch(on(layouts.make_layout(c.chunk, c.devices)), config.seed, net),
        say or (lambda text: None),
    )
    layout = layouts.make_layout(choice.chunk, choice.devices)
    return layout, dict(chunk=choice.chunk, devices=choice.devices, device_kind=jax.default_backend(), chunk_why=choice.why)
