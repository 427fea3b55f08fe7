"""Data of the page's view of the heads: the head atlas, and the parts of the last logit."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer.interpret.atlas import AtlasSettings, HeadAtlas, head_atlas
from jaxformer.interpret.attribution import attribute, cannot_attribute
from jaxformer.interpret.encoded_text import EncodedText
from jaxformer.interpret.texts import repeated_batch
from jaxformer.models.language_model import LanguageModel, Variables

_ROWS, _LENGTH = 16, 64  # of the text on which the heads of a page are measured


def repeated_atlas(model: LanguageModel, variables: Variables) -> HeadAtlas | None:
    """Measures the heads of a decoder on random tokens that occur twice.

    Returns None for a model that reads fewer than four tokens.
    """
    config = model.config
    length = min(config.max_length, _LENGTH)
    if length < 4:
        return None
    batch = repeated_batch(config.vocab_size, length, _ROWS)
    return head_atlas(model, variables, batch, AtlasSettings(rows_at_once=_ROWS))


def atlas_data(atlas: HeadAtlas, text: str) -> dict[str, Any]:
    """Returns the scores that are defined for every head, the effects and their errors.

    Args:
        atlas: The head atlas.
        text: What the atlas was measured on, for a note on the page.
    """
    scores = {name: x.tolist() for name, x in atlas.scores.items() if np.isfinite(x).all()}
    return {
        "scores": scores,
        "effects": atlas.effect.tolist(),
        "errors": atlas.standard_error.tolist(),
        "text": f"Measured on {atlas.num_rows} rows of {text}.",
    }


def attribution_data(
    model: LanguageModel, variables: Variables, inputs: EncodedText, target: int
) -> dict[str, Any] | None:
    """Splits the logit of `target` after the last token, or returns None if it has no parts."""
    if cannot_attribute(model) is not None:
        return None
    source = None if inputs.source is None else [inputs.source]
    tokens = jnp.array([inputs.tokens], jnp.int32)
    found = attribute(model, variables, tokens, jnp.array([target]), source=source)
    cross = {} if found.cross_heads is None else {"cross": np.asarray(found.cross_heads[0])}
    parts = {
        "heads": np.asarray(found.heads[0]),
        **cross,
        "feedforward": np.asarray(found.feedforward[0]),
        "embedding": np.asarray(found.embedding[0]),
        "logit": np.asarray(found.logit[0]),
        "rest": np.asarray(found.biases[0]),
    }
    return {"target": target} | {name: x.astype(float).tolist() for name, x in parts.items()}
