"""Trains a small decoder, finds its induction heads as they form, and ablates all pairs of heads.

    python experiments/induction.py --picture induction.png

The decoder has two layers of four heads. Each training row is a block of 16 to 96 bytes, repeated
to fill 128 bytes. Half of the blocks are from the source of the standard library, half are random
bytes. The block's length is random too, so a head cannot find the earlier copy by its distance. An
induction head attends to the token after an earlier copy of the current one (Olsson et al. 2022).

The script measures the scores of every head over the checkpoints, and then the loss on held-out
text in which a block of 64 bytes occurs twice, without each pair of heads. It reports whether the
pair with the two highest induction scores costs the most.
"""

import time
from collections.abc import Iterator
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
from record import Parser, at_least, conclude, picture, run
from windows import evenly

import jaxformer as jf
from jaxformer.interpret.ablation import ablate_sets, head_sets
from jaxformer.interpret.atlas import AtlasSettings, atlas_over_checkpoints, head_atlas
from jaxformer.interpret.texts import repeated_batch
from jaxformer.runtime import keep_freed_memory
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.data.corpus import standard_library
from jaxformer.training.data.split import DEFAULT_SPLIT, split
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.step import init_state, make_step, updates

LENGTH, BATCH, BLOCK = 128, 32, (16, 96)
CONFIG = jf.DecoderConfig(
    vocab_size=256, max_length=LENGTH, num_layers=2, embed_dim=128, num_heads=4, positions="rotary"
)
RECIPE = OptimizerConfig(learning_rate=2e-3, warmup_steps=100, final_fraction=0.1)


def read_bytes() -> tuple[np.ndarray, np.ndarray]:
    parts = split(standard_library(), *DEFAULT_SPLIT)
    return tuple(
        np.frombuffer("".join(x.text for x in part).encode(), np.uint8).astype(np.int32)
        for part in parts
    )


def batches(ids, seed: int) -> Iterator[Batch]:
    random = np.random.default_rng(seed)
    while True:
        rows = np.stack([row(random, ids) for _ in range(BATCH)])[None]
        yield Batch(rows[..., :-1], rows[..., 1:])


def row(random, ids):
    size = random.integers(BLOCK[0], BLOCK[1] + 1)
    if random.random() < 0.5:
        start = random.integers(0, len(ids) - size)
        block = ids[start : start + size]
    else:
        block = random.integers(0, CONFIG.vocab_size, size).astype(np.int32)
    return np.resize(block, LENGTH + 1)


def trained(model, ids, steps: int, every: int, seed: int):
    optimizer = make_optimizer(RECIPE)
    state = jax.jit(lambda: init_state(model, optimizer, seed))()
    yield 0, {"params": state.params}
    begin = time.perf_counter()
    rates = Schedule(RECIPE, steps).rates()
    for step, (state, measured) in enumerate(
        updates(make_step(model, optimizer), state, batches(ids, seed), rates), 1
    ):
        if step % every == 0 or step == steps:
            print(
                f"step {step:5} of {steps}: {float(measured.loss):.3f} nats, {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
            yield step, {"params": state.params}


def repeated_text(ids, num_rows: int) -> Batch:
    half = LENGTH // 2
    tokens = np.tile(evenly(ids, half - 1, num_rows), 2)
    like = repeated_batch(CONFIG.vocab_size, LENGTH, num_rows)
    return like._replace(inputs=jnp.asarray(tokens), targets=jnp.roll(jnp.asarray(tokens), -1, 1))
