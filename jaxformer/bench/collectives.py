"""Exchange between devices: all-gather and all-reduce of a large array."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.bench.measurement import COLLECTIVES, Measurement
from jaxformer.bench.timing import Rounds
from jaxformer.models.mesh import make_mesh, replicated


def programs(mesh: Mesh) -> dict[str, tuple[Callable, float]]:
    """Returns {name: (program, share)} for arrays [devices, size] whose rows are sharded.

    Each device sends the share of the whole array, in a ring: (n − 1) / n of it to gather it, and
    2 (n − 1) / n of a row to add up the rows.
    """
    n = mesh.size
    return {
        "all-gather": (jax.jit(lambda x: x, out_shardings=replicated(mesh)), (n - 1) / n),
        "all-reduce": (
            jax.jit(lambda x: x.sum(axis=0), out_shardings=replicated(mesh)),
            2 * (n - 1) / n**2,
        ),
    }


def measure_collectives(num_bytes: int, rounds: Rounds) -> list[Measurement]:
    """Measures both collectives over all devices. The bytes are those that each device sends.

    Args:
        num_bytes: The size of the row of each device.
        rounds: How often each program is timed.
    """
    mesh = make_mesh({"fsdp": jax.device_count()})
    where = NamedSharding(mesh, PartitionSpec("fsdp"))
    shape = (mesh.size, num_bytes // 4)
    x = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=where)()
    found = []
    for name, (program, share) in programs(mesh).items():
        timing = rounds.measure(lambda program=program: program(x))
        shown = f"{name} of {x.nbytes / 1e6:,.0f} MB"
        sent = share * x.nbytes
        found.append(
            Measurement(COLLECTIVES, shown, "float32", timing, bytes=sent, devices=mesh.size)
        )
    return found
