"""What an allocation is worth: r = β1 r1 + β2 r2 + β3 r3, for ONE client.

    r1 = exp(acc_k − acc_tar) − 1   acc_k = acc_agg: the mixed model on the client's validation
                                    rows, untrained
    r2 = acc_agg − acc_pre          acc_pre: its model before the mixture
    r3 = −‖A_k − V_k‖²              V_k ∝ ({d(e_k, e_j)}_j, 1),   d(e, e') = (cos(e, e') + 1) / 2

form="code" is r3 as the authors' code has it: the plain norm, and similarities exp(−D_j) with D_j
the cosine plus the L1 distance (a high cosine makes two heads less similar there), 0 for the client
itself, scaled to [0, 1] over the candidates.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedjax_sim.types import Array

FORMS = ("paper", "code")
TARGETS = ("constant", "following")
HARDLY = 1e-4  # what the authors' code adds before it divides


def cosine(one: Array, others: Array) -> Array:
    """[m] cosines of e [E] and others [m, E]; 0 where one of them is 0."""
    size = jnp.sqrt(jnp.square(one).sum() * jnp.square(others).sum(-1))
    return jnp.where(size > 0, others @ one / jnp.where(size > 0, size, 1), 0)


def preferred(own: Array, others: Array, usable: Array, form: str) -> Array:
    """V_k [m+1] from e_k [E] and the candidates' [m, E]; usable [m+1]: who counts, itself last.

    >>> e = jnp.array([1.0, 0.0])
    >>> preferred(e, jnp.array([[2.0, 0.0], [-1.0, 0.0]]), jnp.ones(3, bool), "paper").tolist()
    [0.5, 0.0, 0.5]
    """
    alike = cosine(own, others)
    if form == "paper":
        near = jnp.append((alike + 1) / 2, 1)
    else:
        far = jnp.append(alike + jnp.abs(others - own).sum(-1), 0)
        least, most = jnp.where(usable, far, jnp.inf).min(), jnp.where(usable, far, -jnp.inf).max()
        near = jnp.exp(-(far - least + HARDLY) / (most - least + HARDLY))
    near = jnp.where(usable, near, 0)
    return near / near.sum()


def terms(
    accuracy: Array, before: Array, action: Array, wanted: Array, target: Any, form: str
) -> tuple:
    """(r1, r2, r3)."""
    apart = jnp.square(action - wanted).sum(-1)
    return (
        jnp.exp(accuracy - target) - 1,
        accuracy - before,
        -apart if form == "paper" else -jnp.sqrt(apart),
    )
