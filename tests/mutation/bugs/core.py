"""Bugs of the forward pass: attention, layers, hooks, caches, sources and scores."""

from dataclasses import replace
from importlib import import_module

import jax.numpy as jnp

from tests.mutation.bug import (
    ATTENTION,
    AUTOREGRESSIVE,
    CHUNKING,
    DISCIPLINE,
    FORMULA,
    GENERATION,
    INSPECT,
    INVARIANCE,
    NONFINITE,
    OPTIONS,
    REWIND,
    Bug,
)
from tests.mutation.changes import Replace, gives, having, inside, takes, then

ANY_CHUNKING = f"{AUTOREGRESSIVE}::test_logits_of_cached_chunks_equal_single_pass"
ENCODER = "models/test_encoder.py"
SCORE = "decoding/test_score.py"
SOURCE = "properties/test_source.py"


def functional():
    return import_module("jaxformer.functional")


def long_chunks_from_zero(self_attention):
    """Changes the positions of the queries only if they are many and there is a cache."""

    def from_zero(context):
        own = replace(context.queries, positions=None)
        is_long = context.written is not None and context.implementation != "step"
        return replace(context, queries=own) if is_long else context

    return then(from_zero)(self_attention)


def zeroes_queries_only(zero_masked):
    return lambda query, key, value, context: (
        zero_masked(query, key, value, context)[0],
        key,
        value,
    )


def fused_if_possible(context):
    return replace(context, implementation="auto") if context.implementation == "fused" else context


def without_padding(by_position):
    return lambda steps, lengths, width, *rest: by_position(
        steps, [width] * len(lengths), width, *rest
    )


