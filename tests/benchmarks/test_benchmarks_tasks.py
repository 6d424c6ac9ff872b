"""The throughput benchmark by task: its jobs, its data, and our side of a round."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import tasks


@pytest.mark.parametrize("name", tasks.JOBS)
def test_data_fit_their_task(name):
    job = tasks.JOBS[name]
    x, y = tasks.make_data(job)
    assert len(x) == len(y) == job.clients * job.examples
    assert job.work == job.per_round * job.examples * (64 if job.unit == "characters" else 1)
    if job.task == "sequence":
        assert (x[:, 1:] == y[:, :-1]).all() and x.max() < job.outputs
    assert len(set(tasks.cohort(job, 3))) == job.per_round and tasks.cohort(job, 3) == tasks.cohort(
        job, 3
    )


def test_a_round_of_ours(monkeypatch):
    small = tasks.Job(
        "sequence", "lstm", (8,), 5, "characters", clients=3, per_round=2, examples=4, batch=2
    )
    tasks.ours(small)(1)


def test_a_clients_epoch_of_pytorch():
    torch = pytest.importorskip("torch")
    for job in tasks.JOBS.values():
        model = tasks.torch_model(job)
        x, y = (torch.from_numpy(a[:20]) for a in tasks.make_data(job))
        x, y = (x.long(), y.long()) if job.task == "sequence" else (x, y.float())
        before = [p.detach().clone() for p in model.parameters()]
        tasks.torch_client(job, model, x, y)
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_models_have_as_many_parameters_as_pytorchs():
    pytest.importorskip("torch")
    from fedjax_sim import models

    for job in tasks.JOBS.values():
        ours = sum(
            models.parameter_counts(models.build(job.model, job.shape, job.outputs)).values()
        )
        theirs = sum(p.numel() for p in tasks.torch_model(job).parameters())
        extra = 4 * 128 if job.model == "lstm" else 0  # PyTorch has two biases per gate
        assert ours + extra == theirs, job.model


def test_mistakes_are_sentences():
    with pytest.raises(SystemExit, match="unknown task 'vision'"):
        tasks.main(["--tasks", "vision"])
    assert np.isfinite(tasks.JOBS["lstm"].lr)
