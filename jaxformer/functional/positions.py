"""Positions of tokens: sinusoidal and rotary encodings, and positions within packed documents."""

import math
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

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
        raise ValueError(
            f"dim is {dim}, but sinusoidal positions need an even dim (pairs of sin and cos)"
        )


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
        positions: the positions t.
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
    batch, position_batch = x.shape[:-3], positions.shape[:-1]
    fits = len(position_batch) <= len(batch) and all(
        size in (1, other) for size, other in zip(position_batch[::-1], batch[::-1], strict=False)
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
            f"x has head_dim {head_dim}, and fraction ({fraction}) rotates {dim} features; the "
            f"number of rotated features must be even and in 2 … {head_dim}"
        )


@runtime_checkable
class Scaling(Protocol):
    """Settings of `rotary_frequencies`; see `models.config.RotaryScaling`."""

    @property
    def kind(self) -> Literal["linear", "llama3", "yarn"]:
        """The method: "linear", "llama3" or "yarn"."""

    @property
    def factor(self) -> float:
        """The divisor s of the frequencies."""

    @property
    def original_length(self) -> int:
        """Context length, in tokens, with which the model was first trained."""

    @property
    def low_frequency_factor(self) -> float:
        """For llama3: the frequency below which frequencies are divided by s.

        The unit is full rotations per `original_length` tokens.
        """

    @property
    def high_frequency_factor(self) -> float:
        """For llama3: the frequency above which frequencies are unchanged.

        The unit is full rotations per `original_length` tokens.
        """

    @property
    def beta_fast(self) -> float:
        """For yarn: the frequency above which frequencies are unchanged.

        The unit is full rotations per `original_length` tokens.
        """

    @property
    def beta_slow(self) -> float:
        """For yarn: the frequency below which frequencies are divided by s.

        The unit is full rotations per `original_length` tokens.
        """

    @property
    def whole_pairs(self) -> bool:
        """For yarn: whether the range of partly scaled pairs is rounded outwards to whole pairs."""

    @property
    def attention_factor(self) -> float | None:
        """For yarn: the factor that multiplies the rotated vectors; 0.1 ln(s) + 1 if None."""


@checks_arguments(_check_rotary)
def rotary(
    x: Float[Array, "*batch_and_heads length head_dim"],
    positions: Integer[Array, "*position_batch length"],
    base: float = 10_000.0,
    *,
    fraction: float = 1.0,
    interleaved: bool = False,
    scaling: Scaling | None = None,
) -> Float[Array, "*batch_and_heads length head_dim"]:
    """Rotates each pair (x[i], x[i + d/2]) by the angle t / base^(2i/d) at position t.

    The dot product of two rotated vectors depends only on the difference of their positions. Angles
    and rotations are computed in float32, because in bfloat16 the positions 256 and 257 are equal.

    Args:
        x: queries or keys.
        positions: the position t of each token.
        base: base of the frequencies.
        fraction: only the first d = fraction · head_dim features are rotated.
        interleaved: whether the pairs are (x[2i], x[2i + 1]), as in RoFormer, instead of (x[i], x[i
            + d/2]), as in Llama checkpoints.
        scaling: see `rotary_frequencies`.

    Raises:
        ValueError: The shapes do not fit, `base` is not above 0, or d is not an even number in 2
            … head_dim.

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


def rotary_frequencies(
    dim: int, base: float, scaling: Scaling | None = None
) -> tuple[np.ndarray, float]:
    """Returns the rotary frequencies, in radians per position, and a factor for rotated vectors.

    The frequency of pair i is f_i = base^(−2i/dim). `rotary` multiplies the rotated vectors by the
    returned factor. `scaling.kind` selects how f changes with s = `scaling.factor`:

    - None: f is unchanged, and the factor is 1.
    - linear: f / s, so that positions are divided by s (Chen et al. 2023).
    - llama3: f / s for waves longer than the original training length, f for short waves, and a
      mixture in between (Llama 3.1).
    - yarn: like llama3, but the mixture changes linearly over the pairs, and the factor is
      `scaling.attention_factor` (Peng et al. 2023, §3).

    Args:
        dim: number of rotated features, two for each pair.
        base: base of the frequencies.
        scaling: the method and its settings, or None.
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


