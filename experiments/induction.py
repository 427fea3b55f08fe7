"""Measures the induction heads of a small decoder during training, and ablates all pairs of heads.

    python experiments/induction.py --picture induction.png

An induction head attends to the token after an earlier copy of the current token (Olsson et al.
2022). Each training sequence is a block of 8 to 64 bytes, repeated to fill 128 bytes. 30% of the
blocks come from the source of the standard library, and 70% are uniformly random. Block lengths are
random, so a head cannot find the earlier copy by a fixed distance.

During training, the script measures the scores of every head on held-out text in which each block
of 48 bytes occurs twice. Then the script ablates every pair of heads and measures the increase of
the loss on the second copies. For each seed, the script answers two questions, with paired standard
errors:

1. Does ablating the pair with the two highest induction scores increase the loss more than
   ablating any other pair?
2. Of the pairs whose two heads have scores above 0.5, one has the largest effect. Does ablating
   this pair increase the loss more than ablating any pair that contains a head with a lower score?
   This question was added after the first results.

For seed 0, ablating the two heads with the highest scores increases the loss most, so both answers
are yes. For seeds 1 and 2, ablating the heads with the highest and the third-highest score
increases the loss most, so only the second answer is yes. High scores thus identify the important
heads, but the order of the scores is not the order of importance.

The experiment uses one of thirteen configurations, chosen by their results with seed 0. In the
other twelve configurations, the pair with the highest scores did not have the largest effect.
Ablating a pair with a head of the first layer, or another pair of induction heads, increased the
loss more. The twelve configurations were trained for 400 to 1,600 steps. In two of the twelve
configurations, induction heads did not form. The twelve configurations differ in the block lengths,
in the fraction of blocks that come from text, and in the model:

- Rotary positions, 4 heads (64 and 128 features) or 8 heads, with and without the window in the
  first layer. Most heads of the second layer become induction heads.
- ALiBi, 4 or 8 heads with their own keys and values, 64 and 128 features, tied and untied output
  embeddings, norms before or around the sub-layers. One to four induction heads form.
- ALiBi, 4 heads that share keys and values.
"""

import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import Parser, at_least, conclude, picture, run
from windows import evenly

import jaxformer as jf
from jaxformer.interpret import (
    Ablation,
    AtlasHistory,
    AtlasSettings,
    ablate_sets,
    atlas_over_checkpoints,
    head_sets,
    repeated_batch,
)
from jaxformer.interpret.pictures import draw_lines
from jaxformer.runtime import tune_cpu_runtime
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.data.corpus import standard_library
from jaxformer.training.data.split import DEFAULT_SPLIT, split
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.step import init_state, make_step, updates

# The vocabulary is ASCII. Bytes of the text that are not ASCII are dropped.
VOCAB = 128
LENGTH, BATCH, BLOCK, TEXT_SHARE = 128, 16, (8, 64), 0.3
# The heads are scored and ablated on `SEQUENCES` sequences of `TESTED` tokens.
TESTED, SEQUENCES = 96, 256
CONFIG = jf.DecoderConfig(
    vocab_size=VOCAB,
    max_length=LENGTH,
    num_layers=2,
    embed_dim=64,
    num_heads=6,
    num_kv_heads=1,
    head_dim=32,
    mlp_dim=128,
    positions="alibi",
    tie_embeddings=False,
    # The first layer attends only to the current token and the token before it.
    window=(2, None),
)
RECIPE = OptimizerConfig(learning_rate=4e-3, warmup_steps=100, final_fraction=0.1)
SETTINGS = AtlasSettings(batch_size_within_memory=32)
# A head counts as an induction head if its induction score is above this threshold.
THRESHOLD = 0.5
HEADS = list(np.ndindex(CONFIG.num_layers, CONFIG.num_heads))
PAIRS = list(combinations(HEADS, 2))


def read_bytes() -> list[np.ndarray]:
    """Returns the ASCII bytes of the training part and of the held-out part of the text."""
    parts = split(standard_library(), *DEFAULT_SPLIT)
    texts = ("".join(document.text for document in part).encode() for part in parts)
    ids = (np.frombuffer(text, np.uint8).astype(np.int32) for text in texts)
    return [some[some < VOCAB] for some in ids]


def batches(ids, seed: int) -> Iterator[Batch]:
    """Yields batches of sequences in which a block is repeated."""
    random = np.random.default_rng(seed)
    while True:
        sequences = np.stack([repeated_block(random, ids) for _ in range(BATCH)])[None]
        yield Batch(sequences[..., :-1], sequences[..., 1:])


