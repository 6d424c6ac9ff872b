"""fedntd: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from golden.stored import torch_values
from one_client import agrees, torch_net, train_one

from fedjax_sim.methods import fedntd


def test_ntd_is_the_divergence_over_the_other_classes():
    want = {
        name: torch_values("methods_global")[f"ntd/{name}"]
        for name in ("teacher", "student", "y", "value", "slope")
    }
    tau = float(torch_values("methods_global")["ntd/tau"])
    mask = np.array([True, True, False, True, True, False, True])
    teacher, student, y = np.zeros((7, 4)), np.zeros((7, 4)), np.zeros(7, int)
    teacher[mask], student[mask], y[mask] = want["teacher"], want["student"], want["y"]
    student[2], teacher[5] = np.nan, np.inf  # padding may hold anything
    value, grad = jax.value_and_grad(
        lambda s: (
            tau**2
            * fedntd.not_true_divergence(jnp.array(teacher), s, jnp.array(y), jnp.array(mask), tau)
        )
    )(jnp.array(student))
    np.testing.assert_allclose(value, want["value"], atol=1e-6)
    np.testing.assert_allclose(grad[mask], want["slope"], atol=1e-6)
    assert np.all(np.asarray(grad)[~mask] == 0)


def test_fedntd_trains_like_torch():
    _, _, up = train_one("fedntd", beta=2.0, tau=1.5, given=torch_net("start"))
    assert agrees(up.net, "fedntd")
    assert not agrees(up.net, "plain", 1e-4)  # the distillation is visible
