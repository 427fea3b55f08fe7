"""What a model provably does, on the machine that it runs on: a list of properties, each held to.

    for property in certify(model, variables): print(property)

A property that does not hold says by how much and, where the model has named points, at which layer
it is first to be seen.
"""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decoding.autoregressive import advance, start
from jaxformer.decoding.score import score
from jaxformer.verify import rules
from jaxformer.verify.dependency import NO_PATH, compare, dependency_matrix
from jaxformer.verify.layers import first_broken, first_difference
from jaxformer.verify.subject import Subject, subject_of

TOLERANCE = 1e-5  # of max(1, the largest value), in float32
HALF = "finite in bfloat16"  # the property that is not found in float32


class Property(NamedTuple):
    """name: what is claimed; holds: whether it is so; detail: what was seen; layer: where it first
    goes wrong, if that is known; seconds: what it took to find out."""

    name: str
    holds: bool
    detail: str
    layer: str | None = None
    seconds: float = 0.0


def certify(model, variables, *, length: int | None = None, seed: int = 0) -> Iterator[Property]:
    """The properties one by one, as they are found: see PROPERTIES, and `subject_of`.

    All but "finite in bfloat16" are found in float32, and say so of a bfloat16 model.
    """
    subject = subject_of(model, variables, length=length, seed=seed)
    for name in asked_of(subject):
        yield examine(subject, name)


def asked_of(subject: Subject) -> tuple[str, ...]:
    """The names of the properties that it can have."""
    if not subject.is_autoregressive:
        return tuple(name for name in PROPERTIES if name not in OF_GENERATION)
    left_out = {"bidirectional"} | (set() if subject.source is not None else {"reads its source"})
    return tuple(name for name in PROPERTIES if name not in left_out)


def examine(subject: Subject, name: str) -> Property:
    """One of the properties."""
    begin = time.perf_counter()
    holds, detail, *layer = PROPERTIES[name](subject)
    if subject.dtype != "float32" and name != HALF:
        detail += "; in float32"
    seconds = round(time.perf_counter() - begin, 2)
    return Property(name, bool(holds), detail, *layer or [None], seconds)


def _rule(subject):
    """The dependency matrix is the rule: which edges are missing, and which there should not be.

    Of the whole model and, since several layers may reach as far as a row is long whatever each of
    them sees, of every block by itself.
    """
    found, rule = subject.dependency, subject.rule
    compared = compare(found, rule)
    wrong = sum(entry.why == NO_PATH for entry in found.disagreements)
    unseen = int((rule & (found.effects == 0)).sum())
    x, others = subject.inputs
    broken = first_broken(
        subject.model, subject.variables, x, others, subject.segments, **subject.read()
    )
    if broken:
        layer, own = broken
        return False, f"{compared}; the block by itself: {own}", f"layer {layer}"
    detail = f"{rule.sum()} edges, {compared}; by {', '.join(found.witnesses)}"
    if unseen:
        detail += f"; of {unseen} a path is there and no effect is seen"
    if wrong:
        detail += f"; of {wrong} an effect is seen and no path is there: taint is wrong"
    return compared.holds and not wrong, "; ".join((detail, *found.remarks))


def _reads_its_source(subject):
    """Every token depends on all of the source, and on none of its padding."""
    padded, segments = subject.padded_read, np.ones((1, 8), np.int32)
    x, there = subject.embeddings(*padded["source"].shape, stream=3), padded["source_segments"]
    tokens = subject.tokens(1, 8)

    def hidden(source):
        read = {"source": source, "source_segments": there}
        return subject.model.apply(subject.variables, tokens, **read, method="hidden_states")

    rule = rules.of_source(segments, there)
    compared = compare(dependency_matrix(hidden, x, witnesses=("taint", "change")), rule)
    return compared.holds, f"{rule.sum()} edges, {compared}"


def _cached(subject):
    """Read in random chunks, a row gives what it gives in one pass, and leaves the same cache."""
    rng, first = np.random.default_rng(subject.seed), subject.minimum_prefill
    length = min(subject.length, first + 63)
    tokens = subject.tokens(2, length)
    whole = subject.compiled(tokens)
    _, kept = _advanced(subject, tokens, [length])
    worst = 0.0
    for sizes in ([length], *(_chunks(rng, length, first) for _ in range(3))):
        logits, cache = _advanced(subject, tokens, sizes)
        worst = max(worst, off := _distance(logits, whole))
        if off > TOLERANCE:
            return False, f"chunks of {_few(sizes)}: off by {off:.3g}", _parting(cache, kept)
    return True, f"{length} tokens at once and in 3 random chunkings: off by {worst:.2g} at most"


def _advanced(subject, tokens, sizes):
    cache = start(subject.model, subject.variables, len(tokens), tokens.shape[1], subject.source)
    logits, begin = [], 0
    for size in sizes:
        some, cache = advance(
            subject.model, subject.variables, tokens[:, begin : begin + size], cache
        )
        logits.append(some)
        begin += size
    return np.concatenate(logits, axis=1), cache


def _chunks(rng, length: int, first: int):
    """Of two sizes, each of which is compiled, but the first as large as the model needs it."""
    sizes = rng.choice([1, 11], length).tolist()
    sizes[0] = max(sizes[0], first)
    ends = [end for end in itertools.accumulate(sizes) if end <= length]
    return sizes[: len(ends)] + [1] * (length - ends[-1])


def _few(sizes):
    return ", ".join(map(str, sizes[:6])) + ", …" * (len(sizes) > 6)


