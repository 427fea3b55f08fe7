"""How a model is told where a token stands: sinusoids, rotations, and counting within documents."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def sinusoidal_positions(
    positions: Int[Array, "*batch length"],
    dim: int,
    base: float = 10_000.0,
    *,
    halves: bool = False,
) -> Float[Array, "*batch length dim"]:
    """p[t, 2i] = sin(t / base^(2i/dim)), p[t, 2i+1] = cos(t / base^(2i/dim)), in float32.

    halves: all sines first, and then all cosines (Marian). Source: Vaswani et al. 2017, §3.5. `dim`
    must be even.
    """
    if dim % 2:
        raise ValueError(f"dim is {dim}; sinusoidal positions need an even dim (sin and cos pair)")
    angles = _angles(positions, dim, base)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-2 if halves else -1)
    return pairs.reshape(*angles.shape[:-1], dim)


def rotary(
    x: Float[Array, "*batch heads length head_dim"],
    positions: Int[Array, "*rows length"],
    base: float = 10_000.0,
    *,
    fraction: float = 1.0,
    interleaved: bool = False,
    scaling=None,
) -> Float[Array, "*batch heads length head_dim"]:
    """Turn each pair (x[i], x[i + d/2]) by the angle t / base^(2i/d), t the position.

    A score between two rotated vectors then depends on their distance alone. The halves layout is
    that of Llama checkpoints; interleaved, the pairs are (x[2i], x[2i + 1]), as in RoFormer.
    fraction: only the first d = fraction · head_dim features turn. scaling: see
    `rotary_frequencies`. Angles and the rotation are float32 whatever the dtype: in bfloat16
    positions 256 and 257 would coincide. Source: Su et al. 2021 (RoFormer).
    """
    head_dim = x.shape[-1]
    dim = int(head_dim * fraction)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ValueError(
            f"head_dim is {head_dim}, of which {dim} features turn; rotary positions need an even "
            f"number of them in 2 … {head_dim}"
        )
    frequencies, factor = rotary_frequencies(dim, base, scaling)
    angles = (positions[..., None].astype(jnp.float32) * frequencies)[..., None, :, :]
    cosine, sine = factor * jnp.cos(angles), factor * jnp.sin(angles)
    turning, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    pairs = turning.reshape(*x.shape[:-1], *((dim // 2, 2) if interleaved else (2, dim // 2)))
    left, right = jnp.moveaxis(pairs, -1 if interleaved else -2, 0)
    turned = [left * cosine - right * sine, right * cosine + left * sine]
    turned = jnp.stack(turned, axis=-1 if interleaved else -2).reshape(turning.shape)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def rotary_frequencies(dim: int, base: float, scaling=None) -> tuple[np.ndarray, float]:
    """(radians a position of each of dim / 2 pairs, factor of the rotated vectors).

    f_i = base^(−2i/dim), stretched as `scaling` says (models.config.RotaryScaling; None: as it is):
    linear: f / s, every position counting 1/s (Chen et al. 2023); llama3: f / s for waves longer
    than the text trained on, f for short ones, and a mixture between (Llama 3.1); yarn: the same
    with a ramp over the pairs, and vectors longer by a factor (Peng et al. 2023, §3).
    """
    frequencies = base ** (-np.arange(0, dim, 2) / dim)
    if scaling is None:
        return np.float32(frequencies), 1.0
    kept = _KEPT[scaling.kind](frequencies, dim, base, scaling)
    stretched = frequencies * (kept + (1.0 - kept) / scaling.factor)
    factor = 1.0
    if scaling.kind == "yarn":
        factor = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    return np.float32(stretched), factor


def _kept_by_llama3(frequencies, dim, base, scaling):
    """How much of each frequency stays, by how many of its waves the first training text held."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    waves = scaling.original_length * frequencies / (2 * np.pi)
    return np.clip((waves - low) / (high - low), 0.0, 1.0)


def _kept_by_yarn(frequencies, dim, base, scaling):
    """The same, by a ramp over the pairs between those that turn beta_fast and beta_slow times."""

    def pair(turns):
        length = scaling.original_length
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last if last != first else first + 0.001
    return 1.0 - np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)


_KEPT = {"linear": lambda *_: 0.0, "llama3": _kept_by_llama3, "yarn": _kept_by_yarn}


def _angles(positions, dim, base):
    frequencies = base ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    return positions[..., None].astype(jnp.float32) * frequencies


class DocumentCursor(NamedTuple):
    """How far each row has been read; what a later chunk needs to go on counting. All int [batch].

    segment: the last segment id that was not padding; document: how many documents have begun;
    position: the position that the next token of the current document will have.
    """

    segment: Array
    document: Array
    position: Array

    @classmethod
    def begin(cls, batch_size: int) -> "DocumentCursor":
        return cls(*(jnp.zeros(batch_size, jnp.int32) for _ in range(3)))


def continued_segments(segments, cursor: DocumentCursor, shape):
    """The segments of a chunk of this shape; where None were given each row's document goes on."""
    if segments is not None:
        return segments
    return jnp.broadcast_to(jnp.maximum(cursor.segment, 1)[:, None], shape)


def document_positions(segments: Int[Array, "batch length"], cursor: DocumentCursor):
    """Number the documents of each row and the positions within them.

    A document is a maximal run of equal non-zero segment ids, padding (0) left out of account, so
    an id that comes again after another one begins a *new* document and can see nothing of the
    old. Positions restart at 0 in each document; padding has document 0 and position 0.

    Returns (documents, positions, cursor), the first two int [batch, length].
    """
    valid = segments != 0
    so_far = jnp.concatenate([cursor.segment[:, None], segments], axis=1)
    index = jnp.arange(so_far.shape[1])
    latest = jax.lax.cummax(
        jnp.where(so_far != 0, index, 0), axis=1
    )  # the last token, padding aside
    last_segment = jnp.take_along_axis(so_far, latest, axis=1)
    begins = valid & (segments != last_segment[:, :-1])

    document = cursor.document[:, None] + jnp.cumsum(begins, axis=1)
    tokens_before = jnp.cumsum(valid, axis=1) - valid
    # Where the current document began, in tokens of this chunk; negative when it began before it.
    origin = jax.lax.cummax(jnp.where(begins, tokens_before, -cursor.position[:, None]), axis=1)
    after = DocumentCursor(
        segment=last_segment[:, -1],
        document=document[:, -1],
        position=valid.sum(axis=1) - origin[:, -1],
    )
    position = tokens_before - origin
    return jnp.where(valid, document, 0), jnp.where(valid, position, 0), after
