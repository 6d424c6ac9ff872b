"""A contrastive loss of ONE minibatch against class anchors: features are pulled to their class's
anchor and pushed away from the other anchors and from the features of other classes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from fedjax_sim.types import Array, Scalar

SHORTEST = 1e-8  # length from which a vector has a direction


def unit(v: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
    """v / max(‖v‖, 1e-8) along the last axis.

    A shorter vector (all units dead, a head that starts at 0) has no direction: it gets no
    gradient, where the quotient's would be 1e8 and end the training in one step.

    >>> unit(jnp.array([[3.0, 4.0], [0.0, 0.0]])).round(1).tolist(), jax.grad(
    ...     lambda v: unit(v).sum()
    ... )(jnp.zeros(2)).tolist()
    ([[0.6000000238418579, 0.800000011920929], [0.0, 0.0]], [0.0, 0.0])
    """
    square = jnp.square(v).sum(-1, keepdims=True)
    long = square > SHORTEST**2
    # two selections: the root's gradient at 0 is infinite, and 0·inf is nan
    return jnp.where(
        long, v / jnp.sqrt(jnp.where(long, square, 1)), lax.stop_gradient(v) / SHORTEST
    )


def anchor_contrast(
    features: Float[Array, "batch features"],
    anchors: Float[Array, "classes features"],
    labels: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
    tau: Scalar | float,
) -> Scalar:
    """Mean over the real examples of −log [ e^{z̃ᵢ·w̃_yᵢ/τ} / (Σ_c e^{z̃ᵢ·w̃_c/τ} + Σ_{j: y_j≠y_i}
    e^{z̃ᵢ·z̃_j/τ}) ].

    z̃ and w̃ have length 1, so no exponent is larger than 1/τ. Padded rows are no negatives.
    Gradients reach features and anchors.

    One class, its anchor where the feature is: nothing to push away.

    >>> z, one = jnp.array([[2.0, 0.0], [5.0, 0.0]]), jnp.array([True, True])
    >>> float(anchor_contrast(z, jnp.array([[1.0, 0.0]]), jnp.array([0, 0]), one, 0.5))
    0.0
    """
    z, w = unit(jnp.where(mask[:, None], features, 0)), unit(anchors)  # padding may hold anything
    to_anchors = z @ w.T / tau  # [B, C]
    negative = (labels[:, None] != labels) & mask  # [B, B]; never with itself
    to_others = jnp.where(negative, z @ z.T / tau, -jnp.inf)
    own = jnp.take_along_axis(to_anchors, labels[:, None], axis=1)[:, 0]  # [B]
    each = jax.nn.logsumexp(jnp.concatenate([to_anchors, to_others], axis=1), axis=1) - own
    return jnp.where(mask, each, 0).sum() / jnp.maximum(mask.sum(), 1).astype(each.dtype)
