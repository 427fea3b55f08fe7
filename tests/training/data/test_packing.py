"""Training on packed documents equals training on each document alone."""

import itertools
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.training.batch import Batch, Share
from jaxformer.training.config import MaskedTokensTraining
from jaxformer.training.data.windows import WindowBatches
from jaxformer.training.objectives import CrossEntropy, summed_loss
from jaxformer.training.tasks.masked_tokens import MaskedBatches
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
    """Tokenizer whose opening token is also an ordinary word, as a config.json may define it."""

    opening, before, after, mask_token, vocab_size = [END], [], [], MASK, 13
    text_ids = range(MASK)


def _batches(model, documents, share=None, **options):
    """Returns the batches of a run with packed documents."""
    share = share or Share()
    ids = np.concatenate([[END, *document] for document in documents])
    starts = np.cumsum([0, *(len(document) + 1 for document in documents[:-1])])
    sizes = {"batch_size": 2, **options}
    if isinstance(model.config, jf.EncoderConfig):
        sizes["gradient_accumulation_steps"] = sizes.pop("accumulate", 1)
        config = MaskedTokensTraining(
            model=model.config, mask_rate=0.4, packing="documents", **sizes
        )
        stream = SimpleNamespace(ids=ids, starts=starts)
        return MaskedBatches(stream, config, _Tokenizer, share)
    return WindowBatches(ids, model.config.max_length, starts=starts, share=share, **sizes)


def _alone(batch: Batch) -> Batch:
    """Returns a batch with each document in a separate sequence, and with sequences of padding."""
    length = batch.inputs.shape[1]
    apart = Batch(*(np.zeros((2 * length, length), x.dtype) for x in batch[:4]))
    indices = iter(range(2 * length))
    for inputs, targets, weights, segment_ids in zip(*batch[:4], strict=True):
        for segment in range(1, segment_ids.max() + 1):
            here, index = segment_ids == segment, next(indices)
            for to, of in zip(apart, (inputs, targets, weights, here), strict=False):
                to[index, : here.sum()] = of[here]
    return apart


documents = st.lists(st.lists(st.integers(0, 11), max_size=15), min_size=2, max_size=6).filter(
    lambda some: sum(len(one) + 1 for one in some) > 16
)


@pytest.mark.parametrize("name", mostly_slow(KINDS, slow=["dilated cnn"]))
def test_loss_of_packed_documents_equals_loss_of_documents_alone(name):
    model, loss_of = _model(name)

    @given(documents, st.integers(0, 3))
    def check(documents, seed):
        params = tiny.weights(model, seed)["params"]
        batch = next(_batches(model, documents, seed=seed))
        batch = jax.tree.map(lambda x: np.asarray(x[0]), batch)
        single = _alone(batch)
        packed, alone = (loss_of(params, some) for some in (batch, single))
        np.testing.assert_allclose(packed, alone, rtol=2e-5)
        assert CrossEntropy().count(batch) == CrossEntropy().count(single)

    check()


@pytest.mark.parametrize("name", mostly_slow(("llama", "encoder"), "llama"))
def test_concatenated_packed_batches_of_processes_equal_the_batch_of_one_process(name):
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


@pytest.mark.parametrize("packing", mostly_slow(["windows", "documents"], "documents"))
def test_special_tokens_are_never_masked_or_inserted(packing, quick_compilation):
    """A fraction `mask_rate` of the ordinary tokens is masked, with the segment ids of the targets.

    Each token of the stream equals its index, so a target reveals its position.
    """
    special, opening = {2, 50, 51}, 2
    starts = np.array([0, 3, 40, 42, 90])
    marks = {place + more for place in starts for more in range(opening)}
    tokenizer = SimpleNamespace(
        opening=[5, 6],
        before=[],
        after=[],
        mask_token=199,
        vocab_size=200,
        text_ids=sorted(set(range(150)) - special),
    )
    model = jf.EncoderConfig(vocab_size=300, max_length=16, num_layers=1, embed_dim=8, num_heads=2)
    config = MaskedTokensTraining(model=model, mask_rate=0.4, batch_size=64, packing=packing)
    stream = SimpleNamespace(ids=np.arange(140), starts=starts)
    batches = MaskedBatches(stream, config, tokenizer)
    number, hidden, drawn = 0, 0, set()
    for batch in itertools.islice(batches, 20):
        inputs, targets, weights, segment_ids = (None if x is None else x[0] for x in batch[:4])
        real = np.ones_like(targets) if segment_ids is None else segment_ids > 0
        assert (
            not weights[np.isin(targets, [*marks, *special])].any() and not weights[real == 0].any()
        )
        number += int((real * ~np.isin(targets, [*marks, *special])).sum())
        hidden += int(weights.sum())
        drawn |= set(inputs[(weights > 0) & (inputs != targets)].tolist())
        if segment_ids is not None:
            begins = (np.diff(segment_ids, prepend=0) > 0)[:, 1:] & (real[:, 1:] > 0)
            assert np.array_equal(begins, np.isin(targets, starts)[:, 1:] & (real[:, 1:] > 0))
    assert abs(hidden / number - 0.4) < 5 * np.sqrt(0.24 / number)
    assert drawn == {*tokenizer.text_ids, tokenizer.mask_token}
