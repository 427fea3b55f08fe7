"""Bugs of the arithmetic of attention, explicit and blockwise."""

import jax

from tests.mutation.bug import ATTENTION, FORMULA, INVARIANCE, LONG_SEQUENCES, Bug
from tests.mutation.changes import Replace, gives, inside, takes


def tiled(group_heads):
    """Lets query head h share key head h modulo their number, not that of its group."""

    def broken(query, key):
        groups = query[..., : query.shape[-3] // key.shape[-3], :, :]
        return group_heads(query, groups).swapaxes(-3, -4)

    return broken


def float32_dots(run):
    """Stores what `jax.lax.dot_general` returns."""
    return jax.checkpoint(run, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def rounded_first(einsum):
    """Rounds the result to bfloat16 first."""

    def broken(formula, x, y, *, preferred_element_type, **_):
        return einsum(formula, x, y).astype("bfloat16").astype(preferred_element_type)

    return broken


PRODUCTS = "functional/linear/test_products.py"
OWN_GRADIENT = (
    "functional/test_own_gradient.py"
    "::test_custom_gradient_function_equals_plain_function_under_transforms"
)
TRANSFORMS = (
    "models/test_transforms.py::test_model_exported_by_jax_accepts_all_batch_sizes_and_lengths"
)

SINKS = "functional/attention/test_sinks.py"
GATES = "functional/attention/test_gate.py"
BUGS = (
    Bug(
        "explicit attention ignores the attention sink",
        "functional.attention.formula:softmax",
        Replace("jnp.exp(sink - largest)", "0.0"),
        f"{SINKS}::test_attention_with_sinks_equals_formula[explicit]",
    ),
    Bug(
        "an attention sink with a large score overflows",
        "functional.attention.formula:softmax",
        Replace("jnp.maximum(largest, jax.lax.stop_gradient(sink))", "largest"),
        f"{SINKS}::test_huge_attention_sink_gives_zero_outputs",
    ),
    Bug(
        "blockwise attention ignores the sink",
        "functional.attention.blockwise:_forward",
        Replace("(output * share[..., None]).astype(output.dtype)", "output"),
        f"{SINKS}::test_attention_with_sinks_equals_formula[blockwise]",
    ),
    Bug(
        "the backward pass omits the attention sink from the softmax denominator",
        "functional.attention.blockwise:_forward",
        Replace("jnp.logaddexp(log_total, sink)", "log_total"),
        f"{SINKS}::test_attention_with_sinks_equals_formula[long_sequences]",
    ),
    Bug(
        "the gradient of a sink has the wrong sign",
        "functional.attention.blockwise:_backward",
        Replace(
            "-(jnp.exp(sink - log_total) * products).sum(axis=-1)",
            "(jnp.exp(sink - log_total) * products).sum(axis=-1)",
        ),
        f"{SINKS}::test_attention_with_sinks_equals_formula[blockwise]",
    ),
    Bug(
        "a fused kernel drops the sink",
        "functional.attention.fused_kernels:unsupported_scores",
        Replace("scores.sink is not None", "False"),
        f"{SINKS}::test_fused_kernels_do_not_support_sinks_and_sinks_of_wrong_shape_are_rejected",
    ),
    # ---- output gates
    Bug(
        "the output gate of attention is not applied",
        "functional.layers.attention:Attention.gated",
        Replace("not self.has_gate", "True"),
        f"{GATES}::test_decoder_with_attention_gates_equals_formula",
    ),
    Bug(
        "heads are captured before their gate",
        "functional.layers.attention:Attention.__call__",
        Replace(
            "heads = hook('attention.heads', heads)",
            "hook('attention.heads', attend(query, keys, values, context, hook))",
        ),
        f"{GATES}::test_captured_head_outputs_include_the_attention_gate",
    ),
    # ---- explicit and short blockwise attention
    Bug(
        "grouped key heads are tiled instead of repeated",  # axlearn#842
        "functional.attention.heads:group_heads",
        tiled,
        FORMULA,
    ),
    Bug(
        "blockwise: the gradient omits the softmax's row sum D",
        "functional.attention.tiles:tile_gradients",
        takes(upstream=lambda x: x._replace(products=0 * x.products)),
        f"{FORMULA} {INVARIANCE}::test_execution_options_do_not_change_loss_and_gradients",
    ),
    Bug(
        "blockwise: the last block of keys gets no gradient",
        "functional.attention.blockwise:_short_backward",
        Replace(
            "cut(d_key, columns, -2) + d_columns[0]",
            "d_columns[0]",
        ),
        f"{FORMULA} {ATTENTION}::test_attention_in_blocks_of_64_queries_equals_formula",
    ),
    # ---- own gradients and symbolic sizes
    Bug(
        "the tangent of a custom gradient ignores the tangents of its operands",
        "functional.own_gradient:_jvp",
        Replace(
            "moving = [i for i, x in enumerate(of_operands) if type(x) is not ad.Zero]",
            "moving = []",
        ),
        OWN_GRADIENT,
    ),
    Bug(
        "a vmapped custom gradient is not summed over shared arguments",
        "functional.own_gradient:_batch",
        Replace("x.sum(axis=0) if axis is None else x", "x[0] if axis is None else x"),
        OWN_GRADIENT,
    ),
    Bug(
        "forward mode evaluates the custom gradient's function instead of the given one",
        "functional.own_gradient:own_gradient",
        Replace("derived = function if derived is None else derived", "derived = function"),
        OWN_GRADIENT.partition("::")[0],
    ),
    Bug(
        "a custom gradient is not summed over the devices of a replicated argument",
        "functional.own_gradient:own_gradient",
        Replace("differentiable(*vary_alike(*arguments))", "differentiable(*arguments)"),
        f"{OWN_GRADIENT.partition('::')[0]}"
        "::test_gradients_of_replicated_arguments_are_summed_over_devices "
        f"{PRODUCTS}::test_gradients_of_replicated_operands_are_summed_over_devices",
    ),
    Bug(
        "the derivative of a bfloat16 product cannot be transposed",
        "functional.linear.products:_product",
        Replace("jnp.einsum(formula, x, y).astype(dtype)", "_einsum(formula)(x, y).astype(dtype)"),
        f"{PRODUCTS}::test_second_derivatives_of_bfloat16_products_equal_those_in_float32",
    ),
    Bug(
        "a symbolic length is divided into blocks",
        "functional.attention.attend:attend",
        Replace(
            'context.implementation != "explicit" and is_known_length',
            'context.implementation != "explicit"',
        ),
        TRANSFORMS,
    ),
    Bug(
        "an exported model accepts more tokens than it has positions",
        "functional.embedding:Embedding.__call__",
        Replace("inputs.segment_ids is None", "False"),
        f"{TRANSFORMS.partition('::')[0]}::"
        "test_model_exported_by_jax_returns_nan_beyond_its_positions",
    ),
    Bug(
        "a key block of the whole sequence becomes a scatter without indices",  # fails in checkify
        "functional.attention.token_info:put",
        lambda put: (
            lambda array, part, new, axis=-1: (
                array.at[(..., part, *[slice(None)] * (-1 - axis))].set(new)
                if isinstance(part, slice)
                else put(array, part, new, axis)
            )
        ),
        f"{TRANSFORMS.partition('::')[0]}"
        "::test_checkify_finds_no_error_in_a_model_and_its_gradient",
    ),
    # ---- products of bfloat16
    Bug(
        "a CPU is asked to accumulate in bfloat16",
        "functional.linear.products:_plain_einsum",
        inside("jnp.einsum", lambda einsum: lambda formula, x, y, **_: einsum(formula, x, y)),
        f"{PRODUCTS}::test_every_product_of_forward_and_backward_pass_sums_in_float32",
    ),
    Bug(
        "bfloat16 products accumulate in bfloat16",
        "functional.linear.products:contract",
        inside("jnp.einsum", rounded_first),
        f"{PRODUCTS}::test_matrix_products_and_their_gradients_are_rounded_once",
    ),
    Bug(
        "the gradient of a bias accumulates in bfloat16",
        "functional.linear.affine:linear",
        Replace(
            'jnp.broadcast_to(weights["bias"], y.shape).astype(y.dtype)',
            'weights["bias"].astype(y.dtype)',
        ),
        "functional/linear/test_linear.py::test_bias_gradients_are_summed_in_float32",
    ),
    Bug(
        "the gradient of a bfloat16 product is multiplied in float32",
        "functional.linear.products:_backward",
        Replace("cotangent.astype(jnp.bfloat16)", "cotangent"),
        f"{PRODUCTS}::test_every_product_of_forward_and_backward_pass_sums_in_float32",
    ),
    Bug(
        "products with a dtype are not multiplied as bfloat16",
        "functional.linear.products:contract",
        Replace("multiplies_bfloat16()", "multiplies_bfloat16() and dtype != jnp.float32"),
        f"{PRODUCTS}::test_every_product_of_forward_and_backward_pass_sums_in_float32",
    ),
    Bug(
        "the gradient of bfloat16 weights is left to XLA to transpose",
        "functional.linear.products:_plain_einsum",
        Replace("len(contracted) == 1 and of_x[-1] in own", "False"),
        f"{PRODUCTS}::test_every_product_of_forward_and_backward_pass_sums_in_float32",
    ),
    Bug(
        "the batch axis joins the wrong side of another axis",
        "functional.linear.products:_join",
        Replace("jnp.moveaxis(x, 0, axis)", "jnp.moveaxis(x, 0, axis + 1)"),
        f"{PRODUCTS}::test_custom_vmap_rule_of_products_equals_einsum",
    ),
    Bug(
        "a vmapped product gets one more axis",
        "functional.linear.products:_batched_einsum",
        Replace("all(is_batched) or not own", "True"),
        f"{PRODUCTS}::test_vmapped_product_merges_batch_axis_into_matrix_rows",
    ),
    Bug(
        "taint does not enter products with a rule for vmap",
        "verify.taint:_CALLS",
        lambda calls: calls - {"custom_vmap_call"},
        f"{PRODUCTS}::test_taint_analysis_follows_rows_through_matrix_products",
    ),
    Bug(
        "gradients of quantized products are not quantized",
        "functional.linear.products:_is_overridden",
        Replace("_identity(jnp.einsum) != _EINSUM", "False"),
        f"{PRODUCTS}::test_matrix_products_and_gradients_call_a_user_replacement_of_jnp_einsum",
    ),
    Bug(
        "products ignore jax.default_matmul_precision",
        "functional.linear.products:_is_overridden",
        Replace("jax.default_matmul_precision.value is not None", "False"),
        f"{PRODUCTS}::test_products_use_einsum_if_matmul_precision_is_set",
    ),
    Bug(
        "an algorithm of newer GPUs is requested on older GPUs",
        "functional.linear.products:contract",
        Replace("gpu_generation() >= 8", "gpu_generation() >= 7"),
        f"{PRODUCTS}::test_gradients_of_float32_results_are_rounded_to_bfloat16_on_gpus",
    ),
    Bug(
        'remat "dots" stores float32 sums',
        "functional.trees:REMAT",
        lambda remat: {**remat, "dots": float32_dots},
        f"{PRODUCTS}::test_rematerialization_stores_matrix_products_in_the_dtype_of_activations",
    ),
    # ---- long sequences, in a loop over tiles
    Bug(
        "blockwise: earlier sums are not rescaled to a new maximum",
        "functional.attention.long_sequences:long_forward.add",
        Replace("output * decay", "output"),
        f"{LONG_SEQUENCES}::test_tiled_attention_equals_numpy_reference",
    ),
    Bug(
        "blockwise: the last ragged tile counts keys twice",
        "functional.attention.long_sequences:_over_tiles.step",
        Replace("visible & rows[:, None] & columns", "visible & rows[:, None]"),
        f"{LONG_SEQUENCES}::test_tiled_attention_equals_numpy_reference "
        f"{LONG_SEQUENCES}::test_tiled_attention_of_packed_documents_equals_numpy_reference",
    ),
    Bug(
        "blockwise: the last ragged tile counts queries twice",
        "functional.attention.long_sequences:_over_tiles.step",
        Replace("visible & rows[:, None] & columns", "visible & columns"),
        f"{LONG_SEQUENCES}::test_tiled_attention_equals_numpy_reference",
    ),
    Bug(
        "blockwise: fully masked tiles are computed",
        "functional.attention.long_sequences:_over_tiles.step",
        inside("jax.lax.cond", lambda _: lambda is_any, update, same, x: update(x)),
        f"{LONG_SEQUENCES}::test_attention_loop_skips_fully_masked_tiles",
    ),
    Bug(
        "blockwise: long sequences take the path for short sequences",
        "functional.attention.blockwise:_is_short",
        gives(True),
        f"{LONG_SEQUENCES}::test_largest_array_of_attention_grows_linearly_with_length[causal]",
    ),
    Bug(
        "softmax is computed in bfloat16",  # optax#1020
        "functional.attention.attend:attend",
        inside("contract", lambda contract: lambda formula, x, y, _=None: contract(formula, x, y)),
        f"{ATTENTION}::test_attention_scores_and_softmax_of_bfloat16_inputs_are_float32",
    ),
    Bug(
        "the softmax sums over an axis counted from the left",
        "functional.attention.formula:softmax",
        Replace("powers.sum(axis=-1, keepdims=True)", "powers.sum(axis=4, keepdims=True)"),
        f"{ATTENTION}::test_attention_with_leading_axes_equals_vmapped_attention",
    ),
)
