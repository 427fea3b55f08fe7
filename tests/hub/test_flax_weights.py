"""Weights of transformers' Flax classes: every family is read, and malformed files are refused."""

import json
import random
import re
import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax import serialization
from flax.traverse_util import unflatten_dict
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import jaxformer as jf
from jaxformer.artifacts.saved import Checkpoint
from jaxformer.cli import main
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.flax_weights import MODEL_TYPES, read_tree
from tests.errors import error_of
from tests.hub import configs, foreign
from tests.properties import tiny

WEIGHTS, INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
# Modules of the Flax classes that are an `nn.Embed`.
EMBEDDINGS = """wte wpe embed_tokens word_embeddings position_embeddings token_type_embeddings
    shared embed_positions relative_attention_bias""".split()
# Families whose norm is a class of transformers with a parameter `weight`, not an `nn.LayerNorm`.
OWN_NORMS = ("llama", "mistral", "gemma", "t5", "mt5")


def flax_name(family: str, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Returns the path and the layout in the Flax class of a tensor of the PyTorch class."""
    *modules, leaf = name.split(".")
    if leaf == "weight" and array.ndim == 2:
        is_embedding = modules[-1] in EMBEDDINGS
        leaf, array = ("embedding", array) if is_embedding else ("kernel", array.T)
    elif leaf == "weight" and family not in OWN_NORMS:
        leaf = "scale"
    return "/".join([*modules, leaf]), array


def flat_tree(folder, family) -> dict[str, np.ndarray]:
    """Removes model.safetensors of an exported folder and returns it as arrays of a Flax tree."""
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if family in ("marian", "pegasus"):  # their Flax classes compute the positions
        arrays = {name: x for name, x in arrays.items() if "embed_positions" not in name}
    return dict(flax_name(family, name, array) for name, array in arrays.items())


def write_tree(path, flat) -> None:
    tree = unflatten_dict({tuple(name.split("/")): np.array(x) for name, x in flat.items()})
    path.write_bytes(serialization.msgpack_serialize(tree))


def assert_loads(folder, model, variables) -> None:
    found = jf.load(folder)
    assert found.model.config == model.config
    jax.tree.map(np.testing.assert_array_equal, found.variables, variables)


def export_near(family, seed, folder) -> Checkpoint:
    """Exports a model with a random config of a family, and loads it."""
    draw = random.Random(seed)
    while True:
        model = jf.build(configs.near(family, draw))
        try:
            jf.export(folder, model, tiny.weights(model, seed), model_type=family)
        except ValueError:  # the family has no such model
            continue
        return jf.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_flax_checkpoints_of_random_configs_are_loaded(family, tmp_path):
    """The parameters equal those of the safetensors file, for every family with a Flax class."""
    for seed in range(4):
        folder = tmp_path / str(seed)
        exported = export_near(family, seed, folder)
        write_tree(folder / WEIGHTS, flat_tree(folder, family))
        assert_loads(folder, exported.model, exported.variables)


def test_every_model_type_with_flax_weights_is_supported():
    assert set(MODEL_TYPES) < set(FAMILIES)


def test_flax_classes_listed_in_the_docs_equal_supported_classes():
    page = (Path(__file__).parents[2] / "docs" / "from-flax-transformers.md").read_text()
    rows = re.findall(
        r"^\| (`Flax.*) \| `(Decoder|Encoder|EncoderDecoder)` \|$", page, re.MULTILINE
    )
    listed = {name: kind for names, kind in rows for name in re.findall(r"`Flax(\w+)`", names)}
    supported = {
        name: FAMILIES[family].config.__name__.removesuffix("Config")
        for family in MODEL_TYPES
        for name in FAMILIES[family].architectures
    }
    supported.pop("T5WithLMHeadModel")  # a PyTorch class of before 2021, which had no Flax class
    assert listed == supported


@cache
def tree() -> dict[str, np.ndarray]:
    """Returns the arrays of a Flax GPT-2 by their paths."""
    folder, _, _ = foreign.made("gpt2")
    arrays = load_file(folder / "model.safetensors")
    return dict(flax_name("gpt2", name, array) for name, array in arrays.items())


@pytest.fixture
def gpt2(tmp_path):
    """Writes a folder with a Flax GPT-2 and returns (folder, model, variables)."""
    model, variables = foreign.write(tmp_path / "model", "gpt2")
    (tmp_path / "model/model.safetensors").unlink()
    write_tree(tmp_path / "model" / WEIGHTS, tree())
    return tmp_path / "model", model, variables


@pytest.mark.slow
def test_logits_of_a_loaded_flax_checkpoint_equal_those_before_the_export(gpt2):
    folder, model, variables = gpt2
    found = jf.load(folder)
    tokens = jnp.arange(1, 9)[None]
    logits = model.apply(variables, tokens)
    np.testing.assert_array_equal(found.model.apply(found.variables, tokens), logits)
    assert found.tokenizer.encode("the tide") == foreign.tokenizer().encode("the tide")


def write_shards(folder, change=lambda index: index) -> None:
    """Splits the weights into two files with an index. `change` edits the index."""
    (folder / WEIGHTS).unlink()
    flat, places = tree(), {}
    for number, names in enumerate((sorted(flat)[::2], sorted(flat)[1::2]), 1):
        file = f"flax_model-{number:05}-of-00002.msgpack"
        write_tree(folder / file, {name: flat[name] for name in names})
        places |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps(change({"metadata": {}, "weight_map": places})))


def test_shards_of_a_flax_checkpoint_are_joined(gpt2):
    folder, model, variables = gpt2
    write_shards(folder)
    assert_loads(folder, model, variables)


def test_chunked_arrays_of_flax_checkpoint_are_joined(gpt2, monkeypatch):
    """Flax stores an array of more than 1 GiB in chunks; here, of more than 100 bytes."""
    folder, model, variables = gpt2
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 100)
    write_tree(folder / WEIGHTS, tree())
    assert b"__msgpack_chunked_array__" in (folder / WEIGHTS).read_bytes()
    assert_loads(folder, model, variables)


def test_bfloat16_arrays_of_flax_checkpoint_keep_their_values(gpt2):
    folder, _, variables = gpt2
    write_tree(folder / WEIGHTS, {name: x.astype(jnp.bfloat16) for name, x in tree().items()})
    found = jf.load(folder)
    assert found.model.checkpoint_dtype == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), variables)
    jax.tree.map(np.testing.assert_array_equal, found.variables, rounded)
    loaded = jf.load(folder, dtype="bfloat16").variables
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {jnp.dtype("bfloat16")}
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)


def test_flax_weights_in_a_safetensors_file_are_read(gpt2):
    """`save_pretrained(safe_serialization=True)` of a Flax class names them with dots."""
    folder, model, variables = gpt2
    (folder / WEIGHTS).unlink()
    arrays = {name.replace("/", "."): np.ascontiguousarray(x) for name, x in tree().items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "flax"})
    assert_loads(folder, model, variables)


def test_pytorch_safetensors_are_preferred_to_flax_weights(tmp_path):
    model, variables = foreign.write(tmp_path / "one", "gpt2")
    shutil.copytree(tmp_path / "one", tmp_path / "several")
    foreign.shards(tmp_path / "several")
    for name in ("one", "several"):
        (tmp_path / name / WEIGHTS).write_bytes(b"damaged")
        assert_loads(tmp_path / name, model, variables)


def test_flax_weights_are_preferred_to_pytorch_pickle(gpt2):
    folder, model, variables = gpt2
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    assert_loads(folder, model, variables)


def test_a_flax_checkpoint_is_imported_on_the_command_line(gpt2, tmp_path, capsys):
    folder, model, variables = gpt2
    assert main(["import", str(folder), str(tmp_path / "saved")]) == 0
    said = capsys.readouterr().out
    assert "GPT2LMHeadModel" in said and "transformers 5 does not read Flax weights" in said
    assert_loads(tmp_path / "saved", model, variables)


@pytest.mark.parametrize("safetensors", ["model.safetensors", "adapter_model.safetensors", None])
def test_flax_weights_are_downloaded_only_if_safetensors_are_absent(
    gpt2, safetensors, tmp_path, monkeypatch
):
    """The file of an adapter is not the model's."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    remote, model, variables = gpt2
    if safetensors:
        shutil.copy(foreign.made("gpt2")[0] / "model.safetensors", remote / safetensors)
    local = tmp_path / "cache"
    local.mkdir()

    def snapshot_download(name, allow_patterns):
        for pattern in allow_patterns:
            for file in remote.glob(pattern):
                shutil.copy(file, local)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = jf.load("someone/gpt2")
    jax.tree.map(np.testing.assert_array_equal, found.variables, variables)
    assert (local / WEIGHTS).exists() == (safetensors != "model.safetensors")
    assert found.model.config == model.config


# ---- malformed files


def edit(**changes):
    """Returns a function that changes arrays of the tree. The value None removes an array."""

    def change(folder):
        flat = tree() | {name.replace("__", "/"): x for name, x in changes.items()}
        write_tree(folder / WEIGHTS, {name: x for name, x in flat.items() if x is not None})

    return change


def pack(content):
    """Returns a function that writes any content in place of the tree."""

    def change(folder):
        data = msgpack.packb(content, default=serialization._msgpack_ext_pack)
        (folder / WEIGHTS).write_bytes(data)

    return change


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def append(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"\0")


def extension(shape, dtype, data):
    return msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))


