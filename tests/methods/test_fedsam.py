"""fedsam: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import jax.numpy as jnp
from one_client import agrees, torch_net, train_one

from fedjax_sim.methods import fedsam


def test_fedsam_takes_the_gradient_at_the_perturbed_point():
    _, _, up = train_one("fedsam", rho=0.4, given=torch_net("start"))
    assert agrees(up.net, "fedsam")
    assert not agrees(up.net, "plain", 1e-4)


def test_fedsam_keeps_the_statistics_of_the_first_pass():
    grad_of = lambda w, batch: ((w["a"] ** 2 / 2, ("statistics at", w["a"])), {"a": w["a"]})
    (_, aux), grads, batch = fedsam.sharpness_aware(0.5)(
        grad_of, {"a": jnp.array(3.0)}, 7, lambda step: ("batch", step), ()
    )
    assert aux == ("statistics at", 3.0) and grads["a"] == 3.5 and batch == ("batch", 7)
