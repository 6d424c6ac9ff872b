#!/usr/bin/env bash
# Prints the whole table of benchmarks/rounds_per_second.py on a machine with a GPU or TPU.
#
#   benchmarks/accelerator.sh [any option of benchmarks.rounds_per_second]
#
# Needs a Python with fedjax_sim, a JAX built for the accelerator and, for the PyTorch peers, torch (with CUDA if you
# want them on the GPU too). Other peers are used where installed: FEDJAX_SIM_PEER_FLOWER, _PFL and _FEDJAX name the
# Python of each. PYTHON chooses the interpreter, OUT the JSON file.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${OUT:-accelerator.json}

backend=$("$python" -c 'import jax; print(jax.default_backend())')
"$python" -c 'import jax; print("JAX sees:", ", ".join(d.device_kind for d in jax.devices()))'
if [ "$backend" = cpu ]; then
  echo "JAX sees no accelerator here; install a JAX for it, or run python -m benchmarks.rounds_per_second" >&2
  exit 1
fi

# Peers take turns on one device: each process may only take what it needs.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
if [ "$backend" = tpu ]; then
  # A TPU belongs to one process at a time, so every peer is measured in a run of its own, without pairs.
  for peer in ours jax_step jax_naive torch torch_procs; do
    "$python" -m benchmarks.rounds_per_second --reference "$peer" --peers "$peer" --json "${out%.json}-$peer.json" "$@"
  done
else
  "$python" -m benchmarks.rounds_per_second --json "$out" "$@"
fi
