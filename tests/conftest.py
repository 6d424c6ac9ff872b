"""One process-wide set-up: eight fake CPU devices (sharding tests), quick compilation, the persistent cache."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# tests compile much and compute little: skip the expensive passes of the code generator (3x faster)
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
    ]
)
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("FEDJAX_SIM_TEST_CACHE", os.path.join(tempfile.gettempdir(), "fedjax_sim_test_cache")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
