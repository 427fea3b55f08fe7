"""How good translations are: BLEU (Papineni et al. 2002), by sacrebleu (Post 2018), with the
signature that makes it comparable."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxformer.artifacts.lowercase import lowers_case
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.decoding.translate import translate_ids
from jaxformer.training.data.pairs import PairBatches
from jaxformer.training.evaluate import evaluate


class Bleu(NamedTuple):
    """score: 0 … 100; signature: how it was computed."""

    score: float
    signature: str


def bleu(found: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Bleu:
    """Of translations beside one reference each, over the whole corpus."""
    from sacrebleu.metrics import BLEU  # 0.2 s to import

    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(found), [list(references)])
    return Bleu(round(score.score, 2), str(metric.get_signature()))


class PairScore(NamedTuple):
    """loss: nats per target token, the end of a text included, over so many; bleu: of translations;
    translations: of the sources, in order."""

    loss: float
    tokens: int
    bleu: Bleu
    translations: list[str]


def score_pairs(
    model,
    variables,
    tokenizer: Tokenizer | Subwords,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    references: Sequence[str],
    *,
    tokens: int = 2048,
    widths: list[int] | None = None,
    beam_width: int = 1,
    on_scored: Callable[[int], None] = lambda count: None,
) -> PairScore:
    """How probable the targets are after their sources, and how near to them are translations.

    A target that is longer than the model's max_length is none of the loss.
    pairs: ids, sources as a model reads them; references: the targets as they were written. Where
    the tokenizer takes text in lower case, so does BLEU. tokens, widths: as for `PairBatches`.
    """
    (start,), (end, *_) = tokenizer.decoder_opening, tokenizer.stop_tokens
    some = [pair for pair in pairs if len(pair[1]) < model.config.max_length]
    most = max(tokens, *(max(len(source), len(target) + 1) for source, target in some))
    batches = PairBatches(some, most, end, start=start, widths=widths)
    sums = evaluate(model, variables, batches.once(), on_scored)
    sources = [source for source, _ in pairs]
    found = translate_ids(model, variables, tokenizer, sources, beam_width=beam_width)
    figure = bleu(found, references, lowercase=lowers_case(tokenizer))
    return PairScore(sums.loss / sums.targets, sums.targets, figure, found)
