"""Rounds, medians and the time budget, with a clock that only the tests advance."""

import jax
import pytest

from jaxformer.bench.measurement import Rounds, Timing, time_alternately
from jaxformer.bench.models import step_seconds
from jaxformer.bench.suite import SuitePart, run_parts
from tests.bench.clock import FakeClock


def test_median_and_range_of_timings_exclude_the_warm_up():
    clock = FakeClock()
    timing = Rounds(5, 100.0, clock).measure(clock.program(50.0, 1.0, 5.0, 2.0, 8.0, 3.0))
    assert timing == Timing(median=3.0, least=1.0, most=8.0, rounds=5)


def test_timing_of_a_repeated_program_is_divided_by_the_repeats():
    clock = FakeClock()
    timing = Rounds(3, 100.0, clock).measure(clock.program(9.0, 4.0, 8.0, 12.0), repeats=4)
    assert timing == Timing(2.0, 1.0, 3.0, 3)


@pytest.mark.parametrize(("each", "rounds"), [(0.5, 9), (1.0, 5), (2.0, 3), (60.0, 3)])
def test_timing_stops_at_the_time_limit_after_at_least_three_rounds(each, rounds):
    clock = FakeClock()
    assert Rounds(9, 5.0, clock).measure(clock.program(each)).rounds == rounds


def test_programs_are_timed_alternately_after_the_warm_up():
    """The machine becomes slower all the time, but the ratio of the programs stays the same."""
    order, speeds = [], iter(range(1, 100))

    def timer(name, work):
        def seconds():
            order.append(name)
            return work * next(speeds)

        return seconds

    timers = {name: timer(name, work) for name, work in (("a", 1), ("b", 3))}
    assert time_alternately(timers, rounds=2) == {"a": [3, 5], "b": [12, 18]}
    assert order == ["a", "b"] * 3
    assert time_alternately(timers, rounds=1, warmup=0) == {"a": [7], "b": [24]}


def test_timing_skips_warm_up_of_a_program_that_has_run_before():
    clock = FakeClock()
    assert Rounds(3, 100.0, clock).measure(clock.program(50.0, 1.0, 3.0), warmup=0).median == 3.0
    assert Rounds(9, 5.0, clock, least=1).measure(clock.program(60.0), warmup=0).rounds == 1


def test_decoding_steps_are_timed_from_the_first_to_the_last_token():
    """Reading the prompt (7 s), returning the result (2 s) and a first block do not count."""
    clock = FakeClock()

    def generate(on_tokens):
        for seconds in (7.0, 1.0, 1.5):
            clock.now += seconds
            on_tokens([[0]])
        clock.now += 2.0

    assert step_seconds(generate, clock) == 2.5
    assert step_seconds(generate, clock, skip=1) == 1.5


def parts_of(clock, **seconds):
    """Returns parts that take exactly the estimated seconds."""
    return [SuitePart(name, x, lambda x=x: [clock.program(x)()]) for name, x in seconds.items()]


def show(name, run):
    run()
    return [name]


def test_benchmarks_beyond_the_time_budget_are_skipped_with_a_reason():
    """A smaller part after a skipped one still runs."""
    clock = FakeClock()
    parts = parts_of(clock, first=6.0, large=5.0, small=4.0)
    found, skipped = run_parts(parts, 10.0, show, clock)
    assert found == ["first", "small"] and clock.now == 110.0
    assert skipped == {"large": "this part needs about 5 s, but 4 s remain"}


def test_a_failing_benchmark_does_not_affect_other_results():
    def fails():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    clock = FakeClock()
    first, last = parts_of(clock, first=1.0, last=1.0)
    parts = [first, SuitePart("large", 1.0, fails), last]
    found, skipped = run_parts(parts, 10.0, show, clock)
    assert found == ["first", "last"]
    assert skipped == {"large": "RESOURCE_EXHAUSTED: out of memory"}
