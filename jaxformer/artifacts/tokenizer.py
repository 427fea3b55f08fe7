"""Base class of all tokenizers, their limit of ids, and copies of them with other settings.

A tokenizer may have more tokens than its model, if somebody added tokens without resizing the
model's embeddings. Looking up such an id gives NaN. So `bind` sets the limit of a tokenizer that
is read together with a model, and encoding a text with a larger id raises an error.

A text may spell out special tokens, such as ``<|im_start|>``. A tokenizer reads them as plain text
unless its caller allows special tokens (see `Tokenizer.encode`). A text of unknown origin could
otherwise end a document or pretend to be the other side of a chat.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import tokenizers
from tokenizers import normalizers

from jaxformer.artifacts.files import json_text, write_whole
from jaxformer.artifacts.untrusted import (
    LONGEST_PIECE,
    Result,
    backtracking_patterns,
    guarded,
    in_pieces,
    read_backend,
)
from jaxformer.models.config.check import check_fields

NUM_BYTES = 256

# Features that tokenizers often lose: spaces, case, composed and compatibility characters, control
# characters, long sequences.
HARD_TEXTS = (
    "".join(map(chr, range(NUM_BYTES))),
    " a  b\t\n\r\n\u00a0\u2028\u3000 c ",
    "É e\u0301 \u212b ﬁ Ⅷ İ ß ﷺ \ufeff\u200b\u200d\ufffd\U0010ffff",
    "x1 23.45_'ll 'S DON'T#猫と犬👩‍👩‍👧\0",
)
_OF_BPE = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)
_SHOWN = 4  # spellings in a report


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens.

    Attributes:
      stop_tokens: Each of these ends a text; the first one is `end_of_text`.
      begin: Begins a text.
      start: Begins the decoder's input.
      pad: Pads a batch.
    """

    stop_tokens: tuple[int, ...] = ()
    begin: int | None = None
    start: int | None = None
    pad: int | None = None

    def __post_init__(self) -> None:
        """Checks the types of the fields."""
        check_fields(self)


