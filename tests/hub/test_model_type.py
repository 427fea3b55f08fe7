"""A model remembers the family that it came from, and export prefers that family."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxformer as jf
from jaxformer.artifacts.checkpoint import CheckpointWriter
from jaxformer.artifacts.run import Origin, RunFolder
from jaxformer.artifacts.tensors import compute_digest
from jaxformer.cli import main
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.peft import export_adapter
from jaxformer.models.config import architecture_name
from jaxformer.models.config.lora import LoraConfig
from tests.hub import foreign
from tests.hub.adapters import learnt
from tests.hub.configs import base
from tests.properties import tiny
from tests.slow import mostly_slow


def write(folder, family: str, tokenizer=None):
    """Writes a folder of the family."""
    vocab_size = 61 if tokenizer is None else tokenizer.vocab_size
    model = jf.build(replace(base(family), vocab_size=vocab_size))
    return jf.export(folder, model, tiny.weights(model, 0), tokenizer, model_type=family)


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "phi3"))
def test_imported_model_is_exported_as_its_original_family(family, tmp_path):
    """Exports before and after saving in jaxformer's format have the original class and tensors."""
    name = write(tmp_path / "theirs", family)
    model, variables, _ = jf.load(tmp_path / "theirs")
    jf.save(tmp_path / "ours", model, variables)
    for source in ("theirs", "ours"):
        out = tmp_path / f"again-{source}"
        assert jf.export(out, *jf.load(tmp_path / source)) == name
        content = json.loads((out / "config.json").read_text())
        assert content["model_type"] == family
        before, after = (load_file(x / "model.safetensors") for x in (tmp_path / "theirs", out))
        assert before.keys() == after.keys()
        for tensor in before:
            np.testing.assert_array_equal(before[tensor], after[tensor])


def full_run(source, folder):
    """Writes a run that trained all weights of the model in `source`."""
    model, variables, tokenizer = jf.load(source)
    run = RunFolder(folder)
    run.path.mkdir()
    tokenizer.save(run.tokenizer)
    origin = Origin(source, compute_digest(variables["params"]), model.model_type)
    run.write_config(
        {"kind": architecture_name(model.config), "model": model.config} | origin.sections()
    )
    with CheckpointWriter(run.checkpoints) as writer:
        writer.save(1, variables["params"], {"key": jnp.zeros(1)}, {})


def adapter_run(source, folder):
    """Writes a run that trained an adapter of the model in `source`."""
    learnt(source, LoraConfig(lora_rank=2), folder)


@pytest.mark.slow
@pytest.mark.parametrize("make", [full_run, adapter_run])
def test_run_stores_the_original_model_family(make, tmp_path, capsys):
    """Exports of a run, in Python and by command, of model and adapter, use its original family."""
    write(tmp_path / "theirs", "phi3", foreign.tokenizer())
    make(tmp_path / "theirs", tmp_path / "run")
    checkpoint = jf.load(tmp_path / "run")
    assert checkpoint.model.model_type == "phi3"
    assert jf.export(tmp_path / "out", *checkpoint) == "Phi3ForCausalLM"
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "cli")]) == 0
    assert "transformers.Phi3ForCausalLM" in capsys.readouterr().out
    if make is adapter_run:
        assert export_adapter(tmp_path / "adapter", tmp_path / "run") == "Phi3ForCausalLM"


def test_export_uses_another_family_if_model_type_cannot_represent_the_model(tmp_path):
    """Another family is used, too, if the model_type is unknown, as from a later version."""
    config = base("phi3")
    biased = replace(config, query_key_value_bias=True)
    for changed, family, name in (
        (biased, "phi3", "Qwen2ForCausalLM"),
        (config, "of a later version", "LlamaForCausalLM"),
        (config, None, "LlamaForCausalLM"),
    ):
        model = jf.build(changed, model_type=family)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert jf.export(tmp_path / "out", model, tiny.weights(model, 0)) == name


def test_models_that_differ_only_in_model_type_are_equal():
    """Equal models share compiled functions, which are cached by model."""
    models = [jf.build(base("phi3"), model_type=family) for family in (None, "phi3")]
    assert models[0] == models[1] and hash(models[0]) == hash(models[1])
    assert models[1].clone().model_type == "phi3"


