"""Tests of `jaxformer train --init-from`: fine-tuning of all weights or of a LoRA adapter."""

import json
import shutil

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.models.config import KINDS
from jaxformer.training.loop import Training
from jaxformer.training.run_folders import read_run
from jaxformer.training.tasks import task_class
from tests.cli.test_errors import files_below, refused
from tests.cli.test_kinds import MEASURES, inputs, train  # noqa: F401 (a fixture)
from tests.slow import mostly_rare

pytestmark = pytest.mark.slow

SCHEDULE = "--steps 4 --evaluate-every 2 --checkpoint-every 2 --warmup-steps 0".split()
OF_TEXT = "--batch-size 4 --evaluation-windows 4 --sample-tokens 8".split()
OF_PAIRS = "--batch-tokens 96 --evaluation-pairs 3".split()
FEW = {False: OF_TEXT, True: OF_PAIRS}
STILL = "--learning-rate 1e-30 --weight-decay 0".split()  # the weights do not change


def tune(kind, inputs, base, out, *words):  # noqa: F811
    given = [*inputs(kind)[:2], *SCHEDULE] if MEASURES[kind] == "bleu" else ["text.py", *SCHEDULE]
    few = FEW[MEASURES[kind] == "bleu"]
    return main(["train", *given, *few, "--init-from", base, "--out", out, *words])


def params_of(folder):
    return jf.load(folder).variables["params"]


