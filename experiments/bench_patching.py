"""Compares activation patching of a GPT-2 of 124M parameters with torch forward hooks.

    python experiments/bench_patching.py                 # 12 layers × 12 heads × 64 positions
    python experiments/bench_patching.py --sites 256 --batch-size 32

A site is one head at one position. A sweep runs the model on a corrupted text of 64 tokens once for
each of its 9,216 sites. Each run replaces the output of one head at one position by its value on a
clean text. The run then measures the difference of two logits at the last position. Both libraries
use the same random weights, exported to a folder that transformers loads.

The torch program is GPT2LMHeadModel in eval mode under inference_mode. A forward pre-hook on the
output projection of an attention layer replaces outputs of heads. Each forward pass patches one
site, as TransformerLens does, or a batch of sites of one layer. "Logits of the last position" means
logits_to_keep=1, which skips most of the projection to logits. The script times torch on a random
sample of sites twice: before and after jaxformer's sweep. The script multiplies the smaller of the
two times per site by the number of sites in a sweep. The product estimates the time of a sweep in
torch. The script also compares the effects that both libraries measure for the sampled sites. If
other programs run on the machine, use --cores 1 and compare the processor times.

Result on two idle cores of a Xeon (results/patching-cpu.json): jaxformer takes 129 s, of which 13 s
are compilation. Torch takes 7.0 times as long if it patches one site per forward pass, and 4.0
times as long in its fastest variant. jaxformer's sweep adds 411 MB of memory. jaxformer missed the
goal of being 10 times as fast, because both programs run near the peak speed of matrix products:
jaxformer computes 200 GFLOP/s, torch 163. The following costs are in layer passes: one layer over
64 tokens costs 1. A forward pass in torch costs 12 layer passes for the layers and 5.4 for the
output projection. In jaxformer, patching one head at one position costs 2.7 layer passes on
average. A forward pass computes on average 4.7 layers over 0.56 of the tokens. jaxformer starts
each forward pass at a position that is a multiple of 8. Two changes would reduce the cost to 2.3
layer passes. jaxformer would start exactly at the patched position, and would not compute the
unchanged queries, keys and values of the next layer. With both changes and without compilation,
jaxformer would be 8.9 times as fast as torch. A larger speedup requires another precision, or a
device for which 64 tokens are a small batch.

jaxformer reduces the number of layer passes in four ways:

- Computing logits at a single position saves 5.4 layer passes.
- Starting at the patched layer saves 5.5 of 12 layers.
- Starting at the patched position saves a fraction of 0.44 of the remaining cost.
- Computing only keys and values in the last layer saves 0.8 layer passes.

Batches of 96 sites were not faster than batches of 32 sites.

Needs torch and transformers.
"""

import multiprocessing
import os
import tempfile
import time
from typing import NamedTuple

import numpy as np
from alone import peak_memory
from record import Parser, at_least, conclude, require, run

VOCAB, RIGHT, WRONG = 50_257, 11, 222
# The effects that the two libraries compute may differ by at most this fraction of the largest one.
TOLERANCE = 1e-4


class Time(NamedTuple):
    """Elapsed seconds, and processor seconds of all cores together."""

    wall: float
    cores: float

    @staticmethod
    def now():
        return Time(time.perf_counter(), time.process_time())

    def since(self, begin):
        return Time(self.wall - begin.wall, self.cores - begin.cores)

    def times(self, factor):
        return Time(self.wall * factor, self.cores * factor)


def texts(length: int):
    """Returns a clean and a corrupted text [1, length] that differ in every third token."""
    rng = np.random.default_rng(0)
    clean = rng.integers(0, VOCAB, (1, length)).astype(np.int32)
    corrupted = clean.copy()
    corrupted[:, ::3] = rng.integers(0, VOCAB, corrupted[:, ::3].shape)
    return clean, corrupted


def build(preset: str, folder: str) -> tuple:
    """Exports a model with large random weights, so that effects exceed rounding errors."""
    import jax

    import jaxformer as jf
    from jaxformer.models.parameters import init

    model = jf.Decoder(jf.preset(preset))
    variables = init(model, jax.random.key(0))
    variables = jax.tree.map(lambda x: 2.0 * x if x.ndim > 1 else x, variables)
    jf.export(folder, model, variables)
    return model, variables


