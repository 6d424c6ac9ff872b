"""Models: flax modules behind one record of pure functions with ordered, named parameter groups.

>>> import jax, jax.numpy as jnp
>>> from fedjax_sim import models
>>> model = models.build("lenet5", (28, 28, 1), 10)
>>> net = model.init(jax.random.key(0))
>>> features, _ = model.features(net, jnp.zeros((2, 28, 28, 1)))
>>> model.head(net, features).shape, model.groups, model.head_group
((2, 10), ('conv1', 'conv2', 'fc1', 'fc2', 'fc'), 'fc')
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedjax_sim.models.registry import MODELS, REGISTRY, check_options, register_model

if TYPE_CHECKING:
    from fedjax_sim.models.factory import build
    from fedjax_sim.models.flax_module import as_model
    from fedjax_sim.models.record import (
        Model,
        batch_of,
        from_module,
        initial_weights,
        parameter_counts,
        with_group,
    )

# imported on first use: the names of the models must not wait for JAX
_HOME = {
    "batch_of": "record",
    "build": "factory",
    "Model": "record",
    "as_model": "flax_module",
    "from_module": "record",
    "initial_weights": "record",
    "parameter_counts": "record",
    "with_group": "record",
}
__all__ = [
    "MODELS",
    "REGISTRY",
    "Model",
    "as_model",
    "batch_of",
    "build",
    "check_options",
    "from_module",
    "initial_weights",
    "parameter_counts",
    "register_model",
    "with_group",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedjax_sim.models' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fedjax_sim.models.{_HOME[name]}"), name)
