"""Random configs similar to those of a family, and random edits of its config.json."""

import random
from dataclasses import replace

import jaxformer as jf
from jaxformer.hub.families import FAMILIES

SCALINGS = (
    jf.RotaryScaling("linear", 4.0),
    jf.RotaryScaling("linear", 2.0, original_length=16),
    jf.RotaryScaling("llama3", 8.0, 16),
    jf.RotaryScaling("llama3", 4.0, 32, 1.5, 3.0),
    jf.RotaryScaling("yarn", 4.0, 16),
    jf.RotaryScaling("yarn", 4.0, 16, whole_pairs=False, beta_fast=16.0),
    jf.RotaryScaling("yarn", 2.0, 32, attention_factor=0.8),
)
SIZES = {"vocab_size": 61, "max_length": 64, "embed_dim": 32, "num_heads": 4, "mlp_dim": 20}
# Possible values of each config field, for any config class that has the field.
VALUES = {
    "num_layers": (1, 3, 4),
    "embed_dim": (24, 18, 16),
    "num_heads": (2, 8),
    "num_kv_heads": (1, 2),
    "head_dim": (2, 4, 6),
    "mlp_dim": (24,),
    "activation": (
        *("relu", "gelu", "gelu_tanh", "silu", "squared_relu", "sigmoid", "tanh"),
        *("swiglu", "geglu", "geglu_tanh", "clipped_swiglu"),
    ),
    "num_experts": (0, 3, (0, 3), (3, 3, 0)),
    "shared_expert_dim": (None, 16),
    "shared_expert_gate": (True, False),
    "experts_per_token": (1, 2),
    "expert_dim": (12,),
    "normalize_router": (True, False),
    "router_bias": (True, False),
    "output_activation": (True,),
    "norm": ("layer", "rms", "rms_one_plus"),
    "norm_position": ("pre", "post", "post_sublayer", "sandwich"),
    "parallel_block": ("none", "separate_norms", "shared_norm"),
    "norm_epsilon": (1e-3, 1e-5, 1e-12),
    "embedding_norm": (True, False),
    "residual": (False,),
    "first_attention_norm": (False, True),
    "positions": ("learned", "sinusoidal", "sinusoidal_halves", "rotary", "relative", "alibi"),
    "position_offset": (0, 1, 2, 3),
    "relative_buckets": (8, 20),
    "relative_distance": (40,),
    "rotary_base": (500.0, (500.0, None), (None, 500.0), (100.0, 1000.0), (1e4, 1e4, 1e6)),
    "rotary_scaling": (None, *SCALINGS, (None, SCALINGS[0]), (SCALINGS[2], SCALINGS[4])),
    "rotary_fraction": (0.5, 0.25, 1.0),
    "rotary_interleaved": (True,),
    "query_key_norm": ("none", "head", "all"),
    "attention_scale": (0.3, 0.5, 1.0, 10**-0.5, 0.5000000001, 2.0, None),
    "attention_softcap": (2.0, None),
    "attention_sinks": (True, False),
    "attention_gate": (True, False),
    "output_scale": (0.25, 32**-0.5, None),
    "logits_softcap": (3.0, None),
    "query_key_value_bias": (True, False),
    "attention_output_bias": (True, False),
    "feedforward_bias": (True, False),
    "norm_bias": (True, False),
    "head_bias": (True, False),
    "tie_embeddings": (True, False),
    "scale_embeddings": (True, False),
    "window": (None, 4, (4, None), (None, 4), (4, 4), (4, 6), (4, 4, None)),
    "prefix": (2,),
    "layer_types": (
        *("attention", "short_convolution", ("short_convolution", "attention")),
        ("attention", "short_convolution", "short_convolution"),
        *("gated_delta", ("gated_delta", "attention")),
    ),
    "delta_key_heads": (1, 2),
    "delta_value_heads": (4, 2),
    "delta_key_dim": (6,),
    "delta_value_dim": (5,),
    "convolution_kernel_size": (2, 4),
    "convolution_bias": (True, False),
    "num_token_types": (0, 1, 3),
    "transform": (True, False),
    "pooler": (True, False),
    "num_labels": (0, 2, 3),
    "num_encoder_layers": (1, 3),
    "num_encoder_heads": (2,),
    "encoder_mlp_dim": (28,),
    "share_embeddings": (False,),
    "source_vocab_size": (40,),
    "max_source_length": (32, 128),
}


def base(family: str):
    """Returns a jaxformer config that the family can represent."""
    kind, fixed = FAMILIES[family].config, dict(FAMILIES[family].fixed)
    sizes = SIZES | {"num_layers": 2}
    architecture = next(iter(FAMILIES[family].architectures.values()))
    extra = {
        "t5": {"output_scale": 32**-0.5, "activation": "relu"},
        "mt5": {"activation": "geglu_tanh"},
        "gemma": {"activation": "geglu_tanh"},
        "gemma2": {"activation": "geglu_tanh"},
        "gemma3_text": {"activation": "geglu_tanh"},
        "modernbert": {"activation": "geglu"},
        "roberta": {"position_offset": 2, "num_token_types": 1, "activation": "gelu"},
        "xlm-roberta": {"position_offset": 2, "num_token_types": 1, "activation": "gelu"},
        "bert": {"num_token_types": 2},
        "lfm2": {"layer_types": ("short_convolution", "attention")},
        "qwen3_next": {
            "layer_types": ("gated_delta", "attention"),
            "num_experts": 4,
            "shared_expert_dim": 12,
        },
        **{key: {"num_experts": 4} for key in ("mixtral", "olmoe", "qwen3_moe", "gpt_oss")},
        "qwen2_moe": {"num_experts": 4, "shared_expert_dim": 12, "query_key_value_bias": True},
    }.get(family, {})
    return kind(**{**sizes, **fixed, **architecture, **extra}).resolved


