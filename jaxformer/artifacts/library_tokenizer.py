"""Base class of the tokenizers that encode with the `tokenizers` library."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import tokenizers

from jaxformer.artifacts.backend import guarded, is_quadratic, parts_of
from jaxformer.artifacts.byte_vocabulary import HARD_TEXTS
from jaxformer.artifacts.files import write_whole
from jaxformer.artifacts.tokenizer import check_ids


class LibraryTokenizer(ABC):
    """Base class of the tokenizers that encode with the `tokenizers` library.

    A subclass defines the remaining members of `Tokenizer`.
    """

    vocab_size: int
    mask_token: int | None
    before: Sequence[int] = ()
    after: Sequence[int] = ()

    def __init__(self, backend: tokenizers.Tokenizer):
        """Wraps a backend, whose truncation and padding are switched off."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # a special token spelled out in a text is plain text
        self._backend = backend
        self._has_quadratic_pattern = is_quadratic(parts_of(backend))
        self.id_limit: int | None = None

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids."""

    @abstractmethod
    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        """Encodes each text without its template; the limit of ids is not checked."""

    def _ids_of_pieces(self, texts: list[list[str]]) -> list[list[int]]:
        """Returns the ids of each text, whose pieces are encoded one by one."""
        pieces = [piece for text in texts for piece in text]
        encode = partial(self._backend.encode_batch_fast, pieces, add_special_tokens=False)
        encodings = iter(guarded(encode, silent=self._has_quadratic_pattern))
        return [[token for _ in text for token in next(encodings).ids] for text in texts]

    @property
    @abstractmethod
    def why_lossy(self) -> str | None:
        """Why ``decode(encode(text))`` may differ from ``text``; None if it never does."""

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
        """Returns the content of ``tokenizer.json``."""
        return self._backend.to_str(pretty=True)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the tokenizer: equal ones encode every text to the same ids."""
        return hashlib.blake2b(self._backend.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Encodes a text without its template (see `Tokenizer.encode`)."""
        return self._ids_of([text])[0]

    def encode_many(self, texts: Iterable[str]) -> list[list[int]]:
        """Encodes each text, in parallel (see `Tokenizer.encode_many`)."""
        rows = self._ids_of(list(texts))
        if self.id_limit is not None and self.id_limit < self.vocab_size:
            check_ids(rows, self.id_limit, self.name_of)
        return rows

    def encode_source(self, text: str) -> list[int]:
        """Encodes a source text, with the tokens that the template puts around it."""
        return [*self.before, *self.encode_many([text])[0], *self.after]

    def name_of(self, token: int) -> str:
        """Returns the text of a token in the vocabulary."""
        return self._backend.id_to_token(token) or ""

    def normalized(self, text: str) -> str:
        """Returns the text after normalization, for example in lower case without accents."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)
