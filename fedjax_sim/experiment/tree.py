"""An experiment: all settings of a run as one frozen tree; what `prepare` finds out about it; its
hash and its form in config.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_sim import __version__, options
from fedjax_sim.errors import UserError
from fedjax_sim.experiment import settings
from fedjax_sim.experiment.settings import (
    CHANGED,
    FOLLOW,
    NEVER,
    PARTS,
    Compute,
    Data,
    Evaluation,
    Method,
    Model,
    Setting,
    Training,
)

FORMAT = 5  # of config.json
FLAT_FORMAT = 4  # the older one, still read: settings and `Found` in one table


@dataclasses.dataclass(frozen=True)
class Found:
    """What `prepare` finds out about a run, kept beside the settings. custom_…: given from Python
    as an object, so that the settings do not determine it."""

    data: str = ""  # the Federation's description
    data_fingerprint: str = ""  # the checksum of its content
    custom_data: bool = False
    custom_method: str = ""  # its repr, e.g. "MyProx(mu=5.0)"
    custom_model: bool = False
    custom_optimizer: str = ""  # a checksum of its program
    custom_loss: str = ""  # the name of the function
    model_shapes: str = ""  # checksum of the names, shapes and types of its weights
    initial_weights: str = ""  # checksum of weights from `init` or the caller
    started_with: str = ""  # parts of another run's State, and their checksum


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All settings of a run; the defaults are FedAvg on the embedded digits.

    >>> Experiment.of(rounds=5).hash() == Experiment.of("fedavg", rounds=9, chunk=4).hash()
    True
    >>> Experiment.of("fedprox", mu="0.1", participation="5:20").training.participation
    (5, 20)
    """

    data: Data = Data()
    model: Model = Model()
    method: Method = Method()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    compute: Compute = Compute()

    def __post_init__(self) -> None:
        if self.data.data_seed == FOLLOW:
            data = dataclasses.replace(self.data, data_seed=self.training.seed)
            object.__setattr__(self, "data", data)

    @staticmethod
    def of(method: str = "fedavg", **flat: Any) -> Experiment:
        """An experiment from the keywords of `fedjax_sim.run`."""
        from fedjax_sim.experiment.given import experiment_of

        return experiment_of(method, flat)

    def get(self, key: str) -> Any:
        """The value of a setting by its keyword."""
        part, name, _, _ = SETTINGS[key]
        return getattr(getattr(self, part), name)

    def replace(self, **flat: Any) -> Experiment:
        """A copy with other values of some settings, by their keywords.

        >>> Experiment().replace(lr=0.1, clients=5).data.clients
        5
        """
        parts: dict[str, dict[str, Any]] = {}
        for key, value in flat.items():
            part, name, _, _ = SETTINGS[key]
            parts.setdefault(part, {})[name] = value
        changed = {part: dataclasses.replace(getattr(self, part), **v) for part, v in parts.items()}
        return dataclasses.replace(self, **changed)

    def flat(self) -> dict[str, Any]:
        """{keyword: value}, as text where JSON has no such value (a range, on and off)."""
        out = {}
        for key, (_, _, one, _) in SETTINGS.items():
            value = one.otherwise if self.get(key) is None else self.get(key)
            out[key] = None if value is None else one.kind.text(value)
        return out

    def hash(self, found: Found | None = None) -> str:
        """Twelve hex digits over everything that decides the numbers, so not over paths, chunk,
        devices and rounds.

        >>> same = [Experiment.of("fedprox", mu=mu, lr=0.5).hash() for mu in (0.1, "0.10", "1e-1")]
        >>> len(set(same))
        1
        """
        kept = self.flat()
        for key, (_, _, one, default) in SETTINGS.items():
            if one.hashed == NEVER or (one.hashed == CHANGED and self.get(key) == default):
                del kept[key]
        if not self.training.schedule.startswith("cosine"):
            del kept["schedule_rounds"]
        if self.compute.activation_type == self.compute.dtype:
            del kept["activations"]
        kept["dataset"] = without_folders(self.data.dataset)
        kept |= flat_found(found or Found())
        for key in ("own_optimizer", "own_loss"):
            if not kept[key]:
                del kept[key]
        return hashlib.sha256(json.dumps(canonical(kept), sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, dict[str, Any]]:
        out = dataclasses.asdict(self)
        del out["model"]["start_from"]  # a path that is read only at the start
        return out


# keyword -> (part, name of the field, declaration, default)
SETTINGS: dict[str, tuple[str, str, Setting, Any]] = {
    key: (part, name, one, default)
    for part, kind in PARTS.items()
    for key, one, name, default in settings.declared(kind)
}


def flat_found(found: Found) -> dict[str, Any]:
    """`found` with the names in the hash and in the older config.json."""
    return {k.replace("custom_", "own_"): v for k, v in dataclasses.asdict(found).items()}


class Stored(NamedTuple):
    """The content of a config.json."""

    experiment: Experiment
    found: Found
    resolved: dict[str, Any]
    hash: str


# ---- config.json ---------------------------------------------------------------------------------
def read_config(data: Mapping[str, Any]) -> tuple[Experiment, Found]:
    """The experiment in a config.json of this format or of the older flat one."""
    if "experiment" in data:
        parts = {part: dict(values) for part, values in data["experiment"].items()}
        found = dict(data["found"])
    else:
        names = {f.name.replace("custom_", "own_"): f.name for f in dataclasses.fields(Found)}
        flat = dict(data["config"])
        found = {name: flat.pop(key) for key, name in names.items() if key in flat}
        parts = {}
        for key, value in flat.items():
            part, name, _, _ = SETTINGS.get(key, ("", key, None, None))
            parts.setdefault(part, {})[name] = value
    known = {part: {f.name for f in dataclasses.fields(PARTS[part])} for part in PARTS}  # type: ignore[arg-type]
    for part, values in parts.items():
        for name in sorted(set(values) - known.get(part, set())):
            raise UserError(
                f"the configuration has an unknown entry '{name}'; it was written by another"
                " version"
            )
    nodes: Any = {part: PARTS[part](**values) for part, values in parts.items()}
    return Experiment(**nodes), Found(**found)


def flat_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json as {keyword: value}, `Found` included."""
    if "experiment" not in data:
        return dict(data["config"])
    experiment, found = read_config(data)
    return experiment.flat() | flat_found(found)


def other_format(what: str, stored: Mapping[str, Any], reads: int = FORMAT) -> UserError:
    """The error for files written in another format; it names both versions."""
    return UserError(
        f"{what} was written by fedjax_sim {stored.get('version', '0.1.0')} in format"
        f" {stored['format']}; this is version {__version__}, which reads format {reads}"
    )


# ---- canonical values, for the hash --------------------------------------------------------------
def without_folders(dataset: str) -> str:
    """A dataset without the folders of its path, which the hash ignores.

    >>> without_folders("/data/mine.npz"), without_folders("folder:a/b,size=32")
    ('mine.npz', 'folder:b,size=32')
    """
    kind, colon, rest = dataset.partition(":")
    if not colon or "/" in kind:
        return dataset.rstrip("/").rpartition("/")[2]
    return f"{kind}:{rest.rstrip('/').rpartition('/')[2]}"


def canonical(value: Any) -> Any:
    """One form for equal values: numbers in any notation, lists of one, true and false.

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
