"""Scores of models on text, on hidden tokens and on pairs of sentences.

Reference:
    BLEU: Papineni et al. 2002. sacrebleu: Post 2018.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.artifacts.tokenizer import Tokenizer, lowers_case
from jaxformer.decoding.translate import translate_ids
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import Batch, Ids, OnScored, Rows, noop, num_targets
from jaxformer.training.data.pairs import PairBatches
from jaxformer.training.data.windows import EvaluationWindows
from jaxformer.training.objectives import Scalar, summed_correct, summed_loss

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU


_BatchSums = tuple[Scalar, Scalar]  # (Σ loss, number of correct targets)


class Evaluation(NamedTuple):
    """Score of a model on a text.

    Attributes:
        loss: Nats per token.
        perplexity: e^loss.
        bits_per_byte: The total loss in bits, divided by the bytes of the text. It compares models
            with different tokenizers, and compressors.
        tokens: The number of scored tokens.
        bytes: The number of bytes that they encode.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: float


class LossSums(NamedTuple):
    """Sums over the scored targets.

    Attributes:
        loss: Σ loss in nats.
        targets: The number of targets.
        correct: The number of targets that are the most probable token; 0 if not counted.
    """

    loss: float
    targets: int
    correct: int


def evaluate(
    model: LanguageModel,
    variables: Variables,
    batches: Iterable[Batch],
    on_scored: OnScored = noop,
    *,
    correct: bool = False,
) -> LossSums:
    """Scores all batches, without dropout.

    Args:
        model: The model.
        variables: Its parameters.
        batches: The batches to score.
        on_scored: Called with the number of targets scored so far.
        correct: Whether to count the targets that are the most probable token.

    Raises:
        ValueError: There are no batches.
    """
    results, count = [], 0
    for batch in batches:
        # pyrefly: ignore[bad-argument-type] (Flax gives modules a hash)
        results.append(_compiled(model, correct)(variables, batch))
        # Wait for the batch before this one: the reported count is exact, the device stays busy.
        jax.block_until_ready(results[-2:-1])
        on_scored(count)
        count += num_targets(batch)
    if not results:
        raise ValueError("the text has no tokens to score")
    losses, right = np.array(jax.device_get(results), np.float64).sum(axis=0)
    return LossSums(float(losses), count, round(right))


@lru_cache(maxsize=4)
def _compiled(model: LanguageModel, correct: bool) -> Callable[[Variables, Batch], _BatchSums]:
    @jax.jit
    def of_batch(variables: Variables, batch: Batch) -> _BatchSums:
        params = variables["params"]
        loss = summed_loss(model, params, batch)
        return loss, summed_correct(model, params, batch) if correct else jnp.float32(0)

    return of_batch


