"""`translate_ids` keeps the order of the texts and translates each text independently."""

from dataclasses import replace

import jax
import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.cli import main
from jaxformer.decoding import beam
from jaxformer.decoding import translate as module
from jaxformer.decoding.translate import translate_ids
from jaxformer.models.parameters import init
from jaxformer.training.evaluate import score_pairs
from tests.slow import mostly_slow

TEXTS = [f"{word} {number}" for word in ("one", "two", "three") for number in range(8)]
TOKENIZER = ByteTokenizer.train(TEXTS, 300)
CONFIG = jf.RecurrentEncoderDecoderConfig(
    vocab_size=TOKENIZER.vocab_size, max_length=32, embed_dim=8, num_layers=1
)
MODEL = jf.build(CONFIG)


def translate(model, variables, texts, **options):
    sources = [TOKENIZER.encode_source(text) for text in texts]
    return translate_ids(model, variables, TOKENIZER, sources, **options)


@pytest.fixture(scope="module")
def variables():
    return jax.tree.map(lambda x: 3 * x, init(MODEL, jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize("beam_width", mostly_slow([1, 2], 2))
def test_translations_are_in_input_order(variables, beam_width, quick_compilation):
    """Batches of sorted texts give translations in input order; empty texts stay empty."""
    asked = [" ".join(TEXTS[:3]), TEXTS[5], "", " ".join(TEXTS[9:11]), TEXTS[20], TEXTS[7]]

    def found(texts):
        how = {"beam_width": beam_width, "batch_size": 2}
        return translate(MODEL, variables, texts, **how)

    together = found(asked)
    assert together[2] == "" and len(set(together)) > 2
    assert together == [found([text])[0] for text in asked]


@pytest.mark.slow
def test_translate_rejects_long_texts_and_unsuitable_models(variables):
    with pytest.raises(ValueError, match=r"text 2 has .* max_source_length \(32\)"):
        translate(MODEL, variables, ["one", "one " * 40])
    decoder = jf.build(
        jf.DecoderConfig(vocab_size=300, max_length=8, num_layers=1, embed_dim=8, num_heads=2)
    )
    with pytest.raises(ValueError, match="class Decoder, but translation needs"):
        translate(decoder, {}, ["one"])
    shortest = jf.build(
        replace(CONFIG, max_length=1)
    )  # the first target token already has this length
    with pytest.raises(ValueError, match="max_new_tokens is 0; it must be a whole number"):
        translate(shortest, init(shortest, jax.random.key(0)), ["one"])


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [None, 1, 3])
def test_default_beam_width_is_that_of_the_checkpoint_or_4(
    num_beams, variables, monkeypatch, tmp_path, quick_compilation
):
    """The checkpoint's beam width, or 4, is the default in Python, commands and training."""
    widths = []

    def decode(model, variables, tokenizer, sources, most, beam_width, batch_size):
        widths.append(beam_width)
        return [[]] * len(sources)

    monkeypatch.setattr(module, "_decode", decode)
    monkeypatch.chdir(tmp_path)
    model = MODEL.clone(generation=jf.GenerationDefaults(num_beams=num_beams))
    jf.save("saved", model, variables, TOKENIZER)
    (tmp_path / "lines.txt").write_text(TEXTS[0])
    (tmp_path / "pairs.tsv").write_text(f"{TEXTS[0]}\t{TEXTS[1]}\n")
    translate(model, variables, TEXTS[:1])
    pair = tuple(map(TOKENIZER.encode_source, TEXTS[:2]))
    score_pairs(model, variables, TOKENIZER, [pair], TEXTS[:1])
    assert main(["translate", "saved", "lines.txt"]) == 0
    assert main(["evaluate", "saved", "--source", "pairs.tsv"]) == 0
    assert widths == [num_beams or 4] * 4 == [beam.resolve_beam_width(model, None)] * 4