def test_invalid_model_type_is_rejected(tmp_path):
    write(tmp_path / "theirs", "phi3")
    model, variables, _ = jf.load(tmp_path / "theirs")
    jf.save(tmp_path / "ours", model, variables)
    foreign.options(tmp_path / "ours", model_type=3)
    with pytest.raises(ValueError, match=r"config\.json: model_type is 3"):
        jf.load(tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "family", "message"),
    [
        (jf.RecurrentConfig, None, "transformers has no counterpart of a RecurrentConfig"),
        (jf.ConvolutionalConfig, None, "transformers has no counterpart of a ConvolutionalConfig"),
        (
            jf.ConvolutionalConfig,
            "gpt2",
            "transformers has no counterpart of a ConvolutionalConfig",
        ),
        (
            jf.EncoderDecoderConfig,
            "bert",
            "model_type is 'bert', but this family has no models with EncoderDecoderConfig",
        ),
        (jf.DecoderConfig, "mamba", "model_type is 'mamba'; it must be one of gpt2"),
    ],
)
def test_export_error_for_model_without_a_family_is_one_line(kind, family, message, tmp_path):
    """The message does not suggest a family, because none has this config class."""
    model = tiny.build(kind=kind)
    with pytest.raises(ValueError, match=message) as error:
        jf.export(tmp_path / "out", model, tiny.weights(model, 0), model_type=family)
    assert "nearest" not in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_delta_rule_projections_are_interleaved_by_key_head(tmp_path):
    """A file has, for each key head, its query, key, values and gates; rates, then decays."""
    sizes = {"delta_key_heads": 2, "delta_value_heads": 4, "delta_key_dim": 3, "delta_value_dim": 5}
    options = FAMILIES["qwen3_next"].fixed | sizes | {"num_experts": 2, "shared_expert_dim": 6}
    model = tiny.build(**options, layer_types=("gated_delta", "attention"), num_heads=8)
    variables = tiny.weights(model, 0)
    assert jf.export(tmp_path / "out", model, variables) == "Qwen3NextForCausalLM"
    written = load_file(tmp_path / "out" / "model.safetensors")
    blocks = variables["params"]["blocks"]
    delta, attention = blocks["0"]["gated_delta"], blocks["1"]["attention"]

    def head(maps, name, number, width):
        return maps[name]["kernel"][0].T[number * width : (number + 1) * width]

    joined, both = (
        written[f"model.layers.0.linear_attn.{name}.weight"]
        for name in ("in_proj_qkvz", "in_proj_ba")
    )
    widths = {"query": 3, "key": 3, "value": 10, "gate": 10}
    parts = [head(delta, name, 1, width) for name, width in widths.items()]
    np.testing.assert_array_equal(joined[26:], np.concatenate(parts))
    parts = [head(delta, name, 1, 2) for name in ("rate", "decay")]
    np.testing.assert_array_equal(both[4:], np.concatenate(parts))
    joined = written["model.layers.1.self_attn.q_proj.weight"]
    parts = [head(attention, name, 7, 4) for name in ("query", "gate")]
    np.testing.assert_array_equal(joined[7 * 8 :], np.concatenate(parts))
    # Published files also have layers for multi-token prediction, which the class does not read.
    foreign.tensors(tmp_path / "out", lambda arrays: arrays | {"mtp.norm.weight": np.ones(8)})
    loaded = jf.load(tmp_path / "out").variables
    jax.tree.map(np.testing.assert_array_equal, loaded, variables)


def test_exported_tensors_of_mixed_layer_types_are_numbered_by_depth(tmp_path):
    """Weights of layers of one type are stacked; their tensors have the numbers of the layers."""
    types = ("short_convolution", "short_convolution", "attention")
    options = FAMILIES["lfm2"].fixed | {"num_layers": 5, "layer_types": types}
    model = tiny.build(**options)
    variables = tiny.weights(model, 0)
    assert jf.export(tmp_path / "out", model, variables) == "Lfm2ForCausalLM"
    written = load_file(tmp_path / "out" / "model.safetensors")
    for layer, kind in enumerate((*types, *types[:2])):
        name = "self_attn.q_proj" if kind == "attention" else "conv.in_proj"
        assert f"model.layers.{layer}.{name}.weight" in written
    blocks = variables["params"]["blocks"]["0"]["short_convolution"]
    filters = [written[f"model.layers.{layer}.conv.conv.weight"][:, 0].T for layer in (0, 1, 3, 4)]
    np.testing.assert_array_equal(filters, blocks["convolution"]["filter"])
    loaded = jf.load(tmp_path / "out").variables
    jax.tree.map(np.testing.assert_array_equal, loaded, variables)
