"""`jaxformer generate RUN --prompts FILE --out FILE`: continues each prompt of a file.

The prompts are sorted by length and computed in groups. The results of each group are appended to
OUT.partial, whose first line holds the settings. If the command is interrupted, the same command
reads OUT.partial and computes only the missing groups. At the end, it writes the records to OUT in
the order of FILE and deletes OUT.partial.
"""

import hashlib
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.artifacts.files import json_text, parse_json, read_text, write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.spelled_tokens import spelled_tokens
from jaxformer.artifacts.tokenizer import Tokenizer, check_unicode
from jaxformer.cli.checkpoints import print_special
from jaxformer.cli.flags import check_out
from jaxformer.cli.generate import (
    USUAL_TOKENS,
    GenerateArguments,
    encode_prompt,
    reserved_tokens,
    without_beginning,
)
from jaxformer.cli.sampling import TextGenerator
from jaxformer.cli.translate import iterate_lines
from jaxformer.training.data.examples import find_records
from jaxformer.training.screen import Screen

# Number of sequences per group. An interruption loses the results of the unfinished group.
_GROUP = 1024
# Default of --batch-size with --mesh. Without this default, all sequences of a group would form one
# batch.
_MESH_BATCH = 256
# Fields that the command adds to each record.
_TEXT, _REASON = "generated", "finish_reason"
# Flags that do not change the generated texts.
_WITHOUT_EFFECT = ("out", "prompts", "mesh", "batch_size")


class PromptRecord(NamedTuple):
    """A record of the file of prompts.

    Attributes:
        fields: The fields of the record.
        where: The file and the line of the record, such as "prompts.jsonl: line 3".
    """

    fields: dict[str, Any]
    where: str

    @property
    def messages(self) -> list | None:
        """The conversation that the model answers, or None if the prompt is a text."""
        asked = self.fields.get("messages") or self.fields.get("prompt")
        return asked if isinstance(asked, list) else None


class Prompt(NamedTuple):
    """An encoded prompt.

    Attributes:
        ids: The ids that the model continues.
        source: A list with the ids of the source, or None.
    """

    ids: list[int]
    source: list[list[int]] | None

    @property
    def length(self) -> tuple[int, int]:
        """Number of tokens of the prompt and of the source."""
        return len(self.ids), 0 if self.source is None else len(self.source[0])


