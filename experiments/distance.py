"""Measures how well models recall a symbol over a distance of n tokens.

    python experiments/distance.py --picture distance.png

A sequence is a symbol followed by n filler tokens, and the last output must predict the symbol.
Information about the symbol reaches this output in one step by attention, but in n steps through a
recurrent state. For each distance n, models with several seeds are trained together, for --steps
steps. The experiment reports the fraction of recalled symbols. Before training, the script also
measures the effect of a change of the first input on the last output.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from record import Parser, at_least, conclude, picture, run

import jaxformer as jf
from jaxformer.runtime import tune_cpu_runtime
from jaxformer.training.batch import Batch
from jaxformer.training.step import init_state, make_step

SYMBOLS, FILLERS, BATCH = 16, 4, 32
DISTANCES = (4, 8, 16, 32, 64, 128)
COMMON = {"vocab_size": SYMBOLS + FILLERS, "max_length": 256, "embed_dim": 64, "num_layers": 2}
MODELS = {
    "RNN": (jf.RecurrentConfig(**COMMON, cell="rnn"), 2e-3),
    "LSTM": (jf.RecurrentConfig(**COMMON, cell="lstm"), 1e-2),
    "Transformer": (jf.DecoderConfig(**COMMON, num_heads=4, positions="rotary"), 2e-3),
}


def sequences(key, distance: int):
    """Returns (tokens [BATCH, distance + 1], the first token of each sequence [BATCH])."""
    first, rest = jax.random.split(key)
    symbols = jax.random.randint(first, (BATCH, 1), 0, SYMBOLS)
    fillers = jax.random.randint(rest, (BATCH, distance), SYMBOLS, SYMBOLS + FILLERS)
    return jnp.concatenate([symbols, fillers], axis=1), symbols[:, 0]


def reach(model, params, key, distance: int):
    """Returns the norm of the gradient at the first input, divided by the norm at the last input.

    The differentiated value is the last hidden state, projected onto a random direction.
    """
    tokens, _ = sequences(key, distance)
    x = params["embedding"]["tokens"][tokens]
    direction = jax.random.normal(key, (64,))

    def last(x):
        hidden = model.apply({"params": params}, x, method="hidden_states")
        return (hidden[:, -1] @ direction).sum()

    sizes = jnp.linalg.norm(jax.grad(last)(x), axis=-1)
    return (sizes[:, 0] / sizes[:, -1]).mean()


def batch_of(key, distance: int) -> Batch:
    """Returns one micro-batch in which only the last target has weight 1."""
    tokens, symbols = sequences(key, distance)
    targets = jnp.broadcast_to(symbols[:, None], tokens.shape)
    weights = jnp.zeros(tokens.shape).at[:, -1].set(1.0)
    return Batch(tokens[None], targets[None], weights[None])


def recalled(model, rate: float, distance: int, steps: int, seeds: int):
    """Trains the model for each seed.

    Returns two arrays with one value per seed: the fraction of 256 symbols that the model recalls,
    and the effect of the first input before training.
    """
    warm = optax.linear_schedule(0.0, rate, 50)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(warm))
    step = make_step(model, optimizer)

    def share(params, key):
        tokens, symbols = sequences(key, distance)
        return (model.apply({"params": params}, tokens)[:, -1].argmax(axis=-1) == symbols).mean()

    def one(seed):
        state, key = init_state(model, optimizer, seed), jax.random.key(seed)
        reached = reach(model, state.params, key, distance)
        keys = jax.random.split(jax.random.fold_in(key, 1), steps)
        state, _ = jax.lax.scan(
            lambda state, key: step(state, batch_of(key, distance)), state, keys
        )
        asked = jax.random.split(jax.random.fold_in(key, 2), 8)
        return jax.vmap(lambda key: share(state.params, key))(asked).mean(), reached

    return [np.asarray(x) for x in jax.jit(jax.vmap(one))(jnp.arange(seeds))]


def draw(found: dict, path: Path) -> None:
    """Plots the recall, and the effect of the first input, against the distance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, by_distance in found.items():
        shares, reached = (np.array(x) for x in zip(*by_distance.values(), strict=True))
        for axes, values in ((left, 100 * shares), (right, reached)):
            axes.plot(DISTANCES, values.mean(axis=1), "o-", label=name)
            axes.fill_between(DISTANCES, values.min(axis=1), values.max(axis=1), alpha=0.2)
    left.axhline(100 / SYMBOLS, linestyle=":", color="grey", label="by chance")
    left.set(xlabel="positions between", ylabel="recalled (%)", ylim=(0, 103))
    left.set_title("fraction of recalled symbols, after training")
    right.set(xlabel="positions between", ylabel="gradient at the first input / at the last input")
    right.set_yscale("log")
    right.set_title("effect of the first input, before training")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.2)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=at_least(1), default=300)
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--picture", type=picture, default="distance.png")
    arguments = parser.parse_args()
    tune_cpu_runtime()
    found, figures = {}, {}
    for name, (config, rate) in MODELS.items():
        model, found[name] = jf.build(config, jf.Execution(layers="unrolled")), {}
        for distance in DISTANCES:
            some = recalled(model, rate, distance, arguments.steps, arguments.seeds)
            found[name][distance] = some
            print(f"{name:12} {distance:4}: {100 * some[0].mean():5.1f}% recalled", flush=True)
        figures[name] = {
            distance: {"recalled": share.tolist(), "reaches": reached.tolist()}
            for distance, (share, reached) in found[name].items()
        }
    conclude(figures, arguments.record)
    draw(found, arguments.picture)


if __name__ == "__main__":
    run(main)
