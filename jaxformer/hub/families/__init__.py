"""The supported families of checkpoints, each with the table of its tensors."""

from jaxformer.hub.families import (
    bart,
    bert,
    experts,
    gemma,
    gpt2,
    lfm2,
    llama,
    modernbert,
    starcoder2,
    t5,
)
from jaxformer.hub.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (gpt2, llama, experts, lfm2, gemma, starcoder2, bert, modernbert, t5, bart)
    for family in module.FAMILIES
}
