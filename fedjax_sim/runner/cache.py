"""Where things are remembered between runs: compiled programs and measured chunk sizes."""

from __future__ import annotations

import os
import pathlib


def cache_folder() -> pathlib.Path | None:
    """FEDJAX_SIM_CACHE (or the user's cache folder); None when it is set to 'off'."""
    text = os.environ.get("FEDJAX_SIM_CACHE", "")
    if text.lower() == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(text or os.path.join(base, "fedjax_sim"))


def use_compilation_cache() -> None:
    """Persistent compilation cache, on by default: the second run of a set-up starts at once."""
    import jax

    folder = cache_folder()
    if folder is None or jax.config.values.get("jax_compilation_cache_dir"):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
