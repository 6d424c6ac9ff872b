"""Two methods, two seeds, the same draws: a table, files and a figure.

python examples/compare_two.py [ROUNDS]
"""

import sys

import fedjax_sim as fs

rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
settings = dict(
    model="mlp",
    clients=10,
    partition="dirichlet:0.1",
    rounds=rounds,
    epochs=1,
    evaluate="global,personal",
)
both = fs.compare("fedavg", "ditto:lam=0.1", seeds=2, out="compared", **settings)
print(both)
for row in both.table():
    print(
        row["method"],
        row["seed"],
        f"clients {row['client_acc_mean']:.3f}, worst tenth {row['client_acc_worst10']:.3f}",
    )
# PNG and PDF; compare.csv, .json, .md and .tex are there already
print(both.plot("compared/accuracy"))
