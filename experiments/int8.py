"""Compares the size and the logits of GPT-2 with int8 weights and with float32 weights.

    python experiments/int8.py                            # 124M, random weights
    python experiments/int8.py --seeds 5 --record int8-cpu

The quantized weights are the matrices and the token table. `bench_decode.py --no-torch` measures
the decoding speed.
"""

from record import Parser, at_least, conclude, run

from jaxformer.models.config import PRESETS

GPT2 = [name for name in PRESETS if name.startswith("gpt2")]


def compared(preset: str, seed: int, batch_size: int, length: int) -> dict:
    """Compares int8 with float32 weights: the ratio of bytes, and the error of the logits.

    The error is measured in standard deviations of the logits.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxformer as jf
    from jaxformer.functional.linear.affine import quantize_all

    model = jf.Decoder(jf.preset(preset))
    variables = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))
    integers = {"params": jax.jit(quantize_all)(variables["params"])}
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.config.vocab_size, (batch_size, length))
    apply = jax.jit(model.apply)
    logits, found = (np.asarray(apply(x, tokens), float) for x in (variables, integers))
    bytes_ = [sum(leaf.nbytes for leaf in jax.tree.leaves(x)) for x in (integers, variables)]
    difference = (found - logits) / logits.std()
    return {
        "preset": preset,
        "seed": seed,
        "bytes": bytes_[0] / bytes_[1],
        "mean": float(abs(difference).mean()),
        "root_mean_square": float(np.sqrt((difference**2).mean())),
        "same_argmax": float((found.argmax(-1) == logits.argmax(-1)).mean()),
    }


def main():
    parser = Parser(__doc__)
    parser.add_argument("--preset", choices=GPT2, default="gpt2-124m")
    parser.add_argument("--seeds", type=at_least(1), default=1, help="the number of seeds")
    parser.add_argument("--batch-size", type=at_least(1), default=2)
    parser.add_argument("--length", type=at_least(1), default=96)
    arguments = parser.parse_args()
    lines = []
    for seed in range(arguments.seeds):
        line = compared(arguments.preset, seed, arguments.batch_size, arguments.length)
        print(
            f"{line['preset']}, seed {seed}: {line['bytes']:.4f} of the bytes; logits differ by "
            f"{line['mean']:.4f} of their standard deviation on average, "
            f"{line['root_mean_square']:.4f} root mean square; "
            f"{line['same_argmax']:.1%} of the most probable tokens agree"
        )
        lines.append(line)
    conclude(lines, arguments.record)


if __name__ == "__main__":
    run(main)
