"""What every verb that computes does first."""

import os
from pathlib import Path

from jaxformer.runtime import keep_freed_memory


def start_jax() -> None:
    """Keep freed memory, and what is compiled, so that a second start is quick.

    JAX_COMPILATION_CACHE_DIR, where it is set, says where; else the user's cache folder.
    """
    keep_freed_memory()
    import jax

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(caches / "jaxformer" / "xla"))
    # The defaults keep only what took a second or more to compile: almost nothing here does.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
