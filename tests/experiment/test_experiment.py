"""One declaration per setting: values as Python and text give them, checks, hash, config.json."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from fedjax_sim.errors import UserError
from fedjax_sim.experiment import Experiment, Found
from fedjax_sim.experiment.given import experiment_of, layered
from fedjax_sim.experiment.settings import PARTS
from fedjax_sim.experiment.tree import SETTINGS, flat_config, flat_found, read_config


@pytest.mark.parametrize(
    "key, written, value",
    [
        ("participation", "0.1", 0.1),
        ("participation", 10, 10),
        ("participation", "5:20", (5, 20)),
        ("participation", [0.5, 1], (0.5, 1)),
        ("participation", "10/50", "10/50"),
        ("devices", "2", 2),
        ("devices", 2, 2),
        ("chunk", "auto", "auto"),
        ("shuffle", "off", False),
        ("shuffle", True, True),
        ("stragglers", "0.3", (0.3, 0.1)),
        ("stragglers", (0.3, 0.2), (0.3, 0.2)),
        ("cohorts", np.array([[0, 1], [2, 3]]), ((0, 1), (2, 3))),
        ("batch_size", "full", "full"),
        ("rounds", np.int32(3), 3),
        ("rounds", 3.0, 3),
        ("epochs", 1, 1.0),
        ("evaluations", "global,resident", ("global", "resident")),
        ("metrics", ["recall"], ("recall",)),
        ("probe", "true", True),
        ("clients", None, None),
    ],
)
def test_text_and_natural_values(key, written, value):
    got = Experiment.of(**{key: written}).get(key)
    assert got == value and type(got) is type(value)
    assert Experiment.of(**{key: got}).get(key) == value  # a value is read as itself


@pytest.mark.parametrize(
    "given, sentence",
    [
        (dict(participation="half"), "participation 'half' is not a number; allowed: a fraction"),
        (dict(participation=(1, 2, 3)), "participation '1:2:3' is not a number or a range of two"),
        (dict(devices=0), "devices '0' is not allowed; use auto or a whole number of 1 or more"),
        (dict(shuffle="maybe"), "shuffle 'maybe' is not one of on, off; default: on"),
        (dict(shuffle=3), "shuffle '3' is not one of on, off"),
        (dict(stragglers=(2, 0.1)), "stragglers '2:0.1' is not allowed; use p or p:least"),
        (dict(momentum=1), "momentum 1 is not allowed; use a number in [0, 1)"),
        (dict(seed=-1), "seed -1 is not allowed; use a whole number from 0 to 2^63 - 1"),
        (dict(dtype="float61"), "unknown dtype 'float61' (did you mean 'float64'?)"),
        (dict(backend="loop", devices=2), "backend loop runs on one device, not 2"),
        (dict(mu=1), "unknown option of a run or of method 'fedavg' 'mu'"),
        ({"fedavgg.mu": 1}, "unknown owner in 'fedavgg.mu' 'fedavgg' (did you mean 'fedavg'?)"),
        ({"clip.norm": 1}, "'clip' is there 0 times"),
    ],
)
def test_bad_values_are_one_sentence(given, sentence):
    with pytest.raises(UserError) as caught:
        Experiment.of(**given)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_every_default_is_a_value_that_can_be_written():
    """What a field has by default reads as itself, also from its text."""
    for key, (_, _, one, default) in SETTINGS.items():
        if default is not None:
            assert one.read(key, default, default) == default, key
            assert one.read(key, one.kind.text(default), default) == default, key
    assert len(SETTINGS) == sum(len(dataclasses.fields(kind)) for kind in PARTS.values())


def test_options_of_methods_are_values():
    got = experiment_of("fedprox", {"fedprox.mu": "0.1", "ditto.lam": 3}, others=["ditto"])
    assert got.method.options == {"mu": 0.1}
    agent = experiment_of("fedpolicy", {"agent": "ppo", "agent.lr": "0.01", "lam": "0.5"})
    assert agent.method.options == {"agent": "ppo", "agent.lr": 0.01, "lam": 0.5}
    both = layered({"batch-size": 8, "mu": 1}, {"batch_size": 4}, {"evaluate": "global"})
    assert both == {"mu": 1, "batch_size": 4, "evaluations": "global"}


HASHES = [  # as version 0.3 computed them, from flat settings
    ("fedavg", {}, {}, "7c157d8ff601"),
    ("fedprox", dict(mu="0.1", lr=0.02), {}, "fc9c7c2391a4"),
    (
        "fedavg",
        dict(participation=(5, 20), shuffle=False, stragglers="0.3:0.2"),
        {},
        "75b3c402908e",
    ),
    (
        "ditto",
        dict(
            participation="10/50",
            schedule="cosine:end=0",
            schedule_rounds=50,
            transforms=("clip:1.0",),
            metrics="recall",
        ),
        {},
        "f4f0e8387324",
    ),
    (
        "fedpolicy",
        {"agent": "ppo", "agent.lr": "0.01", "model": "mlp", "model.hidden": "64x32"}
        | dict(batch_size="full", momentum=0.5),
        {},
        "aa081cf19841",
    ),
    (
        "fedavg",
        dict(dataset="/data/mine.npz", clients=7, cohorts=[[0, 1], [2, 3]], seed=3, data_seed=4)
        | dict(activations="bfloat16", optimizer="adamw:b1=0.8", evaluate="global")
        | {"loss.gamma": "1"},
        dict(custom_data=True, data="x", data_fingerprint="ab", model_shapes="cd")
        | dict(custom_optimizer="ef", started_with="agent@1"),
        "461047530bc7",
    ),
]


@pytest.mark.parametrize("method, given, found, digits", HASHES)
def test_hashes_of_earlier_runs_hold(method, given, found, digits):
    assert experiment_of(method, given).hash(Found(**found)) == digits


def test_config_json_and_the_older_flat_form():
    given = dict(participation="2:4", shuffle="off", cohorts=((0, 1),), lr=0.1, transform="clip:1")
    experiment, found = Experiment.of(**given), Found(data="here", custom_model=True)
    stored = dict(experiment=experiment.to_json(), found=dataclasses.asdict(found))
    stored = json.loads(json.dumps(stored))
    assert read_config(stored) == (experiment, found)
    flat = json.loads(json.dumps(flat_config(stored)))
    assert flat["participation"] == "2:4" and flat["own_model"] and flat["shuffle"] == "off"
    older = {k: v for k, v in flat.items() if k not in ("momentum", "start_from", "metrics")}
    again, same = read_config(dict(config=older | dict(momentum=0.9, weight_decay=5e-4)))
    assert again.replace(momentum=None, weight_decay=None) == experiment and same == found
    assert flat_found(found)["own_model"] is True
    with pytest.raises(UserError, match="unknown entry 'colour'"):
        read_config(dict(config=flat | dict(colour="red")))
