"""Compares the gradients and losses of deep pre-norm and post-norm stacks.

    python experiments/depth.py --picture depth.png

The decoders have 6 to 192 layers of 32 features, with the norm before each sub-layer or after each
residual sum. The experiment reports the gradient norm of each layer at initialization and after
training, and the losses (Xiong et al. 2020; lecture 11 §3).

By default, training has 10 warm-up steps, and the weights are drawn from N(0, 1/inputs). A
sub-layer with these weights preserves the scale of its input. Results named "with care" use the
weights of `init` and 100 warm-up steps. `init` draws weights from N(0, 0.02²) and divides the
weights of the last linear layer of each sub-layer by √(2 · number of layers). One `vmap` trains all
seeds together.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from build_up import read
from record import at_least, conclude, run
from windows import batches, loss, text_parser

import jaxformer as jf
from jaxformer.runtime import tune_cpu_runtime
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.step import init_state, make_step, updates

LENGTH, BATCH = 64, 4
# Smaller gradient norms are plotted at this value.
LEAST = 1e-12

# Each value is (norm position, whether the initial weights of the blocks are drawn from
# N(0, 1/inputs), number of warm-up steps).
KINDS = {
    "pre-norm": ("pre", True, 10),
    "post-norm": ("post", True, 10),
    "pre-norm, with care": ("pre", False, 100),
    "post-norm, with care": ("post", False, 100),
}


def config_of(depth: int, place: str):
    return jf.DecoderConfig(
        vocab_size=256,
        max_length=LENGTH,
        num_layers=depth,
        embed_dim=32,
        num_heads=2,
        norm_position=place,
    )


def plain(params, seed):
    """Returns the parameters with all kernels of the blocks drawn from N(0, 1/inputs)."""
    leaves, tree = jax.tree.flatten_with_path(params["blocks"])
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(key, path, leaf):
        if path[-1].key != "kernel":
            return leaf
        return jax.random.normal(key, leaf.shape) / leaf.shape[-2] ** 0.5

    drawn = [draw(key, path, leaf) for key, (path, leaf) in zip(keys, leaves, strict=True)]
    return {**params, "blocks": jax.tree.unflatten(tree, drawn)}


def by_layer(model, params, sequences):
    """Returns the norm of the loss's gradient for each block [num_layers]."""
    gradients = jax.grad(lambda params: loss(model, params, sequences))(params)["blocks"]
    squares = [jnp.square(x).reshape(len(x), -1).sum(axis=1) for x in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(squares))


def train(depth: int, kind: str, text, sequences, steps: int, seeds: int) -> dict:
    """Returns losses [steps, seeds] and gradient norms [seeds, depth] before and after training."""
    place, is_plain, warmup = KINDS[kind]
    model = jf.build(config_of(depth, place))
    recipe = OptimizerConfig(learning_rate=2e-3, warmup_steps=warmup)
    optimizer, rates = make_optimizer(recipe), Schedule(recipe, steps).rates()

    def begin(seed):
        state = init_state(model, optimizer, seed)
        return state._replace(params=plain(state.params, seed)) if is_plain else state

    start = jax.jit(jax.vmap(begin))(np.arange(seeds))
    look = jax.jit(jax.vmap(partial(by_layer, model), in_axes=(0, None)))
    before = np.asarray(look(start.params, sequences))
    update = jax.jit(jax.vmap(make_step(model, optimizer), (0, 0, None)), donate_argnums=0)
    data, losses = batches(np.random.default_rng(0), text, LENGTH, (seeds, 1, BATCH)), []
    for state, now in updates(update, start, data, rates):  # noqa: B007 (the last one is used)
        losses.append(now.loss)
    after = np.asarray(look(state.params, sequences))
    return {"losses": np.array(losses), "before": before, "after": after}


def draw(found: dict, floor: float, path: Path) -> None:
    """Plots the gradient norms against the layer, and the losses against the training step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6 * len(KINDS)), layout="constrained")
    depths = sorted({depth for depth, _ in found})
    rows = figure.subplots(len(KINDS), 3, sharey="col")
    for row, kind in zip(rows, KINDS, strict=True):
        for number, depth in enumerate(depths):
            some, colour = found[depth, kind], f"C{number}"
            share = (np.arange(depth) + 1) / depth
            for axes, when in zip(row, ("before", "after"), strict=False):
                norms = np.maximum(some[when], LEAST)
                middle = np.exp(np.log(norms).mean(axis=0))
                axes.plot(share, middle, color=colour, label=f"{depth} layers")
                axes.fill_between(
                    share, norms.min(axis=0), norms.max(axis=0), alpha=0.2, color=colour
                )
            bits = some["losses"].mean(axis=1) / np.log(2)
            row[2].plot(np.convolve(bits, np.ones(10) / 10, mode="valid"), color=colour)
        row[2].axhline(floor, color="grey", linestyle=":", label="loss of the byte frequencies")
        for axes, when in zip(row, ("at initialisation", "after training"), strict=False):
            axes.set(xlabel="layer / depth", ylabel="gradient norm of the block", yscale="log")
            axes.set_title(f"{kind}: {when}")
        row[2].set(xlabel="step", ylabel="loss (bits per byte)", title=f"{kind}: learning")
        for axes in row:
            axes.grid(alpha=0.2)
    rows[0, 0].legend(fontsize=8)
    rows[0, 2].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _ends(norms) -> dict:
    """Returns the gradient norms of the first and last layer, and the smallest norm.

    Each norm is a geometric mean over seeds.
    """
    middle = np.exp(np.log(np.maximum(norms, np.finfo(np.float32).tiny)).mean(axis=0))
    return {"first": float(middle[0]), "least": float(middle.min()), "last": float(middle[-1])}


def main():
    parser = text_parser(__doc__, 300, 1, "depth.png")
    parser.add_argument("--depths", type=at_least(1), nargs="+", default=[6, 24, 96, 192])
    parser.add_argument("--seeds", type=at_least(1), default=3)
    arguments = parser.parse_args()
    tune_cpu_runtime()
    text, held_out = read(arguments.text)
    frequency = np.bincount(text, minlength=256)[text] / len(text)
    # A model that always predicts the byte frequencies has this loss.
    floor = float(-np.log2(frequency).mean())
    found, figures = {}, {"entropy of the byte frequencies (bits)": floor}
    for depth in arguments.depths:
        for kind in KINDS:
            how = (held_out[:BATCH], arguments.steps, arguments.seeds)
            some = found[depth, kind] = train(depth, kind, text, *how)
            last = some["losses"][-10:].mean(axis=0) / np.log(2)
            figures[f"{kind}, {depth} layers"] = {
                "bits per byte at the end, by seed": last.tolist(),
                **{f"gradient {when}": _ends(some[when]) for when in ("before", "after")},
            }
            print(f"{depth:3} layers, {kind}: {last.mean():.3f} bits per byte", flush=True)
    conclude(figures, arguments.record)
    draw(found, floor, arguments.picture)


if __name__ == "__main__":
    run(main)
