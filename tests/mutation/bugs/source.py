"""Bugs of beam search, encoders, and models that read a source."""

import jax.numpy as jnp
import numpy as np

from tests.mutation.bug import CHUNKING, Bug
from tests.mutation.changes import Replace, having, inside, takes, then

BEAM, ENCODER = "decoding/test_beam.py", "models/test_encoder.py"
SOURCE, EMBEDDING = "properties/test_source.py", "functional/test_embedding.py"


def scores_alike(begin):
    def broken(passed, beam_width, room, batch_size):
        cache, search = begin(passed, beam_width, room, batch_size)
        equal = jnp.zeros_like(search.live.log_probs)
        return cache, search._replace(live=search.live._replace(log_probs=equal))

    return broken


def as_if_unordered(extended):
    search, parents, tokens = extended
    return search, 0 * parents + jnp.arange(parents.shape[1]), tokens


def shares_nothing(call):
    def broken(self, weights, inputs, *args):
        if "kernel" not in weights["embedding"]:
            return call(self, weights, inputs, *args)
        return self.vectors(weights["embedding"], inputs, self.dtype, args[-1].placement)

    return broken


BUGS = (
    Bug(
        "beams are not reordered with their caches",  # transformers#46612, #29635
        "decoding.beam:_run_steps.step",
        inside("_extend", then(as_if_unordered)),
        f"{BEAM}::test_full_width_beam_equals_exhaustive_search "
        f"{BEAM}::test_beam_hypotheses_have_consistent_scores_and_log_probs",
    ),
    Bug(
        "a finished beam search continues",
        "decoding.beam:_extend",
        Replace(
            "(jnp.arange(number, dtype=jnp.int32) < beam_width) & ~search.done[:, None]",
            "jnp.arange(number, dtype=jnp.int32) < beam_width",
        ),
        f"{BEAM}::test_beam_width_one_is_greedy_decoding",
    ),
    Bug(
        "beam scores ignore the length penalty",
        "decoding.beam:Beam.scores",
        lambda scores: lambda self, length_penalty: scores(self, 0),
        f"{BEAM}::test_full_width_beam_equals_exhaustive_search "
        f"{BEAM}::test_beam_hypotheses_have_consistent_scores_and_log_probs",
    ),
    Bug(
        "a beam search stops as soon as it has enough hypotheses",
        "decoding.beam:beam_search",
        Replace(
            "_first_not_none(early_stopping, defaults.early_stopping, False)",
            "_first_not_none(early_stopping, defaults.early_stopping, True)",
        ),
        f"{BEAM}::test_beam_search_continues_while_live_hypothesis_may_improve",
    ),
    Bug(
        "BLEU scores greedy translations",
        "training.evaluate:score_pairs",
        takes(beam_width=lambda width: width or 1),
        "decoding/test_translate.py::test_default_beam_width_is_that_of_the_checkpoint_or_4",
    ),
    Bug(
        "all beams start with equal scores",
        "decoding.beam:_init_search",
        scores_alike,
        f"{BEAM}::test_beam_hypotheses_have_consistent_scores_and_log_probs",
    ),
    Bug(
        "the pooler may read padding",
        "functional.outputs:Pooler.__call__",
        lambda call: lambda self, weights, encoded, segment_ids=None: call(self, weights, encoded),
        f"{ENCODER}::test_pooler_output_is_computed_from_the_first_token",
    ),
    Bug(
        "padding is masked and predicted",
        "functional.losses.token_masking:mask_tokens",
        takes(segment_ids=lambda _: None),
        f"{ENCODER}::test_training_tokens_are_masked_with_the_frequencies_of_bert",
    ),
    Bug(
        "a prefix may be read in chunks",
        "decoding.loop_cache:_check_reading",
        takes(model=having(minimum_prefill=1)),
        f"{CHUNKING}::test_extend_rejects_chunk_that_ends_inside_the_prefix",
    ),
    Bug(
        "padding has weight in the loss",
        "training.data.pairs:PairBatches._build",
        then(lambda batch: batch._replace(weights=np.ones_like(batch.weights))),
        "training/data/test_pairs.py::test_epoch_of_pair_batches_contains_every_pair_once",
    ),
    Bug(
        "the end of a text has no weight in the loss",
        "training.data.pairs:PairBatches._build",
        then(lambda batch: batch._replace(weights=np.float32(batch.targets > 0))),
        "training/data/test_pairs.py::test_epoch_of_pair_batches_contains_every_pair_once",
    ),
    Bug(
        "batches of pairs depend on the number of devices",
        "training.data.pairs:PairBatches._build",
        Replace("micro * pairs + place", "micro * places + place"),
        "training/data/test_pairs.py::test_batches_contain_the_same_pairs_for_any_number_of_devices",
    ),
    # ---- sources of floats
    Bug(
        "features at padding contribute to the gradient of their linear layer",
        "functional.embedding:FeatureVectors.__call__",
        Replace("without_padding(inputs.tokens, inputs.segment_ids)", "inputs.tokens"),
        f"{SOURCE}::test_nan_in_source_padding_does_not_change_loss_and_gradients[frames]",
    ),
    Bug(
        "initialization of the feature projection ignores the number of features",
        "functional.embedding:FeatureVectors.init",
        Replace("stddev / self.num_features**0.5", "stddev"),
        f"{EMBEDDING}::test_initial_feature_embeddings_have_the_requested_stddev",
    ),
    Bug(
        "features are padded as integers",
        "models.sequences:padded",
        Replace("np.float32 if features else np.int32", "np.int32"),
        f"{SOURCE}::test_source_features_as_array_or_list_give_equal_logits",
    ),
    Bug(
        "the embedding of features ignores padding, positions and the norm",
        "functional.embedding:Embedding.__call__",
        shares_nothing,
        f"{EMBEDDING}::test_token_embedding_equals_one_hot_features",
    ),
    Bug(
        "a source of features may hold NaN",
        "models.check:check_source",
        Replace("_check_finite(source, segment_ids)", "pass"),
        f"{SOURCE}::test_invalid_source_features_are_rejected",
    ),
)
