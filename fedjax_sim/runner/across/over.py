"""Federations drawn at random: `--over "dirichlet:0.03..1, clients:20..60, data:mnist|digits"`.

    dirichlet:A..B       α of the label skew, log-uniform
    clients:A..B         N, log-uniform
    participation:A..B   share of the clients per round, log-uniform
    examples:A..B        examples per client on average, log-uniform; 15 % validate, 45 % test
    data:NAME|NAME       one of these data sets
    pool:NAME|NAME       all data sets in memory, `data` among them (default: only those)
    side:S               images are resized to S x S and made grey; 0: unchanged
    test:R, server_val:R rows of the server for test and validation

One number in place of A..B is a constant. A draw is a function of (seed, number) only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.data.federation import Federation, channel_moments, pad_rows
from fedjax_sim.data.images import resize_bilinear, to_uint8
from fedjax_sim.data.partition import partition
from fedjax_sim.data.protocols import split_client
from fedjax_sim.data.sources import load
from fedjax_sim.errors import UserError, unknown
from fedjax_sim.options import shown

Range = tuple[float, float]
FRACTIONS = {"val": 0.15, "test": 0.45}  # of every client's examples
LARGEST = 4  # times the mean: a client keeps at most so many training examples


@dataclasses.dataclass(frozen=True)
class Over:
    """The distribution of federations."""

    dirichlet: Range = (0.05, 0.5)
    clients: Range = (30, 30)
    participation: Range = (0.17, 0.17)
    examples: Range = (120, 120)
    data: tuple[str, ...] = ("digits",)
    pool: tuple[str, ...] = ()
    side: int = 8
    test: int = 1000
    server_val: int = 100

    @property
    def most_clients(self) -> int:
        return round(self.clients[1])

    @property
    def most_participants(self) -> int:
        return number_of(self.participation[1], self.most_clients)

    @property
    def most_examples(self) -> int:
        """The most training examples of a client."""
        return math.ceil(LARGEST * self.examples[1])


class Facts(NamedTuple):
    """The settings of a drawn federation."""

    data: str
    dirichlet: float
    clients: int
    participants: int
    examples: int


WHOLE = ("side", "test", "server_val")


def parse_over(text: str) -> Over:
    """The distribution that the text of --over describes.

    >>> parse_over("dirichlet:0.1..1, clients:20, data:digits|mnist").dirichlet
    (0.1, 1.0)
    >>> parse_over("clients:20..5")
    Traceback (most recent call last):
    fedjax_sim.errors.UserError: over: clients '20..5' is not allowed; use a number or A..B with A
    up to B, above 0
    """
    known = [one.name for one in dataclasses.fields(Over)]
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition(":"))
        if name not in known:
            raise unknown("option of over", shown(name), known)
        if name in ("data", "pool"):
            found[name] = tuple(piece.strip() for piece in value.split("|"))
        else:
            found[name] = _whole(name, value) if name in WHOLE else _range(name, value)
    over = Over(**found)
    if over.pool and not set(over.data) <= set(over.pool):
        raise UserError(f"over: pool {'|'.join(over.pool)} does not hold {'|'.join(over.data)}")
    if over.participation[1] > 1:
        raise UserError(
            f"over: participation {over.participation[1]:g} is not a share; allowed: above 0 to 1"
        )
    return over


def _whole(name: str, text: str) -> int:
    if not text.isdigit():
        raise UserError(f"over: {name} '{shown(text)}' is not allowed; use a whole number")
    return int(text)


def _range(name: str, text: str) -> Range:
    low, dots, high = text.partition("..")
    try:
        ends = float(low), float(high if dots else low)
    except ValueError:
        ends = 0.0, 0.0
    if not 0 < ends[0] <= ends[1] < math.inf:
        raise UserError(
            f"over: {name} '{shown(text)}' is not allowed; use a number or A..B with A up to B,"
            " above 0"
        )
    return ends


def number_of(share: float, clients: int) -> int:
    return max(1, min(clients, round(share * clients)))


class Part(NamedTuple):
    """A data set inside a pool: from row `first` on, `train` training and then `test` test
    examples."""

    first: int
    train: int
    test: int
    mean: np.ndarray
    std: np.ndarray


class Pool(NamedTuple):
    """The examples of several data sets, stored once."""

    x: np.ndarray
    y: np.ndarray
    classes: int
    parts: dict[str, Part]


@functools.lru_cache(maxsize=4)
def shared_pool(names: tuple[str, ...], side: int, data_dir: str | None) -> Pool:
    """Examples of all the data sets, resized and grey where a side is given."""
    images: list[np.ndarray] = []
    labels, parts, first, classes = [], {}, 0, 0
    for name in names:
        data = load(name, data_dir)
        if data.task != "classification" or data.x_train.ndim != 4:
            raise UserError(f"over: data '{name}' are no images with one class each")
        x = np.concatenate([data.x_train, data.x_test])
        x = to_uint8(pooled(x.mean(-1, keepdims=True), side)) if side else x
        if images and (x.shape[1:] != images[0].shape[1:] or x.dtype != images[0].dtype):
            raise UserError(
                f"over: images of '{name}' are {x.shape[1:]}, those of '{names[0]}'"
                f" {images[0].shape[1:]}; side:8 makes all of them 8 x 8 and grey"
            )
        train, test = len(data.y_train), len(data.y_test)
        moments = channel_moments(x[:train], 1 / 255 if x.dtype == np.uint8 else 1.0)
        parts[name] = Part(first, train, test, *moments)
        images.append(x)
        labels += [data.y_train, data.y_test]
        first, classes = first + len(x), max(classes, data.classes)
    return Pool(np.concatenate(images), np.concatenate(labels).astype(np.int32), classes, parts)


def pooled(x: np.ndarray, side: int) -> np.ndarray:
    """[n, H, W, C] -> [n, side, side, C] by means over squares; first resized to a multiple of
    `side`."""
    even = -(-x.shape[1] // side) * side, -(-x.shape[2] // side) * side
    if even != x.shape[1:3]:
        x = resize_bilinear(x, *even)
    split = x.reshape(len(x), side, even[0] // side, side, even[1] // side, x.shape[-1])
    return split.mean((2, 4))


def draw_federation(
    over: Over, seed: int, number: int, data_dir: str | None = None
) -> tuple[Federation, Facts]:
    """The `number`-th federation of `seed`."""
    rng = np.random.default_rng([seed, number, 0x0FED])
    within = lambda ends: float(math.exp(rng.uniform(math.log(ends[0]), math.log(ends[1]))))
    alpha, clients = within(over.dirichlet), round(within(over.clients))
    participants = number_of(within(over.participation), clients)
    examples, name = round(within(over.examples)), over.data[rng.integers(len(over.data))]
    pool = shared_pool(over.pool or over.data, over.side, data_dir)
    part, wanted = pool.parts[name], clients * examples + over.server_val
    if wanted > part.train or over.test > part.test:
        raise UserError(
            f"over: {clients} clients with {examples} examples each and {over.server_val} for the"
            f" server need {wanted} training examples and {over.test} test examples; '{name}' has"
            f" {part.train} and {part.test}"
        )
    some = part.first + rng.permutation(part.train)[:wanted]
    validation, some = some[: over.server_val], some[over.server_val :]
    shares = partition(f"dirichlet:{alpha:.6g},min=4", pool.y[some], clients, rng)
    splits = [split_client(some[share], FRACTIONS, rng) for share in shares]
    padded = {
        split: pad_rows([one[split][: over.most_examples] for one in splits]) for split in splits[0]
    }
    tested = part.first + part.train + rng.permutation(part.test)[: over.test]
    at_server = {"test": tested.astype(np.int32), "val": validation.astype(np.int32)}
    fed = Federation(
        x=pool.x,
        y=pool.y,
        rows={split: table for split, (table, _) in padded.items()},
        size={split: size for split, (_, size) in padded.items()},
        server_rows=at_server if over.server_val else {"test": at_server["test"]},
        mean=part.mean,
        std=part.std,
        scale=np.asarray(1 / 255 if pool.x.dtype == np.uint8 else 1.0),
        classes=pool.classes,
        name=name,
    )
    return fed, Facts(name, alpha, clients, participants, examples)
