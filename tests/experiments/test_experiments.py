"""The experiments: what translation is asked of, what they refuse, and going on after a kill."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.tokenizer import Tokenizer
from tests.slow import mostly_slow

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
    "a has 2 lines and b has 1": ("translate", "--source", "a", "--target", "b"),
    "c: line 2 is empty": ("translate", "--source", "a", "--target", "c"),
    "--source and --target belong together": ("translate", "--source", "a"),
    "--vocab-size needs --source": ("translate", "--vocab-size", "300"),
    "--minutes is inf; it must be above 0, and finite": ("translate", "--minutes", "inf"),
    "b has one line": ("translate", "--source", "b", "--target", "b"),
    "--beam-width: '0' is not accepted; it must be a whole number of at least 1": (
        ("translate", "--beam-width", "0")
    ),
    "--steps: '3' is not accepted": ("zoo", "--steps", "3"),
    "--rounds: '0' is not accepted": ("bench_translate", "--rounds", "0"),
    "--batch-sizes is not for --capacity": ("bench_decode", "--capacity", "--batch-sizes", "8"),
    "--before: 'nowhere' is not accepted": ("bench_attention", "--before", "nowhere"),
    "--seed: 'x' is not accepted; it must be a whole number": ("fill_in", "--seed", "x"),
    "--picture: 'none/zoo.png' is not accepted": ("zoo", "--picture", "none/zoo.png"),
    "--picture: 'a' is not accepted; it must end in .png": ("build_up", "--picture", "a"),
    "nowhere: no such file": ("build_up", "nowhere"),
    "the text has 1 tokens": ("shakespeare", "b"),
    "nowhere is no folder": ("heads", "nowhere"),
}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": "one\ntwo\n", "b": "un\n", "c": "un\n\n"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_one_line_and_status_2(texts, message, monkeypatch, capsys):
    """The message, and nothing made."""
    import record

    script, *arguments = REFUSED[message]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit, match="2"):
        record.run(importlib.import_module(script).main)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert {path.name for path in texts.iterdir()} == {"a", "b", "c"}


def test_what_an_experiment_will_need_is_asked_for_at_once(texts, monkeypatch, capsys):
    """Not after an hour of training."""
    import record

    monkeypatch.setattr(record, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["translate", "--source", "a", "--target", "a"])
    with pytest.raises(SystemExit, match="2"):
        record.run(importlib.import_module("translate").main)
    assert "sacrebleu is not installed; pip install" in capsys.readouterr().err


def test_a_script_ends_with_that_status(texts):
    done = run("--source", "a", "--target", "b", cwd=texts)
    assert done.returncode == 2 and done.stderr == "translate.py: " + TWO_AND_ONE


TWO_AND_ONE = "a has 2 lines and b has 1; a parallel text has as many on both sides\n"


@pytest.fixture
def pupil(tmp_path, quick_compilation):
    """A tiny translator's parts: (make a trainer in a folder, model, tokenizer, texts)."""
    import translation

    texts = [f"{word} {number}" for word in ("one", "two", "three") for number in range(8)]
    tokenizer = Tokenizer.train(texts, 300)
    config = jf.RecurrentEncoderDecoderConfig(
        vocab_size=tokenizer.vocab_size, max_length=32, embed_dim=8, num_layers=1, dropout=0.1
    )
    model, ids = jf.build(config), tokenizer.encode_many(texts)

    def trainer(name):
        return translation.Trainer(
            model,
            list(zip(ids, ids[::-1], strict=True)),
            tmp_path / name,
            seconds=12,
            optimizer="muon",
            peak=1e-2,
            tokens=64,
            end_of_text=tokenizer.end_of_text,
            seed=0,
            smoothing=0.0,
            num_buckets=1,
        )

    return trainer, model, tokenizer, texts


@pytest.mark.slow
def test_a_trainer_goes_on_as_if_it_had_not_been_ended(pupil, monkeypatch):
    """Parameters, optimiser, dropout, order of the data, what is noted of the losses, and the
    learning rate, which follows the clock: killed between two checkpoints, the run ends where it
    would have."""
    import translation

    make, clock = pupil[0], [0.0]
    monkeypatch.setattr(translation.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(translation, "CHECKPOINT_SECONDS", 4)
    monkeypatch.setattr(translation, "LOOK_EVERY", 3)

    def train(name, steps=None):
        """Each step takes a second; the process is killed after so many."""
        trainer = make(name)
        update = trainer.update

        def timed(*arguments):
            if steps == len(done):
                raise RuntimeError("killed")
            done.append(clock.__setitem__(0, clock[0] + 1))
            return update(*arguments)

        done, trainer.update = [], timed
        trainer.run(name)
        return trainer

    whole = train("whole")
    with pytest.raises(RuntimeError, match="killed"):
        train("killed", 8)
    clock[0] += 1000
    killed = train("killed")
    assert int(killed.state.step) == int(whole.state.step) == 12
    assert (killed.elapsed, killed.tokens_read) == (whole.elapsed, whole.tokens_read)
    assert killed.history == whole.history and len(whole.history) == 4
    jax.tree.map(np.testing.assert_array_equal, killed.state.params, whole.state.params)


@pytest.mark.slow
def test_muon_steps_are_orthogonal_kernel_by_kernel():
    """Each layer's own matrix, alone or in a stack: its singular values come out alike, none below
    half the largest; all of a bias takes a step of one size, as by Adam."""
    import translation

    shapes = {"kernel": (16, 24), "bias": (2, 24), "stack": {"kernel": (3, 16, 24)}}
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: type(x) is tuple)
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.ndim), x.shape), params)
    muon = translation.OPTIMIZERS["muon"](1.0)
    step, _ = muon.update(gradients, muon.init(params), params)
    for kernel in (step["kernel"], *step["stack"]["kernel"]):
        values = jnp.linalg.svd(kernel, compute_uv=False)
        assert values[-1] > 0.5 * values[0]
    sizes = jnp.abs(step["bias"])
    np.testing.assert_allclose(sizes, sizes.max(), rtol=1e-3)


