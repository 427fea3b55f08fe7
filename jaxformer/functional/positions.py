"""Positions of tokens: sinusoids, rotations, and counting within documents."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from jaxformer.functional.arguments import check_positive, checks_arguments, whole_number
from jaxformer.functional.symbolic import Size


def _check_sinusoids(positions: object, dim: int, base: float, **_: object) -> None:
    whole_number("dim", dim, 2)
    check_positive("base", base)
    if dim % 2:
        raise ValueError(f"dim is {dim}; sinusoidal positions need an even dim (sin and cos pair)")


@checks_arguments(_check_sinusoids)
def sinusoidal_positions(
    positions: Integer[Array, "*batch length"],
    dim: int,
    base: float = 10_000.0,
    *,
    halves: bool = False,
) -> Float[Array, "*batch length dim"]:
    """Computes p[t, 2i] = sin(t / base^(2i/dim)) and p[t, 2i+1] = cos(t / base^(2i/dim)).

    Args:
        positions: t.
        dim: number of features; must be even.
        base: base of the wavelengths.
        halves: whether all sines precede all cosines (Marian), instead of alternating.

    Returns:
        float32 [*batch, length, dim].

    Raises:
        ValueError: `dim` is odd or below 2, or `base` is not above 0.

    Reference:
        Vaswani et al. 2017, §3.5.
    """
    angles = _angles(positions, dim, base)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-2 if halves else -1)
    return pairs.reshape(*angles.shape[:-1], dim)


def _check_rotary(
    x: Float[Any, "..."], positions: Integer[Any, "..."], base: float, fraction: float, **_: object
) -> None:
    check_positive("base", base)
    batch, rows = x.shape[:-3], positions.shape[:-1]
    fits = len(rows) <= len(batch) and all(
        size in (1, other) for size, other in zip(rows[::-1], batch[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"positions is {positions.shape}; it must be [length] or [*batch, length] for x "
            f"[*batch, heads, length, head_dim], which is {x.shape}"
        )
    head_dim = x.shape[-1]
    dim = int(head_dim * fraction)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ValueError(
            f"x has head_dim {head_dim}, of which fraction ({fraction}) rotates {dim} features; it "
            f"must be an even number in 2 … {head_dim}"
        )


@checks_arguments(_check_rotary)
def rotary(
    x: Float[Array, "*batch_and_heads length head_dim"],
    positions: Integer[Array, "*rows length"],
    base: float = 10_000.0,
    *,
    fraction: float = 1.0,
    interleaved: bool = False,
    scaling: Any = None,
) -> Float[Array, "*batch_and_heads length head_dim"]:
    """Rotates each pair (x[i], x[i + d/2]) by the angle t / base^(2i/d) at position t.

    The product of two rotated vectors depends on their positions only through the distance. Angles
    and the rotation are float32 whatever the dtype of x: in bfloat16 positions 256 and 257 would
    coincide.

    Args:
        x: queries or keys.
        positions: t of each token.
        base: base of the frequencies.
        fraction: only the first d = fraction · head_dim features rotate.
        interleaved: whether the pairs are (x[2i], x[2i + 1]), as in RoFormer. Otherwise they are as
            above, as in Llama checkpoints.
        scaling: see `rotary_frequencies`.

    Raises:
        ValueError: the shapes do not fit, `base` is not above 0, or d is not an even number in 2 …
            head_dim.

    Reference:
        Su et al. 2021 (RoFormer).
    """
    dim = int(x.shape[-1] * fraction)
    frequencies, factor = rotary_frequencies(dim, base, scaling)
    angles = (positions[..., None].astype(jnp.float32) * frequencies)[..., None, :, :]
    cosine, sine = factor * jnp.cos(angles), factor * jnp.sin(angles)
    turning, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    pairs = turning.reshape(*x.shape[:-1], *((dim // 2, 2) if interleaved else (2, dim // 2)))
    left, right = jnp.moveaxis(pairs, -1 if interleaved else -2, 0)
    turned = [left * cosine - right * sine, right * cosine + left * sine]
    turned = jnp.stack(turned, axis=-1 if interleaved else -2).reshape(turning.shape)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def rotary_frequencies(dim: int, base: float, scaling: Any = None) -> tuple[np.ndarray, float]:
    """Returns the frequencies of the pairs in radians per position, and a factor of the vectors.

    A frequency is f_i = base^(−2i/dim), modified by the kind of `scaling` with factor s:

    - None: f. The factor of the vectors is 1.
    - linear: f / s, so that each position counts 1/s (Chen et al. 2023).
    - llama3: f / s for waves that are longer than the original training text, f for short waves,
      and a mixture in between (Llama 3.1).
    - yarn: the same with a ramp over the pairs, and a factor of the vectors (Peng et al. 2023, §3).

    Args:
        dim: number of rotated features, two for each pair.
        base: base of the frequencies.
        scaling: a models.config.RotaryScaling, or None.
    """
    frequencies = base ** (-np.arange(0, dim, 2) / dim)
    if scaling is None:
        return frequencies.astype(np.float32), 1.0
    unscaled = _KEPT[scaling.kind](frequencies, dim, base, scaling)
    stretched = frequencies * (unscaled + (1.0 - unscaled) / scaling.factor)
    factor = 1.0
    if scaling.kind == "yarn":
        factor = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    return stretched.astype(np.float32), factor


def _kept_by_llama3(frequencies: np.ndarray, dim: int, base: float, scaling: Any) -> np.ndarray:
    """Returns how much of each frequency remains, by its number of waves in the original length."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    waves = scaling.original_length * frequencies / (2 * np.pi)
    return np.clip((waves - low) / (high - low), 0.0, 1.0)


