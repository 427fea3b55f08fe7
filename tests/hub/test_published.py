"""Options in the config.json of published checkpoints are all known and set the right fields."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxformer as jf
from jaxformer.hub.families import FAMILIES, t5
from jaxformer.hub.huggingface import find_format
from jaxformer.hub.options import Options
from tests.hub import foreign
from tests.hub.configs import base

BERT = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "position_embedding_type": "absolute",
    "gradient_checkpointing": False,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "vocab_size": 30522,
}
BART = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "num_hidden_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "max_position_embeddings": 1024,
    "vocab_size": 50264,
    "normalize_embedding": True,
    "normalize_before": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
    "static_position_embeddings": False,
    "scale_embedding": False,
    "_num_labels": 3,
    "force_bos_token_to_be_generated": True,
    "classif_dropout": 0.0,
    "no_repeat_ngram_size": 3,
}
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
GEMMA2 = LLAMA | {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 16, "head_dim": 16}

# (model_type, class): (options, fields that they set)
PUBLISHED = {
    ("gpt2", "GPT2LMHeadModel"): (
        {
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
            "predict_special_tokens": True,
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": True}},
        },
        {"max_length": 1024, "activation": "gelu_tanh"},
    ),
    ("bert", "BertForMaskedLM"): (BERT, {"norm_epsilon": 1e-12, "num_token_types": 2}),
    ("bart", "BartForConditionalGeneration"): (BART, {"position_offset": 2, "head_bias": True}),
    ("bart", "BartModel"): (BART, {"head_bias": False}),
    ("mistral", "MistralForCausalLM"): (LLAMA, {"window": 4096}),
    ("mistral", "MistralForCausalLM", "v0.3"): (LLAMA | {"sliding_window": None}, {"window": None}),
    ("llama", "LlamaForCausalLM"): (
        LLAMA
        | {
            "max_position_embeddings": 131072,
            "is_llama_config": True,
            "rope_interleaved_": None,
            "transformers.js_config": {"dtype": "q4"},
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        {"rotary_base": 500000.0, "rotary_scaling": jf.RotaryScaling("llama3", 8.0, 8192)},
    ),
    ("olmo3", "Olmo3ForCausalLM"): (
        LLAMA
        | {
            "attention_bias": False,
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
        },
        {
            "norm_position": "post_sublayer",
            "query_key_norm": "all",
            "rotary_base": 500000.0,
            "window": (4096, None),
        },
    ),
    ("mixtral", "MixtralForCausalLM"): (
        LLAMA
        | {
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        {"num_experts": 8, "expert_dim": 128, "normalize_router": True, "window": None},
    ),
    ("olmoe", "OlmoeForCausalLM"): (
        LLAMA
        | {
            "attention_bias": False,
            "clip_qkv": None,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
        },
        {"num_experts": 64, "experts_per_token": 8, "normalize_router": False},
    ),
    ("qwen3_moe", "Qwen3MoeForCausalLM"): (
        LLAMA
        | {
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"num_experts": 128, "expert_dim": 768, "normalize_router": True, "window": None},
    ),
    ("qwen3_next", "Qwen3NextForCausalLM"): (
        LLAMA
        | {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "full_attention_interval": 4,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 4,
            "output_router_logits": False,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        {
            "layer_types": (*["gated_delta"] * 3, "attention"),
            "delta_sizes": (16, 32, 128, 128),
            "convolution_kernel_size": 4,
            "rotary_fraction": 0.25,
            "num_experts": 512,
            "shared_expert_dim": 512,
        },
    ),
    ("gpt_oss", "GptOssForCausalLM"): (
        {
            "attention_bias": True,
            "attention_dropout": 0.0,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "output_router_logits": False,
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
                "quant_method": "mxfp4",
            },
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        },
        {
            "num_experts": 32,
            "expert_dim": 2880,
            "window": (128, None),
            "attention_sinks": True,
            "rotary_scaling": jf.RotaryScaling("yarn", 32.0, 4096, whole_pairs=False),
        },
    ),
    ("gpt_oss", "GptOssForCausalLM", "defaults"): (
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_hidden_layers": 4,
            "vocab_size": 201088,
        },
        {
            "num_kv_heads": 8,
            "head_dim": 64,
            "num_experts": 128,
            "window": (128, None),
            "rotary_base": 150000.0,
            "rotary_scaling": jf.RotaryScaling("yarn", 32.0, 4096, whole_pairs=False),
            "query_key_value_bias": True,
        },
    ),
    ("lfm2", "Lfm2ForCausalLM"): (
        {
            "block_auto_adjust_ff_dim": True,
            "block_dim": 2048,
            "block_ff_dim": 12288,
            "block_ffn_dim_multiplier": 1.0,
            "block_mlp_init_scale": 1.0,
            "block_multiple_of": 256,
            "block_norm_eps": 1e-05,
            "block_use_swiglu": True,
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": 2048,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-05,
            "num_attention_heads": 32,
            "num_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rope_theta": 1000000.0,
            "use_pos_enc": True,
            "vocab_size": 65536,
        },
        {"mlp_dim": 8192, "convolution_kernel_size": 3, "query_key_norm": "head"},
    ),
    ("starcoder2", "Starcoder2ForCausalLM"): (
        {
            "attention_dropout": 0.1,
            "embedding_dropout": 0.1,
            "residual_dropout": 0.1,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "max_position_embeddings": 16384,
            "mlp_type": "default",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "num_attention_heads": 48,
            "num_hidden_layers": 40,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "use_bias": True,
            "vocab_size": 49152,
        },
        {"num_kv_heads": 4, "window": 4096, "rotary_base": 100000.0, "norm_bias": True},
    ),
    ("gemma", "GemmaForCausalLM"): (
        LLAMA | {"hidden_act": "gelu", "hidden_activation": None},
        {"activation": "geglu_tanh"},
    ),
    ("gemma2", "Gemma2ForCausalLM"): (GEMMA2, {"attention_softcap": 50.0, "logits_softcap": 30.0}),
    ("gemma2", "Gemma2ForCausalLM", "none"): (
        GEMMA2 | {"attn_logit_softcapping": None, "sliding_window_size": 16},
        {"attention_softcap": None, "logits_softcap": 30.0},
    ),
    ("modernbert", "ModernBertForMaskedLM"): (
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": 300,
            "norm_eps": 1e-05,
            "layer_norm_eps": 1e-05,
            "position_embedding_type": "absolute",
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "local_attention": 128,
            "classifier_bias": False,
            "decoder_bias": True,
        },
        {"window": (None, 64, 64), "rotary_base": (160000.0, 10000.0, 10000.0)},
    ),
}


@pytest.mark.filterwarnings("ignore:.*unknown to the class in transformers")
@pytest.mark.parametrize("name", PUBLISHED, ids="-".join)
def test_published_checkpoint_options_determine_the_config(name):
    model_type, architecture, *_ = name
    content, meant = PUBLISHED[name]
    content = {**content, "model_type": model_type, "architectures": [architecture]}
    options = Options(json.loads(json.dumps(content)), "config.json")
    config = find_format(options).to_config(options)
    assert {field: getattr(config, field) for field in meant} == meant


def test_contradictory_options_of_a_published_config_are_rejected():
    content = BART | {"num_hidden_layers": 6, "model_type": "bart"}
    options = Options(content, "config.json")
    with pytest.raises(ValueError, match="num_hidden_layers is 6"):
        find_format(options).to_config(options)


# Options of published files that the class in transformers does not read.
UNREAD = {
    "pegasus": {"extra_pos_embeddings": 0, "normalize_before": True},
    "marian": {"extra_pos_embeddings": 61950},
    "gpt2": {"author": "Heewon Jeon", "license": "CC-BY-NC-SA 4.0", "n_ctx": 512},
    "llama": {"max_sequence_length": 2048, "_flash_attn_2_enabled": True},
    "gpt_neox": {"custom_pipelines": {"text-generation": {"pt": "AutoModelForCausalLM"}}},
    "qwen3": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782}},
}


@pytest.mark.parametrize("name", UNREAD)
def test_options_unused_by_transformers_class_are_ignored_with_warning(name):
    content = FAMILIES[name].to_options(base(name))
    added = UNREAD[name]
    plain = {"rope_parameters": {**added["rope_parameters"]}} if name == "qwen3" else {}
    plain.get("rope_parameters", {}).pop("attn_factor", None)
    with pytest.warns(UserWarning) as caught:
        config = FAMILIES[name].to_config(Options(content | added, "config.json"))
    assert config == FAMILIES[name].to_config(Options(content | plain, "config.json"))
    (said,) = [str(warning.message) for warning in caught]
    named = (
        ["rope_parameters.attn_factor"]
        if name == "qwen3"
        else [key for key, value in added.items() if value]
    )
    assert all(key in said for key in named) and "\n" not in said


@pytest.mark.parametrize("option", ["pruned_heads", "quantization_config", "tie_encoder_decoder"])
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_unimplemented_options_of_transformers_class_are_rejected(name, option):
    content = FAMILIES[name].to_options(base(name)) | {option: {"0": [1]}}
    with pytest.raises(ValueError, match=option):
        FAMILIES[name].to_config(Options(content, "config.json"))


def test_weights_with_tensor_names_without_prefix_are_loaded(tmp_path):
    """The published file of GPT-2, for example, has tensor names without the prefix."""
    _, variables = foreign.write(tmp_path / "model", "gpt2")
    foreign.tensors(
        tmp_path / "model",
        lambda arrays: {name.removeprefix("transformer."): x for name, x in arrays.items()},
    )
    found = jf.load(tmp_path / "model").variables["params"]["final_norm"]["scale"]
    np.testing.assert_array_equal(found, variables["params"]["final_norm"]["scale"])


@pytest.mark.parametrize("is_beside", [True, False], ids=["beside", "alone"])
def test_tied_embeddings_may_be_stored_under_the_name_of_the_head(is_beside, tmp_path):
    """Files store a tied table twice, or only under the name of the head."""
    _, variables = foreign.write(tmp_path / "model", "gpt2")
    table = "transformer.wte.weight"

    def change(arrays):
        rest = {name: x for name, x in arrays.items() if is_beside or name != table}
        return rest | {"lm_head.weight": arrays[table]}

    foreign.tensors(tmp_path / "model", change)
    found = jf.load(tmp_path / "model").variables["params"]["embedding"]["tokens"]
    np.testing.assert_array_equal(found, variables["params"]["embedding"]["tokens"])


def test_mistral_export_rejects_model_with_windows_in_some_layers(tmp_path):
    """Mistral's class has windows in every layer, so export uses another family."""
    options = {**foreign.LLAMA, "num_layers": 2, "use_bias": False}
    model = foreign.tiny.build(**options)
    variables = foreign.tiny.weights(model, 0)
    assert jf.export(tmp_path / "out", model, variables) != "MistralForCausalLM"
    with pytest.raises(ValueError, match="window is"):
        jf.export(tmp_path / "no", model, variables, model_type="mistral")


