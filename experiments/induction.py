"""Trains a small decoder, finds its induction heads as they form, and ablates all pairs of heads.

    python experiments/induction.py --picture induction.png

An induction head attends to the token after an earlier copy of the current one (Olsson et al.
2022). Each training row is a block of 8 to 64 bytes, repeated to fill 128 bytes. A block is from
the source of the standard library (3 of 10) or uniformly random (7 of 10). Blocks start at random
places and have random lengths, so a head cannot find the earlier copy by its distance.

The script measures the scores of every head over the steps of training, on held-out text in which
each block of 48 bytes occurs twice. Then it ablates every pair of heads and measures the loss on
the second copies. For each seed it reports whether the pair with the two highest induction scores
costs most.

The claim depends on the model. An induction head needs heads of the first layer that write each
token's predecessor. In eleven other configurations, all with seed 0, some pair that holds a head of
the first layer costs more (or another pair of induction heads, in one of them):

- rotary positions with 4 and 8 heads, with and without the window in the first layer: most heads
  of the second layer become induction heads, and only one or two of the first layer write
  predecessors;
- ALiBi with 4 and 8 heads that have keys and values of their own, with 64 and 128 features, tied
  and untied output embeddings, and norms before or on both sides: the induction concentrates in one
  to three heads, but the predecessors do too;
- ALiBi with 4 heads that share keys and values.

With 6 heads that share keys and values, several heads of the first layer write the same
predecessor, so no pair of them is indispensable.
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
from jaxformer.interpret.ablation import Ablation, ablate_sets, head_sets
from jaxformer.interpret.atlas import AtlasHistory, AtlasSettings, atlas_over_checkpoints
from jaxformer.interpret.pictures import draw_lines
from jaxformer.interpret.texts import repeated_batch
from jaxformer.runtime import keep_freed_memory
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.data.corpus import standard_library
from jaxformer.training.data.split import DEFAULT_SPLIT, split
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.step import init_state, make_step, updates

VOCAB = 128  # ASCII; other bytes of the text are left out
LENGTH, BATCH, BLOCK, TEXT_SHARE = 128, 16, (8, 64), 0.3
TESTED, ROWS = 96, 256  # length and number of the rows on which heads are measured
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
    window=(2, None),  # the first layer sees a token and its predecessor
)
RECIPE = OptimizerConfig(learning_rate=4e-3, warmup_steps=100, final_fraction=0.1)
SETTINGS = AtlasSettings(rows_at_once=32)
HEADS = list(np.ndindex(CONFIG.num_layers, CONFIG.num_heads))
PAIRS = list(combinations(HEADS, 2))


def read_bytes() -> list[np.ndarray]:
    """Returns the ASCII bytes of the training part and of the held-out part of the text."""
    parts = split(standard_library(), *DEFAULT_SPLIT)
    texts = ("".join(document.text for document in part).encode() for part in parts)
    ids = (np.frombuffer(text, np.uint8).astype(np.int32) for text in texts)
    return [some[some < VOCAB] for some in ids]


def batches(ids, seed: int) -> Iterator[Batch]:
    """Yields batches of rows in which a block is repeated."""
    random = np.random.default_rng(seed)
    while True:
        rows = np.stack([repeated_block(random, ids) for _ in range(BATCH)])[None]
        yield Batch(rows[..., :-1], rows[..., 1:])


def repeated_block(random, ids) -> np.ndarray:
    """Returns a block of text or of random bytes, repeated to fill LENGTH + 1 tokens."""
    size = random.integers(BLOCK[0], BLOCK[1] + 1)
    if random.random() < TEXT_SHARE:
        start = random.integers(0, len(ids) - size)
        block = ids[start : start + size]
    else:
        block = random.integers(0, VOCAB, size).astype(np.int32)
    return np.resize(block, LENGTH + 1)


def train(model, ids, steps: int, seed: int) -> Iterator[tuple[int, dict]]:
    """Yields (step, variables) about 25 times during training, the first before it."""
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
    """Returns rows of text in which a block occurs twice; only the second copy counts."""
    batch = repeated_batch(VOCAB, TESTED, ROWS)
    rows = jnp.asarray(np.tile(evenly(ids, TESTED // 2 - 1, ROWS), 2))
    return batch._replace(inputs=rows, targets=jnp.roll(rows, -1, axis=1))


def last_of(checkpoints: Iterator[tuple[int, dict]], last: list) -> Iterator[tuple[int, dict]]:
    """Yields the checkpoints, and stores the variables of the last one in `last`."""
    for step, variables in checkpoints:
        last[:] = [variables]
        yield step, variables


def compared(history: AtlasHistory, pairs: Ablation) -> dict:
    """Compares the pair with the highest induction scores with all other pairs.

    Its lead over another pair is the difference of their effects, paired by rows. If every lead
    minus two standard errors is above 0, the pair costs more than each other pair.
    """
    induction = history.scores["induction"][-1]
    best = tuple(sorted(sorted(HEADS, key=lambda head: -induction[head])[:2]))
    number = PAIRS.index(best)
    differences = np.asarray(pairs.differences, np.float64)
    ahead = np.delete(differences[number] - differences, number, axis=0)
    error = ahead.std(axis=1, ddof=1) / np.sqrt(ROWS)
    order = np.argsort(-np.asarray(pairs.effect))
    lead = ahead.mean(axis=1)
    return {
        "induction heads": [list(head) for head in best],
        "their scores": [round(float(induction[head]), 4) for head in best],
        "rank of the pair": int(np.flatnonzero(order == number)[0]) + 1,
        "smallest lead": round(float(lead.min()), 4),
        "smallest lead minus two standard errors": round(
            float((ahead.mean(axis=1) - 2 * error).min()), 4
        ),
    }


def draw(history: AtlasHistory, pairs: Ablation, heads, path: Path) -> None:
    """Draws scores and loss by step, and the pairs of heads whose ablation costs most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    (induction, previous), (loss, bars) = figure.subplots(2, 2)
    draw_lines(induction, history, "induction")
    draw_lines(previous, history, "previous_token")
    loss.plot(history.steps, history.loss, color="black")
    loss.set(xlabel="step", ylabel="nats per token", title="loss on the second copy, held-out text")
    loss.grid(alpha=0.2)
    loss.set_ylim(bottom=0)
    order = np.argsort(-np.asarray(pairs.effect))[:12][::-1]
    names = [" and ".join(f"{layer}.{head}" for layer, head in PAIRS[i]) for i in order]
    colors = ["C3" if PAIRS[i] == heads else "C7" for i in order]
    errors = 2 * np.asarray(pairs.standard_error)[order]
    bars.barh(names, np.asarray(pairs.effect)[order], xerr=errors, color=colors)
    bars.set(xlabel="increase of the loss (nats per token, ± 2 standard errors)")
    bars.set_title(f"the 12 most costly of {len(PAIRS)} pairs of heads (red: induction)")
    figure.savefig(path, dpi=110)


