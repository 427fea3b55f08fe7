"""The supported families of checkpoints, each with the table of its tensors."""

from jaxformer.hub.families import bart, bert, experts, gemma, gpt2, hybrid, llama, t5
from jaxformer.hub.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (gpt2, llama, experts, hybrid, gemma, bert, t5, bart)
    for family in module.FAMILIES
}
