"""The copy of a run that serves as the base of an adapter does not change."""

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


def test_later_checkpoints_are_not_copied(run, tmp_path):
    """Earlier ones are. They remain when the run deletes its own files."""
    keep(run, tmp_path / "kept", 6)
    for path in sorted(run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    kept = {x.relative_to(tmp_path / "kept").as_posix() for x in tmp_path.glob("kept/**/*")}
    files = {"config.json", "checkpoints/3/params/40", "checkpoints/6/params/40"}
    assert {path for path in kept if (tmp_path / "kept" / path).is_file()} == files
    assert (tmp_path / "kept/checkpoints/6/params/40").read_text() == "6"


def test_a_checkpoint_that_is_gone_is_not_replaced_by_another(run, tmp_path):
    with pytest.raises(ValueError, match="has gone on from step 7 during the copy"):
        keep(run, tmp_path / "kept", 7)
