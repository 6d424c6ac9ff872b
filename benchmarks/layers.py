"""Milliseconds of one whole gradient step (forward, loss, backward, SGD with momentum) per model
and convolution form.

    python -m benchmarks.layers [--models lenet5_pad2,cnn4] [--forms auto,patches] [--clients 0]
    [--json FILE]

Steps run in a `lax.scan` for one client at a time on one host device of two (how the engine runs on
CPU), or for `--clients n` under `vmap` with a model each. Forms are interleaved, best of
`--repeats`. Beside each: the ratio to `lax` (with `--lax`, slow), to a PyTorch step on one thread
where torch is installed (interleaved too), and the share of the GEMM peak measured in the same run,
counting the multiplications of the plain convolution.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.models import Model, build

# model: (image shape, batch, steps per timing)
SETTINGS = {
    "lenet5_pad2": ((28, 28, 1), 64, 20),
    "cnn4": ((32, 32, 3), 64, 5),
    "resnet18": ((32, 32, 3), 64, 2),
    "mlp": ((28, 28, 1), 10, 200),
}
LR, MOMENTUM, DECAY = 0.01, 0.9, 5e-4


def training(model: Model, batch: int, steps: int, clients: int) -> tuple[Any, tuple]:
    """The compiled program of `steps` steps and its arguments."""

    def run(net, momentum, x, y):
        def step(carry, i):
            net, momentum = carry

            def loss(params):
                f, stats = model.features(
                    {**net, "params": params}, x[i], train=True, mask=jnp.ones(batch, bool)
                )
                log_p = jax.nn.log_softmax(model.head({"params": params}, f))
                return -jnp.take_along_axis(log_p, y[i][:, None], 1).mean(), stats

            gradient, stats = jax.grad(loss, has_aux=True)(net["params"])
            momentum = jax.tree.map(
                lambda v, g, p: MOMENTUM * v + g + DECAY * p, momentum, gradient, net["params"]
            )
            params = jax.tree.map(lambda p, v: p - LR * v, net["params"], momentum)
            return ({"params": params, "batch_stats": stats}, momentum), None

        return jax.lax.scan(step, (net, momentum), jnp.arange(steps) % 2)[0]

    init = jax.vmap(model.init) if clients else model.init
    net = init(jax.random.split(jax.random.key(0), clients) if clients else jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, batch, *model.shape))
    y = jax.random.randint(jax.random.key(2), (2, batch), 0, model.classes)
    arguments = (net, jax.tree.map(jnp.zeros_like, net["params"]), x, y)
    program = jax.vmap(run, in_axes=(0, 0, None, None)) if clients else run
    return jax.jit(program).lower(*arguments).compile(), arguments


def multiplications(name: str, model: Model) -> float:
    """Multiply-adds of one step's products per example, three times the forward pass, by the plain
    convolution."""
    plain = build(name, model.shape, model.classes, conv="lax")
    net = jax.eval_shape(plain.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, *model.shape), jnp.float32)
    cost: Any = (
        jax.jit(lambda net, x: plain.head(net, plain.features(net, x)[0]))
        .lower(net, x)
        .cost_analysis()
    )
    return 3 * float(cost["flops"]) / 2


def torch_training(name: str, batch: int, steps: int) -> Any:
    """A function that runs `steps` PyTorch steps on one thread, or None."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    nn = torch.nn
    pool = lambda: (nn.ReLU(), nn.MaxPool2d(2))
    from benchmarks.torch_models import _ResNet18

    layers = {
        "resnet18": lambda: (_ResNet18(3, 10),),
        "lenet5_pad2": lambda: (
            nn.Conv2d(1, 6, 5, padding=2),
            *pool(),
            nn.Conv2d(6, 16, 5),
            *pool(),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        ),
        "cnn4": lambda: (
            nn.Conv2d(3, 32, 5),
            *pool(),
            nn.Conv2d(32, 64, 5),
            *pool(),
            nn.Flatten(),
            nn.Linear(1600, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        ),
        "mlp": lambda: (nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)),
    }[name]()
    net = nn.Sequential(*layers)
    optimiser = torch.optim.SGD(net.parameters(), LR, MOMENTUM, weight_decay=DECAY)
    H, W, C = SETTINGS[name][0]
    x, y = torch.randn(batch, C, H, W), torch.randint(0, 10, (batch,))

    def run():
        for _ in range(steps):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()

    return run


def gemm_peak(size: int = 1024, repeats: int = 10) -> float:
    """GFLOPS of a square float32 product on one host device."""
    a = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(lambda a, b: a @ b).lower(a, a).compile()
    return 2 * size**3 / best_seconds({"gemm": lambda: product(a, a)}, repeats)["gemm"] / 1e9


def best_seconds(runs: dict[str, Any], repeats: int) -> dict[str, float]:
    """The best time of each run, taken in turn."""
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if turn:  # the first turn warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="lenet5_pad2,cnn4,mlp,resnet18")
    parser.add_argument(
        "--forms", default="auto,patches,block,winograd", help="convolution forms, comma separated"
    )
    parser.add_argument(
        "--lax", action="store_true", help="time XLA's own convolution too (slow on CPU)"
    )
    parser.add_argument(
        "--clients", type=int, default=0, help="clients under vmap; 0: one client, no vmap"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)  # one core each; no effect elsewhere
    peak = gemm_peak()
    print(f"GEMM peak {peak:.0f} GFLOPS ({jax.default_backend()}, jax {jax.__version__})")
    print(
        f"{'model':12s} {'form':9s} {'ms/step':>8s} {'torch/x':>8s} {'lax/x':>8s} {'of peak':>8s}"
    )
    rows = []
    for name in options.models.split(","):
        shape, batch, steps = SETTINGS[name]
        forms = ["auto"] if name == "mlp" else options.forms.split(",") + ["lax"] * options.lax
        runs: dict[str, Any] = {}
        for form in forms:
            model = build(name, shape, 10, conv=form)
            program, arguments = training(model, batch, steps, options.clients)
            runs[form] = lambda program=program, arguments=arguments: program(*arguments)
        peer = torch_training(name, batch, steps * max(options.clients, 1))
        if peer is not None:
            runs["torch"] = peer
        work = multiplications(name, model) * batch * 2e-9  # GFLOP of a step
        best = {
            f: s / steps / max(options.clients, 1)
            for f, s in best_seconds(runs, options.repeats).items()
        }
        for form, seconds in best.items():
            share = work / seconds / peak
            ratio = {p: best[p] / seconds if p in best else None for p in ("torch", "lax")}
            print(
                f"{name:12s} {form:9s} {seconds * 1e3:8.2f} "
                + " ".join(f"{r:8.2f}" if r else f"{'-':>8s}" for r in ratio.values())
                + f" {share:8.0%}",
                flush=True,
            )
            rows.append(
                {
                    "model": name,
                    "form": form,
                    "clients": options.clients,
                    "ms_per_step": seconds * 1e3,
                    "torch_ratio": ratio["torch"],
                    "lax_ratio": ratio["lax"],
                    "share_of_gemm_peak": share,
                }
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {
                    "gemm_gflops": peak,
                    "backend": jax.default_backend(),
                    "jax": jax.__version__,
                    "rows": rows,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