@dataclass(frozen=True)
class Files:
    """The file of prompts, and the files that the command writes.

    Attributes:
        arguments: The arguments of the command.
        records: The records with the prompts.
        out: The file to write.
        done: The results of earlier groups, by index of the record.
    """

    arguments: GenerateArguments
    records: list[PromptRecord]
    out: Path
    done: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def partial(self) -> Path:
        """The file with the results of the groups that were computed."""
        return self.out.with_name(f"{self.out.name}.partial")

    def settings(self) -> str:
        """Returns the settings that determine the results, as one line of JSON."""
        flags = asdict(self.arguments)
        settings = {name: x for name, x in flags.items() if name not in _WITHOUT_EFFECT}
        texts = json_text([record.fields for record in self.records])
        digest = hashlib.sha256(texts.encode()).hexdigest()
        for path in (self.arguments.json_schema, self.arguments.grammar):
            if path is not None:
                settings[str(path)] = read_text(path)
        checkpoints = RunFolder(self.arguments.run).checkpoints
        steps = sorted(path.name for path in checkpoints.glob("*"))
        return json_text({"prompts": digest, "checkpoints": steps} | settings, default=str)

    def resume(self) -> None:
        """Reads the results of an interrupted command.

        Raises:
            ValueError: The partial file was written with other settings or prompts.
        """
        settings = self.settings()
        if not self.partial.is_file():
            return
        first, *lines = self.partial.read_text().split("\n")
        if first != settings:
            raise ValueError(
                f"{self.partial} was written with other settings or prompts; repeat the command "
                "that wrote it, or delete the file to start again"
            )
        # The last line may be incomplete, because the command was interrupted.
        for line in lines[:-1]:
            result = parse_json(line)
            self.done[result.pop("index")] = result

    def generate(self, generator: TextGenerator) -> None:
        """Continues all prompts, and writes the files."""
        screen, begin = Screen(stderr=True), time.perf_counter()
        prompts, most = self._fitting(encode_prompts(self, generator), generator)
        call = _Call(generator, self.arguments, self._stop_tokens(generator.tokenizer), most)
        groups = list(_groups(prompts, self.arguments.num_samples))
        if self.done:
            known = f"{len(self.done):,} of {len(prompts):,} results"
            screen.say(f"{self.partial.name} has {known}; computing the rest")
        new_tokens = 0
        with self._open() as file, screen.count(len(prompts), "generating", "prompts") as show:
            for number, indices in enumerate(groups):
                if any(index not in self.done for index in indices):
                    results, count = call.run([prompts[i] for i in indices], number)
                    new_tokens += count
                    for index, result in zip(indices, results, strict=True):
                        file.write(json_text({"index": index} | result) + "\n")
                        self.done[index] = result
                    file.flush()
                show(len(self.done))
        lines = (record.fields | self.done[i] for i, record in enumerate(self.records))
        write_whole(self.out, "".join(f"{json_text(x, ascii_only=False)}\n" for x in lines))
        self.partial.unlink()
        seconds = time.perf_counter() - begin
        screen.say(
            f"{len(prompts):,} prompts, {new_tokens:,} new tokens in {seconds:.1f} s: {self.out}"
        )

    def _stop_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Returns the ids that end a generated text."""
        is_chat = self.records[0].messages is not None
        return tokenizer.turn_end_tokens if is_chat else tokenizer.stop_tokens

    def _fitting(self, prompts: list[Prompt], generator: TextGenerator) -> tuple[list[Prompt], int]:
        """Returns the prompts, truncated if --truncate-prompt is set, and the number of new tokens.

        Raises:
            ValueError: A prompt is too long. The message names its file and line.
        """
        model, tokenizer = generator.model, generator.tokenizer
        max_length, given = model.config.max_length, self.arguments.max_new_tokens
        wanted = reserved_tokens(model, self.arguments)
        if self.arguments.truncate_prompt:
            most = max_length - wanted
            prompts = [Prompt(without_beginning(x.ids, tokenizer, most), x.source) for x in prompts]
        longest = max(range(len(prompts)), key=lambda index: len(prompts[index].ids))
        length = len(prompts[longest].ids)
        if length + wanted > max_length:
            raise ValueError(
                f"{self.records[longest].where}: the prompt has {length} tokens, which leaves no "
                f"room for {wanted} new ones: this model's max_length is {max_length}; lower "
                "--max-new-tokens, or add --truncate-prompt to drop the beginning of long prompts"
            )
        usual = model.generation.most_new_tokens(1, max_length) or USUAL_TOKENS
        return prompts, given or min(usual, max_length - length)

    @contextmanager
    def _open(self) -> Generator[Any]:
        """Opens the partial file to append results after the complete lines of earlier commands."""
        lines = [{"index": index} | result for index, result in self.done.items()]
        whole = "".join(f"{json_text(line)}\n" for line in lines)
        write_whole(self.partial, f"{self.settings()}\n{whole}")
        with self.partial.open("a") as file:
            yield file


def open_files(arguments: GenerateArguments) -> Files:
    """Reads the file of prompts and the results of an interrupted command.

    Args:
        arguments: The arguments of the command, with `prompts` and `out`.

    Raises:
        ValueError: A file cannot be read, a record has no prompt, or --out exists.
    """
    out = arguments.out
    if out is None or arguments.prompts is None:
        raise ValueError("--prompts and --out must be given together")
    check_out(out, ".jsonl")
    if out.exists():
        raise ValueError(f"{out} exists; choose another --out, or delete the file")
    records = list(_read_records(arguments.prompts))
    if not records:
        raise ValueError(f"{arguments.prompts} has no prompts")
    files = Files(arguments, records, out)
    files.resume()
    return files


def _read_records(path: Path) -> Iterator[PromptRecord]:
    """Yields the records of a file of prompts, or of standard input for the path -."""
    if str(path) == "-":
        found = ((_parse(line, n), f"line {n}") for n, line in _numbered_lines())
        name = "standard input"
    else:
        sources = find_records([path]) if path.exists() or str(path).startswith("hf:") else []
        if not sources:
            problem = "is not a file of records" if path.exists() else "does not exist"
            raise ValueError(f"{path} {problem}; give a .jsonl, .json or .parquet file, or -")
        name = str(path)
        found = ((x.fields, x.where) for source in sources for x in source.records())
    first = None
    for fields, place in found:
        record = PromptRecord(fields, f"{name}: {place}")
        _check_record(record)
        first = first or record
        if (record.messages is None) != (first.messages is None):
            raise ValueError(
                f"{record.where} has another form than {first.where}; all prompts must be texts, "
                "or all must be messages"
            )
        yield record


def _numbered_lines() -> Iterator[tuple[int, str]]:
    if sys.stdin.isatty():
        Screen(stderr=True).say("Type one JSON object per line. Ctrl-D ends the input.")
    return ((n, line) for n, line in enumerate(iterate_lines(None), 1) if line.strip())


def _parse(line: str, number: int) -> Any:
    try:
        return parse_json(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"standard input: line {number} is not valid JSON: {error}") from None


def _check_record(record: PromptRecord) -> None:
    """Raises ValueError unless a record has a prompt that a model can continue."""
    fields, where = record
    if not isinstance(fields, dict) or not {"prompt", "messages"} & fields.keys():
        given = ", ".join(map(repr, fields)) if isinstance(fields, dict) else f"{fields!r:.60}"
        raise ValueError(
            f"{where} has {given or 'no fields'}; a record must have 'prompt' or 'messages'"
        )
    for name in (_TEXT, _REASON):
        if name in fields:
            raise ValueError(f"{where} has a field {name!r}, which the command writes; rename it")
    try:
        check_unicode([json_text(fields, ascii_only=False)])
    except (TypeError, ValueError, FloatingPointError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}") from None
    messages, prompt = record.messages, fields.get("prompt")
    if messages is None and (not isinstance(prompt, str) or not prompt):
        raise ValueError(f"{where}: prompt is {prompt!r:.60}; it must be a text or messages")
    if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        raise ValueError(f"{where} ends with an answer; its last message must ask for one")


def encode_prompts(files: Files, generator: TextGenerator) -> list[Prompt]:
    """Encodes all prompts.

    Raises:
        ValueError: A prompt cannot be encoded. The message names its file and line.
    """
    model, tokenizer = generator.model, generator.tokenizer
    encoded = []
    for record in files.records:
        try:
            encoded.append(_encode(record, model, tokenizer))
        except ValueError as error:
            raise ValueError(f"{record.where}: {error}") from None
    texts = (f"{x.fields['prompt']}\n" for x in files.records if x.messages is None)
    print_special(tokenizer, "the prompts", spelled_tokens(tokenizer, texts))
    return encoded


def _encode(record: PromptRecord, model: Any, tokenizer: Tokenizer) -> Prompt:
    if record.messages is None:
        prompt = Prompt(*encode_prompt(model, tokenizer, record.fields["prompt"]))
        _, length = prompt.length
        if prompt.source is not None and not 0 < length <= model.config.longest_source:
            raise ValueError(
                f"the source has {length} tokens; it must have 1 to {model.config.longest_source}"
            )
        return prompt
    if model.config.reads_source:
        raise ValueError("the model translates texts, and has no chat template for messages")
    tools = record.fields.get("tools") or None
    chat = tokenizer.apply_chat_template(record.messages, tools, add_generation_prompt=True)
    return Prompt(chat.ids, None)


def _groups(prompts: list[Prompt], num_samples: int) -> Iterator[list[int]]:
    """Yields the indices of the prompts of each group, the shortest prompts first."""
    order = sorted(range(len(prompts)), key=lambda index: prompts[index].length)
    size = max(1, _GROUP // num_samples)
    for start in range(0, len(order), size):
        yield order[start : start + size]


@dataclass(frozen=True)
class _Call:
    """Model and settings with which all groups are computed.

    Attributes:
        generator: The model and its settings for generation.
        arguments: The arguments of the command.
        stop_tokens: The ids that end a generated text.
        max_new_tokens: The number of tokens to generate.
    """

    generator: TextGenerator
    arguments: GenerateArguments
    stop_tokens: tuple[int, ...]
    max_new_tokens: int

    def run(self, prompts: list[Prompt], number: int) -> tuple[list[dict[str, Any]], int]:
        """Continues the prompts of a group; returns their results and the number of new tokens."""
        import jax

        repeated = [prompt for prompt in prompts for _ in range(self.arguments.num_samples)]
        usual_batch = None if self.arguments.mesh is None else _MESH_BATCH
        sources = [prompt.source[0] for prompt in repeated if prompt.source is not None]
        found = self.generator.generate(
            [prompt.ids for prompt in repeated],
            self.max_new_tokens,
            jax.random.fold_in(jax.random.key(self.arguments.seed), number),
            self.stop_tokens,
            source=sources or None,
            batch_size=self.arguments.batch_size or usual_batch,
        )
        texts = [
            self._read(prompt, ids[:length])
            for prompt, ids, length in zip(
                repeated, found.tokens.tolist(), found.lengths.tolist(), strict=True
            )
        ]
        size = self.arguments.num_samples
        results = [_result(texts[i : i + size]) for i in range(0, len(texts), size)]
        return results, int(found.lengths.sum())

    def _read(self, prompt: Prompt, ids: list[int]) -> tuple[str, str]:
        """Returns the text of new tokens, and why it ended."""
        stream = self.generator.tokenizer.stream(prompt.ids)
        text = stream.push(ids) + stream.flush()
        stop = self.generator.stop_strings
        kept = text if stop is None else stop.cut(text)
        has_ended = bool(ids) and ids[-1] in self.stop_tokens
        has_ended |= kept != text or len(ids) < self.max_new_tokens
        return kept, "stop" if has_ended else "length"


def _result(texts: list[tuple[str, str]]) -> dict[str, Any]:
    """Returns the fields that a record gets: a text, or a list of several samples."""
    if len(texts) == 1:
        return dict(zip((_TEXT, _REASON), texts[0], strict=True))
    return {_TEXT: [text for text, _ in texts], _REASON: [reason for _, reason in texts]}
