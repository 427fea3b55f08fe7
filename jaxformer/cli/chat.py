"""`jaxformer chat RUN`: a conversation with a model in the terminal."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxformer.cli.arguments import complete, read_given
from jaxformer.cli.checkpoints import load_model
from jaxformer.cli.sampling import SamplingArguments, TextGenerator, check_sampling, make_generator
from jaxformer.terminal import say, write

_HELP = """/clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer.
A line that ends with \\ continues on the next line."""
# The prompt must leave at least this number of tokens for the answer.
_LEAST_ROOM = 16
_PROMPT, _MORE = "> ", ". "


@dataclass(frozen=True)
class ChatArguments(SamplingArguments):
    """Talk to a model that has a chat template, in the terminal or through a pipe.

    Each line is a message. Through a pipe, each answer is followed by a line break.
    """

    system: str | None = None
    """instructions that come before the conversation"""


def main(argv: list[str]) -> int:
    """Loads the model, then reads messages and prints answers until the input ends."""
    given = read_given(ChatArguments, "chat", argv)
    arguments = complete(ChatArguments, given)
    check_sampling(arguments)
    with load_model(arguments) as checkpoint:
        generator = make_generator(arguments, given, checkpoint)
        has_template = generator.tokenizer.chat_templates is not None
        if generator.model.config.reads_source or not has_template:
            raise ValueError(
                f"{arguments.run} has no chat template, which jaxformer chat needs; use jaxformer "
                "generate to continue a text"
            )
        chat = Chat(generator, arguments)
        chat.prompt("Hello")  # Raises if the template refuses the system message.
        if sys.stdin.isatty():
            say(_HELP)
        while (text := _read_message()) is not None:
            if text == "/exit":
                break
            if text == "/clear":
                chat.messages.clear()
            elif text.strip():
                _answer(chat, text)
    return 0


def _answer(chat: "Chat", text: str) -> None:
    """Writes an answer. On a terminal, a message that is too long does not end the conversation."""
    try:
        chat.answer(text, write)
    except ValueError as error:
        if not sys.stdin.isatty():
            raise
        say(str(error), sys.stderr)


@dataclass
class Chat:
    """A conversation.

    Attributes:
        generator: The model and the settings with which it generates answers.
        arguments: The arguments of the command.
        messages: The messages of the user and the assistant so far.
        turns: The number of generated answers, which selects the random numbers of the next one.
    """

    generator: TextGenerator
    arguments: ChatArguments
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0

    def prompt(self, question: str) -> list[int]:
        """Returns the ids of the conversation, the question and the beginning of an answer."""
        system = self.arguments.system
        before = [] if system is None else [{"role": "system", "content": system}]
        asked = {"role": "user", "content": question}
        messages = [*before, *self.messages, asked]
        return self.generator.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True
        ).ids

    def answer(self, question: str, write: Callable[[str], Any]) -> None:
        """Writes the answer to a question while it is generated.

        Ctrl-C stops the answer. The conversation then contains the part that was written.

        Raises:
            ValueError: The question is too long for the model, even without earlier messages.
        """
        prompt = self._shortened_prompt(question)
        stream = self.generator.stream(prompt)
        written: list[str] = []

        def show(text: str) -> None:
            written.append(text)
            write(text)

        with suppress(KeyboardInterrupt):
            self._generate(prompt, lambda new: show(stream.push(new[0])))
        show(stream.flush())
        write("\n")
        answer = "".join(written)
        if answer.strip():  # Templates refuse empty messages.
            self.messages.append({"role": "user", "content": question})
            self.messages.append({"role": "assistant", "content": answer})

    def _generate(self, prompt: list[int], on_tokens: Callable[[list[list[int]]], None]) -> None:
        import jax

        self.turns += 1
        key = jax.random.fold_in(jax.random.key(self.arguments.seed), self.turns)
        stops = self.generator.tokenizer.turn_end_tokens
        room = self._room(prompt)
        self.generator.generate([prompt], room, key, stops, on_tokens=on_tokens)

    def _room(self, prompt: list[int]) -> int:
        """Returns the number of tokens that an answer may have."""
        model = self.generator.model
        room = model.config.max_length - len(prompt)
        usual = model.generation.most_new_tokens(len(prompt), model.config.max_length) or room
        return min(room, self.arguments.max_new_tokens or usual)

    def _shortened_prompt(self, question: str) -> list[int]:
        """Returns the prompt; forgets the oldest messages if they leave no room for an answer."""
        forgotten = 0
        least = min(self.arguments.max_new_tokens or _LEAST_ROOM, _LEAST_ROOM)
        max_length = self.generator.model.config.max_length
        while max_length - len(prompt := self.prompt(question)) < least:
            if not self.messages:
                raise ValueError(
                    f"message, template and --system need {len(prompt)} tokens, which leaves no "
                    f"room for an answer: this model's max_length is {max_length}; shorten the "
                    "message or --system"
                )
            del self.messages[:2]
            forgotten += 1
        if forgotten:
            one, many = "oldest message and its answer", f"{forgotten} oldest messages and answers"
            say(f"(max_length reached: forgot the {one if forgotten == 1 else many})", sys.stderr)
        return prompt


def _read_message() -> str | None:
    """Reads a message, or returns None at the end of the input.

    On a terminal, Ctrl-C discards what was typed.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 (lines can be edited, and earlier ones recalled)
    lines: list[str] = []
    while True:
        try:
            line = input((_MORE if lines else _PROMPT) if is_terminal else "")
        except EOFError:
            if is_terminal:
                say()
            return "\n".join(lines) or None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            say()
            lines.clear()
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])
