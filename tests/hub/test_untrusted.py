"""Untrusted folders: links to targets outside the folder, and circular chains of bases."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer.artifacts.files import check_links
from jaxformer.artifacts.run import Origin, RunFolder, read_sections
from jaxformer.cli import main
from jaxformer.hub.load import opened
from jaxformer.models.config import KINDS
from jaxformer.models.config.lora import LoraConfig
from jaxformer.training.config import Inputs, TextTraining
from jaxformer.training.run_folders import read_run, write_run
from tests.errors import error_of
from tests.hub import foreign


@pytest.fixture
def folder(tmp_path):
    """A folder in Hugging Face's format."""
    foreign.write(tmp_path / "model", "gpt2")
    return tmp_path / "model"


@pytest.fixture
def run(tmp_path):
    """A run before its first step, with a folder of a checkpoint that no test reads."""
    found = RunFolder(tmp_path / "run")
    (found.checkpoints / "1/params").mkdir(parents=True)
    found.tokens.mkdir()
    write_run(found, Inputs(), TextTraining(KINDS["decoder"]()))
    return found


def move_out(path: Path, to: Path):
    """Moves the file (or creates an empty one) to `to`, and replaces it by a link."""
    if path.exists():
        path.rename(to)
    else:
        to.write_text("mine")
    path.symlink_to(to)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "spiece.model"]
)
def test_symbolic_link_out_of_model_folder_is_rejected(folder, tmp_path, name, capsys):
    """Absolute and relative links out of the folder are rejected without reading the target."""
    move_out(folder / name, tmp_path / "outside")
    for target in (tmp_path / "outside", "../outside"):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        assert main(["import", str(folder), str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert said == (
            f"jaxformer: {folder / name} is a link to {target}, outside {folder}; replace "
            "the link by the file\n"
        )


@pytest.mark.parametrize(
    "name",
    ["config.json", "metrics.jsonl", "samples.txt", "lock", "checkpoints/1/params/d", "tokens/x"],
)
def test_symbolic_link_to_file_outside_the_run_is_rejected(run, tmp_path, name):
    """Resuming a run with such a link would read the target or append to it."""
    outside = tmp_path / "outside"
    move_out(run.path / name, outside)
    before = outside.read_bytes()
    for read in (read_run, lambda run: opened(run.path)):
        assert f"{run.path / name} is a link to {outside}, outside" in error_of(read, run)
    assert outside.read_bytes() == before


@pytest.mark.parametrize("name", ["checkpoints", "tokens", "base", "tensorboard"])
def test_symbolic_link_to_folder_outside_the_run_is_rejected(run, tmp_path, name):
    (tmp_path / "outside").mkdir()
    shutil.rmtree(run.path / name, ignore_errors=True)
    (run.path / name).symlink_to(tmp_path / "outside")
    assert f"{run.path / name} is a link" in error_of(read_run, run)


def test_symbolic_links_inside_a_folder_are_followed(folder, run, tmp_path):
    """Links within the folder, links to the folder, and links of Weights & Biases are accepted."""
    (tmp_path / "latest").symlink_to(folder)
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    assert opened(tmp_path / "latest").config == opened(folder).config
    (run.path / "wandb").mkdir()
    (run.path / "wandb/debug.log").symlink_to(tmp_path / "elsewhere")
    read_run(run)
    (run.path / "metrics.jsonl").symlink_to("wandb/debug.log")  # leads outside indirectly
    assert "metrics.jsonl is a link" in error_of(read_run, run)
    (folder / "loop").symlink_to("loop")
    assert "loop is a link" in error_of(opened, folder)


def test_snapshot_in_hub_cache_may_link_only_to_its_own_blobs(folder, tmp_path):
    """Links to blobs of the same repository are accepted, as in the hub's cache."""
    cache = tmp_path / "models--owner--name"
    snapshot = cache / "snapshots/0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert jf.load(snapshot).model.config.num_layers
    other = tmp_path / "models--owner--other"
    cache.rename(other)
    cache.mkdir()
    (other / "snapshots").rename(cache / "snapshots")
    for path in snapshot.iterdir():
        target = other / "blobs" / Path(os.readlink(path)).name
        path.unlink()
        path.symlink_to(target)
    assert "is a link" in error_of(opened, snapshot)


def adapter(path: Path, base: Path, name: str = "family") -> Path:
    """Writes the config of a run that trained an adapter of that base."""
    run = RunFolder(path)
    run.path.mkdir(parents=True)
    training = {"training": {"lora": asdict(LoraConfig(lora_rank=2))}}
    run.write_config({"model": KINDS["decoder"](), **training, **Origin(base, "0").sections()})
    return path


@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_adapter_with_a_cyclic_or_too_long_chain_of_bases_is_rejected(tmp_path, length):
    """The base is the run itself, directly, through other runs, or in a very long chain."""
    names = [tmp_path / str(number) for number in range(length)]
    for path, base in zip(names, [*names[1:], names[0]], strict=True):
        adapter(path, base)
    last = names[-1] / "config.json"
    expected = "more than 16 bases" if length == 20 else f"{last}: init_from is {names[0]}, which"
    assert expected in error_of(opened, names[0])
    before = adapter(tmp_path / "before", names[-1])  # leads into the circle
    assert "is an adapter" in error_of(opened, before)


def test_adapter_is_rejected_if_the_copied_base_in_its_folder_names_it_as_its_base(tmp_path):
    """The copy of the base in a run is read instead of the original."""
    outer = adapter(tmp_path / "outer", tmp_path / "elsewhere")
    inner = adapter(outer / "base", outer)
    assert f"{inner}/config.json: init_from is {outer}" in error_of(opened, outer)


def test_load_rejects_folder_with_unknown_model_type(run):
    content = json.loads(run.config.read_text())
    run.config.write_text(json.dumps({**content, "model_type": "evil"}))
    assert read_sections(run.path)["model_type"] == "evil"
    assert "model_type is 'evil'; it must be one of" in error_of(opened, run.path)


def test_symbolic_link_check_tolerates_concurrently_deleted_folders(tmp_path, monkeypatch):
    """A run in training renames the folders of its checkpoints."""
    for number in range(4):
        (tmp_path / "checkpoints" / str(number)).mkdir(parents=True)
    scandir = os.scandir

    def vanishing(folder):
        found = scandir(folder)
        if Path(folder).name == "checkpoints":
            for path in Path(folder).iterdir():
                path.rmdir()
        return found

    monkeypatch.setattr(os, "scandir", vanishing)
    check_links(tmp_path, whole_tree=True)
