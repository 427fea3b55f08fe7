"""Saved and exported folders are read unchanged, for every model class."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import jaxformer as jf
from jaxformer.artifacts import tensors
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.cli import main
from jaxformer.hub.tokenizers.files import read_tokenizer
from tests.hub import foreign
from tests.hub.configs import base
from tests.properties import tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

KINDS = {**MODELS, "encoder": {"kind": jf.EncoderConfig, "window": (2, None), "num_labels": 3}}
EXPORTED = {
    "gpt2": {"num_kv_heads": 4},
    "llama": {
        "norm": "rms",
        "activation": "swiglu",
        "positions": "rotary",
        "use_bias": False,
        "rotary_scaling": jf.RotaryScaling("llama3", 8.0, 64),
    },
    "gpt_neox": {"parallel_block": "separate_norms", "positions": "rotary", "num_kv_heads": 4},
    "distilbert": {
        "kind": jf.EncoderConfig,
        "norm_position": "post",
        "embedding_norm": True,
        "head_bias": True,
        "pooler": False,
        "norm_epsilon": 1e-12,
        "num_kv_heads": 4,
        "activation": "gelu",
    },
    "marian": {
        "kind": jf.EncoderDecoderConfig,
        "norm_position": "post",
        "positions": "sinusoidal_halves",
        "head_bias": True,
        "num_kv_heads": 4,
    },
}
FULL = {"embed_dim": 16, "num_heads": 4, "head_dim": 4}


@pytest.mark.parametrize("name", mostly_slow(KINDS, "dilated cnn", "encoder"))
def test_saved_model_and_tokenizer_load_unchanged(name, tmp_path):
    """Config, parameters and tokenizer are equal bit for bit, for every kind of model."""
    model = tiny.build(**KINDS[name])
    variables = tiny.weights(model, 0)
    jf.save(tmp_path / "saved", model, variables, foreign.tokenizer())
    found = jf.load(tmp_path / "saved")
    assert found.model.config == model.config and type(found.model) is type(model)
    jax.tree.map(np.testing.assert_array_equal, found.variables, variables)
    assert found.tokenizer.fingerprint == foreign.tokenizer().fingerprint
    with pytest.raises(ValueError, match="already exists"):
        jf.save(tmp_path / "saved", model, variables)


@pytest.mark.parametrize("family", mostly_slow(EXPORTED, "gpt_neox", "marian"))
def test_exported_model_loads_with_equal_logits(family, tmp_path, monkeypatch):
    """A model is loaded from transformers' names and layouts, in a single file and in shards."""
    model = tiny.build(**FULL | EXPORTED[family])
    variables = tiny.weights(model, 0)
    jf.export(tmp_path / "one", model, variables, model_type=family)
    monkeypatch.setattr(tensors, "_LARGEST_FILE", 1000)
    jf.export(tmp_path / "many", model, variables, model_type=family)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    for folder in ("one", "many"):
        found = jf.load(tmp_path / folder)
        assert found.model.config == model.config and found.tokenizer is None
        jax.tree.map(np.testing.assert_array_equal, found.variables, variables)


def test_load_rejects_stored_sinusoidal_positions_of_wrong_length(tmp_path):
    """transformers refuses such a folder of PEGASUS since 5.24."""
    model = jf.build(base("pegasus"))
    jf.export(tmp_path / "out", model, tiny.weights(model, 0), model_type="pegasus")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 10**9}))
    with pytest.raises(ValueError, match=r"embed_positions.*config.json requires .1000000000,"):
        jf.load(tmp_path / "out")


TABLES = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]


@pytest.mark.parametrize("family", ["pegasus", "marian"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_position_table_must_equal_computed_table(family, dtype, tmp_path):
    """transformers computes with the stored table. Its rounding to bfloat16 is accepted."""
    model = jf.build(base(family))
    jf.export(tmp_path / "out", model, tiny.weights(model, 0), model_type=family, dtype=dtype)
    length, dim = model.config.max_length, model.config.embed_dim
    angles = np.outer(np.arange(length), 10_000.0 ** (-np.arange(0, dim, 2) / dim))
    right = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(jnp.dtype(dtype))

    def put(table):
        foreign.tensors(tmp_path / "out", lambda x: x | dict.fromkeys(TABLES, table))

    put(right)
    jf.load(tmp_path / "out")
    for other in (np.roll(right, 1, axis=0), right * np.nan, right[:, ::-1].copy()):
        put(other.astype(right.dtype))
        with pytest.raises(ValueError, match=r"embed_positions.weight differs by .* from the"):
            jf.load(tmp_path / "out")


def test_load_rejects_unequal_copies_of_a_tied_tensor(tmp_path):
    model = jf.build(base("bert"))
    jf.export(tmp_path / "out", model, tiny.weights(model, 0), model_type="bert")

    def put(change):
        name = "cls.predictions.decoder.bias"
        foreign.tensors(
            tmp_path / "out", lambda x: x | {name: x["cls.predictions.bias"] + np.float32(change)}
        )

    put(0)
    jf.load(tmp_path / "out")
    put(1)
    with pytest.raises(ValueError, match=r"decoder.bias must equal cls.predictions.bias"):
        jf.load(tmp_path / "out")


@pytest.mark.slow
def test_load_applies_a_dtype_a_kernel_format_and_execution_options(tmp_path):
    """`load` accepts bfloat16, integer kernels and an execution, and rejects invalid values."""
    model, variables = foreign.write(tmp_path / "model", "gpt2")
    half = jf.load(tmp_path / "model", dtype="bfloat16")
    assert half.model.config.dtype == "bfloat16"
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)),
        half.variables,
        variables,
    )
    small = jf.load(tmp_path / "model", kernels="int8", execution=jf.Execution(layers="scan"))
    assert small.model.execution.layers == "scan"
    tokens = tiny.tokens(0, 1, 9)
    exact = np.asarray(model.apply(variables, tokens))
    off = np.abs(np.asarray(small.model.apply(small.variables, tokens)) - exact).max()
    assert 0 < off < 0.1 * exact.std()
    with pytest.raises(ValueError, match="dtype is 'float16'"):
        jf.load(tmp_path / "model", dtype="float16")
    with pytest.raises(ValueError, match="kernels is 'int4'"):
        jf.load(tmp_path / "model", kernels="int4")


