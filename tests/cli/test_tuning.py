"""Tests of `jaxformer train records.jsonl --init-from …`: tuning on prompts and conversations."""

import json
from collections import Counter

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.training.run_folders import read_run
from jaxformer.training.tasks import task_class
from jaxformer.training.tasks.tuning import Tuning
from tests.cli.test_errors import files_below, refused

pytestmark = pytest.mark.slow
FEW = "--batch-size 4 --evaluation-records 4 --sample-tokens 4 --warmup-steps 0".split()
FEW += "--steps 6 --evaluate-every 3 --checkpoint-every 3".split()
NAMES = ["f", "g", "h", "k"]


def records(form, number=40):
    for n in range(number):
        question, answer = f"def {NAMES[n % 4]}{n}(x):", f"return {n % 4}"
        if form == "completion":
            yield {"prompt": question, "completion": answer}
        elif form == "preference":
            yield {"prompt": question, "chosen": answer, "rejected": "x"}
        else:
            pair = (("user", question), ("assistant", answer))
            yield {"messages": [{"role": role, "content": text} for role, text in pair]}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for form in ("completion", "messages", "preference"):
        lines = (json.dumps(record) + "\n" for record in records(form))
        (tmp_path / f"{form}.jsonl").write_text("".join(lines))
    return tmp_path


def tune(base, form, out, *words):
    return main(["train", f"{form}.jsonl", *FEW, "--init-from", str(base), "--out", out, *words])


def read_task(out):
    folder = RunFolder(out)
    config = read_run(folder)[1]
    return task_class(config).read(folder, config)


