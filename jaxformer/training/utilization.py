"""How much of what the devices could compute a run computes."""

from functools import lru_cache

import jax

from jaxformer.models.flops import training_flops
from jaxformer.training.batch import Batch
from jaxformer.training.config import TrainingConfig
from jaxformer.training.devices import device_of


def update_flops(config: TrainingConfig, batch: Batch) -> int:
    """Operations that an update of this batch takes, by formula (`models.flops`), padding counted.
    Of an adapter it takes a third less: what is frozen has no gradient."""
    source = None if batch.source is None else batch.source.shape[-1]
    *rows, length = batch.inputs.shape
    flops = rows[0] * rows[1] * _of_row(config.model, length, source)
    return flops if config.lora.lora_rank is None else flops * 2 // 3


@lru_cache(maxsize=32)
def _of_row(model, length: int, source_length: int | None) -> int:
    return training_flops(model, length, source_length)


def utilization(flops_per_second: float, mesh) -> dict[str, float]:
    """`model_flops_utilization` (Chowdhery et al. 2022, appendix B): the share of the peak of all
    devices, in bfloat16; nothing for devices whose peak is not known."""
    devices = jax.devices()[:1] if mesh is None else mesh.devices.ravel()
    found = device_of(devices[0].device_kind)
    if found is None:
        return {}
    return {"model_flops_utilization": round(flops_per_second / (found.flops * len(devices)), 4)}
