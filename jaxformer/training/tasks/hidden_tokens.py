"""Hidden tokens: those that are hidden in a text, from what stands on both sides of them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar

import jax
import numpy as np

from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.decoding.fill import fill
from jaxformer.functional.masking import mask_tokens
from jaxformer.training.batch import WHOLE, Batch, Share
from jaxformer.training.config import HiddenTraining
from jaxformer.training.data.windows import document_segments
from jaxformer.training.evaluate import spread
from jaxformer.training.hidden import hidden_rows, most_frequent, score_hidden
from jaxformer.training.tasks.next_tokens import MicroBatches, first_words
from jaxformer.training.tasks.task import Measure, Score
from jaxformer.training.tasks.text import TextTask

HIDDEN = "▒"  # in what is shown to a person
MASK_WORD = "[MASK]"  # in what a person writes


@dataclass(frozen=True)
class HiddenTokens(TextTask):
    """Windows of a text in which some tokens are hidden; those are the targets.

    While a model learns, what is hidden follows BERT's rule (`mask_tokens`). When it is scored, all
    of it is replaced by the mask, and the same tokens of the held-out text each time.
    """

    measure: ClassVar[Measure] = Measure("accuracy", "accuracy")
    config: HiddenTraining

    @property
    def mask(self) -> int:
        """The token that stands for a hidden one."""
        return self.tokenizer.mask_token

    @cached_property
    def rows(self) -> list[Batch]:
        """The held-out text as it is scored."""
        config = self.config
        how = {"rate": config.mask_rate, "seed": config.seed}
        how |= {"before": self.tokenizer.before, "after": self.tokenizer.after}
        begin = len(self.tokenizer.opening)
        documents = [document[begin:] for document in self.data.held_out_documents]
        return hidden_rows(documents, self.mask, config.model.max_length, **how)

    @cached_property
    def baselines(self) -> dict[str, float]:
        return most_frequent(self.rows)

    @cached_property
    def num_targets(self) -> int:
        return int(sum(row.weights.sum() for row in self.rows))

    def batches(self, share: Share = WHOLE) -> "HiddenBatches":
        return HiddenBatches(self.data.train.ids, self.config, self.tokenizer, share)

    def score(self, model, variables, *, whole: bool, on_scored=lambda count: None) -> Score:
        rows = len(self.rows) if whole else self.config.evaluation_windows
        batches = spread(self.rows, rows, self.config.batch_size)
        return Score(*score_hidden(model, variables, batches, on_scored))

    def sample(self, model, variables, key) -> str:
        """Held-out text as the model was shown it, and as it filled it in."""
        length = min(self.config.sample_tokens, model.config.max_length)
        if not length:
            return ""
        row = self.rows[len(self.rows) // 2]
        tokens = row.inputs[0, : min(length, row.segments.sum())]
        guesses = fill(model, variables, [tokens], self.mask)[0].tokens[:, 0].tolist()
        words = (f"‹{self.tokenizer.decode([guess])}›" for guess in guesses)
        filled = self._shown(tokens, words)
        return f"shown: {self._shown(tokens, repeat(HIDDEN))}\nfilled in: {filled}"

    def _shown(self, tokens: np.ndarray, words: Iterable[str]) -> str:
        """The text of tokens, one of the words in the place of each that is hidden."""
        parts = np.split(tokens, np.flatnonzero(tokens == self.mask))
        texts = [self.tokenizer.decode(part.tolist()) for part in parts]  # the mask has no text
        return texts[0] + "".join(word + text for word, text in zip(words, texts[1:], strict=False))

    def example(self) -> list[str]:
        """That fills in the second word of the held-out text's beginning."""
        words = first_words(self.data.held_out_beginning, lambda words: True).split(" ")
        return ["fill", "--text=" + " ".join([words[0], MASK_WORD, *words[2:]])]


_hide = jax.jit(mask_tokens, static_argnames=("mask_token", "vocab_size", "rate"))


class HiddenBatches:
    """Windows of tokens of which some are hidden: those of `MicroBatches`, each between what the
    tokenizer puts around a text, and what batch n hides is a function of the seed and n. share: of
    each micro-batch, the rows that are given."""

    def __init__(
        self,
        tokens: np.ndarray,
        config: HiddenTraining,
        tokenizer: Tokenizer | Subwords,
        share: Share = WHOLE,
    ):
        self._around = (list(tokenizer.before), list(tokenizer.after))
        if any(self._around) and config.packing == "documents":
            raise ValueError(
                "packing is documents, but the tokenizer puts something around every text; with it "
                "it must be windows"
            )
        room = config.window - sum(map(len, self._around))
        self._begins = tokenizer.opening[0]
        inside = replace(config, window_length=room)
        self._windows = MicroBatches(tokens, inside, self._begins, share)
        self._shape = (config.accumulate, config.batch_size, room)
        self._rows, self._number = share.rows(config.batch_size), 0
        self._key = jax.random.key(config.seed)
        self._how = {
            "mask_token": tokenizer.mask_token,
            "vocab_size": min(tokenizer.vocab_size, config.model.vocab_size),
            "rate": config.mask_rate,
        }

    def __iter__(self) -> "HiddenBatches":
        return self

    def __next__(self) -> Batch:
        windows = next(self._windows)
        tokens = windows.targets
        key = jax.random.fold_in(self._key, self._number)
        inputs, weights = self._hidden(key, tokens)
        self._number += 1
        before, after = self._around
        zeros = [0.0] * len(before), [0.0] * len(after)
        batch = Batch(
            _between(before, inputs, after),
            _between(before, tokens, after),
            _between(zeros[0], weights, zeros[1]),
        )
        if windows.segments is not None:
            real, rows = windows.weights, tokens.reshape(-1, tokens.shape[-1])
            segments = document_segments(rows, self._begins).reshape(tokens.shape)
            batch = Batch(inputs, tokens, weights * real, segments * real.astype(np.int32))
        return batch

    def _hidden(self, key, tokens: np.ndarray):
        """(the rows with some of their tokens hidden, 1 where they are): what is drawn is drawn for
        the rows of all processes, so that each draws the same for its own."""
        whole = np.zeros(self._shape, tokens.dtype)
        whole[:, self._rows] = tokens
        return (np.asarray(x)[:, self._rows] for x in _hide(key, whole, **self._how))

    def shapes(self) -> list[Batch]:
        whole = self._windows.shapes()[0]
        length = whole.inputs.shape[2] + sum(map(len, self._around))
        shape = (whole.inputs.shape[0], len(self._rows), length)
        ids, weights = (jax.ShapeDtypeStruct(shape, x) for x in (np.int32, np.float32))
        return [Batch(ids, ids, weights, None if whole.segments is None else ids)]

    def state(self) -> dict[str, Any]:
        return {"windows": self._windows.state(), "number": self._number}

    def restore(self, state: dict[str, Any]) -> None:
        self._windows.restore(state["windows"])
        self._number = state["number"]


def _between(before: list, rows, after: list):
    """Rows [*batch, length] with the same before, and after, each of them."""
    if not before and not after:
        return rows
    sides = (
        np.broadcast_to(np.asarray(side, rows.dtype), (*rows.shape[:-1], len(side)))
        for side in (before, after)
    )
    left, right = sides
    return np.concatenate([left, rows, right], axis=-1)
