"""Bugs of importing and exporting foreign model folders."""

import numpy as np

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, takes, then

MXFP4 = "hub/test_mxfp4.py"
BROKEN = "hub/test_malformed.py::test_a_broken_folder_is_refused"
ROUND_TRIP = "hub/test_folders.py"
EXPORTED = "hub/test_exported_tokenizer.py"
GGUF = "hub/test_gguf_vocabulary.py"

MIXED_LAYERS = (
    "hub/test_published.py::test_layers_with_and_without_experts_have_their_numbers_in_a_file"
)
BUGS = (
    Bug(
        "a dense layer reads the tensors of experts",
        "hub.table:Row.fits",
        Replace("len(shape) == num_axes + (2 if leaf == 'kernel' else 1)", "True"),
        MIXED_LAYERS,
    ),
    Bug(
        "gates are the first half of the columns instead of every other one",
        "hub.table:_take_turns",
        lambda _: lambda tensor, shapes, num_groups: np.split(tensor, len(shapes), axis=-1),
        f"{MXFP4}::test_a_folder_is_read_and_exported_without_packing",
    ),
    Bug(
        "the upper four bits of a byte are its first number",
        "hub.mxfp4:_TWICE",
        lambda pairs: pairs[:, ::-1],
        f"{MXFP4}::test_a_byte_holds_two_numbers_the_lower_bits_first",
    ),
    Bug(
        "the scales of 4-bit numbers have another bias",
        "hub.mxfp4:decode",
        Replace("scales.astype(np.int32) - 128", "scales.astype(np.int32) - 127"),
        f"{MXFP4}::test_a_byte_holds_two_numbers_the_lower_bits_first",
    ),
    Bug(
        "packed tensors are read although config.json does not say so",
        "hub.foreign:foreign_folder",
        Replace("'quantization_config' in options", "True"),
        f"{MXFP4}::test_a_broken_folder_is_refused",
    ),
    Bug(
        "an adapter updates experts that are one tensor",
        "hub.adapter:is_map",
        Replace("len(entry.their_shape) == 2", "True"),
        "hub/test_adapter.py::test_an_adapter_of_experts_is_refused",
    ),
    Bug(
        "another quantization than MXFP4 is accepted",
        "hub.families.experts:read_quantization",
        Replace("given and given.get('quant_method') != METHOD", "False"),
        f"{MXFP4}::test_a_broken_folder_is_refused",
    ),
    Bug(
        "a file of gpt-oss without rotary parameters has unscaled positions",
        "hub.positions:Rotary.read",
        Replace("dict(self.usual)", "{}"),
        "hub/test_published.py::test_every_option_is_known[gpt_oss-GptOssForCausalLM-defaults]",
    ),
    Bug(
        "layers that are stacked apart are read in the order of the file",
        "hub.table:entries",
        Replace("(layers[place[0]], *place[1:]) if num_axes else ()", "place"),
        MIXED_LAYERS,
    ),
    Bug(
        "merging an adapter drops its updates",
        "models.lora:merge_adapter",
        inside("dense", lambda _: lambda kernel: kernel.frozen),
        "hub/test_merged_adapter.py::test_adapted_parameters_are_written_after_merge_adapter",
    ),
    Bug(
        "an option that the class does not read is refused",
        "hub.options:Options.nothing_left",
        Replace("read_by_class is None", "True"),
        "hub/test_published.py::test_options_that_the_class_does_not_read_are_named_and_ignored[llama]",
    ),
    Bug(
        "a GGUF file names GPT-2's pattern for every tokenizer",
        "hub.gguf:_pre",
        gives("gpt-2"),
        f"{GGUF}::test_byte_level_bpe_encodes_as_llama_cpp[qwen2]",
    ),
    Bug(
        "the scores of a GGUF file ignore the order of the merges",
        "hub.gguf:_scores",
        then(lambda scores: [0.0] * len(scores)),
        f"{GGUF}::test_bpe_of_sentencepiece_encodes_as_llama_cpp[llama]",
    ),
    Bug(
        "a GGUF file puts no space before a text",
        "hub.gguf:_space_prefix",
        gives(False),
        f"{GGUF}::test_bpe_of_sentencepiece_encodes_as_llama_cpp[llama]",
    ),
    Bug(
        "byte tokens have the type of words in a GGUF file",
        "hub.gguf:_type",
        then(lambda name: "NORMAL" if name == "BYTE" else name),
        f"{GGUF}::test_the_types_of_tokens",
    ),
    Bug(
        "the settings of a tokenizer are lost on export",
        "artifacts.tokenizer_files:write_settings_files",
        gives(None),
        f"{EXPORTED}::test_templates_in_files_are_kept",
    ),
    Bug(
        "a checkpoint is exported in float32",
        "hub.foreign:common_dtype",
        gives("float32"),
        f"{EXPORTED}::test_an_exported_checkpoint_has_the_dtype_and_the_values_of_the_imported_one",
    ),
    Bug(
        "a saved model forgets the dtype of its checkpoint",
        "artifacts.saved:save",
        Replace("model.checkpoint_dtype", "None"),
        f"{EXPORTED}::test_an_exported_checkpoint_has_the_dtype_and_the_values_of_the_imported_one",
    ),
    Bug(
        "the padding of tokenizer.json is lost",
        "artifacts.tokenizer:Tokenizer.to_json",
        Replace("not any(batching.values())", "True"),
        f"{EXPORTED}::test_truncation_and_padding_of_tokenizer_json_are_kept",
    ),
    Bug(
        "an unknown option is ignored",
        "hub.options:Options.nothing_left",
        gives(None),
        f"{BROKEN}[an-option-is-not-read]",
    ),
    Bug(
        "a duplicate JSON key is accepted",
        "artifacts.files:_once",
        lambda _: lambda pairs: dict(pairs),
        f"{BROKEN}[config-has-a-key-twice]",
    ),
    Bug(
        "a link may leave the folder",
        "artifacts.files:stays",
        gives(True),
        f"{BROKEN}[a-file-of-the-index-leads-away]",
    ),
    Bug(
        "an unused tensor is ignored",
        "hub.family:Family.is_ignored",
        gives(True),
        f"{BROKEN}[a-layer-fewer-than-weights]",
    ),
    Bug(
        "a tensor's dtype is not checked",
        "artifacts.tensors:Tensor.check",
        takes(self=lambda tensor: tensor._replace(dtype="F32")),
        f"{BROKEN}[a-type-is-of-integers]",
    ),
    Bug(
        "a tokenizer may have more ids than the model",
        "hub.foreign:foreign_folder",
        Replace("tokenizer.base_size > config.vocab_size", "False"),
        f"{BROKEN}[tokenizer-is-of-another-model]",
    ),
    Bug(
        "a tokenizer may grow a text without limit",
        "artifacts.untrusted:_growth",
        inside("sum", lambda _: lambda growths: max(growths, default=0.0)),
        f"{BROKEN}[tokenizer-makes-a-text-longer-by-steps]",
    ),
    Bug(
        "a second head is dropped",
        "artifacts.tensors:Tensor.equals",
        gives(True),
        f"{BROKEN}[a-head-of-its-own-beside-tied-embeddings]",
    ),
    Bug(
        "a pattern may take exponential time",
        "artifacts.untrusted:_try_out",
        gives(None),
        f"{BROKEN}[tokenizer-has-a-slow-pattern]",
    ),
    Bug(
        "an export overwrites existing files",
        "artifacts.files:require_new",
        Replace("path.exists() and (not path.is_dir() or any(path.iterdir()))", "False"),
        "hub/test_malformed.py::test_what_is_not_there_is_refused",
    ),
    Bug(
        "the kind of a saved model is forgotten",
        "artifacts.run:parse_kind",
        takes(sections=lambda sections: {**sections, "kind": "decoder"}),
        ROUND_TRIP,
    ),
    Bug(
        "the family that a model came from is forgotten",
        "hub.export:preferred",
        takes(family=lambda _: None),
        "hub/test_family.py::test_an_imported_model_is_exported_as_what_it_was[phi3]",
    ),
    Bug(
        "an original length outside the rotary options is dropped",
        "hub.positions:RotaryEntry.scaling",
        takes(length=lambda _: None),
        "hub/test_options.py::test_the_original_length_outside_has_priority",
    ),
    Bug(
        "an adapter beside a model is ignored",
        "hub.adapter:read_adapter_beside",
        gives(None),
        "hub/test_adapter.py::test_the_scale_of_an_update",
    ),
    Bug(
        "an adapter's layers_to_transform selects no layers",
        "hub.adapter:Targets._is_layer_adapted",
        gives(True),
        "hub/test_adapter.py::test_the_options_select_these_maps",
    ),
    Bug(
        "a regular expression may match a part of a name",
        "hub.name_patterns:fully_matches",
        Replace("len(name) in ends(_parsed(pattern), 0)", "bool(ends(_parsed(pattern), 0))"),
        "hub/test_name_patterns.py::test_a_pattern_matches_the_names_that_re_matches",
    ),
    Bug(
        "T5's table under the head's name is taken for an untied head",
        "hub.families.t5:read",
        Replace("HEAD not in options.tensors or is_head_the_table", "HEAD not in options.tensors"),
        "hub/test_published.py::test_a_t5_is_tied_if_its_file_has_one_table",
    ),
    Bug(
        "a stored table of positions is not compared with the computed one",
        "hub.foreign:check_constants",
        gives(None),
        "hub/test_folders.py::test_a_stored_table_of_positions_must_be_the_computed_one",
    ),
    Bug(
        "an adapter without a selected map loads without a warning",
        "hub.adapter:Adapter._warn_of_missing",
        gives(None),
        "hub/test_adapter.py::test_a_missing_update_of_a_selected_map_gives_a_warning",
    ),
    Bug(
        "every layer is read into the first",
        "hub.table:fill_arrays",
        takes(entry=lambda x: x._replace(place=(0, *x.place[1:])) if x.place else x),
        ROUND_TRIP,
    ),
    Bug(
        "a special id beyond the vocabulary counts as a token",
        "hub.tokenizers.files:_ids",
        Replace("token < (vocab_size or 2**31)", "token < 2**31"),
        "hub/test_special_ids.py::test_an_id_is_a_token_or_none_or_an_error_with_file_and_key",
    ),
)
