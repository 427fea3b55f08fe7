"""A run's minutes are those of training alone."""

import pytest

from jaxformer.training import clock as module
from jaxformer.training.clock import Clock


@pytest.fixture
def time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_seconds_are_those_of_training(time):
    """Before the start, and while it is paused, none pass; a later start of the run goes on."""
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


def test_a_lap_is_tokens_a_second_of_training(time):
    clock = Clock()
    clock.start(0.0)
    for tokens, seconds in ((100, 4), (300, 1)):
        clock.count(tokens, 7 * tokens)
        time[0] += seconds
        with clock.paused():
            time[0] += 30
        assert clock.lap() == pytest.approx((tokens / seconds, 7 * tokens / seconds))


def test_what_remains_is_anyones_time(time):
    """At the pace since the start, with all its pauses, which will come again."""
    clock = Clock()
    clock.start(0.25)
    time[0] += 10
    with clock.paused():
        time[0] += 10
    assert clock.remaining(0.5) == pytest.approx(40.0)
    assert clock.remaining(1.0) == 0.0