@pytest.mark.parametrize("beam_width", mostly_slow([1, 2], 2))
def test_translations_come_in_the_order_of_the_texts(pupil, beam_width):
    """Sorted by length, in batches, the last one filled up: as if each had been asked alone."""
    import translation

    make, model, tokenizer, texts = pupil
    params = make("untrained").state.params
    asked = [" ".join(texts[:3]), texts[5], " ".join(texts[9:11]), texts[20], texts[7]]

    def found(texts):
        how = {"beam_width": beam_width, "batch_size": 2}
        return translation.translate(model, params, tokenizer, texts, **how)

    together = found(asked)
    assert len(set(together)) > 1
    assert together == [found([text])[0] for text in asked]


def test_another_run_is_not_gone_on_with(tmp_path):
    """Other text under the same names, other settings: refused by name, and nothing is changed."""
    import translation

    pairs, cased = [["one", "un"]], [["One", "un"]]
    settings = {"text": translation.fingerprint(pairs, pairs), "minutes": 5.0}
    for _ in range(2):
        translation.same_run(tmp_path, settings)
    before = (tmp_path / "settings.json").read_text()
    for name, value in (("minutes", 6.0), ("text", translation.fingerprint(cased, pairs))):
        with pytest.raises(ValueError, match=f"holds a run whose {name} was"):
            translation.same_run(tmp_path, {**settings, name: value})
    assert (tmp_path / "settings.json").read_text() == before


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_ended(tmp_path):
    """Killed in the midst of training, and given again: the seconds already spent are not spent
    again, and a run of other settings is not gone on with."""
    pytest.importorskip("babel")
    command = ("--models", "lstm", "--minutes", "0.7", "--out", "run")
    process = subprocess.Popen([sys.executable, "-c", _IMPATIENT, *command], cwd=tmp_path, env=None)
    checkpoints = Checkpoints(tmp_path / "run" / "lstm" / "checkpoints")
    while not checkpoints.steps():  # written to the end
        assert process.poll() is None
    process.kill()
    process.wait()
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0 and "going on from step" in done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])["lstm"]
    assert 42 <= figures["seconds"] < 60 and figures["exact"] < 1
    other = run(*command, "--seed", "1", cwd=tmp_path)
    assert other.returncode == 2 and "holds a run whose seed was 0" in other.stderr


_IMPATIENT = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import translation
translation.CHECKPOINT_SECONDS = 15
import translate
translate.main()
"""


@pytest.mark.parametrize("detector, behind", enumerate([1, 0, None, 4, 3]))
def test_a_detector_finds_the_head_that_looks_there(detector, behind):
    """All of its weight so many places back (None: at the first), and nobody else's."""
    import heads

    length = 8
    rows = np.arange(length)
    weights = np.zeros((2, 3, 2, length, length))  # layer 1's head 0 looks there, the others around
    weights[:] = np.eye(length)[(rows - 2) % length]
    weights[1, :, 0] = np.eye(length)[0 * rows if behind is None else (rows - behind) % length]
    scores = heads.detected(weights, weights)
    assert scores[detector, 1, 0] == 1.0 and scores[detector].sum() == 1.0


@pytest.mark.slow
def test_a_head_that_nobody_hears_costs_nothing():
    import heads

    from jaxformer.models.build import init

    config = jf.DecoderConfig(vocab_size=11, max_length=8, num_layers=2, embed_dim=8, num_heads=2)
    model = jf.build(config)
    variables = init(model, jax.random.key(0))
    output = variables["params"]["blocks"]["attention"]["output"]
    output["kernel"] = (20 * output["kernel"]).at[0, 4:].set(0.0)  # layer 0's head 1
    tokens = np.random.default_rng(0).integers(0, 11, (16, 8)).astype(np.int32)
    _, means = heads.looked_at(model, variables, tokens)
    whole, more = heads.ablated(model, variables, tokens, means)
    logits = model.apply(variables, tokens[:, :-1])[:, 3:]
    expected = jf.functional.cross_entropy(logits, jnp.asarray(tokens[:, 4:]))
    np.testing.assert_allclose(whole, expected, rtol=1e-5)
    assert abs(more[0, 1]) < 1e-5 and (abs(np.delete(more.ravel(), 1)) > 1e-4).all()
