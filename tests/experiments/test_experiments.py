"""The experiments: what translation is asked of, what they refuse, and going on after a kill."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def run(*arguments, cwd, script="translate.py"):
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_what_is_held_out_was_never_seen():
    """Not as a phrase of its own either; both sides are of one value, however many phrases."""
    pytest.importorskip("babel")
    from phrases import LONGEST, phrases, strung

    train, held_out = phrases(7000, seed=0)
    assert (train, held_out) == phrases(7000, seed=0)
    for seen, asked in zip(train, held_out, strict=True):  # kind by kind
        assert len(asked) > 3 and not set(dict(seen)) & set(dict(asked))
    french = {english: french for asked in held_out for english, french in asked}
    for english, translated, count in strung(held_out, 200, seed=1, mostly_short=False):
        assert 1 <= count <= LONGEST
        if count == 1:
            assert french[english] == translated
    counts = [count for *_, count in strung(train, 2000, seed=1, mostly_short=True)]
    assert counts.count(1) > 3 * counts.count(LONGEST) > 0


REFUSED = {
    "a has 2 lines and b has 1": ("translate.py", "--source", "a", "--target", "b"),
    "c: line 2 is empty": ("translate.py", "--source", "a", "--target", "c"),
    "--source and --target belong together": ("translate.py", "--source", "a"),
    "--beam-width is 0": ("translate.py", "--beam-width", "0"),
    "--steps is 3": ("zoo.py", "--steps", "3"),
    "nowhere: no such file": ("build_up.py", "nowhere"),
    "the text has 1 tokens": ("shakespeare.py", "b"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_one_line_and_status_2(tmp_path, message):
    """The message, and nothing made."""
    texts = {"a": "one\ntwo\n", "b": "un\n", "c": "un\n\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    script, *arguments = REFUSED[message]
    done = run(*arguments, cwd=tmp_path, script=script)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == set(texts)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_ended(tmp_path):
    """Killed in the midst of training, and given again: the seconds already spent are not spent
    again, and a run of other settings is not gone on with."""
    pytest.importorskip("babel")
    command = ("--models", "lstm", "--minutes", "0.7", "--out", "run")
    process = subprocess.Popen([sys.executable, "-c", _IMPATIENT, *command], cwd=tmp_path, env=None)
    checkpoints = tmp_path / "run" / "lstm" / "checkpoints"
    while not list(checkpoints.glob("*/_CHECKPOINT_METADATA")):
        assert process.poll() is None
    process.kill()
    process.wait()
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0 and "going on from step" in done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])["lstm"]
    assert 42 <= figures["seconds"] < 60 and figures["exact"] < 1
    other = run(*command, "--seed", "1", cwd=tmp_path)
    assert other.returncode == 2 and "holds a run of other settings" in other.stderr


_IMPATIENT = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import translation
translation.CHECKPOINT_SECONDS = 15
import translate
translate.main()
"""
