"""Task of encoders: predict hidden tokens of a text from the tokens on both sides."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.decoding.fill import fill
from jaxformer.functional.losses.token_masking import mask_tokens
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import WHOLE, Batch, OnScored, Share, noop, num_targets, num_tokens
from jaxformer.training.config import HiddenTraining
from jaxformer.training.data.tokens import TokenStream
from jaxformer.training.data.windows import WindowBatches, document_segments, places_in_documents
from jaxformer.training.evaluate import (
    hidden_rows,
    most_frequent,
    never_hidden,
    score_hidden,
    spread,
)
from jaxformer.training.tasks.next_tokens import first_words
from jaxformer.training.tasks.task import Measure, Score
from jaxformer.training.tasks.text import TextTask

HIDDEN = "▒"  # shows a hidden token in a sample
MASK_WORD = "[MASK]"  # marks a hidden token in a user's text


@dataclass(frozen=True)
class HiddenTokens(TextTask):
    """Task on windows of text in which some tokens are hidden; the hidden tokens are the targets.

    Training hides tokens by BERT's rule (`mask_tokens`). Scoring replaces all targets by the mask;
    they are the same tokens of the held-out text each time.
    """

    measure: ClassVar[Measure] = Measure("accuracy", "accuracy")
    scoring_cost: ClassVar[float] = 2.5  # only the forward pass, but few tokens are targets
    config: HiddenTraining

    @property
    def mask(self) -> int:
        """Id of the mask token."""
        if (mask := self.tokenizer.mask_token) is None:
            raise ValueError("the tokenizer has no mask token")
        return mask

    @cached_property
    def rows(self) -> list[Batch[np.ndarray]]:
        """Windows of the held-out text with hidden tokens, for scoring."""
        config, opening = self.config, len(self.tokenizer.opening)
        documents = [document[opening:] for document in self.data.held_out_documents]
        length = config.model.max_length
        return hidden_rows(
            documents, self.tokenizer, length, rate=config.mask_rate, seed=config.seed
        )

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Accuracy of always predicting the token that is hidden most often."""
        return most_frequent(self.rows)

    @cached_property
    def num_targets(self) -> int:
        """Number of hidden tokens in all held-out text."""
        return sum(map(num_targets, self.rows))

    @property
    def part(self) -> float:
        """Share of the held-out windows that every evaluation scores."""
        return min(1.0, self.config.evaluation_windows / len(self.rows))

    def batches(self, share: Share = WHOLE) -> "HiddenBatches":
        """Returns the training batches from the beginning, or the share of one process."""
        return HiddenBatches(self.data.train, self.config, self.tokenizer, share)

    def score(
        self, model: LanguageModel, variables: Variables, *, whole: bool, on_scored: OnScored = noop
    ) -> Score:
        """Scores the model on hidden tokens of the held-out text (see `Task.score`)."""
        rows = len(self.rows) if whole else self.config.evaluation_windows
        batches = spread(self.rows, rows, self.config.batch_size)
        return Score(*score_hidden(model, variables, batches, on_scored))

    def sample(self, model: LanguageModel, variables: Variables, key: PRNGKeyArray) -> str:
        """Returns held-out text with hidden tokens, and the same text as the model fills it in."""
        length = min(self.config.sample_tokens, model.config.max_length)
        if not length:
            return ""
        row = self.rows[len(self.rows) // 2]
        tokens = row.inputs[0, : min(length, num_tokens(row))]
        guesses = fill(model, variables, [tokens], self.mask)[0].tokens[:, 0].tolist()
        words = (f"‹{self.tokenizer.decode([guess])}›" for guess in guesses)
        filled = self._shown(tokens, words)
        return f"shown: {self._shown(tokens, repeat(HIDDEN))}\nfilled in: {filled}"

    def _shown(self, tokens: np.ndarray, words: Iterable[str]) -> str:
        """Returns the text of tokens, with one of `words` for each hidden token."""
        parts = np.split(tokens, np.flatnonzero(tokens == self.mask))
        texts = [self.tokenizer.decode(part.tolist()) for part in parts]  # the mask has no text
        return texts[0] + "".join(word + text for word, text in zip(words, texts[1:], strict=False))

    def example(self) -> list[str]:
        """Returns a command that fills in the second word of the held-out text."""
        words = first_words(self.data.held_out_beginning, lambda words: True).split(" ")
        return ["fill", "--text=" + " ".join([words[0], MASK_WORD, *words[2:]])]


_hide = jax.jit(mask_tokens, static_argnames=("mask_token", "vocab_size", "rate", "special"))


class HiddenBatches(WindowBatches):
    """Windows of text with some tokens hidden.

    Each window is enclosed in the ids that the tokenizer's template puts around a text. The hidden
    positions of batch n depend on the seed and on n only. Special tokens and the opening tokens of
    documents are never hidden.
    """

    def __init__(
        self,
        stream: TokenStream,
        config: HiddenTraining,
        tokenizer: Tokenizer,
        share: Share = WHOLE,
    ):
        """Prepares to read windows.

        Args:
            stream: The tokens of a text.
            config: The settings of the run, with the number and the length of windows.
            tokenizer: The tokenizer of the tokens.
            share: The rows of each micro-batch to read.

        Raises:
            ValueError: Documents are packed, but the tokenizer's template puts ids around a text.
        """
        self._around = (list(tokenizer.before), list(tokenizer.after))
        if any(self._around) and config.packing == "documents":
            raise ValueError(
                "packing is documents; it must be windows, because the tokenizer puts special "
                "tokens around every text"
            )
        room = config.window - sum(map(len, self._around))
        starts = stream.starts if config.packing == "documents" else None
        how = {"accumulate": config.accumulate, "starts": starts, "share": share}
        super().__init__(stream.ids, room, config.batch_size, config.seed, **how)
        self._opening, self._documents = len(tokenizer.opening), stream.starts
        self._shape = (config.accumulate, config.batch_size, room)
        self._part, self._key = share.rows(config.batch_size), jax.random.key(config.seed)
        vocab_size = min(tokenizer.vocab_size, config.model.vocab_size)
        special = never_hidden(tokenizer, vocab_size)
        self._hiding: dict[str, Any] = {"mask_token": tokenizer.mask_token, "special": special}
        self._hiding |= {"vocab_size": vocab_size, "rate": config.mask_rate}

    def _read(self, index: int) -> Batch[np.ndarray]:
        """Returns the batch with this number, with micro-batches along the first axis."""
        windows, places = super()._read(index), self.places(index)[..., 1:]
        tokens = windows.targets
        is_text = places_in_documents(self._documents, places) >= self._opening
        inputs, weights = self._hidden(jax.random.fold_in(self._key, index), tokens, is_text)
        if (real := windows.weights) is not None:  # packed: without ids around a window
            segments = document_segments(self._documents, places)
            return Batch(inputs, tokens, weights * real, segments * real.astype(np.int32))
        around = self._around
        zeros = [[0] * len(side) for side in around]
        return Batch(_between(around, inputs), _between(around, tokens), _between(zeros, weights))

    def _hidden(
        self, key: PRNGKeyArray, tokens: np.ndarray, is_text: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Returns the rows with some tokens hidden, and the weights: 1 for each hidden token.

        It draws for the rows of all processes, so that a row does not depend on their number.
        """
        whole, segments = np.zeros((2, *self._shape), tokens.dtype)
        whole[:, self._part], segments[:, self._part] = tokens, is_text
        drawn = _hide(key, whole, segments=segments, **self._hiding)
        return (np.asarray(x)[:, self._part] for x in drawn)

    def state(self) -> dict[str, Any]:
        """Returns the position of the iterator, for JSON."""
        return {"windows": super().state(), "number": self._number}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves the iterator to the position in `state`."""
        super().restore(state["windows"])


def _between(around: Sequence[list[int]], rows: np.ndarray) -> np.ndarray:
    """Returns rows [*batch, length] with the first of `around` before and the second after each."""
    before, after = (
        np.broadcast_to(np.asarray(side, rows.dtype), (*rows.shape[:-1], len(side)))
        for side in around
    )
    return np.concatenate([before, rows, after], axis=-1)
