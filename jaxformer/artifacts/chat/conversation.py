"""Conversations as token ids, with a mask of the tokens that the assistant says.

A special token is recognized only where the template writes it. What a user, a tool or a document
says is encoded as plain text, even if it spells out the name of a special token. Otherwise, a
document could end a turn and speak as the system.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxformer.artifacts.chat.parsing import Token
from jaxformer.artifacts.chat.spans import Span, derived_spans, marked_text
from jaxformer.artifacts.chat.template import Chat

# A function (text, mark) → tokens. It recognizes a special token in the text only after a mark.
Encoder = Callable[[str, str], list[Token]]


@dataclass(frozen=True)
class Encoded:
    """An encoded conversation, from which the mask of the assistant is computed.

    Attributes:
        chat: The messages and the template.
        add_generation_prompt: Whether the text ends with the prompt for an answer.
        words: The texts of the special tokens.
        encode: Encodes a text with marks.
        marked: The text with `mark` before each special token that the template wrote.
        mark: The character that marks special tokens in `marked`.
    """

    chat: Chat
    add_generation_prompt: bool
    words: tuple[str, ...]
    encode: Encoder
    marked: str
    mark: str

    @cached_property
    def tokens(self) -> list[Token]:
        """The tokens of the text."""
        return self.encode(self.marked, self.mark)

    def assistant_mask(self, text: str) -> list[bool]:
        """Computes `Conversation.assistant_mask`."""
        if self.chat.template.marks_generation:
            marked, spans = marked_text(self.chat, self.add_generation_prompt)
            if marked != text:
                raise ValueError(
                    f"the chat template {self.chat.template.name!r} writes a different text each "
                    "time it is rendered"
                )
            return covered(self.tokens, spans)
        spans = derived_spans(self.chat, text, self.add_generation_prompt, self.words)
        for span in spans:
            self._check_prompt(span)
        return covered(self.tokens, spans)

    def _check_prompt(self, span: Span) -> None:
        """Checks that the text before a span has the same tokens if no answer follows.

        Raises:
            ValueError: The tokens differ, so a model would be trained on prompts that it never gets
                in generation.
        """
        before = [token for token in self.tokens if token.end <= span.start]
        prompt = self.encode(self._beginning(span.start), self.mark)
        if prompt[: len(before)] != before:
            raise ValueError(
                f"the chat template {self.chat.template.name!r} ends its prompt for an answer with "
                "characters whose tokens depend on the answer, so what the assistant says cannot "
                "be derived; in the template, enclose answers in {% generation %}"
            )

    def _beginning(self, length: int) -> str:
        """Returns the beginning of `marked` that has `length` characters without marks."""
        place = 0
        while length or self.marked[place : place + 1] == self.mark:
            length -= self.marked[place] != self.mark
            place += 1
        return self.marked[:place].removesuffix(self.mark)


@dataclass(frozen=True)
class Conversation:
    """A conversation that a chat template wrote.

    Attributes:
        text: The text.
        ids: The token ids of the text.
    """

    text: str
    ids: list[int]
    _origin: Encoded = field(repr=False, compare=False)

    @cached_property
    def assistant_mask(self) -> list[bool]:
        """Whether the assistant says each token; True for the end-of-turn token of its turns.

        Raises:
            ValueError: The template does not mark what the assistant says, and the mask cannot be
                derived. The message names the template.
        """
        return self._origin.assistant_mask(self.text)


def encode_chat(
    chat: Chat, add_generation_prompt: bool, words: tuple[str, ...], encode: Encoder
) -> Conversation:
    """Renders and encodes a conversation.

    Args:
        chat: The messages and the template.
        add_generation_prompt: Whether the text ends with the beginning of an answer.
        words: The texts of the special tokens.
        encode: Encodes a text, in which it recognizes special tokens only after a mark.

    Raises:
        ValueError: The template fails, or its text depends on a special token that a message
            spells out.
    """
    text = chat.render(add_generation_prompt=add_generation_prompt)
    inner, before, mark = chat.unused[3:6]
    broken = chat.with_broken_tokens(words, inner, before)
    rendered = text
    if broken != chat:
        rendered = broken.render(add_generation_prompt=add_generation_prompt)
    if re.sub(f"[{inner}{before}]", "", rendered) != text:
        raise ValueError(
            f"the chat template {chat.template.name!r} depends on a special token that a message "
            "spells out; remove the special token from the message"
        )
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    special = "|".join(map(re.escape, longest_first)) or r"(?!)"
    marked = re.sub(f"(?<!{before})(?:{special})", lambda match: mark + match[0], rendered)
    marked = re.sub(f"[{inner}{before}]", "", marked)
    origin = Encoded(chat, add_generation_prompt, words, encode, marked, mark)
    return Conversation(text, [token.id for token in origin.tokens], origin)


def covered(tokens: Sequence[Token], spans: Sequence[Span]) -> list[bool]:
    """Returns for each token whether it shares characters with a span."""
    mask, at = [], 0
    for token in tokens:
        while at < len(spans) and token.start >= spans[at].end:
            at += 1
        mask.append(at < len(spans) and token.end > spans[at].start)
    return mask
