"""What is shown is what was said, whatever it looks like and wherever it goes."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxformer.training.picture import draw_run
from jaxformer.training.screen import Screen
from jaxformer.training.tasks.task import Measure

METRICS = [{"step": 1, "loss": 2.0}, {"step": 1, "held_out_loss": 2.0, "bits_per_byte": 1.5}]


@given(text=st.text())
@example(text="y = a[n] + c[key]  # [/bold] [red]:smile:\tx\r\x07" + " long" * 40)
def test_text_is_shown_as_it_is(text):
    """In a file; on a terminal narrower than the text; and above a progress bar."""
    file, terminal, above = io.StringIO(), io.StringIO(), io.StringIO()
    Screen(file=file).say(text)
    assert file.getvalue() == text + "\n"
    Screen(file=terminal, force_terminal=True, width=20).say(text)
    assert terminal.getvalue() == text + "\n"
    screen = Screen(file=above, force_terminal=True, force_interactive=True, width=80)
    with screen.bar(10) as show:
        show(3, "step 3 of 10", text)
        screen.say(text)
    assert f"{text}\n" in above.getvalue()


def test_a_bar_is_for_terminals():
    """Two at once on a terminal, gone at the end; in a file nothing."""
    file, terminal = io.StringIO(), io.StringIO()
    for screen in (
        Screen(file=file),
        Screen(file=terminal, force_terminal=True, force_interactive=True, width=80),
    ):
        with screen.bar(10) as show:
            show(3, "step 3 of 10", "[/bold]")
            with screen.bar(100) as show_part:
                show_part(50, ":smile:", "half")
                screen._bars.refresh()  # as it does four times a second
                screen.say("between")
        screen.say("after")
    assert file.getvalue() == "between\nafter\n"
    said = terminal.getvalue()
    assert all(words in said for words in ("step 3 of 10", "[/bold]", ":smile:", "half"))
    assert "3 of 10" not in said[said.index("after") :]


@pytest.mark.parametrize("title", ["$x_{$", "$a$ and $\\alpha$", "猫", "two\nlines\t\x07"])
def test_a_picture_of_any_title(title, tmp_path):
    """Mathematics is not looked for in a name, and a character without a glyph is no trouble."""
    draw_run(METRICS, tmp_path / "loss.png", title, Measure("bits_per_byte", "$"), {"$": 2.0}, 100)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
