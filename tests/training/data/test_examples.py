"""Records become token ids with a mask of the tokens to learn."""

import json
from collections import Counter

import pytest

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.chat.plain import PLAIN_TEMPLATE
from jaxformer.artifacts.tokenizer_copies import with_chat_template
from jaxformer.training.data.examples import (
    FORMS,
    encode_completion,
    encode_text,
    find_form,
    has_messages,
    needs_tuning,
    read_examples,
    repeat_by_weight,
    split_texts,
)
from tests.artifacts.chat import chats
from tests.errors import error_of

PLAIN = with_chat_template(
    ByteTokenizer.train(["the tide came in, 12 + 3 = 15"] * 9, 290), PLAIN_TEMPLATE
)
USER = {"role": "user", "content": "the tide"}
ANSWER = {"role": "assistant", "content": "came in"}
RECORDS = {
    "messages": {"messages": [USER, ANSWER]},
    "messages and tools": {"messages": [USER, ANSWER], "tools": chats.TOOLS},
    "completion": {"prompt": "the tide", "completion": " came in"},
    "chat completion": {"prompt": [USER], "completion": [ANSWER]},
    "text": {"text": "the tide came in"},
}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def learnt(tokenizer, example):
    """Returns the text of the tokens to learn."""
    pairs = zip(example.ids, example.mask, strict=True)
    return tokenizer.decode([token for token, is_learnt in pairs if is_learnt])


@pytest.mark.parametrize("name", RECORDS)
def test_targets_of_a_record_are_its_answer_and_the_end_of_text(name, tmp_path):
    (text,) = read_examples([write(tmp_path / "a.jsonl", RECORDS[name])], PLAIN)
    (example,) = text.examples
    assert learnt(PLAIN, example).strip() == {"text": "the tide came in"}.get(name, "came in")
    last = [x for x, is_learnt in zip(example.ids, example.mask, strict=True) if is_learnt]
    assert PLAIN.end_of_text in last
    (everything,) = read_examples([tmp_path / "a.jsonl"], PLAIN, learn_all=True)
    assert all(everything.examples[0].mask) and list(everything.examples[0].ids) == list(
        example.ids
    )


def test_prompt_is_tokenized_separately_from_its_completion():
    """A model that answers reads the tokens of the prompt alone."""
    whole = PLAIN.encode("the ti" + "de")
    assert whole[: len(PLAIN.encode("the ti"))] != PLAIN.encode("the ti")
    example = encode_completion(PLAIN, "the ti", "de")
    expected = [*PLAIN.encode("the ti"), *PLAIN.encode("de"), PLAIN.end_of_text]
    assert list(example.ids) == [*PLAIN.text_opening, *expected]
    assert learnt(PLAIN, example) == "de"


@pytest.mark.parametrize("answers", [("completion",), ("chosen", "rejected")])
def test_chat_template_receives_the_tools_of_a_record(answers, tmp_path):
    template = "{{ tools | tojson if tools else '' }}" + PLAIN_TEMPLATE
    tokenizer = with_chat_template(PLAIN, template)
    record = {"prompt": [USER], "tools": chats.TOOLS, **{key: [ANSWER] for key in answers}}
    path = write(tmp_path / "a.jsonl", record)
    (text,) = read_examples([path], tokenizer, forms=FORMS)
    assert len(text.examples) == len(answers)
    assert all("Adds numbers" in tokenizer.decode(x.ids) for x in text.examples)
    assert all(learnt(tokenizer, x).strip() == "came in" for x in text.examples)


def test_every_token_of_a_text_record_is_a_target():
    example = encode_text(PLAIN, "the tide")
    assert all(example.mask) and example.num_targets == len(example.ids) - 1