def half(window: int) -> int:
    """Returns the default distance between the starts of two windows, half a window."""
    return max(1, window // 2)


def evaluate_documents(
    model: LanguageModel,
    variables: Variables,
    documents: Sequence[Ids],
    num_bytes: int,
    *,
    stride: int | None = None,
    windows: int | None = None,
    batch_size: int = 16,
    on_scored: OnScored = noop,
) -> Evaluation:
    """Scores every token of every document once, or the tokens of some windows.

    Windows have the model's maximum length. After the first window of a document, more than
    length − stride tokens precede each target. If only some windows are scored, bits per byte
    assume the average number of bytes per token of the text.

    Args:
        model: The model.
        variables: Its parameters.
        documents: The tokens of each document. The first one is context only.
        num_bytes: The number of bytes of the text.
        stride: The distance between the starts of two windows; None: half a window.
        windows: The number of windows to score, evenly spaced over the text; None: all.
        batch_size: Windows per batch.
        on_scored: Called with the number of targets scored so far.

    Raises:
        ValueError: The text has no token to score, or `batch_size` or `stride` is not accepted.
    """
    length = model.config.max_length
    rows = EvaluationWindows(documents, length, half(length) if stride is None else stride)
    batches = spread(rows, len(rows) if windows is None else windows, batch_size)
    loss, tokens, _ = evaluate(model, variables, batches, on_scored)
    targets = sum(len(document) - 1 for document in documents)
    size = num_bytes if windows is None else tokens * num_bytes / targets
    mean, bits = loss / tokens, loss / math.log(2)
    return Evaluation(mean, math.exp(min(mean, 700)), bits / size, tokens, size)


def spread(rows: Rows[Batch], number: int, batch_size: int) -> Iterator[Batch]:
    """Yields `number` evenly spaced rows in batches of one shape; all rows, if there are fewer.

    The last batch is filled up with rows of weight 0.

    Args:
        rows: Batches of one row.
        number: The number of rows to select.
        batch_size: Rows per batch.

    Raises:
        ValueError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    places = np.linspace(0, len(rows) - 1, min(number, len(rows))).round().astype(int)
    for start in range(0, len(places), batch_size):
        chosen = [rows[place] for place in places[start : start + batch_size]]
        chosen += [jax.tree.map(np.zeros_like, chosen[0])] * (batch_size - len(chosen))
        yield jax.tree.map(lambda *arrays: np.concatenate(arrays), *chosen)


class HiddenScore(NamedTuple):
    """Score on hidden tokens.

    Attributes:
        loss: Nats per hidden token.
        accuracy: The share of hidden tokens that are the most probable token.
        tokens: The number of hidden tokens.
    """

    loss: float
    accuracy: float
    tokens: int


def never_hidden(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids below `vocab_size` that are never hidden and never replace a hidden token.

    These are the special tokens, the tokens of the template, and ids without a token.
    """
    ordinary = set(tokenizer.text_ids) - {*tokenizer.before, *tokenizer.after}
    ordinary.discard(tokenizer.mask_token)
    return tuple(token for token in range(vocab_size) if token not in ordinary)


def hidden_rows(
    documents: Iterable[Ids],
    tokenizer: Tokenizer,
    length: int,
    *,
    rate: float = 0.15,
    seed: int = 0,
) -> list[Batch[np.ndarray]]:
    """Divides documents into windows and replaces some of their tokens by the mask.

    The hidden tokens are the targets. If the draw hides no token, the last one is hidden. Special
    tokens are never hidden (see `never_hidden`).

    Args:
        documents: The tokens of each document, without opening tokens.
        tokenizer: The tokenizer of the documents, with a mask token. Each window is enclosed in the
            ids that its template puts around a text.
        length: Tokens per window.
        rate: The probability that a token is hidden.
        seed: The seed of the draw.

    Returns:
        Batches of one window, [1, length]. No window holds parts of two documents.

    Raises:
        ValueError: No token may be hidden, or `length` has no room for one.
    """
    before, after, mask = tokenizer.before, tokenizer.after, tokenizer.mask_token
    if mask is None:
        raise ValueError("the tokenizer has no mask token")
    room = length - len(before) - len(after)
    if room < 1:
        raise ValueError(
            f"length is {length}; it must be more than the {length - room} tokens around a text"
        )
    parts = [
        np.asarray(document[at : at + room], np.int32)
        for document in documents
        for at in range(0, len(document), room)
    ]
    special = never_hidden(tokenizer, tokenizer.vocab_size)
    may_be = ~np.isin(np.concatenate([np.zeros(0, np.int32), *parts]), special)
    if not may_be.any():
        raise ValueError("documents: there are no tokens to hide")
    ends = np.cumsum([len(part) for part in parts])
    words = np.random.Philox(np.random.SeedSequence([seed])).random_raw(ends[-1])
    hidden = (words < rate * 2**64) & may_be
    hidden[np.flatnonzero(may_be)[-1]] |= not hidden.any()
    rows = []
    for part, is_hidden in zip(parts, np.split(hidden, ends[:-1]), strict=True):
        targets, weights, segments = np.zeros((3, 1, length), np.int32)
        end = len(before) + len(part)
        targets[0, : end + len(after)] = [*before, *part, *after]
        weights[0, len(before) : end], segments[0, : end + len(after)] = is_hidden, 1
        inputs = np.where(weights, np.int32(mask), targets)
        rows.append(Batch(inputs, targets, weights.astype(np.float32), segments))
    return rows


def most_frequent(rows: Sequence[Batch[np.ndarray]]) -> dict[str, float]:
    """Returns the accuracy of always predicting the token that is hidden most often."""
    targets = np.concatenate([row.targets[row.weights != 0] for row in rows])
    return {"the most frequent token": float(np.bincount(targets).max() / len(targets))}


def score_hidden(
    model: LanguageModel, variables: Variables, batches: Iterable[Batch], on_scored: OnScored = noop
) -> HiddenScore:
    """Scores a model on batches of rows from `hidden_rows`.

    Args:
        model: The model.
        variables: Its parameters.
        batches: Batches of the rows.
        on_scored: Called with the number of targets scored so far.
    """
    sums = evaluate(model, variables, batches, on_scored, correct=True)
    targets = max(1, sums.targets)
    return HiddenScore(sums.loss / targets, sums.correct / targets, sums.targets)


class Bleu(NamedTuple):
    """BLEU score.

    Attributes:
        score: From 0 to 100.
        signature: sacrebleu's description of the computation. Scores are comparable if their
            signatures are equal.
    """

    score: float
    signature: str


def bleu_metric(tokenize: str | None = None, *, lowercase: bool = False) -> "BLEU":
    """Returns sacrebleu's metric.

    Args:
        tokenize: Name of its tokenizer, such as "zh" for Chinese; None: "13a", its default.
        lowercase: Whether to convert both sides to lower case.

    Raises:
        ValueError: There is no such tokenizer, or it needs a missing package or a download.
    """
    from sacrebleu.metrics import BLEU  # 0.2 s to import

    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise ValueError(
            f"bleu_tokenize is {tokenize!r}; it must be one of {', '.join(BLEU.TOKENIZERS)}"
        )
    try:
        return BLEU(lowercase=lowercase, tokenize=tokenize)
    except Exception as error:  # such as a missing package or a failed download
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"bleu_tokenize is {tokenize!r}, which sacrebleu cannot load: {reason}"
        ) from None


