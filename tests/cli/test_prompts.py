"""`generate --prompts FILE --out FILE` continues each prompt, in order, and can be resumed."""

import io
import json
import sys

import pytest

import jaxformer as jf
from jaxformer.cli import main, prompts
from tests.cli.test_errors import refused

pytestmark = pytest.mark.slow
GREEDY = ("--temperature", "0", "--max-new-tokens", "6")


def write_prompts(path, number=9, **fields):
    """Writes prompts of different lengths."""
    records = [{"id": n, "prompt": "def f" * (1 + n % 3) + f"{n}", **fields} for n in range(number)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(run, *words):
    return main(["generate", str(run), *map(str, words)])


def test_prompts_from_a_file_give_the_same_texts_as_single_prompts_in_file_order(
    trained, tmp_path, capsys
):
    records = write_prompts(tmp_path / "p.jsonl")
    out = tmp_path / "out.jsonl"
    assert generate(trained, "--prompts", tmp_path / "p.jsonl", "-o", out, *GREEDY) == 0
    assert "9 prompts, " in capsys.readouterr().err
    found = written(out)
    assert [{x: line[x] for x in ("id", "prompt")} for line in found] == records
    for line in found[:3]:
        capsys.readouterr()
        assert generate(trained, line["prompt"], *GREEDY) == 0
        assert capsys.readouterr().out == f"{line['prompt']}{line['generated']}\n"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("more", [(), ("--num-samples", "3")])
def test_an_interrupted_command_writes_the_same_file_when_it_is_repeated(
    more, trained, tmp_path, monkeypatch, capsys
):
    """The second command reads the groups that the first one finished, and computes the others."""
    monkeypatch.setattr(prompts, "_GROUP", 6)
    write_prompts(tmp_path / "p.jsonl", 11)
    words = ("--prompts", tmp_path / "p.jsonl", "--max-new-tokens", "6", *more)
    assert generate(trained, *words, "-o", tmp_path / "whole.jsonl") == 0
    run, calls = prompts._Call.run, []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(prompts._Call, "run", interrupted)
    out = tmp_path / "out.jsonl"
    assert generate(trained, *words, "-o", out) == 130
    partial = tmp_path / "out.jsonl.partial"
    with partial.open("a") as file:
        file.write('{"index": 3, "gen')  # the process was killed within a line
    assert not out.exists()
    capsys.readouterr()
    refused(capsys, ["generate", trained, *words, "-o", out, "--seed", "1"], "other settings")
    number = len(calls)
    assert generate(trained, *words, "-o", out) == 0
    assert "computing the rest" in capsys.readouterr().err
    groups = -(-11 // (6 // (3 if more else 1)))
    assert len(calls) == number + groups - 1
    assert out.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert not partial.exists()
    if more:
        assert all(len(line["generated"]) == 3 for line in written(out))
        assert any(len(set(line["generated"])) > 1 for line in written(out))


def test_generate_answers_each_record_of_messages_until_the_end_of_the_turn(
    trained, tmp_path, capsys, monkeypatch
):
    model, variables, tokenizer = jf.load(trained)
    folder = tmp_path / "model"
    jf.save(folder, model, variables, tokenizer)
    template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    records = [{"messages": [{"role": "user", "content": f"def f{n}"}]} for n in range(3)]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    out = tmp_path / "out.jsonl"
    assert generate(folder, "--prompts", "-", "-o", out, *GREEDY) == 0
    for line, record in zip(written(out), records, strict=True):
        assert line["messages"] == record["messages"]
        asked = line["messages"][0]["content"] + "|"
        capsys.readouterr()
        assert generate(trained, asked, *GREEDY) == 0
        assert capsys.readouterr().out == f"{asked}{line['generated']}\n"


def test_a_stop_string_ends_each_text_and_is_not_written(trained, tmp_path):
    write_prompts(tmp_path / "p.jsonl", 3)
    found = {}
    for name, stop in (("whole", ()), ("stopped", ("--stop", ")"))):
        out = tmp_path / f"{name}.jsonl"
        words = ("--prompts", tmp_path / "p.jsonl", "-o", out, *GREEDY[:2], "--max-new-tokens", "9")
        assert generate(trained, *words, *stop) == 0
        found[name] = written(out)
    for whole, stopped in zip(found["whole"], found["stopped"], strict=True):
        assert stopped["generated"] == whole["generated"].partition(")")[0]
        assert (stopped["finish_reason"] == "stop") == (")" in whole["generated"])
    assert any(")" in whole["generated"] for whole in found["whole"])


def test_too_long_prompts_are_refused_or_lose_their_beginning(trained, tmp_path, capsys):
    write_prompts(tmp_path / "p.jsonl", 2)
    long = {"prompt": "x = 1\n" * 40 + "def f"}
    with (tmp_path / "p.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    out = tmp_path / "out.jsonl"
    words = ("--prompts", tmp_path / "p.jsonl", "-o", out, *GREEDY)
    refused(capsys, ["generate", trained, *words], "p.jsonl: line 3: ", "--truncate-prompt")
    assert not list(tmp_path.glob("out*"))
    assert generate(trained, *words, "--truncate-prompt") == 0
    model, variables, tokenizer = jf.load(trained)
    opening, ids = tokenizer.text_opening, tokenizer.encode(long["prompt"])
    kept = [*opening, *ids[-(model.config.max_length - 6 - len(opening)) :]]
    found = jf.generate(model, variables, [kept], max_new_tokens=6, sampler=jf.Sampler(0.0))
    assert written(out)[2]["generated"] == tokenizer.decode(found.tokens[0])
    capsys.readouterr()
    refused(capsys, ["generate", trained, long["prompt"], *GREEDY], "--truncate-prompt")
    assert generate(trained, long["prompt"], *GREEDY, "--truncate-prompt") == 0
    assert capsys.readouterr().out == f"{long['prompt']}{written(out)[2]['generated']}\n"


BAD = {
    "no prompt": ('{"text": "a"}', "line 1 has 'text'; a record must have 'prompt' or 'messages'"),
    "a number": ('{"prompt": 3}', "line 1: prompt is 3"),
    "an empty prompt": ('{"prompt": ""}', "line 1: prompt is ''"),
    "an answer": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "line 1 ends with an answer",
    ),
    "two forms": ('{"prompt": "a"}\n{"prompt": [{"role": "user"}]}', "line 2 has another form"),
    "a taken field": ('{"prompt": "a", "generated": 1}', "line 1 has a field 'generated'"),
    "no JSON": ("prompt", "line 1 is not valid JSON"),
    "no records": ("", "the file is empty"),
    "no finite number": ('{"prompt": "a", "score": NaN}', "line 1 cannot be written as JSON"),
    "a lone surrogate": ('{"prompt": "a", "id": "\\ud800"}', "line 1 cannot be written as JSON"),
}


@pytest.mark.parametrize("problem", BAD)
def test_invalid_prompt_record_raises_an_error_before_the_model_is_loaded(
    problem, tmp_path, capsys
):
    text, said = BAD[problem]
    (tmp_path / "p.jsonl").write_text(text)
    words = ["--prompts", "p.jsonl", "-o", "out.jsonl"]
    refused(capsys, ["generate", "no-model", *words], said)
    assert not (tmp_path / "out.jsonl").exists()


def test_prompts_flag_requires_an_output_file_that_does_not_exist(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "there.jsonl").write_text("kept")
    words = ["generate", "no-model", "--prompts", "p.jsonl"]
    refused(capsys, words, "--prompts needs --out")
    refused(capsys, [*words, "-o", "there.jsonl"], "there.jsonl exists")
    refused(capsys, [*words, "-o", "out.txt"], "must be a .jsonl file")
    refused(capsys, [*words, "-o", "a.jsonl", "text"], "cannot be combined")
    refused(capsys, ["generate", "no-model", "--prompts", "q.jsonl", "-o", "a.jsonl"], "q.jsonl")
    assert (tmp_path / "there.jsonl").read_text() == "kept"
