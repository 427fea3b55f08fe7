"""Trains on Tiny Shakespeare with nanoGPT's two settings and compares with its published losses.

    python experiments/shakespeare.py tinyshakespeare.txt                   # minutes on a CPU
    python experiments/shakespeare.py tinyshakespeare.txt --setting large   # needs a GPU

The text and the split are nanoGPT's: 1,115,394 ASCII characters, the first 90% for training and the
last 10% held out. The held-out loss is computed on every held-out window of the training length.
Each position in a window therefore has the same weight as in nanoGPT, which draws random windows.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from record import Parser, at_least, conclude, run
from windows import batches, check_length, loss

from jaxformer import Decoder, DecoderConfig, Execution, parameter_count
from jaxformer.runtime import tune_cpu_runtime
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.step import init_state, make_step, updates


@dataclass(frozen=True)
class Setting:
    """A setting of nanoGPT.

    Attributes:
        model: The config of the model.
        optimizer: The config of the optimizer.
        steps: The number of training steps.
        batch_size: The number of sequences per batch.
        published: Nats per character on held-out text, from nanoGPT's README.
    """

    model: DecoderConfig
    optimizer: OptimizerConfig
    steps: int
    batch_size: int
    published: float


_NANOGPT = OptimizerConfig(learning_rate=1e-3, warmup_steps=100, final_fraction=0.1, beta2=0.99)
SETTINGS = {
    "small": Setting(
        DecoderConfig(65, max_length=64, num_layers=4, embed_dim=128, num_heads=4, use_bias=False),
        # nanoGPT's learning rate (1e-3, decaying to a tenth) gave a slightly higher loss.
        replace(_NANOGPT, learning_rate=2e-3, final_fraction=0.0),
        steps=2000,
        batch_size=12,
        published=1.88,
    ),
    "large": Setting(
        DecoderConfig(
            65,
            max_length=256,
            num_layers=6,
            embed_dim=384,
            num_heads=6,
            use_bias=False,
            dropout=0.2,
        ),
        _NANOGPT,
        steps=5000,
        batch_size=64,
        published=1.47,
    ),
}


def read(path: Path):
    """Returns (training ids, held-out ids, characters)."""
    text = path.read_text()
    characters = sorted(set(text))
    ids = np.array([characters.index(c) for c in text], np.int32)
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:], characters


def held_out_loss(model, params, ids, batch_size: int = 64) -> float:
    """Computes nats per character over all held-out windows."""
    length = model.config.max_length
    count = (len(ids) - 1) // length
    windows = ids[length * np.arange(count)[:, None] + np.arange(length + 1)]
    batches = [windows[start : start + batch_size] for start in range(0, count, batch_size)]
    return sum(len(some) * float(_loss(model, params, some)) for some in batches) / count


_loss = jax.jit(loss, static_argnums=0)


def main():
    parser = Parser(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--steps", type=at_least(1))
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--scan-layers", choices=("scan", "unrolled"), default="unrolled")
    arguments = parser.parse_args()
    tune_cpu_runtime()
    setting = SETTINGS[arguments.setting]
    steps = setting.steps if arguments.steps is None else arguments.steps
    train, held_out, characters = read(arguments.text)
    check_length(held_out, setting.model.max_length)
    config = replace(setting.model, vocab_size=len(characters), dtype=arguments.dtype)

    begin = time.perf_counter()
    model = Decoder(config, Execution(layers=arguments.layers))
    optimizer = make_optimizer(setting.optimizer)
    start = jax.jit(lambda: init_state(model, optimizer, arguments.seed))()
    step = make_step(model, optimizer)
    print(f"{arguments.setting}: {parameter_count(config):,} parameters, {steps} steps")
    random, best = np.random.default_rng(arguments.seed), float("inf")
    data = batches(random, train, config.max_length, (1, setting.batch_size))
    rates = Schedule(setting.optimizer, steps).rates()
    for number, (state, last) in enumerate(updates(step, start, data, rates), 1):
        if number % 500 == 0 or number == steps:
            score = held_out_loss(model, state.params, held_out)
            best = min(best, score)
            seconds = time.perf_counter() - begin
            print(f"step {number:5}: {float(last.loss):.4f}, held out {score:.4f}, {seconds:.0f} s")
    figures = {
        "setting": arguments.setting,
        "held_out_loss": score,
        "best_held_out_loss": best,
        "published": setting.published,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
