"""The process that everything runs in."""

import ctypes
import os


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed: call it once, before JAX's threads start. Elsewhere
    (macOS, Windows, musl) nothing happens.

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
    -4: 0,  # M_MMAP_MAX: no piece is mapped, and unmapped, by itself
    -1: -1,  # M_TRIM_THRESHOLD: the end of the heap is not given back
    -2: 256 << 20,  # M_TOP_PAD: bytes by which the heap grows at least
}
