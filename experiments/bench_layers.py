"""Compares unrolled with scanned layers: compilation time and time per training step.

    python experiments/bench_layers.py                     # 6, 12, 24 and 48 layers
    python experiments/bench_layers.py --depths 96 --dim 128 --record layers-cpu

Unrolled layers run faster and compile more slowly. The report contains the number of steps after
which unrolled layers take less time in total, compilation included. The choice of
`Execution(layers="auto")` is based on the measurements of this script.
"""

from functools import partial

from bench_train import Size, jaxformer_step
from record import Parser, at_least, conclude, run
from side_by_side import compare, ratio


def main():
    parser = Parser(__doc__)
    parser.add_argument("--depths", type=at_least(1), nargs="+", default=[6, 12, 24, 48])
    parser.add_argument(
        "--dim", type=at_least(64), default=256, help="number of features; each head has 64"
    )
    parser.add_argument("--length", type=at_least(1), default=128)
    parser.add_argument("--batch-size", type=at_least(1), default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    arguments = parser.parse_args()
    if arguments.dim % 64:
        raise ValueError(f"--dim is {arguments.dim}; it must be a multiple of 64")
    shape = (arguments.dim, arguments.dim // 64, 1000, arguments.length, arguments.batch_size)
    lines = []
    for depth in arguments.depths:
        size = Size(depth, *shape)
        subjects = compare(
            {
                layers: partial(jaxformer_step, size, arguments.dtype, layers, "none")
                for layers in ("unrolled", "scan")
            },
            arguments.rounds,
        )
        lines.append(report(depth, **subjects))
    conclude(lines, arguments.record)


def report(depth: int, unrolled, scan) -> dict:
    """Prints a line and returns the measurements."""
    times = ratio(unrolled, scan)
    more = unrolled.setup_seconds - scan.setup_seconds
    saved = scan.median - unrolled.median
    won = f"{more / saved:,.0f} steps" if saved > 0 else "never"
    print(
        f"{depth:3} layers: first step {unrolled.setup_seconds:5.1f} s unrolled, "
        f"{scan.setup_seconds:5.1f} s scanned; then {1e3 * unrolled.median:8.1f} ms unrolled, "
        f"{1e3 * scan.median:8.1f} ms scanned; unrolled is {times:.2f}× as fast; "
        f"saves total time after: {won}",
        flush=True,
    )
    return {
        "layers": depth,
        "unrolled": {"first": unrolled.setup_seconds, "next": unrolled.median},
        "scan": {"first": scan.setup_seconds, "next": scan.median},
        "ratio": times,
    }


if __name__ == "__main__":
    run(main)
