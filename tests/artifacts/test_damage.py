"""A damaged checkpoint is never used silently.

The newest undamaged checkpoint is used, and a warning gives the path of the damaged file. Arrays
with NaN or infinity are not saved.
"""

import shutil
import subprocess
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.artifacts import checkpoint as writer_module
from jaxformer.artifacts.checkpoint import DIGESTS, Checkpoints, CheckpointWriter

PARAMS = {"blocks": {"kernel": jnp.ones((2, 3))}, "head": {"bias": jnp.zeros(5)}}
REST = {"optimizer": {"mu": jnp.zeros(4)}, "key": jnp.zeros(2, jnp.uint32)}


def save(folder, *steps, keep=2):
    """Saves checkpoints of the given steps, whose kernels contain the step."""
    with CheckpointWriter(folder, keep) as writer:
        for step in steps:
            params = {**PARAMS, "blocks": {"kernel": jnp.full((2, 3), float(step))}}
            writer.save(step, params, REST, {"at": step})
    return Checkpoints(folder)


def restored(checkpoints):
    """Restores a checkpoint, checks its arrays and progress, and returns its step."""
    step, params, rest, progress = checkpoints.restore(PARAMS, REST)
    np.testing.assert_array_equal(params["blocks"]["kernel"], np.full((2, 3), float(step)))
    assert progress == {"at": step} and rest.keys() == REST.keys()
    return step


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with checkpoints 1 and 2. Tests restore the files that they damage."""
    return save(tmp_path_factory.mktemp("pair"), 1, 2)._folder


@contextmanager
def damaged(path, content):
    """Replaces a file's content, or deletes the file for None; restores the file at the end."""
    whole = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def flipped(content, position):
    """Inverts the bits of one byte."""
    changed = bytearray(content)
    changed[position] ^= 0xFF
    return bytes(changed)


