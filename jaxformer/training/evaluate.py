"""Evaluation of models on text, on masked tokens and on sentence pairs.

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

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_copies import lowers_case
from jaxformer.decoding.translate import translate_ids
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import Batch, Ids, Indexed, OnScored, noop, num_targets
from jaxformer.training.data.pairs import PairBatches
from jaxformer.training.data.windows import EvaluationWindows
from jaxformer.training.objectives import Scalar, summed_correct, summed_loss

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU


# The summed loss, and the number of correctly predicted targets.
_BatchSums = tuple[Scalar, Scalar]


class Evaluation(NamedTuple):
    """Scores of a model on a text.

    Attributes:
        loss: Mean loss in nats per token.
        perplexity: e^loss.
        bits_per_byte: The total loss in bits divided by the bytes of the text. Bits per byte are
            comparable between models with different tokenizers, and between models and compression
            programs.
        tokens: The number of scored tokens.
        bytes: The number of bytes that the scored tokens encode.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: float


class LossSums(NamedTuple):
    """Sums over the scored targets.

    Attributes:
        loss: The summed loss in nats.
        targets: The number of targets.
        correct: The number of correct predictions (the most probable token is the target); 0 if
            `evaluate` does not count them.
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
    """Sums the losses of all batches, without dropout.

    Args:
        model: The model.
        variables: The model's variables.
        batches: The batches to score.
        on_scored: Called with the number of targets scored so far.
        correct: Whether to count correct predictions (the most probable token is the target).

    Raises:
        ValueError: `batches` is empty.
    """
    results, count = [], 0
    for batch in batches:
        # pyrefly: ignore[bad-argument-type] (Flax gives modules a hash)
        results.append(_compiled(model, correct)(variables, batch))
        # Waiting for the previous batch makes the argument of `on_scored` exact. The device
        # meanwhile computes the current batch.
        jax.block_until_ready(results[-2:-1])
        on_scored(count)
        count += num_targets(batch)
    if not results:
        raise ValueError("batches is empty: the text must have at least one token to score")
    losses, right = np.array(jax.device_get(results), np.float64).sum(axis=0)
    return LossSums(float(losses), count, round(right))


@lru_cache(maxsize=4)
def _compiled(model: LanguageModel, correct: bool) -> Callable[[Variables, Batch], _BatchSums]:
    @jax.jit
    def score_batch(variables: Variables, batch: Batch) -> _BatchSums:
        params = variables["params"]
        loss = summed_loss(model, params, batch)
        return loss, summed_correct(model, params, batch) if correct else jnp.float32(0)

    return score_batch


def half(window: int) -> int:
    """Returns the default stride between windows, half of the window length."""
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
    """Scores every token of every document, or the tokens of some windows.

    Windows have the model's maximum length. After the first window of a document, every target has
    more than length − stride preceding tokens. If `windows` limits the evaluation, bits per byte
    are computed with the text's average number of bytes per token.

    Args:
        model: The model.
        variables: The model's variables.
        documents: The tokens of each document. The first token of a document is not scored.
        num_bytes: The number of bytes of the text.
        stride: The distance between the starts of two windows; half the window length if None.
        windows: The number of windows to score, evenly spaced over the text; all windows if None.
        batch_size: Windows per batch.
        on_scored: Called with the number of targets scored so far.

    Raises:
        ValueError: The text has no tokens to score, or `batch_size` or `stride` is not accepted.
    """
    length = model.config.max_length
    all_windows = EvaluationWindows(documents, length, half(length) if stride is None else stride)
    batches = spread(all_windows, len(all_windows) if windows is None else windows, batch_size)
    loss, tokens, _ = evaluate(model, variables, batches, on_scored)
    targets = sum(len(document) - 1 for document in documents)
    size = num_bytes if windows is None else tokens * num_bytes / targets
    mean, bits = loss / tokens, loss / math.log(2)
    return Evaluation(mean, math.exp(min(mean, 700)), bits / size, tokens, size)


def spread(windows: Indexed[Batch], number: int, batch_size: int) -> Iterator[Batch]:
    """Selects up to `number` evenly spaced windows, and yields batches of equal shape.

    The last batch is padded with windows of weight 0.

    Args:
        windows: The windows, each as a batch of one sequence.
        number: The number of windows to select.
        batch_size: Windows per batch.

    Raises:
        ValueError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    places = np.linspace(0, len(windows) - 1, min(number, len(windows))).round().astype(int)
    for start in range(0, len(places), batch_size):
        chosen = [windows[place] for place in places[start : start + batch_size]]
        chosen += [jax.tree.map(np.zeros_like, chosen[0])] * (batch_size - len(chosen))
        yield jax.tree.map(lambda *arrays: np.concatenate(arrays), *chosen)


class MaskedTokensScore(NamedTuple):
    """Scores of a model on masked tokens.

    Attributes:
        loss: Mean loss in nats per masked token.
        accuracy: The fraction of masked tokens that the model predicts correctly.
        tokens: The number of masked tokens.
    """

    loss: float
    accuracy: float
    tokens: int


