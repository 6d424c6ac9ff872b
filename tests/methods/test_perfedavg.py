"""perfedavg: what it reduces to, closed forms, what it must not touch."""

from __future__ import annotations

import numpy as np
from fixed_cohort import variant
from tiny import BATCH, SIZES, simulation, start


def test_perfedavg_logs_the_batch_it_looked_at():
    """One full-batch epoch: the logged loss and accuracy are Θ's, as FedAvg's are."""
    one = dict(batch_size=max(SIZES), epochs=1.0, max_epochs=1.0)
    logs = [
        s.examine(*start(s))[1]
        for s in (variant(simulation(name), **one) for name in ("fedavg", "perfedavg"))
    ]
    for name in ("train_loss", "train_accuracy"):
        np.testing.assert_allclose(logs[0][name], logs[1][name], rtol=1e-5)
    assert max(SIZES) > BATCH
