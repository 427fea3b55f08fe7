"""Next tokens: each token of a text from those before it."""

from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

import jax
import numpy as np

from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.training.batch import WHOLE, Batch, Share
from jaxformer.training.config import TextTraining
from jaxformer.training.data.windows import WindowBatches
from jaxformer.training.evaluate import evaluate_documents, evaluate_windows
from jaxformer.training.tasks.task import Measure, Score
from jaxformer.training.tasks.text import TextTask


@dataclass(frozen=True)
class NextTokens(TextTask):
    """Windows of a text; targets are the inputs moved by one."""

    measure: ClassVar[Measure] = Measure("bits_per_byte", "bits per byte")

    @property
    def baselines(self) -> dict[str, float]:
        return self.data.baselines

    @property
    def num_targets(self) -> int:
        return self.data.held_out.num_targets

    def batches(self, share: Share = WHOLE) -> "MicroBatches":
        return MicroBatches(self.data.train.ids, self.config, self.tokenizer.opening[0], share)

    def score(self, model, variables, *, whole: bool, on_scored=lambda count: None) -> Score:
        documents, size = self.data.held_out_documents, self.data.held_out.num_bytes
        how = {"batch_size": self.config.batch_size, "on_scored": on_scored}
        if whole:
            found = evaluate_documents(model, variables, documents, size, **how)
        else:
            windows = self.config.evaluation_windows
            found = evaluate_windows(model, variables, documents, size, windows=windows, **how)
        return Score(found.loss, found.bits_per_byte, found.tokens)

    def sample(self, model, variables, key) -> str:
        opening = self.tokenizer.opening
        room = min(self.config.sample_tokens, model.config.max_length - len(opening))
        if room < 1:
            return ""
        sample = generate(
            model,
            variables,
            [opening],
            max_new_tokens=room,
            sampler=Sampler(temperature=0.8, top_p=0.95),
            key=key,
            stop_tokens=self.tokenizer.stop_tokens,
        )
        return self.tokenizer.decode(sample.tokens[0, : sample.lengths[0]].tolist())

    def example(self) -> list[str]:
        """That goes on from the beginning of the held-out text."""
        text, longest = self.data.held_out_beginning, self.config.model.max_length
        words = first_words(text, lambda words: len(self.tokenizer.encode(words)) + 1 < longest)
        return ["generate", *[f"--prompt={words}"] * bool(words)]


class MicroBatches:
    """Windows of tokens, int32 [accumulate, batch, length]; with segments, where documents are
    packed. begins: the token that each begins with; share: of each micro-batch, the rows that are
    read."""

    def __init__(self, tokens: np.ndarray, config: TextTraining, begins: int, share: Share = WHOLE):
        rows = config.accumulate * config.batch_size
        self._shape = (config.accumulate, config.batch_size // share.count, config.window)
        self._packed = config.packing == "documents"
        self._windows = WindowBatches(
            tokens,
            config.window,
            rows,
            config.seed,
            rows=share.rows(config.batch_size, config.accumulate),
            end_of_text=begins if self._packed else None,
        )
        self.state, self.restore = self._windows.state, self._windows.restore

    def __iter__(self) -> "MicroBatches":
        return self

    def __next__(self) -> Batch:
        return jax.tree.map(lambda x: x.reshape(self._shape), next(self._windows))

    def shapes(self) -> list[Batch]:
        ids, weights = (jax.ShapeDtypeStruct(self._shape, x) for x in (np.int32, np.float32))
        return [Batch(ids, ids, weights, ids) if self._packed else Batch(ids, ids)]


def first_words(text: str, fits) -> str:
    """The first line's, up to 20 characters, of a text; fewer until they fit."""
    words = "".join(takewhile(str.isprintable, text.lstrip()))
    if len(words) > 20:
        words = words[:20].rpartition(" ")[0].rstrip() or words[:20]
    while words and not fits(words):
        words = words[:-1]
    return words
