"""Measures how much each component of the decoder lowers the held-out loss.

    python experiments/build_up.py             # the standard library's source, byte by byte
    python experiments/build_up.py TEXT… --steps 300 --seeds 3

The first decoder has one head. As in the lecture's first drawing, an activation follows each of the
two linear layers of the feed-forward layer. The first decoder lacks residual connections, norms,
positions and scaling. One series adds the components one after another. The other series removes
one component at a time from the finished decoder. One `vmap` trains all seeds together. Error bars
are two standard errors of the mean over seeds.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from record import at_least, conclude, run
from windows import batches, check_length, evenly, loss, text_parser

import jaxformer as jf
from jaxformer.runtime import tune_cpu_runtime
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.data.corpus import read_documents, standard_library
from jaxformer.training.data.split import DEFAULT_SPLIT, split
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.step import init_state, make_step, updates

LENGTH, BATCH, HELD_OUT = 64, 8, 128
FINISHED = jf.DecoderConfig(
    vocab_size=256, max_length=LENGTH, num_layers=4, embed_dim=64, num_heads=4, activation="relu"
)
# Each config change removes one component, in the order in which the lectures add components.
PIECES = {
    "several heads": {"num_heads": 1},
    "residual": {"residual": False},
    "norm": {"norm": "none"},
    "positions": {"positions": "none"},
    "scaling by √d": {"attention_scale": 1.0},
    "one activation": {"output_activation": True},
}


def built_up() -> dict:
    """Returns the configs of decoders that add components one by one until all are present."""
    missing = {field: value for change in PIECES.values() for field, value in change.items()}
    configs = {"half built": replace(FINISHED, **missing)}
    for piece, change in PIECES.items():
        missing = {field: missing[field] for field in missing if field not in change}
        configs[f"+ {piece}"] = replace(FINISHED, **missing)
    return configs


def taken_away() -> dict:
    """Returns the config of the finished decoder, and configs that each lack one component."""
    without = {f"− {piece}": replace(FINISHED, **change) for piece, change in PIECES.items()}
    return {"finished": FINISHED, **without}


def read(paths):
    """Returns (training bytes, held-out windows [HELD_OUT, LENGTH + 1])."""
    documents = read_documents(paths)[0] if paths else standard_library()
    train, held_out = (
        np.frombuffer("".join(document.text for document in some).encode(), np.uint8)
        for some in split(documents, *DEFAULT_SPLIT)
    )
    check_length(train, LENGTH)
    return train, evenly(held_out, LENGTH, HELD_OUT)


def train(config, text, held_out, steps: int, seeds: int) -> np.ndarray:
    """Trains all seeds in one `vmap` and returns the held-out losses."""
    model = jf.build(config, jf.Execution(layers="unrolled"))
    recipe = OptimizerConfig(learning_rate=2e-3, warmup_steps=50)
    optimizer, rates = make_optimizer(recipe), Schedule(recipe, steps).rates()
    init = jax.vmap(lambda seed: init_state(model, optimizer, seed))
    begin = jax.jit(init)(np.arange(seeds))
    update = jax.jit(jax.vmap(make_step(model, optimizer), (0, 0, None)), donate_argnums=0)
    data = batches(np.random.default_rng(0), text, LENGTH, (seeds, 1, BATCH))
    for state, _ in updates(update, begin, data, rates):  # noqa: B007 (only the last is used)
        pass
    losses = jax.vmap(partial(loss, model), in_axes=(0, None))
    return np.asarray(jax.jit(losses)(state.params, held_out))


def error_of(losses):
    """Returns twice the standard error of the mean over seeds (the last axis of `losses`)."""
    return 2 * losses.std(axis=-1, ddof=1) / np.sqrt(losses.shape[-1])


def entropy(text) -> float:
    """Returns the entropy of the byte frequencies in nats per byte."""
    shares = np.bincount(text, minlength=256) / len(text)
    return -(shares[shares > 0] * np.log(shares[shares > 0])).sum()


def draw(parts: dict, path: Path) -> None:
    """Plots mean losses with error bars, after adding (left) or removing components (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    titles = (
        "components added one after another",
        "one component removed from the finished decoder",
    )
    all_losses = np.concatenate([x for part in parts.values() for x in part.values()])
    for axes, title, part in zip(figure.subplots(1, 2), titles, parts.values(), strict=True):
        names, losses = list(part), np.array(list(part.values())) / np.log(2)
        axes.errorbar(losses.mean(axis=1), names, xerr=error_of(losses), fmt="o", capsize=4)
        axes.invert_yaxis()
        axes.set(xlabel="held-out loss (bits per byte)", title=title)
        axes.set_xlim(0.97 * all_losses.min() / np.log(2), 1.02 * all_losses.max() / np.log(2))
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=110)


def main():
    parser = text_parser(__doc__, 500, 1, "build-up.png")
    parser.add_argument("--seeds", type=at_least(2), default=4, help="at least 2, for error bars")
    arguments = parser.parse_args()
    tune_cpu_runtime()
    text, held_out = read(arguments.text)
    trained, parts = {}, {}
    for part, configs in (("built up", built_up()), ("taken away", taken_away())):
        parts[part] = {}
        for name, config in configs.items():
            if config not in trained:
                trained[config] = train(config, text, held_out, arguments.steps, arguments.seeds)
            losses = parts[part][name] = trained[config]
            bits = losses / np.log(2)
            print(f"{name:18} {bits.mean():.3f} ± {error_of(bits):.3f} bits per byte", flush=True)
    figures = {part: {name: x.tolist() for name, x in some.items()} for part, some in parts.items()}
    figures["bits: entropy of the byte frequencies"] = float(entropy(text) / np.log(2))
    conclude(figures, arguments.record)
    draw(parts, arguments.picture)


if __name__ == "__main__":
    run(main)
