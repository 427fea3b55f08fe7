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

ANY_CHUNKING = f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass"
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
    return lambda weights, lengths, width: by_position(weights, [width] * len(lengths), width)


BUGS = (
    Bug(
        "a patch at a position beyond the text changes nothing",
        "models.check:_check_range",
        gives(None),
        f"{INSPECT}::test_a_position_or_step_that_does_not_exist_is_refused",
    ),
    Bug(
        "documents of a packed row share their positions",
        "models.check:longest_text",
        Replace("segments is None", "True"),
        f"{INSPECT}::test_a_position_or_step_that_does_not_exist_is_refused",
    ),
    # ---- attention
    Bug(
        "scores scaled by 1 / d",
        "functional.attention.scores:Scores.for_heads",
        takes(head_dim=lambda head_dim: head_dim**2),
        FORMULA,
    ),
    Bug(
        "masked values are not zeroed: 0 × NaN",
        "functional.attention.attend:_zero_masked",
        zeroes_queries_only,
        f"{ATTENTION}::test_nan_that_nobody_may_see_reaches_nothing",
    ),
    Bug(
        "fused attention falls back silently",
        "functional.attention.attend:attend",
        takes(context=fused_if_possible),
        f"{ATTENTION}::test_fused_on_a_gpu_is_refused_for_arguments_that_cudnn_lacks",
    ),
    Bug(
        "fused attention without a GPU becomes blockwise",
        "functional.attention.platforms:implementation_here",
        takes(implementation=lambda name: "auto" if name == "fused" else name),
        f"{ATTENTION}::test_what_cannot_be_done_is_refused_with_the_reason",
    ),
    Bug(
        "blockwise: the masks of documents are stored for all layers",
        "functional.attention.blockwise:_forward",
        Replace("jax.tree.leaves(places)", "False"),
        "functional/attention/test_blockwise.py::test_masks_of_documents_are_not_stored_for_all_layers",
    ),
    Bug(
        "capturing the weights drops the mask",
        "functional.attention.attend:attend",
        Replace(
            "context.mask(context.queries, context.keys)",
            "context.mask(context.queries, context.keys) | bool(tap.hooks.capture)",
        ),
        OPTIONS,
    ),
    # ---- the block and its layers
    Bug(
        "post-norm runs as pre-norm",
        "functional.layers.layer:Residual._norm",
        takes(self=lambda x: replace(x, norm_position="pre") if x.norm_position == "post" else x),
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "unrolled layers take their dropout keys in reverse",
        "functional.stack:run_stack",
        Replace(
            "dropout_keys or [None] * num_layers",
            "(dropout_keys or [None] * num_layers)[:: 1 if scans else -1]",
        ),
        f"{DISCIPLINE}::test_the_same_key_gives_the_same_noise_scanned_or_unrolled",
    ),
    Bug(
        "the same dropout key in each layer",
        "functional.model:Model.forward",
        inside("split_key", lambda _: lambda key, number: [key] * number),
        f"{DISCIPLINE}::test_each_layer_and_each_place_has_its_own_noise",
    ),
    # ---- hooks
    Bug(
        "a patch is added to the value",
        "functional.taps:Tap._patched",
        inside("jnp.where", lambda where: lambda at, new, value: where(at, value + new, value)),
        f"{DISCIPLINE}::test_a_patch_puts_in_what_it_says_where_it_says",
    ),
    Bug(
        "the last layer's patch is used in all layers",
        "functional.taps:Patch.of_layers",
        inside("min", lambda _: lambda layer, last: last),
        f"{DISCIPLINE}::test_a_patch_for_one_layer_leaves_the_others",
    ),
    Bug(
        "patches outside the blocks are dropped",
        "functional.model:Model.forward",
        Replace("tokens.tap(run.hooks)", "tokens.tap(replace(run.hooks, patch={}))"),
        f"{DISCIPLINE}::test_patching_everything_at_the_embedding_is_the_other_text",
    ),
    Bug(
        "a declared point is never tapped",
        "functional.layers.attention:Attention.__call__",
        Replace(
            'tap("attention.output", linear(weights["output"], merge_heads(heads)))',
            'linear(weights["output"], merge_heads(heads))',
        ),
        f"{DISCIPLINE}::test_every_declared_point_is_captured_as_it_is",
    ),
    Bug(
        "a patch ignores its positions",
        "functional.taps:Tap._patched",
        takes(patch=lambda patch: patch._replace(positions=None)),
        f"{INSPECT}::test_padding_and_packed_documents_are_not_patched",
    ),
    Bug(
        "a patch at positions changes padding too",
        "functional.taps:Tap._matches",
        takes(self=lambda tap: type(tap)(tap.hooks, tap.positions)),
        f"{INSPECT}::test_padding_and_packed_documents_are_not_patched",
    ),
    Bug(
        "a patch's steps are off by one",
        "functional.taps:Hooks.at_step",
        takes(step=lambda step: step - 1),
        f"{INSPECT}::test_a_patch_at_steps_is_that_of_their_positions",
    ),
    Bug(
        "captured attention weights are indexed by slot",
        "decoding.generate:_by_position",
        without_padding,
        f"{INSPECT}::test_the_compiled_loop_captures_what_one_pass_does",
    ),
    Bug(
        "the encoder's points have the decoder's names",
        "functional.model:Model.encode",
        inside("PREFIX", lambda _: ""),
        f"{INSPECT}::test_the_encoders_points_are_captured_once",
    ),
    # ---- the cache: x-transformers#219, torchtune#959, transformers#15751
    Bug(
        "cache written one slot late",
        "functional.cache.slots:write_slots",
        takes(written=lambda written: written + (written.ndim == 0)),
        ANY_CHUNKING,
    ),
    Bug(
        "a long chunk counts its positions from 0",
        "functional.tokens:Tokens.self_attention",
        long_chunks_from_zero,
        f"{CHUNKING}::test_long_chunks_are_one_pass",
    ),
    Bug(
        "cache overflow overwrites the last slot silently",  # flax nnx attention
        "functional.model:mask_invalid_rows",
        takes(after=lambda cache: replace(cache, length=0 * cache.length)),
        f"{CHUNKING}::test_inside_jit_it_is_one_pass_until_it_overflows_to_nan",
    ),
    Bug(
        "the contents of empty slots reach the output",
        "functional.cache.slots:Slots.live_part",
        inside("jnp.where", lambda _: lambda used, x, zero: x),
        f"{CHUNKING}::test_nan_in_slots_that_nobody_may_see_reaches_nothing "
        f"{CHUNKING}::test_gradients_through_a_poisoned_cache_are_finite",
    ),
    Bug(
        "decoding steps see one block of slots too few",
        "decoding.generate:_continued",
        Replace("width + most - room - 1 + STEPS", "width + most - room - 1"),
        f"{GENERATION}::test_long_generation_goes_on_past_every_bucket",
    ),
    Bug(
        "rewinding leaves the forgotten slots visible",
        "functional.cache.table:SlotTable.rewind",
        lambda rewind: lambda self, *args: replace(rewind(self, *args), documents=self.documents),
        f"{REWIND}::test_rewound_rows_go_on_as_if_they_had_not_read",
    ),
    Bug(
        "rewinding does not move the position back",
        "functional.cache.key_values:Cache.rewind",
        lambda rewind: lambda self, lengths: replace(rewind(self, lengths), cursor=self.cursor),
        f"{REWIND}::test_rewound_rows_go_on_as_if_they_had_not_read",
    ),
    Bug(
        "a ring gives padding a slot",
        "functional.cache.table:Ring.append",
        takes(is_real=jnp.ones_like),
        f"{REWIND}::test_a_ring_of_few_slots_is_one_pass",
    ),
    # ---- sources
    Bug(
        "batch elements get the sources in a wrong order",
        "functional.attention.heads:ungroup_heads",
        lambda _: lambda x, batch_and_heads: x.reshape(*batch_and_heads, *x.shape[-2:]),
        f"{SOURCE}::test_a_source_serves_several_rows",
    ),
    Bug(
        "the source's padding is seen by cross-attention",
        "functional.tokens:Tokens.source_attention",
        then(
            lambda x: (
                x if x.implementation == "step" else replace(x, keys=replace(x.keys, segments=None))
            )
        ),
        f"{SOURCE}::test_where_the_padding_of_a_source_stands_does_not_matter",
    ),
    Bug(
        "cached cross-attention sees the source's padding",
        "functional.tokens:Tokens.source_attention",
        then(
            lambda x: (
                replace(x, keys=replace(x.keys, segments=None)) if x.implementation == "step" else x
            )
        ),
        f"{ANY_CHUNKING}[encoder-decoder]",
    ),
    Bug(
        "a decoder starts from zeros, not from its source",
        "functional.layers.recurrent:Recurrent._last_of_source",
        then(lambda _: None),
        f"{SOURCE}::test_every_output_depends_on_all_of_its_source",
    ),
    Bug(
        "the source's padding moves the encoder's state",
        "functional.layers.recurrent:Recurrent.context",
        then(lambda context: (context[0]._replace(valid=None, begins=None), context[1])),
        f"{SOURCE}::test_where_the_padding_of_a_source_stands_does_not_matter",
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
        f"{ENCODER}::test_every_output_depends_on_all_of_its_document",
    ),
    Bug(
        "an encoder sees other documents",
        "functional.tokens:Tokens.self_attention",
        takes(mask=lambda x: x if functional().Causal() in x.rules() else functional().Padding()),
        f"{ENCODER}::test_a_document_gives_what_it_gives_alone",
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
        f"{SCORE}::test_score_is_the_sum_over_documents",
    ),
    Bug(
        "tokens inside a visible prefix are scored",
        "decoding.score:_score",
        takes(model=having(minimum_prefill=1)),
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
        takes(model=having(check=lambda variables: None)),
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
