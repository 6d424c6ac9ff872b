"""From a Config to a compiled simulation: data, model, method, layout. Everything a run needs, nothing it writes."""
from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import backends, losses, models, optim
from fedjax_sim.config import Config, check, straggler_terms
from fedjax_sim.data.federation import Federation
from fedjax_sim.data.protocols import federate
from fedjax_sim.engine import EVALUATIONS, Simulation, simulate
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.methods import make_method
from fedjax_sim.participation import Participation, parse_participation, unseen_clients
from fedjax_sim.types import Env, Method, Tree


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run, ready to start."""

    config: Config
    fed: Federation
    simulation: Simulation
    net: Tree                       # initial weights
    participation: Participation
    unseen: tuple[int, ...]
    resolved: dict[str, Any]        # what `auto` became


def float_type(config: Config) -> Any:
    if config.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
        return jnp.float64
    return jnp.float32


def load_federation(config: Config) -> Federation:
    return federate(config.dataset, config.partition, config.clients, config.protocol, config.data_seed,
                    data_dir=config.data_dir, download=config.download, norm=config.norm,
                    batch_size=config.batch_size, server_val=config.server_val, val_fraction=config.val_fraction)


def save_net(path: str | pathlib.Path, net: Tree) -> None:
    """Weights as a plain .npz: one array per leaf, named by its path, e.g. 'params/conv1/kernel'."""
    from fedjax_sim.files import write_npz
    flat = {"/".join(str(k.key) for k in key): np.asarray(value)
            for key, value in jax.tree_util.tree_flatten_with_path(net)[0]}
    write_npz(pathlib.Path(path), flat)


def load_net(path: str | pathlib.Path, like: Tree) -> Tree:
    """Weights written by `save_net`; must have exactly the shapes of `like`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
    except (OSError, ValueError):
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
    return jax.jit(model.init)(jax.random.fold_in(jax.random.key(seed), 0x1217))


def make_env(config: Config, fed: Federation, model: models.Model, method: Method, dtype: Any, high: int) -> Env:
    loss = losses.make_loss(config.loss, fed.classes, fed.name, **config.loss_options)
    return Env(model=model, loss=loss,
               optimizer=optim.sgd(config.momentum, config.weight_decay, config.decay_groups, model.groups),
               num_clients=fed.num_clients, cohort=high, batch_size=config.batch_size, epochs=config.epochs,
               max_epochs=max(config.epochs, method.max_epochs), rounds=config.rounds,
               track_confusion=loss.uses_confusion or "confusion" in method.needs,
               bn_local=config.bn_stats == "local" and "batch_stats" in jax.eval_shape(model.init, jax.random.key(0))
               and bool(jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))["batch_stats"])),
               dtype=dtype)


def want_host_devices(config: Config) -> None:
    """Ask for CPU devices before JAX starts its backend: as many as --devices says, else one per core."""
    wanted = int(config.devices) if config.devices != "auto" else backends.host_cores()
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:   # the backend runs already (a notebook, a test): take what is there
        pass


def resolve_layout(config: Config, cohort: int) -> tuple[backends.Layout, dict[str, Any]]:
    """chunk and devices: given, or the rule of thumb for this kind of device (`--chunk auto` may still measure)."""
    have, kind = backends.available_devices(), jax.default_backend()
    devices = int(config.devices) if config.devices != "auto" else min(have, cohort)
    if devices > have:
        raise UserError(f"devices {devices} is more than the {have} {kind} devices there are")
    if config.backend in ("loop", "chunked", "vmap") and config.devices == "auto":
        devices = 1
    share = -(-cohort // devices)
    if config.backend == "vmap":
        chunk = share
    elif config.chunk != "auto":
        chunk = min(int(config.chunk), share)
    else:
        chunk = 1 if kind == "cpu" else share
    return backends.make_layout(chunk, devices), dict(chunk=chunk, devices=devices, device_kind=kind)


def prepare(config: Config, *, fed: Federation | None = None, model: models.Model | None = None,
            net: Tree | None = None, method: Method | None = None, layout: backends.Layout | None = None,
            capacity: int = 32, cohorts: tuple[tuple[int, ...], ...] = ()) -> Setup:
    """Everything a run needs. Own data, model, initial weights or method may be given instead of names.

    cohorts: fixed participants round by round (an availability trace), repeated when it ends, instead of drawn ones.
    """
    check(config)
    dtype = float_type(config)
    jax.config.update("jax_default_matmul_precision", None if config.precision == "default" else config.precision)
    if fed is None:
        fed = load_federation(config)
    config = dataclasses.replace(config, clients=fed.num_clients,
                                 schedule_rounds=config.schedule_rounds or config.rounds)
    method = method or make_method(config.method, **config.options)
    model = model or models.build(config.model, fed.shape, fed.classes, dtype=dtype, conv=config.conv,
                                  **config.model_options)
    if method.extend:
        model = method.extend(model)
    for name in config.evaluations:
        if name not in EVALUATIONS:
            raise unknown("evaluation", name, EVALUATIONS)
    unseen = unseen_clients(config.unseen, fed.num_clients, config.data_seed)
    seen = tuple(i for i in range(fed.num_clients) if i not in set(unseen))
    low, high = parse_participation(config.participation, fed.num_clients, len(seen))
    participation = Participation(low, high, seen, config.dropout, straggler_terms(config.stragglers), cohorts)
    if net is None:
        net = initial_net(model, config.seed)
        if config.init:
            net = load_net(config.init, net)
    else:
        net = jax.tree.map(lambda a: jnp.asarray(a, dtype), net)
    env = make_env(config, fed, model, method, dtype, high)
    resolved: dict[str, Any] = {}
    if layout is None:
        layout, resolved = resolve_layout(config, high)
    simulation = simulate(method, env, fed, participation, layout, evaluations=config.evaluations,
                          lr=optim.schedule(config.schedule, config.lr, config.schedule_rounds),
                          eval_every=config.eval_every, probe=config.probe,
                          capacity=max(1, min(capacity, -(-config.rounds // config.eval_every))))
    return Setup(config, fed, simulation, net, participation, unseen, resolved)
