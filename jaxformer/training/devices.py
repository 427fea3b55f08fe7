"""Table of devices with their published specifications."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Published specifications of a device.

    Attributes:
        name: The product name.
        kind: The beginning of JAX's `device_kind`.
        memory: Bytes of memory.
        flops: Peak bfloat16 FLOP/s. A multiply-add counts as two operations.
        bandwidth: Memory bandwidth in bytes per second.
        links: Bytes per second that a device can send to other devices.
        source: The page that publishes the specifications.
    """

    name: str
    kind: str
    memory: int
    flops: float
    bandwidth: float
    links: float
    source: str


_NVIDIA = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_TPU = "https://cloud.google.com/tpu/docs"
DEVICES = {
    # `links` is the bandwidth of NVLink 4 in one direction (900 GB/s in both directions together).
    # `memory` is the size that the driver reports.
    "gpu:h100": Device(
        "NVIDIA H100 SXM, 80 GB", "NVIDIA H100", 84_929_347_584, 989.4e12, 3.35e12, 450e9, _NVIDIA
    ),
    # Google publishes link speeds for both directions together (v5e 400, v5p 1,200, v6e 800 GB/s)
    # or for one direction (v4). v5e must precede v5p, because JAX's name for v5e begins with JAX's
    # name for v5p.
    "tpu:v4": Device("TPU v4", "TPU v4", 32 * 2**30, 275e12, 1.2e12, 300e9, f"{_TPU}/v4"),
    "tpu:v5e": Device("TPU v5e", "TPU v5 lite", 16 * 2**30, 197e12, 0.819e12, 200e9, f"{_TPU}/v5e"),
    "tpu:v5p": Device("TPU v5p", "TPU v5", 95 * 2**30, 459e12, 2.765e12, 600e9, f"{_TPU}/v5p"),
    "tpu:v6e": Device("TPU v6e", "TPU v6", 32 * 2**30, 918e12, 1.6e12, 400e9, f"{_TPU}/v6e"),
}


def device_specs(device_kind: str) -> Device | None:
    """Returns the specifications for a JAX device kind, or None if the table lacks the device."""
    return next((x for x in DEVICES.values() if device_kind.startswith(x.kind)), None)
