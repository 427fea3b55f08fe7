"""The clock counts training time only; utilization is operations by formula over the peak."""

from types import SimpleNamespace
from unittest import mock

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
from jaxformer.training.devices import DEVICES, device_of
from jaxformer.training.speed import Clock, ScoringTime, update_size, utilization

CONFIG = TextTraining(
    DecoderConfig(vocab_size=64, max_length=16, num_layers=2, embed_dim=32, num_heads=2)
)


@pytest.fixture
def time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_seconds_are_those_of_training(time):
    """Time before the start and during pauses does not count; a resumed run continues."""
    clock = Clock()
    time[0] += 7  # compiling
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
    with later.paused():  # an evaluation before training goes on
        time[0] += 9
    later.start(0.5)
    time[0] += 1
    assert later.seconds == 6


def test_a_lap_returns_tokens_per_second_of_training(time):
    clock = Clock()
    clock.start(0.0)
    for tokens, seconds in ((100, 4), (300, 1)):
        clock.count(tokens, 7 * tokens)
        time[0] += seconds
        with clock.paused():
            time[0] += 30
        assert clock.lap() == pytest.approx((tokens / seconds, 7 * tokens / seconds))


def test_the_remaining_time_of_training_excludes_pauses(time):
    """Programs are compiled in the first pauses, so the pace with pauses would be far too slow."""
    clock = Clock()
    clock.trained = 100.0  # in an earlier start
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
def test_the_remaining_time_of_evaluations_is_what_they_take(steps, every, number, total, costs):
    """From the second evaluation on, at every update, and before with the task's guess."""
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


def test_an_update_takes_three_forward_passes():
    """The backward pass takes twice the operations of the forward pass; micro-batches add up."""
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
def test_utilization_is_relative_to_all_devices(kind, name):
    assert device_of(kind) == DEVICES[name]
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind=kind)] * 4))
    half = {"model_flops_utilization": 0.5}
    assert utilization(2 * DEVICES[name].flops, mesh) == half


def test_a_device_without_figures_has_no_utilization():
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="cpu")]))
    assert utilization(1e12, mesh) == {}
