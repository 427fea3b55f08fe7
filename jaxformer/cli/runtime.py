"""What every verb that computes does first."""

import ctypes
import os
from pathlib import Path


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


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed, before JAX's threads start; elsewhere nothing happens.

    XLA:CPU allocates all that a step needs, a gigabyte or more, and frees it after the step. malloc
    gives such pieces back to the kernel, which must fault each page in again at the next step:
    417,000 faults and a fifth of the time of a step of 10.8 M parameters (a virtual machine of two
    cores; faults are cheaper without one).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        for option, value in _MALLOC_OPTIONS.items():
            mallopt(option, value)


# By the numbers of malloc.h.
_MALLOC_OPTIONS = {
    -8: 1,  # M_ARENA_MAX: the threads share one heap
    -4: 0,  # M_MMAP_MAX: no piece is mapped, and unmapped, by itself
    -1: -1,  # M_TRIM_THRESHOLD: the end of the heap is not given back
    -2: 256 << 20,  # M_TOP_PAD: bytes by which the heap grows at least
}
