"""Sizes of a mesh of devices, as in configs and on the command line. Does not import JAX."""

from dataclasses import dataclass

from jaxformer.models.config.check import check_at_least, check_fields


@dataclass(frozen=True)
class MeshSizes:
    """Number of devices along each axis of a mesh (see `models.mesh`)."""

    data: int = 1
    """devices that divide the batch"""
    fsdp: int = 1
    """devices that divide the batch and the parameters"""
    expert: int = 1
    """devices that divide the batch and the experts of each layer"""
    tensor: int = 1
    """devices that divide the computation of each layer"""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        check_fields(self)
        check_at_least(1, self, "data", "fsdp", "expert", "tensor")

    @property
    def parts(self) -> int:
        """Number of parts into which the mesh divides a batch."""
        return self.data * self.fsdp * self.expert
