"""Examples for tuning: token ids with a mask of the tokens to learn, read from records.

A record has one of four forms, as in trl: `messages` (a conversation), `prompt` and `completion`
(both texts, or both lists of messages), `text`, or `prompt`, `chosen` and `rejected` (a better and
a worse answer). By default, a model learns what the assistant says, or the completion; the rest is
context.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.batch import Ids
from jaxformer.training.data.corpus import named_sources
from jaxformer.training.data.records import Record, Records
from jaxformer.training.data.split import choose_held_out

PREFERENCE = "prompt, chosen and rejected"
# The fields of each form of a record. A record has the first form whose fields it contains.
FORMS = {
    PREFERENCE: ("prompt", "chosen", "rejected"),
    "messages": ("messages",),
    "prompt and completion": ("prompt", "completion"),
    "text": ("text",),
}
TUNING_FORMS = tuple(form for form in FORMS if form != PREFERENCE)


class Example(NamedTuple):
    """The token ids of a text, of which the model learns some or all.

    Attributes:
        ids: The token ids.
        mask: For each token, whether the model learns to predict it.
    """

    ids: Ids
    mask: Sequence[bool] | np.ndarray

    @property
    def num_targets(self) -> int:
        """The number of tokens that the model learns to predict."""
        return int(sum(self.mask[1:]))


class Text(NamedTuple):
    """An encoded record, with the text that decides whether the record is held out.

    Attributes:
        examples: The tokens: one example, or the better and the worse answer to one prompt.
        question: The text before the first token to learn, or the whole text of a record that has
            only a text.
        weight: How often an epoch contains the record, on average.
    """

    examples: tuple[Example, ...]
    question: str
    weight: float = 1.0


def find_form(fields: Any) -> str | None:
    """Returns the form of a record, a key of `FORMS`, or None if it has another form."""
    if not isinstance(fields, dict):
        return None
    return next((form for form, names in FORMS.items() if all(x in fields for x in names)), None)


def find_records(paths: Sequence[Path | str]) -> list[Records]:
    """Returns all sources with records in the given files, folders and datasets."""
    sources = (source for path in paths for source in named_sources(str(path), "text", []))
    return [source for source in sources if isinstance(source, Records)]


def needs_tuning(paths: Sequence[Path | str]) -> bool:
    """Returns whether the first record has a prompt or messages, not only a text."""
    return find_form(_first_fields(paths)) not in (None, "text")


def has_preferences(paths: Sequence[Path | str]) -> bool:
    """Returns whether the first record has a better and a worse answer."""
    return find_form(_first_fields(paths)) == PREFERENCE


def has_messages(paths: Sequence[Path | str]) -> bool:
    """Returns whether the first record has messages, which need a chat template."""
    fields = _first_fields(paths)
    return find_form(fields) == "messages" or isinstance(fields.get("prompt"), list)


def _first_fields(paths: Sequence[Path | str]) -> dict[str, Any]:
    """Returns the first record of the first file, or an empty dict if it cannot be read."""
    for source in find_records(paths):
        try:
            first = next(source.records(), None)
        except (OSError, ValueError):  # The error is reported later, when the data is read.
            return {}
        return first.fields if first is not None and isinstance(first.fields, dict) else {}
    return {}


def read_examples(
    paths: Sequence[Path | str],
    tokenizer: Tokenizer,
    *,
    forms: Sequence[str] = TUNING_FORMS,
    learn_all: bool = False,
    weights: Sequence[float] = (),
) -> Iterator[Text]:
    """Reads and encodes the records of files, folders and datasets.

    Args:
        paths: The files, folders and datasets.
        tokenizer: Encodes the texts. Records with messages need its chat template.
        forms: The accepted forms of records, keys of `FORMS`.
        learn_all: Whether the model learns all tokens, not only the completions.
        weights: For each path, how often an epoch contains each of its records; once by default.

    Yields:
        The encoded records.

    Raises:
        ValueError: A record has no accepted form, or cannot be encoded. The message names the file
            and the line.
    """
    if not find_records(paths):
        raise ValueError(
            f"{paths[0]} has no records; give a .jsonl, .json or .parquet file whose records have "
            f"{_listed(forms)}"
        )
    for path, weight in zip(paths, weights or [1.0] * len(paths), strict=True):
        for source in find_records([path]):
            for record in source.records():
                text = _encode_record(source.path, record, tokenizer, forms, learn_all)
                yield text._replace(weight=weight)


def _listed(forms: Sequence[str]) -> str:
    """Returns the fields of forms of records for an error message."""
    return "; or ".join(" and ".join(map(repr, FORMS[form])) for form in forms)


def _encode_record(
    path: str, record: Record, tokenizer: Tokenizer, forms: Sequence[str], learn_all: bool
) -> Text:
    """Encodes a record. An error message begins with the place of the record."""
    fields, where, _ = record
    form = find_form(fields)
    if form is None or form not in forms:
        given = ", ".join(map(repr, fields)) if isinstance(fields, dict) else repr(fields)[:60]
        raise ValueError(
            f"{path}: {where} has {given or 'no fields'}; a record must have {_listed(forms)}"
        )
    try:
        examples = _encode_form(form, fields, tokenizer)
    except ValueError as error:
        raise ValueError(f"{path}: {where}: {error}") from None
    if not all(example.num_targets for example in examples):
        raise ValueError(f"{path}: {where} has nothing to learn; give an answer")
    first = examples[0]
    question = len(first.ids) if form == "text" else int(np.argmax(first.mask))
    if learn_all:
        examples = tuple(Example(x.ids, [True] * len(x.ids)) for x in examples)
    return Text(examples, tokenizer.decode(first.ids[:question]))


def _encode_form(form: str, fields: dict[str, Any], tokenizer: Tokenizer) -> tuple[Example, ...]:
    """Encodes the fields of a record that has the form `form`."""
    if form == "messages":
        return (encode_conversation(tokenizer, fields["messages"], fields.get("tools")),)
    if form == "text":
        return (encode_text(tokenizer, fields["text"]),)
    answers = ("chosen", "rejected") if form == PREFERENCE else ("completion",)
    prompt, tools = fields["prompt"], fields.get("tools")
    return tuple(encode_completion(tokenizer, prompt, fields[x], tools, name=x) for x in answers)


def encode_conversation(
    tokenizer: Tokenizer, messages: Any, tools: list[Mapping[str, Any]] | None = None
) -> Example:
    """Encodes a conversation. The model learns what the assistant says.

    Raises:
        ValueError: A message is malformed, the tokenizer has no chat template, or the assistant
            says nothing.
    """
    chat = tokenizer.apply_chat_template(messages, tools or None)
    return Example(chat.ids, chat.assistant_mask)


def encode_completion(
    tokenizer: Tokenizer,
    prompt: Any,
    completion: Any,
    tools: list[Mapping[str, Any]] | None = None,
    *,
    name: str = "completion",
) -> Example:
    """Encodes a prompt with its completion. The model learns the completion and its end token.

    Both are texts, or both are lists of messages. If appending a completion text would change the
    tokens of the prompt, the two texts are encoded separately, because a model that answers a
    prompt reads the tokens of the prompt alone.

    Args:
        tokenizer: The tokenizer.
        prompt: The prompt.
        completion: The completion.
        tools: Descriptions of the tools that the assistant may call, if both sides are messages.
        name: The name of the completion in error messages.

    Raises:
        ValueError: The prompt or the completion is empty or has a wrong type, or the chat template
            changes the prompt.
    """
    if isinstance(prompt, list) and isinstance(completion, list):
        whole = tokenizer.apply_chat_template([*prompt, *completion], tools or None).ids
        asked = tokenizer.apply_chat_template(prompt, tools or None, add_generation_prompt=True).ids
        if whole[: len(asked)] != asked:
            raise ValueError("the chat template changes the prompt if a completion follows")
        return Example(whole, _after(len(asked), len(whole)))
    for side, text in (("prompt", prompt), (name, completion)):
        if not isinstance(text, str):
            raise ValueError(
                f"the {side} is {text!r:.60}; prompt and {name} must both be texts, or both lists "
                "of messages"
            )
        if not text:
            raise ValueError(f"the {side} is empty")
    asked, whole, answer = tokenizer.encode_many([prompt, prompt + completion, completion])
    if whole[: len(asked)] != asked:
        whole = [*asked, *answer]
    opening = tokenizer.text_opening
    ids = [*opening, *whole, *_ending(tokenizer)]
    return Example(ids, _after(len(opening) + len(asked), len(ids)))


def encode_text(tokenizer: Tokenizer, text: Any) -> Example:
    """Encodes a text. The model learns all tokens, including the end token.

    Raises:
        ValueError: The text is empty or not a string.
    """
    if not isinstance(text, str) or not text:
        raise ValueError(f"the text is {text!r:.60}; it must be a non-empty string")
    (ids,) = tokenizer.encode_many([text])
    ids = [*tokenizer.text_opening, *ids, *_ending(tokenizer)]
    return Example(ids, _after(0, len(ids)))


def _after(start: int, length: int) -> list[bool]:
    return [place >= start for place in range(length)]


def _ending(tokenizer: Tokenizer) -> list[int]:
    """Returns a list with the id that ends a text, or an empty list if there is no such id."""
    return list(tokenizer.stop_tokens[:1])


def repeat_by_weight(texts: Sequence[Text], seed: int) -> list[Text]:
    """Repeats each text according to its weight.

    A weight of 2.25 gives two copies, and a third copy with probability 0.25.

    Args:
        texts: The texts.
        seed: The seed of the random numbers.
    """
    weights = np.array([text.weight for text in texts])
    times = np.floor(weights + np.random.default_rng(seed).random(len(weights))).astype(int)
    return [text for text, number in zip(texts, times.tolist(), strict=True) for _ in range(number)]


def split_texts(texts: Sequence[Text], fraction: float | None) -> tuple[list[Text], list[Text]]:
    """Splits encoded records into a training part and a held-out part.

    Records with similar questions go to the same part (see `choose_held_out`).

    Args:
        texts: The encoded records.
        fraction: The fraction to hold out. If None, it is 0.05, but at most 1,000 records.

    Raises:
        ValueError: There are fewer than two groups of similar questions.
    """
    held_out = choose_held_out([text.question for text in texts], fraction, noun="prompts")
    sides: tuple[list[Text], list[Text]] = ([], [])
    for text, is_held_out in zip(texts, held_out, strict=True):
        sides[is_held_out].append(text)
    return sides