def _parting(cache, kept) -> str | None:
    """The first layer of which two caches hold something else."""
    (some, _), (others, _) = map(jax.tree_util.tree_flatten_with_path, (cache, kept))
    parted = []
    for (path, x), (_, y) in zip(some, others, strict=True):
        layers = [key.idx for key in path if isinstance(key, jax.tree_util.SequenceKey)]
        if layers and not np.allclose(x, y, rtol=0, atol=10 * TOLERANCE):
            parted.append((layers[0], f"cache{jax.tree_util.keystr(path)}"))
    return "layer {}, {}".format(*min(parted)) if parted else None


def _padded(subject):
    """Padding before, inside and after a text changes nothing at any point of the model."""
    length, real = subject.length, subject.length - subject.length // 4
    text, rng = subject.tokens(1, real), np.random.default_rng(subject.seed)
    places = np.sort(rng.choice(length, real, replace=False))
    tokens, segments = subject.tokens(1, length, stream=1), np.zeros((1, length), np.int32)
    tokens[0, places], segments[0, places] = text[0], 1
    return _the_same(
        subject.passed(tokens, segments, subject.padded_read),
        subject.passed(text),
        lambda x: x[..., places, :],
        lambda x: x,
        f"{real} tokens among {length - real} of padding",
    )


def _separate(subject):
    """Two texts in one row: each is what it is alone, at every point of the model."""
    first, length = subject.length // 3, subject.length
    tokens, segments = subject.tokens(1, length), np.full((1, length), 2)
    segments[0, :first] = 1
    packed = subject.passed(tokens, segments)
    for where in (slice(0, first), slice(first, length)):
        result = _the_same(
            packed,
            subject.passed(tokens[:, where]),
            lambda x, where=where: x[..., where, :],
            lambda x: x,
            f"documents of {first} and {length - first} tokens in one row",
        )
        if not result[0]:
            break
    return result


def _independent(subject):
    """A row is what it is beside any other rows, or alone."""
    tokens = subject.tokens(3, subject.length)
    return _the_same(
        subject.passed(tokens),
        subject.passed(tokens[1:2]),
        lambda x: x[1:2],
        lambda x: x,
        "a row among three and alone",
    )


def _the_same(some, other, take_some, take_other, what: str):
    parted = first_difference(some, other, take_some, take_other, TOLERANCE)
    if parted is None:
        off = _distance(take_some(some[-1].value), take_other(other[-1].value))
        return True, f"{what}: off by {off:.2g}"
    value, off = parted
    return False, f"{what}: off by {off:.3g}", str(value)


def _jitted(subject):
    tokens = subject.tokens(2, min(subject.length, 32))
    compiled = subject.compiled(tokens)
    with jax.disable_jit():
        plain = subject.model.apply(subject.variables, tokens, **subject.read(len(tokens)))
    off = _distance(compiled, plain)
    return off <= TOLERANCE, f"off by {off:.2g}"


def _deterministic(subject):
    tokens = subject.tokens(2, subject.length)
    first, *others = (np.asarray(subject.compiled(tokens)) for _ in range(3))
    differing = sum(int((other != first).sum()) for other in others)
    return differing == 0, f"{differing} of {2 * first.size} logits differ in three runs"


def _probabilities(subject):
    """Σ_x P(x | text) over all x of the vocabulary, each by the log P of a text that ends in it."""
    size, text = subject.config.vocab_size, subject.tokens(1, max(2, subject.minimum_prefill))
    texts = np.concatenate([np.repeat(text, size, axis=0), np.arange(size)[:, None]], axis=1)

    def log_prob(texts):
        source = None if subject.source is None else subject.read(len(texts))["source"]
        return score(subject.model, subject.variables, texts, source=source)

    each, before = [log_prob(texts[i : i + 1024]) for i in range(0, size, 1024)], log_prob(text)
    total = float(np.exp(np.concatenate(each).astype(np.float64) - float(before[0])).sum())
    return abs(total - 1) <= 1e-4, f"those of {size} next tokens sum to {total:.6f}"


def _finite(subject):
    """In bfloat16, of a whole row."""
    half = subject.model.copy(config=replace(subject.config, dtype="bfloat16"))
    tokens = subject.tokens(2, subject.length)
    logits = jax.jit(half.apply)(subject.variables, tokens, **subject.read(2))
    bad = int((~jnp.isfinite(logits)).sum())
    return bad == 0, f"{bad} of {logits.size} logits are not finite"


def _floor(subject):
    """Nobody predicts uniform random tokens: below ln V, a model has seen what it predicts."""
    rows, first = 32, subject.minimum_prefill
    tokens = subject.tokens(rows, subject.length)
    log_probs = jax.nn.log_softmax(subject.compiled(tokens)[:, first - 1 : -1])
    losses = -np.take_along_axis(np.asarray(log_probs), tokens[:, first:, None], axis=-1)
    losses = losses[..., 0].mean(axis=1)
    loss, error = losses.mean(), losses.std(ddof=1) / math.sqrt(rows)
    floor = math.log(subject.config.vocab_size)
    detail = f"{loss:.3f} ± {error:.3f} nats on random tokens; ln V is {floor:.3f}"
    return bool(loss > floor - 4 * error), detail


def _distance(x, y) -> float:
    """The largest difference, over max(1, the largest value of y); ∞ where one is not a number."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    off = np.abs(x - y).max() / max(1.0, np.nan_to_num(np.abs(y)).max())
    return float(np.nan_to_num(off, nan=np.inf))


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
