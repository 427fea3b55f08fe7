"""The supported families of checkpoints, each with the table of its tensors."""

from jaxformer.hub.families import (
    bart,
    bert,
    experts,
    gemma,
    gpt2,
    gpt_oss,
    lfm2,
    llama,
    modernbert,
    qwen3_next,
    starcoder2,
    t5,
)
from jaxformer.hub.family import Family

_MODULES = (
    *(gpt2, llama, experts, gpt_oss, qwen3_next, lfm2, gemma, starcoder2),
    *(bert, modernbert, t5, bart),
)
FAMILIES: dict[str, Family] = {
    family.model_type: family for module in _MODULES for family in module.FAMILIES
}
