"""Budgets of the clients: how many epochs c_k and how many layers b_k each can afford in a round,
and how they vary.

c_k(t) = c_k · f_k(t),   b_k(t) = round(b_k · f_k(t)) within 1..L,   f_k(t) = 1 + v·sin(2π(t/period
                                        + k/N))
"""

from __future__ import annotations

import csv
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_sim.errors import UserError
from fedjax_sim.options import at_least, at_most, convert, real, shown, whole
from fedjax_sim.types import Array, Env

# (epochs, layers) of the paper's ten clients, Table 1
TABLE_1 = (
    (0.5, 3),
    (0.01, 5),
    (1.0, 1),
    (2.0, 2),
    (2.0, 4),
    (0.5, 6),
    (1.0, 3),
    (2.0, 6),
    (0.1, 2),
    (5.0, 5),
)
COLUMNS = ("epochs", "layers")
LEAST_EPOCHS, MOST_EPOCHS = 1e-6, 1e6
PERIOD = 20.0  # rounds, where `vary` names none


class Budgets(NamedTuple):
    """Of ONE client, or stacked to [N]."""

    epochs: Array  # []  c_k
    layers: Array  # []  b_k


def read_budgets(given: Any, clients: int, groups: int) -> Budgets:
    """[N] budgets from 'table1', from the path of a file, or from pairs (epochs, layers) given in
    Python.

    table1: the paper's; other numbers of clients take its rows in turn, smaller models cut its
    layers to their own.

    >>> read_budgets("table1", 12, 4).layers.tolist()
    [3, 4, 1, 2, 4, 4, 3, 4, 2, 4, 3, 4]
    """
    if isinstance(given, str) and given == "table1":
        rows = [(c, min(b, groups)) for c, b in (TABLE_1[k % len(TABLE_1)] for k in range(clients))]
        return stacked(rows)
    if not isinstance(given, (str, pathlib.Path, list, tuple, np.ndarray)):
        raise UserError(
            f"qbandit.budgets {shown(repr(given))} are not budgets; allowed: table1, a .csv file,"
            " pairs of numbers"
        )
    pairs = read_file(given) if isinstance(given, (str, pathlib.Path)) else list(given)
    if len(pairs) != clients:
        raise UserError(
            f"qbandit.budgets are of {len(pairs)} clients and there are {clients}; allowed: one for"
            " each client"
        )
    return stacked([checked(k, pair, groups) for k, pair in enumerate(pairs)])


def stacked(rows: list[tuple[float, int]]) -> Budgets:
    columns: Any = (
        np.array([c for c, _ in rows], np.float64),
        np.array([b for _, b in rows], np.int32),
    )
    return Budgets(*columns)


def read_file(path: str | pathlib.Path) -> list[tuple[str, str]]:
    """The lines of a .csv file with the columns epochs and layers, one line per client in the order
    of their numbers."""
    name = shown(str(path))
    try:
        with open(pathlib.Path(path).expanduser(), newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, ValueError, RuntimeError, csv.Error):
        raise UserError(
            f"qbandit.budgets '{name}' cannot be read; allowed: table1, or a .csv file"
        ) from None
    if not lines or tuple(word.strip() for word in lines[0]) != COLUMNS:
        raise UserError(f"qbandit.budgets '{name}' must begin with the line epochs,layers")
    wrong = [k for k, line in enumerate(lines[1:]) if len(line) != len(COLUMNS)]
    if wrong:
        raise UserError(
            f"qbandit.budgets '{name}': the line of client {wrong[0]} must have two numbers,"
            " epochs,layers"
        )
    return [(line[0], line[1]) for line in lines[1:]]


def checked(client: int, pair: Any, groups: int) -> tuple[float, int]:
    """One client's budgets as numbers, or a sentence that names the client."""
    try:
        epochs, layers = (str(value).strip() for value in pair)
    except (TypeError, ValueError):
        raise UserError(
            f"qbandit.budgets of client {client} must be two numbers, epochs and layers"
        ) from None
    what = f"of client {client} in qbandit.budgets,"
    c = convert(f"epochs {what}", epochs, at_least(LEAST_EPOCHS, at_most(MOST_EPOCHS, real)))
    more = f"; the model has {groups} groups"
    return c, convert(f"layers {what}", layers, at_least(1, at_most(groups, whole)), more)


def read_vary(text: Any) -> tuple[float, float]:
    """'v' or 'v:period' -> (v, period): budgets swing by the share v around their values, once in
    `period` rounds.

    >>> read_vary("0.5:10"), read_vary("0.5"), read_vary("0")
    ((0.5, 10.0), (0.5, 20.0), (0.0, 20.0))
    """
    try:
        share, *period = (real(part) for part in str(text).split(":"))
        if len(period) > 1 or not (0 <= share < 1 and all(p > 0 for p in period)):
            raise ValueError
    except ValueError:
        raise UserError(
            f"qbandit.vary '{shown(str(text))}' is not allowed; use v or v:period, e.g. 0.5:20"
            " (budgets swing by 50 % every 20 rounds), v from 0 to below 1"
        ) from None
    return share, period[0] if period else PERIOD


def budgets_now(
    env: Env, budgets: Budgets, id: Array, t: Array, vary: tuple[float, float]
) -> Budgets:
    """ONE client's budgets in the round after t completed ones."""
    epochs, layers = budgets.epochs[id], budgets.layers[id]
    share, period = vary
    if not share:
        return Budgets(epochs, layers)
    turn = t.astype(env.dtype) / period + id.astype(env.dtype) / env.num_clients
    factor = 1 + share * jnp.sin(2 * jnp.pi * turn)
    return Budgets(
        epochs * factor, jnp.clip(jnp.round(layers * factor), 1, env.num_groups).astype(jnp.int32)
    )
