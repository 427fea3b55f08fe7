"""Finds what the assistant says in a rendered conversation.

A template may enclose what the assistant says in `{% generation %}`. Most published templates do
not. For these, the spans are derived from renderings with and without a turn of the assistant:

- A turn begins where the prompt for an answer ends. The prompt is what the template writes after
  the earlier messages with `add_generation_prompt`.
- A turn ends where the text of the conversation up to this turn ends. If the whole conversation
  differs from this text after the answer, the turn ends at the first difference. So the end-of-turn
  token belongs to the turn.

Some templates write an earlier turn in another way than the last one, for example without its
reasoning. With such a template, a mark at the end of a message's text shows where the text is.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from jaxformer.artifacts.chat.template import Chat

Message = dict[str, Any]
# If a prompt ends with this word, the next tokens are the assistant's reasoning. They count as
# tokens of the assistant.
_REASONING = "<think>"
# The first `_SINGLE_MARKS` unused characters are marks with fixed purposes. Each of the remaining
# unused characters marks one message.
_SINGLE_MARKS = 8
# Words in angle brackets are compared as a whole, even if they are not special tokens.
_TAG = r"<[^<>\s]{1,40}>"


def _empty_turn() -> Message:
    """Returns a turn that says nothing.

    Its tool calls are an empty iterator, which counts as true, as any iterator does. So a template
    that tests for tool calls takes its branch for tool calls, but finds none.
    """
    return {"role": "assistant", "content": "", "tool_calls": iter(())}


class Span(NamedTuple):
    """A range of characters."""

    start: int
    end: int


def marked_text(chat: Chat, add_generation_prompt: bool) -> tuple[str, list[Span]]:
    """Renders a template that marks what the assistant says.

    Returns:
        (the text without marks, the spans of what the assistant says).
    """
    begin, end = chat.unused[:2]
    text = chat.render(add_generation_prompt=add_generation_prompt, marks=(begin, end))
    parts, spans, position, start = [], [], 0, 0
    for part in re.split(f"([{begin}{end}])", text):
        if part == begin:
            start = position
        elif part == end:
            spans.append(Span(start, position))
        else:
            parts.append(part)
            position += len(part)
    return "".join(parts), [span for span in spans if span.start < span.end]


def derived_spans(
    chat: Chat, text: str, add_generation_prompt: bool, words: Sequence[str]
) -> list[Span]:
    """Finds what the assistant says, from renderings with and without its turns.

    Args:
        chat: The conversation.
        text: The text of the conversation.
        add_generation_prompt: Whether the text ends with the prompt for an answer.
        words: The texts of the special tokens, which are compared as a whole.

    Raises:
        ValueError: The place of a turn is not certain. The message names the template.
    """
    finder = _Finder(chat, text, add_generation_prompt, words)
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    spans = [finder.span(i) for i in turns]
    if any(b.start < a.end for a, b in pairwise(spans)):
        raise finder.refusal(turns[-1], "the assistant's turns overlap")
    return spans


class _Finder:
    """Finds the turns of one conversation; the fields are the arguments of `derived_spans`."""

    def __init__(self, chat: Chat, text: str, add_generation_prompt: bool, words: Sequence[str]):
        self.chat, self.text, self.prompts = chat, text, add_generation_prompt
        longest_first = sorted(filter(None, words), key=len, reverse=True)
        self._units = re.compile("|".join([*map(re.escape, longest_first), _TAG, "."]), re.DOTALL)

    def refusal(self, index: int, reason: str) -> ValueError:
        return ValueError(
            f"the chat template {self.chat.template.name!r} does not mark what the assistant says "
            f"({{% generation %}}), and the place of message {index + 1} is not certain: {reason}"
        )

    def span(self, index: int) -> Span:
        """Returns the span of an assistant's turn.

        Raises:
            ValueError: The place of the turn is not certain.
        """
        span = Span(self._start(index), self._end(index))
        self._content_end(index)  # Adds this message to `_content_ends`, if it is missing.
        own = any(span.start <= place <= span.end for place in self._content_ends[index])
        has_others = any(
            span.start < place <= span.end
            for number, places in self._content_ends.items()
            for place in places
            if number != index
        )
        if span.start < self._earlier_end(index) or has_others or not own:
            raise self.refusal(index, "its text does not follow the prompt for an answer")
        return span

    def _start(self, index: int) -> int:
        """Returns where the header of a turn ends."""
        earlier = self.chat.messages[:index]
        before, header = self._header(earlier, index)
        if self.text.startswith(before + header):
            return len(before + header)
        # The template writes earlier turns differently from the last one, so the header is
        # searched for after the earlier turns.
        place = self.text.find(header, self._earlier_end(index))
        if not header or place < 0:
            raise self.refusal(index, "no prompt for an answer precedes it")
        return place + len(header)

    def _header(self, earlier: list[Message], index: int) -> tuple[str, str]:
        """Returns the text of the earlier messages, and the header that follows.

        The header is what the template writes before any answer: the common beginning of the prompt
        and of an empty turn. The prompt alone may be longer. It may open the assistant's reasoning.
        In Qwen 2.5, it ends with a line break that the template omits for an answer without text.
        """
        before, prompt = self._render(earlier, index), self._render(earlier, index, prompt=True)
        if prompt == before:  # The template ignores add_generation_prompt.
            prompt = self.text
        begin = self._shared(before, prompt)
        try:
            empty = self.chat.render([*earlier, _empty_turn()])
        except ValueError:
            empty = before if prompt is self.text else prompt
        end = self._shared(empty, prompt)
        header = prompt[begin : end if end > begin or prompt is self.text else len(prompt)]
        return prompt[:begin], header.partition(_REASONING)[0]

    def _end(self, index: int) -> int:
        """Returns where a turn ends."""
        if index + 1 == len(self.chat.messages) and not self.prompts:
            return len(self.text)
        alone = self._render(self.chat.messages[: index + 1], index)
        if self.text.startswith(alone):
            return len(alone)
        marked = self._render(self._with_mark(index)[: index + 1], index)
        if self._mark not in marked:
            raise self.refusal(index, "the template does not write it")
        closing = marked[marked.rindex(self._mark) + 1 :]
        end = self._content_end(index)
        return end + self._shared(closing, self.text[end:])

    def _content_end(self, index: int) -> int:
        """Returns where the text of a message ends; the template's closing words follow."""
        if index not in self._content_ends:
            marked = self._render(self._with_mark(index), index, prompt=self.prompts)
            if self._mark not in marked:
                raise self.refusal(index, "the template does not write it")
            rest = marked[marked.rindex(self._mark) + 1 :]
            if not self.text.endswith(rest):
                raise self.refusal(index, "the text after it depends on it")
            self._content_ends[index] = [len(self.text) - len(rest)]
        return self._content_ends[index][-1]

    def _earlier_end(self, index: int) -> int:
        """Returns where the last text of the earlier messages ends, or 0 if they have no text."""
        return max(
            (self._content_ends[i][0] for i in range(index) if i in self._content_ends), default=0
        )

    @cached_property
    def _content_ends(self) -> dict[int, list[int]]:
        """The positions at which the texts of each message end, by the index of the message.

        All positions come from one rendering, in which every message has its own mark. A message
        may have several texts, and a template may write a text twice, such as a tool's name. If the
        marks change anything else in the text, or if the template rejects them, the dict is empty.
        Then a separate rendering marks each message.
        """
        marks = self.chat.unused[_SINGLE_MARKS:]
        if len(marks) < len(self.chat.messages):
            return {}
        pairs = zip(self.chat.messages, marks, strict=False)
        try:
            marked = self.chat.render([_mark(*pair) for pair in pairs], self.prompts)
        except ValueError:  # The template refuses a text with a mark.
            return {}
        ends: dict[int, list[int]] = {}
        length, plain = 0, []
        indices = {mark: index for index, mark in enumerate(marks)}
        for character in marked:
            if character in indices:
                ends.setdefault(indices[character], []).append(length)
            else:
                plain.append(character)
                length += 1
        return ends if "".join(plain) == self.text else {}

    @property
    def _mark(self) -> str:
        return self.chat.unused[2]

    def _with_mark(self, index: int) -> list[Message]:
        """Returns the messages; message `index` has a mark at the end of each of its texts."""
        messages = list(self.chat.messages)
        messages[index] = _mark(messages[index], self._mark)
        return messages

    def _render(self, messages: list[Message], index: int, prompt: bool = False) -> str:
        try:
            return self.chat.render(messages, add_generation_prompt=prompt)
        except ValueError as error:
            raise self.refusal(index, str(error)) from None

    def _shared(self, a: str, b: str) -> int:
        """Returns the length of the common beginning, which does not divide a special token."""
        length = 0
        for x, y in zip(self._split(a), self._split(b), strict=False):
            if x != y:
                break
            length += len(x)
        return length

    def _split(self, text: str) -> Iterator[str]:
        return (match[0] for match in self._units.finditer(text))


def _mark(message: Message, mark: str) -> Message:
    """Adds a mark to the end of each text of a message."""
    return {key: x if key == "role" else _marked(x, mark) for key, x in message.items()}


def _marked(value: Any, mark: str) -> Any:
    """Adds a mark to the end of each text in JSON data, but not to keys.

    The mark precedes the spaces at the end, which many templates remove.
    """
    if isinstance(value, dict):
        return {key: _marked(x, mark) for key, x in value.items()}
    if isinstance(value, list):
        return [_marked(x, mark) for x in value]
    if not isinstance(value, str):
        return value
    text = value.rstrip()
    return text + mark + value[len(text) :]