def _kept_by_yarn(frequencies: np.ndarray, dim: int, base: float, scaling: Any) -> np.ndarray:
    """Returns how much of each frequency remains, by a ramp over the pairs.

    The ramp is between the pairs that turn beta_fast and beta_slow times in the original length.
    """

    def pair(turns: float) -> float:
        length = scaling.original_length
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last if last != first else first + 0.001
    return 1.0 - np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)


_KEPT = {"linear": lambda *_: 0.0, "llama3": _kept_by_llama3, "yarn": _kept_by_yarn}


def _angles(
    positions: Integer[Any, "*batch length"], dim: int, base: Any
) -> Float[Array, "*batch length pairs"]:
    frequencies = base ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    return positions[..., None].astype(jnp.float32) * frequencies


class DocumentCursor(NamedTuple):
    """How far each row has been read, so that the next chunk can continue counting.

    Attributes:
        segment: int [batch], the last segment id that was not padding.
        document: int [batch], how many documents have begun.
        position: int [batch], the position of the next token of the current document.
    """

    segment: Array
    document: Array
    position: Array

    @classmethod
    def begin(cls, batch_size: Size) -> "DocumentCursor":
        """Returns the cursor of rows that have not been read."""
        return cls(*(jnp.zeros(batch_size, jnp.int32) for _ in range(3)))


def continued_segments(
    segments: Int[Array, "batch length"] | None, cursor: DocumentCursor, shape: tuple[int, ...]
) -> Int[Array, "batch length"]:
    """Returns `segments`; if they are None, those that continue each row's current document."""
    if segments is not None:
        return segments
    return jnp.broadcast_to(jnp.maximum(cursor.segment, 1)[:, None], shape)


def document_positions(
    segments: Int[Array, "batch length"], cursor: DocumentCursor
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"], DocumentCursor]:
    """Numbers the documents of each row and the positions within them.

    A document is a maximal run of equal non-zero segment ids, ignoring padding (0). If an id
    returns after another one, it begins a *new* document, which does not see the earlier one.
    Positions restart at 0 in each document. Padding has document 0 and position 0.

    Returns:
        (documents, positions, cursor), the first two int [batch, length].
    """
    segments = segments.astype(cursor.segment.dtype)
    valid = segments != 0
    so_far = jnp.concatenate([cursor.segment[:, None], segments], axis=1)
    index = jnp.arange(so_far.shape[1], dtype=jnp.int32)
    # The index of the last token that is not padding.
    latest = jax.lax.cummax(jnp.where(so_far != 0, index, 0), axis=1)
    last_segment = jnp.take_along_axis(so_far, latest, axis=1)
    begins = valid & (segments != last_segment[:, :-1])

    document = cursor.document[:, None] + jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    tokens_before = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid
    # The start of the current document, counted in tokens of this chunk; negative if before it.
    origin = jax.lax.cummax(jnp.where(begins, tokens_before, -cursor.position[:, None]), axis=1)
    after = DocumentCursor(
        segment=last_segment[:, -1],
        document=document[:, -1],
        position=valid.sum(axis=1, dtype=jnp.int32) - origin[:, -1],
    )
    position = tokens_before - origin
    return jnp.where(valid, document, 0), jnp.where(valid, position, 0), after
