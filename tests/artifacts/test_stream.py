"""A stream returns the text of all ids, for every tokenizer and every end of the prompt."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁the", "▁tide", "came", "é", ".", "\n", "▁▁"]


def byte_fallback():
    """Returns a tokenizer like that of Llama 2, Mistral and Gemma."""
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *BYTES, *WORDS])}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return backend


def unigram(has_bytes):
    """Returns a tokenizer like that of T5 and Marian or, with bytes, Gemma's in sentencepiece."""
    pieces = [(text, -1.0) for text in [*SPECIAL, *(BYTES if has_bytes else []), *WORDS]]
    backend = Backend(models.Unigram(pieces, 0, has_bytes))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    last = decoders.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), last]) if has_bytes else last
    return backend


def wordpiece():
    words = ["the", "tide", "##s", ".", ",", "n", "'", "t", "do", "##é", "n't", "##."]
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *words])}
    backend = Backend(models.WordPiece(vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    return backend


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *alphabet])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    return backend


def suffixes():
    """Returns a tokenizer like CLIP's and older BPE: a word ends in </w>."""
    words = ["the</w>", "ti", "de</w>", ".</w>", "a"]
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *words])}
    backend = Backend(models.BPE(vocabulary, [], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder()
    return backend


def subwords(backend):
    backend.add_special_tokens(SPECIAL)
    return Subwords(backend, SpecialTokens((2,), 1))


KINDS = {
    "byte-fallback BPE": subwords(byte_fallback()),
    "Unigram": subwords(unigram(False)),
    "Unigram with byte fallback": subwords(unigram(True)),
    "WordPiece": subwords(wordpiece()),
    "byte-level BPE": subwords(byte_level()),
    "BPE with suffixes": subwords(suffixes()),
    "ours": ByteTokenizer.train(["the tide came in é\n"], 260),
}
# The token of a full stop, which no tokenizer here encodes with byte fallback.
FIRST = {name: tokenizer.encode(".")[-1] for name, tokenizer in KINDS.items()}
# Bytes of whole and incomplete characters and of line breaks, which are drawn often.
HARD = [3 + byte for byte in (0x0A, 0x0A, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0x20)]
TOKENS = st.one_of(st.integers(0, 300), st.sampled_from(HARD), st.integers(255, 268))


@pytest.mark.parametrize("name", [name for name in KINDS if "Piece" not in name])
@given(ids=st.lists(st.integers(3, 3 + 127) | st.integers(255, 268), max_size=9))
def test_decoded_text_is_the_concatenation_of_the_bytes_of_its_tokens(name, ids):
    """SentencePiece drops the space of the first token, so the text follows another token."""
    tokenizer = KINDS[name]
    if name == "BPE with suffixes":
        with pytest.raises(
            ValueError, match=r"the bytes of a single token are not defined.*BPEDecoder"
        ):
            _ = tokenizer.vocabulary_bytes
        return
    ids = [token % tokenizer.vocab_size for token in ids]
    table = tokenizer.vocabulary_bytes
    assert len(table) == tokenizer.vocab_size
    text = tokenizer.decode([FIRST[name], *ids]).removeprefix(tokenizer.decode([FIRST[name]]))
    if "\ufffd" not in text:
        assert text.encode() == b"".join(table[token] for token in ids)


@pytest.mark.parametrize("name", KINDS)
@given(
    prompt=st.lists(TOKENS, max_size=6), parts=st.lists(st.lists(TOKENS, max_size=4), max_size=9)
)
@example(prompt=[1, 260, 13], parts=[[243], [260], [261], [262], [260]])
@example(prompt=[1, 260, 198], parts=[[172], [260]])
@example(prompt=[1], parts=[[260, 13, 13], [243], [260]])
@example(prompt=[], parts=[[3, 13, 0], [131]])  # <unk> is special: it decodes to no text
def test_streamed_text_equals_all_text_after_the_prompt(name, prompt, parts):
    """The stream returns all text after the prompt, even if new ids change the prompt's end."""
    tokenizer = KINDS[name]
    size = tokenizer.vocab_size + (name != "ours")  # except for ours, the last id has no token
    prompt, parts = [n % size for n in prompt], [[n % size for n in part] for part in parts]
    stream = tokenizer.stream(prompt)
    found = "".join(stream.push(part) for part in parts) + stream.flush()
    whole = tokenizer.decode([*prompt, *(token for part in parts for token in part)])
    before, shared = tokenizer.decode(prompt), 0
    while whole[shared : shared + 1] == before[shared : shared + 1] != "":
        shared += 1
    assert found == whole[shared:]