def unmaskable_ids(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids below `vocab_size` that are never masked and never replace another token.

    These ids are the special tokens, the tokens of the template, and ids without a token.
    """
    ordinary = set(tokenizer.text_ids) - {*tokenizer.before, *tokenizer.after}
    ordinary.discard(tokenizer.mask_token)
    return tuple(token for token in range(vocab_size) if token not in ordinary)


def masked_windows(
    documents: Iterable[Ids],
    tokenizer: Tokenizer,
    length: int,
    *,
    rate: float = 0.15,
    seed: int = 0,
) -> list[Batch[np.ndarray]]:
    """Splits documents into windows and masks a random part of their tokens.

    The masked tokens are the targets. If the random choice selects no token in any window, the
    function masks the last token that is not special. Special tokens are never masked (see
    `unmaskable_ids`).

    Args:
        documents: The token ids of each document, without the ids of `tokenizer.opening`.
        tokenizer: The tokenizer of the documents, with a mask token. Its template adds tokens
            before and after each window.
        length: Tokens per window.
        rate: The probability that a token is masked.
        seed: The random seed.

    Returns:
        Batches of one window, [1, length]. All tokens of a window are from one document.

    Raises:
        ValueError: No token may be masked, or `length` is too small for the template's tokens.
    """
    before, after, mask = tokenizer.before, tokenizer.after, tokenizer.mask_token
    if mask is None:
        raise ValueError("tokenizer has no mask token; use a tokenizer with [MASK] or <mask>")
    room = length - len(before) - len(after)
    if room < 1:
        raise ValueError(
            f"length is {length}; it must be more than the {length - room} tokens that the "
            "tokenizer adds to each text"
        )
    parts = [
        np.asarray(document[at : at + room], np.int32)
        for document in documents
        for at in range(0, len(document), room)
    ]
    special = unmaskable_ids(tokenizer, tokenizer.vocab_size)
    may_be = ~np.isin(np.concatenate([np.zeros(0, np.int32), *parts]), special)
    if not may_be.any():
        raise ValueError("documents must contain at least one token that is not a special token")
    ends = np.cumsum([len(part) for part in parts])
    words = np.random.Philox(np.random.SeedSequence([seed])).random_raw(ends[-1])
    hidden = (words < rate * 2**64) & may_be
    hidden[np.flatnonzero(may_be)[-1]] |= not hidden.any()
    windows = []
    for part, is_hidden in zip(parts, np.split(hidden, ends[:-1]), strict=True):
        targets, weights, segment_ids = np.zeros((3, 1, length), np.int32)
        end = len(before) + len(part)
        targets[0, : end + len(after)] = [*before, *part, *after]
        weights[0, len(before) : end], segment_ids[0, : end + len(after)] = is_hidden, 1
        inputs = np.where(weights, np.int32(mask), targets)
        windows.append(Batch(inputs, targets, weights.astype(np.float32), segment_ids))
    return windows


def most_frequent(windows: Sequence[Batch[np.ndarray]]) -> dict[str, float]:
    """Returns the accuracy of always predicting the most frequent masked token."""
    targets = np.concatenate([window.targets[window.weights != 0] for window in windows])
    return {"the most frequent token": float(np.bincount(targets).max() / len(targets))}


def score_masked_tokens(
    model: LanguageModel, variables: Variables, batches: Iterable[Batch], on_scored: OnScored = noop
) -> MaskedTokensScore:
    """Scores a model on masked tokens.

    Args:
        model: The model.
        variables: The model's variables.
        batches: Batches of windows from `masked_windows`.
        on_scored: Called with the number of targets scored so far.
    """
    sums = evaluate(model, variables, batches, on_scored, correct=True)
    targets = max(1, sums.targets)
    return MaskedTokensScore(sums.loss / targets, sums.correct / targets, sums.targets)


class Bleu(NamedTuple):
    """BLEU score.

    Attributes:
        score: BLEU, from 0 to 100.
        signature: sacrebleu's description of the settings. BLEU scores are comparable only if their
            signatures are equal.
    """

    score: float
    signature: str


def bleu_metric(tokenize: str | None = None, *, lowercase: bool = False) -> "BLEU":
    """Returns sacrebleu's BLEU metric.

    Args:
        tokenize: The name of a sacrebleu tokenizer, such as "zh" for Chinese; "13a" if None.
        lowercase: Whether to convert both sides to lower case.

    Raises:
        ValueError: The tokenizer is unknown, or needs a missing package or a download.
    """
    # Importing sacrebleu takes 0.2 s.
    from sacrebleu.metrics import BLEU

    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise ValueError(
            f"bleu_tokenize is {tokenize!r}; it must be one of {', '.join(BLEU.TOKENIZERS)}"
        )
    try:
        return BLEU(lowercase=lowercase, tokenize=tokenize)
    except Exception as error:  # A package may be missing, or a download may fail.
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
    """Computes corpus BLEU with one reference per translation."""
    metric = bleu_metric(tokenize, lowercase=lowercase)
    score = metric.corpus_score(list(found), [list(references)])
    return Bleu(round(score.score, 2), str(metric.get_signature()))


class PairScore(NamedTuple):
    """Scores of a translation model.

    Attributes:
        loss: Mean loss in nats per target token, including the end-of-text tokens.
        tokens: The number of scored target tokens.
        bleu: The BLEU score of the translations.
        translations: The translations, in the order of the sources.
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
    """Computes the loss of the targets and the BLEU score of the model's translations.

    The loss excludes targets that, with an end token, exceed max_length. BLEU ignores case if the
    tokenizer converts text to lower case. Translations are limited to the length of the longest
    target. After few updates, a model rarely ends a translation and would otherwise always generate
    max_length tokens.

    Args:
        model: The model.
        variables: The model's variables.
        tokenizer: The tokenizer of the sources and of the targets.
        pairs: The token ids of each source and its target.
        references: The text of each target.
        tokens: Tokens per batch (see `PairBatches`).
        widths: The sequence lengths of batches (see `PairBatches`).
        beam_width: The beam width of the translations; the default of `beam_search` if None.
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
