"""Chat templates of a tokenizer: programs in jinja2 that write a conversation as one text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from jaxformer.artifacts.chat.messages import (
    ROLES,
    Messages,
    SpecialTokenBreaker,
    check_messages,
    plain,
    strings,
)
from jaxformer.artifacts.chat.sandbox import render
from jaxformer.artifacts.files import parse_json
from jaxformer.artifacts.tokenizer_files import CONFIG, MAP, TEMPLATE, TEMPLATES

# Unicode's characters for private use. Characters that no text contains serve as placeholders.
_PRIVATE = range(0xE000, 0xF900)
# The names of special tokens that a template may use.
_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_WORD_IN_SOURCE = re.compile(r"""['"](\w+)['"]""")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatTemplates:
    """The chat templates of a tokenizer.

    Attributes:
        sources: The templates by name. "default" is the usual template, and "tool_use" is the
            template for conversations with tools.
        special_tokens: The texts of special tokens by their variable, such as `bos_token`.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def choose(self, name: str | None, has_tools: bool) -> "ChatTemplate":
        """Returns a template.

        Args:
            name: The name of the template. By default, "tool_use" for conversations with tools if
                there is such a template, and "default" otherwise.
            has_tools: Whether the conversation has tools.

        Raises:
            ValueError: There is no template of this name.
        """
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            names = ", ".join(self.sources)
            raise ValueError(f"template is {name!r}; the chat templates are {names}")
        return ChatTemplate(name, self.sources[name], self.special_tokens)


def read_templates(files: Mapping[str, str], others: Mapping[str, str]) -> ChatTemplates | None:
    """Finds the chat templates in the settings files of a tokenizer.

    chat_template.jinja takes precedence over tokenizer_config.json, as in transformers.

    Args:
        files: The contents of the files by path.
        others: Texts of special tokens by variable, used if the files do not set the variable.

    Returns:
        The templates, or None if the files contain no template.

    Raises:
        ValueError: A template is not a text. The message gives the file.
    """
    options = parse_json(files.get(CONFIG, "{}"))
    found = _templates_of_config(options.get("chat_template"))
    for path, text in files.items():
        if path.startswith(f"{TEMPLATES}/"):
            found[PurePosixPath(path).stem] = text
    if TEMPLATE in files:
        found["default"] = files[TEMPLATE]
    if not found:
        return None
    if options.get("added_tokens_decoder") is None:
        options |= parse_json(files.get(MAP, "{}"))
    words = {name: _token_text(options.get(name)) for name in _SPECIAL_TOKENS}
    return ChatTemplates(found, {**others, **{name: x for name, x in words.items() if x}})


def _templates_of_config(value: Any) -> dict[str, str]:
    """Returns the templates in the entry `chat_template` of tokenizer_config.json."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    pairs = [(x.get("name"), x.get("template")) for x in entries if isinstance(x, dict)]
    named = {name: x for name, x in pairs if isinstance(name, str) and isinstance(x, str)}
    if not named or len(named) != len(entries):
        raise ValueError(
            f"{CONFIG}: chat_template is {value!r:.80}; it must be a text, or a list of objects "
            "with the texts 'name' and 'template'"
        )
    return named


def _token_text(value: Any) -> str | None:
    """Returns the text of a special token in a settings file."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


@dataclass(frozen=True)
class ChatTemplate:
    """One chat template.

    Attributes:
        name: The name of the template.
        source: The template itself, a program in jinja2.
        special_tokens: The texts of special tokens by their variable, such as `bos_token`.
    """

    name: str
    source: str
    special_tokens: Mapping[str, str]

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks what the assistant says with `{% generation %}`."""
        return bool(_GENERATION.search(self.source))

    def check(self, messages: Messages) -> list[dict[str, Any]]:
        """Checks and copies messages (see `check_messages`).

        A role is accepted if it is in `ROLES`, or occurs in quotes in the template.
        """
        words = set(_WORD_IN_SOURCE.findall(self.source))
        named = [x.get("role") for x in messages if isinstance(x, Mapping)]
        own = [role for role in named if isinstance(role, str) and role in words]
        return check_messages(messages, [*ROLES, *own])


@dataclass(frozen=True)
class Chat:
    """A conversation with its template and settings; it can be rendered in several ways.

    Attributes:
        template: The template.
        messages: The checked messages.
        tools: Descriptions of the tools that the assistant may call, as JSON schemas, or None.
        variables: Further variables of the template, such as `enable_thinking`.
    """

    template: ChatTemplate
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def texts(self) -> Iterator[str]:
        """All texts that the template may write, including its own source."""
        yield self.template.source
        for part in (self.messages, self.tools, dict(self.variables)):
            yield from strings(part)
        yield from self.template.special_tokens.values()

    @cached_property
    def unused(self) -> str:
        """Characters that do not occur in `texts`, so that they can serve as marks."""
        used = set("".join(self.texts))
        return "".join(x for x in map(chr, _PRIVATE) if x not in used)

    def render(
        self,
        messages: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        marks: tuple[str, str] | None = None,
    ) -> str:
        """Returns the text of the conversation.

        Args:
            messages: The messages to render. Defaults to the messages of the conversation.
            add_generation_prompt: Whether the text ends with the beginning of the assistant's next
                answer.
            marks: See `sandbox.render`.

        Raises:
            ValueError: The template fails.
        """
        variables = {
            **self.template.special_tokens,
            **self.variables,
            "messages": self.messages if messages is None else messages,
            "tools": self.tools,
            "documents": self.variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render(self.template.source, variables, marks)
        except ValueError as error:
            reason = str(error).removeprefix("the chat template ")
            raise ValueError(f"the chat template {self.template.name!r} {reason}") from None

    def with_broken_tokens(self, words: Sequence[str], mark: str, mark_before: str) -> "Chat":
        """Returns the conversation with marks in the special tokens that authors spell out.

        Args:
            words: The texts of the special tokens.
            mark: See `SpecialTokenBreaker`.
            mark_before: See `SpecialTokenBreaker`.
        """
        breaker = SpecialTokenBreaker(words, mark, mark_before)
        # No marks are put into variables that replace special tokens, such as `bos_token`, because
        # the template writes these tokens.
        given = {x: y for x, y in self.variables.items() if x not in self.template.special_tokens}
        return Chat(
            self.template,
            breaker.break_messages(self.messages),
            breaker.break_data(self.tools),
            {**self.variables, **breaker.break_data(given)},
        )


def make_chat(
    templates: ChatTemplates,
    messages: Messages,
    tools: list[Mapping[str, Any]] | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Chat:
    """Checks the arguments of `Tokenizer.apply_chat_template`.

    Raises:
        ValueError: An argument is invalid.
    """
    chosen = templates.choose(template, bool(tools))
    if tools is not None and not isinstance(tools, list | tuple):
        raise ValueError(f"tools is {tools!r:.80}; it must be a list of JSON schemas")
    described = None if tools is None else [plain(x, "a tool") for x in tools]
    if any(not isinstance(x, dict) for x in described or []):
        raise ValueError("tools has an entry that is not a dict; each must be a JSON schema")
    return Chat(chosen, chosen.check(messages), described, plain(variables or {}, "variables"))
