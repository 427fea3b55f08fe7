"""The decoder-only Transformer as pure functions of its weights.

    tokens → embedding + position → blocks → norm → logits

Output i predicts token i + 1 and depends on tokens ≤ i. With a prefix it also depends on all tokens
of the prefix: these first tokens of a document see one another in both directions, and the model
does not predict them.

Reference:
    Notes, lecture 11 §6.
"""

from typing import Any

from jaxformer.functional.blocks import BLOCK_POINTS
from jaxformer.functional.embedding import with_head
from jaxformer.functional.family import Family
from jaxformer.functional.initial import stack_initializers
from jaxformer.functional.transformer import POINTS, forward, prepare, self_attention_masks, start


def initializers(config: Any) -> dict:
    """Returns {name: initializer of the decoder's weights}, each a pure function of a key."""
    return with_head(stack_initializers(config), config, config.embed_dim)


DECODER = Family(
    initializers,
    forward,
    points=lambda config: POINTS,
    layer_points=lambda config: BLOCK_POINTS,
    start=start,
    prepare=prepare,
    masks=self_attention_masks,
)
