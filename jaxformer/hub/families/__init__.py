"""The families of checkpoints that are read and written, a table each."""

from jaxformer.hub.families import bart, bert, gemma, gpt2, llama, modernbert, neox, t5
from jaxformer.hub.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (gpt2, neox, llama, gemma, bert, modernbert, t5, bart)
    for family in module.FAMILIES
}
