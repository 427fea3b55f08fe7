"""`jaxformer train --from`: runs that begin from a checkpoint, with all weights or an adapter."""

import json
import shutil

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.models.config import KINDS
from jaxformer.training import loop
from jaxformer.training.run_config import read_run
from jaxformer.training.tasks import task_of
from tests.cli.test_errors import files_below, refused
from tests.cli.test_kinds import MEASURES, inputs, train  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

SCHEDULE = "--steps 4 --evaluate-every 2 --checkpoint-every 2 --warmup-steps 0".split()
OF_TEXT = "--batch-size 4 --evaluation-windows 4 --sample-tokens 8".split()
OF_PAIRS = "--batch-tokens 96 --evaluation-pairs 3".split()
FEW = {False: OF_TEXT, True: OF_PAIRS}
STILL = "--learning-rate 1e-30 --weight-decay 0".split()  # nothing is learnt


def tune(kind, inputs, base, out, *words):  # noqa: F811
    given = [*inputs(kind)[:2], *SCHEDULE] if MEASURES[kind] == "bleu" else ["text.py", *SCHEDULE]
    few = FEW[MEASURES[kind] == "bleu"]
    return main(["train", *given, *few, "--from", base, "--out", out, *words])


def params_of(folder):
    return jf.load(folder).variables["params"]