def _kept_by_llama3(frequencies: np.ndarray, dim: int, base: float, scaling: Scaling) -> np.ndarray:
    """Returns the weight of the unscaled frequency of each pair, from 0 to 1.

    The weight of the scaled frequency is 1 minus this weight. The returned weight rises linearly
    with the number of full rotations of a pair within the original training length.
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    waves = scaling.original_length * frequencies / (2 * np.pi)
    return np.clip((waves - low) / (high - low), 0.0, 1.0)


def _kept_by_yarn(frequencies: np.ndarray, dim: int, base: float, scaling: Scaling) -> np.ndarray:
    """Returns the weight of the unscaled frequency of each pair, from 0 to 1.

    The weight of the scaled frequency is 1 minus this weight. The returned weight falls linearly
    over the pairs, from 1 to 0. The fall begins at the pair that makes beta_fast full rotations in
    the original training length, and ends at the pair that makes beta_slow full rotations.
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
    """The end of each batch element's last document, from which the next chunk continues.

    Attributes:
        segment: int [batch], the last segment id that is not 0 (padding).
        document: int [batch], the number of documents so far.
        position: int [batch], the position of the next token of the current document.
    """

    segment: Array
    document: Array
    position: Array

    @classmethod
    def begin(cls, batch_size: Size) -> "DocumentCursor":
        """Returns the initial cursor: the number of documents and the position are 0."""
        return cls(*(jnp.zeros(batch_size, jnp.int32) for _ in range(3)))


def continued_segment_ids(
    segment_ids: Int[Array, "batch length"] | None, cursor: DocumentCursor, shape: tuple[int, ...]
) -> Int[Array, "batch length"]:
    """Returns `segment_ids`; if it is None, all tokens continue the documents of `cursor`."""
    if segment_ids is not None:
        return segment_ids
    return jnp.broadcast_to(jnp.maximum(cursor.segment, 1)[:, None], shape)


def document_positions(
    segment_ids: Int[Array, "batch length"], cursor: DocumentCursor
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"], DocumentCursor]:
    """Computes the document number of each token, and its position within the document.

    A document is a maximal run of equal non-zero segment ids, ignoring padding (0). If an id occurs
    again after a different id, a *new* document begins, and its tokens do not attend to the earlier
    document. Positions restart at 0 in each document. Padding has document 0 and position 0.

    Returns:
        (documents, positions, cursor); documents and positions are int [batch, length].
    """
    segment_ids = segment_ids.astype(cursor.segment.dtype)
    valid = segment_ids != 0
    so_far = jnp.concatenate([cursor.segment[:, None], segment_ids], axis=1)
    index = jnp.arange(so_far.shape[1], dtype=jnp.int32)
    # For each token, the index of the last token up to this token that is not padding.
    latest = jax.lax.cummax(jnp.where(so_far != 0, index, 0), axis=1)
    last_segment = jnp.take_along_axis(so_far, latest, axis=1)
    begins = valid & (segment_ids != last_segment[:, :-1])

    document = cursor.document[:, None] + jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    tokens_before = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid
    # For each token, the index of the first token of its document. Index 0 is the first token of
    # this chunk, and padding is not counted. The index is negative if the document began in an
    # earlier chunk.
    origin = jax.lax.cummax(jnp.where(begins, tokens_before, -cursor.position[:, None]), axis=1)
    after = DocumentCursor(
        segment=last_segment[:, -1],
        document=document[:, -1],
        position=valid.sum(axis=1, dtype=jnp.int32) - origin[:, -1],
    )
    position = tokens_before - origin
    return jnp.where(valid, document, 0), jnp.where(valid, position, 0), after
