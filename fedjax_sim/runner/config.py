"""One run as plain data: everything that decides its numbers, and the few things that only decide
where it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from fedjax_sim import __version__, options
from fedjax_sim.errors import UserError

FORMAT = 4  # of config.json and of checkpoints

MOST = 2**31 - 1  # of what is counted in 32 bits
FULL = "full"  # batch size: a client's whole data
BACKENDS = ("auto", "loop", "chunked", "vmap", "sharded")
# these say where and how fast a run is computed, or how long; they do not change what it is
NOT_HASHED = frozenset(
    {
        "rounds",
        "chunk",
        "devices",
        "backend",
        "data_dir",
        "download",
        "init",
        "checkpoint_every",
        "keep",
        "state_on",
    }
)
# what `prepare` finds out and writes down; nobody gives these
FOUND = frozenset(
    {
        "started_with",
        "data",
        "data_fingerprint",
        "own_data",
        "own_method",
        "own_model",
        "own_optimizer",
        "own_loss",
        "model_shapes",
        "initial_weights",
    }
)
OWN = (  # stands for the words about data (partition, protocol, norm) where a Federation was given
    "own"
)


def other_format(what: str, stored: Mapping[str, Any]) -> UserError:
    """The refusal of files written by a version with other formats; it names both."""
    return UserError(
        f"{what} was written by fedjax_sim {stored.get('version', '0.1.0')} in format"
        f" {stored['format']}; this is version {__version__}, which reads format {FORMAT}"
    )


class Unsaid(float):
    """A default number that nobody has given: a method may have a better one. What somebody gives
    is a plain float.

    >>> Unsaid(0.9) == 0.9, isinstance(Config(momentum=0.9).momentum, Unsaid), isinstance(
    ...     Config().momentum, Unsaid
    ... )
    (True, False, True)
    """


UNSAID = ("lr", "momentum", "weight_decay")  # settings with such defaults


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a run; the defaults are the embedded demonstration job.

    >>> Config("fedavg", rounds=5).hash() == Config("fedavg", rounds=9, chunk="4").hash()
    True
    """

    method: str = "fedavg"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the method
    transforms: tuple[str, ...] = ()  # around it, e.g. "clip:1.0"; the first one nearest to it
    # data
    dataset: str = "digits"
    partition: str = "dirichlet:0.3"
    protocol: str = "standard"
    norm: str = "dataset"
    task: str = "auto"  # what the data look like
    clients: int | None = None  # None: 20, or one per value of a client column
    unseen: float = 0.0
    data_seed: int = 0
    server_val: int | None = (
        None  # examples the server holds back; None: 1000, or 10 % of a small set
    )
    val_fraction: float | None = None  # of every client's data; None: what the protocol says
    data_dir: str | None = None
    download: bool = False
    data: str = ""  # the Federation's description …
    data_fingerprint: str = ""  # … and the checksum of its content
    own_data: bool = False  # it was given from Python: no words here lead to it
    # model
    model: str = "lenet5"
    model_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    conv: str = "auto"
    init: str | None = None  # a file with initial weights (.npz written by save_net)
    bn_stats: str = "average"
    start_from: str | None = (
        None  # RUN:PART,PART: parts of another run's state; read once, its path is not kept
    )
    started_with: str = ""  # what was read: the parts and their checksum
    own_method: str = ""  # a method given as an object: as it is printed, e.g. "MyProx(mu=5.0)"
    own_model: bool = False  # given as an object
    model_shapes: str = ""  # checksum of the names, shapes and types of its weights
    initial_weights: str = ""  # checksum of the weights that `init` or the caller gave
    # training
    participation: str = "0.5"
    cohorts: tuple[
        tuple[int, ...], ...
    ] = ()  # fixed participants round by round, taken in turn, instead of draws
    rounds: int = 30
    epochs: float = 2.0
    batch_size: int | str = 32  # or "full": every client's whole training data in one batch
    shuffle: str = "on"  # off: minibatches in the order of the client's rows, in every epoch
    lr: float = Unsaid(0.02)
    schedule: str = "constant"
    schedule_rounds: int = 0  # rounds the schedule is laid over; 0: `rounds` of the first start
    # or a rule of optax with its numbers, e.g. "adamw:weight_decay=0.01"; "own": an object
    optimizer: str = "sgd"
    own_optimizer: str = ""  # checksum of what an object does
    optimizer_state: str = "round"  # or client: it stays with the client between rounds
    clip_norm: float = 0.0  # of the gradient of a step; 0: as it is
    local_schedule: str = "constant"  # of the learning rate within a round
    momentum: float = Unsaid(0.9)
    weight_decay: float = Unsaid(5e-4)
    decay_groups: str = "all"
    loss: str = "auto"  # auto: the method's own (mostly ce)
    own_loss: str = ""  # the name of a function given as the loss
    loss_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dropout: float = 0.0
    stragglers: str = "0"  # "p" or "p:least": chance of being slow, least share of the work done
    seed: int = 0
    # evaluation
    eval_every: int = 1
    evaluations: tuple[str, ...] = ("global", "personal")
    metrics: tuple[str, ...] = ()  # beside `metrics.DEFAULT`
    personal_every: int = 0  # for methods that fine-tune at evaluation; 0: only at the end
    probe: bool = False
    # computation
    dtype: str = "float32"
    precision: str = "default"
    activations: str = "auto"  # auto: as dtype
    chunk: str = "auto"
    devices: str = "auto"
    backend: str = "auto"
    state_on: str = "device"  # or host: clients' stored rows in host memory, the cohort's travel
    checkpoint_every: int = 0  # rounds; 0: about once a minute, and at the end
    keep: int = 2

    @property
    def activation_type(self) -> str:
        return self.dtype if self.activations == "auto" else self.activations

    def to_json(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        out |= {
            name: list(getattr(self, name)) for name in ("evaluations", "transforms", "metrics")
        }
        out["cohorts"] = [list(ids) for ids in self.cohorts]
        del out["start_from"]
        return out

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Config:
        known = {f.name for f in dataclasses.fields(cls)}
        extra = sorted(set(data) - known)
        if extra:
            raise UserError(
                f"the configuration has an unknown entry '{extra[0]}'; it was written by another"
                " version"
            )
        lists = dict(
            evaluations=tuple(data.get("evaluations", ("global", "personal"))),
            transforms=tuple(data.get("transforms", ())),
            metrics=tuple(data.get("metrics", ())),
            cohorts=tuple(map(tuple, data.get("cohorts", ()))),
        )
        return cls(**{**data, **lists})

    def hash(self) -> str:
        """Twelve hex digits over everything that decides the numbers (paths, chunk, devices, rounds
        do not).

        >>> same = [
        ...     Config("fedprox", options={"mu": mu}, lr=0.5).hash() for mu in (0.1, "0.10", "1e-1")
        ... ]
        >>> len(set(same))
        1
        """
        kept = {k: v for k, v in self.to_json().items() if k not in NOT_HASHED}
        if not self.schedule.startswith("cosine"):
            kept.pop("schedule_rounds")
        if self.shuffle == Config.shuffle:  # as before there was the option
            kept.pop("shuffle")
        for name in (
            "task",
            "optimizer",
            "own_optimizer",
            "own_loss",
            "optimizer_state",
            "clip_norm",
            "local_schedule",
        ):
            if getattr(self, name) == getattr(Config, name):
                kept.pop(name)
        if not self.transforms:
            kept.pop("transforms")
        if not self.metrics:
            kept.pop("metrics")
        if self.activation_type == self.dtype:
            kept.pop("activations")
        kept["dataset"] = without_folders(self.dataset)
        return hashlib.sha256(json.dumps(canonical(kept), sort_keys=True).encode()).hexdigest()[:12]


def without_folders(dataset: str) -> str:
    """A dataset as the hash knows it: a file by its name alone, since where it lies changes
    nothing.

    >>> without_folders("/data/mine.npz"), without_folders("folder:a/b,size=32"), without_folders(
    ...     "digits"
    ... )
    ('mine.npz', 'folder:b,size=32', 'digits')
    """
    kind, colon, rest = str(dataset).partition(":")
    if not colon or "/" in kind:
        return str(dataset).rstrip("/").rpartition("/")[2]
    return f"{kind}:{rest.rstrip('/').rpartition('/')[2]}"


def canonical(value: Any) -> Any:
    """One form for what means the same: numbers however they are written, lists of one, true and
    false.

    >>> canonical({"mu": "0.10", "hidden": (64,)}) == canonical({"mu": 0.1, "hidden": "64"})
    True
    >>> canonical("64x32") == canonical([64, 32]), canonical("cifar")
    (True, 'cifar')
    """
    if isinstance(value, Mapping):
        return {k: canonical(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return canonical(value[0]) if len(value) == 1 else [canonical(v) for v in value]
    if isinstance(value, (bool, int)):
        return float(value) if abs(value) < 2**53 else str(value)
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return float(value.lower() == "true")
    for read in (options.whole, options.real, options.widths):
        try:
            return canonical(read(value)) if read is not options.real else read(value)
        except ValueError:
            pass
    return value


def check(config: Config) -> None:
    """Refuse impossible values, one sentence each."""

    def positive(name: str, least: float = 1) -> None:
        value = getattr(config, name)
        if not value >= least:
            raise UserError(
                f"{name.replace('_', '-')} {value} is too small; allowed: {least:g} or more"
            )

    counted = (
        *(("batch_size",) if config.batch_size != FULL else ()),
        *(("clients",) if config.clients is not None else ()),
    )
    for name in ("rounds", "eval_every", "keep", *counted):
        positive(name)
    for name in ("rounds", "eval_every", *(n for n in counted if n != "clients")):
        if getattr(config, name) > MOST:
            raise UserError(
                f"{name.replace('_', '-')} {getattr(config, name)} is too large; allowed: {MOST} or"
                " less"
            )
    for name in ("epochs", "lr", "weight_decay", "clip_norm", "unseen", "dropout"):
        if not math.isfinite(getattr(config, name)):
            raise UserError(
                f"{name.replace('_', '-')} {getattr(config, name)} is not allowed; use a finite"
                " number"
            )
    for name in ("seed", "data_seed"):
        if not 0 <= getattr(config, name) < 2**63:  # what the random generators take
            raise UserError(
                f"{name.replace('_', '-')} {getattr(config, name)} is not allowed; use a whole"
                " number from 0 to 2^63 - 1"
            )
    if not config.epochs > 0:
        raise UserError(
            f"epochs {config.epochs:g} is not allowed; use a number above 0 (fractions are counted"
            " in steps)"
        )
    for name in (
        "lr",
        "momentum",
        "weight_decay",
        "clip_norm",
        "personal_every",
        "checkpoint_every",
    ):
        positive(name, 0)
    if config.server_val is not None:
        positive("server_val", 0)
    if not config.momentum < 1:
        raise UserError(f"momentum {config.momentum:g} is not allowed; use a number in [0, 1)")
    if not 0 <= config.dropout <= 1:
        raise UserError(f"dropout {config.dropout:g} is not a probability; allowed: 0 to 1")
    for name, allowed in (
        ("dtype", ("float32", "float64")),
        ("bn_stats", ("average", "local")),
        ("precision", ("default", "high", "highest")),
        ("activations", ("auto", "float32", "bfloat16")),
        ("state_on", ("device", "host")),
        ("shuffle", ("on", "off")),
        ("optimizer_state", ("round", "client")),
        ("backend", BACKENDS),
    ):
        options.choice(name.replace("_", "-"), getattr(config, name), allowed)
    if config.dtype == "float64" and config.activation_type != "float64":
        raise UserError(
            f"activations {config.activations} do not go with dtype float64; leave one of them out"
        )
    if config.state_on == "host" and config.backend == "loop":
        raise UserError(
            "state-on host is not possible with backend 'loop'; allowed: auto, chunked, vmap,"
            " sharded"
        )
    for name in ("chunk", "devices"):
        number_or_auto(name, getattr(config, name))
    if (
        config.backend in ("loop", "chunked")
        and (number_or_auto("devices", config.devices) or 1) > 1
    ):
        raise UserError(
            f"backend {config.backend} runs on one device, not {config.devices}; use backend"
            " sharded, vmap or auto"
        )
    straggler_terms(config.stragglers)


def number_or_auto(name: str, text: Any) -> int | None:
    """chunk or devices as a number, None for auto.

    >>> number_or_auto("chunk", "auto"), number_or_auto("chunk", "4")
    (None, 4)
    """
    try:
        return options.auto_or(options.at_least(1, options.whole))(str(text))
    except ValueError:
        raise UserError(
            f"{name} '{text}' is not allowed; use auto or a whole number of 1 or more"
        ) from None


def straggler_terms(text: str) -> tuple[float, float]:
    """'p' or 'p:least' -> (chance of being slow, least share of the work).

    >>> straggler_terms("0.3:0.2"), straggler_terms("0.3")
    ((0.3, 0.2), (0.3, 0.1))
    """
    try:
        parts = [options.real(part) for part in str(text).split(":")]
        chance, least = parts[0], parts[1] if len(parts) > 1 else 0.1
        if len(parts) > 2 or not (0 <= chance <= 1 and 0 < least <= 1):
            raise ValueError
    except ValueError:
        raise UserError(
            f"stragglers '{text}' is not allowed; use p or p:least, e.g. 0.3:0.2 (30 % of the"
            " clients manage between 20 % and all of their work)"
        ) from None
    return chance, least
