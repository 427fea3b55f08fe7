"""Base class of all tokenizers.

A tokenizer may have more tokens than its model has embeddings, if tokens were added later. Looking
up an id without an embedding gives NaN. Therefore `bind` stores the model's number of ids in the
tokenizer, and encoding a text that needs a larger id raises an error.

A text may spell out special tokens, such as ``<|im_start|>``. By default, special tokens in a text
are encoded as plain text (see `Tokenizer.encode`). Otherwise, an untrusted text could end a
document or imitate another speaker of a chat.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import tokenizers

from jaxformer.artifacts.chat.conversation import Conversation, encode_chat
from jaxformer.artifacts.chat.messages import Messages
from jaxformer.artifacts.chat.parsing import MarkedParser, Token
from jaxformer.artifacts.chat.template import ChatTemplates, make_chat, read_templates
from jaxformer.artifacts.files import json_text, write_whole
from jaxformer.artifacts.token_bytes import NUM_BYTES, vocabulary_bytes
from jaxformer.artifacts.tokenizer_files import write_settings_files
from jaxformer.artifacts.tokenizer_parts import list_steps, special_texts, tokenizer_parts
from jaxformer.artifacts.untrusted import (
    LONGEST_PIECE,
    Result,
    backtracking_patterns,
    guarded,
    in_pieces,
    read_backend,
)
from jaxformer.decoding.text_stream import TextStream
from jaxformer.models.config.check import check_fields

# Texts that many tokenizers do not preserve: spaces, case, composed and compatibility characters,
# control characters, long sequences.
HARD_TEXTS = (
    "".join(map(chr, range(NUM_BYTES))),
    " a  b\t\n\r\n\u00a0\u2028\u3000 c ",
    "É e\u0301 \u212b ﬁ Ⅷ İ ß ﷺ \ufeff\u200b\u200d\ufffd\U0010ffff",
    "x1 23.45_'ll 'S DON'T#猫と犬👩‍👩‍👧\0",
)


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens.

    Attributes:
        stop_tokens: The ids that end a text; the first id is `end_of_text`.
        begin: The id of the beginning-of-text token, or None.
        start: The first id of the decoder's input, or None.
        pad: The id that pads a batch, or None.
    """

    stop_tokens: tuple[int, ...] = ()
    begin: int | None = None
    start: int | None = None
    pad: int | None = None

    def __post_init__(self) -> None:
        """Checks the types of the fields."""
        check_fields(self)


