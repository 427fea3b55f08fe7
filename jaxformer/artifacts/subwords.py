"""Other people's tokenizers: BPE over bytes or with byte fallback, WordPiece, Unigram.

What stands before and after a text is what their template says; the work is done by the
``tokenizers`` library.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers

MOST_BYTES = 64 * 2**20
_MOST_TOKENS = 2**21
_MOST_GROWTH = 8.0  # doublings
# A pattern may take time exponential in a text if what is repeated in it is repeated again.
_NESTED_REPEAT = re.compile(r"[+*}]\)+\??[+*{]")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids with a meaning. end_of_text: ends a text, the first of stop_tokens, any of which does;
    begin: what a text begins with, start: what a decoder begins with; pad: of padding."""

    stop_tokens: tuple[int, ...] = ()
    begin: int | None = None
    start: int | None = None
    pad: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))  # JSON has lists


class Subwords:
    """Text to token ids and back.

    Attributes:
      vocab_size: one more than the largest id.
      special: the `SpecialTokens`.
      end_of_text: the id that ends a text, None if it is not known.
      before, after: the ids that stand before and after a text that a model reads.
      mask_token: the id that stands for a hidden token; None: there is none.
      why_lossy: why a text may not come back as it was.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # special tokens found in text are ordinary text
        self._backend, self.special = backend, special
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not 0 < len(vocabulary) <= _MOST_TOKENS:
            raise ValueError(f"tokenizer: it has {len(vocabulary)} tokens")
        self.vocab_size: int = max(vocabulary.values()) + 1
        added = backend.get_added_tokens_decoder()
        self.own_size = 1 + max((x for x in vocabulary.values() if x not in added), default=0)
        model = json.loads(backend.to_str())["model"]
        unknown = model.get("unk_id", vocabulary.get(model.get("unk_token")))
        is_special = {token for token, entry in added.items() if entry.special}
        self._special = is_special - {unknown}
        masks = (vocabulary.get(name) for name in ("[MASK]", "<mask>"))
        self.mask_token: int | None = next((x for x in masks if x in is_special), None)
        self.stop_tokens = special.stop_tokens
        self.end_of_text = special.stop_tokens[0] if special.stop_tokens else special.begin
        self.why_lossy = f"it is {type(backend.model).__name__}, which may change a text"
        self.before, self.after = self._template()

    def _template(self) -> tuple[list[int], list[int]]:
        plain, whole = (self._backend.encode("a", add_special_tokens=x).ids for x in (False, True))
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        raise ValueError("tokenizer: its template changes the text that it is given")

    @property
    def opening(self) -> list[int]:
        """What a text begins with that is generated or scored: something must stand before its
        first token. ValueError if no such token is known."""
        ids = (
            self.before or [x for x in (self.special.begin, self.end_of_text) if x is not None][:1]
        )
        if not ids:
            raise ValueError("tokenizer: it has no token to begin a text with")
        return ids

    @property
    def decoder_opening(self) -> list[int]:
        """What is generated after a source has been read begins with this."""
        return self.opening if self.special.start is None else [self.special.start]

    def encode_source(self, text: str) -> list[int]:
        """The ids of a text that is read as a source, with what the template puts around it."""
        return [*self.before, *self.encode(text), *self.after]

    @classmethod
    def load(cls, path: str | Path, special: SpecialTokens) -> Subwords:
        """Reads a ``tokenizer.json``; ``ValueError`` naming ``path`` if that cannot be done."""
        path = Path(path)
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"{path} has {size} bytes; at most {MOST_BYTES} are read")
        try:
            text = path.read_text(encoding="utf-8")
            _refuse_slow_patterns(content := json.loads(text))
            if _growth(content) > _MOST_GROWTH:
                raise ValueError("what it replaces makes a text much longer")
            return cls(tokenizers.Tokenizer.from_str(text), special)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception, and panics as that
            raise ValueError(f"{path}: not a readable tokenizer: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes ``tokenizer.json`` at ``path``, whole or not at all."""
        unfinished = Path(f"{path}.unfinished-{os.getpid()}")
        unfinished.write_text(self.to_json(), encoding="utf-8")
        os.replace(unfinished, path)

    def to_json(self) -> str:
        """What ``save`` writes."""
        return self._backend.to_str(pretty=True)

    @property
    def lossless(self) -> bool:
        return False

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the tokenizer: equal ones encode every text to the same ids."""
        return hashlib.blake2b(self._backend.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``, without what the template puts around it."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Iterable[str]) -> list[list[int]]:
        """The token ids of each text, in parallel; equal to ``encode`` of one at a time."""
        texts = list(texts)
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"text: has no UTF-8: {error}") from None
        found = [encoding.ids for encoding in self._encoded(texts)]
        for number, ids in enumerate(found):
            if not self._special.isdisjoint(ids):  # a model may have them as words: spell those
                found[number] = self._spelled(texts[number])
        return found

    def _encoded(self, texts: list[str]):
        return self._backend.encode_batch_fast(texts, add_special_tokens=False)

    def _spelled(self, text: str) -> list[int]:
        """The ids of a text that spells special tokens, each cut after its first character."""
        names = map(self._backend.id_to_token, self._special)
        pattern = "|".join(f"(?<={re.escape(x[0])})(?={re.escape(x[1:])})" for x in names if x[1:])
        parts = [part for part in re.split(pattern, text) if part]
        ids = [token for encoding in self._encoded(parts) for token in encoding.ids]
        return [token for token in ids if token not in self._special]

    def pieces(self, parts: Iterable[str]) -> Iterator[str]:
        """The text that comes in parts, whole: where it may be cut is not known."""
        yield "".join(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; special tokens are nothing, and so are ids that no token has, of
        which models often have some.

        Errors: ``ValueError`` for a negative id.
        """
        ids = [int(token) for token in ids]
        if min(ids, default=0) < 0:
            raise ValueError(f"ids: {min(ids)} is not a token")
        return self._backend.decode(ids, skip_special_tokens=True)

    def stream(self, before: Iterable[int] = ()) -> SubwordStream:
        """A decoder of ids as they arrive, after those of `before`."""
        return SubwordStream(self, before)


