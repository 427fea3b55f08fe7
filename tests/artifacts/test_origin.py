"""The copy of a run, which is the base of an adapter, never changes."""

import pytest

from jaxformer.artifacts.run import keep


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 3, 6 and 9 and an incomplete save of step 12."""
    folder = tmp_path / "run"
    for name in ("3", "6", "9", "12.orbax-checkpoint-tmp"):
        path = folder / "checkpoints" / name / "params" / "40"
        path.parent.mkdir(parents=True)
        path.write_text(name)
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("not kept")
    return folder


def test_copy_of_adapter_base_excludes_later_checkpoints(run, tmp_path):
    """Earlier checkpoints are copied, and the copies remain when the run deletes its files."""
    keep(run, tmp_path / "kept", 6)
    for path in sorted(run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    kept = {x.relative_to(tmp_path / "kept").as_posix() for x in tmp_path.glob("kept/**/*")}
    files = {"config.json", "checkpoints/3/params/40", "checkpoints/6/params/40"}
    assert {path for path in kept if (tmp_path / "kept" / path).is_file()} == files
    assert (tmp_path / "kept/checkpoints/6/params/40").read_text() == "6"


def test_copying_adapter_base_whose_checkpoint_is_deleted_raises_error(run, tmp_path):
    with pytest.raises(ValueError, match="continued training and deleted the checkpoint of step 7"):
        keep(run, tmp_path / "kept", 7)
