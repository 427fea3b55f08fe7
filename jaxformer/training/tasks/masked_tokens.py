"""Task of encoders: predict masked tokens of a text from the tokens on both sides."""

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
from jaxformer.training.config import MaskedTokensTraining
from jaxformer.training.data.tokens import TokenStream
from jaxformer.training.data.windows import WindowBatches, document_segment_ids, places_in_documents
from jaxformer.training.evaluate import (
    masked_windows,
    most_frequent,
    score_masked_tokens,
    spread,
    unmaskable_ids,
)
from jaxformer.training.tasks.next_tokens import first_words
from jaxformer.training.tasks.task import Measure, Score
from jaxformer.training.tasks.text import TextTask

# `HIDDEN` replaces masked tokens in samples. Users type `MASK_WORD` to mask a token of a text.
HIDDEN = "▒"
MASK_WORD = "[MASK]"


@dataclass(frozen=True)
class MaskedTokens(TextTask):
    """Task on windows of text with masked tokens, which are the targets.

    Training masks tokens by BERT's rule (`mask_tokens`). Evaluation replaces all targets by the
    mask token. Every evaluation masks the same tokens of the held-out text.
    """

    measure: ClassVar[Measure] = Measure("accuracy", "accuracy")
    # Scoring needs no backward pass. Nevertheless, scoring a target takes longer than training on a
    # token, because few tokens of a window are targets.
    scoring_cost: ClassVar[float] = 2.5
    config: MaskedTokensTraining

    @property
    def mask(self) -> int:
        """Id of the mask token."""
        if (mask := self.tokenizer.mask_token) is None:
            raise ValueError("tokenizer has no mask token; use a tokenizer with [MASK] or <mask>")
        return mask

    @cached_property
    def windows(self) -> list[Batch[np.ndarray]]:
        """Windows of the held-out text with masked tokens, for evaluation."""
        config, opening = self.config, len(self.tokenizer.opening)
        documents = [document[opening:] for document in self.data.held_out_documents]
        length = config.model.max_length
        return masked_windows(
            documents, self.tokenizer, length, rate=config.mask_rate, seed=config.seed
        )

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Accuracy of always predicting the most frequent masked token."""
        return most_frequent(self.windows)

    @cached_property
    def num_targets(self) -> int:
        """Number of masked tokens in all held-out text."""
        return sum(map(num_targets, self.windows))

    @property
    def part(self) -> float:
        """Fraction of the held-out windows that every evaluation scores."""
        return min(1.0, self.config.evaluation_windows / len(self.windows))

    def batches(self, share: Share = WHOLE) -> "MaskedBatches":
        """Returns an iterator over the training batches; `share` selects a part of each batch."""
        return MaskedBatches(self.data.train, self.config, self.tokenizer, share)

    def score(
        self, model: LanguageModel, variables: Variables, *, whole: bool, on_scored: OnScored = noop
    ) -> Score:
        """Scores the model on masked tokens of the held-out text (see `Task.score`)."""
        number = len(self.windows) if whole else self.config.evaluation_windows
        batches = spread(self.windows, number, self.config.batch_size)
        return Score(*score_masked_tokens(model, variables, batches, on_scored))

    def sample(self, model: LanguageModel, variables: Variables, key: PRNGKeyArray) -> str:
        """Returns held-out text, first with masked tokens and then with the model's predictions."""
        length = min(self.config.sample_tokens, model.config.max_length)
        if not length:
            return ""
        window = self.windows[len(self.windows) // 2]
        tokens = window.inputs[0, : min(length, num_tokens(window))]
        guesses = fill(model, variables, [tokens], self.mask)[0].tokens[:, 0].tolist()
        words = (f"‹{self.tokenizer.decode([guess])}›" for guess in guesses)
        filled = self._shown(tokens, words)
        return f"masked text: {self._shown(tokens, repeat(HIDDEN))}\nfilled in: {filled}"

    def _shown(self, tokens: np.ndarray, words: Iterable[str]) -> str:
        """Decodes tokens, with one of `words` in place of each masked token."""
        parts = np.split(tokens, np.flatnonzero(tokens == self.mask))
        # `decode` omits the mask tokens.
        texts = [self.tokenizer.decode(part.tolist()) for part in parts]
        return texts[0] + "".join(word + text for word, text in zip(words, texts[1:], strict=False))

    def example(self) -> list[str]:
        """Returns a command that masks the second word of the held-out text, and fills it in."""
        words = first_words(self.data.held_out_beginning, lambda words: True).split(" ")
        return ["fill-mask", "--text=" + " ".join([words[0], MASK_WORD, *words[2:]])]


_hide = jax.jit(mask_tokens, static_argnames=("mask_token", "vocab_size", "rate", "special"))


class MaskedBatches(WindowBatches):
    """Windows of text with masked tokens.

    The tokenizer's template adds tokens before and after each window. The masked positions of batch
    n depend only on n and the seed. Special tokens and the opening tokens of documents are never
    masked.
    """

    def __init__(
        self,
        stream: TokenStream,
        config: MaskedTokensTraining,
        tokenizer: Tokenizer,
        share: Share = WHOLE,
    ):
        """Initializes the iterator.

        Args:
            stream: The tokens of a text.
            config: The settings of the run, with the number and the length of windows.
            tokenizer: The tokenizer of the tokens.
            share: Which shard of each micro-batch to read.

        Raises:
            ValueError: Documents are packed, but the tokenizer's template adds tokens to each text.
        """
        self._around = (list(tokenizer.before), list(tokenizer.after))
        if any(self._around) and config.packing == "documents":
            raise ValueError(
                "packing is 'documents'; it must be 'windows', because the tokenizer adds special "
                "tokens before or after each text"
            )
        room = config.window - sum(map(len, self._around))
        starts = stream.starts if config.packing == "documents" else None
        options = {
            "accumulate": config.gradient_accumulation_steps,
            "starts": starts,
            "share": share,
        }
        super().__init__(stream.ids, room, config.batch_size, config.seed, **options)
        self._opening, self._documents = len(tokenizer.opening), stream.starts
        self._shape = (config.gradient_accumulation_steps, config.batch_size, room)
        self._part, self._key = share.indices(config.batch_size), jax.random.key(config.seed)
        vocab_size = min(tokenizer.vocab_size, config.model.vocab_size)
        special = unmaskable_ids(tokenizer, vocab_size)
        self._hiding: dict[str, Any] = {"mask_token": tokenizer.mask_token, "special": special}
        self._hiding |= {"vocab_size": vocab_size, "rate": config.mask_rate}

    def _read(self, index: int) -> Batch[np.ndarray]:
        """Returns the batch with this number, with micro-batches along the first axis."""
        windows, places = super()._read(index), self.places(index)[..., 1:]
        tokens = windows.targets
        is_text = places_in_documents(self._documents, places) >= self._opening
        inputs, weights = self._hidden(jax.random.fold_in(self._key, index), tokens, is_text)
        if (real := windows.weights) is not None:
            # The windows are packed documents, to which the template adds no tokens.
            segment_ids = document_segment_ids(self._documents, places)
            return Batch(inputs, tokens, weights * real, segment_ids * real.astype(np.int32))
        around = self._around
        zeros = [[0] * len(side) for side in around]
        return Batch(_between(around, inputs), _between(around, tokens), _between(zeros, weights))

    def _hidden(
        self, key: PRNGKeyArray, tokens: np.ndarray, is_text: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Returns the windows with masked tokens, and weights that are 1 for each masked token.

        The mask is drawn for the windows of all processes, so the mask does not depend on the
        number of processes.
        """
        whole, segment_ids = np.zeros((2, *self._shape), tokens.dtype)
        whole[:, self._part], segment_ids[:, self._part] = tokens, is_text
        drawn = _hide(key, whole, segment_ids=segment_ids, **self._hiding)
        return (np.asarray(x)[:, self._part] for x in drawn)

    def state(self) -> dict[str, Any]:
        """Returns the iterator's position as JSON values."""
        return {"windows": super().state(), "number": self._number}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves the iterator to the position in `state`."""
        super().restore(state["windows"])


def _between(around: Sequence[list[int]], sequences: np.ndarray) -> np.ndarray:
    """Returns `sequences` [*batch, length] with tokens added before and after each sequence."""
    before, after = (
        np.broadcast_to(np.asarray(side, sequences.dtype), (*sequences.shape[:-1], len(side)))
        for side in around
    )
    return np.concatenate([before, sequences, after], axis=-1)
