"""Scores of translations: of what was written, and of targets that a model can say."""

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers

import jaxformer as jf
from jaxformer.artifacts.lowercase import lowercased
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.models.build import init
from jaxformer.training import bleu as module
from jaxformer.training.bleu import bleu, score_pairs
from tests.slow import mostly_slow

TEXTS = [f"{word} and {n} or {n + 1}" for word in ("One", "Two", "Three") for n in range(8)]
TOKENIZER = Tokenizer.train(TEXTS, 300)
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


def test_translations_are_compared_with_what_was_written(monkeypatch, quick_compilation):
    """A tokenizer that changes a text must not change what it is to be translated to; of one that
    takes all text in lower case neither counts the case."""
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    backend.normalizer = normalizers.Replace("e", "a")
    for tokenizer, lowercase in ((Tokenizer(backend), False), (lowercased(TOKENIZER), True)):
        said = [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS]
        monkeypatch.setattr(module, "translate_ids", lambda *_, said=said, **how: said)
        found = scored(MODELS["recurrent"], tokenizer, TEXTS, TEXTS).bleu
        assert found == bleu(said, TEXTS, lowercase=lowercase)
        assert (found.score == 100.0) == lowercase and ("case:lc" in found.signature) == lowercase


@pytest.mark.parametrize("kind", mostly_slow(list(MODELS), "recurrent"))
def test_a_target_that_is_too_long_is_none_of_the_loss(kind, quick_compilation):
    """The model has no positions for it; the others count as if they were alone."""
    with_it = scored(MODELS[kind], TOKENIZER, TEXTS[:4], [*TEXTS[:3], "One " * 40])
    alone = scored(MODELS[kind], TOKENIZER, TEXTS[:3], TEXTS[:3])
    assert with_it.tokens == alone.tokens and len(with_it.translations) == 4
    np.testing.assert_allclose(with_it.loss, alone.loss, rtol=1e-5)
