"""Checkpoints are written atomically, and rejected if they do not fit the model."""

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
def test_old_checkpoints_are_deleted_and_the_newest_checkpoint_is_restored(tmp_path, name):
    """Folder names with wildcard characters are used literally."""
    with CheckpointWriter(tmp_path / name, max_to_keep=2) as writer:
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
def test_checkpoint_writer_keeps_periodic_and_newest_checkpoints(
    tmp_path_factory, keep, every, steps
):
    """The steps are saved by a run and by its resumption."""
    folder, steps = tmp_path_factory.mktemp("kept"), sorted(steps)
    for part in (steps[:3], steps[3:]):
        with CheckpointWriter(folder, keep, every) as writer:
            for step in part:
                writer.save(step, PARAMS, REST, {})
    periodic = {step for step in steps if every and step % every == 0}
    assert Checkpoints(folder).steps() == sorted(periodic | set(steps[-keep:]))


def test_checkpoint_is_unaffected_by_later_array_changes(tmp_path):
    """Changing the arrays or reusing their memory during a save leaves the checkpoint intact."""

    @partial(jax.jit, donate_argnums=0)
    def update(tree):
        return jax.tree.map(lambda x: x + 1, tree)

    state = {"kernel": jnp.zeros((512, 1024))}
    with CheckpointWriter(tmp_path, max_to_keep=9) as writer:
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
def test_error_of_a_background_save_is_raised_at_the_next_save_or_wait_or_exit(
    tmp_path, monkeypatch, where, what, late
):
    """The next save, a wait or the end of the context raises the error of a failed save.

    The previous checkpoint is then the last undamaged checkpoint. A new writer can save, and
    removes incomplete files.
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


def test_full_disk_prevents_save_from_starting(tmp_path, monkeypatch):
    """If the disk has one byte too few for the arrays, the save does not start.

    The earlier checkpoint is not deleted. With one byte more, the save succeeds.
    """
    with CheckpointWriter(tmp_path / "checkpoints") as writer:
        writer.save(1, PARAMS, REST, {})
        writer.wait()
        usage, needed = shutil.disk_usage(tmp_path), 4 * (6 + 5 + 2)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
        with pytest.raises(OSError, match="checkpoint of 52 bytes; 51 bytes are free") as raised:
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
def test_checkpoint_with_different_structure_or_shapes_or_dtypes_is_rejected(tmp_path, like, named):
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, PARAMS, REST, {})
    with pytest.raises(ValueError, match=named):
        Checkpoints(tmp_path).restore(like, REST)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["_CHECKPOINT_METADATA", "params", "progress", "rest"])
def test_half_deleted_checkpoint_is_skipped(tmp_path, lost):
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


def test_reading_invalid_run_config_raises_error(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="is not a run"):
        folder.read_config()
    for text, complaint in (
        ("{", "cannot be read"),
        ("[]", "an object"),
        ("{}", "no format number"),
        ('{"format": 9}', "9"),
    ):
        folder.config.write_text(text)
        with pytest.raises(ValueError, match=complaint):
            folder.read_config()


def test_metrics_and_samples_after_restored_step_are_removed(tmp_path):
    """Later metrics and samples, and an incomplete last line, are removed."""
    folder = RunFolder(tmp_path)
    lines = [f'{{"step": {step}, "loss": {step}.5}}\n' for step in (1, 2, 3)]
    folder.metrics.write_text("".join(lines) + '{"step": 4, "lo')
    folder.samples.write_text("---- step 2\nx\n---- step 9 of it\n---- step 3\ny\n")
    folder.cut_after(2)
    assert folder.samples.read_text() == "---- step 2\nx\n---- step 9 of it\n"
    assert folder.metrics.read_text() == "".join(lines[:2])
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
