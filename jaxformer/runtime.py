"""Settings of the current process: memory allocation, and JAX's cache of compiled programs."""

import ctypes
import os
from pathlib import Path


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory, and XLA:CPU run programs in the calling thread.

    Call it once, before JAX starts its threads. It does nothing on macOS, Windows and musl.

    XLA:CPU allocates the buffers of a step, a gigabyte or more, and frees them after the step. By
    default malloc returns them to the kernel, so the next step page-faults on each of them again.
    XLA would allocate them in its own threads, where malloc maps each large block anew, whatever
    its settings. Faults took 0.65 s of 4.1 s of processor time in a step of 10.8 M parameters, on
    a virtual machine with two cores; without virtualisation they cost less. A call of a jitted
    function then returns when the result is there. Programs for several devices run as before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        for option, value in _MALLOC_OPTIONS.items():
            mallopt(option, value)
        import jax

        jax.config.update("jax_cpu_enable_async_dispatch", False)


# The option numbers are those of malloc.h.
_MALLOC_OPTIONS = {
    -4: 0,  # M_MMAP_MAX: never use mmap for a single allocation
    -1: -1,  # M_TRIM_THRESHOLD: never return the top of the heap to the kernel
    -2: 256 << 20,  # M_TOP_PAD: grow the heap by at least this many bytes
}


def start_jax() -> None:
    """Configures malloc and JAX's persistent compilation cache, so that later starts are faster.

    The cache is in JAX_COMPILATION_CACHE_DIR if this is set, otherwise in the user's cache folder.
    """
    keep_freed_memory()
    import jax

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(caches / "jaxformer" / "xla"))
    # By default JAX caches only programs that compile for a second or more: almost none here do.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