class TextStream(Protocol):
    """Decoder for ids that arrive one after another."""

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that they complete, perhaps none."""

    def flush(self) -> str:
        """Returns the remaining text and starts afresh."""


class Tokenizer(ABC):
    """Base class of tokenizers, which encode with the `tokenizers` library.

    Attributes:
      vocab_size: One more than the largest id.
      id_limit: Number of ids of the model, set by `bind`, or None.
      mask_token: The id that stands for a hidden token, or None.
      end_of_text: The id that ends a text, None if it is unknown.
      stop_tokens: The ids each of which ends a text.
      special_ids: The ids that stand next to a text, or end one.
      text_ids: The ids of text in ascending order: all but those of special tokens.
      before: The ids that the template puts before a text.
      after: The ids that the template puts after a text.
      parses_special: Whether a special token that is spelled out in a text is read as this token by
        default, as in transformers, and not as plain text (see `parsing_special`).
      opens_texts: Whether every text begins with `opening`, as in the training of a run, and not
        only with the ids of the template (see `opening_texts`).
      path: The file that the tokenizer was read from, for error messages.
      parts: The content of ``tokenizer.json`` without vocabulary and merges.
    """

    vocab_size: int
    id_limit: int | None = None
    mask_token: int | None
    end_of_text: int | None
    stop_tokens: tuple[int, ...]
    special_ids: Collection[int]
    text_ids: list[int]
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    parses_special: bool = False
    opens_texts: bool = False
    path: Path | None = None
    parts: dict[str, Any]
    _NAME: ClassVar[str] = "tokenizer"

    def __init__(self, backend: tokenizers.Tokenizer):
        """Wraps a backend, whose truncation and padding are switched off."""
        self.parts = tokenizer_parts(backend)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # a spelled-out special token is plain text
        self._backend = backend
        self._patterns = backtracking_patterns(self.parts)

    @classmethod
    def _load(cls, path: str | Path, *arguments: Any) -> Self:
        """Reads a ``tokenizer.json``.

        Args:
          path: The file.
          *arguments: The arguments of the class after the backend.

        Raises:
          ValueError: If it cannot be read. The message names ``path``.
        """
        try:
            read = guarded(lambda: cls(read_backend(Path(path)), *arguments), silent=True)
        except Exception as error:
            raise ValueError(f"{path}: not a readable {cls._NAME}: {error}") from error
        read.path = Path(path)
        return read

    @abstractmethod
    def with_backend(self, backend: tokenizers.Tokenizer) -> Self:
        """Returns a tokenizer with the same special ids that encodes with `backend`."""

    @property
    def special(self) -> SpecialTokens | None:
        """The special ids that ``tokenizer.json`` does not name; None if it names all."""
        return None

    @property
    @abstractmethod
    def why_lossy(self) -> str | None:
        """Why ``decode(encode(text))`` may differ from ``text``; None if it never does."""

    @property
    @abstractmethod
    def opening(self) -> list[int]:
        """The ids that begin a new document: a model predicts its first token from them.

        Raises:
          ValueError: If no such token is known.
        """

    @property
    def text_opening(self) -> list[int]:
        """The ids that the tokenizer itself puts before a text; in some tokenizers there are none.

        Tokenizers that were trained here begin each text with `opening`.
        """
        return self.opening

    @property
    def decoder_opening(self) -> list[int]:
        """The ids that begin the decoder's input, after a source was read."""
        start = None if self.special is None else self.special.start
        return self.opening if start is None else [start]

    @abstractmethod
    def _spell(self, ids: list[int], text: str) -> list[int]:
        """Returns the ids of a text without special tokens, which merges may have produced."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids; special tokens decode to the empty text."""

    @abstractmethod
    def stream(self, before: Iterable[int] = ()) -> TextStream:
        """Returns a decoder for ids that arrive one after another, following those of `before`."""

    def pieces(self, parts: Iterable[str]) -> Iterator[str]:
        """Divides a text into pieces that are encoded one by one.

        The text stays whole, unless it is known where it may be divided without changing tokens.

        Args:
          parts: The text, in parts of any size.
        """
        yield "".join(parts)

    def encode(self, text: str, *, allow_special: bool | None = None) -> list[int]:
        """Encodes a text without its template. The model's limit of ids is not checked.

        Args:
          text: The text.
          allow_special: Whether special tokens that are spelled out in the text become these
            tokens; False: they are plain text. None: `parses_special`, which is False by default.
            Set it to True only for texts that you trust.

        Raises:
          ValueError: If the text has a lone surrogate, which has no UTF-8.
        """
        return self._ids_of([text], self._parses(allow_special))[0]

    def encode_many(
        self, texts: Iterable[str], *, allow_special: bool | None = None
    ) -> list[list[int]]:
        """Encodes each text, in parallel.

        Args:
          texts: The texts.
          allow_special: See `encode`.

        Raises:
          ValueError: If a text is not Unicode, or has a token that the model lacks (see
            `id_limit`). The message has the token and its id.
        """
        rows = self._ids_of(list(texts), self._parses(allow_special))
        if self.id_limit is not None and self.id_limit < self.vocab_size:
            self.check_ids(rows, self.id_limit)
        return rows

    def encode_source(self, text: str, *, allow_special: bool | None = None) -> list[int]:
        """Encodes a source text, with the tokens that the template puts around it.

        Args:
          text: The text.
          allow_special: See `encode`.
        """
        (ids,) = self.encode_many([text], allow_special=allow_special)
        return [*self.before, *ids, *self.after]

    def _parses(self, allow_special: bool | None) -> bool:
        return self.parses_special if allow_special is None else allow_special

    @cached_property
    def special_words(self) -> dict[str, int]:
        """The text of each special token, with its id."""
        return {text: token for token, text in special_texts(self._backend).items()}

    @cached_property
    def _parser(self) -> tokenizers.Tokenizer:
        """Copy of the backend that reads spelled-out special tokens as these tokens."""
        parser = tokenizers.Tokenizer.from_str(self._backend.to_str())
        parser.encode_special_tokens = False
        return parser

    def _ids_of(self, texts: list[str], allow_special: bool = False) -> list[list[int]]:
        """Encodes each text without its template; the limit of ids is not checked."""
        try:
            rows = self._ids_of_pieces([list(self.pieces([x])) for x in texts], allow_special)
        except TypeError:
            check_unicode(texts)
            raise
        return rows if allow_special else list(map(self._spell, rows, texts))

    def _ids_of_pieces(
        self, texts: list[list[str]], allow_special: bool = False
    ) -> list[list[int]]:
        """Returns the ids of each text, whose pieces are encoded one by one."""
        pieces = [piece for text in texts for piece in text]
        encode = self._encode_in_pieces if self._patterns else self._encode_whole
        rows = iter(self._guarded(partial(encode, pieces, allow_special)))
        return [[token for _ in text for token in next(rows)] for text in texts]

    def _encode_whole(self, texts: list[str], allow_special: bool) -> list[list[int]]:
        backend = self._parser if allow_special else self._backend
        return [x.ids for x in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_in_pieces(self, texts: list[str], allow_special: bool) -> list[list[int]]:
        """Encodes each text; a pattern sees at most `LONGEST_PIECE` characters of it at once."""

        def encode(text: str) -> list[int]:
            return self._encode_whole([text], allow_special)[0]

        def encode_long(text: str) -> list[int]:
            return [token for ids in in_pieces(encode, text) for token in ids]

        are_long = [len(text) > LONGEST_PIECE for text in texts]
        pairs = list(zip(texts, are_long, strict=True))
        short = iter(self._encode_whole([text for text, long in pairs if not long], allow_special))
        with ThreadPoolExecutor() as pool:  # the library encodes without Python's lock
            long_rows = pool.map(encode_long, [text for text, long in pairs if long])
            return [next(long_rows if long else short) for long in are_long]

    def _guarded(self, call: Callable[[], Result]) -> Result:
        """Calls the library; a panic becomes a ValueError that names the patterns and the file."""
        named = " or ".join(repr(x[:80]) for x in self._patterns)
        place = "" if self.path is None else f" in {self.path}"
        return guarded(call, silent=bool(self._patterns), cause=f"its pattern {named}{place}")

    def check_ids(self, rows: Iterable[Sequence[int]], limit: int, what: str = "text: its") -> None:
        """Checks that all ids are below the limit.

        Args:
          rows: Sequences of token ids.
          limit: Number of ids of the model.
          what: Start of the message.

        Raises:
          ValueError: For the first id that the model lacks. The message has the token and its id.
        """
        for row in rows:
            if row and max(row) >= limit:
                token = next(x for x in row if x >= limit)
                raise ValueError(
                    f"{what} token {self.name_of(token)!r} has the id {token}; the model's "
                    f"vocab_size is {limit}, so its ids are 0 to {limit - 1}"
                )

    @property
    def lossless(self) -> bool:
        """Whether ``decode(encode(text))`` is ``text`` for every text."""
        return self.why_lossy is None

    def _changed_text(self) -> str | None:
        """Returns a message with the first test text that decodes to another one, or None."""
        added = (token.content for token in self._backend.get_added_tokens_decoder().values())
        texts = [*HARD_TEXTS, *(f"a {content} {content}b" for content in added)]
        for text, ids in zip(texts, self._ids_of(texts), strict=True):
            if self.decode(ids) != text:
                return f"it changes the text {text!r}"
        return None

    def save(self, path: str | Path) -> None:
        """Writes ``tokenizer.json`` to ``path``, atomically."""
        write_whole(Path(path), self.to_json())

    def to_json(self) -> str:
        """Returns the content of ``tokenizer.json``.

        It has the truncation and padding of the file that was read: transformers applies them.
        """
        batching = {name: self.parts[name] for name in ("truncation", "padding")}
        if not any(batching.values()):
            return self._backend.to_str(pretty=True)
        return json_text(json.loads(self._backend.to_str()) | batching, indent=2)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the tokenizer: equal ones encode every text to the same ids."""
        content = self._backend.to_str() + "\nparses special tokens" * self.parses_special
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def name_of(self, token: int) -> str:
        """Returns the text of a token in the vocabulary."""
        return self._backend.id_to_token(token) or ""

    def normalized(self, text: str) -> str:
        """Returns the text after normalization, for example in lower case without accents."""
        normalizer = self._backend.normalizer
        if normalizer is None:
            return text
        if not self._patterns:
            return normalizer.normalize_str(text)
        parts = in_pieces(normalizer.normalize_str, text)
        return self._guarded(lambda: "".join(x for part in parts for x in part))


# ---- copies with other settings

AnyTokenizer = TypeVar("AnyTokenizer", bound=Tokenizer)


def bind(tokenizer: AnyTokenizer, vocab_size: int) -> AnyTokenizer:
    """Binds a tokenizer to a model and returns it.

    Args:
      tokenizer: The tokenizer, whose `id_limit` is set. A mask token that the model lacks is
        dropped.
      vocab_size: Number of ids of the model.

    Raises:
      ValueError: If the model lacks a special id that every text needs.
    """
    tokenizer.id_limit = vocab_size
    if tokenizer.mask_token is not None and tokenizer.mask_token >= vocab_size:
        tokenizer.mask_token = None
    for token in tokenizer.special_ids:
        tokenizer.check_ids([[token]], vocab_size, "tokenizer: its special")
    return tokenizer


def parsing_special(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """Returns a copy of the tokenizer that reads spelled-out special tokens as these tokens."""
    parsing = copy(tokenizer)
    parsing.parses_special = True
    return parsing


def opening_texts(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """Returns a copy of the tokenizer that begins every text as the training of a run does."""
    opening = copy(tokenizer)
    opening.opens_texts = True
    return opening


def lowercased(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """Returns a copy of the tokenizer that lowercases every text first.

    The Lowercase step is part of the copy's tokenizer.json. A tokenizer that already lowercases is
    returned unchanged.
    """
    if lowers_case(tokenizer):
        return tokenizer
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    steps = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
    lower = tokenizer.with_backend(backend)
    lower.parses_special = tokenizer.parses_special
    lower.opens_texts = tokenizer.opens_texts
    return lower if tokenizer.id_limit is None else bind(lower, tokenizer.id_limit)


def lowers_case(tokenizer: Tokenizer) -> bool:
    """Returns whether the tokenizer lowercases every text."""
    steps = steps_of(tokenizer.parts, "normalizer")
    return any(step["type"] == "Lowercase" or step.get("lowercase", False) for step in steps)


# ---- the parts of a tokenizer.json


def steps_of(parts: dict, name: str) -> list[dict]:
    """Returns the steps of a part of a tokenizer.json in the order in which they run.

    Args:
      parts: The parsed tokenizer.json.
      name: "normalizer" or "pre_tokenizer".
    """
    key = f"{name.replace('_', '')}s"  # of the steps of a Sequence

    def steps(part: dict | None) -> list[dict]:
        if part is None or part["type"] != "Sequence":
            return [part] if part else []
        return [step for inner in part[key] for step in steps(inner)]

    return steps(parts[name])


def special_texts(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """Returns the text of each special token by its id."""
    added = backend.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.special}


def tokenizer_parts(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Returns the parsed tokenizer.json that `backend` would write, without vocabulary and merges.

    Serializing and parsing 500,000 merges would take longer than reading the file.
    """
    small = tokenizers.Tokenizer(tokenizers.models.BPE())
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(backend, name)) is not None:
            setattr(small, name, part)
    if backend.truncation is not None:
        small.enable_truncation(**backend.truncation)
    if backend.padding is not None:
        small.enable_padding(**backend.padding)
    added = sorted(backend.get_added_tokens_decoder().items())
    entries = [{"id": number} | token.__getstate__() for number, token in added]
    if isinstance(backend.model, tokenizers.models.BPE):
        model = {"type": "BPE"} | {name: getattr(backend.model, name) for name in _OF_BPE}
    else:  # only BPE has merges
        model = json.loads(backend.model.__getstate__())
        del model["vocab"]
    return json.loads(small.to_str()) | {"added_tokens": entries, "model": model}