def bleu(
    found: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str | None = None,
) -> Bleu:
    """Computes BLEU over the whole corpus, with one reference for each translation."""
    metric = bleu_metric(tokenize, lowercase=lowercase)
    score = metric.corpus_score(list(found), [list(references)])
    return Bleu(round(score.score, 2), str(metric.get_signature()))


class PairScore(NamedTuple):
    """Score of a translation model.

    Attributes:
        loss: Nats per target token, including the end of each target.
        tokens: The number of scored target tokens.
        bleu: The BLEU score of the translations.
        translations: The translations of the sources, in order.
    """

    loss: float
    tokens: int
    bleu: Bleu
    translations: list[str]


def score_pairs(
    model: LanguageModel,
    variables: Variables,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[Ids, Ids]],
    references: Sequence[str],
    *,
    tokens: int = 2048,
    widths: list[int] | None = None,
    beam_width: int | None = None,
    bleu_tokenize: str | None = None,
    on_scored: OnScored = noop,
) -> PairScore:
    """Computes the loss of the targets and the BLEU score of translations of the sources.

    The loss omits targets that are longer than the model's max_length. BLEU ignores case if the
    tokenizer converts text to lower case. A translation has at most as many tokens as the longest
    target. Without this limit, a model after few updates, which rarely ends a text, would fill
    max_length in each of them.

    Args:
        model: The model.
        variables: Its parameters.
        tokenizer: The tokenizer of both sides.
        pairs: The ids of each source, as the model reads it, and of its target.
        references: The text of each target.
        tokens: Tokens per batch (see `PairBatches`).
        widths: Widths of batches (see `PairBatches`).
        beam_width: The beam width of the translations; None: see `beam_search`.
        bleu_tokenize: The tokenizer of BLEU (see `bleu_metric`).
        on_scored: Called with the number of targets scored so far.
    """
    (start,), (end, *_) = tokenizer.decoder_opening, tokenizer.stop_tokens
    some = [pair for pair in pairs if len(pair[1]) < model.config.max_length]
    most = max(tokens, *(max(len(source), len(target) + 1) for source, target in some))
    batches = PairBatches(some, most, end, start=start, widths=widths)
    sums = evaluate(model, variables, batches.once(), on_scored)
    sources = [source for source, _ in pairs]
    longest = max(len(target) + 1 for _, target in pairs)
    found = translate_ids(
        model, variables, tokenizer, sources, max_new_tokens=longest, beam_width=beam_width
    )
    figure = bleu(found, references, lowercase=lowers_case(tokenizer), tokenize=bleu_tokenize)
    return PairScore(sums.loss / sums.targets, sums.targets, figure, found)