def test_model_without_transformers_class_is_rejected(tmp_path):
    model = tiny.build(**FULL, num_kv_heads=4, positions="alibi")
    with pytest.raises(ValueError, match="closest is gpt_neox: positions is 'alibi' in jaxformer"):
        jf.export(tmp_path / "out", model, tiny.weights(model, 0))
    model = tiny.build(kind=jf.RecurrentConfig)
    with pytest.raises(ValueError, match="no counterpart of a RecurrentConfig"):
        jf.export(tmp_path / "out", model, tiny.weights(model, 0))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_commands_accept_exported_folders_as_models(tmp_path, capsys):
    """Repeated export and import give folders that generate the same text."""
    foreign.write(tmp_path / "theirs", "gpt2")
    said = []
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    assert "gpt2 (GPT2LMHeadModel); class in jaxformer: Decoder" in capsys.readouterr().out
    for folder in ("theirs", "ours", "again"):
        prompt = ["--prompt", "the tide", "--max-new-tokens", "6", "--temperature", "0"]
        assert main(["generate", str(tmp_path / folder), *prompt]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] and said[0].startswith("the tide")
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    assert content["model_type"] == "gpt2" and content["eos_token_id"] == 0


# ---- tokenizers other than byte-level BPE

CORPUS = ["the tide came in twice, and the clocks had stopped; nobody knew why.", "It's don't é 猫"]


def wordpiece():
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(special_tokens=special))
    template = {"single": "[CLS] $A [SEP]", "special_tokens": [("[CLS]", 2), ("[SEP]", 3)]}
    backend.post_processor = processors.TemplateProcessing(**template)
    return backend, [2], [3]


def unigram():
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return backend, [], [1]


def byte_fallback():
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({letter for text in CORPUS[:1] for letter in text.replace(" ", "▁")})
    vocabulary = {word: number for number, word in enumerate([*words, *letters, "▁t", "he"])}
    merges = [("▁", "t"), ("h", "e")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend, [1], []


BACKENDS = {"wordpiece": wordpiece, "unigram": unigram, "byte fallback": byte_fallback}


@pytest.fixture(params=BACKENDS, scope="module")
def subwords(request, tmp_path_factory):
    """Returns (tokenizer read from its file, the library's own, ids before and after a text)."""
    backend, before, after = BACKENDS[request.param]()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return Subwords.load(path, SpecialTokens((1,))), backend, before, after


def test_token_ids_and_template_tokens_equal_tokenizers_library(subwords):
    """Without the template, and with it for a source. A spelled-out special token is plain text."""
    tokenizer, backend, before, after = subwords
    for text in (*CORPUS, "", "  two  spaces ", "zzz 猫 é"):
        plain = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == plain
        assert tokenizer.encode_source(text) == [*before, *plain, *after]
    assert (tokenizer.before, tokenizer.after) == (before, after)
    special = [*before, *after][0]
    name = backend.id_to_token(special)
    assert special not in tokenizer.encode(f"the {name} tide")


@given(data=st.data())
def test_streamed_text_of_imported_model_equals_whole_text(subwords, data):
    """For ids pushed one by one or in groups, it returns the text that `decode` returns."""
    tokenizer, *_ = subwords
    # A model may have unused ids.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=20))
    groups, stream, given = (
        data.draw(st.lists(st.integers(1, 4), max_size=20)),
        tokenizer.stream(),
        "",
    )
    begin = 0
    for size in [*groups, len(ids)]:
        given += stream.push(ids[begin : begin + size])
        begin += size
    assert given + stream.flush() == tokenizer.decode(ids)


def test_older_vocabulary_files_are_converted_to_tokenizer_json(tmp_path):
    """vocab.txt is read, and vocab.json with merges.txt for GPT-2.

    Another model may read those differently. A sentencepiece model is refused; the message says how
    to convert it.
    """
    backend, *_ = wordpiece()
    words = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    ids = read_tokenizer(tmp_path).encode("The tide")
    assert ids == backend.encode("The tide", add_special_tokens=False).ids
    (tmp_path / "vocab.txt").unlink()
    ours = foreign.tokenizer()
    model = json.loads(ours.to_json())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [x if isinstance(x, str) else " ".join(x) for x in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    text = "the tide came in twice"
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert read_tokenizer(tmp_path).encode(text) == ours.encode(text)
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(ValueError, match="only for GPT-2"):
        read_tokenizer(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink()
    (tmp_path / "spiece.model").write_bytes(b"\x0a")
    with pytest.raises(ValueError, match=r"spiece\.model has an unsupported format"):
        read_tokenizer(tmp_path)
