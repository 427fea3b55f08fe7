"""Interface of incremental decoders, which turn token ids into text."""

from collections.abc import Iterable
from typing import Protocol


class TextStream(Protocol):
    """Interface of incremental decoders."""

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the newly completed text, which may be empty."""

    def flush(self) -> str:
        """Returns the remaining text and resets the stream."""
