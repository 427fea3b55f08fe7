"""Beams, encoders, and models that read a source."""

from tests.mutation.quoted import ATTENTION_FILE, AUTOREGRESSIVE, CHUNKING, TRANSFORMER, Bug

BEAM_FILE, PAIR_FILE = "decoding/beam.py", "functional/encoder_decoder.py"
RECURRENT_FILE, ENCODER_FILE = "functional/recurrent_encoder_decoder.py", "functional/encoder.py"
BEAM, SOURCE = "decoding/test_beam.py", "properties/test_source.py"
ENCODER = "models/test_encoder.py"

BUGS = (
    Bug(
        "beams are not reordered with their caches",  # transformers#46612, #29635
        BEAM_FILE,
        "        cache = search.cache.gather_rows(rows.reshape(-1))\n",
        "        cache = search.cache\n",
        f"{BEAM}::test_a_wide_beam_is_brute_force {BEAM}::test_hypotheses_are_what_they_say",
    ),
    Bug(
        "a row that is done goes on",
        BEAM_FILE,
        "(jnp.arange(number) < beam_width) & ~search.done()[:, None]",
        "jnp.arange(number) < beam_width",
        f"{BEAM}::test_a_beam_of_one_is_greedy",
    ),
    Bug(
        "scores are not normalised",
        BEAM_FILE,
        "jnp.maximum(self.lengths(), 1) ** length_penalty",
        "jnp.maximum(self.lengths(), 1) ** 0",
        f"{BEAM}::test_a_wide_beam_is_brute_force {BEAM}::test_hypotheses_are_what_they_say",
    ),
    Bug(
        "all hypotheses begin alike",
        BEAM_FILE,
        "nothing.at[:, 0].set(0.0)",
        "nothing.at[:].set(0.0)",
        f"{BEAM}::test_hypotheses_are_what_they_say",
    ),
    Bug(
        "a source serves its rows in another order",
        ATTENTION_FILE,
        "    return output.reshape(served.shape).swapaxes(1, 2).reshape(query.shape)\n",
        "    return output.reshape(query.shape)\n",
        f"{SOURCE}::test_a_source_serves_several_rows",
    ),
    Bug(
        "the source's padding is lost on the way to cross-attention",  # transformers#47946
        PAIR_FILE,
        "    places = TokenInfo(source.shape[1], None, source_segments)\n",
        "    places = TokenInfo(source.shape[1])\n",
        f"{SOURCE}::test_where_the_padding_of_a_source_stands_does_not_matter",
    ),
    Bug(
        "the cache sees the source's padding",
        "functional/cache.py",
        "    return (segments != 0)[:, None]\n",
        "    return (segments == segments)[:, None]\n",
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "what stands in the source's padding is read",
        TRANSFORMER,
        '"embedding_norm", without_padding(x, segments), config)',
        '"embedding_norm", x, config)',
        f"{SOURCE}::test_nan_in_the_padding_of_a_source_reaches_nothing "
        f"{ENCODER}::test_nan_in_padding_reaches_nothing",
    ),
    Bug(
        "the source is encoded again at each step",
        PAIR_FILE,
        "    return hidden, replace(cache, own=own)\n",
        '    again = sum(leaf.sum() for leaf in jax.tree.leaves(weights["encoder"]))\n'
        "    return hidden + 0 * again, replace(cache, own=own)\n",
        f"{SOURCE}::test_a_source_is_read_once",
    ),
    Bug(
        "a text begins from zeros, not from its source",
        RECURRENT_FILE,
        "read_on(weights, tokens, cache.own, cache.initial, config",
        "read_on(weights, tokens, cache.own, jax.tree.map(jnp.zeros_like, cache.initial), config",
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "the source's padding moves the encoder's state",
        RECURRENT_FILE,
        "    valid = None if segments is None else segments != 0\n",
        "    valid = None\n",
        f"{SOURCE}::test_where_the_padding_of_a_source_stands_does_not_matter",
    ),
    Bug(
        "the encoder is causal",
        ENCODER_FILE,
        "rule = Packed() if",
        'rule = __import__("jaxformer.functional.masks").functional.masks.Causal() & Packed() if',
        f"{ENCODER}::test_every_output_depends_on_all_of_its_document",
    ),
    Bug(
        "a whole row begins from zeros, not from its source",
        RECURRENT_FILE,
        "    hidden = read_rows(weights, tokens, initial, config",
        "    hidden = read_rows(weights, tokens, empty_states(config, len(tokens)), config",
        f"{SOURCE}::test_every_output_depends_on_all_of_its_source",
    ),
    Bug(
        "an encoder sees the documents beside its own",
        ENCODER_FILE,
        "rule = Packed() if",
        'rule = __import__("jaxformer.functional.masks").functional.masks.Padding() if',
        f"{ENCODER}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "what is pooled may be padding",
        ENCODER_FILE,
        "(segments != 0).argmax(axis=1)",
        "jnp.zeros(len(encoded), int)",
        f"{ENCODER}::test_pooled_is_of_the_first_token",
    ),
    Bug(
        "padding is masked and to be told",
        "functional/masking.py",
        "        chosen &= segments != 0\n",
        "        pass\n",
        f"{ENCODER}::test_tokens_are_masked_as_often_as_bert_says",
    ),
    Bug(
        "a prefix may be read in pieces",
        "decoding/autoregressive.py",
        "    if short.any():\n",
        "    if False:\n",
        f"{CHUNKING}::test_a_prefix_torn_apart_is_refused",
    ),
    Bug(
        "rows that fill a batch up count",
        "training/pairs.py",
        "row < len(chosen)\n        return",
        "1\n        return",
        "training/test_pairs.py::test_an_epoch_has_every_pair_once",
    ),
    Bug(
        "the end of a text is not to be learnt",
        "training/pairs.py",
        "            weights[0, row, : len(target) + 1] = row",
        "            weights[0, row, : len(target)] = row",
        "training/test_pairs.py::test_an_epoch_has_every_pair_once",
    ),
)