def test_form_of_a_training_record_is_recognized_by_its_fields():
    assert find_form({"prompt": "a", "completion": "b", "text": "c"}) == "prompt and completion"
    assert find_form({"messages": [], "prompt": "a"}) == "messages"
    assert find_form({"prompt": "a"}) is None and find_form(["text"]) is None


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", RECORDS)
def test_records_are_recognized_in_jsonl_and_json_and_parquet_files(name, suffix, tmp_path):
    path, record = tmp_path / f"a.{suffix}", RECORDS[name]
    if suffix == "jsonl":
        write(path, record, record)
    elif suffix == "json":
        path.write_text(json.dumps([record, record]))
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([record, record]), path)
    assert needs_tuning([path]) == (name != "text")
    assert has_messages([path]) == ("messages" in name or name == "chat completion")
    lines = write(tmp_path / "b.jsonl", record)
    (expected,) = read_examples([lines], PLAIN)
    assert list(read_examples([path], PLAIN)) == [expected] * 2


def test_only_files_with_records_are_recognized_as_fine_tuning_data(tmp_path):
    (tmp_path / "a.txt").write_text("the tide")
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl").write_text("{")
    for name in ("a.txt", "b.jsonl", "c.jsonl"):
        assert not needs_tuning([tmp_path / name])
    assert "has no records" in error_of(lambda: list(read_examples([tmp_path / "a.txt"], PLAIN)))


WRONG = {
    "no known form": ({"question": "a"}, "has 'question'; a record must have 'messages'; or"),
    "only a prompt": ({"prompt": "a"}, "has 'prompt'; a record must have"),
    "a list": (["a"], "a record must have"),
    "no completion": ({"prompt": "a", "completion": ""}, "the completion is empty"),
    "no prompt": ({"prompt": "", "completion": "a"}, "the prompt is empty"),
    "a number": ({"prompt": "a", "completion": 3}, "the completion is 3; prompt and completion"),
    "two types": ({"prompt": "a", "completion": [ANSWER]}, "the completion is [{'role'"),
    "no messages": ({"messages": []}, "at least one message"),
    "an empty answer": ({"messages": [USER, {**ANSWER, "content": " "}]}, "message 2 (assistant)"),
    "an unknown role": ({"messages": [{**USER, "role": "robot"}]}, "the role 'robot'"),
    "no answer": ({"messages": [USER]}, "has nothing to learn"),
    "an empty text": ({"text": ""}, "the text is ''"),
}


@pytest.mark.parametrize("name", WRONG)
def test_error_for_an_invalid_record_names_file_and_line(name, tmp_path):
    record, reason = WRONG[name]
    path = write(tmp_path / "a.jsonl", RECORDS["completion"], record)
    message = error_of(lambda: list(read_examples([path], PLAIN)))
    assert f"{path}: line 2" in message and reason in message


def test_records_are_repeated_in_proportion_to_the_weight_of_their_file(tmp_path):
    """Fractions are drawn by chance, so their number is close to the expected one."""
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", *({"text": f"{name} {n}"} for n in range(400)))
    paths, weights = [tmp_path / f"{name}.jsonl" for name in "abc"], (2.0, 0.25, 1.5)
    texts = list(read_examples(paths, PLAIN, weights=weights))
    assert [text.weight for text in texts[::400]] == list(weights)
    repeated = repeat_by_weight(texts, 0)
    counts = Counter(text.question for text in repeated)
    assert {counts[f"a {n}"] for n in range(400)} == {2}
    assert {counts[f"b {n}"] for n in range(400)} == {0, 1}
    assert {counts[f"c {n}"] for n in range(400)} == {1, 2}
    assert 60 <= sum(counts[f"b {n}"] for n in range(400)) <= 140
    assert 540 <= sum(counts[f"c {n}"] for n in range(400)) <= 660
    assert repeat_by_weight(texts, 0) == repeated != repeat_by_weight(texts, 1)


def test_records_with_the_same_prompt_are_in_the_same_split(tmp_path):
    records = [{"prompt": f"question {n % 10}", "completion": str(n)} for n in range(60)]
    texts = list(read_examples([write(tmp_path / "a.jsonl", *records)], PLAIN))
    train, held_out = split_texts(texts, 0.2)
    prompts = [{text.question for text in part} for part in (train, held_out)]
    assert not prompts[0] & prompts[1] and len(train) + len(held_out) == 60
    assert 6 <= len(held_out) <= 18
    same = texts[:1] * 3
    assert "at least 2" in error_of(split_texts, same, None)
