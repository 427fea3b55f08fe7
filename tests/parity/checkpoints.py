"""Random tiny checkpoints of every family, created and saved by transformers."""

from copy import deepcopy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

VOCAB, LENGTH = 97, 512
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
WIDE = SIZES | {"hidden_size": 32}
GPT2 = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 640}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
DISTIL = {"dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 40, "vocab_size": VOCAB}
DISTIL |= {"max_position_embeddings": 640}
T5 = {"d_model": 24, "d_kv": 8, "num_layers": 2, "num_heads": 4}
T5 |= {"d_ff": 40, "vocab_size": VOCAB, "pad_token_id": 0, "decoder_start_token_id": 0}
BART = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
}
MARIAN = BART | {"decoder_vocab_size": VOCAB}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5}
# If a head's values are small, the norm of the head enlarges rounding errors by up to 1/√ε.
DELTA |= {"rms_norm_eps": 0.01}
LINEAR_ATTENTION = "linear_attention"
LOCAL, GLOBAL, CONV = "sliding_attention", "full_attention", "conv"


def turns(rope_type="default", base=500.0, **more):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": base, **more}}


LINEAR = turns("linear", factor=4.0)
DYNAMIC = turns("dynamic", factor=2.0)
YARN = turns("yarn", factor=4.0, original_max_position_embeddings=64)
YARN_BY_HAND = turns(
    "yarn",
    factor=8.0,
    original_max_position_embeddings=128,
    attention_factor=0.9,
    beta_fast=16.0,
    beta_slow=2.0,
)
LLAMA3 = turns(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
GEMMA3_TURNS = {
    "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 100.0},
        GLOBAL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    }
}

