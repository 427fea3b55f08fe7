"""Scores of translations: reference texts, long targets and sacrebleu's tokenizers."""

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.tokenizer_copies import lowercased
from jaxformer.cli.evaluate import main as evaluate_main
from jaxformer.decoding.translate import translate_ids
from jaxformer.models.parameters import init
from jaxformer.training import evaluate as module
from jaxformer.training.config import PairTraining
from jaxformer.training.evaluate import bleu, score_pairs
from tests.errors import error_of
from tests.slow import mostly_slow

TEXTS = [f"{word} and {n} or {n + 1}" for word in ("One", "Two", "Three") for n in range(8)]
TOKENIZER = ByteTokenizer.train(TEXTS, 300)
MODELS = {
    "transformer": jf.EncoderDecoderConfig(
        vocab_size=TOKENIZER.vocab_size, max_length=32, embed_dim=8, num_layers=1, num_heads=2
    ),
    "recurrent": jf.RecurrentEncoderDecoderConfig(
        vocab_size=TOKENIZER.vocab_size, max_length=32, embed_dim=8, num_layers=1
    ),
}


def scored(config, tokenizer, texts, references):
    model = jf.build(config)
    variables = init(model, jax.random.key(0))
    pairs = [
        (tokenizer.encode_source(a), tokenizer.encode(b))
        for a, b in zip(texts, references, strict=True)
    ]
    return score_pairs(model, variables, tokenizer, pairs, references)


@pytest.mark.slow
def test_bleu_uses_reference_texts_unchanged_by_the_tokenizer(monkeypatch, quick_compilation):
    """If a tokenizer changes text, the reference texts stay unchanged.

    BLEU ignores case if the tokenizer converts text to lower case.
    """
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    backend.normalizer = normalizers.Replace("e", "a")
    for tokenizer, lowercase in ((ByteTokenizer(backend), False), (lowercased(TOKENIZER), True)):
        said = [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS]
        monkeypatch.setattr(module, "translate_ids", lambda *_, said=said, **how: said)
        found = scored(MODELS["recurrent"], tokenizer, TEXTS, TEXTS).bleu
        assert found == bleu(said, TEXTS, lowercase=lowercase)
        assert (found.score == 100.0) == lowercase and ("case:lc" in found.signature) == lowercase


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(list(MODELS), "recurrent"))
def test_loss_on_held_out_pairs_excludes_targets_that_are_too_long(kind, quick_compilation):
    """The model has no positions for such targets. The loss covers the remaining targets."""
    with_it = scored(MODELS[kind], TOKENIZER, TEXTS[:4], [*TEXTS[:3], "One " * 40])
    alone = scored(MODELS[kind], TOKENIZER, TEXTS[:3], TEXTS[:3])
    assert with_it.tokens == alone.tokens and len(with_it.translations) == 4
    np.testing.assert_allclose(with_it.loss, alone.loss, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(list(MODELS), "recurrent"))
def test_bleu_translations_are_at_most_as_long_as_the_longest_target(kind, quick_compilation):
    """Otherwise a model that rarely ends a text would always generate max_length tokens."""
    model = jf.build(MODELS[kind])
    variables = init(model, jax.random.key(0))
    pairs = [(TOKENIZER.encode_source(text), TOKENIZER.encode("One")) for text in TEXTS[:3]]
    found = score_pairs(model, variables, TOKENIZER, pairs, ["One"] * 3).translations
    sources = [source for source, _ in pairs]
    whole = translate_ids(model, variables, TOKENIZER, sources)
    longest = len(pairs[0][1]) + 1
    assert found == translate_ids(model, variables, TOKENIZER, sources, max_new_tokens=longest)
    assert all(len(short) < len(text) for short, text in zip(found, whole, strict=True))


def test_bleu_uses_the_chosen_sacrebleu_tokenizer():
    """The tokenizer 13a reads Chinese without spaces as one word, so one wrong character gives
    0."""
    found, references = ["我们今天去海边看潮水"], ["我们今天去海边看潮汐"]
    chinese = bleu(found, references, tokenize="zh")
    assert chinese.score > 50 > bleu(found, references).score and "tok:zh" in chinese.signature
    assert bleu(found, references) == bleu(found, references, tokenize="13a")
    for make in (
        lambda: bleu(found, references, tokenize="latin"),
        lambda: PairTraining(MODELS["recurrent"], bleu_tokenize="latin"),
        lambda: evaluate_main(["run", "--source", __file__, "--bleu-tokenize", "latin"]),
    ):
        said = error_of(make)
        assert "bleu_tokenize is 'latin'" in said and "zh" in said
