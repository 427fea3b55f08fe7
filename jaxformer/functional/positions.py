"""How a model is told where a token stands: sinusoids, rotations, and counting within documents."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sinusoidal_positions(
    positions: Int[Array, "*batch length"], dim: int, base: float = 10_000.0
) -> Float[Array, "*batch length dim"]:
    """p[t, 2i] = sin(t / base^(2i/dim)), p[t, 2i+1] = cos(t / base^(2i/dim)), in float32.

    Source: Vaswani et al. 2017, §3.5. `dim` must be even.
    """
    if dim % 2:
        raise ValueError(f"dim is {dim}; sinusoidal positions need an even dim (sin and cos pair)")
    angles = _angles(positions, dim, base)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*angles.shape[:-1], dim)


def rotary(
    x: Float[Array, "*batch heads length head_dim"],
    positions: Int[Array, "*rows length"],
    base: float = 10_000.0,
) -> Float[Array, "*batch heads length head_dim"]:
    """Turn each pair (x[i], x[i + d/2]) by the angle t / base^(2i/d), t the position.

    A score between two rotated vectors then depends on their distance alone. The halves layout is
    that of Llama checkpoints. Angles and the rotation are float32 whatever the dtype: in bfloat16
    positions 256 and 257 would coincide. Source: Su et al. 2021 (RoFormer).
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary positions need an even head_dim")
    angles = _angles(positions, head_dim, base)[..., None, :, :]
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cosine - right * sine, right * cosine + left * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


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