# family: (config class, model class, options of all cases, further options of each case)
FAMILIES = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        GPT2,
        {},
        {"n_inner": 40, "tie_word_embeddings": False, "activation_function": "relu"},
        {"scale_attn_weights": False, "activation_function": "gelu", "layer_norm_epsilon": 1e-3},
        {"activation_function": "relu2"},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        WIDE,
        {},
        {"use_parallel_residual": False, **turns(partial_rotary_factor=0.5)},
        {"attention_bias": False, "tie_word_embeddings": True, **LINEAR},
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        GROUPED,
        LLAMA3,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, **YARN},
        {"num_key_value_heads": 4, **LINEAR},
        {"num_key_value_heads": 1, **DYNAMIC},
    ),
    "mistral": (
        "MistralConfig",
        "MistralForCausalLM",
        GROUPED,
        {"sliding_window": 50},
        {"sliding_window": None, "tie_word_embeddings": True},
        {"sliding_window": 7, **YARN_BY_HAND},
    ),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {key: value for key, value in GROUPED.items() if key != "head_dim"},
        {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 2},
        {"tie_word_embeddings": True},
        YARN,
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        GROUPED,
        {},
        {"attention_bias": True, "tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1, **YARN},
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        GROUPED | {"num_local_experts": 5},
        {"sliding_window": 50},
        {"num_experts_per_tok": 3, "tie_word_embeddings": True},
        {"num_experts_per_tok": 1, "num_local_experts": 2, **YARN_BY_HAND},
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {key: value for key, value in GROUPED.items() if key != "head_dim"}
        | {"num_experts": 5, "num_experts_per_tok": 3},
        {},
        {"norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True},
        {"num_experts_per_tok": 5, **LINEAR},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {key: value for key, value in GROUPED.items() if key != "head_dim"}
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        | {"shared_expert_intermediate_size": 28},
        {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 30},
        {"norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True},
        {"decoder_sparse_step": 2, **YARN},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        GROUPED | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        {"norm_topk_prob": True},
        {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 4},
        {"use_sliding_window": True, "sliding_window": 30, **YARN},
        {"mlp_only_layers": [0, 2]},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        GROUPED | DELTA | {"num_experts": 5, "num_experts_per_tok": 2} | {"num_hidden_layers": 4},
        {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28},
        {
            "layer_types": [LINEAR_ATTENTION, GLOBAL, GLOBAL, LINEAR_ATTENTION],
            "mlp_only_layers": [0, 1],
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
        },
        {
            "full_attention_interval": 2,
            "decoder_sparse_step": 2,
            "linear_conv_kernel_dim": 2,
            "linear_num_key_heads": 1,
            **turns("yarn", factor=4.0, original_max_position_embeddings=64),
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        GROUPED | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 30},
        {},
        {"attention_bias": False, "tie_word_embeddings": True, "num_experts_per_tok": 5, **YARN},
        {"layer_types": [GLOBAL, LOCAL, LOCAL], "num_local_experts": 2, **LINEAR},
        {"layer_types": [GLOBAL] * 3, "num_key_value_heads": 1, **DYNAMIC},
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {key: value for key, value in GROUPED.items() if key != "head_dim"}
        | {"num_hidden_layers": 5},
        {"full_attn_idxs": [1, 3], "block_multiple_of": 4},
        {"layer_types": [CONV, CONV, GLOBAL, CONV, GLOBAL], "conv_bias": True, "conv_L_cache": 4},
        {"full_attn_idxs": [4], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "starcoder2": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        GROUPED,
        {"sliding_window": 50},
        {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "relu2", **YARN},
        {"num_key_value_heads": 1, "norm_epsilon": 1e-3, **LINEAR},
    ),
    "gemma": (
        "GemmaConfig",
        "GemmaForCausalLM",
        GROUPED,
        {},
        {"attention_bias": True},
        {"tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        GROUPED | {"query_pre_attn_scalar": 10},
        {"sliding_window": 30},
        {"sliding_window": 50, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"sliding_window": 9, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GROUPED | {"query_pre_attn_scalar": 10, "num_hidden_layers": 7},
        {"sliding_window": 30},
        {"sliding_window": 50, **GEMMA3_TURNS},
        {"sliding_window": 9, "layer_types": [LOCAL, GLOBAL] * 3 + [LOCAL]},
    ),
    "olmo2": (
        "Olmo2Config",
        "Olmo2ForCausalLM",
        {key: value for key, value in GROUPED.items() if key != "head_dim"},
        {},
        {"attention_bias": True, "tie_word_embeddings": True},
        LINEAR,
    ),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {key: value for key, value in GROUPED.items() if key != "head_dim"}
        | {"num_hidden_layers": 5, "sliding_window": 50},
        {"rope_scaling": YARN["rope_parameters"]},
        {"attention_bias": True, "layer_types": [GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL]},
        {"sliding_window": 9, "tie_word_embeddings": True},
    ),
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {key: value for key, value in GROUPED.items() if key != "head_dim"}
        | {"num_hidden_layers": 5},
        {},
        {"no_rope_layers": [1, 0, 0, 1, 0], "tie_word_embeddings": False},
        {"mlp_bias": True, "attention_bias": True, "no_rope_layer_interval": 2},
    ),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {key: value for key, value in GROUPED.items() if key != "head_dim"} | WIDE,
        {"sliding_window": 50},
        {"tie_word_embeddings": True},
        turns(partial_rotary_factor=0.5),
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        SIZES,
        {},
        {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3},
        {"hidden_act": "gelu_new", "num_attention_heads": 2},
    ),
    "roberta": (
        "RobertaConfig",
        "RobertaForMaskedLM",
        SIZES | {"pad_token_id": 1, "bos_token_id": 0},
        {},
        {"type_vocab_size": 1},
        {"layer_norm_eps": 1e-3, "num_attention_heads": 2},
    ),
    "xlm-roberta": (
        "XLMRobertaConfig",
        "XLMRobertaForMaskedLM",
        SIZES | {"pad_token_id": 1, "bos_token_id": 0, "type_vocab_size": 1},
        {},
        {"num_hidden_layers": 2},
        {"num_attention_heads": 2},
    ),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        DISTIL,
        {},
        {"activation": "relu"},
        {"n_heads": 2, "n_layers": 2},
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        SIZES | {"local_attention": 20, "cls_token_id": 1, "sep_token_id": 2},
        {"num_hidden_layers": 5},
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 50},
        {"layer_types": [LOCAL, GLOBAL, LOCAL]},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        T5,
        {},
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    ),
    "mt5": (
        "MT5Config",
        "MT5ForConditionalGeneration",
        T5,
        {"tie_word_embeddings": False},
        {"feed_forward_proj": "gated-silu"},
        {"d_kv": 6},
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        BART,
        {},
        {"scale_embedding": True, "activation_function": "relu"},
        {"decoder_attention_heads": 4, "encoder_attention_heads": 2},
    ),
    "marian": (
        "MarianConfig",
        "MarianMTModel",
        MARIAN,
        {"scale_embedding": True, "activation_function": "swish"},
        {"decoder_layers": 1},
        {"decoder_attention_heads": 4},
    ),
    "pegasus": (
        "PegasusConfig",
        "PegasusForConditionalGeneration",
        BART,
        {"scale_embedding": True, "activation_function": "relu"},
        {"decoder_layers": 1},
        {"decoder_attention_heads": 4, "encoder_attention_heads": 2},
    ),
}
CASES = [(name, case) for name, (_, _, _, *cases) in FAMILIES.items() for case in range(len(cases))]
UNTIED = {("t5", 1), ("mt5", 0)}


def make(name: str, case: int, seed: int = 0):
    """Creates a transformers model with random parameters: no bias is 0 and no scale is 1."""
    config_name, model_name, common, *cases = FAMILIES[name]
    options = deepcopy(common | cases[case])  # some config classes modify their arguments
    config = getattr(transformers, config_name)(**options)
    config._attn_implementation = "eager"
    model = getattr(transformers, model_name)(config)
    if (name, case) in UNTIED:  # published checkpoints are untied, but the config has no option
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, 24))
    generator = torch.Generator().manual_seed(seed)
    buffers = [(n, b) for n, b in model.named_buffers() if n == "final_logits_bias"]
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    is_t5 = name in ("t5", "mt5")
    with torch.no_grad():
        for path, parameter in (*parameters, *buffers):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1 and "bias" not in path:
                # T5 does not scale its scores: larger weights would saturate the softmax.
                parameter.copy_((0.08 if is_t5 else 0.12) * noise)
            elif path.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                is_own = name == "qwen3_next" and "linear_attn" not in path
                around = 0.0 if name.startswith("gemma") or is_own else 1.0  # those store γ − 1
                parameter.copy_(around + 0.2 * noise)
    return model.eval()


def saved(name: str, case: int, folder: Path, seed: int = 0):
    """Creates and saves a model. Returns it with its folder."""
    model = make(name, case, seed)
    model.save_pretrained(folder)
    return model, folder
