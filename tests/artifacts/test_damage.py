"""A damaged checkpoint is never used silently.

The newest undamaged checkpoint is used, and a warning names the damaged file. Arrays that are not
finite are not saved.
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
    """Saves checkpoints of these steps. Each has its step in its kernel."""
    with CheckpointWriter(folder, keep) as writer:
        for step in steps:
            params = {**PARAMS, "blocks": {"kernel": jnp.full((2, 3), float(step))}}
            writer.save(step, params, REST, {"at": step})
    return Checkpoints(folder)


def restored(checkpoints):
    """Restores a checkpoint, checks that arrays and progress are of its step, returns the step."""
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
    """Replaces the file's content by `content` (None: deletes it), and restores it at the end."""
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


def test_whichever_file_is_damaged_the_checkpoint_before_is_the_last_good_one(pair):
    """For each file: one byte inverted, truncated to half, emptied, or deleted."""
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
def test_the_checkpoint_before_is_restored_and_the_file_is_named(pair, part, damage):
    """Damages the largest file of each part: in params and rest it holds the numbers."""
    below = [path for path in files(pair / "2") if path.relative_to(pair / "2").parts[0] == part]
    path = max(below, key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    remains = {"flip": flipped(content, 7), "truncate": content[:-1], "delete": None}[damage]
    with damaged(path, remains), pytest.warns(UserWarning) as told:
        assert restored(Checkpoints(pair)) == 1
    (said,) = (str(warning.message) for warning in told)
    assert str(pair / "2") in said and path.name in said and "checkpoint of step 1" in said
    assert restored(Checkpoints(pair)) == 2


def test_a_file_that_no_save_left_is_damage(pair):
    """The digests do not cover a file that was added after the save."""
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
    assert checkpoints.last() == f"no checkpoint in {tmp_path} is whole"


def test_one_without_digests_counts_only_where_none_has_them(tmp_path):
    """A kill between Orbax's commit and the digests leaves a checkpoint without digests.

    The previous checkpoint is used then. A checkpoint without digests is used, with a warning, if
    no other one has digests (as with keep=1).
    """
    checkpoints = save(tmp_path, 1, 2)
    (tmp_path / "2" / DIGESTS).unlink()
    with pytest.warns(UserWarning, match=f"2 has no {DIGESTS}.*checkpoint of step 1"):
        assert restored(checkpoints) == 1
    assert checkpoints.last().endswith(str(tmp_path / "1"))
    (tmp_path / "1" / DIGESTS).unlink()
    with pytest.warns(UserWarning, match=f"2 has no {DIGESTS}.*cannot be checked"):
        assert restored(checkpoints) == 2
    assert "cannot be checked" in checkpoints.last()
    shutil.rmtree(tmp_path / "2" / "rest")
    with pytest.warns(UserWarning) as told:
        assert restored(checkpoints) == 1
    said = [str(warning.message) for warning in told]
    assert len(said) == 2 and "2/rest" in said[1] and "cannot be checked" in said[0]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_before_the_digests_leaves_a_checkpoint_to_restore(tmp_path, monkeypatch, keep):
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
def test_what_is_not_finite_is_not_saved(tmp_path, named):
    """The error names the array, and earlier checkpoints are not deleted."""
    checkpoints = save(tmp_path, 1, keep=1)
    with pytest.raises(ValueError, match=f"{named} is not finite"):
        CheckpointWriter(tmp_path).save(2, *BAD[named], {})
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert restored(checkpoints) == 1


def test_what_is_not_finite_is_not_restored(tmp_path, monkeypatch):
    """Nothing that this version saves is so, but the file may come from elsewhere."""
    checkpoints = save(tmp_path, 1)
    with monkeypatch.context() as patch, CheckpointWriter(tmp_path) as writer:
        patch.setattr(writer_module, "not_finite", lambda tree: None)
        writer.save(2, {**PARAMS, "head": {"bias": jnp.full(5, jnp.nan)}}, REST, {})
    with pytest.warns(UserWarning, match=r"head/bias is not finite.*checkpoint of step 1"):
        assert restored(checkpoints) == 1


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum here")
def test_digests_are_those_of_sha256sum(pair):
    """So a checkpoint, or a copy of it, can be checked without this package."""
    command = ["sha256sum", "--check", "--strict", "--quiet", DIGESTS]
    subprocess.run(command, cwd=pair / "2", check=True)
