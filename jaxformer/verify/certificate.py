"""Certificates of language models: a list of properties, each checked by running the model.

    for property in certify(model, variables): print(property)

The result of a failed property states the size of the deviation. For a model with named hook
points, the result also names the first layer that deviates.
"""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.decoding.autoregressive import extend, init_cache
from jaxformer.decoding.score import score
from jaxformer.functional.cache.key_values import Cache
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.verify import rules
from jaxformer.verify.certified_model import (
    CertifiedModel,
    Result,
    Value,
    certified_model,
    distance,
    first_failing_layer,
)
from jaxformer.verify.comparison import Comparison, compare, warn
from jaxformer.verify.dependency import NO_PATH, dependency_matrix

Index = slice | tuple[EllipsisType | slice | np.ndarray, ...]
# The check of this property always computes in bfloat16.
HALF = "finite in bfloat16"
METHOD_NAMES = {"taint": "taint analysis", "derivative": "derivatives", "change": "perturbation"}


class Property(NamedTuple):
    """The result of checking one property.

    Attributes:
        name: The property's key in `PROPERTIES`.
        holds: Whether the property holds.
        detail: The measurements, as text.
        layer: The first layer at which the property fails; None if the property holds or the layer
            is unknown.
        seconds: The duration of the check in seconds.
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
    """Checks the properties in PROPERTIES and yields one result after another.

    The checks run at one length, batch size and dtype. The checks do not find a bug that appears
    only at another length, batch size or dtype. To test other sizes and dtypes, set `length`,
    `batch_size` and `dtype`.

    Args:
        model: A language model, which must be autoregressive unless it is an encoder.
        variables: The model's parameters.
        length: Tokens per sequence. If None, the length is 128, or max_length if max_length is
            smaller.
        seed: Seed of the random token ids.
        batch_size: Batch size of the forward passes. If None, each property has its own batch size
            from 1 to 32.
        dtype: The dtype in which the model computes, "float32" or "bfloat16".
        allow_remarks: If True, the remarks about a property that holds are not issued as
            warnings (`RemarkWarning`).

    Yields:
        The result of each property.

    Raises:
        ValueError: The model cannot be certified, or an argument is invalid.
    """
    options = {"length": length, "seed": seed, "batch_size": batch_size, "dtype": dtype}
    subject = certified_model(model, variables, **options)
    for name in applicable_properties(subject):
        found = check_property(subject, name)
        if found.holds and PROPERTIES[name] is _rule and not allow_remarks:
            warn(subject.dependency)
        yield found


def applicable_properties(subject: CertifiedModel) -> tuple[str, ...]:
    """Returns the names of the properties that apply to the model's architecture."""
    left_out = {"bidirectional"} | (set() if subject.source is not None else {"reads its source"})
    if subject.config.bidirectional:  # Encoders are not autoregressive.
        left_out = OF_GENERATION
    return tuple(name for name in PROPERTIES if name not in left_out)


def check_property(subject: CertifiedModel, name: str) -> Property:
    """Checks the property `name` of PROPERTIES and returns the result."""
    begin = time.perf_counter()
    holds, detail, *layer = PROPERTIES[name](subject)
    precision = subject.config.dtype
    if name != HALF and (precision, subject.dtype) != ("float32", "float32"):
        detail += f"; in {precision}"
    seconds = round(time.perf_counter() - begin, 2)
    return Property(name, bool(holds), detail, *layer, seconds=seconds)


