"""Bugs of norms, positions, kernels and the checks of model inputs."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from tests.mutation.bug import CHUNKING, DISCIPLINE, INVARIANCE, KERNELS, Bug
from tests.mutation.changes import Replace, inside, takes, then, unchanged

EXPERTS = "functional/layers/test_experts.py"
NORMS, POSITIONS = "functional/layers/test_norms.py", "functional/test_positions.py"
POINTS = "properties/test_score_and_divisor_points.py"


def other_layout(rotary):
    def broken(x, positions, base=10_000.0, *, fraction=1.0, interleaved=False, scaling=None):
        how = {"fraction": fraction, "interleaved": not interleaved, "scaling": scaling}
        return rotary(x, positions, base, **how)

    return broken


def scales_ids_only(embed):
    def broken(self, weights, inputs, *rest):
        if not jnp.issubdtype(inputs.tokens.dtype, jnp.integer):
            self = replace(self, is_scaled=False)
        return embed(self, weights, inputs, *rest)

    return broken


def knows_every_point(checked_hooks):
    def broken(capture, patch, points, *, length=None, source_length=None, steps=None):
        sizes = {"length": length, "source_length": source_length, "steps": steps}
        return checked_hooks(capture, patch, (*capture, *(patch or {})), **sizes)

    return broken


def _clipped_twice(x):
    x = jnp.clip(x, -7.0, 7.0)
    return x * jax.nn.sigmoid(1.702 * x)


BUGS = (
    # ---- norms and positions: flax#1491, transformers#29285, #25199
    Bug(
        "variance is computed as E[x²] − E[x]²",
        "functional.layers.norms:layer_norm",
        Replace(
            "jnp.square(centred).mean(axis=-1, keepdims=True)",
            "jnp.square(x32).mean(axis=-1, keepdims=True)"
            " - jnp.square(x32.mean(axis=-1, keepdims=True))",
        ),
        NORMS,
    ),
    Bug(
        "dynamic tanh scales its output by α",
        "functional.layers.norms:dynamic_tanh",
        Replace(
            "jnp.tanh(input_scale * x.astype(jnp.float32))",
            "input_scale * jnp.tanh(x.astype(jnp.float32))",
        ),
        f"{NORMS}::test_dynamic_tanh_equals_formula",
    ),
    Bug(
        "the scores at a hook point are not masked",
        "functional.attention.attend:attend",
        Replace(
            "ungroup_heads(jnp.where(visible, scores, -jnp.inf), query.shape[:-2])",
            "ungroup_heads(scores, query.shape[:-2])",
        ),
        f"{POINTS}::test_captured_attention_scores_are_scaled_products_and_minus_infinity_if_masked",
    ),
    Bug(
        "an edit of the scores makes masked keys visible",
        "functional.attention.attend:attend",
        Replace("softmax(jnp.where(visible, scores, -jnp.inf), sink)", "softmax(scores, sink)"),
        f"{POINTS}::test_edit_of_scores_changes_the_softmax_but_not_the_mask",
    ),
    Bug(
        "a changed divisor of a norm is ignored",
        "functional.layers.norms:apply_norm",
        Replace(
            "norm.divide(own, x, hook(point, norm.divisor(own, x)))",
            "norm(own, x)",
        ),
        f"{POINTS}::test_rms_norm_divides_by_an_edited_divisor",
    ),
    Bug(
        "the divisor of LayerNorm is that of RMSNorm",
        "functional.layers.norms:LayerNorm.divisor",
        Replace(
            "x.astype(jnp.float32).var(axis=-1, keepdims=True)",
            "jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True)",
        ),
        f"{POINTS}::test_divisor_hook_point_is_the_standard_deviation_or_rms_of_the_input_of_the_norm",
    ),
    Bug(
        "the divisor of a norm after a sub-layer is not captured",
        "functional.layers.layer:Residual.sublayer_output",
        Replace(
            'y = self._norm("post_sublayer", weights, y, at.hook)',
            'y = self._norm("post_sublayer", weights, y, NO_HOOK)',
        ),
        f"{POINTS}::test_divisor_hook_point_is_the_standard_deviation_or_rms_of_the_input_of_the_norm",
    ),
    Bug(
        "scores of keys without a slot are 0 in generate",
        "decoding.generate:_collect",
        Replace("MASKED_VALUES[name]", "0.0"),
        "decoding/test_inspect.py::test_generate_captures_the_same_values_as_a_single_pass",
    ),
    Bug(
        "fused attention runs although its scores are captured",
        "functional.tokens:choose_implementation",
        Replace('{f"{name}.scores", f"{name}.weights"}', '{f"{name}.weights"}'),
        f"{POINTS}::test_captured_attention_scores_are_scaled_products_and_minus_infinity_if_masked",
    ),
    Bug(
        "the divisor of an attributed norm is not constant",
        "interpret.attribution:_fixed_norm",
        Replace("jax.lax.stop_gradient(norm.divisor(weights, x))", "norm.divisor(weights, x)"),
        "interpret/test_attribution.py::test_norm_with_fixed_statistics_is_an_affine_function",
    ),
    Bug(
        "an activation is computed in bfloat16",
        "functional.layers.feedforward:_wide",
        Replace("x.astype(jnp.promote_types(x.dtype, jnp.float32))", "x"),
        "functional/layers/test_feedforward.py::test_activation_functions_round_their_bfloat16_result_only_once",
    ),
    Bug(
        "a gate is rounded before its product",
        "functional.layers.feedforward:gated",
        Replace("_activated(gate, activation)", "_activated(gate, activation).astype(x.dtype)"),
        "functional/layers/test_feedforward.py::test_feed_forward_rounds_gates_once_in_bfloat16",
    ),
    Bug(
        "a clipped gate multiplies u instead of u + 1",
        "functional.layers.feedforward:gated",
        Replace("_GATED.get(activation, lambda x: x)", "(lambda x: x)"),
        "functional/layers/test_feedforward.py::test_clipped_swiglu_clips_gate_and_value",
    ),
    Bug(
        "a clipped gate is also clipped at −7",
        "functional.layers.feedforward:_GATES",
        lambda gates: {**gates, "clipped_swiglu": (_clipped_twice, 0.4220)},
        "functional/layers/test_feedforward.py::test_clipped_swiglu_clips_gate_and_value",
    ),
    # ---- experts
    Bug(
        "a router looks at the next token",
        "functional.layers.experts:Experts.__call__",
        inside("route", takes(x=lambda x: jnp.roll(x, -1, axis=-2))),
        f"{EXPERTS}::test_a_decoder_with_experts_depends_on_earlier_tokens_only",
    ),
    Bug(
        "tokens beyond an expert's even share are dropped",
        "functional.layers.expert_products:_block_sizes",
        Replace("(num_rows + num_here * (block - 1)) // block", "-(-num_rows // block)"),
        f"{EXPERTS}::test_mixture_of_experts_equals_formula",
    ),
    Bug(
        "the shares of all experts, and not of the chosen ones, sum to 1",
        "functional.layers.experts:route",
        Replace("shares / shares.sum(axis=-1, keepdims=True)", "shares"),
        f"{EXPERTS}::test_mixture_of_experts_equals_formula",
    ),
    Bug(
        "a router ignores its bias",
        "functional.layers.experts:route",
        takes(router=lambda router: {"kernel": router["kernel"]}),
        f"{EXPERTS}::test_routing_weights_are_a_softmax_over_the_chosen_logits",
    ),
    Bug(
        "the gradient of an expert is that of its last block",
        "functional.layers.expert_products:_map_blocks",
        Replace("total.at[owner].add(x)", "total.at[owner].set(x)"),
        f"{EXPERTS}::test_expert_gradients_equal_those_of_computing_all_experts",
    ),
    Bug(
        "a device computes tokens of experts that it lacks",
        "functional.layers.expert_products:_sorted_by_expert",
        Replace("(index >= 0) & (index < num_here)", "index < num_here"),
        f"{EXPERTS}::test_expert_outputs_summed_over_devices_equal_those_of_one_device",
    ),
    Bug(
        "a device has blocks for too few tokens of its experts",
        "functional.layers.expert_products:_block_sizes",
        Replace("min(chosen, num_here)", "chosen * num_here // num_experts"),
        f"{EXPERTS}::test_expert_outputs_summed_over_devices_equal_those_of_one_device",
    ),
    Bug(
        "the losses of a router count padding",
        "functional.layers.experts:router_losses",
        Replace("segment_ids != 0", "segment_ids == segment_ids"),
        f"{EXPERTS}::test_router_losses_average_over_tokens_without_padding",
    ),
    Bug(
        "the shared expert is not gated",
        "functional.layers.experts:shared_expert",
        Replace('jax.nn.sigmoid(linear(weights["shared_gate"], x, jnp.float32)) * y', "y"),
        f"{EXPERTS}::test_shared_expert_processes_every_token",
    ),
    Bug(
        "the shared expert counts as one of those that a router chooses",
        "functional.layers.experts:Experts.flops",
        Replace("weights.keys() - _OF_ALL", "weights"),
        "models/test_flops.py::test_flops_include_every_token_in_shared_expert_and_dense_layers",
    ),
    Bug(
        "the backward pass of a norm stores intermediate steps",
        "functional.recomputed:recomputed",
        Replace("jax.checkpoint(call_with_arrays, prevent_cse=False)", "call_with_arrays"),
        "functional/test_recomputed.py",
    ),
    Bug(
        "ε is added outside the square root",
        "functional.layers.norms:layer_norm",
        Replace(
            "centred * jax.lax.rsqrt(variance + epsilon)",
            "centred / (jnp.sqrt(variance) + epsilon)",
        ),
        NORMS,
    ),
    Bug(
        "rotary angles are computed in bfloat16",
        "functional.positions:rotary",
        Replace(
            "positions[..., None].astype(jnp.float32) * frequencies",
            "(positions[..., None] * frequencies).astype(x.dtype)",
        ),
        f"{POSITIONS} {DISCIPLINE}::test_rotary_positions_above_256_stay_distinct_in_bfloat16",
    ),
    Bug(
        "rotary pairs are interleaved instead of split in halves",
        "functional.positions:rotary",
        other_layout,
        POSITIONS,
    ),
    Bug(
        "norm statistics are computed over the batch",  # flax#677
        "functional.layers.norms:rms_norm",
        inside("jnp.square", then(lambda squares: squares.mean(axis=0, keepdims=True))),
        f"{INVARIANCE}::test_vmap_over_batch_elements_gives_the_logits_of_the_batch",
    ),
    # ---- kernels
    Bug(
        "an output with equal weights gets a scale of 0",
        "functional.linear.kernels:quantize",
        inside("jnp.where", lambda _: lambda positive, step, one: step),
        f"{KERNELS}::test_int8_rounding_error_is_at_most_half_a_quantization_step",
    ),
    Bug(
        "int8 values are truncated, not rounded",
        "functional.linear.kernels:quantize",
        inside("jnp.round", lambda _: jnp.trunc),
        f"{KERNELS}::test_int8_rounding_error_is_at_most_half_a_quantization_step",
    ),
    Bug(
        "the product omits the int8 offset",
        "functional.linear.kernels:Int8Kernel.times",
        takes(self=lambda kernel: replace(kernel, offset=0 * kernel.offset)),
        f"{KERNELS}::test_product_with_kernel_of_any_class_equals_dense_product",
    ),
    Bug(
        "two input vectors take the int8 path for one vector",
        "functional.linear.kernels:Int8Kernel.times",
        Replace("len(x) == 1", "len(x) <= 2"),
        f"{KERNELS}::test_product_with_kernel_of_any_class_equals_dense_product",
    ),
    Bug(
        "int8 kernels are converted to float before a loop",
        "functional.linear.kernels:Int8Kernel.times",
        inside("jax.lax.optimization_barrier", unchanged),
        f"{KERNELS}::test_int8_kernels_are_not_converted_in_loops",
    ),
    Bug(
        "the frozen kernel gets a gradient",
        "functional.linear.low_rank:LowRankKernel.times",
        inside("jax.lax.stop_gradient", unchanged),
        f"{KERNELS}::test_low_rank_kernel_freezes_the_base_weights",
    ),
    Bug(
        "the scale of a low-rank update is omitted",
        "functional.linear.low_rank:LowRankKernel.times",
        takes(self=lambda kernel: replace(kernel, scale=1.0)),
        f"{KERNELS}::test_product_with_kernel_of_any_class_equals_dense_product",
    ),
    Bug(
        "padded rows of a packed kernel reach the output",
        "functional.linear.kernels:PackedKernel.times",
        takes(self=lambda kernel: replace(kernel, out_dim=kernel.out_dim + 10**6)),
        f"{KERNELS}::test_product_with_kernel_of_any_class_equals_dense_product",
    ),
    # ---- execution and inputs
    Bug(
        "vmap folds the batch into the heads",
        "functional.attention.heads:merge_heads",
        lambda _: lambda x: x.reshape(*x.shape[:-3], x.shape[-2], -1),
        f"{INVARIANCE}::test_decoder_logits_equal_float64_reference_loops",
    ),
    Bug(
        "an untied head is ignored",  # NeMo-Automodel#2571
        "functional.outputs:head",
        lambda head: lambda weights: {"kernel": weights["embedding"]["tokens"].T},
        f"{INVARIANCE}::test_decoder_logits_equal_float64_reference_loops",
    ),
    Bug(
        "embeddings in place of tokens are not scaled",
        "functional.embedding:Embedding.__call__",
        scales_ids_only,
        f"{INVARIANCE}::test_embedding_rows_as_inputs_give_the_logits_of_their_tokens "
        f"{CHUNKING}::test_extend_accepts_embeddings",
    ),
    Bug(
        "an id outside the vocabulary becomes another token",
        "functional.tables:look_up",
        inside("jnp.take", lambda take: lambda *args, **_: take(*args, axis=0, mode="clip")),
        f"{DISCIPLINE}::test_out_of_range_token_raises_error_or_gives_nan_logits_inside_jit",
    ),
    Bug(
        "a sequence longer than max_length is accepted",
        "models.check:check_tokens",
        takes(config=lambda config: replace(config, max_length=9 * config.max_length)),
        f"{DISCIPLINE}::test_model_rejects_tokens_and_segment_ids_of_wrong_shape",
    ),
    # ---- hooks
    Bug(
        "an unknown hook point is ignored",
        "models.check:checked_hooks",
        knows_every_point,
        f"{DISCIPLINE}::test_unknown_hook_point_is_rejected_with_the_nearest_name",
    ),
    Bug(
        "captures of unrolled layers are in reverse order",
        "functional.stack:run_stack",
        Replace("_stack_by_name(captured)", "_stack_by_name(captured[::-1])"),
        f"{DISCIPLINE}::test_capturing_does_not_change_logits",
    ),
    Bug(
        "a model class accepts a config of another kind",
        "models.language_model:LanguageModel.__post_init__",
        Replace("type(self.config) is not self.config_type", "False"),
        "models/test_bad_input.py::test_model_class_accepts_only_its_own_config_class",
    ),
)