def ours(connection, preset: str, folder: str, length: int, chunk: int):
    """Runs jaxformer's sweep and sends its results through `connection`.

    The results are (effects, `Time` of the sweep, seconds of compilation, added bytes of memory).
    """
    import jax

    import jaxformer as jf
    from jaxformer.interpret import LogitDifference, patch_sweep

    jf.tune_cpu_runtime()
    model, variables = build(preset, folder)
    connection.send("exported")
    connection.recv()
    before, compilation = peak_memory(), []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compilation.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    metric, begin = LogitDifference(RIGHT, WRONG), Time.now()
    sweep = patch_sweep(model, variables, *texts(length), metric, chunk=chunk)
    time_of_sweep = Time.now().since(begin)
    connection.send((sweep.effects, time_of_sweep, sum(compilation), peak_memory() - before))


class TorchPatching:
    """Activation patching by forward hooks on GPT2LMHeadModel."""

    def __init__(self, folder: str, length: int):
        import torch
        from transformers import GPT2LMHeadModel

        self.torch, self.options = torch, {}
        self.model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.head_dim = self.model.config.n_embd // self.model.config.n_head
        clean, self.corrupted = (torch.as_tensor(x, dtype=torch.long) for x in texts(length))
        self.values = self.captured(clean)
        self.base = self.metric(self.corrupted)[0]

    def outputs(self) -> list:
        """Returns the output projections, which read the concatenated outputs of the heads."""
        return [block.attn.c_proj for block in self.model.transformer.h]

    def captured(self, tokens) -> list:
        """Returns the concatenated outputs of the heads of each layer, [1, length, dim]."""
        values = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, given: values.append(given[0].clone()))
            for layer in self.outputs()
        ]
        self.metric(tokens)
        for hook in hooks:
            hook.remove()
        return values

    def metric(self, tokens):
        with self.torch.inference_mode():
            logits = self.model(tokens, use_cache=False, **self.options).logits[:, -1]
            return (logits[:, RIGHT] - logits[:, WRONG]).clone()

    def effects(self, layer: int, heads, positions) -> np.ndarray:
        """Returns the effects of patching several heads and positions of one layer in one batch."""
        clean = self.values[layer]

        def patch(_, given):
            (x,) = given
            x = x.clone()
            for index, (head, position) in enumerate(zip(heads, positions, strict=True)):
                part = slice(head * self.head_dim, (head + 1) * self.head_dim)
                x[index, position, part] = clean[0, position, part]
            return (x,)

        hook = self.outputs()[layer].register_forward_pre_hook(patch)
        try:
            return (self.metric(self.corrupted.expand(len(heads), -1)) - self.base).numpy()
        finally:
            hook.remove()


def torch_sweep(patching, sites: np.ndarray, batch_size: int) -> tuple[np.ndarray, Time]:
    """Patches the sites of each layer in batches; returns (effects, mean time per site)."""
    effects, indices, begin = np.zeros(len(sites)), np.arange(len(sites)), Time.now()
    for layer in np.unique(sites[:, 0]):
        of_layer = indices[sites[:, 0] == layer]
        for first in range(0, len(of_layer), batch_size):
            some = of_layer[first : first + batch_size]
            effects[some] = patching.effects(layer, *sites[some, 1:].T)
    return effects, Time.now().since(begin).times(1 / len(sites))


def torch_sweeps(patching, sites: np.ndarray, batch_size: int) -> dict:
    """Returns the effects and the time per site for each variant of the sweep in torch."""
    found = {}
    for name, size, options in (
        ("one patch per forward pass", 1, {}),
        ("one patch per forward pass, logits of the last position", 1, {"logits_to_keep": 1}),
        ("batched", batch_size, {}),
        ("batched, logits of the last position", batch_size, {"logits_to_keep": 1}),
    ):
        patching.options = options
        torch_sweep(patching, sites[:batch_size], size)  # This call warms up torch.
        found[name] = torch_sweep(patching, sites, size)
    return found


