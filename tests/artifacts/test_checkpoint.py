"""Checkpoints are written completely or not at all, and refused if they do not fit the model."""

import errno
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint import AsyncCheckpointer

from jaxformer.artifacts import checkpoint
from jaxformer.artifacts.checkpoint import Checkpoints, CheckpointWriter, _read
from jaxformer.artifacts.run import RunFolder

PARAMS = {"blocks": {"kernel": jnp.ones((2, 3))}, "head": {"bias": jnp.zeros(5)}}
REST = {"key": jnp.zeros(2, jnp.uint32)}


def scaled(factor):
    return {"blocks": {"kernel": factor * PARAMS["blocks"]["kernel"]}, "head": PARAMS["head"]}


@pytest.mark.parametrize("name", ["checkpoints", "run[x] {a,b}", "*", "a?", "$x~ %2F"])
def test_the_newest_is_restored_and_the_newest_few_are_kept(tmp_path, name):
    """No name of a folder is read as a wildcard pattern."""
    with CheckpointWriter(tmp_path / name, keep=2) as writer:
        for step in (1, 2, 3):
            writer.save(step, scaled(step), REST, {"data": {"at": step}})
    checkpoints = Checkpoints(tmp_path / name)
    assert checkpoints.steps() == [2, 3]
    step, params, rest, progress = checkpoints.restore(PARAMS, REST)
    assert (step, progress) == (3, {"data": {"at": 3}})
    np.testing.assert_array_equal(params["blocks"]["kernel"], np.full((2, 3), 3.0))
    np.testing.assert_array_equal(rest["key"], REST["key"])


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    keep=st.integers(1, 3), every=st.sampled_from([None, 2, 3]), steps=st.sets(st.integers(1, 9))
)
def test_the_newest_and_every_so_many_are_kept(tmp_path_factory, keep, every, steps):
    """The steps are saved in two starts of a run."""
    folder, steps = tmp_path_factory.mktemp("kept"), sorted(steps)
    for part in (steps[:3], steps[3:]):
        with CheckpointWriter(folder, keep, every) as writer:
            for step in part:
                writer.save(step, PARAMS, REST, {})
    periodic = {step for step in steps if every and step % every == 0}
    assert Checkpoints(folder).steps() == sorted(periodic | set(steps[-keep:]))


def test_a_checkpoint_has_the_arrays_of_the_moment_of_the_save(tmp_path):
    """Even if they are changed and their memory is reused while they are written."""

    @partial(jax.jit, donate_argnums=0)
    def update(tree):
        return jax.tree.map(lambda x: x + 1, tree)

    state = {"kernel": jnp.zeros((512, 1024))}
    with CheckpointWriter(tmp_path, keep=9) as writer:
        for step in range(4):
            writer.save(step, state, REST, {})
            for _ in range(5):
                state = update(state)
    for step in range(4):
        folder = tmp_path / str(step)
        found = _read(folder, state, None)[0]["kernel"]
        np.testing.assert_array_equal(found, np.full((512, 1024), 5.0 * step))


@pytest.mark.parametrize("late", ["save", "wait", "end"])
@pytest.mark.parametrize(
    ("where", "what"),
    [(AsyncCheckpointer, "_save_step_metadata"), (checkpoint, "write_digests")],
)
def test_what_fails_beside_training_is_raised(tmp_path, monkeypatch, where, what, late):
    """The next save, a wait or the end of the context raises it.

    The previous checkpoint is then the last good one. Another start can save, and incomplete files
    are removed.
    """

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"), CheckpointWriter(tmp_path) as writer:
        writer.save(1, PARAMS, REST, {})
        writer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(where, what, full)
            writer.save(2, PARAMS, REST, {})
            writer._writing.exception()  # waits until the save has failed, before the patch ends
        if late != "end":
            writer.wait() if late == "wait" else writer.save(3, PARAMS, REST, {})
            pytest.fail("nothing was raised")
    assert Checkpoints(tmp_path).last().endswith("/1")
    with CheckpointWriter(tmp_path) as writer:
        writer.save(3, PARAMS, REST, {})
    assert Checkpoints(tmp_path).last().endswith("/3")
    assert not list(tmp_path.glob("*tmp*"))


