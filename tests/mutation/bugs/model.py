"""Norms, positions, the model around them, and its hooks."""

from tests.mutation.quoted import (
    CHUNKING,
    DISCIPLINE,
    EMBEDDING,
    INVARIANCE,
    KERNELS,
    POSITIONS,
    TRANSFORMER,
    Bug,
)

BUGS = (
    # ---- norms and positions: flax#1491, transformers#29285, #25199
    Bug(
        "variance by E[x²] − E[x]²",
        "functional/norms.py",
        "    variance = jnp.square(centred).mean(axis=-1, keepdims=True)\n",
        "    variance = jnp.square(x32).mean(axis=-1, keepdims=True) - jnp.square(\n"
        "        x32.mean(axis=-1, keepdims=True)\n    )\n",
        "functional/test_norms.py",
    ),
    Bug(
        "ε outside the root",
        "functional/norms.py",
        "    y = centred * jax.lax.rsqrt(variance + epsilon) * scale\n",
        "    y = centred / (jnp.sqrt(variance) + epsilon) * scale\n",
        "functional/test_norms.py",
    ),
    Bug(
        "rotary angles in bfloat16",
        POSITIONS,
        "    angles = _angles(positions, head_dim, base)[..., None, :, :]\n",
        "    angles = _angles(positions, head_dim, base)[..., None, :, :].astype(x.dtype)\n",
        f"functional/test_positions.py {DISCIPLINE}::test_positions_256_and_257_differ_in_bfloat16",
    ),
    Bug(
        "rotary pairs interleaved",
        POSITIONS,
        "    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)\n",
        "    left, right = x.astype(jnp.float32)[..., ::2], x.astype(jnp.float32)[..., 1::2]\n",
        "functional/test_positions.py",
    ),
    # ---- kernels
    Bug(
        "an output of zeros has a scale of 0",
        "functional/kernels.py",
        "jnp.where(largest == 0, 1.0, largest / 127)",
        "largest / 127",
        f"{KERNELS}::test_int8_is_off_by_half_a_step_at_most",
    ),
    Bug(
        "integers are cut off, not rounded",
        "functional/kernels.py",
        "jnp.round(rows / scale[..., None])",
        "(rows / scale[..., None])",
        f"{KERNELS}::test_int8_is_off_by_half_a_step_at_most",
    ),
    Bug(
        "one row of integers is multiplied by another",
        "functional/kernels.py",
        "x32 = x32[0] if len(x) == 1 else x32[:, None]",
        "x32 = x32[0] if len(x) <= 2 else x32[:, None]",
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    Bug(
        "the frozen kernel learns",
        "functional/kernels.py",
        "jax.tree.map(jax.lax.stop_gradient, self.frozen)",
        "self.frozen",
        f"{KERNELS}::test_only_the_update_of_low_rank_learns",
    ),
    Bug(
        "the scale of an update is forgotten",
        "functional/kernels.py",
        "jnp.asarray(self.scale, dtype) * update",
        "update",
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    # ---- how a model is run
    Bug(
        "a padded row of the head's layout is kept",
        "functional/kernels.py",
        "[: self.out_dim].T",
        ".T",
        f"{KERNELS}::test_product_is_that_of_the_array",
    ),
    Bug(
        "vmap folds the batch into the heads",
        "functional/heads.py",
        "    return x.swapaxes(-3, -2).reshape(*batch, length, heads * head_dim)",
        "    return x.reshape(*batch, length, heads * head_dim)",
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "statistics over the batch",  # flax#677
        "functional/norms.py",
        "    mean_square = jnp.square(x32).mean(axis=-1, keepdims=True)",
        "    mean_square = jnp.square(x32).mean(axis=(0, -1), keepdims=True)",
        f"{INVARIANCE}::test_vmap_over_rows_is_the_batch",
    ),
    Bug(
        "a head of its own is passed over",  # NeMo-Automodel#2571
        EMBEDDING,
        'return own if "kernel" in own else {',
        'return {"kernel": weights["embedding"]["tokens"].T} if "kernel" in own else {',
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "embeddings in place of tokens are not scaled",
        TRANSFORMER,
        "    if config.scale_embeddings:",
        "    if config.scale_embeddings and jnp.issubdtype(tokens.dtype, jnp.integer):",
        f"{INVARIANCE}::test_embeddings_stand_where_tokens_do "
        f"{CHUNKING}::test_embeddings_are_read_like_tokens",
    ),
    Bug(
        "an id outside the vocabulary is some other token",
        EMBEDDING,
        'mode="fill", fill_value=jnp.nan',
        'mode="clip"',
        f"{DISCIPLINE}::test_a_token_out_of_range_is_refused_or_nan",
    ),
    Bug(
        "a row longer than max_length is taken",
        "models/check.py",
        "    if tokens.shape[1] > config.max_length and segments is None:\n",
        "    if tokens.shape[1] > 9 * config.max_length and segments is None:\n",
        f"{DISCIPLINE}::test_input_of_another_shape_is_refused",
    ),
    # ---- hooks
    Bug(
        "an unknown point is passed over",
        "models/check.py",
        "        if name not in points:\n",
        "        if not name:\n",
        f"{DISCIPLINE}::test_an_unknown_name_is_an_error_that_lists_the_names",
    ),
)
