"""Options of a file, read through a closed schema: every one must be asked for, or be known to be
harmless."""

from typing import Any

# Options of transformers that concern training, initialisation, generation, files or a platform.
HARMLESS = frozenset(
    """
    _attn_implementation_autoset _name_or_path _num_labels activation_dropout architectures
    attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    classif_dropout classifier_dropout classifier_pooling cls_token_id decoder_layerdrop
    decoder_start_token_id deterministic_flash_attn directionality diversity_penalty do_sample
    dropout dropout_rate dtype early_stopping embd_pdrop embedding_dropout encoder_layerdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout hidden_dropout_prob hidden_size_per_head id2label init_std
    initializer_cutoff_factor initializer_factor initializer_range is_encoder_decoder
    is_llama_config keys_to_ignore_at_inference label2id layerdrop length_penalty mask_token_id
    max_length min_length mlp_dropout model_type name_or_path no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_return_sequences output_attentions output_hidden_states output_past
    output_scores pad_token_id pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type position_embedding_type predict_special_tokens prefix
    pretraining_tp problem_type pruned_heads qa_dropout reference_compile remove_invalid_values
    reorder_and_upcast_attn repad_logits_with_grad repetition_penalty resid_pdrop return_dict
    return_dict_in_generate save_step sbert_ce_default_activation_function sep_token_id
    seq_classif_dropout sinusoidal_pos_embds sparse_pred_ignore_index sparse_prediction
    start_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class
    top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)
_REQUIRED = object()


class Options:
    """The options of one file; each `take` marks one as read. Errors name the file and the key.

    tensors: the names of those that stand beside it.
    """

    def __init__(self, options: dict, file, tensors=()):
        self.options, self.file, self.tensors = options, file, tensors
        self.taken = set()

    def __contains__(self, key) -> bool:
        return self.options.get(key) is not None

    def error(self, key, accepted) -> ValueError:
        return ValueError(f"{self.file}: {key} is {self.options.get(key)!r}; {accepted}")

    def take(self, key, default: Any = _REQUIRED):
        """The option as it is; None, or no option at all, is the default."""
        self.taken.add(key)
        value = self.options.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.file}: {key} is missing")
        return default

    def whole(self, key, default=_REQUIRED, least: int = 0):
        """A whole number of at least so much; nothing absurd, which would only fail later."""
        value = self.take(key, default)
        if value is default:
            return value
        if type(value) is not int or not least <= value <= 2**31:
            raise self.error(key, f"it must be a whole number in {least} … 2³¹")
        return value

    def number(self, key, default=_REQUIRED):
        value = self.take(key, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not abs(value) < 1e300:  # nor an endless whole one
            raise self.error(key, "it must be a number")
        return float(value)

    def flag(self, key, default: bool) -> bool:
        value = self.take(key, default)
        if type(value) is not bool:
            raise self.error(key, "it must be true or false")
        return value

    def choice(self, key, choices: dict, default=_REQUIRED):
        """What the option's value stands for."""
        value = self.take(key, default)
        if type(value) not in (str, bool) or value not in choices:
            raise self.error(key, f"implemented are {', '.join(map(repr, choices))}")
        return choices[value]

    def mapping(self, key) -> dict:
        """An object; none is empty."""
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "it must be an object")
        return value

    def list_of(self, key, length: int, kind: type, default=_REQUIRED) -> list:
        """A list with an entry for each layer, at least."""
        value = self.take(key, default)
        if value is default:
            return value
        is_list = isinstance(value, list) and all(type(entry) is kind for entry in value)
        if not is_list or len(value) < length:
            raise self.error(key, f"it must be a list of {kind.__name__} of length {length}")
        return value[:length]

    def require(self, demanded: dict):
        """These options, where they are there, have the only value that is implemented."""
        for key, accepted in demanded.items():
            if self.take(key, accepted) != accepted:
                raise self.error(key, f"only {accepted!r} is implemented")

    def nothing_left(self, harmless):
        """Refuse options that nobody asked for, unless they are empty or harmless."""
        for key, value in self.options.items():
            if key in self.taken or key in harmless or value in (None, False, [], {}):
                continue
            raise self.error(key, "this option is not known here, and might change the mathematics")


def pattern(entries: list):
    """One entry for each layer as the shortest tuple that, repeated, gives them; or, if all are
    the same, that entry."""
    length = len(entries)
    for period in range(1, length + 1):
        if all(entries[i] == entries[i % period] for i in range(length)):
            break
    return entries[0] if period == 1 else tuple(entries[:period])


def spread(value, num_layers: int) -> list:
    """The inverse: an entry for each layer."""
    entries = value if isinstance(value, tuple) else (value,)
    return [entries[layer % len(entries)] for layer in range(num_layers)]