def _rule(subject: CertifiedModel) -> Result:
    """Checks that the model and every block have exactly the dependencies of their rules.

    A check of the whole model is not enough. In a deep model, one layer may have a wrong mask
    without any effect on the dependencies of the whole model.
    """
    found, rule = subject.dependency, subject.rule
    compared = compare(found, rule)
    if broken := first_failing_layer(subject):
        layer, block = broken
        details = (f"{compared}; in the first failing layer alone: {block}", *found.notes)
        return False, "; ".join(details), f"layer {layer}"
    details = [f"{_summary(compared, rule)} (checked by {_method_names(found.witnesses)})"]
    if unseen := int((rule & (found.effects == 0)).sum()):
        details.append(f"{unseen} of the dependencies have no measurable effect")
    if wrong := sum(entry.why == NO_PATH for entry in found.disagreements):
        details.append(f"taint analysis missed {wrong} measured effects, so a taint rule is wrong")
    return compared.holds and not wrong, "; ".join((*details, *found.remarks, *found.notes))


def _summary(compared: Comparison, rule: Bool[np.ndarray, "*pairs"]) -> str:
    if compared.holds:
        return f"{rule.sum()} dependencies as expected, 0 unexpected, 0 missing"
    return f"{rule.sum()} dependencies expected; {compared}"


def _method_names(witnesses: Iterable[str]) -> str:
    *names, last = (METHOD_NAMES[name] for name in witnesses)
    return f"{', '.join(names)} and {last}" if names else last


def _reads_its_source(subject: CertifiedModel) -> Result:
    """Checks that every token depends on all source tokens, and not on the source's padding."""
    padded, segment_ids = subject.padded_source_arguments, np.ones((1, 8), np.int32)
    there = padded["source_segment_ids"]
    source = subject.source_vectors(there.shape[1])
    tokens = subject.tokens(1, 8)

    def hidden(variables: Variables, x: Float[Array, "1 source dim"]) -> Float[Array, "1 8 dim"]:
        read = {"source": x, "source_segment_ids": there}
        return subject.model.apply(variables, tokens, **read, method="hidden_states")

    rule = rules.source_rule(segment_ids, there)
    options = {"weights": subject.variables, "witnesses": subject.witnesses}
    compared = compare(dependency_matrix(hidden, source, **options), rule)
    return compared.holds, _summary(compared, rule)


def _cached(subject: CertifiedModel) -> Result:
    """Checks that feeding a sequence in random chunks gives the logits of one uncached pass.

    If the logits differ, the cache is compared with the cache of a pass in one chunk, to find the
    layer that differs.
    """
    rng, first = np.random.default_rng(subject.seed), subject.minimum_prefill
    length = min(subject.length, first + 63)
    tokens = subject.tokens(subject.batch_size_or(2), length)
    whole = subject.compiled(tokens)
    _, whole_cache = _read_in_chunks(subject, tokens, [length])
    worst = 0.0
    for sizes in ([length], *(chunk_sizes(rng, length, first) for _ in range(3))):
        logits, cache = _read_in_chunks(subject, tokens, sizes)
        worst = max(worst, off := distance(logits, whole))
        if off > subject.tolerance:
            where = _differing_layer(cache, whole_cache, 10 * subject.tolerance)
            few = ", ".join(map(str, sizes[:6])) + ", …" * (len(sizes) > 6)
            return False, f"with chunks of {few} tokens the logits differ by {off:.3g}", where
    what = f"{length} tokens in one chunk and in 3 random chunkings"
    return True, f"{what}: largest difference {worst:.2g}"


def _read_in_chunks(
    subject: CertifiedModel, tokens: Int[np.ndarray, "batch length"], sizes: Sequence[int]
) -> tuple[Float[np.ndarray, "batch length vocab"], Cache]:
    """Runs the model on chunks of the tokens, and returns the logits and the final cache."""
    cache = init_cache(
        subject.model, subject.variables, len(tokens), tokens.shape[1], subject.source
    )
    logits = []
    for chunk in np.split(tokens, np.cumsum(sizes)[:-1], axis=1):
        chunk_logits, cache = extend(subject.model, subject.variables, chunk, cache)
        logits.append(chunk_logits)
    return np.concatenate(logits, axis=1), cache


