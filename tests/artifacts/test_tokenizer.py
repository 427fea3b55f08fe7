"""All tokenizers share an interface, and lowercasing survives saving and loading."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens, Tokenizer
from jaxformer.artifacts.tokenizer_copies import lowercased, lowers_case, opening_texts
from jaxformer.artifacts.tokenizer_parts import tokenizer_parts

PLAIN = ByteTokenizer.train(["one and Two", "THREE and four"] * 3, 300, split_digits=True)
LOWER = lowercased(PLAIN)


@given(text=st.text(st.characters(codec="ascii")))
def test_lowercasing_tokenizer_lowercases_every_text(text):
    """A text gets the ids of its lower-case form; decoding is unchanged."""
    assert LOWER.encode(text) == PLAIN.encode(text.lower())
    assert LOWER.decode(LOWER.encode(text)) == text.lower()


def test_a_saved_tokenizer_lowercases_text_after_loading(tmp_path):
    LOWER.save(tmp_path / "tokenizer.json")
    again = ByteTokenizer.load(tmp_path / "tokenizer.json")
    assert lowers_case(again) and again.fingerprint == LOWER.fingerprint != PLAIN.fingerprint
    assert not lowers_case(PLAIN) and not LOWER.lossless and PLAIN.lossless
    assert lowercased(LOWER) is LOWER


def test_subwords_tokenizer_can_lowercase_its_text():
    words = {"one": 0, "two": 1, "?": 2}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    theirs = Subwords(backend, SpecialTokens((0,)))
    assert isinstance(theirs, Tokenizer) and isinstance(PLAIN, Tokenizer)
    assert theirs.encode("ONE two") == [2, 1]
    assert lowercased(theirs).encode("ONE two") == [0, 1]
    assert lowercased(theirs).special == theirs.special


def test_tokens_before_a_text_are_added_only_by_the_template_of_the_post_processor():
    """The bos_token_id in config.json begins new documents, but not texts."""
    for template, before in (("$A", []), ("<s> $A", [1]), ("<b> <s> $A", [3, 1])):
        backend = tokenizers.Tokenizer(
            models.WordLevel({"?": 0, "<s>": 1, "one": 2, "<b>": 3}, "?")
        )
        backend.add_special_tokens(["?", "<s>", "<b>"])
        named = [("<b>", 3), ("<s>", 1)]
        backend.post_processor = processors.TemplateProcessing(template, special_tokens=named)
        theirs = Subwords(backend, SpecialTokens((0,), 1))
        assert theirs.text_opening == before and theirs.opening == (before or [1])
        assert opening_texts(theirs).text_opening == lowercased(opening_texts(theirs)).opening
    assert PLAIN.text_opening == PLAIN.opening


VOCABULARY = {"?": 0, "a": 1, "b": 2, "ab": 3}
MODELS = {
    "empty BPE": models.BPE(),
    "BPE": models.BPE(
        VOCABULARY,
        [("a", "b")],
        dropout=0.5,
        unk_token="?",
        continuing_subword_prefix="#",
        end_of_word_suffix="/",
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=True,
    ),
    "WordPiece": models.WordPiece(VOCABULARY, unk_token="?", max_input_chars_per_word=7),
    "WordLevel": models.WordLevel(VOCABULARY, unk_token="?"),
    "Unigram": models.Unigram([("?", 0.0), ("a", -1.0)], 0, True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("has_all", [False, True])
def test_tokenizer_component_list_excludes_vocabulary_and_merges(name, has_all):
    backend = tokenizers.Tokenizer(MODELS[name])
    if has_all:
        lower, accents = normalizers.Lowercase(), normalizers.Replace(Regex("é+"), "e")
        backend.normalizer = normalizers.Sequence([lower, accents])
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed", invert=True)
        backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        backend.add_tokens([AddedToken("new", lstrip=True, normalized=False), "a"])
        backend.add_special_tokens([AddedToken("<s>", single_word=True, rstrip=True)])
        backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 4)])
        backend.enable_truncation(9, stride=2, strategy="only_first", direction="left")
        backend.enable_padding(direction="left", pad_id=1, pad_token="a", length=3)
    expected = json.loads(backend.to_str())
    expected["model"] = {x: y for x, y in expected["model"].items() if x not in ("vocab", "merges")}
    assert tokenizer_parts(backend) == expected
