"""Tokenizers read from sentencepiece files equal sentencepiece and Marian's tokenizer class."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

from jaxformer.hub.tokenizers.files import read_tokenizer  # noqa: E402

# Marian's class recommends a package that these tests do not need.
pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

TEXT = [
    "the tide came in twice that morning, and the clocks had stopped;",
    "the harbour master wrote it down, closed his book and went home.",
    "Nobody knew why: ½ of the boats lay dry, the ﬁrst at 7:30, the last at 8.",
]
TURNED = [line[::-1] for line in TEXT]
SPECIAL = ("</s>", "<pad>", "<unk>", ">>fra<<")  # our encoder reads these in a text as plain text
# Words of the texts, unknown pieces, characters that get normalized, and all kinds of spaces.
WORDS = st.sampled_from(
    [*"the tide Nobody knew ½ ﬁrst  \t 漢 </s> <pad> <unk> 7:30 morning,".split(" ")]
)
SPACES = [chr(n) for n in range(0x10000) if chr(n).isspace()]
TEXTS = st.one_of(st.lists(WORDS, max_size=8).map(" ".join), st.text(max_size=12))


def train(folder, name, lines, rule="nmt_nfkc"):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20),
        model_prefix=str(folder / name),
        vocab_size=70,
        model_type="unigram",
        normalization_rule_name=rule,
        bos_id=-1,
        minloglevel=2,
        hard_vocab_limit=False,
        **{"unk_id": 2, "pad_id": 0, "eos_id": 1},
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.model"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    theirs = train(folder, "spiece", TEXT)
    (folder / "config.json").write_text('{"model_type": "t5", "eos_token_id": 1}')
    return theirs, read_tokenizer(folder)


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """Makes a folder as Marian publishes it: two sentencepiece models and a joint vocabulary."""
    folder = tmp_path_factory.mktemp("marian")
    for name, lines in (("source", TEXT), ("target", TURNED)):
        train(folder, name, lines)
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
    models = [
        sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))
        for name in ("source", "target")
    ]
    pieces = [model.id_to_piece(n) for model in models for n in range(model.get_piece_size())]
    special = ["</s>", "<unk>", ">>fra<<"]
    words = [*special, *(x for x in dict.fromkeys(pieces) if x not in (*special, "<pad>")), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (folder / "config.json").write_text('{"model_type": "marian", "eos_token_id": 0}')
    theirs = transformers.MarianTokenizer(
        *(str(folder / name) for name in ("source.spm", "target.spm", "vocab.json"))
    )
    return theirs, models, read_tokenizer(folder)


@given(TEXTS)
def test_t5_encoding_equals_sentencepiece(t5, text):
    theirs, ours = t5
    expected = theirs.encode(text)
    assume(not any(token in text for token in SPECIAL))
    assert ours.encode(text) == expected
    if theirs.unk_id() not in expected:
        assert ours.decode(expected) == theirs.decode(expected)


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_encoding_of_spaces_equals_sentencepiece(tmp_path, rule):
    theirs = train(tmp_path, "spiece", TEXT, rule)
    (tmp_path / "config.json").write_text('{"model_type": "t5", "eos_token_id": 1}')
    ours = read_tokenizer(tmp_path)
    texts = [
        form.format(space)
        for space in SPACES
        for form in ("{0}", "{0}a", "a{0}", "a{0}{0}b", " {0} a", "a {0}", "a\n{0}")
    ]
    assert [ours.encode(text) for text in texts] == [theirs.encode(text) for text in texts]


def test_t5_source_ends_with_eos_and_vocabulary_includes_sentinel_tokens(t5):
    theirs, ours = t5
    assert ours.encode_source("the tide") == [*theirs.encode("the tide"), 1]
    assert ours.vocab_size == theirs.get_piece_size() + 100
    assert ours.decode([theirs.get_piece_size() + 99]) == ""


@given(TEXTS)
def test_marian_source_token_ids_equal_those_of_transformers(marian, text):
    theirs, (source, target), ours = marian
    alone = {target.id_to_piece(n) for n in range(target.get_piece_size())}
    alone -= {source.id_to_piece(n) for n in range(source.get_piece_size())}
    assume(not set(text) & set("".join(alone)))  # only ours encodes target-only pieces by their ids
    assume(not any(token in text for token in SPECIAL))
    assert ours.encode_source(text) == theirs(text).input_ids


def test_marian_target_decoding_equals_transformers(marian):
    theirs, (_, target), ours = marian
    ids = theirs.convert_tokens_to_ids(target.encode(TURNED[0], out_type=str))
    assert ours.decode([*ids, 0]) == theirs.decode([*ids, 0], skip_special_tokens=True) == TURNED[0]


def test_marian_language_code_is_one_token(marian):
    theirs, _, ours = marian
    text = ">>fra<< the tide"
    assert ours.encode_source(text) == theirs(text).input_ids
