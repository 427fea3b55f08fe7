"""Small folders in Hugging Face's format, written by `jf.export`, and functions to damage them."""

import atexit
import json
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from tests.properties import tiny

TEXT = ["the tide came in twice that morning, and nobody knew why", "a bright cold day"]
LLAMA = {
    "activation": "swiglu",
    "norm": "rms",
    "positions": "rotary",
    "use_bias": False,
    "tie_embeddings": False,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "embed_dim": 16,
    "window": (5, None),
}
GPT2 = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 4, "embed_dim": 16}
MODELS = {"gpt2": GPT2, "qwen2": LLAMA | {"query_key_value_bias": True}}


@cache
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer.train(TEXT * 3, 280)


@cache
def made(family: str) -> tuple:
    """Returns (folder, model, variables); the folder is created once per family."""
    folder = Path(tempfile.mkdtemp()) / family
    size = {"vocab_size": tokenizer().vocab_size, "max_length": 32}
    model = tiny.build(**{**size, **MODELS[family]})
    variables = tiny.weights(model, 0)
    jf.export(folder, model, variables, tokenizer(), model_type=family)
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    return folder, model, variables


def write(folder: Path, family: str) -> tuple:
    """Copies the family's folder to `folder` and returns (model, variables)."""
    source, model, variables = made(family)
    shutil.copytree(source, folder)
    return model, variables


def options(folder: Path, **changes):
    """Changes options of config.json. The value None removes an option."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    left = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(left))


def header(folder: Path, change, data=lambda data: data):
    """Rewrites the header of model.safetensors (a dict or bytes) and the data after it."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    changed = change(json.loads(whole[8 : 8 + length]))
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data(whole[8 + length :]))


def tensors(folder: Path, change):
    """Rewrites the tensors, which `change` gets by name."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    arrays = {name: np.array(array) for name, array in load_file(path).items()}
    save_file(change(arrays) or arrays, path)


def shards(folder: Path, change=lambda index: index):
    """Splits model.safetensors into two files with an index."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    arrays, places = load_file(path), {}
    path.unlink()
    for number, names in enumerate((sorted(arrays)[::2], sorted(arrays)[1::2]), 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({x: arrays[x] for x in names}, folder / name)
        places |= dict.fromkeys(names, name)
    index = change({"metadata": {}, "weight_map": places})
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