class Tokenizer(ABC):
    """Base class of tokenizers, based on the `tokenizers` library.

    Attributes:
        vocab_size: One more than the largest id.
        id_limit: The model's number of ids, set by `bind`, or None.
        mask_token: The id of the mask token, or None.
        end_of_text: The id that ends a text, or None if unknown.
        stop_tokens: The ids that end a text.
        special_ids: The ids that mark the beginning or the end of a text, including `stop_tokens`,
            `before` and `after`.
        text_ids: The ids of all tokens that are not special, in ascending order.
        before: The ids that the template adds before a text.
        after: The ids that the template adds after a text.
        parses_special: Whether spelled-out special tokens are encoded as special tokens by default,
            as in transformers. If False, special tokens are encoded as plain text (see
            `parsing_special`).
        opens_texts: Whether every text begins with `opening`, as in the training of a run. If
            False, a text begins with the ids of the template only (see `opening_texts`).
        settings_files: Contents of the tokenizer's settings files in transformers, by path.
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
    settings_files: Mapping[str, str] = MappingProxyType({})
    path: Path | None = None
    parts: dict[str, Any]
    _NAME: ClassVar[str] = "tokenizer"

    def __init__(self, backend: tokenizers.Tokenizer):
        """Wraps a backend and switches off its truncation and padding."""
        self.parts = tokenizer_parts(backend)
        backend.no_truncation()
        backend.no_padding()
        # Spelled-out special tokens are encoded as plain text.
        backend.encode_special_tokens = True
        self._backend = backend
        self._last_parser: MarkedParser | None = None
        self._patterns = backtracking_patterns(self.parts)

    @classmethod
    def _load(cls, path: str | Path, *arguments: Any) -> Self:
        """Reads a ``tokenizer.json``.

        Args:
            path: The file.
            *arguments: The arguments of the class's constructor after the backend.

        Raises:
            ValueError: The file cannot be read. The message contains ``path``.
        """
        try:
            read = guarded(lambda: cls(read_backend(Path(path)), *arguments), silent=True)
        except Exception as error:
            raise ValueError(f"{path} cannot be read as a {cls._NAME}: {error}") from error
        read.path = Path(path)
        return read

    @abstractmethod
    def with_backend(self, backend: tokenizers.Tokenizer) -> Self:
        """Returns a copy of the tokenizer that encodes with another backend."""

    @property
    def special(self) -> SpecialTokens | None:
        """The special ids that ``tokenizer.json`` does not specify, or None if it specifies all."""
        return None

    @property
    @abstractmethod
    def why_lossy(self) -> str | None:
        """The reason why ``decode(encode(text))`` may differ from ``text``.

        The value is None if the two texts are always equal.
        """

    @property
    @abstractmethod
    def opening(self) -> list[int]:
        """The ids before a new document, from which a model predicts the document's first token.

        Raises:
            ValueError: The tokenizer has no token that can begin a document.
        """

    @property
    def text_opening(self) -> list[int]:
        """The ids that the tokenizer adds before a text, which may be empty.

        Tokenizers that jaxformer trained begin each text with `opening`.
        """
        return self.opening

    @property
    def decoder_opening(self) -> list[int]:
        """The first ids of the decoder's input in an encoder-decoder."""
        start = None if self.special is None else self.special.start
        return self.opening if start is None else [start]

    @abstractmethod
    def _spell(self, ids: list[int], text: str) -> list[int]:
        """Replaces special tokens by other tokens.

        Merges may produce special tokens from plain text.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids; special tokens decode to the empty text."""

    @abstractmethod
    def stream(self, before: Iterable[int] = ()) -> TextStream:
        """Returns an incremental decoder for the ids that follow the ids `before`."""

    def pieces(self, parts: Iterable[str]) -> Iterator[str]:
        """Splits a text into pieces that are encoded separately.

        By default, the whole text is one piece. A subclass may split the text at positions where
        this does not change the tokens.

        Args:
            parts: Strings of any length, whose concatenation is the text.
        """
        yield "".join(parts)

    def encode(self, text: str, *, allow_special: bool | None = None) -> list[int]:
        """Encodes a text without its template; `id_limit` is not checked.

        Args:
            text: The text.
            allow_special: Whether spelled-out special tokens are encoded as special tokens. If
                False, special tokens are encoded as plain text. Use True only for trusted texts.
                Defaults to `parses_special`.

        Raises:
            ValueError: The text has a lone surrogate, which UTF-8 cannot encode.
        """
        return self._encode_texts([text], self._parses(allow_special))[0]

    def encode_many(
        self, texts: Iterable[str], *, allow_special: bool | None = None
    ) -> list[list[int]]:
        """Encodes each text, in parallel.

        Args:
            texts: The texts.
            allow_special: See `encode`.

        Raises:
            ValueError: a text has a lone surrogate, or needs a token that the model lacks (see
                `id_limit`). The message gives the token and its id.
        """
        sequences = self._encode_texts(list(texts), self._parses(allow_special))
        if self.id_limit is not None and self.id_limit < self.vocab_size:
            self.check_ids(sequences, self.id_limit)
        return sequences

    def encode_source(self, text: str, *, allow_special: bool | None = None) -> list[int]:
        """Encodes a source text with its template.

        Args:
            text: The text.
            allow_special: See `encode`.
        """
        (ids,) = self.encode_many([text], allow_special=allow_special)
        return [*self.before, *ids, *self.after]

    @cached_property
    def vocabulary_bytes(self) -> list[bytes]:
        """The bytes that each id adds to a text; b"" for special tokens and unused ids.

        Raises:
            ValueError: The bytes of a token depend on the tokens around it, as with WordPiece.
        """
        return vocabulary_bytes(self._backend, list_steps(self.parts, "decoder"))

    @cached_property
    def chat_templates(self) -> ChatTemplates | None:
        """The chat templates in the settings files, or None if the files contain no template."""
        begin = self.end_of_text if self.special is None else self.special.begin
        named = {"bos_token": begin, "eos_token": self.end_of_text}
        others = {key: self.token_name(token) for key, token in named.items() if token is not None}
        return read_templates(self.settings_files, others)

    def apply_chat_template(
        self,
        messages: Messages,
        tools: list[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Writes a conversation in the format in which the model was trained.

        Special tokens are recognized only where the template writes them. What a message says is
        encoded as plain text, even if it spells out a special token.

        Args:
            messages: The messages, each with a `role` and a `content`.
            tools: Descriptions of tools that the assistant may call, as JSON schemas.
            add_generation_prompt: Whether the text ends with the beginning of an answer, which the
                model then completes.
            template: The name of the template. By default, "tool_use" if there are tools and such
                a template, and "default" otherwise.
            variables: Further variables of the template, such as ``{"enable_thinking": False}``.

        Returns:
            The text, its token ids and a mask of the tokens that the assistant says.

        Raises:
            ValueError: The tokenizer has no chat template, the template fails or exceeds a limit,
                or a message is malformed.
        """
        if self.chat_templates is None:
            raise ValueError(
                "the tokenizer has no chat template; add a file chat_template.jinja to its folder"
            )
        chat = make_chat(self.chat_templates, messages, tools, template, variables)
        words = tuple(self.special_words)
        return encode_chat(chat, add_generation_prompt, words, self._encode_marked)

    @cached_property
    def turn_end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer: `stop_tokens` and the chat template's end-of-turn token.

        The end-of-turn token is the first special token after an answer, such as `<|im_end|>`.
        """
        question = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "b"}
        try:
            chat = self.apply_chat_template([question, answer])
            said = [x for x, is_said in zip(chat.ids, chat.assistant_mask, strict=True) if is_said]
        except ValueError:
            return self.stop_tokens  # The template may reject this conversation.
        special = set(self.special_words.values())
        places = [n for n, token in enumerate(said) if "b" in self.decode([token])]
        after = (token for token in said[max(places, default=len(said)) :] if token in special)
        return tuple(dict.fromkeys([*self.stop_tokens, *islice(after, 1)]))

    def _encode_marked(self, text: str, mark: str) -> list[Token]:
        """Encodes a text, in which special tokens are recognized only after a mark."""
        check_unicode([text])
        parser = self._marked_parser(mark)
        in_parts = bool(self._patterns) and len(text) > LONGEST_PIECE
        tokens = self._guarded(lambda: parser.parse(text, in_parts, self._spell))
        if self.id_limit is not None and self.id_limit < self.vocab_size:
            self.check_ids([[token.id for token in tokens]], self.id_limit)
        return tokens

    def _marked_parser(self, mark: str) -> MarkedParser:
        """Returns the parser for a mark, cached because almost all texts have the same mark."""
        if self._last_parser is None or self._last_parser.mark != mark:
            self._last_parser = MarkedParser(self._backend, mark)
        return self._last_parser

    def _parses(self, allow_special: bool | None) -> bool:
        return self.parses_special if allow_special is None else allow_special

    @cached_property
    def special_words(self) -> dict[str, int]:
        """The id of each special token, by the token's text."""
        return {text: token for token, text in special_texts(self._backend).items()}

    @cached_property
    def _parser(self) -> tokenizers.Tokenizer:
        """A copy of the backend that encodes a special token in a text as the token's id."""
        parser = tokenizers.Tokenizer.from_str(self._backend.to_str())
        parser.encode_special_tokens = False
        return parser

    def _encode_texts(self, texts: list[str], allow_special: bool = False) -> list[list[int]]:
        """Encodes each text without its template; `id_limit` is not checked."""
        try:
            sequences = self._ids_of_pieces([list(self.pieces([x])) for x in texts], allow_special)
        except TypeError:
            check_unicode(texts)
            raise
        return sequences if allow_special else list(map(self._spell, sequences, texts))

    def _ids_of_pieces(
        self, texts: list[list[str]], allow_special: bool = False
    ) -> list[list[int]]:
        """Encodes each text piece by piece and concatenates the ids."""
        pieces = [piece for text in texts for piece in text]
        encode = self._encode_in_pieces if self._patterns else self._encode_whole
        sequences = iter(self._guarded(partial(encode, pieces, allow_special)))
        return [[token for _ in text for token in next(sequences)] for text in texts]

    def _encode_whole(self, texts: list[str], allow_special: bool) -> list[list[int]]:
        backend = self._parser if allow_special else self._backend
        return [x.ids for x in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_in_pieces(self, texts: list[str], allow_special: bool) -> list[list[int]]:
        """Encodes each text; patterns are matched on at most `LONGEST_PIECE` characters."""

        def encode(text: str) -> list[int]:
            return self._encode_whole([text], allow_special)[0]

        def encode_long(text: str) -> list[int]:
            return [token for _, ids in in_pieces(encode, text) for token in ids]

        are_long = [len(text) > LONGEST_PIECE for text in texts]
        pairs = list(zip(texts, are_long, strict=True))
        short = iter(self._encode_whole([text for text, long in pairs if not long], allow_special))
        # Threads run in parallel, because the library releases the GIL.
        with ThreadPoolExecutor() as pool:
            long_sequences = pool.map(encode_long, [text for text, long in pairs if long])
            return [next(long_sequences if long else short) for long in are_long]

    def _guarded(self, call: Callable[[], Result]) -> Result:
        """Runs `call`; converts a panic into a ValueError with the patterns and the file."""
        named = " or ".join(repr(x[:80]) for x in self._patterns)
        place = "" if self.path is None else f" in {self.path}"
        return guarded(call, silent=bool(self._patterns), cause=f"its pattern {named}{place}")

    def check_ids(
        self, sequences: Iterable[Sequence[int]], limit: int, what: str = "text: its"
    ) -> None:
        """Checks that all ids are smaller than `limit`.

        Args:
            sequences: Sequences of token ids.
            limit: The model's number of ids.
            what: Start of the error message.

        Raises:
            ValueError: An id is `limit` or larger. The message gives the token and its id.
        """
        for sequence in sequences:
            if sequence and max(sequence) >= limit:
                token = next(x for x in sequence if x >= limit)
                raise ValueError(
                    f"{what} token {self.token_name(token)!r} has the id {token}; the model's "
                    f"vocab_size is {limit}, so its ids are 0 to {limit - 1}"
                )

    @property
    def lossless(self) -> bool:
        """Whether ``decode(encode(text)) == text`` for every text."""
        return self.why_lossy is None

    def _changed_text(self) -> str | None:
        """Returns a message with the first test text that a round trip changes, or None."""
        added = (token.content for token in self._backend.get_added_tokens_decoder().values())
        texts = [*HARD_TEXTS, *(f"a {content} {content}b" for content in added)]
        for text, ids in zip(texts, self._encode_texts(texts), strict=True):
            if self.decode(ids) != text:
                return f"it changes the text {text!r}"
        return None

    def save(self, path: str | Path) -> None:
        """Writes ``tokenizer.json`` to ``path``, and the settings files into the same folder."""
        write_whole(Path(path), self.to_json())
        write_settings_files(Path(path).parent, self.settings_files)

    def to_json(self) -> str:
        """Returns the content of ``tokenizer.json``.

        The content includes the truncation and padding settings of the original file, because
        transformers uses them.
        """
        batching = {name: self.parts[name] for name in ("truncation", "padding")}
        if not any(batching.values()):
            return self._backend.to_str(pretty=True)
        return json_text(json.loads(self._backend.to_str()) | batching, indent=2)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest; tokenizers with equal digests encode every text to the same ids."""
        content = self._backend.to_str() + "\nparses special tokens" * self.parses_special
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def token_name(self, token: int) -> str:
        """Returns the text of a token in the vocabulary."""
        return self._backend.id_to_token(token) or ""

    def normalized(self, text: str) -> str:
        """Returns the normalized text, for example in lower case without accents."""
        normalizer = self._backend.normalizer
        if normalizer is None:
            return text
        if not self._patterns:
            return normalizer.normalize_str(text)
        parts = (part for _, part in in_pieces(normalizer.normalize_str, text))
        return self._guarded(lambda: "".join(x for part in parts for x in part))


def check_unicode(texts: Iterable[str]) -> None:
    """Raises ValueError for a text with a lone surrogate, which UTF-8 cannot encode."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text cannot be encoded as UTF-8: {error}") from None
