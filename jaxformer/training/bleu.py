"""Scores of translations: BLEU and its signature, computed by sacrebleu.

Reference:
    BLEU: Papineni et al. 2002. sacrebleu: Post 2018.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxformer.artifacts.tokenizer import Tokenizer, lowers_case
from jaxformer.decoding.translate import translate_ids
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import Ids, OnScored, noop
from jaxformer.training.data.pairs import PairBatches
from jaxformer.training.evaluate import evaluate

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU


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