def scored(run, words, capsys):
    """Returns the scores of `evaluate`."""
    capsys.readouterr()
    assert main(["evaluate", run, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def held_out_of(run, tmp_path):
    """Writes the held-out data of a run to a file and returns the arguments for `evaluate`."""
    folder = RunFolder(run)
    _, config = read_run(folder)
    task = task_class(config).read(folder, config)
    if hasattr(task, "held_out"):
        text = [[task.tokenizer.decode(side.tolist()) for side in x] for x in task.held_out]
        (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(x) + "\n" for x in text))
        return ["--source", "held_out.jsonl"]
    (ids,) = task.data.held_out_documents
    (tmp_path / "held_out.py").write_text(task.tokenizer.decode(ids.tolist()))
    return ["held_out.py"]


@pytest.mark.parametrize("kind", mostly_rare(KINDS, "decoder"))
def test_fine_tuning_starts_from_the_checkpoint(kind, inputs, tmp_path, capsys):  # noqa: F811
    """The held-out loss without learning is that of `evaluate` for the checkpoint on the same text.

    It is tested from a run and from a saved model, with all weights and with an adapter. The
    tokenizer is that of the checkpoint.
    """
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


@pytest.mark.parametrize("kind", mostly_rare(KINDS, "decoder"))
def test_an_adapter_and_the_merged_weights_have_equal_losses(kind, inputs, tmp_path, capsys):  # noqa: F811
    """`evaluate` on the merged weights gives the last score of training.

    A saved copy gives the same scores, and the base run is unchanged.
    """
    assert train(kind, inputs, "base") == 0
    before = files_below(tmp_path / "base")
    assert tune(kind, inputs, "base", "tuned", "--lora-rank", "2", "--learning-rate", "0.01") == 0
    *_, last = (x for x in RunFolder("tuned").read_metrics() if "held_out_loss" in x)
    words = held_out_of("tuned", tmp_path)
    found = scored("tuned", words, capsys)
    assert found["loss"] == pytest.approx(last["held_out_loss"], rel=1e-5)
    assert found["loss"] != pytest.approx(scored("base", words, capsys)["loss"], rel=1e-6)
    jf.save("saved", *jf.load("tuned"))
    assert files_below(tmp_path / "base") == before
    assert scored("saved", words, capsys) == found


@pytest.mark.parametrize("words", [[], ["--lora-rank", "2", "--ema-decay", "0.9"]])
def test_an_interrupted_fine_tuning_resumes_exactly(
    words,
    inputs,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """The result is equal bit for bit, also with averaged weights.

    A run that trains all weights resumes without the checkpoint it started from.
    """
    assert train("decoder", inputs, "base") == 0
    words = [*words, "--dropout", "0.2", "--learning-rate", "0.01"]
    assert tune("decoder", inputs, "base", "whole", *words) == 0
    update = Training._update

    def ending(training, step):
        if training.step == 1:
            raise RuntimeError("ended")
        update(training, step)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "_update", ending)
        assert tune("decoder", inputs, "base", "ended", *words) == 1
    if "--lora-rank" not in words:
        shutil.rmtree("base")
        (tmp_path / "text.py").unlink()
    assert main(["train", "--resume", "--out", "ended"]) == 0
    jax.tree.map(np.testing.assert_array_equal, *map(params_of, ("whole", "ended")))
    whole, ended = (RunFolder(name).read_metrics() for name in ("whole", "ended"))
    for name in ("step", "loss", "held_out_loss"):
        assert [x.get(name) for x in whole] == [x.get(name) for x in ended]


def test_fine_tuning_loads_the_averaged_weights(inputs, tmp_path, capsys):  # noqa: F811
    """Loading returns the averaged weights, which were scored, not the weights being trained."""
    assert train("decoder", inputs, "base") == 0
    how = ["--learning-rate", "0.01", "--steps", "4"]
    assert tune("decoder", inputs, "base", "averaged", *how, "--ema-decay", "0.9") == 0
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


def test_fine_tuning_refuses_incompatible_settings(inputs, trained, tmp_path, capsys):  # noqa: F811
    """Another kind, shape or vocabulary, or an unknown layer, is refused before files are made."""
    base = str(trained)
    (tmp_path / "empty").mkdir()
    jf.save("mute", *jf.load(base)[:2])
    begin = ["train", "text.py", *OF_TEXT, "--out", "tuned", "--init-from"]
    for words, named in (
        (
            [base, "--model", "encoder"],
            ["--model is 'encoder'", "has a model of the architecture decoder"],
        ),
        ([base, "--vocab-size", "500"], ["--vocab-size is 500", "has 300", "--dropout"]),
        ([base, "--num-layers", "3"], ["--num-layers is 3", "has 2"]),
        ([base, "--preset", "gpt2-124m"], ["preset is 'gpt2-124m'", "tiny"]),
        ([base, "--lora-rank", "2", "--lora-target-modules", "gate"], ["'gate'", "query", "up"]),
        ([base, "--lora-rank", "99"], ["lora_rank is 99", "at most 32"]),
        (["mute"], ["mute", "has no tokenizer", "tokenizer.json"]),
        (["empty"], ["config.json does not exist"]),
        (["nowhere"], ["nowhere does not exist"]),
    ):
        refused(capsys, [*begin, *words], *named)
        assert not (tmp_path / "tuned").exists()
    alone = ["train", "text.py", "--lora-rank", "2"]
    refused(capsys, alone, "--lora-rank is 2", "--init-from is missing")
    assert main([*begin, base, *SCHEDULE]) == 0
    refused(
        capsys,
        ["train", "--resume", "--out", "tuned", "--init-from", base],
        "--init-from has no effect with --resume",
    )
    refused(capsys, ["export", "tuned", "out", "--adapter"], "tuned has no LoRA adapter")


def test_adapter_is_unchanged_if_its_base_run_is_trained_or_deleted(inputs, tmp_path, capsys):  # noqa: F811
    """Deleting the base run does not change it either; the same holds for an adapter of an adapter.

    Both can be trained further.
    """
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


def test_a_changed_base_folder_of_an_adapter_is_detected(
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
    refused(capsys, generate, tmp_path / "saved", "does not exist", "config.json")
    jf.save("saved", model, jax.tree.map(lambda x: x + 1, variables), tokenizer)
    refused(capsys, generate, tmp_path / "saved", "has changed")


def test_fine_tuning_starts_from_an_exported_folder(inputs, tmp_path, capsys):  # noqa: F811
    """The folder in Hugging Face format names its special ids.

    Windows may be shorter than the table of learned positions.
    """
    assert train("decoder", inputs, "base") == 0
    assert main(["export", "base", "theirs"]) == 0
    words = [*STILL, "--lora-rank", "2", "--window-length", "16"]
    assert tune("decoder", inputs, "theirs", "tuned", *words) == 0
    *_, last = (x for x in RunFolder("tuned").read_metrics() if "held_out_loss" in x)
    found = scored("theirs", held_out_of("tuned", tmp_path), capsys)
    assert last["held_out_loss"] == pytest.approx(found["loss"], rel=1e-5)
    assert main(["export", "tuned", "again"]) == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "gpt2"
