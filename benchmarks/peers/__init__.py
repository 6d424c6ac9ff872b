"""The peers: each is a module run in its own process, speaking the line protocol of `protocol`."""

from __future__ import annotations

PEERS: dict[str, tuple[str, str]] = {  # name: (module, what it is)
    "ours": ("benchmarks.peers.ours", "fedjax_sim"),
    "torch": (
        "benchmarks.peers.torch_sequential",
        "plain PyTorch, clients in sequence, a thread per core",
    ),
    "torch_procs": (
        "benchmarks.peers.torch_processes",
        "plain PyTorch, a process per core, one thread each",
    ),
    "jax_step": (
        "benchmarks.peers.jax_steps",
        "plain JAX, a jitted step per mini-batch, Python loop",
    ),
    "jax_naive": ("benchmarks.peers.jax_naive", "naive JAX, a round as one vmapped padded program"),
    "flower": ("benchmarks.peers.flower_simulation", "Flower simulation engine (Ray)"),
    "pfl": ("benchmarks.peers.pfl_research", "pfl-research, simulated backend, PyTorch"),
    "fedjax": ("benchmarks.peers.google_fedjax", "fedjax, jit backend"),
}
