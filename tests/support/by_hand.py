"""The tiny MLP and its accuracy in NumPy, for tests that recompute what the compiled program
says."""

from __future__ import annotations

import jax
import numpy as np


def predict(net, x):
    """The tiny MLP in NumPy."""
    p = jax.tree.map(np.asarray, net["params"])
    hidden = np.maximum(x.reshape(len(x), -1) @ p["fc1"]["kernel"] + p["fc1"]["bias"], 0)
    return hidden @ p["fc"]["kernel"] + p["fc"]["bias"]


def accuracy(fed, net, rows):
    return np.mean(predict(net, np.asarray(fed.x)[rows]).argmax(-1) == np.asarray(fed.y)[rows])


def vector(net):
    return np.concatenate(
        [np.ravel(a) for a in jax.tree.leaves(jax.tree.map(np.asarray, net["params"]))]
    )
