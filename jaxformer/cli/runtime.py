"""What every verb that computes does first."""

import os
from dataclasses import asdict
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


def shared_by(config) -> int:
    """The most devices, of those that there are, that share a run's batch evenly. Several processes
    share it by all of theirs, or the batch is refused."""
    import jax

    rows, count = getattr(config, "batch_size", None), jax.device_count()
    if rows is None or jax.process_count() > 1:
        return count
    return max(number for number in range(1, count + 1) if rows % number == 0)


def mesh_of(config, say):
    """JAX started, and the devices that a run is spread over; None: there is one.

    config: a `TrainingConfig`. ValueError if its model cannot be placed on its mesh.
    """
    start_jax()
    import jax

    from jaxformer.models.build import build, shape_tree
    from jaxformer.models.placement import make_mesh, shardings

    if config.mesh is None and jax.device_count() == 1:
        return None
    sizes = asdict(config.mesh) if config.mesh else {"data": shared_by(config)}
    mesh = make_mesh(sizes, None if config.mesh else jax.devices()[: sizes["data"]])
    if mesh.size < jax.device_count():
        say(f"{mesh.size} of {jax.device_count()} devices are used: the batch divides by no more")
    shardings(shape_tree(build(config.model)), config.model.resolved, mesh)
    said = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    say(f"mesh: {said} ({mesh.devices.flat[0].device_kind})")
    return mesh
