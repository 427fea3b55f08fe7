"""A GGUF file holds the vocabulary of an imported tokenizer in the terms of llama.cpp.

Two references encode a text from the file alone, by the rules of llama.cpp.
"""

import itertools
import json
import warnings

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import processors as processors_

import jaxformer as jf
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.token_bytes import byte_characters
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.hub.gguf import export_gguf
from tests.artifacts.small_tokenizers import (
    byte_level_bpe,
    byte_tokens,
    character_bpe,
    trained_unigram,
)
from tests.errors import error_of
from tests.hub import foreign
from tests.properties import tiny
from tests.slow import mostly_slow

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")
regex = pytest.importorskip("regex", reason="the reference needs the package regex")
SIZES = {"embed_dim": 64, "num_heads": 4, "head_dim": 16, "mlp_dim": 96, "max_length": 96}
LLAMA = {name: value for name, value in foreign.LLAMA.items() if name not in ("window", *SIZES)}
CORPUS = ["the tide came in twice, 1024 times don't DON'T\n\n  and nobody  knew why été 漢字"] * 9
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]

# What llama.cpp does for each name: its patterns, and whether a whole word that is a token is
# taken without merging.
WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ANY_CASE = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THERE = {
    "gpt-2": ([WORD], False),
    "smollm": ([r"\p{N}", WORD], False),
    "qwen2": ([rf"(?:{ANY_CASE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}"], False),
    "llama-bpe": ([rf"(?:{ANY_CASE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"], True),
    "tekken": ([TEKKEN], True),
}
THERE["smaug-bpe"] = (THERE["llama-bpe"][0], False)

# Pre-tokenizers as published tokenizer.json files have them: (steps, ignore_merges).
FOLD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern, behavior="isolated", invert=False):
    return [pre_tokenizers.Split(Regex(pattern), behavior, invert), BYTES]


PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
HERE = {
    "gpt-2": ([PLAIN], False),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), PLAIN], False),
    "qwen2": (split(FOLD + r"\p{N}" + REST), False),
    "llama-bpe": (split(FOLD + r"\p{N}{1,3}" + REST, "removed", True), True),
    "smaug-bpe": (split(FOLD + r"\p{N}{1,3}" + REST), False),
    "tekken": (split(TEKKEN), True),
}


def of_bytes(name: str) -> tokenizers.Tokenizer:
    steps, ignores_merges = HERE[name]
    return byte_level_bpe(steps, CORPUS, 330, SPECIAL, ignores_merges)


def of_sentencepiece(kind: str) -> tokenizers.Tokenizer:
    """Returns BPE over characters with all merges of its tokens, as converters write it."""
    pieces = "th ▁t ▁th ▁the in ca me ▁in ▁ca came ▁came ti de ▁ti tide ▁tide ▁▁ 10 24".split()
    letters = sorted(set("".join(pieces)) | set("abcdefghijkl,.é"))
    known = [*SPECIAL, *byte_tokens(), *pieces, *letters]
    merges = [
        (x[:n], x[n:]) for x in pieces for n in range(1, len(x)) if {x[:n], x[n:]} <= {*known}
    ]
    made = character_bpe(kind, known, merges, byte_fallback=True, fuse_unk=True)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    made.post_processor = processors_.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return made


USUAL = SpecialTokens((2,), 1)


def written(path, backend, settings=None, special=USUAL) -> tuple:
    """Exports a small Llama with this tokenizer. Returns (tokenizer, fields of the file)."""
    files = {name: json.dumps(x) for name, x in (settings or {}).items()}
    tokenizer = Subwords(backend, special, files)
    model = tiny.build(**{**SIZES, **LLAMA, "vocab_size": tokenizer.vocab_size + 3})
    export_gguf(path, model, tiny.weights(model, 0), tokenizer)
    return tokenizer, fields_of(path)


