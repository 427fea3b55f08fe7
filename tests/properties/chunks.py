"""Reads a text into a cache chunk by chunk."""

import numpy as np
from hypothesis import strategies as st

import jaxformer as jf
from tests.properties import tiny

SIZES = (1, 5)


@st.composite
def cuts(draw, length=tiny.LENGTH):
    """Draws chunk lengths with the sum `length`, of only two sizes, because each one compiles."""
    chunks = draw(st.lists(st.sampled_from(SIZES), max_size=length))
    while sum(chunks) > length:
        chunks.pop()
    return chunks + [1] * (length - sum(chunks))


def chunked(model, variables, tokens, chunks, segment_ids=None, cache=None, source=None):
    """Reads the tokens chunk by chunk. Returns the logits of all tokens and the final cache."""
    if cache is None:
        cache = jf.init_cache(model, variables, len(tokens), tiny.LENGTH, source)
    logits, start = [], 0
    for size in chunks:
        span = slice(start, start + size)
        some = None if segment_ids is None else segment_ids[:, span]
        new, cache = jf.extend(model, variables, tokens[:, span], cache, segment_ids=some)
        logits.append(new)
        start += size
    return np.concatenate(logits, axis=1), cache
