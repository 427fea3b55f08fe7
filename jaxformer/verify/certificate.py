"""Certificates of a model: a list of properties, each checked on this machine.

    for property in certify(model, variables): print(property)

The result of a failed property states by how much it fails. For a model with named points, it also
states the first layer at which it fails.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.decoding.autoregressive import advance, start
from jaxformer.decoding.score import score
from jaxformer.functional.cache.key_values import Cache
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.verify import rules
from jaxformer.verify.comparison import compare, warn
from jaxformer.verify.dependency import NO_PATH, dependency_matrix
from jaxformer.verify.subject import Result, Subject, Value, distance, first_broken, subject_of

Index = slice | tuple[EllipsisType | slice | np.ndarray, ...]
HALF = "finite in bfloat16"  # the property that is always checked in bfloat16


class Property(NamedTuple):
    """The result of checking one property.

    Attributes:
        name: The key of PROPERTIES.
        holds: Whether the property holds.
        detail: The measured figures.
        layer: The first layer at which it fails; None if it holds or the layer is unknown.
        seconds: The duration of the check.
    """

    name: str
    holds: bool
    detail: str
    layer: str | None = None
    seconds: float = 0.0


def certify(
    model: LanguageModel,
    variables: Variables,
    *,
    length: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    dtype: str = "float32",
    allow_remarks: bool = False,
) -> Iterator[Property]:
    """Checks the properties in PROPERTIES and yields the results one by one.

    A bug that only appears in longer rows, larger batches or another dtype than those tested is not
    found. Set `length`, `batch_size` and `dtype` to test them.

    Args:
        model: The model; see `subject_of`, also for the other arguments.
        variables: The model's parameters.
        length: Tokens per row; None: 128, or max_length if that is smaller.
        seed: Seed of the random texts.
        batch_size: Batch elements of every pass; None: 1 to 32, depending on the property.
        dtype: The dtype in which the model computes, "float32" or "bfloat16".
        allow_remarks: Whether to omit the warning (`RemarkWarning`) if a property holds with a
            remark.

    Yields:
        The result of each property.

    Raises:
        ValueError: The model cannot be certified, or an argument is not as described.
    """
    options = {"length": length, "seed": seed, "batch_size": batch_size, "dtype": dtype}
    subject = subject_of(model, variables, **options)
    for name in asked_of(subject):
        found = examine(subject, name)
        if found.holds and PROPERTIES[name] is _rule and not allow_remarks:
            warn(subject.dependency)
        yield found


def asked_of(subject: Subject) -> tuple[str, ...]:
    """Returns the names of the properties that apply to the model's kind."""
    left_out = {"bidirectional"} | (set() if subject.source is not None else {"reads its source"})
    if subject.config.bidirectional:  # an encoder, which is not autoregressive
        left_out = OF_GENERATION
    return tuple(name for name in PROPERTIES if name not in left_out)


def examine(subject: Subject, name: str) -> Property:
    """Checks one property of PROPERTIES and returns the result."""
    begin = time.perf_counter()
    holds, detail, *layer = PROPERTIES[name](subject)
    precision = subject.config.dtype
    if name != HALF and (precision, subject.dtype) != ("float32", "float32"):
        detail += f"; in {precision}"
    seconds = round(time.perf_counter() - begin, 2)
    return Property(name, bool(holds), detail, *layer, seconds=seconds)


def _rule(subject: Subject) -> Result:
    """Checks that the dependency matrix equals the rule, for the whole model and for every block.

    The whole model alone is not enough: several layers together may see the whole row even if one
    of them is wrong.
    """
    found, rule = subject.dependency, subject.rule
    compared = compare(found, rule)
    if broken := first_broken(subject):
        layer, block = broken
        details = (f"{compared}; the block alone: {block}", *found.notes)
        return False, "; ".join(details), f"layer {layer}"
    details = [f"{rule.sum()} edges, {compared}; by {', '.join(found.witnesses)}"]
    if unseen := int((rule & (found.effects == 0)).sum()):
        details.append(f"{unseen} edges have a path and no effect is seen")
    if wrong := sum(entry.why == NO_PATH for entry in found.disagreements):
        details.append(f"{wrong} edges have an effect and no path: taint is wrong")
    return compared.holds and not wrong, "; ".join((*details, *found.remarks, *found.notes))


def _reads_its_source(subject: Subject) -> Result:
    """Checks that every token depends on the whole source and not on the source's padding."""
    padded, segments = subject.padded_read, np.ones((1, 8), np.int32)
    source, there = subject.embeddings(*padded["source"].shape, stream=3), padded["source_segments"]
    tokens = subject.tokens(1, 8)

    def hidden(variables: Variables, x: Float[Array, "1 source dim"]) -> Float[Array, "1 8 dim"]:
        read = {"source": x, "source_segments": there}
        return subject.model.apply(variables, tokens, **read, method="hidden_states")

    rule = rules.of_source(segments, there)
    options = {"weights": subject.variables, "witnesses": subject.witnesses}
    compared = compare(dependency_matrix(hidden, source, **options), rule)
    return compared.holds, f"{rule.sum()} edges, {compared}"


