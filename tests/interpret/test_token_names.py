"""Names of tokens on pages and in pictures: different tokens have different names."""

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.interpret.attention import attention_maps
from jaxformer.interpret.encoded_text import EncodedText, token_names
from tests.properties import tiny

LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
DECODERS = {
    "llama": LLAMA,
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece("##"),
}
SPECIAL = ["<unk>", "<s>", "</s>"]
# Spellings that decode to one text, or that look alike on the screen.
WORDS = r"""▁the the ##the ▁ ▁▁ · → ⏎ ▁· a ▁a ##a <0x0A> <0x09> <0x20> <0xE2> \x1b \n #3 a#12 ·#4
    ##. . ∅ � é É"""
SPELLINGS = [*WORDS.split(), "\n", "\t", "\x1b", " ", "the #4", "·the"]
SPELLINGS += ["\xa0", "\\xa0", "a\u3000", "\u200b", "a\u200b"]  # the second is an escape as text


def subwords(spellings, decoder):
    """Returns a tokenizer with these tokens after the special ones."""
    vocab = {name: i for i, name in enumerate(dict.fromkeys([*SPECIAL, *spellings]))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoder
    return Subwords(backend, SpecialTokens((2,), 1))


@pytest.mark.parametrize("decoder", DECODERS)
@example(["\xa0", "\\xa0"])  # a no-break space, and its escape as text
@given(
    st.lists(
        st.sampled_from(SPELLINGS) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        unique=True,
        max_size=40,
    )
)
def test_token_labels_are_unique_and_visible(decoder, spellings):
    words = subwords(spellings, DECODERS[decoder])
    ids = range(words.vocab_size + 2)  # a model may have more ids than its tokenizer
    names = token_names(words, ids)
    assert len(set(names)) == len(ids)
    assert all(name.isprintable() and name.strip() for name in names)
    assert token_names(words, [*ids, *ids]) == names * 2


def test_token_labels_show_leading_spaces():
    words = subwords(["▁the", "the", "▁", "x", "<0x0A>", "·", "y#5"], LLAMA)
    assert token_names(words, range(12)) == [
        "<unk>", "<s>", "</s>", "·the", "the", "·", "x", "⏎", "· #8", "y#5 #9", "#10", "#11",
    ]  # fmt: skip


def test_trained_tokenizers_have_unique_token_labels():
    words = ByteTokenizer.train(["· → ⏎ \t\n · x the · →é #12 \\xe2\x1b"] * 9, 400)
    names = token_names(words, range(400))
    assert len(set(names)) == 400
    assert names[words.encode(" ")[0]] == "·" and names[words.encode("\n")[0]] == "⏎"


def test_tokens_in_attention_plots_are_labelled_by_token_names():
    words = subwords(["▁the", "the", "·", "▁"], LLAMA)
    model = jf.Decoder(jf.DecoderConfig(vocab_size=9, max_length=8, num_layers=1, embed_dim=12))
    ids = [3, 4, 5, 6, 3]
    maps = attention_maps(model, tiny.weights(model, 0), EncodedText(ids), words)
    assert maps.keys == maps.queries == tuple(token_names(words, ids))
    assert len(set(maps.keys)) == 4
