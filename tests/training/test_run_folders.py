"""Names of run folders, and how --resume finds the run to continue."""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxformer.artifacts.files import next_free
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main, train
from jaxformer.training.config import Inputs
from jaxformer.training.presets import training_preset
from jaxformer.training.run_folders import locked, newest_unfinished, run_name, write_run

NAMES = [
    ((), {}, "decoder", "stdlib"),
    ((), {}, "encoder", "stdlib-encoder"),
    (("tinyshakespeare.txt",), {}, "decoder", "tinyshakespeare"),
    (("/data/tinyshakespeare.txt.gz",), {}, "recurrent", "tinyshakespeare-recurrent"),
    (("my.txt", "more/"), {}, "decoder", "my"),
    (("hf:owner/name",), {}, "decoder", "name"),
    (("hf:owner/name/subset:train",), {}, "decoder", "name-subset"),
    ((), {"source": "train.en.gz"}, "encoder-decoder", "train-encoder-decoder"),
    (("v1.2 of März.txt",), {}, "decoder", "v1.2-of-März"),
    ((".hidden",), {}, "decoder", "hidden"),
    (("/",), {}, "decoder", "text"),
    (("nul.txt",), {}, "decoder", "text-nul"),
]


def _inputs(text=(), source=None):
    return Inputs(tuple(map(Path, text)), source and Path(source))


@pytest.mark.parametrize(("text", "pair", "kind", "name"), NAMES)
def test_run_name_is_derived_from_text_and_source_and_architecture(text, pair, kind, name):
    assert run_name(_inputs(text, **pair), kind) == name


def test_run_name_is_the_name_of_the_text_plus_a_suffix_for_fine_tuning(tmp_path, monkeypatch):
    (tmp_path / "corpus.v2").mkdir()
    monkeypatch.chdir(tmp_path / "corpus.v2")
    for path in (".", "../corpus.v2", tmp_path / "corpus.v2/"):
        assert run_name(_inputs([path]), "decoder") == "corpus.v2"
    assert run_name(_inputs(["a.txt"]), "decoder", tuned=True) == "a-tuned"


@given(st.text(st.characters(exclude_characters="\0"), min_size=1))
@example("..")
@example("hf:../..")
@example("hf:")
@example("- rm -rf ~")
@example("\ud800.txt")
@example("字" * 300)
def test_run_name_of_any_text_is_a_valid_folder_name(tmp_path_factory, text):
    """The name is a single path component, neither hidden nor a flag, and a valid folder name."""
    name = run_name(_inputs([text]), "recurrent-encoder-decoder", tuned=True)
    assert Path(name).name == name and name[0] not in ".-" and len(name.encode()) < 200
    assert not any(character in name for character in " \"'\\/:*?<>|$`\n")
    folder = next_free(tmp_path_factory.getbasetemp() / "names", name)
    folder.mkdir(parents=True)
    assert folder.name.removeprefix(name).lstrip("-0123456789") == ""
    folder.rmdir()


