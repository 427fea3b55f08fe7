"""Bugs of `jaxformer bench`: its counts, its shares and its files."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, takes

BENCH = "bench/test_measurement.py"
WORK = "bench/test_work.py"

BUGS = (
    Bug(
        "the average causal context counts a key too few",
        "functional.row_size:visible_pairs",
        Replace("min(start + _BLOCK, length)", "min(start + _BLOCK, length) - 1"),
        "models/test_flops.py::test_visible_pairs_are_those_of_the_mask",
    ),
    Bug(
        "utilization ignores the number of devices",
        "bench.measurement:Measurement.flops_per_second",
        Replace("self.flops / self.devices", "self.flops"),
        f"{BENCH}::test_utilization_is_per_device_and_relative_to_both_peaks",
    ),
    Bug(
        "float32 is compared with the published peak of bfloat16",
        "bench.measurement:Ceilings.published_flops",
        takes(dtype=lambda _: "bfloat16"),
        f"{BENCH}::test_the_published_peak_is_that_of_bfloat16",
    ),
    Bug(
        "a decoding step counts the tables of vectors as read",
        "bench.models:weight_bytes",
        Replace('_num_bytes(weights) - _num_bytes(weights["embedding"])', "_num_bytes(weights)"),
        f"{WORK}::test_the_bytes_of_a_step_are_those_of_the_arrays",
    ),
    Bug(
        "reading the prompt counts as decoding",
        "bench.models:step_seconds",
        Replace("times: list[float] = []", "times: list[float] = [clock()]"),
        "bench/test_timing.py::test_steps_are_timed_between_the_first_and_the_last_tokens",
    ),
    Bug(
        "the warm-up counts as a round",
        "bench.measurement:Rounds.measure",
        Replace("jax.block_until_ready(run())", "pass"),
        "bench/test_timing.py::test_the_median_and_the_range_exclude_the_warm_up",
    ),
    Bug(
        "the warm-up of programs in turn counts as a round",
        "bench.measurement:in_turn",
        Replace("each[warmup:]", "each"),
        "bench/test_timing.py::test_programs_are_timed_in_turn_after_the_warm_up",
    ),
    Bug(
        "a first block of tokens counts although it is skipped",
        "bench.models:step_seconds",
        Replace("times[skip]", "times[0]"),
        "bench/test_timing.py::test_steps_are_timed_between_the_first_and_the_last_tokens",
    ),
    Bug(
        "a part starts although it cannot end in time",
        "bench.suite:run_parts",
        Replace("remaining < part.seconds", "remaining < 0"),
        "bench/test_timing.py::test_parts_that_do_not_fit_the_budget_are_skipped_with_the_reason",
    ),
    Bug(
        "figures go beside the picture of another measurement",
        "artifacts.files:next_free",
        Replace("any(map(Path.exists, paths))", "paths[0].exists()"),
        "cli/test_bench.py::test_existing_files_are_kept_and_skipped_parts_are_named",
    ),
)
