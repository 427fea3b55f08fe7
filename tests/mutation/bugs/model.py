"""Bugs of norms, positions, kernels and the checks of model inputs."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from tests.mutation.bug import CHUNKING, DISCIPLINE, INVARIANCE, KERNELS, Bug
from tests.mutation.changes import Replace, inside, takes, then, unchanged

EXPERTS = "functional/layers/test_experts.py"
NORMS, POSITIONS = "functional/layers/test_norms.py", "functional/test_positions.py"


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
        "variance by E[x²] − E[x]²",
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
        f"{NORMS}::test_dynamic_tanh_is_its_formula",
    ),
    Bug(
        "a fixed norm divides by the deviation of its input",
        "functional.layers.norms:LayerNorm.affine",
        Replace("at.var(axis=-1, keepdims=True)", "x.var(axis=-1, keepdims=True)"),
        "interpret/test_attribution.py::test_a_norm_of_fixed_size_is_the_norm_and_its_derivative_is_linear",
    ),
    Bug(
        "an activation is computed in bfloat16",
        "functional.layers.feedforward:_wide",
        Replace("x.astype(jnp.promote_types(x.dtype, jnp.float32))", "x"),
        "functional/layers/test_feedforward.py::test_activations_are_rounded_once_in_bfloat16",
    ),
    Bug(
        "a gate is rounded before its product",
        "functional.layers.feedforward:gated",
        Replace("_activated(gate, activation)", "_activated(gate, activation).astype(x.dtype)"),
        "functional/layers/test_feedforward.py::test_gates_are_rounded_once_in_bfloat16",
    ),
    Bug(
        "a clipped gate multiplies u instead of u + 1",
        "functional.layers.feedforward:gated",
        Replace("_GATED.get(activation, lambda x: x)", "(lambda x: x)"),
        "functional/layers/test_feedforward.py::test_both_halves_of_a_clipped_gate_are_clipped",
    ),
    Bug(
        "a clipped gate is also clipped at −7",
        "functional.layers.feedforward:_GATES",
        lambda gates: {**gates, "clipped_swiglu": (_clipped_twice, 0.4220)},
        "functional/layers/test_feedforward.py::test_both_halves_of_a_clipped_gate_are_clipped",
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
        f"{EXPERTS}::test_it_is_its_formula",
    ),
    Bug(
        "the shares of all experts, and not of the chosen ones, sum to 1",
        "functional.layers.experts:route",
        Replace("shares / shares.sum(axis=-1, keepdims=True)", "shares"),
        f"{EXPERTS}::test_it_is_its_formula",
    ),
    Bug(
        "a router ignores its bias",
        "functional.layers.experts:route",
        takes(router=lambda router: {"kernel": router["kernel"]}),
        f"{EXPERTS}::test_renormalised_shares_are_a_softmax_over_the_chosen_logits",
    ),
    Bug(
        "the gradient of an expert is that of its last block",
        "functional.layers.expert_products:_map_blocks",
        Replace("total.at[owner].add(x)", "total.at[owner].set(x)"),
        f"{EXPERTS}::test_gradients_are_those_of_all_experts_on_all_tokens",
    ),
    Bug(
        "a device computes tokens of experts that it lacks",
        "functional.layers.expert_products:_sorted_by_expert",
        Replace("(index >= 0) & (index < num_here)", "index < num_here"),
        f"{EXPERTS}::test_devices_with_parts_of_the_experts_add_up",
    ),
    Bug(
        "a device has blocks for too few tokens of its experts",
        "functional.layers.expert_products:_block_sizes",
        Replace("min(chosen, num_here)", "chosen * num_here // num_experts"),
        f"{EXPERTS}::test_devices_with_parts_of_the_experts_add_up",
    ),
    Bug(
        "the losses of a router count padding",
        "functional.layers.experts:router_losses",
        Replace("segments != 0", "segments == segments"),
        f"{EXPERTS}::test_router_losses_are_means_over_tokens_without_padding",
    ),
    Bug(
        "the shared expert is not gated",
        "functional.layers.experts:shared_expert",
        Replace('jax.nn.sigmoid(linear(weights["shared_gate"], x, jnp.float32)) * y', "y"),
        f"{EXPERTS}::test_every_token_passes_the_shared_expert",
    ),
    Bug(
        "the shared expert counts as one of those that a router chooses",
        "functional.layers.experts:Experts.flops",
        Replace("weights.keys() - _OF_ALL", "weights"),
        "models/test_flops.py::test_every_token_is_counted_in_the_shared_expert_and_in_dense_layers",
    ),
    Bug(
        "a gradient stores the steps of norms",
        "functional.recomputed:recomputed",
        Replace("jax.checkpoint(of_arrays, prevent_cse=False)", "of_arrays"),
        "functional/test_recomputed.py",
    ),
    Bug(
        "ε outside the root",
        "functional.layers.norms:layer_norm",
        Replace(
            "centred * jax.lax.rsqrt(variance + epsilon)",
            "centred / (jnp.sqrt(variance) + epsilon)",
        ),
        NORMS,
    ),
    Bug(
        "rotary angles in bfloat16",
        "functional.positions:rotary",
        Replace(
            "positions[..., None].astype(jnp.float32) * frequencies",
            "(positions[..., None] * frequencies).astype(x.dtype)",
        ),
        f"{POSITIONS} {DISCIPLINE}::test_positions_256_and_257_differ_in_bfloat16",
    ),
    Bug(
        "rotary pairs interleaved",
        "functional.positions:rotary",
        other_layout,
        POSITIONS,
    ),
    Bug(
        "statistics over the batch",  # flax#677
        "functional.layers.norms:rms_norm",
        inside("jnp.square", then(lambda squares: squares.mean(axis=0, keepdims=True))),
        f"{INVARIANCE}::test_vmap_over_rows_is_the_batch",
    ),
    # ---- kernels
    Bug(
        "an output with equal weights gets a scale of 0",
        "functional.linear.kernels:quantize",
        inside("jnp.where", lambda _: lambda positive, step, one: step),
        f"{KERNELS}::test_int8_is_off_by_half_a_step_at_most",
    ),
    Bug(
        "int8 values are truncated, not rounded",
        "functional.linear.kernels:quantize",
        inside("jnp.round", lambda _: jnp.trunc),
        f"{KERNELS}::test_int8_is_off_by_half_a_step_at_most",
    ),
    Bug(
        "the product omits the int8 offset",
        "functional.linear.kernels:Int8Kernel.times",
        takes(self=lambda kernel: replace(kernel, offset=0 * kernel.offset)),
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    Bug(
        "two input rows take the int8 path for one",
        "functional.linear.kernels:Int8Kernel.times",
        Replace("len(x) == 1", "len(x) <= 2"),
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    Bug(
        "int8 kernels are converted to float before a loop",
        "functional.linear.kernels:Int8Kernel.times",
        inside("jax.lax.optimization_barrier", unchanged),
        f"{KERNELS}::test_integers_stay_integers_in_a_loop",
    ),
    Bug(
        "the frozen kernel gets a gradient",
        "functional.linear.low_rank:LowRankKernel.times",
        inside("jax.lax.stop_gradient", unchanged),
        f"{KERNELS}::test_only_the_update_of_low_rank_learns",
    ),
    Bug(
        "the scale of a low-rank update is omitted",
        "functional.linear.low_rank:LowRankKernel.times",
        takes(self=lambda kernel: replace(kernel, scale=1.0)),
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    Bug(
        "padded rows of a packed kernel reach the output",
        "functional.linear.kernels:PackedKernel.times",
        takes(self=lambda kernel: replace(kernel, out_dim=kernel.out_dim + 10**6)),
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    # ---- execution and inputs
    Bug(
        "vmap folds the batch into the heads",
        "functional.attention.heads:merge_heads",
        lambda _: lambda x: x.reshape(*x.shape[:-3], x.shape[-2], -1),
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "an untied head is ignored",  # NeMo-Automodel#2571
        "functional.outputs:head",
        lambda head: lambda weights: {"kernel": weights["embedding"]["tokens"].T},
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "embeddings in place of tokens are not scaled",
        "functional.embedding:Embedding.__call__",
        scales_ids_only,
        f"{INVARIANCE}::test_embeddings_stand_where_tokens_do "
        f"{CHUNKING}::test_embeddings_are_read_like_tokens",
    ),
    Bug(
        "an id outside the vocabulary becomes another token",
        "functional.embedding:_look_up",
        inside("jnp.take", lambda take: lambda *args, **_: take(*args, axis=0, mode="clip")),
        f"{DISCIPLINE}::test_a_token_out_of_range_is_refused_or_nan",
    ),
    Bug(
        "a sequence longer than max_length is accepted",
        "models.check:check_tokens",
        takes(config=lambda config: replace(config, max_length=9 * config.max_length)),
        f"{DISCIPLINE}::test_input_of_another_shape_is_refused",
    ),
    # ---- hooks
    Bug(
        "an unknown point is ignored",
        "models.check:checked_hooks",
        knows_every_point,
        f"{DISCIPLINE}::test_an_unknown_name_is_an_error_that_lists_the_names",
    ),
    Bug(
        "captures of unrolled layers are in reverse order",
        "functional.stack:run_stack",
        Replace("_stacked(captured)", "_stacked(captured[::-1])"),
        f"{DISCIPLINE}::test_every_declared_point_is_captured_as_it_is",
    ),
    Bug(
        "a model class accepts a config of another kind",
        "models.language_model:LanguageModel.__post_init__",
        Replace("type(self.config) is not self.config_type", "False"),
        "models/test_bad_input.py::test_model_class_accepts_only_configs_of_its_kind",
    ),
)
