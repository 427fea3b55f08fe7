"""Checks the messages of a conversation, and marks special tokens that their authors spell out.

A message is a dict with a `role` and a `content`, as in transformers and in OpenAI's interface.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Names of the field with the assistant's reasoning. A template reads either of the first two names.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DEEPEST = 100
# Words in the types of parts that are not text, such as "image_url" and "input_audio".
_MEDIA = ("image", "audio", "video")


def check_messages(messages: Messages, roles: Iterable[str] = ROLES) -> list[dict[str, Any]]:
    """Checks messages, and copies them as plain JSON data.

    As in transformers, fields with the value None are dropped, and the assistant's reasoning is
    copied to all fields that templates may read.

    Args:
        messages: The messages.
        roles: The accepted roles.

    Raises:
        ValueError: There are no messages, or a message has no role, an unknown role or no content.
            The error gives the number of the message, counted from 1.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError(
            f"messages is {messages!r:.80}; it must be a list of at least one message, such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    accepted = tuple(dict.fromkeys(roles))
    copies = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"message {number} is {message!r:.80}; it must be a dict with a role and a content"
            )
        copy = {key: plain(x, f"message {number}") for key, x in message.items() if x is not None}
        _check_message(copy, number, accepted)
        copies.append(_with_reasoning(copy))
    return copies


def _check_message(message: dict[str, Any], number: int, roles: tuple[str, ...]) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in roles:
        given = "has no role" if role is None else f"has the role {role!r}"
        raise ValueError(f"message {number} {given}; the roles are {', '.join(roles)}")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else part
            if not isinstance(part, dict) or any(word in str(kind) for word in _MEDIA):
                raise ValueError(
                    f"message {number} has a part of type {kind!r:.80}; models read text only"
                )
    elif not isinstance(content, str | dict | None):
        raise ValueError(
            f"message {number} has the content {content!r:.80}; it must be a text or a list of "
            "parts"
        )
    needs_text = role == "user" or (role == "assistant" and not message.get("tool_calls"))
    if needs_text and not any(text.strip() for text in strings(content)):
        raise ValueError(f"message {number} ({role}) is empty; give its content, or leave it out")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((x for key in _REASONING if (x := message.get(key)) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def plain(value: Any, what: str, depth: int = 0) -> Any:
    """Copies JSON data, so that a template cannot call methods of user-defined classes.

    Args:
        value: The data: dicts, lists, texts, numbers, Booleans and None.
        what: The beginning of the error message.
        depth: The number of enclosing lists and dicts.

    Raises:
        ValueError: A value is not JSON data, or the data are nested too deeply.
    """
    if depth > _DEEPEST:
        raise ValueError(f"{what} is nested more than {_DEEPEST} levels deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(k, what, depth + 1): plain(x, what, depth + 1) for k, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x, what, depth + 1) for x in value]
    raise ValueError(
        f"{what} has a value of type {type(value).__name__}; it must be JSON data: texts, numbers, "
        "lists and dicts"
    )


def strings(value: Any) -> Iterator[str]:
    """Yields all texts in JSON data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


class SpecialTokenBreaker:
    """Puts marks into the special tokens that an author spells out.

    The mark follows the first character of the token. A token of one character gets a different
    mark, before the character. If a text begins or ends with a part of a special token, a mark also
    separates this part from the text that the template writes beside it. So in a rendered text, the
    template wrote exactly the special tokens without marks.
    """

    def __init__(self, words: Iterable[str], mark: str, mark_before: str):
        """Prepares the search for special tokens.

        Args:
            words: The texts of the special tokens.
            mark: A character that no text contains.
            mark_before: Another such character, for special tokens of one character.
        """
        self._mark, self._mark_before = mark, mark_before
        longest_first = sorted((x for x in words if len(x) > 1), key=len, reverse=True)
        places = (f"(?<={re.escape(x[0])})(?={re.escape(x[1:])})" for x in longest_first)
        self._inner = re.compile(_any(places))
        self._single = re.compile(_any(re.escape(x) for x in words if len(x) == 1))
        self._words = longest_first
        starts = {re.escape(x[:n]) for x in longest_first for n in range(1, len(x))}
        ends = {re.escape(x[n:]) for x in longest_first for n in range(1, len(x))}
        self._end = re.compile(rf"(?:{_any(starts)})(?=\s*\Z)")
        self._begin = re.compile(rf"\A\s*(?={_any(ends)})")

    def break_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages with marks, except in roles and in the names of fields."""
        return [
            {key: x if key == "role" else self.break_data(x) for key, x in message.items()}
            for message in messages
        ]

    def break_data(self, value: Any) -> Any:
        """Returns JSON data with marks.

        Keys get no marks for parts of special tokens, because templates look keys up.
        """
        if isinstance(value, str):
            return self._break_text(value)
        if isinstance(value, dict):
            return {self._break_tokens(k): self.break_data(x) for k, x in value.items()}
        if isinstance(value, list):
            return [self.break_data(x) for x in value]
        return value

    def _break_tokens(self, text: str) -> str:
        """Returns a text with a mark in each complete special token."""
        text = self._single.sub(lambda match: self._mark_before + match[0], text)
        return self._inner.sub(self._mark, text)

    def _break_text(self, text: str) -> str:
        """Returns a text with a mark in each special token, and in each part of a special token."""
        text = self._break_tokens(text)
        text = self._end.sub(lambda match: match[0] + self._mark, text)
        part = text.strip()
        if part and any(part in word for word in self._words):
            return text.replace(part, part + self._mark)
        return self._begin.sub(lambda match: match[0] + self._mark, text)


def _any(patterns: Iterable[str]) -> str:
    """Joins patterns by |, the longest first. Without patterns, the result never matches."""
    return "|".join(sorted(patterns, key=len, reverse=True)) or r"(?!)"
