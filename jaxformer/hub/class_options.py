"""Names of the options that each family's class of transformers reads from a config.json.

An option that is not in these lists cannot change the model. A list holds the fields of the class,
their other names, and further attributes that its code reads. tests/parity/test_class_options.py
compares the lists with the installed transformers.
"""

# Options that the base class of all configs reads, and code that all families share.
GENERAL = frozenset(
    """
    _attn_implementation _commit_hash _experts_implementation _name_or_path
    add_cross_attention architectures attention_chunk_size attention_dropout
    attn_implementation base_model_pp_plan base_model_tp_plan bos_token_id
    chunk_size_feed_forward classifier_dropout compile_config cross_attention_hidden_size
    distributed_config dtype eos_token_id experts_implementation fusion_config
    generation_config gradient_checkpointing head_dim hf_quantizer hidden_dropout hidden_size
    id2label init_std initializer_factor initializer_range is_causal is_decoder
    is_encoder_decoder kernel_config label2id layer_types max_position_embeddings
    mlp_layer_types model_type name_or_path num_attention_heads num_hidden_layers
    num_key_value_heads num_labels num_mtp_layers output_attentions output_hidden_states
    pad_token_id partial_rotary_factor per_layer_config problem_type pruned_heads
    quantization_config return_dict rms_norm_eps rope_parameters rope_scaling rope_theta
    sep_token_id sliding_window sub_configs tie_encoder_decoder tie_weights
    tie_word_embeddings token_classification_bias torch_dtype torchscript transformers_version
    transformers_weights use_cache vocab_size
    """.split()
)
# Further options of each family.
_OWN = {
    "gpt2": """
        activation_function attn_pdrop embd_pdrop layer_norm_epsilon n_embd n_head n_inner
        n_layer n_positions reorder_and_upcast_attn resid_pdrop
        scale_attn_by_inverse_layer_idx scale_attn_weights summary_activation
        summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type
        summary_use_proj
        """,
    "gpt_neox": """
        attention_bias hidden_act intermediate_size layer_norm_eps rotary_emb_base
        rotary_pct use_parallel_residual
        """,
    "llama": """
        attention_bias hidden_act intermediate_size mlp_bias pretraining_tp
        """,
    "mistral": """
        hidden_act intermediate_size
        """,
    "qwen2": """
        hidden_act intermediate_size max_window_layers use_sliding_window
        """,
    "qwen3": """
        attention_bias hidden_act intermediate_size max_window_layers use_sliding_window
        """,
    "olmo2": """
        attention_bias hidden_act intermediate_size
        """,
    "olmo3": """
        attention_bias hidden_act intermediate_size
        """,
    "smollm3": """
        attention_bias hidden_act intermediate_size mlp_bias no_rope_layer_interval
        no_rope_layers use_sliding_window
        """,
    "phi3": """
        embd_pdrop hidden_act intermediate_size original_max_position_embeddings resid_pdrop
        """,
    "mixtral": """
        hidden_act intermediate_size num_experts num_experts_per_tok num_local_experts
        output_router_logits router_aux_loss_coef router_jitter_noise
        """,
    "olmoe": """
        attention_bias clip_qkv hidden_act intermediate_size norm_topk_prob num_experts
        num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef
        """,
    "gpt_oss": """
        attention_bias hidden_act intermediate_size num_experts num_experts_per_tok
        num_local_experts output_router_logits router_aux_loss_coef swiglu_alpha swiglu_limit
        """,
    "qwen2_moe": """
        decoder_sparse_step hidden_act intermediate_size max_window_layers mlp_only_layers
        moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok output_router_logits
        qkv_bias router_aux_loss_coef shared_expert_intermediate_size use_sliding_window
        """,
    "qwen3_moe": """
        attention_bias decoder_sparse_step hidden_act intermediate_size mlp_only_layers
        moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_local_experts
        output_router_logits router_aux_loss_coef use_sliding_window
        """,
    "qwen3_next": """
        attention_bias decoder_sparse_step full_attention_interval hidden_act intermediate_size
        linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
        linear_value_head_dim mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
        num_experts_per_tok output_router_logits router_aux_loss_coef
        shared_expert_intermediate_size
        """,
    "lfm2": """
        block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of
        conv_L_cache conv_bias full_attn_idxs intermediate_size norm_eps tie_embedding
        """,
    "gemma": """
        attention_bias hidden_act intermediate_size use_bidirectional_attention
        """,
    "gemma2": """
        attention_bias attn_logit_softcapping final_logit_softcapping hidden_activation
        intermediate_size query_pre_attn_scalar use_bidirectional_attention
        """,
    "gemma3_text": """
        _sliding_window_pattern attention_bias attn_logit_softcapping
        final_logit_softcapping hidden_activation intermediate_size query_pre_attn_scalar
        rope_local_base_freq sliding_window_pattern use_bidirectional_attention
        """,
    "starcoder2": """
        embedding_dropout hidden_act intermediate_size norm_epsilon residual_dropout
        use_bias
        """,
    "bert": """
        attention_probs_dropout_prob embedding_size hidden_act hidden_dropout_prob
        intermediate_size layer_norm_eps position_embedding_type type_vocab_size
        """,
    "roberta": """
        attention_probs_dropout_prob embedding_size hidden_act hidden_dropout_prob
        intermediate_size layer_norm_eps position_embedding_type type_vocab_size
        """,
    "xlm-roberta": """
        attention_probs_dropout_prob embedding_size hidden_act hidden_dropout_prob
        intermediate_size layer_norm_eps position_embedding_type type_vocab_size
        """,
    "distilbert": """
        activation dim dropout hidden_dim n_heads n_layers qa_dropout seq_classif_dropout
        sinusoidal_pos_embds
        """,
    "modernbert": """
        attention_bias classifier_activation classifier_bias classifier_pooling cls_token_id
        decoder_bias deterministic_flash_attn embedding_dropout global_attn_every_n_layers
        global_rope_theta hidden_activation initializer_cutoff_factor intermediate_size
        local_attention local_rope_theta mlp_bias mlp_dropout norm_bias norm_eps
        sparse_pred_ignore_index sparse_prediction
        """,
    "t5": """
        d_ff d_kv d_model decoder_start_token_id dense_act_fn dropout_rate feed_forward_proj
        is_gated_act layer_norm_epsilon num_decoder_layers num_heads num_layers
        relative_attention_max_distance relative_attention_num_buckets scale_decoder_outputs
        """,
    "mt5": """
        d_ff d_kv d_model decoder_start_token_id dense_act_fn dropout_rate feed_forward_proj
        is_gated_act layer_norm_epsilon num_decoder_layers num_heads num_layers
        relative_attention_max_distance relative_attention_num_buckets
        """,
    "bart": """
        activation_dropout activation_function d_model decoder_attention_heads
        decoder_ffn_dim decoder_layerdrop decoder_layers decoder_start_token_id dropout
        encoder_attention_heads encoder_ffn_dim encoder_layerdrop encoder_layers
        forced_eos_token_id scale_embedding
        """,
    "marian": """
        activation_dropout activation_function d_model decoder_attention_heads
        decoder_ffn_dim decoder_layerdrop decoder_layers decoder_start_token_id
        decoder_vocab_size dropout encoder_attention_heads encoder_ffn_dim encoder_layerdrop
        encoder_layers forced_eos_token_id scale_embedding share_encoder_decoder_embeddings
        """,
    "pegasus": """
        activation_dropout activation_function d_model decoder_attention_heads
        decoder_ffn_dim decoder_layerdrop decoder_layers decoder_start_token_id dropout
        encoder_attention_heads encoder_ffn_dim encoder_layerdrop encoder_layers
        forced_eos_token_id scale_embedding
        """,
}


def read_by_class(model_type: str) -> frozenset[str] | None:
    """Returns the options that the family's class reads; None for a family without a list."""
    if model_type not in _OWN:
        return None
    return GENERAL | frozenset(_OWN[model_type].split())