def link_away(folder):
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    (folder / WEIGHTS).symlink_to(folder.parent / WEIGHTS)


def shard_places(change):
    def edit_index(index):
        index["weight_map"] = {name: change(file) for name, file in index["weight_map"].items()}
        return index

    return lambda folder: write_shards(folder, edit_index)


X = np.ones(3, np.float32)
CHUNKED = {"__msgpack_chunked_array__": True}
KERNEL = "transformer__h__0__mlp__c_fc__kernel"
NO_TREE = [WEIGHTS, "is not a tree of arrays"]
# Fault: (function that damages the folder, words that the message must contain).
BROKEN = {
    "cut": (cut, NO_TREE),
    "longer": (append, NO_TREE),
    "empty": (lambda folder: (folder / WEIGHTS).write_bytes(b""), NO_TREE),
    "text": (lambda folder: (folder / WEIGHTS).write_text("weights"), NO_TREE),
    "no arrays": (pack({"transformer": {}}), [WEIGHTS, "no arrays"]),
    "an array at the top": (pack(X), NO_TREE),
    "a list at the top": (pack([X]), NO_TREE),
    "a list": (pack({"a": {"b": [X]}}), [WEIGHTS, "a/b is of type list"]),
    "nothing": (pack({"a": None}), [WEIGHTS, "a is of type NoneType"]),
    "a float": (pack({"a": 0.5}), [WEIGHTS, "a is of type float"]),
    "a number": (pack({"a": {"b": 5}}), [WEIGHTS, "a/b is of type int"]),
    "a text": (pack({"a": "text"}), [WEIGHTS, "a is of type str"]),
    "a scalar": (pack({"a": np.float32(1)}), [WEIGHTS, "a is of type float32"]),
    "a complex number": (pack({"a": 1j}), [WEIGHTS, "a is of type complex"]),
    "a key that is a number": (pack({3: X}), NO_TREE),
    "a path twice": (pack({"a/b": X, "a": {"b": X}}), [WEIGHTS, "the path a/b"]),
    "very deep": (
        lambda folder: (folder / WEIGHTS).write_bytes(b"\x81\xa1a" * 100_000),
        NO_TREE,
    ),
    "integers": (pack({"a": np.arange(3)}), [WEIGHTS, "a has dtype int64", "bfloat16"]),
    "an unknown dtype": (pack({"a": extension((1,), "object", b"1")}), NO_TREE),
    "two dtypes in one": (
        pack({"a": extension((1,), "float32,float32", b"12345678")}),
        [WEIGHTS, "a has dtype"],
    ),
    "another number of bytes": (pack({"a": extension((3,), "float32", b"1234")}), NO_TREE),
    "an absurd size": (pack({"a": extension((2**62,), "float32", b"")}), NO_TREE),
    "bytes after the array": (
        pack({"a": msgpack.ExtType(1, msgpack.packb(((1,), "float32", b"1234")) + b"5")}),
        NO_TREE,
    ),
    "four parts of an array": (
        pack({"a": msgpack.ExtType(1, msgpack.packb(((1,), "float32", b"1234", 5)))}),
        NO_TREE,
    ),
    "chunks of another size": (
        pack({"a": CHUNKED | {"shape": {"0": 4}, "chunks": {"0": X}}}),
        NO_TREE,
    ),
    "no chunks": (pack({"a": CHUNKED | {"shape": {"0": 0}, "chunks": {}}}), NO_TREE),
    "chunks without a shape": (pack({"a": CHUNKED | {"chunks": {"0": X}}}), NO_TREE),
    "a missing array": (edit(transformer__ln_f__bias=None), ["transformer.ln_f.bias", "missing"]),
    "an unknown array": (edit(transformer__extra__kernel=X), ["transformer.extra", "unknown"]),
    "another shape": (edit(transformer__ln_f__bias=X), [WEIGHTS, "ln_f/bias", "(3,)", "(16,)"]),
    "a transposed kernel": (
        lambda folder: edit(**{KERNEL: tree()[KERNEL.replace("__", "/")].T})(folder),
        [WEIGHTS, "c_fc/kernel is (16, 12); config.json requires (12, 16)"],
    ),
    "a tensor under two names": (
        edit(transformer__ln_f__kernel=X),
        [WEIGHTS, "transformer/ln_f/kernel", "transformer/ln_f/scale", "the same tensor"],
    ),
    "a link out of the folder": (link_away, [WEIGHTS, "link"]),
    "a shard outside": (shard_places(lambda file: f"../{file}"), [INDEX, "../"]),
    "a missing shard": (shard_places(lambda file: f"x{file}"), [INDEX, "does not exist"]),
    "a shard of another format": (
        shard_places(lambda file: "config.json"),
        [INDEX, "config.json", "must be the name"],
    ),
    "an array in another shard": (
        shard_places(lambda file: file.replace("00001-", "00002-")),
        [INDEX, "this index is wrong"],
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_malformed_flax_checkpoint_is_refused(fault, gpt2, tmp_path, capsys):
    folder = gpt2[0]
    change, words = BROKEN[fault]
    change(folder)
    assert main(["import", str(folder), str(tmp_path / "saved")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said
    assert not (tmp_path / "saved").exists()


def test_error_names_unsupported_transformers_class(gpt2):
    folder = gpt2[0]
    foreign.options(folder, architectures=["GPT2ForTokenClassification"])
    said = error_of(lambda: jf.load(folder))
    assert "GPT2ForTokenClassification" in said and "GPT2LMHeadModel" in said
    foreign.options(folder, model_type="gptj")
    said = error_of(lambda: jf.load(folder))
    assert "'gptj'" in said and "gpt2" in said


def test_flax_weights_of_family_without_flax_classes_are_rejected(tmp_path):
    foreign.write(tmp_path / "model", "qwen2")
    write_tree(tmp_path / "model" / WEIGHTS, flat_tree(tmp_path / "model", "llama"))
    said = error_of(lambda: jf.load(tmp_path / "model"))
    assert WEIGHTS in said and "'qwen2'" in said and "llama" in said


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file with two arrays, one of them in chunks, and its bytes."""
    path = tmp_path_factory.mktemp("small") / WEIGHTS
    chunked = CHUNKED | {"shape": {"0": 2, "1": 3}, "chunks": {"0": X, "1": X}}
    pack({"a": {"kernel": X}, "b": chunked})(path.parent)
    assert set(read_tree(path)) == {"a/kernel", "b"}
    return path, path.read_bytes()


def test_flax_weights_truncated_at_any_byte_are_rejected(small):
    path, whole = small
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert str(path) in error_of(lambda: read_tree(path))


@given(place=st.integers(0, 200), byte=st.integers(0, 255))
def test_flax_file_with_a_changed_byte_loads_or_raises_error_with_path(small, place, byte):
    path, whole = small
    place %= len(whole)
    path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        for array in read_tree(path).values():
            assert array.mapped().shape == array.shape
    except ValueError as error:
        assert str(path) in str(error)
