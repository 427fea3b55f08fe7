"""Bugs of norms, positions, kernels and the checks of model inputs."""

from tests.mutation.bug import CHUNKING, DISCIPLINE, INVARIANCE, KERNELS, Bug
from tests.mutation.changes import Replace

NORMS, POSITIONS = "functional/test_norms.py", "functional/test_positions.py"


def other_layout(rotary):
    def broken(x, positions, base=10_000.0, *, fraction=1.0, interleaved=False, scaling=None):
        how = {"fraction": fraction, "interleaved": not interleaved, "scaling": scaling}
        return rotary(x, positions, base, **how)

    return broken


BUGS = (
    # ---- norms and positions: flax#1491, transformers#29285, #25199
    Bug(
        "variance by E[x²] − E[x]²",
        "functional.norms:layer_norm",
        Replace(
            "jnp.square(centred).mean(axis=-1, keepdims=True)",
            "jnp.square(x32).mean(axis=-1, keepdims=True)"
            " - jnp.square(x32.mean(axis=-1, keepdims=True))",
        ),
        NORMS,
    ),
    Bug(
        "ε outside the root",
        "functional.norms:layer_norm",
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
        "functional.norms:rms_norm",
        Replace(
            "jnp.square(x32).mean(axis=-1, keepdims=True)",
            "jnp.square(x32).mean(axis=(0, -1), keepdims=True)",
        ),
        f"{INVARIANCE}::test_vmap_over_rows_is_the_batch",
    ),
    # ---- kernels
    Bug(
        "an output with equal weights gets a scale of 0",
        "functional.kernels:quantize",
        Replace("jnp.where(step > 0, step, 1.0)", "step"),
        f"{KERNELS}::test_int8_is_off_by_half_a_step_at_most",
    ),
    Bug(
        "int8 values are truncated, not rounded",
        "functional.kernels:quantize",
        Replace(
            "jnp.round((rows - offset[..., None]) / scale[..., None])",
            "jnp.trunc((rows - offset[..., None]) / scale[..., None])",
        ),
        f"{KERNELS}::test_int8_is_off_by_half_a_step_at_most",
    ),
    Bug(
        "the product omits the int8 offset",
        "functional.kernels:Int8Kernel.times",
        Replace("sums * self.scale + total * self.offset", "sums * self.scale"),
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    Bug(
        "two input rows take the int8 path for one",
        "functional.kernels:Int8Kernel.times",
        Replace("len(x) == 1", "len(x) <= 2"),
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    Bug(
        "int8 kernels are converted to float before a loop",
        "functional.kernels:Int8Kernel.times",
        Replace("jax.lax.optimization_barrier((self.values, x))", "(self.values, x)"),
        f"{KERNELS}::test_integers_stay_integers_in_a_loop",
    ),
    Bug(
        "the frozen kernel gets a gradient",
        "functional.kernels:LowRankKernel.times",
        Replace("jax.tree.map(jax.lax.stop_gradient, self.frozen)", "self.frozen"),
        f"{KERNELS}::test_only_the_update_of_low_rank_learns",
    ),
    Bug(
        "the scale of a low-rank update is omitted",
        "functional.kernels:LowRankKernel.times",
        Replace("jnp.asarray(self.scale, dtype) * update", "update"),
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    Bug(
        "padded rows of a packed kernel reach the output",
        "functional.kernels:PackedKernel.times",
        Replace("y.reshape(-1, len(x))[: self.out_dim].T", "y.reshape(-1, len(x)).T"),
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    # ---- execution and inputs
    Bug(
        "vmap folds the batch into the heads",
        "functional.heads:merge_heads",
        Replace("x.swapaxes(-3, -2)", "x"),
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "an untied head is ignored",  # NeMo-Automodel#2571
        "functional.embedding:head",
        lambda head: lambda weights: {"kernel": weights["embedding"]["tokens"].T},
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "embeddings in place of tokens are not scaled",
        "functional.transformer:embed",
        Replace(
            "config.scale_embeddings",
            "config.scale_embeddings and jnp.issubdtype(inputs.tokens.dtype, jnp.integer)",
        ),
        f"{INVARIANCE}::test_embeddings_stand_where_tokens_do "
        f"{CHUNKING}::test_embeddings_are_read_like_tokens",
    ),
    Bug(
        "an id outside the vocabulary becomes another token",
        "functional.embedding:_look_up",
        Replace(
            'jnp.take(table, index, axis=0, mode="fill", fill_value=jnp.nan)',
            'jnp.take(table, index, axis=0, mode="clip")',
        ),
        f"{DISCIPLINE}::test_a_token_out_of_range_is_refused_or_nan",
    ),
    Bug(
        "a sequence longer than max_length is accepted",
        "models.check:check_tokens",
        Replace("tokens.shape[1] > config.max_length", "tokens.shape[1] > 9 * config.max_length"),
        f"{DISCIPLINE}::test_input_of_another_shape_is_refused",
    ),
    # ---- hooks
    Bug(
        "an unknown point is ignored",
        "models.check:checked_hooks",
        Replace("name not in points", "False"),
        f"{DISCIPLINE}::test_an_unknown_name_is_an_error_that_lists_the_names",
    ),
    Bug(
        "captures of unrolled layers are in reverse order",
        "functional.transformer:run_layers",
        Replace("return x, states, captured", "return x, states, captured[::-1]"),
        f"{DISCIPLINE}::test_every_declared_point_is_captured_as_it_is",
    ),
)