def fields_of(path) -> dict:
    fields = gguf.GGUFReader(path).fields.items()
    return {k.removeprefix("tokenizer."): x.contents() for k, x in fields if "tokenizer" in k}


def encoded_by_merges(text: str, fields: dict) -> list[int]:
    """Encodes as llama.cpp's algorithm "gpt2"."""
    patterns, takes_words = THERE[fields["ggml.pre"]]
    words = [text]
    for pattern in patterns:
        words = [part for word in words for part in _parts(pattern, word)]
    rank = {merge: n for n, merge in enumerate(fields["ggml.merges"])}
    ids = {token: n for n, token in enumerate(fields["ggml.tokens"])}
    characters, found = byte_characters(), []
    for word in words:
        symbols = [characters[byte] for byte in word.encode()]
        if takes_words and "".join(symbols) in ids:
            symbols = ["".join(symbols)]
        while True:
            pairs = [f"{a} {b}" for a, b in itertools.pairwise(symbols)]
            best = min(pairs, key=lambda pair: rank.get(pair, len(rank)), default=None)
            if best not in rank:
                break
            place = pairs.index(best)
            symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
        found += [ids[symbol] for symbol in symbols]
    return found


def _parts(pattern: str, text: str):
    """Yields the matches of a pattern and the text between them."""
    end = 0
    for match in regex.finditer(pattern, text):
        yield from filter(None, (text[end : match.start()], match.group()))
        end = match.end()
    yield from filter(None, [text[end:]])


def encoded_by_scores(text: str, fields: dict) -> list[int]:
    """Encodes as llama.cpp's algorithm "llama"."""
    ids = {token: n for n, token in enumerate(fields["ggml.tokens"])}
    symbols = [*(" " * fields["ggml.add_space_prefix"] + text).replace(" ", "▁")] if text else []
    while True:
        joint = [a + b for a, b in itertools.pairwise(symbols)]
        places = [n for n, x in enumerate(joint) if x in ids]
        if not places:
            break
        place = max(places, key=lambda n: (fields["ggml.scores"][ids[joint[n]]], -n))
        symbols[place : place + 2] = [joint[place]]
    unknown = [[x] if x in ids else [f"<0x{n:02X}>" for n in x.encode()] for x in symbols]
    return [ids[x] for some in unknown for x in some]