def _cached(subject: Subject) -> Result:
    """Checks that a row read in random chunks has the logits of one pass without a cache.

    If it fails, the caches of the two readings are compared to find the layer.
    """
    rng, first = np.random.default_rng(subject.seed), subject.minimum_prefill
    length = min(subject.length, first + 63)
    tokens = subject.tokens(subject.rows(2), length)
    whole = subject.compiled(tokens)
    _, whole_cache = _read_in_chunks(subject, tokens, [length])
    worst = 0.0
    for sizes in ([length], *(chunk_sizes(rng, length, first) for _ in range(3))):
        logits, cache = _read_in_chunks(subject, tokens, sizes)
        worst = max(worst, off := distance(logits, whole))
        if off > subject.tolerance:
            where = _differing_layer(cache, whole_cache, 10 * subject.tolerance)
            few = ", ".join(map(str, sizes[:6])) + ", …" * (len(sizes) > 6)
            return False, f"chunks of {few}: off by {off:.3g}", where
    return True, f"{length} tokens at once and in 3 random chunkings: off by {worst:.2g} at most"


def _read_in_chunks(
    subject: Subject, tokens: Int[np.ndarray, "batch length"], sizes: Sequence[int]
) -> tuple[Float[np.ndarray, "batch length vocab"], Cache]:
    """Returns the logits and the cache after reading the tokens in chunks of these sizes."""
    cache = start(subject.model, subject.variables, len(tokens), tokens.shape[1], subject.source)
    logits = []
    for chunk in np.split(tokens, np.cumsum(sizes)[:-1], axis=1):
        chunk_logits, cache = advance(subject.model, subject.variables, chunk, cache)
        logits.append(chunk_logits)
    return np.concatenate(logits, axis=1), cache


def chunk_sizes(rng: np.random.Generator, length: int, first: int) -> list[int]:
    """Draws the sizes of the chunks: 1 or 11, because each size is compiled separately.

    Args:
        rng: The random generator.
        length: The sum of the sizes.
        first: The minimum size of the first chunk, which must contain the prefix.
    """
    sizes = rng.choice([1, 11], length).tolist()
    sizes[0] = max(sizes[0], first)
    ends = [end for end in itertools.accumulate(sizes) if end <= length]
    return sizes[: len(ends)] + [1] * (length - ends[-1])


def _differing_layer(cache: Cache, expected: Cache, tolerance: float) -> str | None:
    """Returns the first layer whose caches differ."""
    leaves = jax.tree_util.tree_leaves_with_path(cache.states)
    differing = []
    for (path, x), y in zip(leaves, jax.tree.leaves(expected.states), strict=True):
        if not np.allclose(x, y, rtol=0, atol=tolerance):
            name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
            differing.append((path[0].idx, name))
    return "layer {}, {}".format(*min(differing)) if differing else None


def _padded(subject: Subject) -> Result:
    """Checks that padding before, inside and after a text changes no point of the model."""
    length, real = subject.length, subject.length - subject.length // 4
    text, rng = subject.tokens(1, real), np.random.default_rng(subject.seed)
    places = np.sort(rng.choice(length, real, replace=False))
    tokens, segments = subject.tokens(1, length, stream=1), np.zeros((1, length), np.int32)
    tokens[0, places], segments[0, places] = text[0], 1
    padded, alone = subject.passed(tokens, segments, subject.padded_read), subject.passed(text)
    what = f"{real} tokens among {length - real} of padding"
    return _same(subject, padded, alone, np.s_[..., places, :], what)


def _separate(subject: Subject) -> Result:
    """Checks that two texts in one row have the same values as each text alone, at all points."""
    first, length = subject.length // 3, subject.length
    tokens, segments = subject.tokens(1, length), np.full((1, length), 2)
    segments[0, :first] = 1
    packed = subject.passed(tokens, segments)
    what = f"documents of {first} and {length - first} tokens in one row"
    for where in (slice(0, first), slice(first, length)):
        alone = subject.passed(tokens[:, where])
        result = _same(subject, packed, alone, np.s_[..., where, :], what)
        if not result[0]:
            break
    return result


def _independent(subject: Subject) -> Result:
    """Checks that every batch element has the same values as in a batch of one."""
    rows = subject.rows(3)
    tokens = subject.tokens(rows, subject.length)
    together = np.asarray(subject.compiled(tokens))
    apart = [distance(together[i], subject.compiled(tokens[i : i + 1])[0]) for i in range(rows)]
    worst = int(np.argmax(apart)) if max(apart) > subject.tolerance else rows // 2
    row = slice(worst, worst + 1)
    batch, alone = subject.passed(tokens), subject.passed(tokens[row])
    return _same(subject, batch, alone, row, f"row {worst} of {rows} and alone")


