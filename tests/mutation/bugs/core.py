"""Bugs of the forward pass: attention, layers, hooks, caches, sources and scores."""

from dataclasses import replace
from importlib import import_module

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
from tests.mutation.changes import Replace, gives, then

ANY_CHUNKING = f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass"
ENCODER = "models/test_encoder.py"
SCORE = "decoding/test_score.py"
SOURCE = "properties/test_source.py"


def functional():
    return import_module("jaxformer.functional")


def long_chunks_from_zero(cache_contexts):
    """Changes the positions of the queries only if they are many."""

    def from_zero(context):
        own = replace(context.queries, positions=None)
        return context if context.is_decoding_step else replace(context, queries=own)

    return then(lambda x: x._replace(layers=list(map(from_zero, x.layers))))(cache_contexts)


BUGS = (
    # ---- attention
    Bug(
        "scores scaled by 1 / d",
        "functional.scores:Scores.for_heads",
        Replace("1 / math.sqrt(head_dim)", "1 / head_dim"),
        FORMULA,
    ),
    Bug(
        "masked values are not zeroed: 0 × NaN",
        "functional.attention:_zero_masked",
        Replace("jnp.where(is_seen[..., None, :, None], x, 0)", "x"),
        f"{ATTENTION}::test_nan_that_nobody_may_see_reaches_nothing",
    ),
    Bug(
        "fused attention falls back silently",
        "functional.attention:attend",
        Replace('context.implementation == "fused"', "False"),
        f"{ATTENTION}::test_fused_on_a_gpu_is_refused_for_arguments_that_cudnn_lacks",
    ),
    Bug(
        "fused attention without a GPU becomes blockwise",
        "functional.platforms:implementation_here",
        Replace('implementation == "fused"', "False"),
        f"{ATTENTION}::test_what_cannot_be_done_is_refused_with_the_reason",
    ),
    Bug(
        "capturing the weights drops the mask",
        "functional.attention:explicit_attention",
        Replace(
            "context.mask(context.queries, context.keys)",
            "context.mask(context.queries, context.keys) | bool(tap.hooks.capture)",
        ),
        OPTIONS,
    ),
    # ---- the block and its layers
    Bug(
        "post-norm runs as pre-norm",
        "functional.blocks:norm_before",
        Replace('("pre", "both")', '("pre", "both", "post")'),
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "unrolled layers take their dropout keys in reverse",
        "functional.transformer:run_layers",
        Replace(
            "[unstack(part, num_layers) for part in layers]",
            "[unstack(part, num_layers)[:: -1 if i == 1 else 1] for i, part in enumerate(layers)]",
        ),
        f"{DISCIPLINE}::test_the_same_key_gives_the_same_noise_scanned_or_unrolled",
    ),
    Bug(
        "the same dropout key in each layer",
        "functional.transformer:forward",
        Replace(
            "split_key(run.dropout_key, 1 + config.num_layers)",
            "[run.dropout_key] * (1 + config.num_layers)",
        ),
        f"{DISCIPLINE}::test_each_layer_and_each_place_has_its_own_noise",
    ),
    # ---- hooks
    Bug(
        "a patch is added to the value",
        "functional.taps:Tap._patched",
        Replace("jnp.where(where, new, value)", "jnp.where(where, value + new, value)"),
        f"{DISCIPLINE}::test_a_patch_puts_in_what_it_says_where_it_says",
    ),
    Bug(
        "the last layer's patch is used in all layers",
        "functional.taps:Patch.of_layers",
        Replace("jnp.asarray(x)[min(layer, len(x) - 1)]", "jnp.asarray(x)[len(x) - 1]"),
        f"{DISCIPLINE}::test_a_patch_for_one_layer_leaves_the_others",
    ),
    Bug(
        "patches outside the blocks are dropped",
        "functional.transformer:forward",
        Replace('tap("embedding", dropout(embed_key, x, config.dropout))', "x"),
        f"{DISCIPLINE}::test_patching_everything_at_the_embedding_is_the_other_text",
    ),
    Bug(
        "a declared point is never tapped",
        "functional.blocks:self_attention",
        Replace(
            'tap("attention.output", linear(weights["output"], merge_heads(heads)))',
            'linear(weights["output"], merge_heads(heads))',
        ),
        f"{DISCIPLINE}::test_every_declared_point_is_captured_as_it_is",
    ),
    Bug(
        "a patch ignores its positions",
        "functional.taps:Tap._patched",
        Replace("patch.positions is not None", "False"),
        f"{INSPECT}::test_padding_and_packed_documents_are_not_patched",
    ),
    Bug(
        "a patch at positions changes padding too",
        "functional.taps:Tap._matches",
        Replace("self.documents is None", "True"),
        f"{INSPECT}::test_padding_and_packed_documents_are_not_patched",
    ),
    Bug(
        "a patch's steps are off by one",
        "decoding.generate:decode_block.step",
        Replace("hooks.at_step(state.step)", "hooks.at_step(state.step - 1)"),
        f"{INSPECT}::test_a_patch_at_steps_is_that_of_their_positions",
    ),
    Bug(
        "captured attention weights are indexed by slot",
        "decoding.result:by_position",
        Replace("weights[:, row, ..., width - length :]", "weights[:, row]"),
        f"{INSPECT}::test_the_compiled_loop_captures_what_one_pass_does",
    ),
    Bug(
        "the encoder's points have the decoder's names",
        "functional.encoder_decoder:encode",
        Replace("PREFIX + name", "name"),
        f"{INSPECT}::test_the_encoders_points_are_captured_once",
    ),
    # ---- the cache: x-transformers#219, torchtune#959, transformers#15751
    Bug(
        "cache written one slot late",
        "functional.slots:write_slots",
        Replace(
            "jax.lax.dynamic_update_slice_in_dim(slots, new, written, axis=2)",
            "jax.lax.dynamic_update_slice_in_dim(slots, new, written + 1, axis=2)",
        ),
        ANY_CHUNKING,
    ),
    Bug(
        "a long chunk counts its positions from 0",
        "functional.contexts:cache_contexts",
        long_chunks_from_zero,
        f"{CHUNKING}::test_long_chunks_are_one_pass",
    ),
    Bug(
        "cache overflow overwrites the last slot silently",  # flax nnx attention
        "functional.transformer:mask_invalid_rows",
        Replace("after.capacity is not None", "False"),
        f"{CHUNKING}::test_inside_jit_it_is_one_pass_until_it_overflows_to_nan",
    ),
    Bug(
        "the contents of empty slots reach the output",
        "functional.cache:Cache.live_prefix",
        Replace("self.documents[:, None, :slots, None] != 0", "True"),
        f"{CHUNKING}::test_nan_in_slots_that_nobody_may_see_reaches_nothing "
        f"{CHUNKING}::test_gradients_through_a_poisoned_cache_are_finite",
    ),
    Bug(
        "decoding steps see one block of slots too few",
        "decoding.generate:generate",
        Replace("width + max_new_tokens - room - 1 + STEPS", "width + max_new_tokens - room - 1"),
        f"{GENERATION}::test_long_generation_goes_on_past_every_bucket",
    ),
    Bug(
        "rewinding leaves the forgotten slots visible",
        "functional.cache:Cache.rewind",
        Replace("jnp.where(forgotten, 0, self.documents)", "self.documents"),
        f"{REWIND}::test_rewound_rows_go_on_as_if_they_had_not_read",
    ),
    Bug(
        "rewinding does not move the position back",
        "functional.cache:Cache.rewind",
        Replace("jnp.where(is_refused, _NOWHERE, remaining)", "position"),
        f"{REWIND}::test_rewound_rows_go_on_as_if_they_had_not_read",
    ),
    Bug(
        "a ring gives padding a slot",
        "functional.cache:Cache.append",
        Replace("documents != 0", "documents >= 0"),
        f"{REWIND}::test_a_ring_of_few_slots_is_one_pass",
    ),
    # ---- sources
    Bug(
        "batch elements get the sources in a wrong order",
        "functional.heads:ungroup_heads",
        Replace(
            "x.reshape(*rows, kv_heads, -1, heads // kv_heads, length, features).swapaxes(1, 2)",
            "x.reshape(*rows, kv_heads, -1, heads // kv_heads, length, features)",
        ),
        f"{SOURCE}::test_a_source_serves_several_rows",
    ),
    Bug(
        "the source's padding is seen by cross-attention",
        "functional.contexts:source_context",
        then(
            lambda x: x if x.is_decoding_step else replace(x, keys=replace(x.keys, segments=None))
        ),
        f"{SOURCE}::test_where_the_padding_of_a_source_stands_does_not_matter",
    ),
    Bug(
        "cached cross-attention sees the source's padding",
        "functional.contexts:source_context",
        then(
            lambda x: replace(x, keys=replace(x.keys, segments=None)) if x.is_decoding_step else x
        ),
        ANY_CHUNKING,
    ),
    Bug(
        "a decoder starts from zeros, not from its source",
        "functional.recurrent:read",
        Replace(
            "empty_states(config, batch_size) if initial is None else initial",
            "empty_states(config, batch_size)",
        ),
        f"{SOURCE}::test_every_output_depends_on_all_of_its_source",
    ),
    Bug(
        "the source's padding moves the encoder's state",
        "functional.recurrent_encoder_decoder:encode",
        lambda encode: (
            lambda weights, source, config, run: encode(
                weights, replace(source, segments=None), config, run
            )
        ),
        f"{SOURCE}::test_where_the_padding_of_a_source_stands_does_not_matter",
    ),
    Bug(
        "the encoder is causal",
        "functional.transformer:self_attention_mask",
        lambda rule: (
            lambda config, mask=None: (
                functional().Causal() & rule(config, mask)
                if config.bidirectional
                else rule(config, mask)
            )
        ),
        f"{ENCODER}::test_every_output_depends_on_all_of_its_document",
    ),
    Bug(
        "an encoder sees other documents",
        "functional.transformer:self_attention_mask",
        lambda rule: (
            lambda config, mask=None: (
                functional().Padding() if config.bidirectional else rule(config, mask)
            )
        ),
        f"{ENCODER}::test_a_document_gives_what_it_gives_alone",
    ),
    # ---- scores
    Bug(
        "score returns NaN without an error",
        "decoding.score:score",
        Replace("isinstance(scores, jax.core.Tracer)", "True"),
        NONFINITE,
    ),
    Bug(
        "a document scores the first token of the next one",
        "decoding.score:_score",
        Replace("positions[:, 1:] >= model.minimum_prefill", "positions[:, 1:] >= 0"),
        f"{SCORE}::test_score_is_the_sum_over_documents",
    ),
    Bug(
        "tokens inside a visible prefix are scored",
        "decoding.score:_score",
        Replace("model.minimum_prefill", "1"),
        f"{SCORE}::test_score_is_the_sum_over_documents",
    ),
    Bug(
        "score looks a token up in its own logits",
        "decoding.score:_score",
        Replace("hidden[:, :-1]", "hidden[:, 1:]"),
        f"{AUTOREGRESSIVE}::test_score_is_the_sum_of_stepwise_log_probabilities",
    ),
    Bug(
        "score does not check its variables",
        "decoding.score:score",
        Replace("model.check(variables)", "None"),
        f"{SCORE}::test_score_says_that_it_needs_the_params "
        "models/test_bad_input.py::test_a_mistake_is_named",
    ),
    Bug(
        "parameters of another shape are accepted",
        "models.check:check_parameters",
        gives(None),
        "models/test_kernels_in_models.py::test_parameters_of_another_model_are_refused_by_name",
    ),
)