@pytest.mark.parametrize(
    "said, length",
    [({}, 512), ({"n_positions": 256}, 256), ({"jaxformer_max_length": 9, "n_positions": 256}, 9)],
)
def test_max_length_of_imported_t5_defaults_to_512(said, length):
    """No table limits its positions, but a cache needs a length."""
    options = Options({"num_layers": 1, **said}, "config.json")
    assert t5.read(options)["max_length"] == length


@pytest.mark.parametrize("is_said_tied", [True, False])
@pytest.mark.parametrize("name", ["shared.weight", "decoder.embed_tokens.weight", None])
def test_t5_head_is_tied_only_if_the_file_has_one_embedding_table(name, is_said_tied):
    """If a file has a second table, the head has a separate kernel."""
    tensors = {"lm_head.weight"} | ({name} if name else set())
    content = {"num_layers": 1, "tie_word_embeddings": is_said_tied}
    found = t5.read(Options(content, "config.json", tensors=tensors))["tie_embeddings"]
    assert found == (name is None and is_said_tied)


def test_exported_dense_and_expert_layers_are_numbered_by_depth(tmp_path):
    """Layers of both kinds are stacked apart here, and a file numbers them along the depth."""
    config = FAMILIES["qwen2_moe"].fixed | {"num_layers": 4, "num_experts": (0, 3), "expert_dim": 6}
    config |= {"shared_expert_dim": 5, "query_key_value_bias": True}
    model = foreign.tiny.build(**config)
    variables = foreign.tiny.weights(model, 0)
    jf.export(tmp_path / "out", model, variables, model_type="qwen2_moe")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    blocks = variables["params"]["blocks"]
    name = "model.layers.{}.mlp.{}up_proj.weight"
    for place, layer in enumerate((0, 2)):
        dense = blocks["0"]["feedforward"]["up"]["kernel"][place]
        np.testing.assert_array_equal(tensors[name.format(layer, "")], dense.T)
        assert not any(x.startswith(f"model.layers.{layer}.mlp.experts") for x in tensors)
    for place, layer in enumerate((1, 3)):
        experts = blocks["1"]["feedforward"]["up"]["kernel"][place]
        for number, kernel in enumerate(experts):
            np.testing.assert_array_equal(
                tensors[name.format(layer, f"experts.{number}.")], kernel.T
            )
    found = jf.load(tmp_path / "out").variables
    jax.tree.map(np.testing.assert_array_equal, found, variables)
