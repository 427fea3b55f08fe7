"""Beams, encoders, and models that read a source."""

from tests.mutation.quoted import CHUNKING, TRANSFORMER, Bug

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
        "what stands in the source's padding is read",
        TRANSFORMER,
        '"embedding_norm", without_padding(x, segments), config)',
        '"embedding_norm", x, config)',
        f"{SOURCE}::test_nan_in_the_padding_of_a_source_reaches_nothing "
        f"{ENCODER}::test_nan_in_padding_reaches_nothing",
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