def measure(ids, text: Batch, steps: int, seed: int) -> tuple[AtlasHistory, Ablation, dict]:
    """Trains one model. Returns its history, the effects of all pairs, and the figures."""
    model, last = jf.build(CONFIG, jf.Execution(layers="unrolled")), []
    begin = time.perf_counter()
    checkpoints = last_of(train(model, ids, steps, seed), last)
    history = atlas_over_checkpoints(model, checkpoints, text, SETTINGS)
    seconds = time.perf_counter() - begin
    print(f"seed {seed}: ablating {len(HEADS)} heads and {len(PAIRS)} pairs", flush=True)
    sets = head_sets((CONFIG.num_layers, CONFIG.num_heads), [*([head] for head in HEADS), *PAIRS])
    found = ablate_sets(model, last[0], text, sets, rows_at_once=SETTINGS.rows_at_once)
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
        "loss by step": history.loss.round(4).tolist(),
        "scores by step": {
            name: history.scores[name].round(3).tolist() for name in ("induction", "previous_token")
        },
        "heads": table(HEADS, single),
        "pairs": table(PAIRS, pairs),
    }
    return history, pairs, figures


def main():
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=at_least(25), default=1200)
    parser.add_argument("--seeds", type=at_least(1), default=3, help="seeds 0, 1, …; default: 3")
    parser.add_argument("--picture", type=picture, default="induction.png")
    arguments = parser.parse_args()
    keep_freed_memory()
    ids, held_out = read_bytes()
    text = repeated_text(held_out)
    found = [measure(ids, text, arguments.steps, seed) for seed in range(arguments.seeds)]
    conclude([figures for *_, figures in found], arguments.record)
    history, pairs, figures = found[0]
    draw(history, pairs, tuple(map(tuple, figures["induction heads"])), arguments.picture)


def table(names, found: Ablation) -> list:
    """Returns rows (heads, effect, standard error), the largest effect first."""
    rows = zip(names, found.effect.tolist(), found.standard_error.tolist(), strict=True)
    rows = sorted(rows, key=lambda row: -row[1])
    return [
        [np.array(name).tolist(), round(mean, 4), round(error, 4)] for name, mean, error in rows
    ]


if __name__ == "__main__":
    run(main)
