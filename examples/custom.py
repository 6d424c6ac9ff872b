"""Your own method, model, agent and dataset, by name on the command line:

fedjax-sim run gentle --dataset stripes --model narrow --import examples/custom.py
fedjax-sim run fedpolicy --set fedpolicy.agent=coin --import examples/custom.py
fedjax-sim list methods --import examples/custom.py
"""

import numpy as np

import agents
import fedjax_sim as fs


@fs.register("gentle")
class Gentle(fs.FedProx):
    """FedProx with a strong pull towards the received model."""

    mu: fs.Real = fs.field(0.5, ge=0)


def narrow(shape, classes, *, dtype, conv, width: int = 16):
    """One hidden layer of 16; other widths with --set model.width=8."""
    return fs.build("mlp", shape, classes, dtype=dtype, conv=conv, hidden=(width,))


class Coin(agents.Uniform):
    """Chooses at random. Write your own `init`, `act` and `update` here: agents/README.md."""


def stripes():
    """Three kinds of bright bars on noise, 8x8."""
    rng = np.random.default_rng(0)
    y = np.arange(1200) % 3
    x = rng.integers(0, 120, (1200, 8, 8), np.uint8)
    for label in range(3):
        x[y == label, 2 * label : 2 * label + 2] += 100
    return x[:1000], y[:1000], x[1000:], y[1000:]


fs.register_model("narrow", narrow)
fs.register_agent("coin", Coin)
fs.register_dataset("stripes", stripes)
