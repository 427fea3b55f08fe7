"""Older vocabulary files with random settings give the token ids of transformers."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

from jaxformer.hub.tokenizers.files import read_tokenizer  # noqa: E402
from tests.hub import foreign  # noqa: E402

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyzMüéßİı漢字猫!?.,-_'\"0189"]
WORDS = ["must", "##ste", "müs", "Müsste", "mus", "##s", "tide", "Tide", "naive", "naïve", "été"]
BERT = list(dict.fromkeys([*SPECIAL, *WORDS, *LETTERS, *(f"##{x}" for x in LETTERS)]))
PIECES = st.sampled_from(
    "Müsste naïve tide 漢字 猫x İst ﬁ e\u0301 TIDE tidewater TideWater tidewaters".split()
) | st.sampled_from(["\u00a0", "  ", "\t", "a tidewater b", "été", "don't", "<w>x", "\ufffd"])
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=8).map(" ".join)
FLAGS = st.fixed_dictionaries(
    {x: st.booleans() for x in ("lstrip", "rstrip", "single_word", "normalized")}
)
CONTENTS = st.lists(st.sampled_from(["TideWater", "<w>", "été"]), unique=True)
several = settings(max_examples=5 * settings().max_examples)


def compared(folder, files, texts, special):
    """Writes the JSON files and compares the ids of each text, encoded as a source."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False)
    ours = read_tokenizer(folder)
    for text in texts:
        if not any(name in text for name in special):
            assert ours.encode_source(text) == theirs(text, split_special_tokens=True).input_ids


def added_files(data, size, known, special):
    """Draws settings of added tokens, in tokenizer_config.json or in the two older files."""
    contents = data.draw(CONTENTS)
    new = [x for x in contents if x not in known]
    ids = {x: known.index(x) if x in known else size + new.index(x) for x in contents}
    if data.draw(st.booleans()):
        entries = {str(n): {"content": x, **data.draw(FLAGS)} for x, n in ids.items()}
        for entry in entries.values():
            entry["special"] = entry["content"] in special
        return {"added_tokens_decoder": entries}, {}
    named = {"additional_special_tokens": sorted(special & set(contents))}
    return {}, {"added_tokens.json": ids, "special_tokens_map.json": named}


@pytest.mark.slow
@several
@given(st.data())
def test_bert_vocab_and_settings_files_give_token_ids_of_transformers(data):
    options = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "do_lower_case": st.booleans(),
                "strip_accents": st.none() | st.booleans(),
                "tokenize_chinese_chars": st.booleans(),
                "tokenizer_class": st.sampled_from(["BertTokenizer", "BertTokenizerFast"]),
                "model_max_length": st.just(512),
                "cls_token": st.just("[SEP]"),
                "unk_token": st.sampled_from(["[UNK]", "?"]),
            },
        )
    )
    special = {"<w>"} if data.draw(st.booleans()) else set()
    more, files = added_files(data, len(BERT), BERT, special)
    files |= {"config.json": {"model_type": "bert"}, "tokenizer_config.json": options | more}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "vocab.txt").write_text("\n".join(BERT) + "\n")
        texts = data.draw(st.lists(TEXTS, min_size=5, max_size=5))
        compared(Path(name), files, texts, {*SPECIAL, *special})


@pytest.mark.slow
@several
@given(st.data())
def test_gpt2_vocab_and_settings_files_give_token_ids_of_transformers(data):
    model = json.loads(foreign.tokenizer().to_json())["model"]
    merges = [x if isinstance(x, str) else " ".join(x) for x in model["merges"]]
    options = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "add_prefix_space": st.booleans(),
                "add_bos_token": st.booleans(),
                "add_eos_token": st.booleans(),
                "tokenizer_class": st.sampled_from(["GPT2Tokenizer", "GPT2TokenizerFast"]),
                "errors": st.just("replace"),
                "pad_token": st.just("<|endoftext|>"),
            },
        )
    )
    special = {"<w>"} if data.draw(st.booleans()) else set()
    known = sorted(model["vocab"], key=model["vocab"].get)
    more, files = added_files(data, len(known), known, special)
    files |= {"config.json": {"model_type": "gpt2"}, "tokenizer_config.json": options | more}
    files["vocab.json"] = model["vocab"]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
        texts = data.draw(st.lists(TEXTS, min_size=5, max_size=5))
        compared(Path(name), files, texts, {"<|endoftext|>", *special})
