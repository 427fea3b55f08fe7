"""Bugs of importing and exporting foreign model folders."""

import numpy as np

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, takes, then, without

MXFP4 = "hub/test_mxfp4.py"
BROKEN = "hub/test_malformed.py::test_import_error_for_malformed_model_folder_is_one_line"
ROUND_TRIP = "hub/test_folders.py"
EXPORTED = "hub/test_exported_tokenizer.py"
GGUF = "hub/test_gguf_vocabulary.py"

FLAX = "hub/test_flax_weights.py"
MALFORMED_FLAX = f"{FLAX}::test_a_malformed_flax_checkpoint_is_refused"

MIXED_LAYERS = "hub/test_published.py::test_exported_dense_and_expert_layers_are_numbered_by_depth"
BUGS = (
    Bug(
        "a Flax kernel keeps its layout",
        "hub.flax_weights:rename_tensors",
        Replace("leaf == 'kernel'", "False"),
        f"{FLAX}::test_flax_checkpoints_of_random_configs_are_loaded",
    ),
    Bug(
        "a Flax embedding keeps its name",
        "hub.flax_weights:_LEAVES",
        without("embedding"),
        f"{FLAX}::test_flax_checkpoints_of_random_configs_are_loaded",
    ),
    Bug(
        "the scale of a Flax norm keeps its name",
        "hub.flax_weights:_LEAVES",
        without("scale"),
        f"{FLAX}::test_flax_checkpoints_of_random_configs_are_loaded",
    ),
    Bug(
        "two arrays of a Flax tree may be the same tensor",
        "hub.flax_weights:rename_tensors",
        Replace("name in tensors", "False"),
        MALFORMED_FLAX,
    ),
    Bug(
        "Flax weights are read instead of PyTorch safetensors",
        "hub.flax_weights:flax_file",
        Replace("(folder / INDEX).is_file()", "False"),
        f"{FLAX}::test_pytorch_safetensors_are_preferred_to_flax_weights",
    ),
    Bug(
        "Flax names in a safetensors file are taken for those of PyTorch",
        "hub.flax_weights:flax_file",
        Replace("single if file_metadata(single).get('format') == 'flax' else None", "None"),
        f"{FLAX}::test_flax_weights_in_a_safetensors_file_are_read",
    ),
    Bug(
        "a family without Flax classes is read from Flax weights",
        "hub.flax_weights:flax_tensors",
        Replace("model_type not in MODEL_TYPES", "False"),
        f"{FLAX}::test_flax_weights_of_family_without_flax_classes_are_rejected",
    ),
    Bug(
        "two arrays of a Flax tree may have the same path",
        "hub.flax_weights:read_tree",
        Replace("name in tensors", "False"),
        MALFORMED_FLAX,
    ),
    Bug(
        "the safetensors file of an adapter is taken for the model's",
        "hub.load:fetched",
        Replace("'model*.safetensors'", "'*.safetensors'"),
        f"{FLAX}::test_flax_weights_are_downloaded_only_if_safetensors_are_absent",
    ),
    Bug(
        "a number in a Flax tree is read as an array",
        "hub.flax_weights:read_tree",
        Replace("not isinstance(x, np.ndarray)", "False"),
        MALFORMED_FLAX,
    ),
    Bug(
        "integers in a Flax tree are read as weights",
        "hub.flax_weights:read_tree",
        Replace("str(x.dtype) not in _FORMATS", "False"),
        MALFORMED_FLAX,
    ),
    Bug(
        "a Flax tree without arrays is accepted",
        "hub.flax_weights:read_tree",
        Replace("not tensors", "False"),
        MALFORMED_FLAX,
    ),
    Bug(
        "the message about a Flax kernel gives the shape of its transpose",
        "hub.flax_weights:FlaxTensor.check",
        Replace("shape[::-1] if self.is_transposed else shape", "shape"),
        MALFORMED_FLAX,
    ),
    Bug(
        "Flax weights are downloaded beside safetensors",
        "hub.load:fetched",
        Replace("not any(folder.glob('model*.safetensors'))", "True"),
        f"{FLAX}::test_flax_weights_are_downloaded_only_if_safetensors_are_absent",
    ),
    Bug(
        "Flax weights are never downloaded",
        "hub.load:fetched",
        Replace("not any(folder.glob('model*.safetensors'))", "False"),
        f"{FLAX}::test_flax_weights_are_downloaded_only_if_safetensors_are_absent",
    ),
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
        f"{MXFP4}::test_mxfp4_weights_are_unpacked_by_load_and_stay_unpacked_in_export",
    ),
    Bug(
        "the upper four bits of a byte are its first number",
        "hub.mxfp4:_TWICE",
        lambda pairs: pairs[:, ::-1],
        f"{MXFP4}::test_lower_four_bits_of_mxfp4_byte_are_the_first_number",
    ),
    Bug(
        "the scales of 4-bit numbers have another bias",
        "hub.mxfp4:decode",
        Replace("scales.astype(np.int32) - 128", "scales.astype(np.int32) - 127"),
        f"{MXFP4}::test_lower_four_bits_of_mxfp4_byte_are_the_first_number",
    ),
    Bug(
        "packed tensors are read although config.json does not say so",
        "hub.huggingface:foreign_folder",
        Replace("'quantization_config' in options", "True"),
        f"{MXFP4}::test_malformed_mxfp4_folder_is_rejected",
    ),
    Bug(
        "an adapter updates experts that are one tensor",
        "hub.adapter:is_map",
        Replace("len(entry.their_shape) == 2", "True"),
        "hub/test_adapter.py::test_load_rejects_peft_adapter_of_experts",
    ),
    Bug(
        "another quantization than MXFP4 is accepted",
        "hub.families.experts:read_quantization",
        Replace("given and given.get('quant_method') != METHOD", "False"),
        f"{MXFP4}::test_malformed_mxfp4_folder_is_rejected",
    ),
    Bug(
        "a file of gpt-oss without rotary parameters has unscaled positions",
        "hub.positions:Rotary.read",
        Replace("dict(self.usual)", "{}"),
        "hub/test_published.py::test_published_checkpoint_options_determine_the_config[gpt_oss-GptOssForCausalLM-defaults]",
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
        "hub/test_merged_adapter.py::test_lora_parameters_can_be_saved_or_exported_only_after_merging",
    ),
    Bug(
        "an option that the class does not read is refused",
        "hub.options:Options.nothing_left",
        Replace("read_by_class is None", "True"),
        "hub/test_published.py::test_options_unused_by_transformers_class_are_ignored_with_warning[llama]",
    ),
    Bug(
        "a GGUF file names GPT-2's pattern for every tokenizer",
        "hub.gguf_vocabulary:_pre",
        gives("gpt-2"),
        f"{GGUF}::test_byte_level_bpe_gives_the_token_ids_of_llama_cpp[qwen2]",
    ),
    Bug(
        "the scores of a GGUF file ignore the order of the merges",
        "hub.gguf_vocabulary:_scores",
        then(lambda scores: [0.0] * len(scores)),
        f"{GGUF}::test_sentencepiece_bpe_gives_the_token_ids_of_llama_cpp[llama]",
    ),
    Bug(
        "a GGUF file puts no space before a text",
        "hub.gguf_vocabulary:_space_prefix",
        gives(False),
        f"{GGUF}::test_sentencepiece_bpe_gives_the_token_ids_of_llama_cpp[llama]",
    ),
    Bug(
        "byte tokens have the type of words in a GGUF file",
        "hub.gguf_vocabulary:_type",
        then(lambda name: "NORMAL" if name == "BYTE" else name),
        f"{GGUF}::test_gguf_file_stores_token_types",
    ),
    Bug(
        "the settings of a tokenizer are lost on export",
        "artifacts.tokenizer_files:write_settings_files",
        gives(None),
        f"{EXPORTED}::test_chat_template_files_are_exported",
    ),
    Bug(
        "a checkpoint is exported in float32",
        "hub.huggingface:common_dtype",
        gives("float32"),
        f"{EXPORTED}::test_import_and_export_preserve_dtype_and_values_of_weights",
    ),
    Bug(
        "a saved model forgets the dtype of its checkpoint",
        "artifacts.saved:save",
        Replace("model.checkpoint_dtype", "None"),
        f"{EXPORTED}::test_import_and_export_preserve_dtype_and_values_of_weights",
    ),
    Bug(
        "the padding settings of tokenizer.json are lost",
        "artifacts.tokenizer:Tokenizer.to_json",
        Replace("not any(batching.values())", "True"),
        f"{EXPORTED}::test_truncation_and_padding_settings_are_exported",
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
        "hub.checkpoint_format:CheckpointFormat.is_ignored",
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
        "hub.huggingface:foreign_folder",
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
        "hub/test_malformed.py::test_import_rejects_missing_model_folder_or_existing_output",
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
        takes(model_type=lambda _: None),
        "hub/test_model_type.py::test_imported_model_is_exported_as_its_original_family[phi3]",
    ),
    Bug(
        "scaled rotary positions require the original length in the file",
        "hub.positions:RotaryEntry.scaling",
        Replace(
            'self.outside.taken["max_position_embeddings"]',
            'self.outside.whole("max_position_embeddings")',
        ),
        "hub/test_options.py::test_top_level_original_context_length_overrides_the_one_in_the_rope_options",
    ),
    Bug(
        "the original length outside of the rotary options is ignored",
        "hub.positions:RotaryEntry.scaling",
        takes(length=lambda _: None),
        "hub/test_options.py::test_top_level_original_context_length_overrides_the_one_in_the_rope_options",
    ),
    Bug(
        "an adapter beside a model is ignored",
        "hub.adapter:read_adapter_beside",
        gives(None),
        "hub/test_adapter.py::test_loaded_lora_update_is_scaled_as_in_peft",
    ),
    Bug(
        "an adapter's layers_to_transform selects no layers",
        "hub.adapter:Targets._is_layer_adapted",
        gives(True),
        "hub/test_adapter.py::test_adapter_config_options_determine_which_layers_are_adapted",
    ),
    Bug(
        "a regular expression may match a part of a name",
        "hub.name_patterns:fully_matches",
        Replace("len(name) in ends(_parsed(pattern), 0)", "bool(ends(_parsed(pattern), 0))"),
        "hub/test_name_patterns.py::test_adapter_name_pattern_matches_the_same_names_as_python_re",
    ),
    Bug(
        "T5's table under the head's name is taken for an untied head",
        "hub.families.t5:read",
        Replace("HEAD not in options.tensors or is_head_the_table", "HEAD not in options.tensors"),
        "hub/test_published.py::test_t5_head_is_tied_only_if_the_file_has_one_embedding_table",
    ),
    Bug(
        "a stored table of positions is not compared with the computed one",
        "hub.huggingface:check_constants",
        gives(None),
        "hub/test_folders.py::test_stored_position_table_must_equal_computed_table",
    ),
    Bug(
        "an adapter without a selected linear layer loads without a warning",
        "hub.adapter:Adapter._warn_of_missing",
        gives(None),
        "hub/test_adapter.py::test_adapter_without_update_of_a_selected_layer_gives_a_warning",
    ),
    Bug(
        "every layer is loaded into the first one",
        "hub.table:fill_arrays",
        takes(entry=lambda x: x._replace(place=(0, *x.place[1:])) if x.place else x),
        ROUND_TRIP,
    ),
    Bug(
        "a special id beyond the vocabulary counts as a token",
        "hub.tokenizers.files:_ids",
        Replace("token < (vocab_size or 2**31)", "token < 2**31"),
        "hub/test_special_ids.py::test_special_token_id_in_config_file_is_read_or_rejected",
    ),
)