def repeated_block(random, ids) -> np.ndarray:
    """Returns LENGTH + 1 tokens that repeat a block of text or of random bytes."""
    size = random.integers(BLOCK[0], BLOCK[1] + 1)
    if random.random() < TEXT_SHARE:
        start = random.integers(0, len(ids) - size)
        block = ids[start : start + size]
    else:
        block = random.integers(0, VOCAB, size).astype(np.int32)
    return np.resize(block, LENGTH + 1)


def train(model, ids, steps: int, seed: int) -> Iterator[tuple[int, dict]]:
    """Yields (step, variables) about 25 times, first before training and then during training."""
    optimizer = make_optimizer(RECIPE)
    start = jax.jit(lambda: init_state(model, optimizer, seed))()
    yield 0, {"params": start.params}
    begin, every = time.perf_counter(), max(1, steps // 25)
    rates = Schedule(RECIPE, steps).rates()
    trained = updates(make_step(model, optimizer), start, batches(ids, seed), rates)
    for step, (state, measured) in enumerate(trained, 1):
        if step % every == 0 or step == steps:
            seconds, loss = time.perf_counter() - begin, float(measured.loss)
            print(f"step {step:5} of {steps}: {loss:.3f} nats, {seconds:.0f} s", flush=True)
            yield step, {"params": state.params}


def repeated_text(ids) -> Batch:
    """Returns sequences in which a text occurs twice; the loss includes only the second copy."""
    batch = repeated_batch(VOCAB, TESTED, SEQUENCES)
    sequences = jnp.asarray(np.tile(evenly(ids, TESTED // 2 - 1, SEQUENCES), 2))
    return batch._replace(inputs=sequences, targets=jnp.roll(sequences, -1, axis=1))


def last_of(checkpoints: Iterator[tuple[int, dict]], last: list) -> Iterator[tuple[int, dict]]:
    """Yields the checkpoints, and stores the variables of the last one in the list `last`."""
    for step, variables in checkpoints:
        last[:] = [variables]
        yield step, variables


def compared(history: AtlasHistory, pairs: Ablation) -> dict:
    """Answers the two questions of the module's docstring for one model.

    The effect of a pair of heads is how much the loss increases when both heads are ablated. The
    lead of a pair over another pair is the mean difference of their effects on the same sequences.
    If the lead minus two standard errors is above 0, the first pair has the larger effect.
    """
    scores = history.scores["induction"][-1]
    effect = np.asarray(pairs.effect)
    order = np.argsort(-effect)
    best = PAIRS.index(highest(scores))
    is_induction = np.array([min(scores[a], scores[b]) > THRESHOLD for a, b in PAIRS])
    figures = {
        "pair of heads with the highest induction scores": described(best, scores),
        "rank of the pair's effect among all pairs": int(np.flatnonzero(order == best)[0]) + 1,
        "smallest difference from the effect of any other pair": lead(
            pairs, best, np.arange(len(PAIRS)) != best
        ),
    }
    if is_induction.any():
        costliest = int(np.argmax(np.where(is_induction, effect, -np.inf)))
        figures |= {
            "pair with scores above 0.5 and the largest effect": described(costliest, scores),
            "smallest difference from the effect of a pair with a lower score": lead(
                pairs, costliest, ~is_induction
            ),
        }
    return figures


def highest(scores) -> tuple:
    """Returns the pair of heads with the highest scores."""
    return tuple(sorted(sorted(HEADS, key=lambda head: -scores[head])[:2]))


def described(number: int, scores) -> list:
    return [[*head, round(float(scores[head]), 3)] for head in PAIRS[number]]


def lead(pairs: Ablation, number: int, others) -> dict:
    """Compares the effect of ablating one pair of heads with the effects of other pairs.

    `number` is the index of the pair, and `others` are the indices of the other pairs.

    The lower bound of a difference is its mean minus two standard errors. Returns the smallest mean
    difference and the smallest lower bound.
    """
    differences = np.asarray(pairs.differences, np.float64)
    ahead = (differences[number] - differences)[others]
    mean, error = ahead.mean(axis=1), ahead.std(axis=1, ddof=1) / np.sqrt(SEQUENCES)
    return {
        "mean": round(float(mean.min()), 3),
        "minus two standard errors": round(float((mean - 2 * error).min()), 3),
    }


def draw(found: list, path: Path) -> None:
    """For each seed, plots the induction scores against the step, and the effects of pairs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(found), 7.6), layout="constrained")
    above, below = figure.subplots(2, len(found), squeeze=False)
    for seed, (history, pairs) in enumerate(found):
        draw_lines(above[seed], history, "induction")
        above[seed].set_title(f"seed {seed}: induction score of each head")
        draw_pairs(below[seed], history.scores["induction"][-1], pairs)
    figure.suptitle(
        "red: the two highest scores; orange: two other scores above 0.5; grey: other pairs"
    )
    figure.savefig(path, dpi=110)


def draw_pairs(axes, scores, pairs: Ablation) -> None:
    """Plots the nine pairs with the largest effects, and the pair with the highest scores."""
    effect, error = np.asarray(pairs.effect), np.asarray(pairs.standard_error)
    order = np.argsort(-effect)
    best, ranks = PAIRS.index(highest(scores)), {i: rank for rank, i in enumerate(order, 1)}
    shown = sorted({*order[:9].tolist(), best}, key=lambda i: ranks[i], reverse=True)
    names = [
        f"{ranks[i]}: " + " and ".join(f"{layer}.{head}" for layer, head in PAIRS[i]) for i in shown
    ]
    is_induction = [min(scores[a], scores[b]) > THRESHOLD for a, b in PAIRS]
    colors = ["C3" if i == best else "C1" if is_induction[i] else "C7" for i in shown]
    axes.barh(names, effect[shown], xerr=2 * error[shown], color=colors)
    axes.set(xlabel="increase of the loss (nats per token, ± 2 SE)")
    axes.set_title(f"largest effects of {len(PAIRS)} pairs of heads")


def measure(ids, text: Batch, steps: int, seed: int) -> tuple[AtlasHistory, Ablation, dict]:
    """Trains a model; returns its head scores by step, the effects of pairs, and the record."""
    model, last = jf.build(CONFIG, jf.Execution(layers="unrolled")), []
    begin = time.perf_counter()
    checkpoints = last_of(train(model, ids, steps, seed), last)
    history = atlas_over_checkpoints(model, checkpoints, text, SETTINGS)
    seconds = time.perf_counter() - begin
    print(f"seed {seed}: ablating {len(HEADS)} heads and {len(PAIRS)} pairs", flush=True)
    sets = head_sets((CONFIG.num_layers, CONFIG.num_heads), [*([head] for head in HEADS), *PAIRS])
    found = ablate_sets(
        model, last[0], text, sets, batch_size_within_memory=SETTINGS.batch_size_within_memory
    )
    single, pairs = (
        Ablation(found.loss, *(x[part] for x in found[1:]))
        for part in (slice(len(HEADS)), slice(len(HEADS), None))
    )
    figures = {
        **compared(history, pairs),
        "seed": seed,
        "seconds of training and scoring": round(seconds),
        "loss": round(float(found.loss), 4),
        "steps": history.steps.tolist(),
        "loss by step": history.loss.astype(float).round(4).tolist(),
        "induction score by step": {
            f"{layer}.{head}": some.astype(float).round(3).tolist()
            for (layer, head), some in zip(
                HEADS, history.scores["induction"].reshape(-1, len(HEADS)).T, strict=True
            )
        },
        "heads: effect and standard error": table([(head,) for head in HEADS], single),
        "pairs: effect and standard error": table(PAIRS, pairs),
    }
    return history, pairs, figures


def main():
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=at_least(25), default=1200)
    parser.add_argument(
        "--seeds",
        type=at_least(1),
        default=3,
        help="number of models, with seeds 0, 1, …; default: 3",
    )
    parser.add_argument("--picture", type=picture, default="induction.png")
    arguments = parser.parse_args()
    tune_cpu_runtime()
    ids, held_out = read_bytes()
    text = repeated_text(held_out)
    found = [measure(ids, text, arguments.steps, seed) for seed in range(arguments.seeds)]
    conclude([figures for *_, figures in found], arguments.record)
    draw([some for *some, _ in found], arguments.picture)


def table(sets, found: Ablation) -> dict:
    """Returns the [effect, standard error] of each set of heads, the largest effect first."""
    rows = zip(sets, found.effect.tolist(), found.standard_error.tolist(), strict=True)
    return {
        " and ".join(f"{layer}.{head}" for layer, head in heads): [round(mean, 3), round(error, 4)]
        for heads, mean, error in sorted(rows, key=lambda row: -row[1])
    }


if __name__ == "__main__":
    run(main)
