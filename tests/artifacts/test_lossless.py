"""`why_lossy` is None only for tokenizers that preserve every text."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxformer.artifacts import byte_tokenizer as tokenizer_module
from jaxformer.artifacts.byte_tokenizer import END_OF_TEXT, ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens

# Nothing is compiled here, so each case is cheap.
many_cases = settings(max_examples=20 * settings().max_examples)

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
WHOLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
LETTERS = Regex(r"\p{L}+| ?[^\s\p{L}]+|\s+")  # similar to Llama 3's


def split(pattern, behavior):
    return pre_tokenizers.Split(pattern, behavior)


PRE_TOKENIZERS = {
    "GPT-2": BYTE_LEVEL,
    "one word": WHOLE,
    "digits": pre_tokenizers.Sequence([DIGITS, BYTE_LEVEL]),
    "Llama 3": pre_tokenizers.Sequence([split(LETTERS, "isolated"), WHOLE]),
    "punctuation": pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), WHOLE]),
    "of three": pre_tokenizers.Sequence([pre_tokenizers.FixedLength(3), BYTE_LEVEL]),
    "merged": pre_tokenizers.Sequence([split(" ", "merged_with_previous"), WHOLE]),
}
LOSSY_PRE_TOKENIZERS = {
    "none": None,
    "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "removed": pre_tokenizers.Sequence([split(" ", "removed"), WHOLE]),
    "spaces": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), WHOLE]),
    "scripts": pre_tokenizers.Sequence([pre_tokenizers.UnicodeScripts(), WHOLE]),
    "Metaspace": pre_tokenizers.Metaspace(),
    "twice": pre_tokenizers.Sequence([BYTE_LEVEL, WHOLE]),
    "gone": pre_tokenizers.Sequence([pre_tokenizers.Punctuation("removed"), WHOLE]),
}
NORMALIZERS = {
    "Lowercase": normalizers.Lowercase(),
    "NFC": normalizers.NFC(),
    "Prepend": normalizers.Prepend("x"),
    "Strip": normalizers.Sequence([normalizers.Strip()]),
}
POST_PROCESSORS = {
    "ByteLevel": processors.ByteLevel(trim_offsets=True),
    "begins": processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 256)]
    ),
}
TWICE = processors.TemplateProcessing(single="$A $A", special_tokens=[])


def merges_of(*words):
    """Returns merges, from left to right, that make each word one token."""
    steps = [(word[:i], word[i]) for word in words for i in range(1, len(word))]
    return list(dict.fromkeys(steps))


def backend(
    alphabet=BYTES,
    words=("the", "Ġthe", "ĠĠ"),
    end="special",
    pre_tokenizer=BYTE_LEVEL,
    normalizer=None,
    post_processor=None,
    added=(),
    **model,
):
    """Returns a byte-level BPE in which each of `words` is a token.

    The end of text is a special token, an ordinary added token, or only a word of the vocabulary.
    """
    vocabulary = list(dict.fromkeys([*alphabet, END_OF_TEXT]))
    merges = [m for m in merges_of(*words) if set("".join(m)) <= set(alphabet)]
    vocabulary += dict.fromkeys(a + b for a, b in merges if a + b not in vocabulary)
    ids = {content: number for number, content in enumerate(vocabulary)}
    found = tokenizers.Tokenizer(models.BPE(ids, merges, **model))
    found.decoder = decoders.ByteLevel()
    if pre_tokenizer is not None:
        found.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        found.normalizer = normalizer
    if post_processor is not None:
        found.post_processor = post_processor
    if end == "special":
        found.add_special_tokens([END_OF_TEXT])
    elif end != "word":
        found.add_tokens([AddedToken(END_OF_TEXT, **end)])
    for token in added:
        found.add_special_tokens([token]) if token.special else found.add_tokens([token])
    return found


CONTENTS = ["é", "the", "a", " b", "é é", "x\n", "Ġthe", "<|x|>"]
FLAGS = {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized")}
added_tokens = st.builds(AddedToken, st.sampled_from(CONTENTS), special=st.booleans(), **FLAGS)
harmless = {
    "words": st.lists(st.sampled_from(["the", "Ġthe", END_OF_TEXT, "ab", "<|x|>"]), max_size=3),
    "end": st.sampled_from(["special", "word"]) | st.fixed_dictionaries({}, optional=FLAGS),
    "pre_tokenizer": st.sampled_from(list(PRE_TOKENIZERS.values())),
    "post_processor": st.none() | st.sampled_from(list(POST_PROCESSORS.values())),
    "ignore_merges": st.booleans(),
}
backends = st.builds(backend, added=st.lists(added_tokens, max_size=2), **harmless) | st.builds(
    backend,
    added=st.lists(added_tokens, max_size=2),
    alphabet=st.sampled_from([BYTES, BYTES[:-1], [c for c in BYTES if c != "<"]]),
    normalizer=st.none() | st.sampled_from(list(NORMALIZERS.values())),
    unk_token=st.sampled_from([None, END_OF_TEXT]),
    **{
        **harmless,
        "pre_tokenizer": st.sampled_from(
            [*PRE_TOKENIZERS.values(), *LOSSY_PRE_TOKENIZERS.values()]
        ),
        "post_processor": harmless["post_processor"] | st.just(TWICE),
    },
)
hard = st.sampled_from(
    [END_OF_TEXT, "<|ENDOFTEXT|>", "<|x|>", " the", "the ", "Ġthe", "ab", " b", "x\n", "12", "_!"]
) | st.sampled_from(["  ", "\r\n", "\0", "é", "e\u0301", "É", "ﬁ", "\u212b", "\u00a0", "ÿ", "猫😀"])
texts = st.lists(st.text(max_size=8) | hard, max_size=8).map("".join)


@pytest.mark.slow
@many_cases
@given(backends, st.lists(texts, min_size=1, max_size=4))
def test_a_lossless_tokenizer_preserves_every_text(made, texts):
    tokenizer = ByteTokenizer(made)
    assert tokenizer.lossless == (tokenizer.why_lossy is None)
    if tokenizer.lossless:
        assert [tokenizer.decode(ids) for ids in tokenizer.encode_many(texts)] == texts


@pytest.mark.slow
@many_cases
@given(backends, texts)
def test_end_of_text_token_never_results_from_encoding(made, text):
    """The end of text may be a special token, an added token, or a result of merges."""
    tokenizer = ByteTokenizer(made)
    assert tokenizer.end_of_text not in tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.end_of_text]) == ""


@many_cases
@given(backends, texts, st.integers(1, 5))
def test_splitting_long_text_does_not_change_tokens(made, text, piece_length):
    tokenizer = ByteTokenizer(made)
    whole = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE_LENGTH", piece_length)
        assert tokenizer.encode(text) == whole


@pytest.mark.slow
@many_cases
@given(st.builds(backend, **harmless))
def test_lossless_tokenizers_are_recognized(made):
    """`why_lossy` is None for lossless tokenizers; always reporting a reason would be wrong."""
    assert ByteTokenizer(made).why_lossy is None


LOSSY = {
    **{name: ({"normalizer": part}, "normalizer") for name, part in NORMALIZERS.items()},
    **{
        name: ({"pre_tokenizer": part}, "pre-tokenizer")
        for name, part in LOSSY_PRE_TOKENIZERS.items()
    },
    "a byte": ({"alphabet": BYTES[:-1]}, "byte"),
    "prefix of words": (
        {"continuing_subword_prefix": "Ġ", "words": []},
        "continuing_subword_prefix",
    ),
    "suffix of words": ({"end_of_word_suffix": "Ġ", "words": []}, "end_of_word_suffix"),
    "post": ({"post_processor": TWICE}, "changes"),
    "strips": ({"added": [AddedToken("<x>", lstrip=True)]}, "'<x>'"),
    "other bytes": ({"words": ["éa"], "added": [AddedToken("éa")]}, "'éa'"),
    "a special byte": ({"added": [AddedToken("a", special=True)]}, "byte"),
}


@pytest.mark.parametrize("name", LOSSY)
def test_reason_for_a_lossy_tokenizer_names_the_lossy_component(name, tmp_path):
    """A lossy tokenizer can be loaded, because imported models may need it."""
    options, why = LOSSY[name]
    backend(**options).save(str(tmp_path / "tokenizer.json"))
    tokenizer = ByteTokenizer.load(tmp_path / "tokenizer.json")
    assert not tokenizer.lossless and why in tokenizer.why_lossy


@pytest.mark.parametrize("name", ["nothing", *(x for x in LOSSY if x != "post")])
def test_subwords_and_byte_tokenizer_report_the_same_lossy_component(name):
    """`Subwords` reports byte-level BPE as lossless or lossy like `ByteTokenizer`."""
    options, why = LOSSY.get(name, ({}, None))
    found = Subwords(backend(**options), SpecialTokens()).why_lossy
    assert found is None if why is None else why in found


def test_character_tokenizer_is_lossy():
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    )
    assert Subwords(made, SpecialTokens()).why_lossy.startswith("its model, WordPiece, encodes")


def test_trained_tokenizers_are_lossless():
    for options in ({}, {"split_digits": True}):
        assert ByteTokenizer.train(["the cat the cat 12 12"] * 9, 300, **options).lossless


def test_tokenizer_with_two_tokens_of_one_id_is_rejected(tmp_path):
    plain = json.loads(backend().to_str())
    plain["model"]["vocab"]["the"] = plain["model"]["vocab"]["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="two tokens"):
        ByteTokenizer.load(tmp_path / "tokenizer.json")


def test_spelled_out_end_of_text_token_is_encoded_as_bytes():
    """An end of text that occurs in a text is encoded as bytes, like other text."""
    for options in ({"words": [END_OF_TEXT], "pre_tokenizer": WHOLE}, {"end": {}}, {"end": "word"}):
        tokenizer = ByteTokenizer(backend(**options))
        ids = tokenizer.encode(f"a{END_OF_TEXT}b")
        assert tokenizer.lossless and tokenizer.end_of_text not in ids
        assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