@pytest.mark.parametrize("form", ["completion", "messages"])
@pytest.mark.parametrize("more", [(), ("--lora-rank", "2")])
def test_fine_tuned_model_is_evaluated_on_held_out_records_and_generates_answers(
    form, more, files, trained, capsys
):
    assert tune(trained, form, "out", "--learning-rate", "0.01", *more) == 0
    said = capsys.readouterr().out
    assert "records" in said and "to learn" in said and "token accuracy" in said
    metrics = RunFolder("out").read_metrics()
    losses = [line["held_out_loss"] for line in metrics if "held_out_loss" in line]
    assert len(losses) >= 2 and losses[-1] < losses[0]
    assert 0 <= metrics[-1]["token_accuracy"] <= 1
    (*_, (_, sample)) = RunFolder("out").read_samples()
    task = read_task("out")
    assert isinstance(task, Tuning)
    assert sample.count("  → ") == sample.count("  = ") == min(5, len(task.held_out))
    capsys.readouterr()
    prompt = "def f0(x):"
    assert main(["generate", "out", "--prompt", prompt, "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith(prompt)


@pytest.mark.parametrize("more", [(), ("--lora-rank", "2")])
def test_preference_trained_model_prefers_better_answers_and_training_can_be_resumed(
    more, files, trained, capsys
):
    rate = ("--learning-rate", "0.01", *more)
    assert tune(trained, "preference", "out", *rate) == 0
    said = capsys.readouterr().out
    assert "pairs of answers" in said and "nats per pair" in said and "preference accuracy" in said
    lines = RunFolder("out").read_metrics()
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=1e-4)
    scores = [line for line in lines if "held_out_loss" in line]
    assert scores[-1]["held_out_loss"] < np.log(2) and scores[-1]["preference_accuracy"] > 0.5
    assert main(["train", "--resume", "--out", "out", "--steps", "8"]) == 0
    again = RunFolder("out").read_metrics()
    assert again[-1]["step"] == 8
    task = read_task("out")
    assert task.prepare(RunFolder("out"), None, None).reference["train"].shape == (76,)
    capsys.readouterr()
    assert main(["generate", "out", "--prompt", "def f0(x):", "--max-new-tokens", "4"]) == 0


def test_resume_error_of_preference_training_names_the_missing_answer_score_file(
    files, trained, capsys
):
    assert tune(trained, "preference", "out") == 0
    (files / "out" / "tokens" / "train.scores.npy").unlink()
    refused(capsys, ["train", "--resume", "--out", "out", "--steps", "8"], "train.scores.npy")


def test_fine_tuning_saves_a_default_chat_template_if_the_model_has_none(files, trained, capsys):
    assert tune(trained, "messages", "out") == 0
    assert "no chat template: a plain one is used and saved" in capsys.readouterr().out
    messages = next(records("messages"))["messages"]
    chat = jf.load("out").tokenizer.apply_chat_template(messages)
    assert chat.text.startswith("user:\ndef f0(x):\nassistant:\nreturn 0")
    assert main(["export", "out", "exported"]) == 0
    assert jf.load("exported").tokenizer.apply_chat_template(messages).ids == chat.ids


def test_fine_tuning_formats_records_with_the_given_chat_template(files, trained):
    template = "{% for m in messages %}<\n{{ m.content }}>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<\n{% endif %}"
    (files / "own.jinja").write_text(template)
    assert tune(trained, "messages", "out", "--chat-template", "own.jinja") == 0
    task = read_task("out")
    texts = {task.tokenizer.decode(map(int, x.ids)) for x in map(task.train.__getitem__, range(5))}
    assert all(text.startswith("<\ndef ") and text.endswith(">\n") for text in texts)
    assert (files / "out" / "chat_template.jinja").read_text() == template


def test_fine_tuning_resumed_with_more_steps_ends_at_the_requested_step(files, trained):
    assert tune(trained, "completion", "whole") == 0
    assert tune(trained, "completion", "part", "--steps", "3", "--schedule", "linear") == 0
    assert tune(trained, "completion", "again", "--schedule", "linear") == 0
    assert main(["train", "--resume", "--out", "part", "--steps", "6"]) == 0
    params = [jf.load(out).variables["params"] for out in ("part", "again")]
    metrics = [RunFolder(out).read_metrics() for out in ("part", "again")]
    assert len(params) == 2 and metrics[0][-1]["step"] == metrics[1][-1]["step"] == 6
    first = [next(line["loss"] for line in lines if line["step"] == 1) for lines in metrics]
    assert first[0] == first[1]


def test_train_reports_the_number_of_records_that_were_truncated(files, trained, capsys):
    long = {"prompt": "def f(x):", "completion": "return x * 3 " * 20}
    late = {"prompt": "def g(x): return x * 3 " * 20, "completion": "a"}
    lines = [*records("completion"), *[{**long, "prompt": f"def f{n}("} for n in range(9)], late]
    (files / "completion.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert tune(trained, "completion", "out") == 0
    said = capsys.readouterr().out
    assert "records exceed 32 tokens and were cut at the end" in said
    assert "left out, because their answers begin later" in said
    task = read_task("out")
    assert max(task.train.lengths.max(), task.held_out.lengths.max()) == 33


def test_prompts_are_included_in_the_loss_if_the_user_requests_loss_on_all_tokens(files, trained):
    assert tune(trained, "completion", "out", "--loss-on", "all") == 0
    assert tune(trained, "completion", "some") == 0
    everything, some = read_task("out"), read_task("some")
    assert everything.train.num_targets > some.train.num_targets
    assert everything.train.num_targets == len(everything.train.ids) - len(everything.train)
    np.testing.assert_array_equal(everything.train.lengths.sum(), some.train.lengths.sum())


def test_invalid_fine_tuning_inputs_are_rejected_before_any_file_is_written(files, trained, capsys):
    words = ["train", "completion.jsonl", *FEW, "--out", "out"]
    refused(capsys, words, "--init-from is missing", "completion.jsonl")
    base = ["--init-from", trained]
    refused(capsys, [*words, *base, "--chat-template", "no.jinja"], "no.jinja")
    refused(capsys, [*words, *base, "--loss-on", "some"], "--loss-on", "completions", "all")
    refused(capsys, [*words, *base, "--window-length", "64"], "window_length is 64", "32")
    (files / "one.jsonl").write_text(json.dumps(next(records("completion"))) + "\n")
    refused(capsys, ["train", "one.jsonl", *base, "--out", "out"], "1 different prompts")
    bad = [*records("completion", 3), {"prompt": "def f(x):", "completion": ""}]
    (files / "bad.jsonl").write_text("".join(json.dumps(x) + "\n" for x in bad))
    refused(capsys, ["train", "bad.jsonl", *base, "--out", "out"], "bad.jsonl: line 4", "empty")
    bad = [*records("preference", 3), *records("completion", 1)]
    (files / "mixed.jsonl").write_text("".join(json.dumps(x) + "\n" for x in bad))
    named = "a record must have 'prompt' and 'chosen' and 'rejected'"
    refused(capsys, ["train", "mixed.jsonl", *base, "--out", "out"], "line 4", named)
    refused(capsys, ["train", "preference.jsonl", *base, "--dpo-beta", "0"], "dpo_beta is 0")
    robot = {"messages": [{"role": "robot", "content": "x"}]}
    (files / "robot.jsonl").write_text(json.dumps(robot) + "\n")
    refused(capsys, ["train", "robot.jsonl", *base, "--out", "out"], "line 1", "'robot'")
    assert not (files / "out").exists()


def test_file_weights_determine_how_often_training_records_are_repeated(files, trained, capsys):
    first, second = list(records("completion", 20)), list(records("completion", 40))[20:]
    for name, part in (("first", first), ("second", second)):
        (files / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in part))
    words = ["train", "first.jsonl", "second.jsonl", *FEW, "--init-from", trained]
    refused(capsys, [*words, "--record-weights", "2", "--out", "no"], "--record-weights", "2 files")
    refused(capsys, [*words, "--record-weights", "2", "-1", "--out", "no"], "record_weights")
    assert main([*map(str, words), "--record-weights", "3", "1", "--out", "out"]) == 0
    decode = jf.load("out").tokenizer.decode
    task = read_task("out")
    seen = Counter(decode(map(int, task.train[n].ids)) for n in range(len(task.train)))
    held_out = [decode(map(int, task.held_out[n].ids)) for n in range(len(task.held_out))]
    wanted = {x["prompt"] + x["completion"]: 3 for x in first}
    wanted |= {x["prompt"] + x["completion"]: 1 for x in second}
    assert len(set(held_out)) == len(held_out)
    assert seen == {text: wanted[text] for text in wanted if text not in held_out}


def test_fine_tuning_leaves_the_base_model_files_unchanged(files, trained):
    before = files_below(trained)
    assert tune(trained, "messages", "out", "--lora-rank", "2") == 0
    assert files_below(trained) == before


def test_train_help_with_init_from_shows_the_fine_tuning_flags(files, trained, capsys):
    with pytest.raises(SystemExit):
        main(["train", "completion.jsonl", "--init-from", str(trained), "--help"])
    assert "--loss-on" in capsys.readouterr().out