def chunk_sizes(rng: np.random.Generator, length: int, first: int) -> list[int]:
    """Draws chunk sizes that add up to `length`.

    All chunks except the first have size 1 or 11, because JAX compiles the model once for each
    distinct size.

    Args:
        rng: The random generator.
        length: The total number of tokens.
        first: The minimum size of the first chunk, which must contain the model's prefix.
    """
    sizes = rng.choice([1, 11], length).tolist()
    sizes[0] = max(sizes[0], first)
    ends = [end for end in itertools.accumulate(sizes) if end <= length]
    return sizes[: len(ends)] + [1] * (length - ends[-1])


def _differing_layer(cache: Cache, expected: Cache, tolerance: float) -> str | None:
    """Returns the first layer whose cached arrays differ between two caches; None if all agree."""
    leaves = jax.tree_util.tree_leaves_with_path(cache.states)
    differing = []
    for (path, x), y in zip(leaves, jax.tree.leaves(expected.states), strict=True):
        if not np.allclose(x, y, rtol=0, atol=tolerance):
            name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
            differing.append((path[0].idx, name))
    return "layer {}, {}".format(*min(differing)) if differing else None


def _padded(subject: CertifiedModel) -> Result:
    """Checks that padding before, inside and after a text does not change any hook point value."""
    length, real = subject.length, subject.length - subject.length // 4
    text, rng = subject.tokens(1, real), np.random.default_rng(subject.seed)
    places = np.sort(rng.choice(length, real, replace=False))
    tokens, segment_ids = subject.tokens(1, length, stream=1), np.zeros((1, length), np.int32)
    tokens[0, places], segment_ids[0, places] = text[0], 1
    padded, alone = (
        subject.hook_point_values(tokens, segment_ids, subject.padded_source_arguments),
        subject.hook_point_values(text),
    )
    what = f"{real} tokens with {length - real} of padding"
    return _same(subject, padded, alone, np.s_[..., places, :], what)


def _separate(subject: CertifiedModel) -> Result:
    """Checks that two packed documents have the same values as each document alone."""
    first, length = subject.length // 3, subject.length
    tokens, segment_ids = subject.tokens(1, length), np.full((1, length), 2)
    segment_ids[0, :first] = 1
    packed = subject.hook_point_values(tokens, segment_ids)
    what = f"documents of {first} and {length - first} tokens in one sequence"
    for where in (slice(0, first), slice(first, length)):
        alone = subject.hook_point_values(tokens[:, where])
        result = _same(subject, packed, alone, np.s_[..., where, :], what)
        if not result[0]:
            break
    return result


def _independent(subject: CertifiedModel) -> Result:
    """Checks that every batch element has the same values as in a batch of one."""
    batch_size = subject.batch_size_or(3)
    tokens = subject.tokens(batch_size, subject.length)
    together = np.asarray(subject.compiled(tokens))
    apart = [
        distance(together[i], subject.compiled(tokens[i : i + 1])[0]) for i in range(batch_size)
    ]
    worst = int(np.argmax(apart)) if max(apart) > subject.tolerance else batch_size // 2
    element = slice(worst, worst + 1)
    batch, alone = subject.hook_point_values(tokens), subject.hook_point_values(tokens[element])
    what = f"batch element {worst} of {batch_size}, in the batch and alone"
    return _same(subject, batch, alone, element, what)


def _same(
    subject: CertifiedModel, whole: list[Value], part: list[Value], index: Index, what: str
) -> Result:
    """Checks that two forward passes have equal values at all hook points.

    `part` contains the values of a pass over a part of the inputs. `index` selects the values of
    this part in `whole`, the values of a pass over all inputs.
    """
    difference = first_difference(whole, part, index, subject.tolerance)
    if difference is None:
        difference = distance(whole[-1].value[index], part[-1].value)
        return True, f"{what}: largest difference {difference:.2g}"
    value, off = difference
    return False, f"{what}: largest difference {off:.3g}", str(value)