def test_without_room_on_the_disk_nothing_is_begun(tmp_path, monkeypatch):
    """One byte too few for the arrays (2 · 3 + 5 floats and 2 words) keeps the save from starting.

    The earlier checkpoint is not deleted. With that byte the save succeeds.
    """
    with CheckpointWriter(tmp_path / "checkpoints") as writer:
        writer.save(1, PARAMS, REST, {})
        writer.wait()
        usage, needed = shutil.disk_usage(tmp_path), 4 * (6 + 5 + 2)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
        with pytest.raises(OSError, match="checkpoint of 52 bytes, 51 are free") as raised:
            writer.save(2, PARAMS, REST, {})
        assert raised.value.errno == errno.ENOSPC
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
        writer.save(2, PARAMS, REST, {})
    assert Checkpoints(tmp_path / "checkpoints").steps() == [1, 2]


@pytest.mark.parametrize(
    ("like", "named"),
    [
        ({"blocks": {"kernel": jnp.ones((4, 3))}, "head": {"bias": jnp.zeros(5)}}, "blocks/kernel"),
        ({"blocks": {"kernel": jnp.ones((2, 3))}}, "head/bias"),
        ({**PARAMS, "final_norm": {"scale": jnp.ones(3)}}, "final_norm/scale"),
        ({**PARAMS, "head": {"bias": jnp.zeros(5, jnp.bfloat16)}}, "head/bias"),
    ],
)
def test_another_tree_shape_or_dtype_is_refused_by_name(tmp_path, like, named):
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, PARAMS, REST, {})
    with pytest.raises(ValueError, match=named):
        Checkpoints(tmp_path).restore(like, REST)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["_CHECKPOINT_METADATA", "params", "progress", "rest"])
def test_one_that_a_kill_left_half_deleted_is_passed_over(tmp_path, lost):
    checkpoints = Checkpoints(tmp_path)
    with CheckpointWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.save(step, scaled(step), REST, {})
    broken = tmp_path / "2" / lost
    shutil.rmtree(broken) if broken.is_dir() else broken.unlink()
    with pytest.warns(UserWarning, match=f"2 is damaged: {lost}"):
        assert checkpoints.restore(PARAMS, REST)[0] == 1
    # A resumed run can save: the damaged checkpoint is renamed, not deleted.
    assert checkpoints.set_aside_after(1) == [tmp_path / "2.unreadable"]
    with CheckpointWriter(tmp_path) as writer:
        for step in (2, 3):
            writer.save(step, scaled(10 * step), REST, {})
            writer.wait()
            assert checkpoints.restore(PARAMS, REST)[0] == step
    assert checkpoints.restore(PARAMS)[1]["blocks"]["kernel"][0, 0] == 30


def test_a_run_folder_names_the_fault_in_its_config(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="holds no run"):
        folder.read_config()
    for text, complaint in (
        ("{", "cannot be read"),
        ("[]", "an object"),
        ("{}", "format None"),
        ('{"format": 9}', "9"),
    ):
        folder.config.write_text(text)
        with pytest.raises(ValueError, match=complaint):
            folder.read_config()


def test_metrics_and_samples_after_the_restored_step_are_removed(tmp_path):
    """So is an incomplete last line, which a kill leaves."""
    folder = RunFolder(tmp_path)
    lines = [f'{{"step": {step}, "loss": {step}.5}}\n' for step in (1, 2, 3)]
    folder.metrics.write_text("".join(lines) + '{"step": 4, "lo')
    folder.samples.write_text("---- step 2\nx\n---- step 9 of it\n---- step 3\ny\n")
    folder.cut_after(2)
    assert folder.samples.read_text() == "---- step 2\nx\n---- step 9 of it\n"
    assert folder.metrics.read_text() == "".join(lines[:2])
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
