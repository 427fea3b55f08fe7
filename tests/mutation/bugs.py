"""Bugs that Transformer libraries really shipped, each as a small patch of this package.

A bug replaces `old`, which must stand exactly once in its file, by `new`; the tests named must then
go red. Where a bug was seen in public is in its comment.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str
    new: str
    tests: str  # what must go red, for pytest: node ids below tests/


DEPENDENCY = "properties/test_dependency.py"
INVARIANCE = "properties/test_invariance.py"
ATTENTION = "properties/test_attention.py"
CHUNKING = "properties/test_chunking.py"
GENERATION = "properties/test_generation.py"
DISCIPLINE = "properties/test_discipline.py"
JACOBIAN = f"{DEPENDENCY}::test_jacobian_is_the_composed_rule"
PERTURBED = f"{DEPENDENCY}::test_another_input_changes_the_composed_rule"
ONE_DOCUMENT = f"{DEPENDENCY}::test_a_row_of_one_document_skips_blocks_and_keeps_the_rule"
OPTIONS = f"{DEPENDENCY}::test_options_keep_the_mask"
FORMULA = f"{ATTENTION}::test_every_rule_is_its_formula"
STEP = "training/test_step.py"
LOSSES = "functional/test_losses.py"

_MASKS, _CACHE = "functional/masks.py", "functional/cache.py"
_ATTENTION, _BLOCKWISE = "functional/attention.py", "functional/blockwise.py"
_DECODER, _BLOCKS = "functional/decoder.py", "functional/blocks.py"
_POSITIONS, _LOSSES = "functional/positions.py", "functional/losses.py"

BUGS = (
    # ---- masks: transformers#31673, #39408, #29623; keras#23038
    Bug(
        "causal mask sees one ahead",
        _MASKS,
        "        return key.where()[..., None, :] <= query.where()[..., :, None]\n\n"
        "    def key_range(self, start, stop, length):\n        return 0, min(stop, length)",
        "        return key.where()[..., None, :] <= query.where()[..., :, None] + 1\n\n"
        "    def key_range(self, start, stop, length):\n        return 0, min(stop + 1, length)",
        JACOBIAN,
    ),
    Bug(
        "causal mask hides the diagonal",
        _MASKS,
        "        return key.where()[..., None, :] <= query.where()[..., :, None]\n\n"
        "    def key_range(self, start, stop, length):\n        return 0, min(stop, length)",
        "        return key.where()[..., None, :] < query.where()[..., :, None]\n\n"
        "    def key_range(self, start, stop, length):\n        return 0, min(stop, length)",
        f"{DEPENDENCY}::test_without_the_residual_only_what_is_seen_counts",
    ),
    Bug(
        "window of W + 1",
        _MASKS,
        "> query.where()[..., :, None] - self.size",
        ">= query.where()[..., :, None] - self.size",
        PERTURBED,
    ),
    Bug(
        "window's range one short",
        _MASKS,
        "max(0, start - self.size + 1)",
        "max(0, start - self.size + 2)",
        ONE_DOCUMENT,
    ),
    Bug(
        "window ignored by the cache",
        _DECODER,
        "mask, keys, values = self_attention_mask(config), [], []",
        "mask, keys, values = Causal() & Packed(), [], []",
        f"{CHUNKING}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "mask dropped when the weights are wanted",
        _ATTENTION,
        "    visible = mask(query_places, key_places)\n",
        "    visible = jnp.True_ if getattr(tap, 'capture', ()) else mask(query_places, key_places)\n",
        OPTIONS,
    ),
    Bug(
        "mask multiplied instead of put in place",
        _ATTENTION,
        "    weights = _softmax(jnp.where(over_heads(visible), scores, -jnp.inf))\n\n    heads",
        "    weights = _softmax(scores * jnp.where(over_heads(visible), 1.0, 0.0))\n\n    heads",
        FORMULA,
    ),
    Bug(
        "a block may look past the diagonal",
        _BLOCKWISE,
        "            if isinstance(visible, (np.ndarray, np.bool_)) and visible.all():",
        "            if isinstance(visible, (np.ndarray, np.bool_)):",
        ONE_DOCUMENT,
    ),
    Bug(
        "leak by statistics over positions",  # nanochat#844
        "functional/norms.py",
        "    mean_square = jnp.square(wide).mean(axis=-1, keepdims=True)",
        "    mean_square = jnp.square(wide).mean(axis=(-1, -2), keepdims=True)",
        PERTURBED,
    ),
    Bug(
        "prefix seen by nobody before it",
        _MASKS,
        "        return before | (key.where()[..., None, :] < self.length)",
        "        return before",
        JACOBIAN,
    ),
    # ---- packing and padding: maxtext#4476, transformers#46634; unsloth#3699; pytorch#103963
    Bug(
        "packed documents see one another",
        _MASKS,
        "        return same & (key.segments != 0)[..., None, :]",
        "        return (key.segments != 0)[..., None, :] & (query.segments != 0)[..., :, None]",
        f"{INVARIANCE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "positions do not restart in a packed row",
        _POSITIONS,
        "    position = tokens_before - origin\n",
        "    position = tokens_before + reading.position[:, None]\n",
        f"{INVARIANCE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "padding inside a document takes positions",
        _POSITIONS,
        "    tokens_before = jnp.cumsum(valid, axis=1) - valid\n",
        "    tokens_before = jnp.arange(valid.shape[1]) + jnp.zeros_like(segments)\n",
        f"{INVARIANCE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "padding speaks",
        _DECODER,
        "        x = jnp.where((segments != 0)[..., None], x, 0)  # what stands in padding reaches",
        "        x = x  # what stands in padding reaches",
        f"{INVARIANCE}::test_padding_reaches_nothing",
    ),
    Bug(
        "hidden values are not zeroed: 0 × NaN",
        _ATTENTION,
        "        key, value = (jnp.where(speaks[..., None, :, None], x, 0) for x in (key, value))",
        "        pass",
        f"{ATTENTION}::test_nan_that_nobody_may_see_reaches_nothing",
    ),
    Bug(
        "a row that sees nothing is NaN",
        _ATTENTION,
        "    powers = jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest))",
        "    powers = jnp.exp(scores - largest)",
        f"{ATTENTION}::test_who_sees_nothing_gets_zeros_and_finite_gradients",
    ),
    Bug(
        "blockwise: a row that sees nothing has weights going back",
        _BLOCKWISE,
        "jnp.where(total == 0.0, jnp.inf, largest + jnp.log(total))",
        "largest + jnp.log(total)",
        f"{ATTENTION}::test_who_sees_nothing_gets_zeros_and_finite_gradients",
    ),
    # ---- attention's own arithmetic
    Bug(
        "scores scaled by 1 / d",
        _ATTENTION,
        '    """`dot_product_attention` where hidden keys and values are known to be finite (a cache)."""\n'
        "    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale",
        '    """`dot_product_attention` where hidden keys and values are known to be finite (a cache)."""\n'
        "    scale = 1 / query.shape[-1] if scale is None else scale",
        FORMULA,
    ),
    Bug(
        "grouped heads tiled, not repeated",  # axlearn#842
        "functional/heads.py",
        "    return query.reshape(*batch, num_kv_heads, heads // num_kv_heads, length, head_dim)",
        "    return query.reshape(*batch, heads // num_kv_heads, num_kv_heads, length, head_dim)"
        ".swapaxes(-3, -4)",
        FORMULA,
    ),
    Bug(
        "blockwise: the softmax's D is left out of the gradient",
        _BLOCKWISE,
        "(d_weights - products[..., rows, None]) * scale",
        "d_weights * scale",
        FORMULA,
    ),
    Bug(
        "blockwise: the last block of keys gets no gradient",
        _BLOCKWISE,
        "        d_key = d_key.at[..., columns, :].add(",
        "        d_key = d_key.at[..., columns, :].set(",
        FORMULA,
    ),
    Bug(
        "softmax in bfloat16",  # optax#1020
        _ATTENTION,
        '        "...kgqd,...ksd->...kgqs", grouped, key, preferred_element_type=jnp.float32\n',
        '        "...kgqd,...ksd->...kgqs", grouped, key\n',
        f"{ATTENTION}::test_bfloat16_scores_and_softmax_are_float32",
    ),
    # ---- cache: x-transformers#219, torchtune#959, transformers#15751
    Bug(
        "the position offset forgets the past",
        _POSITIONS,
        "jnp.where(begins, tokens_before, -reading.position[:, None])",
        "jnp.where(begins, tokens_before, 0)",
        f"{CHUNKING}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "cache written one slot late",
        _CACHE,
        "    return write_slots(slots, new.reshape(-1, *new.shape[2:]), length, axis=1)",
        "    return write_slots(slots, new.reshape(-1, *new.shape[2:]), length + 1, axis=1)",
        f"{CHUNKING}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "overflow overwrites the last slot unnoticed",  # flax nnx attention
        _DECODER,
        "    x = jnp.where(length <= cache.capacity, x, jnp.nan)\n",
        "",
        f"{CHUNKING}::test_inside_jit_it_is_one_pass_until_it_overflows_to_nan",
    ),
    Bug(
        "what stands in empty slots reaches the output",
        _CACHE,
        "            return jnp.where(jnp.repeat(used, heads, axis=0)[:, :, None], x[:, :slots], 0)",
        "            return x[:, :slots]",
        f"{CHUNKING}::test_nan_in_slots_that_nobody_may_see_reaches_nothing",
    ),
    Bug(
        "steps see a block too few of live slots",
        "decoding/generate.py",
        "        read += STEPS\n        state, new",
        "        state, new",
        f"{GENERATION}::test_long_generation_goes_on_past_every_bucket",
    ),
    # ---- norms and positions: flax#1491, transformers#29285, #25199
    Bug(
        "variance by E[x²] − E[x]²",
        "functional/norms.py",
        "    variance = jnp.square(centred).mean(axis=-1, keepdims=True)\n",
        "    variance = jnp.square(wide).mean(axis=-1, keepdims=True) - jnp.square(\n"
        "        wide.mean(axis=-1, keepdims=True)\n    )\n",
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
        _POSITIONS,
        "    angles = _angles(positions, head_dim, base)[..., None, :, :]\n",
        "    angles = _angles(positions, head_dim, base)[..., None, :, :].astype(x.dtype)\n",
        f"functional/test_positions.py {DISCIPLINE}::test_positions_256_and_257_differ_in_bfloat16",
    ),
    Bug(
        "rotary pairs interleaved",
        _POSITIONS,
        "    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)\n",
        "    left, right = x.astype(jnp.float32)[..., ::2], x.astype(jnp.float32)[..., 1::2]\n",
        "functional/test_positions.py",
    ),
    # ---- losses and updates: transformers#34191, prime-rl#1961, optax#1185, flax#677
    Bug(
        "micro-batches average their averages",
        "training/step.py",
        "        return mean * count, count\n",
        "        return mean, jnp.float32(1)\n",
        f"{STEP}::test_micro_batches_give_the_full_batch_whatever_their_token_counts",
    ),
    Bug(
        "padding counted in the denominator",
        _LOSSES,
        "    return jnp.where(weights != 0, weights * losses, 0.0).sum(), weights.sum()",
        "    return jnp.where(weights != 0, weights * losses, 0.0).sum(), jnp.float32(weights.size)",
        LOSSES,
    ),
    Bug(
        "label −100 wraps to a real class",
        _LOSSES,
        "    picked = jnp.where(known, picked, jnp.nan)\n",
        "    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]\n",
        LOSSES,
    ),
    Bug(
        "the loss is taken in bfloat16",
        _LOSSES,
        "    logits = logits.astype(jnp.float32)\n    total",
        "    total",
        LOSSES,
    ),
    Bug(
        "targets not shifted",
        "training/data.py",
        "        return Batch(rows[:, :-1], rows[:, 1:])",
        "        return Batch(rows[:, :-1], rows[:, :-1])",
        "training/test_data.py::test_targets_are_the_inputs_moved_by_one",
    ),
    Bug(
        "weight decay by rank: stacked biases decay",
        "training/optimizer.py",
        "lambda path, _: path[-1].key not in _VECTORS",
        "lambda path, leaf: leaf.ndim > 1",
        f"{STEP}::test_decay_is_for_matrices_alone",
    ),
    # ---- randomness: nanoGPT#240, flash-attention#314
    Bug(
        "the same dropout key in each layer",
        _BLOCKS,
        "jax.random.split(dropout_key, config.num_layers)",
        "jax.random.split(dropout_key, 1)[jnp.zeros(config.num_layers, int)]",
        f"{DISCIPLINE}::test_each_layer_and_each_place_has_its_own_noise",
    ),
    Bug(
        "the same dropout key in each step",
        "training/step.py",
        "        key = jax.random.fold_in(state.key, state.step)\n",
        "        key = state.key\n",
        f"{STEP}::test_dropout_differs_from_step_to_step_and_repeats_with_the_seed",
    ),
    Bug(
        "dropout without a key",
        "functional/dropout.py",
        "    if key is None or rate == 0.0:\n        return x\n",
        "    if rate == 0.0:\n        return x\n    key = jax.random.key(0) if key is None else key\n",
        f"{DISCIPLINE}::test_without_a_key_dropout_is_off",
    ),
    Bug(
        "a row's draws depend on the batch",
        "decoding/generate.py",
        "    row_keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(state.stopped)))\n",
        "    row_keys = jax.random.split(key, 2 * len(state.stopped))[len(state.stopped) :]\n",
        f"{GENERATION}::test_a_row_depends_on_its_key_and_not_on_its_neighbours",
    ),
    Bug(
        "log-probabilities after temperature",
        "decoding/generate.py",
        "jnp.take_along_axis(jax.nn.log_softmax(state.logits), token[:, None], axis=-1)",
        "jnp.take_along_axis(\n            jax.nn.log_softmax(state.logits / jnp.where(numbers.temperature == 0, 2.0,"
        " numbers.temperature)),\n            token[:, None], axis=-1)",
        f"{GENERATION}::test_log_probs_add_up_to_scores",
    ),
    Bug(
        "top-p keeps one token too few",
        "decoding/sampling.py",
        "    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)",
        "    return jnp.where(order > threshold[:, None], logits, -jnp.inf)",
        f"{GENERATION}::test_truncation_is_that_of_a_sort",
    ),
    # ---- how a model is run
    Bug(
        "a padded row of the head's layout is kept",
        "functional/linear.py",
        "[: rows.out_dim].T",
        ".T",
        "functional/test_linear.py",
    ),
    Bug(
        "vmap folds the batch into the heads",
        "functional/heads.py",
        "    return x.swapaxes(-3, -2).reshape(*batch, length, heads * head_dim)",
        "    return x.reshape(*batch, length, heads * head_dim)",
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "post-norm runs as pre-norm",
        _BLOCKS,
        '    pre_norm = config.norm_position == "pre"\n',
        "    pre_norm = True\n",
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    # ---- checkpoints: orbax#2972, gpt-neox#308
    Bug(
        "metrics after the restored step are kept",
        "training/loop.py",
        "        self.folder.cut_metrics(self.step)\n",
        "",
        "training/test_resume.py::test_killed_twice_and_resumed_equals_uninterrupted",
    ),
    Bug(
        "the data position is not restored",
        "training/loop.py",
        '            self.batches.restore(progress["data"])\n',
        "",
        "training/test_resume.py::test_killed_twice_and_resumed_equals_uninterrupted",
    ),
)
