"""The plot of a run connects only scores of the same tokens."""

from hypothesis import given
from hypothesis import strategies as st

from jaxformer.training.log import plot_losses
from jaxformer.training.tasks.task import Measure

WHOLE = 1000

scores = st.tuples(st.sampled_from([100, 200]), st.sampled_from([None, WHOLE]))


@given(evaluations=st.lists(scores, min_size=1, max_size=6))
def test_loss_curve_connects_only_losses_of_the_same_held_out_tokens(evaluations):
    """The curves are correct for runs that were resumed with other numbers of windows or steps.

    `evaluations` has (windows, whether all held-out text was scored) for each step.
    """
    metrics, drawn = [], {100: [], 200: [], WHOLE: []}
    for step, (windows, whole) in enumerate(evaluations):
        line = {
            "step": step,
            "held_out_loss": windows + step,
            "bits_per_byte": 1,
            "scored": windows,
        }
        drawn[windows].append((step, windows + step))
        if whole:
            line |= {"part_loss": line["held_out_loss"], "part_bits_per_byte": 1}
            line |= {"part_scored": windows, "held_out_loss": whole + step, "scored": whole}
            drawn[WHOLE].append((step, whole + step))
        metrics.append(line)
    figure = plot_losses(metrics, Measure("bits_per_byte", "bits per byte"), {"gzip": 2.0}, WHOLE)
    lines = figure.axes[0].get_lines()
    found = [list(map(tuple, line.get_xydata().tolist())) for line in lines]
    assert sorted(found) == sorted(points for points in drawn.values() if points)
    marks = [line for line in lines if line.get_label() == "all held-out text"]
    assert all(line.get_linestyle() == "None" for line in marks)
    said = figure.axes[1].get_title()
    last = max((step for step, (_, whole) in enumerate(evaluations) if whole), default=None)
    assert said.startswith("held-out" if last is None else f"all held-out text at step {last}: ")
