"""Is a controller alive? Cheap numbers of networks and policies, computed on the states of one
round or minibatch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agents.losses import masked_mean
from agents.types import Array


def live_units(params: Any, x: Array, mask: Array) -> Array:
    """The share of hidden ReLU units that fire on at least one unmasked row of `x` [B, S].

    With several hidden layers, the share in the layer that has the fewest: one dead layer makes a
    constant network. Without rows nothing is known to be dead, and the share is 1.

    >>> layer = lambda *b: {"kernel": jnp.ones((1, len(b))), "bias": jnp.array(b)}
    >>> params = {"params": {"Dense_0": layer(0.0, -5.0), "Dense_1": layer(0.0)}}
    >>> # x − 5 is never positive
    >>> print(live_units(params, jnp.array([[1.0], [2.0]]), jnp.ones(2, bool)))
    0.5
    """
    layers = [params["params"][f"Dense_{i}"] for i in range(len(params["params"]))]
    fewest = jnp.ones((), x.dtype)
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])  # [B, width]
        fewest = jnp.minimum(fewest, ((x > 0) & mask[:, None]).any(0).mean(dtype=x.dtype))
    return jnp.where(mask.any(), fewest, 1)


def entropy(policy: Array, available: Array, mask: Array) -> Array:
    """The mean of H(π) / log A' over the unmasked rows of `policy` [B, A]; A' = available actions.

    Rows with a single available action have nothing to choose and are left out.

    >>> print(
    ...     entropy(
    ...         jnp.array([[0.5, 0.5, 0.0]]), jnp.array([[True, True, False]]), jnp.ones(1, bool)
    ...     )
    ... )
    1.0
    """
    count = available.sum(-1)
    each = -jax.scipy.special.xlogy(policy, policy).sum(-1) / jnp.log(
        jnp.maximum(count, 2).astype(policy.dtype)
    )
    return masked_mean(each, mask & (count > 1))


def sensitivity(policy: Array, mask: Array) -> Array:
    """How much π [B, A] depends on the state: the mean of ½ Σ_a |π(a|s) − π̄(a)|, π̄ the mean over
    the rows.

    >>> print(sensitivity(jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.ones(2, bool)))
    0.5
    """
    mean = jax.vmap(masked_mean, (1, None))(policy, mask)
    return masked_mean(jnp.abs(policy - mean).sum(-1) / 2, mask)