class SubwordStream:
    """Decodes ids as they arrive, giving out each word once the next one begins.

    ``"".join(push(part) for part in parts) + flush()`` equals ``decode`` of all the parts: until
    then a later token may still change it (a space before a full stop goes, bytes make a
    character).
    """

    def __init__(self, tokenizer: Subwords, before: Iterable[int] = ()):
        self._tokenizer, self._ids = tokenizer, list(before)
        self._given = tokenizer.decode(self._ids)

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that they complete, perhaps none."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        settled = text[: max(text.rstrip().rfind(" "), text.rfind("\n"), 0)].rstrip(" ")
        return self._more(settled.rstrip("\ufffd"))

    def flush(self) -> str:
        """Returns what is left and starts afresh."""
        rest = self._more(self._tokenizer.decode(self._ids))
        self._ids, self._given = [], ""
        return rest

    def _more(self, text: str) -> str:
        if not text.startswith(self._given):
            return ""
        more, self._given = text[len(self._given) :], text
        return more


def _growth(parts) -> float:
    """log₂ of how many times as long a text may become by all that is replaced in it."""
    if isinstance(parts, list):
        return sum(map(_growth, parts))
    if not isinstance(parts, dict):
        return 0.0
    own = len(str(parts.get("content"))) if parts.get("type") == "Replace" else 1
    others = (part for name, part in parts.items() if name not in ("vocab", "merges"))
    return math.log2(max(1, own)) + sum(map(_growth, others))


def _refuse_slow_patterns(parts):
    """ValueError for a pattern that could take a time that no text is worth."""
    if isinstance(parts, list):
        for part in parts:
            _refuse_slow_patterns(part)
    if not isinstance(parts, dict):
        return
    pattern = parts.get("Regex")
    if isinstance(pattern, str) and (len(pattern) > 2000 or _NESTED_REPEAT.search(pattern)):
        raise ValueError(f"its pattern {pattern[:80]!r} could take exponential time")
    for name, part in parts.items():
        if name not in ("vocab", "merges"):
            _refuse_slow_patterns(part)