def draw_sites(shape: tuple, number: int, groups: int) -> np.ndarray:
    """Draws random sites (layer, head, position), equally many from each of `groups` layers."""
    rng = np.random.default_rng(1)
    layers = np.linspace(0, shape[0] - 1, groups).astype(int)
    rest = [rng.choice(shape[1] * shape[2], number // groups, replace=False) for _ in layers]
    return np.array(
        [(x, *divmod(int(i), shape[2])) for x, some in zip(layers, rest, strict=True) for i in some]
    )


def main():
    parser = Parser(__doc__)
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--length", type=at_least(2), default=64)
    parser.add_argument(
        "--chunk", type=at_least(1), default=32, help="batch size of jaxformer's sweep"
    )
    parser.add_argument(
        "--sites", type=at_least(16), default=32, help="number of random patches to time in torch"
    )
    parser.add_argument(
        "--batch-size",
        type=at_least(2),
        default=16,
        help="batch size of the batched torch variants",
    )
    parser.add_argument("--cores", type=at_least(1), help="CPU cores to use; default: all")
    arguments = parser.parse_args()
    require("torch", "transformers")
    if arguments.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        given = (theirs, arguments.preset, f"{folder}/model", arguments.length, arguments.chunk)
        process = context.Process(target=ours, args=given, daemon=True)
        process.start()
        connection.recv()
        patching = TorchPatching(given[2], arguments.length)
        config = patching.model.config
        shape = (config.n_layer, config.n_head, arguments.length)
        groups = max(1, arguments.sites // arguments.batch_size)
        sites = draw_sites(shape, arguments.sites, groups)
        passes = [torch_sweeps(patching, sites, arguments.batch_size)]
        connection.send("run")
        measured = connection.recv()
        process.join()
        passes.append(torch_sweeps(patching, sites, arguments.batch_size))
    conclude(report(arguments, sites, passes, measured), arguments.record)


def report(arguments, sites: np.ndarray, passes: list, measured: tuple) -> dict:
    """Compares the times and the effects of both libraries; prints and returns the comparison."""
    effects, spent, compilation, memory = measured
    largest, count = float(abs(effects).max()), effects.size
    print(f"{effects.shape} = {count:,} patches, text of {arguments.length} tokens")
    print(
        f"jaxformer: {spent.wall:.0f} s, including {compilation:.0f} s of compilation\n"
        f"  processor time: {spent.cores:.0f} s\n"
        f"  memory added to the peak: {memory / 1e6:.0f} MB"
    )
    print(f"torch: times of {count:,} patches, estimated from {len(sites)} random patches:")
    figures = {"shape": effects.shape, **spent._asdict(), "compilation": compilation}
    figures |= {"added memory, bytes": memory, "torch sites": len(sites), "torch": {}}
    for name in passes[0]:
        found = [one[name] for one in passes]
        error = max(float(abs(some - effects[tuple(sites.T)]).max()) for some, _ in found)
        if error > TOLERANCE * largest:
            raise ValueError(
                f"torch, {name}: effects differ by {error:.1e}; largest effect: {largest:.1e}"
            )
        wall, cores = (count * min(getattr(t, x) for _, t in found) for x in Time._fields)
        print(
            f"  {name}: {wall:.0f} s ({1e3 * wall / count:.0f} ms per patch)\n"
            f"    jaxformer is {wall / spent.wall:.1f} times as fast.\n"
            f"    processor time: {cores:.0f} s, {cores / spent.cores:.1f} times jaxformer's\n"
            f"    effects differ by {error:.1e}; largest effect: {largest:.1e}"
        )
        figures["torch"][name] = {
            "seconds per patch, before and after the run of jaxformer": [t.wall for _, t in found],
            "seconds, extrapolated": wall,
            "processor seconds, extrapolated": cores,
            "ratio": wall / spent.wall,
            "processor time of torch / jaxformer": cores / spent.cores,
            "largest difference": error,
        }
    return figures | {"largest effect": largest, "tolerance": TOLERANCE}


if __name__ == "__main__":
    run(main)