def make_run(path, kind="decoder", step=0, at=0, steps=60, minutes=None, seconds=0.0, scored=True):
    """Writes the files of a run of the tiny preset at `step`, with the modification time `at`."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    config = replace(training_preset("tiny", kind), steps=steps, max_minutes=minutes)
    write_run(folder, Inputs(), config)
    if step:
        progress = folder.checkpoints / str(step) / "progress/metadata"
        progress.parent.mkdir(parents=True)
        progress.write_text(json.dumps({"data": {}, "seconds": seconds}))
        (folder.checkpoints / str(step) / "_CHECKPOINT_METADATA").touch()
        line = {"step": step, "seconds": at, "held_out_loss" if scored else "loss": 1.0}
        folder.metrics.write_text(json.dumps(line) + "\n")
    for file in (folder.config, folder.metrics, folder.checkpoints):
        with suppress(FileNotFoundError):
            os.utime(file, (at, at))
    return folder


RUN = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["decoder", "encoder", "recurrent", "encoder-decoder"]),
        "step": st.sampled_from([0, 20, 60]),
        "name": st.sampled_from(["stdlib", "a b", "deep/er", "stdlib-10", "x-encoder"]),
    }
)


@given(runs=st.lists(RUN, max_size=5, unique_by=lambda run: run["name"]), asked=RUN)
def test_the_newest_unfinished_run_is_resumed(tmp_path_factory, runs, asked):
    """The run may have any name, and any kind of model unless a kind is requested."""
    below = tmp_path_factory.mktemp("runs")
    for at, run in enumerate(runs):
        make_run(below / run["name"], run["kind"], run["step"], at=at)
    for kind in (None, asked["kind"]):
        left = [r for r in runs if r["step"] < 60 and kind in (None, r["kind"])]
        if left:
            found = newest_unfinished(below, kind)
            assert found.folder.path == below / left[-1]["name"]
            assert (found.kind, found.step) == (left[-1]["kind"], left[-1]["step"])
        else:
            with pytest.raises(ValueError, match="no unfinished run"):
                newest_unfinished(below, kind)


def test_run_without_its_last_evaluation_or_full_duration_is_unfinished(tmp_path):
    make_run(tmp_path / "by-time", step=7, steps=None, minutes=1.0, seconds=60.0, at=3)
    make_run(tmp_path / "by-steps", step=60, at=2)
    with pytest.raises(ValueError, match=r"by-time finished at step 7.*raise --steps"):
        newest_unfinished(tmp_path)
    make_run(tmp_path / "unscored", step=60, at=1, scored=False)
    assert newest_unfinished(tmp_path).folder.path.name == "unscored"
    make_run(tmp_path / "too-short", step=7, steps=None, minutes=1.0, seconds=59.0, at=4)
    assert newest_unfinished(tmp_path).folder.path.name == "too-short"


def test_resume_ignores_other_folders_and_runs_that_are_being_trained(tmp_path):
    """Saved models, Hugging Face models and the base model of an adapter are ignored."""
    wanted = make_run(tmp_path / "wanted", at=1)
    make_run(wanted.path / "base", at=9)
    model = json.loads(wanted.config.read_text())
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/config.json").write_text(
        json.dumps({x: model[x] for x in ("format", "kind", "model")})
    )
    training = make_run(tmp_path / "training", at=5)
    with locked(training.lock):
        assert newest_unfinished(tmp_path).folder.path == wanted.path
        assert not wanted.lock.exists()
        wanted.config.unlink()
        (wanted.path / "base/config.json").unlink()
        with pytest.raises(ValueError, match="another process is training in"):
            newest_unfinished(tmp_path)


DAMAGES = {
    "cut": lambda text: text[:200],
    "empty": lambda text: "",
    "unknown option": lambda text: text.replace('"seed"', '"new_option": 1, "seed"', 1),
    "newer format": lambda text: re.sub(r'"format": \d+', '"format": 999', text),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_rejects_an_unreadable_newest_run_but_skips_unreadable_older_runs(damage, tmp_path):
    older, newer = make_run(tmp_path / "older", at=4), make_run(tmp_path / "newer", at=5)
    text = newer.config.read_text()
    newer.config.write_text(DAMAGES[damage](text))
    assert newer.config.read_text() != text
    for time, error in ((5, True), (3, False)):
        os.utime(newer.config, (time, time))
        if error:
            with pytest.raises(
                ValueError, match=rf"newer is a newer run.*--out .*{older.path.name}"
            ):
                newest_unfinished(tmp_path)
        else:
            with pytest.warns(UserWarning, match="ignores the unreadable run .*newer: "):
                assert newest_unfinished(tmp_path).folder.path == older.path
    shutil.rmtree(older.path)
    with pytest.raises(ValueError, match=r"cannot read .*newer"):
        newest_unfinished(tmp_path)


def test_resume_rejects_an_ambiguous_choice_between_copies_of_a_run(tmp_path):
    """`cp -r` gives the copy of an older run the newest modification times."""
    make_run(tmp_path / "older", step=20, at=4)
    newer = make_run(tmp_path / "newer", step=20, at=5)
    shutil.copytree(tmp_path / "older", tmp_path / "backup", copy_function=shutil.copy)
    with pytest.raises(ValueError, match=r"backup and .*older are copies of one run"):
        newest_unfinished(tmp_path)
    shutil.rmtree(tmp_path / "backup")
    assert newest_unfinished(tmp_path).folder.path == newer.path


def test_symbolic_link_to_a_run_is_not_treated_as_a_copy(tmp_path):
    """The run is listed by its own path, or by the link if the run is outside the folder."""
    run = make_run(tmp_path / "runs" / "older", step=20, at=4)
    far = make_run(tmp_path / "elsewhere" / "newest", step=20, at=5)
    for name in ("a", "z", "older2"):
        (tmp_path / "runs" / name).symlink_to(run.path)
    assert newest_unfinished(tmp_path / "runs").folder.path == run.path
    (tmp_path / "runs" / "far").symlink_to(far.path)
    assert newest_unfinished(tmp_path / "runs").folder.path == tmp_path / "runs" / "far"


def test_train_prints_the_name_of_the_run_that_it_resumes(tmp_path, monkeypatch, capsys):
    taken = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train_run", lambda folder, *_, **options: taken.append(folder.path))
    make_run(Path("runs/stdlib"), step=60, at=9)
    make_run(Path("runs/mine"), "encoder", step=20, at=5)
    make_run(Path("runs/older"), "decoder", step=20, at=4)
    main(["train", "--resume"])
    assert capsys.readouterr().out.startswith("resuming runs/mine (encoder, step 20)")
    main(["train", "--resume", "--model", "decoder"])
    assert taken == [Path("runs/mine"), Path("runs/older")]
    assert main(["train", "--resume", "--model", "convolutional"]) == 2
    assert "no unfinished run with --model convolutional below runs" in capsys.readouterr().err