def near(family: str, draw: random.Random):
    """Returns the family's config with up to four fields changed at random; always valid."""
    config = base(family)
    names = [name for name in VALUES if name in config.__dataclass_fields__]
    for _ in range(draw.randint(0, 4)):
        name = draw.choice(names)
        changes = {name: draw.choice(VALUES[name])}
        if name in ("embed_dim", "num_heads") and draw.random() < 0.5:
            changes["head_dim"] = None
        try:
            config = replace(config, **changes).resolved
        except ValueError:
            continue
    return config


def families_of(config) -> list[str]:
    """Returns the families with models of the given config class."""
    return [name for name, family in FAMILIES.items() if family.config is type(config)]


# ---- edits of a config.json of transformers

LOCAL, GLOBAL = "sliding_attention", "full_attention"
ROPES = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {},
    {LOCAL: {"rope_theta": 300.0}, GLOBAL: {"rope_type": "linear", "factor": 4.0}},
    {GLOBAL: {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
    None,
)
EDITS = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": (300.0, 7e5),
    "rotary_emb_base": (300,),
    "rotary_pct": (0.5, 1.0),
    "partial_rotary_factor": (0.5, 1.0),
    "rope_local_base_freq": (300.0,),
    "local_rope_theta": (300.0,),
    "global_rope_theta": (300.0,),
    "original_max_position_embeddings": (16, 32),
    "max_position_embeddings": (48, 96),
    "sliding_window": (None, 4, 6),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1),
    "layer_types": (
        None,
        ["conv", GLOBAL],
        ["linear_attention", GLOBAL],
        [LOCAL, GLOBAL],
        [GLOBAL, LOCAL],
        [LOCAL, LOCAL],
        [GLOBAL, GLOBAL],
    ),
    "mlp_only_layers": ([0], [1], [0, 1], None),
    "decoder_sparse_step": (1, 2, None),
    "norm_topk_prob": (True, False, None),
    "num_experts_per_tok": (1, 3),
    "full_attention_interval": (1, 2, None),
    "linear_num_key_heads": (1, 2, None),
    "linear_num_value_heads": (2, 3),
    "linear_key_head_dim": (3, None),
    "linear_value_head_dim": (3,),
    "linear_conv_kernel_dim": (2, None),
    "swiglu_limit": (5.0, 7.0),
    "swiglu_alpha": (1.0, None),
    "full_attn_idxs": (None, [], [1], [0, 1]),
    "conv_L_cache": (2, None),
    "conv_bias": (True, None),
    "block_auto_adjust_ff_dim": (True, False),
    "block_ffn_dim_multiplier": (1.3, None),
    "block_multiple_of": (4, None),
    "block_ff_dim": (36,),
    "tie_embedding": (True, False),
    "sliding_window_pattern": (1, 2),
    "_sliding_window_pattern": (2,),
    "local_attention": (8, 9),
    "global_attn_every_n_layers": (1, 2),
    "no_rope_layers": ([0, 1], [1, 1], None),
    "no_rope_layer_interval": (1, 2),
    "query_pre_attn_scalar": (7, 64, 10.5),
    "attn_logit_softcapping": (2.0, None),
    "final_logit_softcapping": (2.0, None),
    "hidden_act": ("silu", "gelu", "gelu_new", "relu", "gelu_pytorch_tanh"),
    "hidden_activation": ("silu", "gelu", "gelu_pytorch_tanh"),
    "classifier_activation": ("silu", "gelu", None),
    "activation_function": ("silu", "gelu", "gelu_fast", "relu", "relu2"),
    "activation": ("relu", "gelu"),
    "feed_forward_proj": ("relu", "gelu", "gated-gelu", "gated-silu", None),
    "dense_act_fn": ("relu", "gelu", "gelu_new"),
    "is_gated_act": (True, False),
    "scale_decoder_outputs": (True, False, None),
    "tie_word_embeddings": (True, False, None),
    "scale_embedding": (True, False, None),
    "attention_bias": (True, False, None),
    "mlp_bias": (True, False),
    "norm_bias": (True, False),
    "rms_norm_eps": (1e-2, None),
    "layer_norm_eps": (1e-2, None),
    "layer_norm_epsilon": (1e-2, None),
    "norm_eps": (1e-2, None),
    "scale_attn_weights": (False, None),
    "scale_attn_by_inverse_layer_idx": (True,),
    "use_parallel_residual": (False, True, None),
    "use_bidirectional_attention": (True, False),
    "relative_attention_max_distance": (40, None),
    "position_embedding_type": ("absolute", "relative_key"),
    "normalize_before": (True,),
    "normalize_embedding": (True, False),
    "pad_token_id": (0, 1, 2),
    "head_dim": (4, 8),
    "num_key_value_heads": (4, 2, None),
    "hidden_size": (34,),
    "n_inner": (20, None),
    "type_vocab_size": (None,),
    "is_decoder": (True,),
}


def edited(options: dict, draw: random.Random) -> dict:
    """Returns the options with one to three of them changed or removed."""
    options = dict(options)
    names = [name for name in EDITS if name in options] * 3 + list(EDITS)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(names)
        if draw.random() < 0.15 and name != "pad_token_id":  # a default may exceed our vocabulary
            options.pop(name, None)
        else:
            options[name] = draw.choice(EDITS[name])
    return options
