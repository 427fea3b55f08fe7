"""A signal during an evaluation stops the run without waiting for the score."""

import os
import signal

import pytest

from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.training.tasks.next_tokens import NextTokens
from tests.cli.conftest import SETTINGS

pytestmark = pytest.mark.slow


def figures(folder):
    """Returns the step and the losses of each line of metrics.jsonl."""
    names = ("step", "loss", "held_out_loss")
    return [{x: line[x] for x in names if x in line} for line in RunFolder(folder).read_metrics()]


@pytest.mark.parametrize("step", [6, 12])
def test_checkpoint_saved_after_a_signal_is_evaluated_when_the_run_resumes(
    step, trained, corpus, capsys, monkeypatch
):
    """Step 6 has no regular checkpoint; step 12 is the last one."""
    score, left = NextTokens.score, [step // 6]

    def interrupted(task, model, variables, *, whole, on_scored=lambda count: None):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGTERM)
        return score(task, model, variables, whole=whole, on_scored=on_scored)

    with monkeypatch.context() as patch:
        patch.setattr(NextTokens, "score", interrupted)
        words = ["train", str(corpus), *SETTINGS, "--out", "run"]
        assert main(words) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert f"stopped by SIGTERM at step {step}, which is saved" in said and "--resume" in said
    assert Checkpoints(RunFolder("run").checkpoints).steps()[-1] == step
    assert "held_out_loss" not in figures("run")[-1]
    assert main(["train", "--resume", "--out", "run"]) == 0
    for found, wanted in zip(figures("run"), figures(trained), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
