"""One process-wide set-up: eight fake CPU devices (sharding tests) and the persistent compilation cache."""
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir",
                  os.environ.get("FEDJAX_SIM_TEST_CACHE", os.path.join(tempfile.gettempdir(), "fedjax_sim_test_cache")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
