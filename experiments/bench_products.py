"""Times only the matrix products of a training step, in XLA and in torch.

    python experiments/bench_products.py --record products-cpu
    python experiments/bench_products.py --sizes 10.8m --rounds 15 --dtype bfloat16

A training step spends most of its time in products with weights: y = x W and, in the backward pass,
dx = dy Wᵀ and dW = xᵀ dy. The script times each product with a weight matrix, and the products of
attention per head. XLA computes the products with the package's product function, and torch with
`einsum`. The sum of the medians of all products estimates the time of a step that computes only
these products, one after another.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from bench_train import SIZES, Size
from record import Parser, at_least, conclude, require, run

from jaxformer.bench.measurement import Rounds

# The script waits this many seconds before a product, because the previous library's threads keep
# the cores busy for a while.
PAUSE = 0.3


class Product(NamedTuple):
    """A matrix product of a training step.

    Attributes:
        name: The name of the result.
        formula: The einsum formula.
        shapes: The shapes of both operands.
        times: How often a training step computes this product.
        flops: The number of floating-point operations.
    """

    name: str
    formula: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    times: int
    flops: int


def of_weights(name: str, rows: int, inputs: int, outputs: int, times: int) -> list[Product]:
    """Returns the product with a weight matrix and the two products of its backward pass."""
    x, w, y, flops = (rows, inputs), (inputs, outputs), (rows, outputs), 2 * rows * inputs * outputs
    return [
        Product(f"{name}: x W", "bi,io->bo", (x, w), times, flops),
        Product(f"{name}: dy Wᵀ", "bo,io->bi", (y, w), times, flops),
        Product(f"{name}: xᵀ dy", "bi,bo->io", (x, y), times, flops),
    ]


def of_step(size: Size) -> list[Product]:
    """Returns the products of a training step whose attention is not split into blocks."""
    rows, dim, layers = size.batch_size * size.length, size.embed_dim, size.num_layers
    heads, head_dim = size.batch_size * size.num_heads, dim // size.num_heads
    scores = (heads, size.length, size.length)
    values = (heads, size.length, head_dim)
    flops = 2 * heads * size.length**2 * head_dim
    return [
        *of_weights("queries, keys, values", rows, dim, 3 * dim, layers),
        *of_weights("output of attention", rows, dim, dim, layers),
        *of_weights("feed-forward, up", rows, dim, 4 * dim, layers),
        *of_weights("feed-forward, down", rows, 4 * dim, dim, layers),
        *of_weights("logits", rows, dim, size.vocab_size, 1),
        Product("attention: q kᵀ", "hqd,hkd->hqk", (values, values), 2 * layers, flops),
        Product("attention: weights v", "hqk,hkd->hqd", (scores, values), 2 * layers, flops),
        Product("attention: weightsᵀ do", "hqk,hqd->hkd", (scores, values), 2 * layers, flops),
    ]


def prepared(product: Product, dtype: str) -> dict[str, Callable[[], object]]:
    """Returns, for each library, a function that computes the product once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch

    from jaxformer.functional.linear.products import contract

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in product.shapes]
    there = [jnp.asarray(x, dtype) for x in arrays]
    tensors = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays]
    compiled = jax.jit(lambda x, y: contract(product.formula, x, y))
    return {
        "XLA": lambda: compiled(*there),
        "torch": lambda: torch.einsum(product.formula, *tensors),
    }


def measured(product: Product, dtype: str, rounds: int) -> dict:
    """Times the product in both libraries and returns the medians."""
    medians = {}
    for name, function in prepared(product, dtype).items():
        time.sleep(PAUSE)
        medians[name] = Rounds(rounds, math.inf).measure(function).median
    speeds = {name: product.flops / x / 1e9 for name, x in medians.items()}
    shown = "   ".join(
        f"{name} {1e3 * medians[name]:8.2f} ms {speeds[name]:5.0f} GFLOP/s" for name in medians
    )
    print(f"  {product.name:32} {product.times:3} times   {shown}", flush=True)
    return {"product": product.name, "times": product.times, "seconds": medians, "gflops": speeds}


def summed(rows: list[dict]) -> dict[str, float]:
    """Adds up the seconds of all products of a step, for each library."""
    libraries = rows[0]["seconds"]
    return {name: sum(row["times"] * row["seconds"][name] for row in rows) for name in libraries}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10.8m", "124m/256"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=at_least(1), default=9)
    arguments = parser.parse_args()
    require("torch")
    from jaxformer.runtime import tune_cpu_runtime

    tune_cpu_runtime()
    figures = []
    for name in arguments.sizes:
        print(f"{name}, {arguments.dtype}: {SIZES[name]}")
        products = of_step(SIZES[name])
        rows = [measured(product, arguments.dtype, arguments.rounds) for product in products]
        of_attention = [row for row in rows if row["product"].startswith("attention")]
        with_weights = [row for row in rows if row not in of_attention]
        sums = {"with weights": summed(with_weights), "of attention": summed(of_attention)}
        for part, seconds in sums.items():
            shown = ", ".join(f"{library} {1e3 * x:,.0f} ms" for library, x in seconds.items())
            print(f"  all products {part}: {shown}")
        figures.append({"size": name, "dtype": arguments.dtype, "sums": sums, "products": rows})
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