def check_unicode(texts: Iterable[str]) -> None:
    """Raises ValueError for a text with a lone surrogate, which UTF-8 cannot encode."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text: it cannot be encoded as UTF-8: {error}") from None


# ---- special tokens that a text spells out


def spelled_tokens(tokenizer: Tokenizer, parts: Iterable[str]) -> Counter[str]:
    """Counts the special tokens that a text spells out.

    Args:
        tokenizer: The tokenizer, whose special tokens are counted.
        parts: The text, in parts of any size.

    Returns:
        The number of occurrences of each special token that occurs.
    """
    words = sorted(tokenizer.special_words, key=len, reverse=True)  # the longest match counts
    found: Counter[str] = Counter()
    if not words:
        return found
    pattern, overlap, rest = re.compile("|".join(map(re.escape, words))), len(words[0]) - 1, ""
    for part in parts:
        text, at = rest + part, 0
        end = len(text) - overlap  # a word that begins later may continue in the next part
        while (match := pattern.search(text, at)) and match.start() < end:
            found[match[0]] += 1
            at = match.end()
        rest = text[max(at, end, 0) :]
    found.update(pattern.findall(rest))
    return found


def report_of(tokenizer: Tokenizer, found: Counter[str], where: str) -> str | None:
    """Returns a line that says how the special tokens in a text were read.

    Args:
        tokenizer: The tokenizer that read the text.
        found: What `spelled_tokens` counted.
        where: The name of the text, such as "the prompt".

    Returns:
        The line; None if there are no such tokens.
    """
    if not (number := found.total()):
        return None
    words = [f"{word} ({count:,})" for word, count in found.most_common(_SHOWN)]
    listed = ", ".join(words) + " …" * (len(found) > _SHOWN)
    tokens = "special token" if number == 1 else "special tokens"
    begin = f"{number:,} {tokens} spelled out in {where}: {listed}"
    if tokenizer.parses_special:
        return f"{begin}; read as tokens (--parse-special)"
    return f"warning: {begin}; read as plain text. --parse-special reads them as tokens"