def scored(run, words, capsys):
    """What `evaluate` says."""
    capsys.readouterr()
    assert main(["evaluate", run, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def held_out_of(run, tmp_path):
    """The words that name what a run holds out, for `evaluate`."""
    folder = RunFolder(run)
    _, config = read_run(folder)
    task = task_of(config).read(folder, config)
    if hasattr(task, "held_out"):
        text = [[task.tokenizer.decode(side.tolist()) for side in x] for x in task.held_out]
        (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(x) + "\n" for x in text))
        return ["--source", "held_out.jsonl"]
    (ids,) = task.data.held_out_documents
    (tmp_path / "held_out.py").write_text(task.tokenizer.decode(ids.tolist()))
    return ["held_out.py"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_where_the_checkpoint_is(kind, inputs, tmp_path, capsys):  # noqa: F811
    """From a run and from a saved folder, with all weights and with an adapter: while nothing is
    learnt the held-out loss is what `evaluate` gives for the checkpoint on the same text; and the
    tokenizer is the checkpoint's."""
    assert train(kind, inputs, "base") == 0
    model, variables, tokenizer = jf.load("base")
    jf.save("saved", model, variables, tokenizer)
    for base, words in (("base", ["--lora-rank", "2"]), ("saved", [])):
        shutil.rmtree("tuned", ignore_errors=True)
        assert tune(kind, inputs, base, "tuned", *STILL, *words) == 0
        *_, last = (x for x in RunFolder("tuned").read_metrics() if "held_out_loss" in x)
        wanted = scored("base", held_out_of("tuned", tmp_path), capsys)
        assert last["scored"] == wanted["tokens"]
        assert last["held_out_loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert jf.load("tuned").tokenizer.fingerprint == tokenizer.fingerprint
        assert jf.load("tuned").model.config == model.config


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_a_model_for_every_verb(kind, inputs, tmp_path, capsys):  # noqa: F811
    """What training scored last is what `evaluate` says of the merged weights; its checkpoints have
    the adapter alone; saved, it is a model like any other; the base is as it was."""
    assert train(kind, inputs, "base") == 0
    before = files_below(tmp_path / "base")
    assert tune(kind, inputs, "base", "tuned", "--lora-rank", "2", "--learning-rate", "0.01") == 0
    *_, last = (x for x in RunFolder("tuned").read_metrics() if "held_out_loss" in x)
    words = held_out_of("tuned", tmp_path)
    found = scored("tuned", words, capsys)
    assert found["loss"] == pytest.approx(last["held_out_loss"], rel=1e-5)
    assert found["loss"] != pytest.approx(scored("base", words, capsys)["loss"], rel=1e-4)
    jf.save("saved", *jf.load("tuned"))
    assert files_below(tmp_path / "base") == before
    assert scored("saved", words, capsys) == found


@pytest.mark.parametrize("words", [[], ["--lora-rank", "2", "--average-decay", "0.9"]])
def test_a_tuned_run_ended_goes_on_as_if_it_had_not_been(
    words,
    inputs,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """Bit for bit, the average too; with all weights learnt, without the checkpoint it began
    from."""
    assert train("decoder", inputs, "base") == 0
    words = [*words, "--dropout", "0.2", "--learning-rate", "0.01"]
    assert tune("decoder", inputs, "base", "whole", *words) == 0
    updates = loop.updates

    def ending(*arguments):
        for number, updated in enumerate(updates(*arguments)):
            if number == 1:
                raise RuntimeError("ended")
            yield updated

    with monkeypatch.context() as patched:
        patched.setattr(loop, "updates", ending)
        assert tune("decoder", inputs, "base", "ended", *words) == 1
    if "--lora-rank" not in words:
        shutil.rmtree("base")
        (tmp_path / "text.py").unlink()
    assert main(["train", "--resume", "--out", "ended"]) == 0
    jax.tree.map(np.testing.assert_array_equal, *map(params_of, ("whole", "ended")))
    whole, ended = (RunFolder(name).read_metrics() for name in ("whole", "ended"))
    for name in ("step", "loss", "held_out_loss"):
        assert [x.get(name) for x in whole] == [x.get(name) for x in ended]


def test_a_run_is_used_by_its_average(inputs, tmp_path, capsys):  # noqa: F811
    """What is loaded is what was scored, and not the parameters that go on being learnt."""
    assert train("decoder", inputs, "base") == 0
    how = ["--learning-rate", "0.01", "--steps", "4"]
    assert tune("decoder", inputs, "base", "averaged", *how, "--average-decay", "0.9") == 0
    assert tune("decoder", inputs, "base", "plain", *how) == 0
    losses = [
        [x["loss"] for x in RunFolder(name).read_metrics() if "loss" in x]
        for name in ("averaged", "plain")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    *_, last = (x for x in RunFolder("averaged").read_metrics() if "held_out_loss" in x)
    words = held_out_of("averaged", tmp_path)
    found = scored("averaged", words, capsys)["loss"]
    assert found == pytest.approx(last["held_out_loss"], rel=1e-5)
    assert found != pytest.approx(scored("plain", words, capsys)["loss"], rel=1e-4)


def test_what_does_not_fit_is_refused(inputs, trained, tmp_path, capsys):  # noqa: F811
    """Before anything is made: another kind, shape or vocabulary; a map that is not there."""
    base = str(trained)
    (tmp_path / "empty").mkdir()
    jf.save("mute", *jf.load(base)[:2])
    begin = ["train", "text.py", *OF_TEXT, "--out", "tuned", "--from"]
    for words, named in (
        ([base, "--model", "encoder"], ["--model is 'encoder'", "is of kind decoder"]),
        ([base, "--vocab-size", "500"], ["--vocab-size is 500", "has 300", "--dropout"]),
        ([base, "--num-layers", "3"], ["--num-layers is 3", "has 2"]),
        ([base, "--preset", "gpt2-124m"], ["preset is 'gpt2-124m'", "tiny"]),
        ([base, "--lora-rank", "2", "--lora-maps", "gate"], ["'gate'", "query", "up"]),
        ([base, "--lora-rank", "99"], ["lora_rank is 99", "at most 32"]),
        (["mute"], ["mute", "has no tokenizer", "tokenizer.json"]),
        (["empty"], ["config.json is not there"]),
        (["nowhere"], ["nowhere is no folder"]),
    ):
        refused(capsys, [*begin, *words], *named)
        assert not (tmp_path / "tuned").exists()
    refused(capsys, ["train", "text.py", "--lora-rank", "2"], "--lora-rank is 2", "no --from")
    assert main([*begin, base, *SCHEDULE]) == 0
    refused(capsys, ["train", "--resume", "--out", "tuned", "--from", base], "--from was given")
    refused(capsys, ["export", "tuned", "out", "--adapter"], "tuned has no adapter")


def test_an_adapter_stays_what_it_is_when_its_run_goes_on(inputs, tmp_path, capsys):  # noqa: F811
    """Or is deleted: an adapter of an adapter too; and it can go on itself."""
    assert train("decoder", inputs, "base") == 0
    assert tune("decoder", inputs, "base", "tuned", "--lora-rank", "2") == 0
    assert tune("decoder", inputs, "tuned", "twice", "--lora-rank", "2") == 0
    before = [params_of(run) for run in ("tuned", "twice")]
    assert main(["train", "--resume", "--out", "base", "--steps", "12"]) == 0
    assert main(["train", "--resume", "--out", "tuned", "--steps", "4"]) == 0
    shutil.rmtree("base")
    for run, params in zip(("tuned", "twice"), before, strict=True):
        jax.tree.map(np.testing.assert_array_equal, params_of(run), params)
    assert main(["train", "--resume", "--out", "twice", "--steps", "6"]) == 0


def test_a_folder_that_an_adapter_is_of_is_noticed_when_it_changes(
    inputs,  # noqa: F811
    tmp_path,
    capsys,
):
    assert train("decoder", inputs, "base") == 0
    model, variables, tokenizer = jf.load("base")
    jf.save("saved", model, variables, tokenizer)
    assert tune("decoder", inputs, "saved", "tuned", "--lora-rank", "2") == 0
    shutil.rmtree("saved")
    generate = ["generate", "tuned", "--prompt", "x"]
    refused(capsys, generate, tmp_path / "saved", "is not there", "config.json")
    jf.save("saved", model, jax.tree.map(lambda x: x + 1, variables), tokenizer)
    refused(capsys, generate, tmp_path / "saved", "has changed")


def test_an_exported_folder_is_begun_from_too(inputs, tmp_path, capsys):  # noqa: F811
    """In Hugging Face's format, whose tokenizer says its own ids; shorter windows are allowed to
    positions that have been learnt."""
    assert train("decoder", inputs, "base") == 0
    assert main(["export", "base", "theirs"]) == 0
    words = [*STILL, "--lora-rank", "2", "--window-length", "16"]
    assert tune("decoder", inputs, "theirs", "tuned", *words) == 0
    *_, last = (x for x in RunFolder("tuned").read_metrics() if "held_out_loss" in x)
    found = scored("theirs", held_out_of("tuned", tmp_path), capsys)
    assert last["held_out_loss"] == pytest.approx(found["loss"], rel=1e-5)
    assert main(["export", "tuned", "again"]) == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "gpt2"
