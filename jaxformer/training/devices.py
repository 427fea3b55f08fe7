"""Table of devices with their published figures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Published figures of one device.

    Attributes:
        name: The name of the product.
        kind: The beginning of JAX's `device_kind`.
        memory: Bytes of memory.
        flops: bfloat16 operations per second. A multiplication and an addition count as two.
        bandwidth: Bytes per second between the device and its memory.
        links: Bytes per second to other devices, in one direction.
        source: The page that publishes the figures.
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
    # NVLink 4: 900 GB/s in both directions together. Memory as the driver reports it.
    "gpu:h100": Device(
        "NVIDIA H100 SXM, 80 GB", "NVIDIA H100", 84_929_347_584, 989.4e12, 3.35e12, 450e9, _NVIDIA
    ),
    # Published link figures are for both directions (v5e 400, v5p 1,200, v6e 800 GB/s) or one (v4).
    # v5e stands before v5p, since JAX's name of v5e begins with that of v5p.
    "tpu:v4": Device("TPU v4", "TPU v4", 32 * 2**30, 275e12, 1.2e12, 300e9, f"{_TPU}/v4"),
    "tpu:v5e": Device("TPU v5e", "TPU v5 lite", 16 * 2**30, 197e12, 0.819e12, 200e9, f"{_TPU}/v5e"),
    "tpu:v5p": Device("TPU v5p", "TPU v5", 95 * 2**30, 459e12, 2.765e12, 600e9, f"{_TPU}/v5p"),
    "tpu:v6e": Device("TPU v6e", "TPU v6", 32 * 2**30, 918e12, 1.6e12, 400e9, f"{_TPU}/v6e"),
}


def device_of(device_kind: str) -> Device | None:
    """Returns the figures of a device by JAX's name for it, or None if the table lacks it."""
    return next((x for x in DEVICES.values() if device_kind.startswith(x.kind)), None)
