"""Stop strings: texts at which generation stops.

A stop string may begin and end inside a token. An automaton (Aho and Corasick 1975) therefore reads
the bytes of the generated tokens. Its states are the proper prefixes of the stop strings. A table
holds the next state for each state and token, so a decoding step reads one entry per sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from jaxtyping import Int

from jaxformer.decoding.text_stream import TextStream
from jaxformer.models.sequences import power_of_two

# Least number of table rows. XLA compiles once per shape, so the number is a power of two.
_FEWEST_STATES = 16
# Limit for all stop strings together, because the table may have a row for each byte.
_MOST_BYTES = 4096


class ByteVocabulary(Protocol):
    """Interface of the tokenizers that `StopStrings` accepts."""

    @property
    def vocabulary_bytes(self) -> list[bytes]:
        """The bytes that each id adds to a text."""


@dataclass(frozen=True)
class StopStrings:
    r"""Stop strings for `generate`, which ends a sequence after the first stop string.

        stop = jf.StopStrings(tokenizer, ("\n\n", "User:"))
        out = jf.generate(model, variables, prompts, max_new_tokens=99, stop_strings=stop)

    A sequence ends with the token that completes a stop string. Only generated tokens count.

    Attributes:
        tokenizer: The model's tokenizer.
        texts: The stop strings.

    Raises:
        ValueError: There is no text, a text is empty, or the bytes of the tokenizer's tokens are
            not defined.
    """

    tokenizer: ByteVocabulary
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        """Checks the texts."""
        if isinstance(self.texts, str) or not isinstance(self.texts, Iterable):
            raise ValueError(f"texts is {self.texts!r}; it must be a tuple of texts")
        object.__setattr__(self, "texts", tuple(self.texts))
        if not self.texts:
            raise ValueError("texts is empty; it must have at least one text")
        for text in self.texts:
            if not isinstance(text, str) or not text:
                raise ValueError(f"texts has the entry {text!r}; each must be a nonempty text")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"texts has the entry {text!r}: {error.reason}") from None
        if (length := sum(len(text.encode()) for text in self.texts)) > _MOST_BYTES:
            raise ValueError(
                f"texts have {length:,} bytes together; at most {_MOST_BYTES:,} are accepted"
            )
        _ = self.tokenizer.vocabulary_bytes  # Raises if the bytes are not defined.

    @cached_property
    def _automaton(self) -> Int[np.ndarray, "states bytes"]:
        """Table of next states, indexed by state and byte.

        State 0 is the empty prefix. The last state means that a stop string is complete.
        """
        words = tuple(text.encode() for text in self.texts)
        begins = sorted({word[:n] for word in words for n in range(len(word))})
        states = {begin: number for number, begin in enumerate(begins)}
        table = np.zeros((power_of_two(len(states) + 1, _FEWEST_STATES), 256), np.int16)
        end = len(table) - 1
        table[len(states) :] = end
        for begin, state in states.items():
            for byte in set(b"".join(words)):
                text = begin + bytes([byte])
                if text.endswith(words):
                    table[state, byte] = end
                else:
                    rests = (text[n:] for n in range(len(text) + 1))
                    table[state, byte] = next(states[rest] for rest in rests if rest in states)
        return table

    def table(self, vocab_size: int) -> Int[np.ndarray, "states vocab"]:
        """Returns the table of next states, indexed by state and token id.

        The last state means that a stop string is complete.

        Args:
            vocab_size: The model's vocabulary size. An id without a token does not change the
                state.
        """
        return _token_table(self, vocab_size)

    def stream(self, stream: TextStream) -> "StoppedStream":
        """Wraps a stream, so that its text ends before the first stop string."""
        return StoppedStream(stream, self.texts)

    def cut(self, text: str) -> str:
        """Returns the part of a text before its first stop string."""
        return text[: _find_first(text, self.texts)[0]]


@lru_cache(maxsize=2)
def _token_table(stop: StopStrings, vocab_size: int) -> Int[np.ndarray, "states vocab"]:
    """Computes `StopStrings.table`, which takes 0.2 s for 150,000 tokens and is cached."""
    after_byte = stop._automaton
    words = stop.tokenizer.vocabulary_bytes[:vocab_size]
    table = np.repeat(np.arange(len(after_byte), dtype=np.int16)[:, None], vocab_size, axis=1)
    # The longest tokens come first, so that the tokens of at least n bytes are a slice.
    order = sorted(range(len(words)), key=lambda token: -len(words[token]))
    lengths = np.array([len(words[token]) for token in order])
    after = table[:, : len(words)].copy()
    for place in range(lengths.max(initial=0)):
        number = int((lengths > place).sum())
        byte = np.array([words[token][place] for token in order[:number]])
        after[:, :number] = after_byte[after[:, :number], byte]
    table[:, order] = after
    return table


class StoppedStream:
    """A stream of text that ends before the first stop string.

    `push` holds text back while it may be the beginning of a stop string.
    """

    def __init__(self, stream: TextStream, texts: tuple[str, ...]):
        """Starts a stream.

        Args:
            stream: The stream of the whole text.
            texts: The stop strings.
        """
        self._stream, self._texts = stream, texts
        self._held, self.stopped = "", False

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the text that is known to come before any stop string."""
        return self._release(self._stream.push(ids), is_end=False)

    def flush(self) -> str:
        """Returns the remaining text before a stop string."""
        return self._release(self._stream.flush(), is_end=True)

    def _release(self, new: str, is_end: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        start, end = _find_first(text, self._texts)
        self.stopped = end <= len(text)
        if not self.stopped and not is_end:
            start -= max(_overlap(text, stop) for stop in self._texts)
        self._held = "" if self.stopped else text[start:]
        return text[:start]


def _find_first(text: str, stops: tuple[str, ...]) -> tuple[int, int]:
    """Finds the stop string that ends first; of several with the same end, the longest.

    Returns:
        (start, end) of the stop string, or (len(text), len(text) + 1) if there is none.
    """
    starts = ((text.find(stop), stop) for stop in stops)
    found = [(start + len(stop), start) for start, stop in starts if start >= 0]
    end, start = min(found, default=(len(text) + 1, len(text)))
    return start, end


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if stop.startswith(text[-n:])), 0)
