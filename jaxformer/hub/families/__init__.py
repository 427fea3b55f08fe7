"""The supported families of checkpoints, with their tables of tensors."""

from jaxformer.hub.checkpoint_format import CheckpointFormat
from jaxformer.hub.families import bart, bert, experts, gemma, gpt2, hybrid, llama, t5

FAMILIES: dict[str, CheckpointFormat] = {
    family.model_type: family
    for module in (gpt2, llama, experts, hybrid, gemma, bert, t5, bart)
    for family in module.FAMILIES
}
