"""Special tokens that a text spells out are plain text, or tokens if the caller says so."""

import json
from collections import Counter

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import END_OF_TEXT, ByteTokenizer
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.saved import run_tokenizer
from jaxformer.artifacts.spelled_tokens import report_special_tokens, spelled_tokens
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.artifacts.tokenizer_copies import lowercased, parsing_special
from jaxformer.cli import main
from tests.hub import foreign

WORDS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<|im_end|>x", "</s>", "[MASK]"]
CORPUS = ["the tide came in twice, and the clocks had stopped! one two three"] * 20
TEXTS = st.lists(
    st.sampled_from([*WORDS, "the tide", " ", "\n", "<|im_", "end|>", "猫", "</", "S", "1 2"])
).map("".join)


def _byte_level():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=WORDS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _word_piece():
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    options = {"special_tokens": ["[UNK]", *WORDS], "show_progress": False}
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=90, **options))
    template = f"{WORDS[0]} $A {WORDS[1]}"
    ids = [(word, backend.token_to_id(word)) for word in WORDS[:2]]
    backend.post_processor = processors.TemplateProcessing(template, special_tokens=ids)
    return backend


def _unigram():
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    options = {"unk_token": "<unk>", "special_tokens": ["<unk>", *WORDS]}
    trainer = trainers.UnigramTrainer(vocab_size=70, show_progress=False, **options)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken("</s>", rstrip=True), AddedToken("[MASK]", lstrip=True)])
    return backend


BACKENDS = {"bytes": _byte_level(), "words": _word_piece(), "unigram": _unigram()}


def _library(name):
    """Returns the library's tokenizer, as transformers uses it."""
    return tokenizers.Tokenizer.from_str(BACKENDS[name].to_str())


TOKENIZERS = {name: Subwords(_library(name), SpecialTokens()) for name in BACKENDS}
TOKENIZERS["own bytes"] = ByteTokenizer(_library("bytes"))
LIBRARY = {name: _library("bytes" if name == "own bytes" else name) for name in TOKENIZERS}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_encoding_with_special_tokens_allowed_equals_tokenizers_library(name, text):
    tokenizer = TOKENIZERS[name]
    expected = LIBRARY[name].encode(text, add_special_tokens=False).ids
    around = LIBRARY[name].encode(text).ids
    assert tokenizer.encode(text, allow_special=True) == expected
    assert tokenizer.encode_many([text, "a"], allow_special=True)[0] == expected
    assert tokenizer.encode_source(text, allow_special=True) == around
    parsing = parsing_special(tokenizer)
    assert parsing.encode(text) == expected and parsing.encode_source(text) == around
    assert parsing.encode(text, allow_special=False) == tokenizer.encode(text)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_special_tokens_are_plain_text_by_default(name, text):
    tokenizer = TOKENIZERS[name]
    special = {tokenizer.special_words[word] for word in WORDS}
    assert special.isdisjoint(tokenizer.encode(text))
    assert tokenizer.encode_many([text]) == [tokenizer.encode(text)]


@given(text=TEXTS, size=st.integers(1, 9))
def test_special_tokens_split_across_text_pieces_are_counted(text, size):
    expected, at = Counter(), 0
    while at < len(text):
        here = [word for word in WORDS if text.startswith(word, at)]
        expected.update([max(here, key=len)] if here else ())
        at += len(max(here, key=len)) if here else 1
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    assert spelled_tokens(TOKENIZERS["bytes"], parts) == expected


def test_warning_counts_special_tokens_that_occur_in_a_text():
    tokenizer = TOKENIZERS["bytes"]
    found = spelled_tokens(tokenizer, ["<|im_start|>a<|im_end|><|im_end|>"])
    counts = "3 special tokens are spelled out in it: <|im_end|> (2), <|im_start|> (1)"
    plain = (
        f"warning: {counts}; each is encoded as plain text. To encode special tokens, add "
        "--parse-special"
    )
    assert report_special_tokens(tokenizer, found, "it") == plain
    assert report_special_tokens(parsing_special(tokenizer), found, "it") == (
        f"{counts}; each is encoded as one special token (--parse-special)"
    )
    assert report_special_tokens(tokenizer, Counter(), "it") is None


