"""A method, a model, an agent and a dataset of one's own, by name on the command line:

fedjax-sim run gentle --dataset stripes --model narrow --import examples/own.py
fedjax-sim run fedpolicy --set fedpolicy.agent=coin --import examples/own.py
fedjax-sim list methods --import examples/own.py
"""

import numpy as np

import agents
import fedjax_sim as fs
from fedjax_sim.methods.fedprox import fedprox


def gentle(mu: float = 0.5):
    """FedProx with a strong pull towards the received model."""
    return fedprox(mu)


def narrow(shape, classes, *, dtype, conv, width: int = 16):
    """One hidden layer of 16; other widths with --set model.width=8."""
    return fs.build("mlp", shape, classes, dtype=dtype, conv=conv, hidden=(width,))


def coin(observation_size, num_actions, *, dtype):
    """Chooses at random; write (init, act, update) of your own here, see agents/README.md."""
    return agents.make("random", observation_size, num_actions, dtype=dtype)


def stripes():
    """Three kinds of bright bars on noise, 8x8."""
    rng = np.random.default_rng(0)
    y = np.arange(1200) % 3
    x = rng.integers(0, 120, (1200, 8, 8), np.uint8)
    for label in range(3):
        x[y == label, 2 * label : 2 * label + 2] += 100
    return x[:1000], y[:1000], x[1000:], y[1000:]


fs.register("gentle", gentle)
fs.register_model("narrow", narrow)
fs.register_agent("coin", coin)
fs.register_dataset("stripes", stripes)
