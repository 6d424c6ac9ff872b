"""Every setting of a run, declared once: its name, type, default, help text, allowed values, how it
is read from text, and whether it is in the hash.

Keywords of `fedjax_sim.run`, options of the command line and their help, presets, sweep files,
entries of `compare`, config.json, the hash and the checks of values all follow from these classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedjax_sim.errors import UserError, unknown
from fedjax_sim.experiment import kinds
from fedjax_sim.experiment.kinds import REAL, SWITCH, TEXT, WHOLE, Kind, Pair, items, word_or
from fedjax_sim.options import shown

MOST = 2**31 - 1  # of a 32-bit counter
FULL = "full"  # batch size: all data of a client
AUTO = "auto"
FOLLOW = "follow"  # data seed: the seed of the run
GIVEN = "own"  # in config.json in place of a name, if an object was given from Python
BACKENDS = (AUTO, "loop", "chunked", "vmap", "sharded")
ALWAYS, CHANGED, NEVER = "always", "changed", "never"  # in the hash; CHANGED: unless default


class Setting(NamedTuple):
    """The declaration of a setting, beside its type and default."""

    kind: Kind
    help: str = ""
    metavar: str | None = None
    key: str = ""  # the keyword, if it is not the field's name
    flag: str | None = None  # the option of the command line, if it differs; "": none
    choices: tuple[str, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    allowed: str = ""  # the allowed values in an error message
    otherwise: float | None = None  # the value of None, unless the method has its own
    hashed: str = ALWAYS

    def read(self, name: str, value: Any, default: Any) -> Any:
        """The value, or a UserError in one sentence."""
        if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:  # a NumPy number
            value = value.item()
        if value is None and default is None:
            return None
        name = name.replace("_", "-")
        try:
            value = self.kind.read(value)
        except TypeError as wanted:
            raise UserError(f"{name} {shown(repr(value))} is not {wanted}") from None
        except ValueError as reason:
            more = self.otherwise if default is None else default
            more = (
                "" if more is None or ";" in str(reason) else f"; default: {self.kind.text(more)}"
            )
            text = ":".join(map(str, value)) if isinstance(value, (tuple, list)) else value
            raise UserError(f"{name} '{shown(str(text))}' is {reason}{more}") from None
        self.check(name, value)
        return value

    def check(self, name: str, value: Any) -> None:
        if self.choices and value not in self.choices:
            raise unknown(name, shown(str(value)), self.choices)
        if isinstance(value, (str, bool, tuple, Mapping)) or value is None:
            return
        low = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        high = (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)
        if low and high:
            return
        if self.allowed:
            raise UserError(f"{name} {value:g} is not allowed; use {self.allowed}")
        if not low:
            raise UserError(f"{name} {value} is too small; allowed: {self.ge:g} or more")
        raise UserError(f"{name} {value} is too large; allowed: {self.le:.10g} or less")


def setting(
    default: Any, kind: Kind, help: str = "", metavar: str | None = None, **more: Any
) -> Any:
    """A field of a part; see `Setting`."""
    metadata = {"setting": Setting(kind, help, metavar, **more)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Part:
    """A group of settings; values are read and checked when it is created."""

    def __post_init__(self) -> None:
        for key, one, name, default in declared(type(self)):
            value = one.read(key, getattr(self, name), default)
            object.__setattr__(self, name, value)


def declared(part: type) -> Iterator[tuple[str, Setting, str, Any]]:
    """(keyword, declaration, name of the field, default) of every setting of a part."""
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        one: Setting = field.metadata["setting"]
        default = {} if field.default is dataclasses.MISSING else field.default
        yield one.key or field.name, one, field.name, default


# fmt: off
SEED = dict(ge=0, le=2**63 - 1, allowed="a whole number from 0 to 2^63 - 1")
COUNT = dict(ge=1, le=MOST)
FROM_0 = dict(ge=0, le=MOST)


@dataclasses.dataclass(frozen=True)
class Data(Part):
    """The data and their split over clients."""

    dataset: str = setting(
        "digits", TEXT, "{datasets}, or a .npz or .csv file; some take options: NAME:key=value,"
        " FILE.csv:label=L,client=C,features=A+B", "D",
    )
    partition: str = setting(
        "dirichlet:0.3", TEXT, "{partitions}; with options as in dirichlet:0.1 or shards:2", "P"
    )
    protocol: str = setting("standard", TEXT, "train/val/test protocol: {protocols}", "S")
    task: str = setting(
        AUTO, TEXT, "{tasks}, or auto: by the form of the data", hashed=CHANGED
    )
    norm: str = setting("dataset", TEXT, "normalisation: dataset, pfllib (0.5, 0.5) or none")
    clients: int | None = setting(
        None, WHOLE, "number of clients N (default: 20, or the values of a client column)", "N",
        ge=1,
    )
    unseen: float = setting(
        0.0, REAL,
        "clients kept out of training but evaluated: a fraction, or a number from 1 up", "U",
    )
    data_seed: int = setting(  # FOLLOW becomes the seed of the run
        0, word_or(FOLLOW, WHOLE),
        "seed of the partition and splits, or 'follow': the same as --seed", "s", **SEED,
    )
    server_val: int | None = setting(
        None, WHOLE, "examples the server keeps for validation (default: 1000, or 10 %% of a"
        " small set)", "n", ge=0,
    )
    val_fraction: float | None = setting(
        None, REAL, "share of a client's data kept for validation (default: the protocol's)", "f"
    )
    data_dir: str | None = setting(
        None, kinds.PATH,
        "folder with NAME.npz files; also the environment variable FEDJAX_SIM_DATA", "DIR",
        hashed=NEVER,
    )
    download: bool = setting(
        False, SWITCH, "fetch a missing dataset through tensorflow-datasets", hashed=NEVER
    )


@dataclasses.dataclass(frozen=True)
class Model(Part):
    """The network and its initial weights."""

    name: str = setting("lenet5", TEXT, "{models}", "M", key="model")
    options: dict[str, Any] = setting({}, kinds.OPTIONS, key="model_options", flag="")
    conv: str = setting(
        AUTO, TEXT, "how convolutions are computed (equal values): {convolutions}"
    )
    init: str | None = setting(
        None, kinds.PATH, "initial weights from a .npz or .msgpack file, such as export writes",
        "FILE", hashed=NEVER,
    )
    start_from: str | None = setting(  # read once; its path is not kept
        None, kinds.PATH,
        "parts of another run's state to start with, e.g. runs/first:agent,server",
        "RUN:PART,PART", hashed=NEVER,
    )
    bn_stats: str = setting(
        "average", TEXT,
        "BatchNorm running statistics: average (on the server) or local (stay on the client)",
        choices=("average", "local"),
    )


@dataclasses.dataclass(frozen=True)
class Method(Part):
    """The method by name, its options, and the transforms around it, the innermost first."""

    name: str = setting("fedavg", TEXT, key="method", flag="")
    options: dict[str, Any] = setting({}, kinds.OPTIONS, flag="")
    transforms: tuple[str, ...] = setting(
        (), items("a list of transforms, such as ('clip:1.0', 'topk:0.01')", several=False),
        "a transform around the method: {transforms}, e.g. clip:1.0 or"
        " server_optimizer:rule=adam,lr=0.01; may be repeated, the innermost first",
        "NAME[:VALUE,…]", flag="transform", hashed=CHANGED,
    )


@dataclasses.dataclass(frozen=True)
class Training(Part):
    """Rounds, participants and local training."""

    participation: float | Pair | str = setting(
        0.5, kinds.PARTICIPATION, "per round: a fraction 0.1, a number of clients 10, a range"
        " 0.5:1 or 5:20, or n of N as 10/50", "r",
    )
    # fixed participants round by round, taken in turn, instead of draws
    cohorts: tuple[tuple[int, ...], ...] = setting((), kinds.COHORTS, flag="")
    rounds: int = setting(30, WHOLE, "rounds T", "T", hashed=NEVER, **COUNT)
    epochs: float = setting(
        2.0, REAL, "local epochs E; fractions are counted in steps", "E", gt=0,
        allowed="a number above 0 (fractions are counted in steps)",
    )
    batch_size: int | str = setting(
        32, word_or(FULL, WHOLE), "batch size B, or full: all data of a client in one batch", "B",
        **COUNT,
    )
    shuffle: bool = setting(
        True, kinds.ON_OFF,
        "on, or off: minibatches in the order of a client's rows, in every epoch", hashed=CHANGED,
    )
    lr: float | None = setting(None, REAL, "local learning rate", "η", ge=0, otherwise=0.02)
    schedule: str = setting(
        "constant", TEXT, "learning rate over rounds: {schedules}; with options as in"
        " step:every=30,gamma=0.1 or cosine:end=0",
    )
    # rounds that the schedule spans; 0: `rounds` of the first start
    schedule_rounds: int = setting(0, WHOLE, flag="")
    optimizer: str = setting(
        "sgd", TEXT, "local optimiser: {optimizers}; with options as in"
        " adamw:lr=1e-3,weight_decay=0.01", "NAME[:OPTION=VALUE,…]", hashed=CHANGED,
    )
    optimizer_state: str = setting(
        "round", TEXT, "the optimiser's state: new in every round (round), or kept by the client"
        " (client)", choices=("round", "client"), hashed=CHANGED,
    )
    clip_norm: float = setting(
        0.0, REAL, "clip the gradient of every step to this norm (0: no clipping)", "c", ge=0,
        hashed=CHANGED,
    )
    local_schedule: str = setting(
        "constant", TEXT, "learning rate within a round: {local_schedules}; with options as in"
        " linear:end=0.1 or warmup:steps=10", hashed=CHANGED,
    )
    momentum: float | None = setting(
        None, REAL, "SGD momentum", "m", ge=0, lt=1, allowed="a number in [0, 1)", otherwise=0.9
    )
    weight_decay: float | None = setting(
        None, REAL, "SGD's coupled weight decay, as in PyTorch", "w", ge=0, otherwise=5e-4
    )
    decay_groups: str = setting(
        "all", TEXT, "parameter groups that decay: all, or names joined by +"
    )
    loss: str = setting(AUTO, TEXT, "local loss: {losses}; auto: the method's own", "L")
    loss_options: dict[str, Any] = setting({}, kinds.OPTIONS, flag="")
    dropout: float = setting(
        0.0, REAL, "probability that a participant does not report", "p", ge=0, le=1,
        allowed="a probability, 0 to 1",
    )
    stragglers: Pair = setting(
        (0.0, kinds.LEAST_SHARE), kinds.STRAGGLERS,
        "p or p:least: probability of being slow, and the least share of the work done", "p",
    )
    seed: int = setting(0, WHOLE, "seed of weights, cohorts and shuffles", "s", **SEED)


@dataclasses.dataclass(frozen=True)
class Evaluation(Part):
    """Metrics and when they are measured."""

    evaluations: tuple[str, ...] = setting(
        ("global", "personal"),
        items("a list of evaluation modes, such as ('global', 'personal')", least=1),
        "comma list of {evaluations}", "MODES", flag="evaluate",
    )
    metrics: tuple[str, ...] = setting(
        (), items("a list of metrics, such as ('recall', 'calibration')"),
        "comma list of {metrics}, added to accuracy, loss, worst_decile", "NAMES", hashed=CHANGED,
    )
    probe: bool = setting(
        False, SWITCH, "record participants' accuracy before and after local training"
    )
    eval_every: int = setting(1, WHOLE, "evaluate every k rounds", "k", **COUNT)
    personal_every: int = setting(
        0, WHOLE, "methods that fine-tune at evaluation do so every k rounds (0: at the end only)",
        "k", **FROM_0,
    )


@dataclasses.dataclass(frozen=True)
class Compute(Part):
    """Devices, precision and checkpoints."""

    dtype: str = setting(
        "float32", TEXT, "float32 or float64", choices=("float32", "float64")
    )
    precision: str = setting(
        "default", TEXT, "float32 products on accelerators: default (one bfloat16 pass on TPU, TF32"
        " on NVIDIA), high, highest", choices=("default", "high", "highest"),
    )
    activations: str = setting(
        AUTO, TEXT, "between layers: auto (as --dtype), float32, or bfloat16, where weights, their"
        " gradients and sums stay float32", choices=(AUTO, "float32", "bfloat16"),
    )
    chunk: int | str = setting(
        AUTO, kinds.COUNT_OR_AUTO, "clients side by side on one device: auto, or a number", "n",
        hashed=NEVER,
    )
    devices: int | str = setting(
        AUTO, kinds.COUNT_OR_AUTO,
        "devices to share the cohort: auto (one per core on a CPU), or a number", "n",
        hashed=NEVER,
    )
    backend: str = setting(
        AUTO, TEXT, f"{', '.join(BACKENDS)}; loop is for debugging and names the failing client",
        choices=BACKENDS, hashed=NEVER,
    )
    state_on: str = setting(
        "device", TEXT,
        "where client states are stored: device, or host (only the cohort's go to the device)",
        choices=("device", "host"), hashed=NEVER,
    )
    checkpoint_every: int = setting(
        0, WHOLE, "rounds between checkpoints (0: about once a minute)", "k", hashed=NEVER,
        **FROM_0,
    )
    keep: int = setting(2, WHOLE, "checkpoints kept", "k", hashed=NEVER, **COUNT)
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype == "float64" and self.activation_type != "float64":
            raise UserError(
                f"activations {self.activations} does not go with dtype float64; leave one of them"
                " out"
            )
        if self.state_on == "host" and self.backend == "loop":
            raise UserError(
                "state-on host is not possible with backend 'loop'; allowed: auto, chunked, vmap,"
                " sharded"
            )
        if self.backend in ("loop", "chunked") and self.devices not in (AUTO, 1):
            raise UserError(
                f"backend {self.backend} runs on one device, not {self.devices}; use backend"
                " sharded, vmap or auto"
            )

    @property
    def activation_type(self) -> str:
        return self.dtype if self.activations == AUTO else self.activations


PARTS: dict[str, type[Part]] = dict(
    data=Data, model=Model, method=Method, training=Training, evaluation=Evaluation, compute=Compute
)