def test_damage_to_any_checkpoint_file_is_detected(pair):
    """Each file is damaged in four ways: a byte inverted, truncated to half, emptied, deleted."""
    good = Checkpoints(pair).last()
    assert good == f"the last good checkpoint is {pair / '2'}"
    for path in files(pair / "2"):
        content = path.read_bytes()
        changes = [flipped(content, position) for position in (0, len(content) // 3, -1)]
        for remains in (*changes, content[: len(content) // 2], b"", None):
            with damaged(path, remains):
                assert Checkpoints(pair).last() == good.removesuffix("2") + "1", path
    assert Checkpoints(pair).last() == good


@pytest.mark.parametrize("part", ["params", "rest", "progress", "_CHECKPOINT_METADATA"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damaged_checkpoint_is_skipped_with_warning(pair, part, damage):
    """Damages the largest file of each part, which contains the numbers of params and rest."""
    below = [path for path in files(pair / "2") if path.relative_to(pair / "2").parts[0] == part]
    path = max(below, key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    remains = {"flip": flipped(content, 7), "truncate": content[:-1], "delete": None}[damage]
    with damaged(path, remains), pytest.warns(UserWarning) as told:
        assert restored(Checkpoints(pair)) == 1
    (said,) = (str(warning.message) for warning in told)
    assert str(pair / "2") in said and path.name in said and "checkpoint of step 1" in said
    assert restored(Checkpoints(pair)) == 2


def test_checkpoint_with_a_file_added_after_saving_counts_as_damaged(pair):
    """A file that was added after the save has no digest, so the checkpoint counts as damaged."""
    stray = pair / "2" / "params" / "stray"
    stray.write_text("")
    with pytest.warns(UserWarning, match="params/stray"):
        assert restored(Checkpoints(pair)) == 1
    stray.unlink()
    assert restored(Checkpoints(pair)) == 2


def test_restoring_fails_if_all_checkpoints_are_damaged(tmp_path):
    checkpoints = save(tmp_path, 1, 2)
    for step in "12":
        path = tmp_path / step / "progress" / "metadata"
        path.write_bytes(flipped(path.read_bytes(), 0))
    with pytest.raises(ValueError, match=f"{tmp_path}.*2 is damaged: progress/metadata"):
        checkpoints.restore(PARAMS, REST)
    assert checkpoints.last() == f"all checkpoints in {tmp_path} are damaged or incomplete"


def test_checkpoint_without_digests_is_restored_only_as_last_resort(tmp_path):
    """A kill between Orbax's commit and the digests leaves a checkpoint without digests.

    Then the previous checkpoint is used. A checkpoint without digests is used, with a warning, only
    if no other checkpoint has digests.
    """
    checkpoints = save(tmp_path, 1, 2)
    (tmp_path / "2" / DIGESTS).unlink()
    with pytest.warns(UserWarning, match=f"2 has no {DIGESTS}.*checkpoint of step 1"):
        assert restored(checkpoints) == 1
    assert checkpoints.last().endswith(str(tmp_path / "1"))
    (tmp_path / "1" / DIGESTS).unlink()
    with pytest.warns(UserWarning, match=f"2 has no {DIGESTS}.*used without a check"):
        assert restored(checkpoints) == 2
    assert "cannot be checked" in checkpoints.last()
    shutil.rmtree(tmp_path / "2" / "rest")
    with pytest.warns(UserWarning) as told:
        assert restored(checkpoints) == 1
    said = [str(warning.message) for warning in told]
    assert len(said) == 2 and "2/rest" in said[1] and "used without a check" in said[0]


@pytest.mark.parametrize("keep", [1, 2])
def test_checkpoint_is_restorable_if_run_is_killed_before_writing_digests(
    tmp_path, monkeypatch, keep
):
    """A run that resumes from it can save again."""
    checkpoints = save(tmp_path, 1, keep=keep)
    with monkeypatch.context() as patch:

        def kill(folder):
            raise KeyboardInterrupt

        patch.setattr(writer_module, "write_digests", kill)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, keep=keep)
    with pytest.warns(UserWarning, match=DIGESTS):
        step = restored(checkpoints)
    assert step == (2 if keep == 1 else 1)
    checkpoints.set_aside_after(step)
    assert restored(save(tmp_path, 3, keep=keep)) == 3


BAD = {
    "params/blocks/kernel": ({"blocks": {"kernel": jnp.array([1.0, jnp.inf])}}, REST),
    "params/head": ({"blocks": jnp.ones(2), "head": jnp.array(jnp.nan, jnp.bfloat16)}, REST),
    "rest/optimizer/mu": (PARAMS, {"optimizer": {"mu": jnp.array([-jnp.inf])}}),
}


@pytest.mark.parametrize("named", BAD)
def test_checkpoint_with_nan_is_not_saved(tmp_path, named):
    """The error gives the path of the array, and earlier checkpoints are not deleted."""
    checkpoints = save(tmp_path, 1, keep=1)
    with pytest.raises(ValueError, match=f"{named} contains NaN or infinity"):
        CheckpointWriter(tmp_path).save(2, *BAD[named], {})
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert restored(checkpoints) == 1


def test_checkpoint_with_nan_is_not_restored(tmp_path, monkeypatch):
    """A checkpoint with NaN, which only another program can write, is not restored."""
    checkpoints = save(tmp_path, 1)
    with monkeypatch.context() as patch, CheckpointWriter(tmp_path) as writer:
        patch.setattr(writer_module, "not_finite", lambda tree: None)
        writer.save(2, {**PARAMS, "head": {"bias": jnp.full(5, jnp.nan)}}, REST, {})
    with pytest.warns(UserWarning, match=r"head/bias is not finite.*checkpoint of step 1"):
        assert restored(checkpoints) == 1


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum here")
def test_sha256sum_accepts_the_digests_of_a_checkpoint(pair):
    """The tool sha256sum can check a checkpoint without jaxformer."""
    command = ["sha256sum", "--check", "--strict", "--quiet", DIGESTS]
    subprocess.run(command, cwd=pair / "2", check=True)
