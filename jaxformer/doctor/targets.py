"""Devices for which programs can be compiled, even if this machine lacks these devices.

    gpu:h100:8       8 GPUs of one host
    tpu:v5e:4x4      a slice of TPUs
    cpu:8            8 devices, simulated on this machine

Compilation needs a compiler plugin (see `missing_compiler`), but no drivers.
"""

import os
import re
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions, requires, version
from importlib.util import find_spec
from math import prod
from typing import NamedTuple

from jaxformer.training.devices import DEVICES, Device

GPUS_OF_A_HOST = 8
CUDNN_VERSION = 91000  # cuDNN 9.10; the text `H100` below contains the same version.


@dataclass(frozen=True)
class Target:
    """A set of devices to compile for.

    Attributes:
        kind: A key of `DEVICES`, or "cpu".
        shape: The number of devices along each axis of the slice.
    """

    kind: str
    shape: tuple[int, ...]

    @property
    def platform(self) -> str:
        """Name of the platform: cpu, gpu or tpu."""
        return self.kind.split(":")[0]

    @property
    def count(self) -> int:
        """Number of devices."""
        return prod(self.shape)

    @property
    def device(self) -> Device | None:
        """Published specifications of one device, or None for a CPU."""
        return DEVICES.get(self.kind)

    def __str__(self) -> str:
        """Returns the text that `parse_target` parses, such as tpu:v5e:4x4."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"


def parse_target(text: str) -> Target:
    """Parses a target such as gpu:h100:8, tpu:v5e:4x4 or cpu:8.

    Raises:
        ValueError: The text is not a target, or the target has more GPUs than one host.
    """
    kind, _, shape = text.rpartition(":")
    sizes = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape)
    if not sizes or kind not in ("cpu", *DEVICES) or ("x" in shape and not kind.startswith("tpu")):
        shapes = {"tpu:v4": "2x2x1", "tpu:v5p": "2x2x1", "tpu:v5e": "4x4", "tpu:v6e": "4x4"}
        accepted = ", ".join(f"{name}:{shapes.get(name, 8)}" for name in (*DEVICES, "cpu"))
        raise ValueError(f"target is {text!r}; it must look like one of {accepted}")
    target = Target(kind, tuple(map(int, shape.split("x"))))
    if target.platform == "gpu" and target.count > GPUS_OF_A_HOST:
        raise ValueError(
            f"target is {text!r}; it must have at most {GPUS_OF_A_HOST} GPUs (one host), "
            "because the speed of links between hosts is unknown"
        )
    return target


def missing_compiler(target: Target) -> str | None:
    """Returns the command that installs the compiler for a target, or None if it is installed."""
    if target.platform == "tpu" and find_spec("libtpu") is None:
        wanted = next(x for x in requires("jax") or () if x.startswith("libtpu"))
        return f'pip install "{wanted.split(";")[0].strip()}"'
    if target.platform == "gpu" and not any(
        find_spec("jax_plugins") and find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)
    ):
        plugins = "jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0}".format(version("jax"))
        return f"pip install --no-deps {plugins} nvidia-cuda-nvcc-cu12"
    return None


def compiler(target: Target) -> dict[str, str]:
    """Returns the packages that compile for a target, with their versions."""
    names = {"cpu": "jaxlib", "tpu": "libtpu", "gpu": "jax-cuda1[23]-p.*|nvidia-cuda-nvcc.*"}
    installed = {x.metadata["Name"]: x.version for x in distributions()}
    wanted = re.compile(names[target.platform])
    return {name: installed[name] for name in sorted(installed) if wanted.fullmatch(name)}


def target_devices(target: Target) -> list:
    """Returns the devices of a target, for compilation.

    The devices of a CPU target can also run programs. Call `start_for` before JAX starts,
    because the plugin of an absent device prints messages otherwise.

    Raises:
        ValueError: The compiler plugin is missing, the TPU slice does not exist, or JAX has started
            with fewer CPU devices than the target has.
    """
    if install := missing_compiler(target):
        raise ValueError(
            f"target is {target}, but its compiler is not installed; install it with: {install}"
        )
    import jax
    from jax.experimental.topologies import get_topology_desc

    if target.platform == "cpu":
        if jax.device_count("cpu") < target.count:
            raise ValueError(
                f"target is {target}, but JAX has started with {jax.device_count('cpu')} CPU "
                "devices; set XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{target.count} before JAX starts"
            )
        return jax.devices("cpu")[: target.count]
    if target.platform == "tpu":
        name, options = str(target).removeprefix("tpu:"), {"platform": "tpu"}
    else:
        topology = f"1x1x{target.count}"
        name, options = "", {"platform": "cuda", "target_config": H100, "topology": topology}
    try:
        with _quiet():
            return list(get_topology_desc(name, **options).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise ValueError(f"target is {target}: {str(error).splitlines()[0]}") from None


@contextmanager
def _quiet() -> Generator[None]:
    """Discards standard error, where plugins report that their devices are absent."""
    with open(os.devnull, "w") as nowhere:
        stderr = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class AbsentH100(NamedTuple):
    """The device attributes that tokamax reads, with the values of an H100."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
    compute_capability: str = "9.0"
    core_count: int = 132


@contextmanager
def as_if_on(target: Target) -> Generator[None]:
    """Enables the kernels of cuDNN and tokamax in programs for an absent GPU.

    To choose kernels, JAX queries the GPU generation and the cuDNN version of this process, and has
    no option to set them (see `private_cudnn`). tokamax queries attributes of the default device.
    Inside this context manager, JAX and tokamax get the values of the target instead.
    """
    from unittest.mock import patch

    import jax
    from jax.extend import backend

    if target.platform != "gpu" or jax.default_backend() == "gpu":
        yield
        return
    from jaxformer.functional.attention.private_cudnn import cudnn_attention

    answers = {
        "check_cudnn_version": lambda: CUDNN_VERSION,
        "check_compute_capability": lambda capability: float(capability) <= 9.0,
        "is_cuda_compute_capability_equal": lambda capability: capability == "9.0",
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(cudnn_attention, name, answer))
        stack.enter_context(patch.object(backend, "get_default_device", AbsentH100))
        yield


def start_for(target: Target) -> None:
    """Prepares this process to compile for absent devices. Call this function before JAX starts."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["JAX_PLATFORMS"] = "cpu"
    if target.platform == "cpu" and "jax" not in sys.modules:
        import jax

        jax.config.update("jax_num_cpu_devices", target.count)


# Description of an absent device for the compiler (GpuTargetConfigProto), with the published limits
# of an H100 SXM.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  memory_bandwidth: 3350000000000
  device_memory_size: 84929347584
}
"""