def _same(
    subject: Subject, whole: list[Value], part: list[Value], index: Index, what: str
) -> Result:
    """Checks that the values at an index of one trace equal those of another trace."""
    difference = first_difference(whole, part, index, subject.tolerance)
    if difference is None:
        return True, f"{what}: off by {distance(whole[-1].value[index], part[-1].value):.2g}"
    value, off = difference
    return False, f"{what}: off by {off:.3g}", str(value)


def first_difference(
    whole: Sequence[Value], part: Sequence[Value], index: Index, tolerance: float
) -> tuple[Value, float] | None:
    """Returns the first point at which two traces differ, and the difference; None if they agree.

    Args:
        whole: A trace.
        part: The trace of a part of its tokens or batch elements.
        index: The index of that part in the values [batch, …, length, features] of `whole`.
        tolerance: Accepted difference, relative to max(1, the largest value).
    """
    for point, expected in zip(whole, part, strict=True):
        x, y = point.value[index], expected.value
        if x.size and not np.allclose(x, y, rtol=0, atol=tolerance * max(1.0, abs(y).max())):
            return point, float(np.nan_to_num(abs(x - y), nan=np.inf).max())
    return None


def _jitted(subject: Subject) -> Result:
    tokens = subject.tokens(subject.rows(2), min(subject.length, 32))
    compiled = subject.compiled(tokens)
    with jax.disable_jit():
        plain = subject.model.apply(subject.variables, tokens, **subject.read(len(tokens)))
    off = distance(compiled, plain)
    return off <= subject.tolerance, f"off by {off:.2g}"


def _deterministic(subject: Subject) -> Result:
    tokens = subject.tokens(subject.rows(2), subject.length)
    first, *others = (np.asarray(subject.compiled(tokens)) for _ in range(3))
    differing = np.sum([other != first for other in others])
    return differing == 0, f"{differing} of {2 * first.size} logits differ in three runs"


def _probabilities(subject: Subject) -> Result:
    """Checks Σ_x P(x | text) = 1 with P(x | text) = P(text x) / P(text) computed by `score`."""
    size, text = subject.config.vocab_size, subject.tokens(1, max(2, subject.minimum_prefill))
    texts = np.concatenate([np.repeat(text, size, axis=0), np.arange(size)[:, None]], axis=1)

    def log_prob(texts: Int[np.ndarray, "batch length"]) -> Float[Array, " batch"]:
        source = None if subject.source is None else subject.read(len(texts))["source"]
        return score(subject.model, subject.variables, jnp.asarray(texts), source=source)

    each, before = [log_prob(texts[i : i + 1024]) for i in range(0, size, 1024)], log_prob(text)
    total = float(np.exp(np.concatenate(each).astype(np.float64) - float(before[0])).sum())
    holds = abs(total - 1) <= 10 * subject.tolerance
    return holds, f"those of {size} next tokens sum to {total:.6f}"


def _finite(subject: Subject) -> Result:
    """Checks that the logits of complete sequences are finite in bfloat16."""
    half = subject.model.copy(config=replace(subject.config, dtype="bfloat16"))
    tokens = subject.tokens(subject.rows(2), subject.length)
    logits = jax.jit(half.apply)(subject.variables, tokens, **subject.read(len(tokens)))
    bad = int((~jnp.isfinite(logits)).sum())
    return bad == 0, f"{bad} of {logits.size} logits are not finite"


def _floor(subject: Subject) -> Result:
    """Checks that the loss on uniform random tokens is not below ln V.

    A lower loss means that the model has seen its targets.
    """
    rows, first = max(32, subject.rows(32)), subject.minimum_prefill
    tokens = subject.tokens(rows, subject.length)
    log_probs = jax.nn.log_softmax(subject.compiled(tokens)[:, first - 1 : -1])
    losses = -np.take_along_axis(np.asarray(log_probs), tokens[:, first:, None], axis=-1)
    losses = losses[..., 0].mean(axis=1)
    loss, error = losses.mean(), losses.std(ddof=1) / math.sqrt(rows)
    floor = math.log(subject.config.vocab_size)
    detail = f"{loss:.3f} ± {error:.3f} nats on random tokens; ln V is {floor:.3f}"
    return bool(loss > floor - 4 * error), detail


PROPERTIES = {
    "causal": _rule,
    "bidirectional": _rule,
    "reads its source": _reads_its_source,
    "cached = full": _cached,
    "padded = alone": _padded,
    "packed = separate": _separate,
    "batch-independent": _independent,
    "jitted = eager": _jitted,
    "deterministic": _deterministic,
    "probabilities sum to 1": _probabilities,
    HALF: _finite,
    "loss floor": _floor,
}
OF_GENERATION = {
    "causal",
    "reads its source",
    "cached = full",
    "probabilities sum to 1",
    "loss floor",
}
