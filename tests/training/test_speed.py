"""The clock counts training time only; utilization is model FLOP/s over the peak."""

import gzip
import json
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.models.config import DecoderConfig
from jaxformer.models.flops import forward_flops
from jaxformer.models.kinds import build
from jaxformer.training import speed as module
from jaxformer.training.batch import Batch
from jaxformer.training.config import TextTraining
from jaxformer.training.devices import DEVICES, device_specs
from jaxformer.training.speed import Clock, ScoringTime, profile, update_size, utilization

CONFIG = TextTraining(
    DecoderConfig(vocab_size=64, max_length=16, num_layers=2, embed_dim=32, num_heads=2)
)


@pytest.fixture
def time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_elapsed_time_includes_training_but_not_compilation_or_pauses(time):
    """Time before the start and during pauses does not count. A resumed run adds to its time."""
    clock = Clock()
    time[0] += 7  # compilation
    assert clock.seconds == 0
    clock.start(0.0)
    time[0] += 3
    with clock.paused():
        time[0] += 50
        assert clock.trained == clock.seconds == 3
    time[0] += 2
    assert clock.seconds == 5
    later = Clock()
    later.trained = clock.seconds
    with later.paused():  # an evaluation before training continues
        time[0] += 9
    later.start(0.5)
    time[0] += 1
    assert later.seconds == 6


def test_training_clock_excludes_pauses_from_tokens_per_second(time):
    clock = Clock()
    clock.start(0.0)
    for tokens, seconds in ((100, 4), (300, 1)):
        clock.count(tokens, 7 * tokens)
        time[0] += seconds
        with clock.paused():
            time[0] += 30
        assert clock.lap() == pytest.approx((tokens / seconds, 7 * tokens / seconds))


def test_the_remaining_time_of_training_excludes_pauses(time):
    """Programs compile in the first pauses, so including pauses would slow the estimate down."""
    clock = Clock()
    clock.trained = 100.0  # from an earlier session
    clock.start(0.25)
    time[0] += 10
    clock.count(50)
    with clock.paused():
        time[0] += 10
    assert clock.remaining(0.5) == pytest.approx(20.0)
    assert clock.remaining(1.0) == 0.0
    assert clock.seconds_per_token == pytest.approx(0.2)


@given(
    steps=st.integers(1, 60),
    every=st.integers(1, 30),
    number=st.integers(1, 20),
    total=st.integers(1, 20),
    costs=st.tuples(*[st.floats(0.1, 9.0)] * 3),
)
def test_estimated_duration_of_an_evaluation_equals_actual_duration(
    steps, every, number, total, costs
):
    """The estimate is exact from the second evaluation on, and uses the task's guess before."""
    update, target, guess = costs
    part = min(1.0, number / total)
    task = SimpleNamespace(num_targets=total, part=part, scoring_cost=guess)
    now, seen, evaluations = [0.0], [], 0
    with mock.patch.object(module.time, "perf_counter", lambda: now[0]):
        scoring, scored = ScoringTime(task, every), 0.0
        for step in range(1, steps + 1):
            seen.append((evaluations, scored, scoring.remaining(step, step / steps, update)))
            if step == steps or step % every == 0:
                begin = now[0]
                with scoring.measured():
                    now[0] += target * part * total + (40.0 if evaluations == 0 else 0.0)
                evaluations += 1
                if step == steps and part < 1:
                    now[0] += target * total
                scored += now[0] - begin - 40.0 * (evaluations == 1)
    for measured, before, estimate in seen:
        pace = target if measured >= 2 else guess * update
        assert estimate == pytest.approx(pace / target * (scored - before))


def test_an_update_has_the_flops_of_three_forward_passes():
    """The backward pass has twice the FLOPs of the forward pass, and micro-batches add up."""
    ids, model = np.zeros((3, 5, 16), np.int32), build(CONFIG.model)
    _, flops = update_size(model, Batch(ids, ids), is_lora=False)
    assert flops == 3 * 5 * 3 * forward_flops(model, 16)
    assert update_size(model, Batch(ids, ids), is_lora=True)[1] == flops * 2 // 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu:h100"),
        ("TPU v4", "tpu:v4"),
        ("TPU v5 lite", "tpu:v5e"),
        ("TPU v5p", "tpu:v5p"),
        ("TPU v6 lite", "tpu:v6e"),
    ],
)
def test_utilization_is_relative_to_the_peak_of_all_devices(kind, name):
    assert device_specs(kind) == DEVICES[name]
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind=kind)] * 4))
    half = {"model_flops_utilization": 0.5}
    assert utilization(2 * DEVICES[name].flops, mesh) == half


def test_compute_utilization_is_omitted_if_device_peak_is_unknown():
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="cpu")]))
    assert utilization(1e12, mesh) == {}


@pytest.mark.slow
@pytest.mark.parametrize("number", [5, 7, 12])
def test_profile_of_training_contains_updates_6_to_10(number, tmp_path):
    """A shorter run says that it has no profile. Without the flag, a run prints nothing."""
    said, folder = [], tmp_path / "profile"
    for wanted in (False, True):
        assert said == [] and not folder.exists()
        with profile(folder, wanted, said.append) as update:
            for step in range(1, number + 1):
                with update(), jax.profiler.TraceAnnotation(f"update {step}"):
                    pass
    if number == 5:
        assert said == ["no profile was written: a profile needs more than 5 updates"]
        assert not folder.exists()
        return
    assert said == [f"profile: {folder}"] and list(folder.rglob("*.xplane.pb"))
    (trace,) = folder.rglob("perfetto_trace.json.gz")
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    traced = {name for name in names if name and name.startswith("update ")}
    assert traced == {f"update {step}" for step in range(6, min(number, 10) + 1)}


def test_profile_of_training_does_not_replace_a_file(tmp_path):
    (tmp_path / "profile").write_text("mine")
    for wanted in (False, True):
        try:
            with profile(tmp_path / "profile", wanted, pytest.fail):
                assert not wanted
        except ValueError as error:
            assert wanted and "profile is a file, but the profile needs a folder" in str(error)
    assert (tmp_path / "profile").read_text() == "mine"