def first_difference(
    whole: Sequence[Value], part: Sequence[Value], index: Index, tolerance: float
) -> tuple[Value, float] | None:
    """Returns the first hook point at which two forward passes differ, and the difference.

    Returns None if all values agree.

    Args:
        whole: The hook point values of a forward pass.
        part: The hook point values of a forward pass over a part of the tokens or batch elements.
        index: Selects the values of this part in each array [batch, …, length, features] of
            `whole`.
        tolerance: The accepted difference, relative to max(1, the largest value).
    """
    for point, expected in zip(whole, part, strict=True):
        x, y = point.value[index], expected.value
        if x.size and not np.allclose(x, y, rtol=0, atol=tolerance * max(1.0, abs(y).max())):
            return point, float(np.nan_to_num(abs(x - y), nan=np.inf).max())
    return None


def _jitted(subject: CertifiedModel) -> Result:
    tokens = subject.tokens(subject.batch_size_or(2), min(subject.length, 32))
    compiled = subject.compiled(tokens)
    with jax.disable_jit():
        plain = subject.model.apply(
            subject.variables, tokens, **subject.source_arguments(len(tokens))
        )
    off = distance(compiled, plain)
    return off <= subject.tolerance, f"largest difference {off:.2g}"


def _deterministic(subject: CertifiedModel) -> Result:
    tokens = subject.tokens(subject.batch_size_or(2), subject.length)
    first, *others = (np.asarray(subject.compiled(tokens)) for _ in range(3))
    differing = np.sum([other != first for other in others])
    return (
        differing == 0,
        f"{differing} of {2 * first.size} logits differ in two repetitions of a run",
    )


def _probabilities(subject: CertifiedModel) -> Result:
    """Checks that Σ_x P(x | text) = 1, where `score` gives P(x | text) = P(text x) / P(text)."""
    size, text = subject.config.vocab_size, subject.tokens(1, max(2, subject.minimum_prefill))
    texts = np.concatenate([np.repeat(text, size, axis=0), np.arange(size)[:, None]], axis=1)

    def log_prob(texts: Int[np.ndarray, "batch length"]) -> Float[Array, " batch"]:
        source = None if subject.source is None else subject.source_arguments(len(texts))["source"]
        return score(subject.model, subject.variables, jnp.asarray(texts), source=source)

    each, before = [log_prob(texts[i : i + 1024]) for i in range(0, size, 1024)], log_prob(text)
    total = float(np.exp(np.concatenate(each).astype(np.float64) - float(before[0])).sum())
    holds = abs(total - 1) <= 10 * subject.tolerance
    return holds, f"the probabilities of all {size} possible next tokens add up to {total:.6f}"


def _finite(subject: CertifiedModel) -> Result:
    """Checks that the logits of complete sequences are finite in bfloat16."""
    half = subject.model.copy(config=replace(subject.config, dtype="bfloat16"))
    tokens = subject.tokens(subject.batch_size_or(2), subject.length)
    logits = jax.jit(half.apply)(subject.variables, tokens, **subject.source_arguments(len(tokens)))
    bad = int((~jnp.isfinite(logits)).sum())
    return bad == 0, f"{bad} of {logits.size} logits are not finite"


def _floor(subject: CertifiedModel) -> Result:
    """Checks that the loss on uniformly random tokens is at least ln(vocab_size).

    A lower loss means that the logits depend on the tokens to be predicted.
    """
    batch_size, first = max(32, subject.batch_size_or(32)), subject.minimum_prefill
    tokens = subject.tokens(batch_size, subject.length)
    log_probs = jax.nn.log_softmax(subject.compiled(tokens)[:, first - 1 : -1])
    losses = -np.take_along_axis(np.asarray(log_probs), tokens[:, first:, None], axis=-1)
    losses = losses[..., 0].mean(axis=1)
    loss, error = losses.mean(), losses.std(ddof=1) / math.sqrt(batch_size)
    floor = math.log(subject.config.vocab_size)
    detail = f"loss {loss:.3f} ± {error:.3f} nats on random tokens; ln(vocab_size) is {floor:.3f}"
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
