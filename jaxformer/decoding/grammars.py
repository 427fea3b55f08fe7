"""Grammars that restrict the generated text: JSON schemas, regular expressions and Lark grammars.

A grammar is any object with the methods of `Grammar`. The functions of this module build grammars
that llguidance evaluates. The allowed tokens depend on the previous token, so with a grammar
`generate` computes one token per compiled call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from jaxformer.decoding.constraints import NO_TOKEN
from jaxformer.decoding.stop_strings import ByteVocabulary
from jaxformer.optional import import_optional


class TextVocabulary(ByteVocabulary, Protocol):
    """Interface of the tokenizers that grammars accept."""

    def encode(self, text: str, *, allow_special: bool | None = None) -> list[int]:
        """Encodes a text."""


class Matcher(Protocol):
    """Progress of one generated text through a grammar; determines the allowed next tokens."""

    def allowed(self) -> Bool[np.ndarray, " vocab"]:
        """Returns whether each token may come next."""

    def push(self, token: int) -> None:
        """Adds a token to the text."""


@runtime_checkable
class Grammar(Protocol):
    """Set of texts to which `generate` restricts the generated text."""

    def start(self, vocab_size: int, stop_tokens: Sequence[int]) -> Matcher:
        """Returns a matcher of an empty text.

        Args:
            vocab_size: The model's vocabulary size.
            stop_tokens: The ids that end a text. The matcher allows them where the text may end.
        """


class BatchMatcher:
    """The matchers of a batch."""

    def __init__(
        self, grammar: Grammar, batch_size: int, size: int, vocab_size: int, stops: Sequence[int]
    ):
        """Starts a matcher for each text.

        Args:
            grammar: The grammar.
            batch_size: The number of texts.
            size: The batch size, including elements that only fill the batch.
            vocab_size: The model's vocabulary size.
            stops: The ids that end a text.

        Raises:
            ValueError: The grammar is invalid, or allows no first token.
        """
        self._matchers = [grammar.start(vocab_size, stops) for _ in range(batch_size)]
        self._is_open = np.ones(batch_size, bool)
        self._stops = set(stops)
        # A finished text allows every token, because its further tokens are discarded.
        self._allowed = np.ones((size, vocab_size), bool)
        for index in range(batch_size):
            self._update(index)

    @property
    def allowed(self) -> Bool[np.ndarray, "size vocab"]:
        """Whether each token may come next in each text."""
        return self._allowed.copy()  # JAX may still read the array of an earlier step.

    def push(self, tokens: Int[np.ndarray, " size"]) -> None:
        """Adds the newest token to each text.

        Raises:
            ValueError: The grammar allows no token after the newest one.
        """
        for index in np.flatnonzero(self._is_open).tolist():
            token = int(tokens[index])
            if token == NO_TOKEN or token in self._stops:
                self._is_open[index] = False
                self._allowed[index] = True
            else:
                self._matchers[index].push(token)
                self._update(index)

    def _update(self, index: int) -> None:
        self._allowed[index] = self._matchers[index].allowed()
        if not self._allowed[index].any():
            raise ValueError(
                "grammar allows no next token; check that the tokenizer's vocabulary can spell the "
                "texts of the grammar"
            )


@dataclass(frozen=True)
class GuidedGrammar:
    """A grammar of llguidance.

    Attributes:
        tokenizer: The model's tokenizer.
        source: The grammar in the format of llguidance.
        what: The name of the source in error messages, such as "the JSON schema".
    """

    tokenizer: TextVocabulary
    source: str
    what: str

    def __post_init__(self) -> None:
        """Raises ValueError if the grammar is invalid."""
        if reason := _llguidance().LLMatcher.validate_grammar(self.source):
            raise ValueError(f"{self.what} is invalid: {' '.join(reason.split())}")

    def start(self, vocab_size: int, stop_tokens: Sequence[int]) -> Matcher:
        """Returns a matcher (see `Grammar.start`)."""
        first = _first_matcher(self, vocab_size, tuple(map(int, stop_tokens)))
        return GuidedMatcher(first.deep_copy(), vocab_size)


@dataclass(frozen=True)
class GuidedMatcher:
    """A matcher of llguidance.

    Attributes:
        matcher: llguidance's matcher.
        vocab_size: The model's vocabulary size.
    """

    matcher: Any
    vocab_size: int

    def allowed(self) -> Bool[np.ndarray, " vocab"]:
        """Returns whether each token may come next."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self.vocab_size, bitorder="little").astype(bool)

    def push(self, token: int) -> None:
        """Adds a token to the text."""
        self.matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self.matcher.is_error():
            # After "<state>", llguidance prints its whole state.
            reason = self.matcher.get_error().partition("<state>")[0]
            raise ValueError(f"the grammar fails: {' '.join(reason.split())}")


