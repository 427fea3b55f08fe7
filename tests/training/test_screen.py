"""The screen shows text unchanged, except for control characters, which it escapes."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxformer.artifacts.files import write_figure
from jaxformer.terminal import visible
from jaxformer.training.log import plot_losses
from jaxformer.training.screen import Screen, late_peak, progress, progress_line, vanishing
from jaxformer.training.tasks.task import Measure

METRICS = [{"step": 1, "loss": 2.0}, {"step": 1, "held_out_loss": 2.0, "bits_per_byte": 1.5}]


@given(text=st.text())
@example(text="y = a[n] + c[key]  # [/bold] [red]:smile:\tx\r\x07" + " long" * 40)
def test_screen_shows_text_unchanged_except_control_characters(text):
    """Text is unchanged in a file, on a narrow terminal and above a progress bar.

    A terminal would execute control characters, so the screen shows their escapes.
    """
    file, terminal, above = io.StringIO(), io.StringIO(), io.StringIO()
    Screen(file=file).say(text)
    assert file.getvalue() == visible(text) + "\n"
    Screen(file=terminal, force_terminal=True, width=20).say(text)
    assert terminal.getvalue() == visible(text) + "\n"
    screen = Screen(file=above, force_terminal=True, force_interactive=True, width=80)
    with screen.bar(10) as show:
        show(3, "step 3 of 10", text)
        screen.say(text)
    assert f"{visible(text)}\n" in above.getvalue()


def test_only_a_terminal_shows_progress_bars():
    """A terminal shows two bars together and removes both at the end. A file contains no bars."""
    file, terminal = io.StringIO(), io.StringIO()
    for screen in (
        Screen(file=file),
        Screen(file=terminal, force_terminal=True, force_interactive=True, width=80),
    ):
        with screen.bar(10) as show:
            show(3, "step 3 of 10", "[/bold]")
            with screen.bar(100) as show_part:
                show_part(50, ":smile:", "half")
                screen._bars.refresh()  # normally happens four times a second
                screen.say("between")
        screen.say("after")
    assert file.getvalue() == "between\nafter\n"
    said = terminal.getvalue()
    assert all(words in said for words in ("step 3 of 10", "[/bold]", ":smile:", "half"))
    assert "3 of 10" not in said[said.index("after") :]


def on_a_terminal():
    terminal = io.StringIO()
    options = {"force_terminal": True, "force_interactive": True, "width": 80}
    return Screen(file=terminal, **options), terminal


def test_training_progress_is_a_bar_on_terminals_and_lines_in_log_files():
    """A log has a first line, a line every 10 seconds in the first minute, then one per minute."""
    file, now = io.StringIO(), [0.0]
    with progress(Screen(file=file), 100, lambda: now[0]) as show:
        show(0, 0.0, "")
        for second in range(1, 241):
            now[0] = float(second)
            show(second, second / 240, f"loss {second}")
    shown = [1, 11, 21, 31, 41, 51, 111, 171, 231]
    assert file.getvalue() == "".join(f"step {x}/100: loss {x}\n" for x in shown)
    screen, terminal = on_a_terminal()
    with progress(screen, None) as show:
        show(3, 0.5, "loss 3")
        screen._bars.refresh()
    assert "step 3 " in terminal.getvalue() and "step 3: loss" not in terminal.getvalue()


def test_a_progress_line_has_loss_and_speed_and_remaining_time():
    line = {"step": 10, "loss": 2.34567, "tokens_per_second": 12345.6}
    assert progress_line(line, 1.25) == "loss 2.346 · 12,346 tokens/s · 1.2 min left"
    assert progress_line({"tokens_per_second": 1.0}, 0.0) == "1 tokens/s · 0.0 min left"


def test_only_a_terminal_shows_elapsed_seconds():
    """A file contains only the name. A terminal removes the line at the end."""
    file = io.StringIO()
    with Screen(file=file).waiting("compiling"):
        assert file.getvalue() == "compiling …\n"
    assert file.getvalue() == "compiling …\n"
    screen, terminal = on_a_terminal()
    with screen.waiting("compiling"):
        (task,) = screen._bars.tasks
        task.start_time -= 42
        screen._bars.refresh()
    said = terminal.getvalue()
    assert "compiling" in said and "42 s" in said and not screen._bars.tasks


@pytest.mark.parametrize(
    ("norms", "warned"), [([1e-17, 1e-12], True), ([1e-17, 1e-3], False), ([], False)]
)
def test_training_warns_about_vanishing_gradients(norms, warned):
    said = vanishing([{"gradient_norm": norm} for norm in norms], 1_000_000)
    assert (said is not None) == warned
    if warned:
        assert "first 2 steps is at most 1.0e-12, but a model with" in said


def test_train_warns_if_warm_up_takes_most_of_the_run():
    assert late_peak(100, 10, 0.05) is None
    said = late_peak(101, 10, 0.05)
    assert "about 200 updates" in said and said.endswith(
        "the first 101. For a shorter warm-up, set --warmup-steps 20"
    )
    assert late_peak(0, 10, 1.0) is None and late_peak(100, 10, 0.0) is None


@pytest.mark.parametrize("title", ["$x_{$", "$a$ and $\\alpha$", "猫", "two\nlines\t\x07"])
def test_loss_plot_accepts_any_title(title, tmp_path):
    """A title is not parsed as mathematics, and characters without a glyph cause no error."""
    figure = plot_losses(METRICS, Measure("bits_per_byte", "$"), {"$": 2.0}, 100)
    write_figure(figure, title, tmp_path / "loss.png", dpi=120)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
