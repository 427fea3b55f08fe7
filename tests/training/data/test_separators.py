"""A written end-of-text token separates documents; a text that only mentions it is not split."""

import gzip
import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.models.config import DecoderConfig
from jaxformer.training.config import Inputs, TextTraining
from jaxformer.training.data import documents
from jaxformer.training.data.corpus import read_documents
from jaxformer.training.data.separators import divided
from jaxformer.training.screen import Screen
from jaxformer.training.tasks.text import TextTask, read_data

END = "<|endoftext|>"
MODEL = DecoderConfig(vocab_size=257, max_length=16, num_layers=1, embed_dim=8, num_heads=1)
STORIES = [f"Story {number}.\nIt had two lines.\n" for number in range(30)]


def texts_of(path, **options):
    return [document.text for document in read_documents([path], **options)[0]]


def of(*texts, inline=True):
    """Returns the parts of a text, without blank parts."""
    return [text for text, _ in divided(texts, inline=inline) if text.strip()]


LINES = st.sampled_from(["one\n", "two words\n", "\n", "x", f"{END}\n", f"  {END} \r\n", f"a{END}"])


@given(st.lists(LINES).map("".join), st.booleans(), st.integers(1, 40))
def test_splitting_at_end_of_text_is_independent_of_chunk_sizes(text, inline, size):
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    whole = list(divided([text], inline=inline))
    assert list(divided(parts, inline=inline)) == whole
    if not inline:
        lines = re.sub(rf"(?m)^[ \t]*{re.escape(END)}[ \t]*\r?(\n|\Z)", "\0", text)
        lines = re.sub(rf"\A\s*{re.escape(END)}|{re.escape(END)}\s*\Z", "\0", lines)
        assert [part for part in lines.split("\0") if part.strip()] == of(text, inline=False)


SEPARATE = [
    (f"a.\n{END}\nb.\n", ["a.\n", "b.\n"]),
    (f"a.\r\n {END} \r\nb.", ["a.\r\n", "b."]),
    (f"a.{END}B.{END}", ["a.", "B."]),
    (f"a.\n{END}B {END}\nC.", ["a.\n", "B ", "C."]),
    (f"a . {END} b .", ["a . ", " b ."]),
    (f'"A," he said."{END}"B."', ['"A," he said."', '"B."']),
    (f"{END}a{END}{END}\n\n{END}b\n", ["a", "b\n"]),
    ("a.\n</s>\nb </s> c</s>", ["a.\n", "b </s> c"]),
    ("a.\n<eos>\nb.\n[EOS]\nc.", ["a.\n", "b.\n", "c."]),
]
MENTIONS = [
    f'END = "{END}"\n',
    f"tokenizer.encode('{END}')\n",
    f"texts end with `{END}`, as in GPT-2",
    f"It ends with {END} tokens, or with {END}.",
    f"({END})",
    f'{{"eos": "{END}", "x": 1}}',
    "<p>an <s>old</s> word</p> <eos> x",
    f"{END[:-1]} and {END[1:]}",
]


@pytest.mark.parametrize("text, expected", SEPARATE)
def test_end_of_text_token_in_a_text_file_separates_documents(text, expected, tmp_path):
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert of(text) == expected
    assert texts_of(tmp_path / "a.txt", drop_copies=False) == expected
    assert texts_of(tmp_path / "b.txt.gz", drop_copies=False) == expected


@pytest.mark.parametrize("text", MENTIONS)
def test_a_text_that_mentions_the_end_of_text_token_is_not_split(text):
    text = f"some words\n{text} more\nand words\n"
    assert of(text) == of(text, inline=False) == [text]


@pytest.mark.parametrize("name", ["a.py", "b.md", "c.html", "d.rs.gz"])
def test_code_and_markup_files_are_not_split_at_end_of_text_tokens(name, tmp_path):
    text = f'x = """\n{END}\n"""\ny = "a{END}B"\n'
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    assert texts_of(tmp_path / name) == [text]


def test_end_of_text_token_splits_a_record_only_at_the_ends_of_the_record_or_alone_on_a_line(
    tmp_path,
):
    records = [f"{END}a{END}", f"b\n{END}\nc", f"d{END}E", ""]
    lines = [json.dumps({"text": text}) + "\n" for text in records]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    expected = ["a", "b\n", "c", f"d{END}E"]
    assert texts_of(tmp_path / "a.jsonl") == expected
    assert texts_of(tmp_path / "a.jsonl", drop_copies=False) == [*expected, ""]


def test_end_of_text_token_across_two_chunks_of_a_file_is_found(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(f"\n{END}\n".join(STORIES))
    expected = texts_of(tmp_path / "a.txt")
    assert expected == [f"{story}\n" for story in STORIES[:-1]] + STORIES[-1:]
    for size in (7, 16, 29, 64):
        monkeypatch.setattr(documents, "PIECE_BYTES", size)
        assert texts_of(tmp_path / "a.txt") == expected


def test_every_document_of_a_split_text_begins_and_ends_with_end_of_text(tmp_path):
    """In both parts, every document of a dump begins and ends with the end-of-text token."""
    (tmp_path / "a.txt").write_text(END.join(STORIES) + f'the "{END}" token')
    folder, said = RunFolder(tmp_path / "run"), io.StringIO()
    config, screen = TextTraining(model=MODEL, validation_fraction=0.5), Screen(file=said)
    gathered = TextTask.gather(Inputs((tmp_path / "a.txt",)), config, screen)
    TextTask.write(folder, config, gathered, screen)
    data = read_data(folder)
    assert isinstance(data.tokenizer, ByteTokenizer)
    texts = [
        data.tokenizer.decode(ids[1:].tolist())
        for stream in (data.train, data.held_out)
        for ids in stream.split()
        if ids[0] == data.tokenizer.end_of_text
    ]
    assert sorted(texts) == sorted([*STORIES[:-1], f'{STORIES[-1]}the "{END}" token'])
    assert f"{END} (29); the separators split 1 file into 30 documents" in said.getvalue()
    assert "1 special token is spelled out in the text" in said.getvalue()


@pytest.mark.slow
def test_evaluate_treats_text_between_end_of_text_tokens_as_separate_documents(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(f"{END}\n".join(STORIES))
    (tmp_path / "b").mkdir()
    for number, story in enumerate(STORIES):
        (tmp_path / "b" / f"{number:02}.txt").write_text(story)
    run = str(tmp_path / "run")
    sizes = ["--max-length=16", "--embed-dim=8", "--num-heads=1", "--num-layers=1"]
    command = ["train", str(tmp_path / "b"), f"--out={run}", *sizes, "--vocab-size=257"]
    assert main([*command, "--batch-size=1", "--steps=1"]) == 0
    capsys.readouterr()
    scores = []
    for path in ("a.txt", "b"):
        assert main(["evaluate", run, str(tmp_path / path), "--json"]) == 0
        scores.append(json.loads(capsys.readouterr().out))
    assert scores[0] == scores[1] and scores[0]["documents"] == 30
