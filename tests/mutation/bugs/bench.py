"""Bugs of `jaxformer bench`: its counts, its shares and its files."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, takes

BENCH = "bench/test_measurement.py"
WORK = "bench/test_work.py"

BUGS = (
    Bug(
        "the average causal context counts a key too few",
        "functional.sequence_size:visible_pairs",
        Replace("min(start + _BLOCK, length)", "min(start + _BLOCK, length) - 1"),
        "models/test_flops.py::test_number_of_visible_pairs_equals_the_sum_of_the_mask",
    ),
    Bug(
        "utilization ignores the number of devices",
        "bench.measurement:Measurement.flops_per_second",
        Replace("self.flops / self.devices", "self.flops"),
        f"{BENCH}::test_utilization_is_flops_per_device_over_measured_or_published_peak",
    ),
    Bug(
        "float32 is compared with the published peak of bfloat16",
        "bench.measurement:Ceilings.published_flops",
        takes(dtype=lambda _: "bfloat16"),
        f"{BENCH}::test_utilization_of_published_peak_is_shown_for_bfloat16_only",
    ),
    Bug(
        "a decoding step counts the tables of vectors as read",
        "bench.models:weight_bytes",
        Replace('_num_bytes(weights) - _num_bytes(weights["embedding"])', "_num_bytes(weights)"),
        f"{WORK}::test_counted_bytes_of_a_decoding_step_equal_its_array_sizes",
    ),
    Bug(
        "reading the prompt counts as decoding",
        "bench.models:step_seconds",
        Replace("times: list[float] = []", "times: list[float] = [clock()]"),
        "bench/test_timing.py::test_decoding_steps_are_timed_from_the_first_to_the_last_token",
    ),
    Bug(
        "the warm-up counts as a round",
        "bench.measurement:Rounds.measure",
        Replace("jax.block_until_ready(run())", "pass"),
        "bench/test_timing.py::test_median_and_range_of_timings_exclude_the_warm_up",
    ),
    Bug(
        "the warm-up of programs in turn counts as a round",
        "bench.measurement:time_alternately",
        Replace("each[warmup:]", "each"),
        "bench/test_timing.py::test_programs_are_timed_alternately_after_the_warm_up",
    ),
    Bug(
        "the skipped first block of tokens counts in the decoding speed",
        "bench.models:step_seconds",
        Replace("times[skip]", "times[0]"),
        "bench/test_timing.py::test_decoding_steps_are_timed_from_the_first_to_the_last_token",
    ),
    Bug(
        "a benchmark part starts although the time budget is too short",
        "bench.suite:run_parts",
        Replace("remaining < part.seconds", "remaining < 0"),
        "bench/test_timing.py::test_benchmarks_beyond_the_time_budget_are_skipped_with_a_reason",
    ),
    Bug(
        "the JSON file is written beside another measurement's picture",
        "artifacts.files:next_free",
        Replace("any(map(Path.exists, paths))", "paths[0].exists()"),
        "cli/test_bench.py::test_bench_keeps_existing_files_and_lists_skipped_benchmarks",
    ),
)