TEXTS = st.lists(
    st.sampled_from(
        ["the tide", " came", "  in", "1024", "don't", "DON'T", "été", "漢", "\n", "a,b "]
    )
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", HERE)
def test_byte_level_bpe_gives_the_token_ids_of_llama_cpp(name, tmp_path):
    tokenizer, fields = written(tmp_path / "x.gguf", of_bytes(name))
    assert (fields["ggml.model"], fields["ggml.pre"]) == ("gpt2", name)

    @given(TEXTS)
    def check(text):
        assert encoded_by_merges(text, fields) == tokenizer.encode(text)

    check()


@pytest.mark.parametrize("kind", ["llama", "gemma", "first"])
def test_sentencepiece_bpe_gives_the_token_ids_of_llama_cpp(kind, tmp_path):
    tokenizer, fields = written(tmp_path / "x.gguf", of_sentencepiece(kind))
    assert (fields["ggml.model"], fields["ggml.pre"]) == ("llama", "default")
    assert fields["ggml.add_space_prefix"] == (kind != "gemma")

    @example("atin")  # "in" is merged before "ti", which is further left
    @given(TEXTS)
    def check(text):
        if kind == "first" and text.startswith((" ", "▁")):
            return  # this step puts no second space before the text, llama.cpp does
        assert encoded_by_scores(text, fields) == tokenizer.encode(text)

    check()


UNIGRAMS = {
    "merged spaces": {},
    "all spaces": {"remove_extra_whitespaces": False},
    "no normalization": {
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    },
}
PIECES = SpecialTokens((1,), None)


@pytest.mark.parametrize("kind", mostly_slow(UNIGRAMS, slow=("merged spaces",)))
def test_gguf_file_stores_the_unigram_model_of_sentencepiece(kind, tmp_path):
    theirs, backend = trained_unigram(
        tmp_path / "spiece.model", CORPUS * 9, vocab_size=90, **UNIGRAMS[kind]
    )
    _, fields = written(tmp_path / "x.gguf", backend, special=PIECES)
    number = theirs.vocab_size()
    assert fields["ggml.model"] == "t5"
    assert fields["ggml.tokens"][:number] == [theirs.id_to_piece(n) for n in range(number)]
    scores = [theirs.get_score(n) for n in range(number)]
    np.testing.assert_allclose(fields["ggml.scores"][:number], scores, rtol=1e-6)
    assert fields["ggml.add_space_prefix"] == (kind != "no normalization")
    assert fields["ggml.remove_extra_whitespaces"] == (kind == "merged spaces")
    assert ("ggml.precompiled_charsmap" in fields) == (kind != "no normalization")
    assert fields["ggml.unknown_token_id"] == theirs.unk_id()
    assert fields["ggml.eos_token_id"] == theirs.eos_id()


def test_gguf_file_stores_token_types(tmp_path):
    tokenizer, fields = written(tmp_path / "x.gguf", of_sentencepiece("llama"))
    types = {text: fields["ggml.token_type"][n] for n, text in enumerate(fields["ggml.tokens"])}
    expected = {"<unk>": 2, "<s>": 3, "<0x0A>": 6, "▁the": 1, "é": 1, "<tool>": 4}
    assert {text: types[text] for text in expected} == expected
    assert [types[f"<unused{tokenizer.vocab_size + n}>"] for n in range(3)] == [5, 5, 5]


CHAT = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
CASES = {
    "llama 2": (
        of_sentencepiece,
        "llama",
        {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"},
        SpecialTokens((2,), 1),
        {"bos": 1, "eos": 2, "unknown": 0, "add_bos": True, "add_eos": False},
    ),
    "qwen chat": (
        of_bytes,
        "qwen2",
        {"eos_token": "<|im_end|>", "pad_token": "</s>", "chat_template": CHAT},
        SpecialTokens((3, 2), 1),
        {"bos": 1, "eos": 3, "eot": 2, "padding": 2, "add_bos": False, "add_eos": False},
    ),
    "no settings": (
        of_bytes,
        "gpt-2",
        None,
        SpecialTokens((2,), 1, pad=0),
        {"bos": 1, "eos": 2, "padding": 0, "add_bos": False, "add_eos": False},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gguf_file_stores_special_ids_and_chat_template(name, tmp_path):
    make, kind, options, special, expected = CASES[name]
    settings = None if options is None else {"tokenizer_config.json": options}
    _, fields = written(tmp_path / "x.gguf", make(kind), settings, special)
    names = {
        f"ggml.{x}_token" if x.startswith("add") else f"ggml.{x}_token_id": n
        for x, n in expected.items()
    }
    special_keys = {x for x in fields if x.endswith("token_id") or x.startswith("ggml.add_")}
    assert {x: fields[x] for x in special_keys - {"ggml.add_space_prefix"}} == names
    assert fields.get("chat_template") == (options or {}).get("chat_template")


def test_gguf_file_stores_named_chat_templates(tmp_path):
    named = [{"name": "default", "template": CHAT}, {"name": "rag", "template": "{{ x }}"}]
    settings = {"tokenizer_config.json": {"chat_template": named}}
    _, fields = written(tmp_path / "x.gguf", of_bytes("gpt-2"), settings)
    assert (fields["chat_template"], fields["chat_template.rag"]) == (CHAT, "{{ x }}")


def other(change) -> tokenizers.Tokenizer:
    content = json.loads(of_bytes("gpt-2").to_str())
    change(content)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def word_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))


def steps_of(content: dict) -> list:
    return content["pre_tokenizer"]["pretokenizers"]


LETTERS = {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated", "invert": False}
REFUSED = {
    "words": (
        word_level,
        "the tokenizer's type is WordLevel; only BPE and Unigram can be exported to GGUF",
    ),
    "a prefix": (
        lambda: other(
            lambda x: x["pre_tokenizer"]["pretokenizers"][0].update(add_prefix_space=True)
        ),
        "add_prefix_space",
    ),
    "another pattern": (
        lambda: other(lambda x: steps_of(x).insert(0, LETTERS)),
        r"'[a-z]+'",
    ),
    "lower case": (
        lambda: other(lambda x: x.update(normalizer={"type": "Lowercase"})),
        "normalizer Lowercase",
    ),
    "whole words are taken": (
        lambda: other(lambda x: x["model"].update(ignore_merges=True)),
        "ignore_merges is True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokenizer_unsupported_by_llama_cpp_is_rejected(name, tmp_path):
    make, reason = REFUSED[name]
    tokenizer = Subwords(make(), SpecialTokens((2,), 1))
    model = tiny.build(**{**SIZES, **LLAMA, "vocab_size": 400})
    said = error_of(export_gguf, tmp_path / "x", model, tiny.weights(model, 0), tokenizer)
    assert reason in said
    assert not list(tmp_path.iterdir())


def test_gguf_export_warns_about_missing_bpe_merge(tmp_path):
    """llama.cpp merges all tokens whose joint text is a token."""
    content = json.loads(of_sentencepiece("llama").to_str())
    content["model"]["merges"].remove(["▁t", "h"])
    with pytest.warns(UserWarning, match="'▁t' and 'h' to '▁th'"):
        written(tmp_path / "x.gguf", tokenizers.Tokenizer.from_str(json.dumps(content)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(tmp_path / "y.gguf", of_sentencepiece("llama"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNIGRAMS)
def test_llama_cpp_and_jaxformer_encode_unigram_tokens_equally(kind, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    original, backend = trained_unigram(
        tmp_path / "spiece.model", CORPUS * 9, vocab_size=90, **UNIGRAMS[kind]
    )
    tokenizer, _ = written(tmp_path / "x.gguf", backend, special=PIECES)
    theirs = llama_cpp.Llama(str(tmp_path / "x.gguf"), n_ctx=96, verbose=False)

    @given(TEXTS)
    def check(text):
        found = theirs.tokenize(text.encode(), add_bos=False)
        expected = original.encode(text)
        assert found == expected
        begins_with_space = original.normalize(text).startswith("▁▁")
        # Before a space, Metaspace puts no second one.
        assert begins_with_space or tokenizer.encode(text) == expected

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HERE, "llama", "gemma", "metaspace"])
def test_llama_cpp_and_jaxformer_encode_and_generate_equal_tokens(name, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    made = of_bytes(name) if name in HERE else of_sentencepiece(name)
    tokenizer, _ = written(tmp_path / "x.gguf", made)
    model = tiny.build(**{**SIZES, **LLAMA, "vocab_size": tokenizer.vocab_size + 3})
    theirs = llama_cpp.Llama(str(tmp_path / "x.gguf"), n_ctx=96, verbose=False)
    for text in ["the tide came in twice", "1024 don't DON'T\n\n été", "the  tide 漢字", " a"]:
        if name == "metaspace" and text.startswith(" "):
            continue  # as above
        assert theirs.tokenize(text.encode(), add_bos=False) == tokenizer.encode(text)
    prompt = [*tokenizer.opening, *tokenizer.encode("the tide")]
    assert theirs.tokenize(b"the tide", add_bos=True)[-len(prompt) + 1 :] == prompt[1:]
    greedy = jf.Sampler(temperature=0.0)
    out = jf.generate(model, tiny.weights(model, 0), [prompt], max_new_tokens=20, sampler=greedy)
    stream = theirs.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
    found = [token for token, _ in zip(stream, range(20), strict=False)]
    assert out.tokens[0].tolist() == found
