"""Your own arrays, split among clients by a Dirichlet draw or by hand.

python examples/custom_data.py [ROUNDS]
"""

import sys

import numpy as np

import fedjax_sim as fs

rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
rng = np.random.default_rng(0)
y = rng.integers(0, 4, 1200)
# a table; images are [D, H, W]
x = rng.normal(size=(1200, 6)).astype(np.float32) + np.eye(4, 6, dtype=np.float32)[y] * 2

# a file, split by the simulator …
np.savez("mine.npz", x_train=x[:1000], y_train=y[:1000], x_test=x[1000:], y_test=y[1000:])
fed = fs.federate("mine.npz", "dirichlet:0.3", clients=10)
print(fed.describe())
print(fs.run("fedavg", fed, model="mlp", rounds=rounds))

# … or rows that you choose for every client
rows = {
    "train": [range(0, 300), range(300, 400), range(400, 900)],
    "val": [range(900, 930), range(930, 960), range(960, 1000)],
}
by_hand = fs.Federation.from_arrays(x, y, rows, test=range(1000, 1200), name="mine")
print(fs.run("fedavg", by_hand, model="mlp", participation=1, rounds=rounds))
