"""Strict reader for the options of a config.json.

Each model family has functions that read its options. An option that no function of its family uses
raises an error, unless the option cannot change the model.
"""

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from jaxformer.models.config.check import LARGEST, shown

# Options of transformers for training, initialization, generation, files or platforms, which do not
# change the model.
HARMLESS = frozenset(
    """
    _attn_implementation_autoset _name_or_path _num_labels activation_dropout architectures
    attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map
    cache_implementation chunk_size_feed_forward classif_dropout classifier_dropout
    classifier_pooling cls_token_id decoder_layerdrop deterministic_flash_attn directionality
    dropout dropout_rate dtype embd_pdrop embedding_dropout encoder_layerdrop finetuning_task
    force_bos_token_to_be_generated gradient_checkpointing hidden_dropout hidden_dropout_prob
    hidden_size_per_head id2label init_std initializer_cutoff_factor initializer_factor
    initializer_range is_encoder_decoder is_llama_config keys_to_ignore_at_inference label2id
    layerdrop mask_token_id mlp_dropout model_type name_or_path num_labels num_return_sequences
    output_attentions output_hidden_states output_past output_scores pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    position_embedding_type predict_special_tokens prefix pretraining_tp problem_type qa_dropout
    reference_compile remove_invalid_values reorder_and_upcast_attn repad_logits_with_grad
    resid_pdrop return_dict return_dict_in_generate save_step sbert_ce_default_activation_function
    sep_token_id seq_classif_dropout sinusoidal_pos_embds sparse_pred_ignore_index sparse_prediction
    start_token_id summary_activation summary_first_dropout summary_last_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tf_legacy_loss
    tokenizer_class torch_dtype torchscript transformers.js_config transformers_version unk_token_id
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)
# Options that transformers reads in the base class of configs or in code that all families share.
# A family's class in transformers may read further options. jaxformer implements each of them, or
# lists it in `CheckpointFormat.not_implemented`.
READ_BY_ALL = frozenset(
    """
    _attn_implementation _commit_hash _experts_implementation add_cross_attention
    attention_chunk_size base_model_pp_plan base_model_tp_plan compile_config
    cross_attention_hidden_size distributed_config experts_implementation fusion_config
    generation_config head_dim hf_quantizer hidden_size is_causal is_decoder kernel_config
    layer_types max_position_embeddings mlp_layer_types num_attention_heads num_hidden_layers
    num_key_value_heads num_mtp_layers partial_rotary_factor per_layer_config pruned_heads
    quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
    sub_configs tie_encoder_decoder tie_weights tie_word_embeddings token_classification_bias
    transformers_weights vocab_size
    """.split()
)
_MOST_UNREAD = 100
REQUIRED: Any = object()
Default = TypeVar("Default")
Entry = TypeVar("Entry")


class Options:
    """Options of one config.json.

    The functions of a model family call one of these methods for each option:

    - `take`, `whole`, `number`, `flag`, `choice`, `mapping` or `take_list` if they use the value,
    - `require` if only one value is supported,
    - `ignore` if the option does not change the model.

    The last call is `nothing_left`, which raises an error if the file sets any other option that
    may change the model. For each family, tests/hub/test_options.py checks that every value
    returned by these methods is used.
    """

    def __init__(self, options: dict, file: Path | str, tensors: Collection[str] = ()):
        """Stores the content of a file.

        Args:
            options: The content of the file.
            file: The file's name, for error messages.
            tensors: The names of the tensors in the folder of the file.
        """
        self.options, self.file, self.tensors = options, file, tensors
        self.taken: dict[str, Any] = {}
        self.ignored: dict[str, str] = {}
        self.unread: list[str] = []

    def __contains__(self, key: str) -> bool:
        """Returns whether the option is present and not null."""
        return self.options.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Returns whether the file sets the option to null; False if the option is missing."""
        return key in self.options and self.options[key] is None

    def ignore(self, *keys: str, because: str) -> None:
        """Accepts any value for options that do not change the model.

        Args:
            keys: The options.
            because: The reason why the class in transformers does not use the options.
        """
        self.ignored |= dict.fromkeys(keys, because)

    def error(self, key: str, accepted: str) -> ValueError:
        """Returns a ValueError about an option; `accepted` describes the accepted values."""
        return ValueError(f"{self.file}: {key} is {shown(self.options.get(key))}; {accepted}")

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """Returns the option's value, or `default` if the option is missing or null.

        Call this only for an option whose value is used, because `nothing_left` then accepts the
        option. For an option without an effect, call `ignore`.
        """
        value = self.options.get(key)
        if value is None:
            value = default
        if value is REQUIRED:
            raise ValueError(f"{self.file}: {key} is missing")
        self.taken[key] = value
        return value

    def whole(
        self, key: str, default: Default = REQUIRED, least: int = 0, most: int = LARGEST
    ) -> int | Default:
        """Returns an integer option; raises ValueError unless it is from `least` to `most`."""
        value = self.take(key, default)
        if value is default:
            return value
        if type(value) is not int or not least <= value <= most:
            raise self.error(key, f"it must be a whole number in {least} … {most}")
        return value

    def number(self, key: str, default: Default = REQUIRED) -> float | Default:
        """Returns a numeric option as a float; raises ValueError unless it is finite."""
        value = self.take(key, default)
        if value is default:
            return value
        # This comparison also rejects NaN, infinity and huge integers.
        if type(value) not in (int, float) or not abs(value) < 1e300:
            raise self.error(key, "it must be a number")
        return float(value)

    def flag(self, key: str, default: Default) -> bool | Default:
        """Returns an option that is true or false."""
        value = self.take(key, default)
        if value is not default and type(value) is not bool:
            raise self.error(key, "it must be true or false")
        return value

    def choice(self, key: str, choices: dict[Any, Entry], default: Any = REQUIRED) -> Entry:
        """Returns the entry of `choices` whose key is the option's value."""
        value = self.take(key, default)
        if type(value) not in (str, bool) or value not in choices:
            raise self.error(key, f"it must be one of {', '.join(map(repr, choices))}")
        return choices[value]

    def mapping(self, key: str) -> dict:
        """Returns an option that is a JSON object, or {} if the option is missing or null."""
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "it must be a JSON object")
        return value

    def take_list(
        self, key: str, length: int, kind: type[Entry], default: list[Entry] = REQUIRED
    ) -> list[Entry]:
        """Returns the first `length` entries of an option that is a list.

        Args:
            key: The option.
            length: The number of entries to return, usually the number of layers. A list with fewer
                entries raises an error.
            kind: The required type of the list's entries.
            default: The value to return if the option is missing or null.
        """
        value = self.take(key, default)
        if value is default:
            return value
        is_list = isinstance(value, list) and all(type(entry) is kind for entry in value)
        if not is_list or len(value) < length:
            raise self.error(
                key, f"it must be a list of at least {length} entries of type {kind.__name__}"
            )
        return value[:length]

    def require(self, demanded: dict[str, Any]) -> None:
        """Raises ValueError if an option is set and differs from its value in `demanded`."""
        for key, accepted in demanded.items():
            if self.take(key, accepted) != accepted:
                raise self.error(key, f"only {accepted!r} is implemented")

    def nothing_left(
        self, harmless: frozenset[str], read_by_class: frozenset[str] | None = None
    ) -> None:
        """Raises ValueError if an option that no other method has read may change the results.

        An option is accepted if it is in `harmless`, or if its value is null, false or empty.

        Args:
            harmless: Options that do not change the results.
            read_by_class: Options that the class in transformers reads. Options that the class does
                not read cannot change the model; a warning lists them. If None, every option counts
                as read by the class.

        Raises:
            ValueError: An option that was not read may change the results. The message names the
                option.
        """
        known = self.taken.keys() | self.ignored.keys() | harmless
        for key, value in self.options.items():
            if key in known or value in (None, False, [], {}):
                continue
            if read_by_class is None or key in read_by_class:
                raise self.error(
                    key, "jaxformer does not implement this option, so results might differ"
                )
            self.unread.append(key)
        if len(self.unread) > _MOST_UNREAD:
            raise ValueError(
                f"{self.file}: the class in transformers does not read {len(self.unread)} of the "
                f"options, such as {shown(self.unread[0])}; jaxformer ignores at most "
                f"{_MOST_UNREAD} unknown options"
            )
        if self.unread:
            names = ", ".join(shown(key)[1:-1] for key in self.unread)
            warnings.warn(
                f"{self.file}: ignored options, unknown to the class in transformers: {names}",
                stacklevel=2,
            )


def pattern(entries: list[Entry]) -> Entry | tuple[Entry, ...]:
    """Returns the shortest tuple whose repetition gives `entries`, the values of all layers.

    If all entries are equal, the function returns one entry instead of a tuple.
    """
    period = next(n for n in range(1, len(entries) + 1) if entries[n:] == entries[:-n])
    return entries[0] if period == 1 else tuple(entries[:period])


def per_layer(value: Entry | tuple[Entry, ...], num_layers: int) -> list[Entry]:
    """Returns a list with one entry per layer; this function is the inverse of `pattern`.

    Args:
        value: The value of all layers, or a tuple of values that repeats over the layers.
        num_layers: The number of layers.
    """
    entries = value if isinstance(value, tuple) else (value,)
    return [entries[layer % len(entries)] for layer in range(num_layers)]
