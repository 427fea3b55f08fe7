"""Bugs of beam search, encoders, and models that read a source."""

import jax.numpy as jnp
import numpy as np

from tests.mutation.bug import CHUNKING, Bug
from tests.mutation.changes import Replace, having, inside, takes, then

BEAM, ENCODER = "decoding/test_beam.py", "models/test_encoder.py"


def scores_alike(begin):
    def broken(passed, beam_width, room, batch_size):
        search = begin(passed, beam_width, room, batch_size)
        equal = jnp.zeros_like(search.live.log_probs)
        return search._replace(live=search.live._replace(log_probs=equal))

    return broken


def as_if_unordered(extended):
    search, parents, tokens = extended
    return search, 0 * parents + jnp.arange(parents.shape[1]), tokens


BUGS = (
    Bug(
        "beams are not reordered with their caches",  # transformers#46612, #29635
        "decoding.beam:_go_on.step",
        inside("_extend", then(as_if_unordered)),
        f"{BEAM}::test_a_wide_beam_is_brute_force {BEAM}::test_hypotheses_are_what_they_say",
    ),
    Bug(
        "a finished beam search continues",
        "decoding.beam:_extend",
        Replace(
            "(jnp.arange(number, dtype=jnp.int32) < beam_width) & ~search.done[:, None]",
            "jnp.arange(number, dtype=jnp.int32) < beam_width",
        ),
        f"{BEAM}::test_a_beam_of_one_is_greedy",
    ),
    Bug(
        "beam scores ignore the length penalty",
        "decoding.beam:Beam.scores",
        lambda scores: lambda self, length_penalty: scores(self, 0),
        f"{BEAM}::test_a_wide_beam_is_brute_force {BEAM}::test_hypotheses_are_what_they_say",
    ),
    Bug(
        "a beam search stops as soon as it has enough hypotheses",
        "decoding.beam:beam_search",
        Replace(
            "_first(early_stopping, defaults.early_stopping, False)",
            "_first(early_stopping, defaults.early_stopping, True)",
        ),
        f"{BEAM}::test_a_search_goes_on_while_a_live_hypothesis_is_better",
    ),
    Bug(
        "BLEU scores greedy translations",
        "training.evaluate:score_pairs",
        takes(beam_width=lambda width: width or 1),
        "decoding/test_translate.py::test_every_translation_has_the_same_default_beam_width",
    ),
    Bug(
        "all beams start with equal scores",
        "decoding.beam:_begin",
        scores_alike,
        f"{BEAM}::test_hypotheses_are_what_they_say",
    ),
    Bug(
        "the pooler may read padding",
        "functional.outputs:Pooler.__call__",
        lambda call: lambda self, weights, encoded, segments=None: call(self, weights, encoded),
        f"{ENCODER}::test_pooled_is_of_the_first_token",
    ),
    Bug(
        "padding is masked and predicted",
        "functional.losses.token_masking:mask_tokens",
        takes(segments=lambda _: None),
        f"{ENCODER}::test_tokens_are_masked_as_often_as_bert_says",
    ),
    Bug(
        "a prefix may be read in chunks",
        "decoding.loop_cache:_check_reading",
        takes(model=having(minimum_prefill=1)),
        f"{CHUNKING}::test_a_prefix_torn_apart_is_refused",
    ),
    Bug(
        "padding has weight in the loss",
        "training.data.pairs:PairBatches._batch",
        then(lambda batch: batch._replace(weights=np.ones_like(batch.weights))),
        "training/data/test_pairs.py::test_an_epoch_has_every_pair_once",
    ),
    Bug(
        "the end of a text has no weight in the loss",
        "training.data.pairs:PairBatches._batch",
        then(lambda batch: batch._replace(weights=np.float32(batch.targets > 0))),
        "training/data/test_pairs.py::test_an_epoch_has_every_pair_once",
    ),
    Bug(
        "batches of pairs depend on the number of devices",
        "training.data.pairs:PairBatches._batch",
        Replace("micro * pairs + place", "micro * places + place"),
        "training/data/test_pairs.py::test_what_comes_is_the_same_on_any_number_of_devices",
    ),
)