def json_schema(tokenizer: TextVocabulary, schema: Mapping[str, Any]) -> GuidedGrammar:
    """Returns a grammar that allows the JSON values of a schema, written without line breaks.

    Args:
        tokenizer: The model's tokenizer.
        schema: The JSON schema; `{"type": "object"}` stands for any object.

    Raises:
        ValueError: The schema is invalid, or no value fits it.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"schema is {schema!r:.80}; it must be a dict with a JSON schema")
    compact = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    source = _llguidance().LLMatcher.grammar_from_json_schema(dict(schema), overrides=compact)
    return GuidedGrammar(tokenizer, source, "the JSON schema")


def regular_expression(tokenizer: TextVocabulary, pattern: str) -> GuidedGrammar:
    """Returns a grammar that allows the texts that a regular expression matches as a whole.

    Args:
        tokenizer: The model's tokenizer.
        pattern: The expression, in the syntax of Rust's `regex` without look-around.

    Raises:
        ValueError: The expression is invalid.
    """
    source = _llguidance().LLMatcher.grammar_from_regex(pattern)
    return GuidedGrammar(tokenizer, source, "the regular expression")


def lark_grammar(tokenizer: TextVocabulary, text: str) -> GuidedGrammar:
    """Builds a context-free grammar from its Lark source.

    Args:
        tokenizer: The model's tokenizer.
        text: The grammar in the Lark syntax of llguidance, whose first rule is `start`.

    Raises:
        ValueError: The grammar is invalid.
    """
    return GuidedGrammar(tokenizer, _llguidance().LLMatcher.grammar_from_lark(text), "the grammar")


def _llguidance() -> ModuleType:
    return import_optional("llguidance", "constrain text with a grammar", "grammars")


class _Vocabulary:
    """A tokenizer with the attributes that llguidance reads."""

    def __init__(self, tokenizer: TextVocabulary, vocab_size: int, stop_tokens: tuple[int, ...]):
        words = [*tokenizer.vocabulary_bytes[:vocab_size]]
        words += [b""] * (vocab_size - len(words))
        # A token without bytes gets a name such as <|7|>, as llguidance requires; a stop token also
        # gets one. Both are marked as special, so that no text matches them.
        nameless = {
            token: f"<|{token}|>".encode()
            for token, word in enumerate(words)
            if not word or token in stop_tokens
        }
        self.special_token_ids = [*nameless]
        self.tokens = [nameless.get(token, word) for token, word in enumerate(words)]
        self.eos_token_id = stop_tokens[0]
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._stop_tokens = set(stop_tokens)
        self._by_byte = {
            word[0]: token
            for token, word in enumerate(words)
            if len(word) == 1 and token not in self._stop_tokens
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """Encodes a text."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        ids = self._tokenizer.encode(text, allow_special=False)
        if self._stop_tokens.isdisjoint(ids):
            return ids
        # A stop token would end the text, so the text is encoded byte by byte instead.
        return [self._by_byte[byte] for byte in text.encode() if byte in self._by_byte]


@lru_cache(maxsize=2)
def _read_vocabulary(
    tokenizer: TextVocabulary, vocab_size: int, stop_tokens: tuple[int, ...]
) -> Any:
    """Returns the vocabulary in llguidance's format."""
    llguidance = _llguidance()
    wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, stop_tokens))
    return llguidance.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=[*stop_tokens])


@lru_cache(maxsize=8)
def _first_matcher(grammar: GuidedGrammar, vocab_size: int, stop_tokens: tuple[int, ...]) -> Any:
    """Returns llguidance's matcher of an empty text.

    Raises:
        ValueError: The grammar is invalid.
    """
    vocabulary = _read_vocabulary(grammar.tokenizer, vocab_size, stop_tokens)
    matcher = _llguidance().LLMatcher(vocabulary, grammar.source, log_level=0)
    if matcher.is_error():
        raise ValueError(f"{grammar.what} is invalid: {' '.join(matcher.get_error().split())}")
    return matcher
