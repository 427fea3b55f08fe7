"""Reader and writer of the generation options in files of Hugging Face.

As in transformers, the options come from generation_config.json. If this file is missing, the
options come from config.json. A missing option has the default of transformers. An option either
sets a field of `GenerationDefaults` or `Constraints`, or has no effect on the generated tokens, or
is unsupported. The unsupported options are stored, and generation raises an error that lists them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxformer.artifacts.files import json_text, read_json
from jaxformer.models.config.check import from_fields
from jaxformer.models.config.generation import NO_CONSTRAINTS, Constraints, GenerationDefaults

_CONSTRAINTS = frozenset(field.name for field in fields(Constraints))
_DEFAULTS = frozenset(field.name for field in fields(GenerationDefaults))
_DEFAULTS -= {"constraints", "unsupported"}
# The value of these options is a list of ids, or one id in place of a list with one entry.
_LISTS = ("eos_token_id", "forced_eos_token_id")
# Defaults of transformers for options that are not set. The default max_length of 20 tokens is
# omitted, because it would only make outputs short.
_USUAL: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
}

# Options that are not implemented, and the value at which each option does not change the output.
_BY_NEUTRAL_VALUE = {
    None: """constraints dola_layers force_words_ids max_time stop_strings token_healing top_h
        watermarking_config""",
    0: "diversity_penalty penalty_alpha",
    1: "guidance_scale num_beam_groups",
}
_UNSUPPORTED = {x: value for value, names in _BY_NEUTRAL_VALUE.items() for x in names.split()}
# Options of generation_config.json that do not affect the generated tokens. Since version 5,
# transformers ignores forced_decoder_ids.
_HARMLESS = frozenset(
    """
    _from_model_config assistant_confidence_threshold assistant_early_exit
    assistant_ensemble_weight assistant_lookbehind assistant_token_id cache_config
    cache_implementation chat_format compile_config continuous_batching_config disable_compile
    forced_decoder_ids is_assistant low_memory max_cache_len max_matching_ngram_size max_window_size
    num_assistant_tokens num_assistant_tokens_schedule num_return_sequences output_attentions
    output_hidden_states output_logits output_scores prefill_chunk_size prompt_lookup_num_tokens
    remove_invalid_values return_dict_in_generate speculation_type target_lookbehind
    transformers_version trust_remote_code use_cache use_mtp user_token_id
    """.split()
)
OPTIONS = _CONSTRAINTS | _DEFAULTS | _UNSUPPORTED.keys()
_EMPTY = (None, False, [], {}, "")


def read_generation(
    folder: Path, vocab_size: int, class_defaults: Mapping[str, Any]
) -> GenerationDefaults:
    """Reads the generation options of a folder.

    Args:
        folder: The folder.
        vocab_size: The model's vocabulary size.
        class_defaults: The defaults of the config class in transformers. As in transformers, these
            defaults apply only if generation_config.json is missing.

    Raises:
        ValueError: An option has a wrong type, or an id outside the vocabulary. The message
            gives the file.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        content = read_json(path)
    else:
        path = folder / "config.json"
        config = read_json(path)
        stored = {key: value for key, value in config.items() if key in OPTIONS}
        content = {**class_defaults, **stored}
        # Older files use this name for forced_bos_token_id.
        if config.get("force_bos_token_to_be_generated"):
            content["forced_bos_token_id"] = content.get("bos_token_id")
    unsupported = tuple(
        f"{key}={json_text(value)}"
        for key, value in sorted(content.items())
        if key not in _CONSTRAINTS | _DEFAULTS | _HARMLESS
        and value not in (*_EMPTY, _UNSUPPORTED.get(key))
    )
    content = {key: _parsed(key, value) for key, value in content.items()}
    content = _USUAL | {key: value for key, value in content.items() if value is not None}
    rules = {key: content[key] for key in _CONSTRAINTS if key in content}
    others = {key: content[key] for key in _DEFAULTS if key in content}
    try:
        constraints = from_fields(Constraints, rules)
        constraints.check_ids(vocab_size)
        defaults = from_fields(GenerationDefaults, others)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return replace(defaults, constraints=constraints, unsupported=unsupported)


def _parsed(key: str, value: Any) -> Any:
    """Converts the id -1 to None, and single ids of the options in `_LISTS` to lists.

    In some files, -1 means that the option is not set.
    """
    if value is None or (key.endswith("_token_id") and value == -1 and type(value) is int):
        return None
    return [value] if key in _LISTS and not isinstance(value, list) else value


def without_options(defaults: GenerationDefaults, names: Iterable[str]) -> GenerationDefaults:
    """Removes options from generation settings, as if the checkpoint's files did not set them.

    Raises:
        ValueError: A name is not an option of generation_config.json. The message lists the
            unsupported options that the checkpoint sets.
    """
    names = set(names)
    unsupported = {option.split("=", 1)[0]: option for option in defaults.unsupported}
    if unknown := names - OPTIONS - _HARMLESS - unsupported.keys():
        found = ", ".join(unsupported) or "none"
        raise ValueError(
            f"{min(unknown)!r} is not an option of generation_config.json; the options of this "
            f"checkpoint that may have to be ignored are: {found}"
        )
    rules = {key: getattr(NO_CONSTRAINTS, key) for key in names & _CONSTRAINTS}
    usual = {key: _USUAL.get(key, getattr(GenerationDefaults(), key)) for key in names & _DEFAULTS}
    remaining = tuple(option for name, option in unsupported.items() if name not in names)
    constraints = replace(defaults.constraints, **rules)
    return replace(defaults, constraints=constraints, unsupported=remaining, **usual)


def written_generation(defaults: GenerationDefaults) -> dict[str, Any]:
    """Converts a model's generation settings to the options of generation_config.json."""
    rules = {key: getattr(defaults.constraints, key) for key in _CONSTRAINTS}
    rules = {key: x for key, x in rules.items() if x != getattr(NO_CONSTRAINTS, key)}
    others = {key: getattr(defaults, key) for key in _DEFAULTS}
    content = rules | {key: x for key, x in others.items() if x not in (None, ())}
    named = (option.split("=", 1) for option in defaults.unsupported)
    content |= {key: json.loads(value) for key, value in named}
    singles = {key: content[key][0] for key in _LISTS if len(content.get(key, ())) == 1}
    return dict(sorted((content | singles).items()))