BUGS = (
    Bug(
        "a patch at a position beyond the text changes nothing",
        "models.check:_check_range",
        gives(None),
        f"{INSPECT}::test_patch_at_missing_position_or_step_is_rejected",
    ),
    Bug(
        "documents of a packed sequence share their positions",
        "models.check:longest_text",
        Replace("segment_ids is None", "True"),
        f"{INSPECT}::test_patch_at_missing_position_or_step_is_rejected",
    ),
    # ---- attention
    Bug(
        "scores are scaled by 1 / d instead of 1 / √d",
        "functional.attention.scores:Scores.for_heads",
        takes(head_dim=lambda head_dim: head_dim**2),
        FORMULA,
    ),
    Bug(
        "masked values are not zeroed, so 0 × NaN gives NaN",
        "functional.attention.attend:_zero_masked",
        zeroes_queries_only,
        f"{ATTENTION}::test_nan_in_padding_does_not_change_the_output_and_gradients_of_attention",
    ),
    Bug(
        "fused attention falls back silently",
        "functional.attention.attend:attend",
        takes(context=fused_if_possible),
        f"{ATTENTION}::test_fused_attention_rejects_arguments_that_cudnn_does_not_support",
    ),
    Bug(
        "fused attention without a GPU silently becomes blockwise",
        "functional.attention.platforms:implementation_here",
        takes(implementation=lambda name: "auto" if name == "fused" else name),
        f"{ATTENTION}::test_error_for_unsupported_attention_arguments_states_the_reason",
    ),
    Bug(
        "blockwise: the masks of documents are stored for all layers",
        "functional.attention.blockwise:_forward",
        Replace("jax.tree.leaves(places)", "False"),
        "functional/attention/test_blockwise.py::test_document_masks_are_not_stored_for_all_layers_at_once",
    ),
    Bug(
        "capturing the weights drops the mask",
        "functional.attention.attend:attend",
        Replace(
            "context.mask(context.queries, context.keys)",
            "context.mask(context.queries, context.keys) | bool(hook.hooks.capture)",
        ),
        OPTIONS,
    ),
    # ---- the block and its layers
    Bug(
        "post-norm runs as pre-norm",
        "functional.layers.layer:Residual._norm",
        takes(self=lambda x: replace(x, norm_position="pre") if x.norm_position == "post" else x),
        f"{INVARIANCE}::test_decoder_logits_equal_float64_reference_loops",
    ),
    Bug(
        "unrolled layers take their dropout keys in reverse",
        "functional.stack:run_stack",
        Replace(
            "dropout_keys or [None] * num_layers",
            "(dropout_keys or [None] * num_layers)[:: 1 if scans else -1]",
        ),
        f"{DISCIPLINE}::test_dropout_is_equal_for_scanned_and_unrolled_layers",
    ),
    Bug(
        "the same dropout key in each layer",
        "functional.model:Model.forward",
        inside("split_key", lambda _: lambda key, number: [key] * number),
        f"{DISCIPLINE}::test_dropout_is_independent_across_layers_and_positions",
    ),
    # ---- hooks
    Bug(
        "a patch is added to the value",
        "functional.hooks:Patch.changed",
        inside("jnp.where", lambda where: lambda at, new, value: where(at, value + new, value)),
        f"{DISCIPLINE}::test_patch_replaces_only_the_value_at_its_layer_and_position",
    ),
    Bug(
        "the last layer's patch is used in all layers",
        "functional.hooks:Patch.split_layers",
        inside("min", lambda _: lambda layer, last: last),
        f"{DISCIPLINE}::test_patch_for_one_layer_leaves_other_layers_unchanged",
    ),
    Bug(
        "patches outside the blocks are dropped",
        "functional.model:Model.forward",
        Replace("tokens.hook(run.hooks)", "tokens.hook(replace(run.hooks, patch={}))"),
        f"{DISCIPLINE}::test_patching_in_all_embeddings_of_another_text_gives_the_logits_of_that_text",
    ),
    Bug(
        "a declared hook point is never called",
        "functional.layers.attention:Attention.__call__",
        Replace(
            'hook("attention.output", linear(weights["output"], merge_heads(heads)))',
            'linear(weights["output"], merge_heads(heads))',
        ),
        f"{DISCIPLINE}::test_capturing_does_not_change_logits",
    ),
    Bug(
        "a patch ignores its token positions",
        "functional.hooks:Patch.changed",
        takes(self=lambda patch: patch._replace(positions=None)),
        f"{INSPECT}::test_patch_positions_count_within_documents_and_exclude_padding",
    ),
    Bug(
        "a patch at positions changes padding too",
        "functional.hooks:HookPoints.matches",
        takes(self=lambda hook: type(hook)(hook.hooks, hook.positions)),
        f"{INSPECT}::test_patch_positions_count_within_documents_and_exclude_padding",
    ),
    Bug(
        "a patch's steps are off by one",
        "functional.hooks:Hooks.at_step",
        takes(step=lambda step: step - 1),
        f"{INSPECT}::test_patch_at_a_generation_step_equals_patch_at_its_position",
    ),
    Bug(
        "captured attention weights are indexed by slot",
        "decoding.generate:_by_position",
        without_padding,
        f"{INSPECT}::test_generate_captures_the_same_values_as_a_single_pass",
    ),
    Bug(
        "the encoder's hook points have the decoder's names",
        "functional.model:Model.encode",
        inside("PREFIX", lambda _: ""),
        f"{INSPECT}::test_generate_captures_encoder_values_once",
    ),
    # ---- the cache: x-transformers#219, torchtune#959, transformers#15751
    Bug(
        "new keys are written one cache slot late",
        "functional.cache.slots:write_key_values",
        takes(written=lambda written: written + (written.ndim == 0)),
        ANY_CHUNKING,
    ),
    Bug(
        "a long chunk counts its positions from 0",
        "functional.tokens:Tokens.self_attention",
        long_chunks_from_zero,
        f"{CHUNKING}::test_logits_of_long_cached_chunks_equal_single_pass",
    ),
    Bug(
        "cache overflow overwrites the last slot silently",  # flax nnx attention
        "functional.model:mask_invalid_sequences",
        takes(after=lambda cache: replace(cache, length=0 * cache.length)),
        f"{CHUNKING}::test_cache_overflow_inside_jit_gives_nan",
    ),
    Bug(
        "the contents of empty slots reach the output",
        "functional.cache.slots:Slots.live_part",
        inside("jnp.where", lambda _: lambda used, x, zero: x),
        f"{CHUNKING}::test_nan_in_masked_cache_slots_does_not_change_logits "
        f"{CHUNKING}::test_gradients_through_cache_with_nan_are_finite",
    ),
    Bug(
        "decoding steps read one block of slots too few",
        "decoding.generate:_generate_batch",
        Replace("width + most - room - 1 + block", "width + most - room - 1"),
        f"{GENERATION}::test_long_generation_grows_the_cache",
    ),
    Bug(
        "rewinding leaves the forgotten slots visible",
        "functional.cache.table:TokenTable.rewind",
        lambda rewind: lambda self, *args: replace(rewind(self, *args), documents=self.documents),
        f"{REWIND}::test_logits_after_rewinding_the_cache_equal_one_pass",
    ),
    Bug(
        "rewinding does not move the position back",
        "functional.cache.key_values:Cache.rewind",
        lambda rewind: lambda self, lengths: replace(rewind(self, lengths), cursor=self.cursor),
        f"{REWIND}::test_logits_after_rewinding_the_cache_equal_one_pass",
    ),
    Bug(
        "a ring gives padding a slot",
        "functional.cache.table:Ring.append",
        takes(is_real=jnp.ones_like),
        f"{REWIND}::test_logits_of_ring_buffer_cache_equal_single_pass",
    ),
    # ---- sources
    Bug(
        "batch elements get the sources in a wrong order",
        "functional.attention.heads:ungroup_heads",
        lambda _: lambda x, batch_and_heads: x.reshape(*batch_and_heads, *x.shape[-2:]),
        f"{SOURCE}::test_batch_elements_that_share_a_source_have_the_logits_of_separate_copies",
    ),
    Bug(
        "the source's padding is seen by cross-attention",
        "functional.tokens:Tokens.source_attention",
        then(
            lambda x: (
                x
                if x.implementation == "step"
                else replace(x, keys=replace(x.keys, segment_ids=None))
            )
        ),
        f"{SOURCE}::test_moving_source_padding_does_not_change_the_logits",
    ),
    Bug(
        "cached cross-attention sees the source's padding",
        "functional.tokens:Tokens.source_attention",
        then(
            lambda x: (
                replace(x, keys=replace(x.keys, segment_ids=None))
                if x.implementation == "step"
                else x
            )
        ),
        f"{ANY_CHUNKING}[encoder-decoder]",
    ),
    Bug(
        "a decoder starts from zeros, not from its source",
        "functional.layers.recurrent:Recurrent._last_of_source",
        then(lambda _: None),
        f"{SOURCE}::test_logits_depend_on_exactly_the_source_tokens_of_their_sequence",
    ),
    Bug(
        "the source's padding moves the encoder's state",
        "functional.layers.recurrent:Recurrent.context",
        then(lambda context: (context[0]._replace(valid=None, begins=None), context[1])),
        f"{SOURCE}::test_moving_source_padding_does_not_change_the_logits",
    ),
    Bug(
        "the encoder is causal",
        "models.builders.transformers:self_attention_mask",
        lambda rule: (
            lambda config, mask=None: (
                functional().Causal() & rule(config, mask)
                if config.bidirectional
                else rule(config, mask)
            )
        ),
        f"{ENCODER}::test_encoder_output_depends_on_its_whole_document",
    ),
    Bug(
        "an encoder sees other documents",
        "functional.tokens:Tokens.self_attention",
        takes(mask=lambda x: x if functional().Causal() in x.rules() else functional().Padding()),
        f"{ENCODER}::test_packed_document_has_the_encoder_outputs_of_the_document_alone",
    ),
    # ---- scores
    Bug(
        "score returns NaN without an error",
        "decoding.score:score",
        inside("check_finite_logits", gives(None)),
        NONFINITE,
    ),
    Bug(
        "a document scores the first token of the next one",
        "decoding.score:_score",
        inside("document_positions", then(lambda x: (x[0], jnp.maximum(x[1], 1), x[2]))),
        f"{SCORE}::test_score_is_the_sum_of_log_probabilities_over_documents",
    ),
    Bug(
        "tokens inside a visible prefix are scored",
        "decoding.score:_score",
        takes(model=having(minimum_prefill=1)),
        f"{SCORE}::test_score_is_the_sum_of_log_probabilities_over_documents",
    ),
    Bug(
        "score reads a token's probability from the logits of that token's position",
        "decoding.score:_score",
        Replace("hidden[:, :-1]", "hidden[:, 1:]"),
        f"{AUTOREGRESSIVE}::test_score_is_sum_of_stepwise_log_probabilities",
    ),
    Bug(
        "score does not check its variables",
        "decoding.score:score",
        takes(model=having(check=lambda variables: None)),
        f"{SCORE}::test_score_rejects_packed_weights "
        "models/test_bad_input.py::test_models_and_decoding_raise_errors_that_name_invalid_arguments",
    ),
    Bug(
        "parameters of another shape are accepted",
        "models.check:check_parameters",
        gives(None),
        "models/test_kernels_in_models.py::test_model_error_names_parameters_that_are_missing_extra_or_misshapen",
    ),
)
