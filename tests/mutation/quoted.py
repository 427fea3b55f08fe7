"""A bug as a line of text and another in its place: what stands here is still to be converted."""

from dataclasses import dataclass
from pathlib import Path

from tests.mutation.bug import *  # noqa: F403
from tests.mutation.bug import PROJECT


@dataclass(frozen=True)
class Quoted:
    """`old` stands exactly once in `file` and is replaced by `new`; then each of `tests` (node ids
    below tests/, separated by blanks) must go red."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def path(self) -> Path:
        return PROJECT / "jaxformer" / self.file

    def source(self) -> str:
        """The file's text with the bug in it; LookupError if it no longer fits the code."""
        text = self.path.read_text()
        if text.count(self.old) != 1:
            raise LookupError(
                f"{self.name}: its text stands {text.count(self.old)} times in {self.path}; it "
                "must stand there once"
            )
        return text.replace(self.old, self.new)


Bug = Quoted

# Where the bugs go.
MASKS = "functional/masks.py"
CACHE = "functional/cache.py"
ATTENTION_FILE = "functional/attention.py"
EMBEDDING = "functional/embedding.py"
BLOCKWISE = "functional/blockwise.py"
DECODER = "functional/decoder.py"
TRANSFORMER = "functional/transformer.py"
BLOCKS = "functional/blocks.py"
POSITIONS = "functional/positions.py"
LOSSES_FILE = "functional/losses.py"
