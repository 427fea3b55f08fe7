"""Documents packed into one row are learnt from as if each stood alone."""

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.training.batch import Batch, Share
from jaxformer.training.config import HiddenTraining, TextTraining
from jaxformer.training.loss import summed_loss
from jaxformer.training.tasks.hidden_tokens import HiddenBatches
from jaxformer.training.tasks.next_tokens import MicroBatches
from tests.properties import tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

MASK, END = 12, 0
KINDS = {
    **{name: MODELS[name] for name in ("decoder", "llama", "lstm", "dilated cnn")},
    "encoder": {"kind": jf.EncoderConfig, "positions": "learned"},
}


@cache
def _model(name):
    model = tiny.build(**KINDS[name])
    return model, jax.jit(lambda params, batch: summed_loss(model, params, batch))


class _Tokenizer:
    opening, before, after, mask_token, vocab_size = [END], [], [], MASK, 13


def _batches(model, documents, share=None, **options):
    """Of documents packed, as a run has them."""
    share = share or Share()
    ids = np.concatenate([[END, *document] for document in documents])
    sizes = {"batch_size": 2, "packing": "documents", **options}
    if isinstance(model.config, jf.EncoderConfig):
        config = HiddenTraining(model=model.config, mask_rate=0.4, **sizes)
        return HiddenBatches(ids, config, _Tokenizer, share)
    return MicroBatches(ids, TextTraining(model=model.config, **sizes), END, share)


def _alone(batch: Batch) -> Batch:
    """Each document of each row at the beginning of a row of its own, and rows of padding."""
    length = batch.inputs.shape[1]
    apart = Batch(*(np.zeros((2 * length, length), x.dtype) for x in batch[:4]))
    rows = iter(range(2 * length))
    for inputs, targets, weights, segments in zip(*batch[:4], strict=True):
        for segment in range(1, segments.max() + 1):
            here, row = segments == segment, next(rows)
            for to, of in zip(apart, (inputs, targets, weights, here), strict=False):
                to[row, : here.sum()] = of[here]
    return apart


documents = st.lists(st.lists(st.integers(1, 11), max_size=15), min_size=2, max_size=6).filter(
    lambda some: sum(len(one) + 1 for one in some) > 16
)


@pytest.mark.parametrize("name", mostly_slow(KINDS, "dilated cnn"))
def test_the_loss_of_packed_documents_is_that_of_each_alone(name):
    model, loss_of = _model(name)

    @given(documents, st.integers(0, 3))
    def check(documents, seed):
        params = tiny.weights(model, seed)["params"]
        batch = next(_batches(model, documents, seed=seed))
        batch = jax.tree.map(lambda x: np.asarray(x[0]), batch)
        packed, count = loss_of(params, batch)
        alone, same = loss_of(params, _alone(batch))
        np.testing.assert_allclose(packed, alone, rtol=2e-5)
        assert count == same

    check()


@pytest.mark.parametrize("name", mostly_slow(("llama", "encoder"), "llama"))
def test_what_processes_read_together_is_the_batch_of_one(name):
    model, _ = _model(name)
    texts = [[1, 2, 3] * 9, [4, 5, 6, 7], [8] * 20]
    how = {"batch_size": 4, "accumulate": 2}
    one = _batches(model, texts, **how)
    parts = [_batches(model, texts, Share(index, 2), **how) for index in range(2)]
    assert [x.shape for x in jax.tree.leaves(parts[0].shapes())] == [
        (2, 2, tiny.SIZES["max_length"])
    ] * 4
    for _ in range(3):
        together = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *map(next, parts))
        assert jax.tree.all(jax.tree.map(np.array_equal, together, next(one)))
        assert parts[0].state() == one.state()


def test_the_segments_of_hidden_tokens_are_their_own():
    """A model that sees both sides reads the targets, of which each stands in its document."""
    model, _ = _model("encoder")
    batch = next(_batches(model, [[1, 2, 3] * 2, [4, 5, 6, 7], [8] * 20]))
    rows = zip(*(x.reshape(-1, x.shape[-1]) for x in (batch.targets, batch.segments)), strict=True)
    for targets, segments in rows:
        begins = np.diff(segments, prepend=0) > 0
        real = segments > 0
        assert np.array_equal(begins[1:] & real[1:], (targets[1:] == END) & real[1:])