def test_enabling_parse_special_does_not_change_the_original_tokenizer():
    tokenizer = TOKENIZERS["own bytes"]
    parsing = parsing_special(tokenizer)
    assert parsing.fingerprint != tokenizer.fingerprint and not tokenizer.parses_special
    assert lowercased(parsing).parses_special and not lowercased(tokenizer).parses_special


def test_runs_and_saved_models_store_the_parse_special_setting(tmp_path):
    run, text = RunFolder(tmp_path), f"a{END_OF_TEXT}"
    foreign.tokenizer().save(run.tokenizer)
    for training, parses in (({}, False), ({"parse_special": True}, True)):
        run.write_config({"model": {}, "training": training})
        ids = run_tokenizer(run).encode(text)
        assert (foreign.tokenizer().end_of_text in ids) == parses
    _, model, variables = foreign.made("gpt2")
    for number, tokenizer in enumerate([foreign.tokenizer(), parsing_special(foreign.tokenizer())]):
        jf.save(tmp_path / str(number), model, variables, tokenizer)
        again = jf.load(tmp_path / str(number)).tokenizer
        assert again.encode(text) == tokenizer.encode(text)


MARKER = foreign.tokenizer().vocab_size - 1


@pytest.fixture
def folder(tmp_path):
    """A folder in Hugging Face's format with chat markers in its tokenizer."""
    foreign.write(tmp_path / "theirs", "gpt2")
    path = tmp_path / "theirs" / "tokenizer.json"
    content = json.loads(path.read_text())
    (end,) = content["added_tokens"]
    last, _ = MARKER, content["model"]["merges"].pop()
    words = content["model"]["vocab"]
    content["model"]["vocab"] = {word: x for word, x in words.items() if x != last}
    content["added_tokens"] += [end | {"id": last, "content": "<|im_start|>"}]
    path.write_text(json.dumps(content))
    return tmp_path / "theirs"


def test_generate_with_flag_parse_special_encodes_chat_markers_as_special_tokens(
    folder, monkeypatch, capsys
):
    read = []

    def record(model, variables, prompts, **options):
        read.extend(prompts)

    monkeypatch.setattr("jaxformer.decoding.generate.generate", record)
    command = ["generate", str(folder), "--prompt", "<|im_start|>the"]
    assert main(command) == 0
    assert "1 special token is spelled out in the prompt" in capsys.readouterr().err
    assert main([*command, "--parse-special"]) == 0
    assert "encoded as one special token" in capsys.readouterr().err
    assert MARKER not in read[0] and read[1].count(MARKER) == 1 and len(read[0]) > len(read[1])


@pytest.mark.slow
def test_later_commands_use_the_parse_special_setting_of_training(folder, capsys):
    """The choice of `train` is the default of every later command for the run."""
    (folder.parent / "a.txt").write_text("<|im_start|>the tide came in\n" * 90)
    train = ["train", str(folder.parent / "a.txt"), "--steps=1", "--batch-size=1"]
    runs = [folder.parent / "run", folder.parent / "further"]
    first = [f"--init-from={folder}", f"--out={runs[0]}", "--parse-special", "--window-length=8"]
    assert main([*train, *first]) == 0
    assert "90 special tokens are spelled out in the text" in capsys.readouterr().out
    assert main([*train, f"--init-from={runs[0]}", f"--out={runs[1]}", "--window-length=8"]) == 0
    capsys.readouterr()
    for run in runs:
        tokenizer = jf.load(run).tokenizer
        assert tokenizer.parses_special and tokenizer.encode("<|im_start|>") == [MARKER]
        assert main(["evaluate", str(run), str(folder.parent / "a.txt"), "--json"]) == 0
        assert "encoded as one special token" in capsys.readouterr().err
