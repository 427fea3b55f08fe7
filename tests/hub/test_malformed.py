"""Malformed folders are refused in one line that names the file and the fault.

They are refused before anything large is read, and nothing is written.
"""

import json
import os
import resource
import struct
from pathlib import Path

import pytest

from jaxformer.cli import main
from tests.hub import foreign

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"


def text(name, content):
    def change(folder):
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)

    return change


def config(**changes):
    return lambda folder: foreign.options(folder, **changes)


def header(change, data=lambda data: data):
    return lambda folder: foreign.header(folder, change, data)


def of_entry(**changes):
    """Returns a function that changes the entry of one tensor in the header."""

    def change(entries):
        entries["transformer.ln_f.bias"] |= changes
        return entries

    return header(change)


def tensors(change):
    return lambda folder: foreign.tensors(folder, change)


def places(change):
    def of_index(index):
        name = sorted(index["weight_map"])[0]
        index["weight_map"][name] = change(index["weight_map"][name])
        return index

    return lambda folder: foreign.shards(folder, of_index)


def index(change):
    return lambda folder: foreign.shards(folder, change)


def pickle_alone(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def link_away(folder):
    foreign.shards(folder)
    (folder / FIRST).rename(folder.parent / FIRST)
    (folder / FIRST).symlink_to(folder.parent / FIRST)


def cut_offsets(entries):
    start, stop = entries["transformer.ln_f.bias"]["data_offsets"]
    entries["transformer.ln_f.bias"]["data_offsets"] = [start - 4, stop - 4]
    return entries


def twice(entries):
    entry = json.dumps(entries["transformer.ln_f.bias"])
    return (json.dumps(entries)[:-1] + f', "transformer.ln_f.bias": {entry}}}').encode()


def sparse(name, size):
    def change(folder):
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return change


def slow_pattern(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    content["pre_tokenizer"] = split | {"invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def of_tokenizer(**changes):
    """Returns a function that changes sections of tokenizer.json."""

    def change(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(content | changes))

    return change


def growing(times):
    """Returns a normalizer that makes a text up to `times` times as long."""
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}


def larger_tokenizer(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zebra"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(content))


def without(name):
    return lambda arrays: arrays.pop(name) is None


# Fault: (function that damages the folder of a GPT-2, words that the message must contain).
BROKEN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "config is no JSON": (text("config.json", "{"), ["config.json", "cannot be read"]),
    "config is no text": (text("config.json", b"\xff\xfe{}"), ["config.json", "cannot be read"]),
    "config is a list": (text("config.json", "[]"), ["config.json", "list", "object"]),
    "config has a key twice": (
        text("config.json", '{"model_type": "gpt2", "model_type": "gpt2"}'),
        ["config.json", "'model_type'", "twice"],
    ),
    "config is huge": (sparse("config.json", 2**30), ["config.json", "bytes"]),
    "config is deep": (text("config.json", "[" * 100_000), ["config.json", "cannot be read"]),
    "no family": (config(model_type=None), ["config.json", "model_type", "gpt2"]),
    "family is unknown": (config(model_type="mamba"), ["config.json", "'mamba'", "llama"]),
    "family is a number": (config(model_type=3), ["config.json", "model_type", "3"]),
    "class is unknown": (config(architectures=["GPT9"]), ["config.json", "GPT9", "GPT2LMHead"]),
    "class is a number": (config(architectures=7), ["config.json", "architectures", "7"]),
    "class is none of an empty list and the family lacks its tensors": (
        lambda folder: (
            config(architectures=[])(folder),
            foreign.tensors(folder, without("transformer.wte.weight")),
        ),
        ["transformer.wte.weight", "missing"],
    ),
    "width is absurd": (config(n_embd=65536), [WEIGHTS, "config.json requires", "65536"]),
    "epsilon has 400 digits": (
        lambda folder: text(
            "config.json",
            (folder / "config.json")
            .read_text()
            .replace("{", '{"layer_norm_epsilon": 1' + "0" * 400 + ",", 1),
        )(folder),
        ["config.json"],
    ),
    "config has a hundred thousand keys": (
        lambda folder: config(**{f"key{n}": n for n in range(100_000 // 2)})(folder),
        ["config.json"],
    ),
    "a head of its own beside tied embeddings": (
        tensors(lambda x: x | {"lm_head.weight": x["transformer.wte.weight"] + 1}),
        ["lm_head.weight", "must equal", "transformer.wte.weight"],
    ),
    "class is a list of numbers": (config(architectures=[7]), ["config.json", "architectures"]),
    "head is not implemented": (
        config(architectures=["GPT2ForSequenceClassification"]),
        ["config.json", "GPT2ForSequenceClassification"],
    ),
    "layers are text": (config(n_layer="2"), ["config.json", "n_layer", "'2'"]),
    "layers are negative": (config(n_layer=-2), ["config.json", "n_layer", "-2"]),
    "layers are none": (config(n_layer=0), ["config.json", "num_layers", "0"]),
    "layers are absurd": (config(n_layer=2**40), ["config.json", "n_layer", str(2**40)]),
    "layers are very many": (config(n_layer=10**6), ["n_layer", "1000000"]),
    "width is a fraction": (config(n_embd=16.5), ["config.json", "n_embd", "16.5"]),
    "heads are true": (config(n_head=True), ["config.json", "n_head", "True"]),
    "heads do not divide": (config(n_head=3), ["config.json", "num_heads", "3"]),
    "no vocabulary": (config(vocab_size=None), ["config.json", "vocab_size", "missing"]),
    "vocabulary is absurd": (config(vocab_size=2**31 - 1), [WEIGHTS, "wte.weight", str(2**31 - 1)]),
    "activation is unknown": (config(activation_function="xielu"), ["activation_function"]),
    "activation is a list": (config(activation_function=["gelu"]), ["activation_function"]),
    "epsilon is text": (config(layer_norm_epsilon="small"), ["layer_norm_epsilon", "small"]),
    "epsilon is infinite": (config(layer_norm_epsilon=float("inf")), ["layer_norm_epsilon"]),
    "epsilon is negative": (config(layer_norm_epsilon=-1.0), ["norm_epsilon", "-1.0"]),
    "tying is text": (config(tie_word_embeddings="yes"), ["tie_word_embeddings", "'yes'"]),
    "an option is not read": (config(pruned_heads=8), ["config.json", "pruned_heads", "8"]),
    "it is quantised": (config(quantization_config={"bits": 4}), ["quantization_config", "4"]),
    "an option is not implemented": (
        config(scale_attn_by_inverse_layer_idx=True),
        ["config.json", "scale_attn_by_inverse_layer_idx", "True"],
    ),
    "it has cross-attention": (config(add_cross_attention=True), ["add_cross_attention"]),
    "two more layers than weights": (config(n_layer=4), ["transformer.h.2", "missing"]),
    "a layer fewer than weights": (config(n_layer=1), ["transformer.h.1", "unknown in this model"]),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS]),
    "a pickle alone": (pickle_alone, ["pytorch_model.bin", "save_pretrained"]),
    "weights are empty": (text(WEIGHTS, ""), [WEIGHTS, "cannot be read"]),
    "weights are four bytes": (text(WEIGHTS, "1234"), [WEIGHTS, "cannot be read"]),
    "header is longer than the file": (
        text(WEIGHTS, struct.pack("<Q", 1000) + b"{}"),
        [WEIGHTS, "cannot be read"],
    ),
    "header has an absurd length": (
        text(WEIGHTS, struct.pack("<Q", 2**63) + b"{}"),
        [WEIGHTS, "cannot be read"],
    ),
    "header is no JSON": (header(lambda entries: b"{" * 64), [WEIGHTS, "cannot be read"]),
    "header is a list": (header(lambda entries: b"[]"), [WEIGHTS, "cannot be read"]),
    "header has a key twice": (header(twice), [WEIGHTS, "transformer.ln_f.bias"]),
    "data are cut off": (header(lambda x: x, lambda data: data[:-8]), [WEIGHTS, "cannot be read"]),
    "data go on": (header(lambda x: x, lambda data: data + b"12345678"), [WEIGHTS]),
    "tensors overlap": (header(cut_offsets), [WEIGHTS, "cannot be read"]),
    "offsets are out of range": (of_entry(data_offsets=[0, 2**40]), [WEIGHTS, "cannot be read"]),
    "offsets go backwards": (of_entry(data_offsets=[64, 0]), [WEIGHTS, "cannot be read"]),
    "offsets are negative": (of_entry(data_offsets=[-64, 0]), [WEIGHTS, "cannot be read"]),
    "a shape is negative": (of_entry(shape=[-16]), [WEIGHTS, "cannot be read"]),
    "a shape is not of the data": (of_entry(shape=[17]), [WEIGHTS, "cannot be read"]),
    "a shape overflows": (of_entry(shape=[2**32, 2**32]), [WEIGHTS, "cannot be read"]),
    "a type is unknown": (of_entry(dtype="F31"), [WEIGHTS, "cannot be read"]),
    "a type is of integers": (of_entry(dtype="I32"), [WEIGHTS, "transformer.ln_f.bias", "I32"]),
    "a tensor is missing": (
        tensors(without("transformer.ln_f.bias")),
        ["transformer.ln_f.bias", "missing"],
    ),
    "a tensor is too many": (
        tensors(lambda arrays: arrays | {"transformer.extra": arrays["transformer.ln_f.bias"]}),
        ["transformer.extra", "unknown in this model"],
    ),
    "a tensor has another shape": (
        tensors(lambda x: x | {"transformer.ln_f.bias": x["transformer.ln_f.bias"][:8].copy()}),
        [WEIGHTS, "transformer.ln_f.bias", "(8,)", "(16,)"],
    ),
    "a matrix is transposed": (
        tensors(lambda x: x | {"transformer.wte.weight": x["transformer.wte.weight"].T.copy()}),
        [WEIGHTS, "transformer.wte.weight"],
    ),
    "index is no JSON": (index(lambda x: "{"), [INDEX, "cannot be read"]),
    "index has no map": (index(lambda x: {"metadata": {}}), [INDEX, "weight_map"]),
    "index has a list": (index(lambda x: {"weight_map": []}), [INDEX, "weight_map"]),
    "index has a number": (places(lambda name: 5), [INDEX, "'5'"]),
    "index leads to an absolute path": (places(lambda x: "/etc/passwd"), [INDEX, "/etc/passwd"]),
    "index leads up": (places(lambda x: f"../{x}"), [INDEX, "../"]),
    "index leads down": (places(lambda x: f"below/{x}"), [INDEX, "below/"]),
    "index leads to another kind": (places(lambda x: "config.json"), [INDEX, "config.json"]),
    "a file of the index is missing": (places(lambda x: "gone.safetensors"), [INDEX, "gone"]),
    "a file of the index leads away": (link_away, [FIRST, "is a link", "outside"]),
    "a tensor is in the other file": (
        places(lambda x: x.replace("00001", "00002")),
        [INDEX, "transformer", "this index is wrong"],
    ),
    "tokenizer is no JSON": (text("tokenizer.json", "{"), ["tokenizer.json"]),
    "tokenizer is a list": (text("tokenizer.json", "[]"), ["tokenizer.json"]),
    "tokenizer is of another kind": (
        text("tokenizer.json", '{"version": "1.0", "model": {"type": "Magic"}}'),
        ["tokenizer.json"],
    ),
    "tokenizer is huge": (sparse("tokenizer.json", 2**30), ["tokenizer.json", "bytes"]),
    "tokenizer has a slow pattern": (slow_pattern, ["tokenizer.json", "(a+)+"]),
    "tokenizer is of another model": (larger_tokenizer, ["tokenizer.json", "5000", "vocab_size"]),
    "tokenizer makes a text longer": (
        of_tokenizer(normalizer=growing(1000)),
        ["tokenizer.json", "lengthen a text"],
    ),
    "tokenizer makes a text longer by steps": (
        of_tokenizer(normalizer={"type": "Sequence", "normalizers": [growing(16)] * 3}),
        ["tokenizer.json", "lengthen a text"],
    ),
    "tokenizer's model is a number": (of_tokenizer(model=7), ["tokenizer.json"]),
    "tokenizer's template names a token that is absent": (
        of_tokenizer(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[GONE]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        ["tokenizer.json"],
    ),
    "generation settings are no JSON": (
        text("generation_config.json", "{"),
        ["generation_config.json"],
    ),
}

# The same for a family related to Llama, which has other options.
ROTARY = "rope_parameters"
BROKEN_LLAMA = {
    "activation": (config(hidden_act="gelu"), ["config.json", "hidden_act", "'silu'"]),
    "scaling is not implemented": (
        config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}),
        ["config.json", ROTARY, "longrope", "yarn"],
    ),
    "scaling is a list": (config(rope_parameters=[1]), ["config.json", ROTARY]),
    "scaling is of text": (
        config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}),
        ["config.json", ROTARY, "'2'"],
    ),
    "scaling has an unknown key": (
        config(rope_parameters={"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}),
        ["config.json", ROTARY, "mscale"],
    ),
    "scaling lacks its factor": (config(rope_parameters={"rope_type": "yarn"}), ["config.json"]),
    "key heads do not divide": (config(num_key_value_heads=3), ["num_kv_heads", "3"]),
    "head is odd": (config(head_dim=5), ["config.json", "head_dim", "5"]),
    "kind of layer is unknown": (
        config(layer_types=["full_attention", "chunked_attention"]),
        ["config.json", "layer_types", "chunked_attention"],
    ),
    "kinds of layers are too few": (config(layer_types=["full_attention"]), ["layer_types"]),
    "window is text": (config(sliding_window="5"), ["config.json", "sliding_window", "'5'"]),
    "epsilon is nothing": (config(rms_norm_eps=0.0), ["config.json", "norm_epsilon", "0.0"]),
    "no layers": (config(num_hidden_layers=0), ["config.json", "0"]),
    "base is nothing": (config(rope_parameters={"rope_theta": None}), ["config.json"]),
    "base is zero": (config(rope_parameters={"rope_theta": 0}), ["config.json", "0"]),
}
MOST_MEMORY = 100 * 2**20


@pytest.fixture(scope="module")
def memory():
    """A function that returns the growth of the process's peak memory since its last call."""
    last = [0]

    def more():
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before, last[0] = last[0], most
        return most - before

    return more


@pytest.mark.parametrize(
    "wrong",
    [*BROKEN, *(f"llama: {name}" for name in BROKEN_LLAMA)],
    ids=lambda wrong: wrong.replace(" ", "-"),  # a name that tests/mutation can use
)
def test_import_error_for_malformed_model_folder_is_one_line(wrong, tmp_path, capsys, memory):
    """One line with file and key, exit status 2, no output folder, little memory."""
    is_llama = wrong.startswith("llama: ")
    change, named = BROKEN_LLAMA[wrong.removeprefix("llama: ")] if is_llama else BROKEN[wrong]
    folder = tmp_path / "model"
    foreign.write(folder, "qwen2" if is_llama else "gpt2")
    change(folder)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    memory()
    assert main(["import", str(folder), str(tmp_path / "out")]) == 2
    assert memory() < MOST_MEMORY
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1, said.err
    for word in named:
        assert word in said.err, said.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_import_rejects_missing_model_folder_or_existing_output(tmp_path, capsys, monkeypatch):
    """The source is neither a folder nor a hub id, there is no network, or the output exists."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    foreign.write(tmp_path / "model", "gpt2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    cases = {
        ("no/such/folder", "out"): "no/such/folder does not exist",
        ("nobody/nothing-of-this-name", "out"): "nobody/nothing-of-this-name is not a local folder",
        (str(tmp_path / "model"), str(tmp_path / "full")): "full already exists",
        (str(tmp_path / "model"), str(tmp_path / "no" / "out")): "no is not a folder",
    }
    for (source, out), said in cases.items():
        assert main(["import", source, out]) == 2
        line = capsys.readouterr().err
        assert said in line and len(line.splitlines()) == 1
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert not Path("out").exists() and os.listdir(tmp_path / "full") == ["mine.txt"]


def test_at_least_64_malformed_model_folders_are_tested():
    assert len(BROKEN) + len(BROKEN_LLAMA) >= 64
