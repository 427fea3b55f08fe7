"""Compares activation patching of a GPT-2 of 124M parameters with torch forward hooks.

    python experiments/bench_patching.py                 # 12 layers × 12 heads × 64 positions
    python experiments/bench_patching.py --sites 64 --batch-size 32

A sweep runs a corrupted text of 64 tokens 9,216 times, each time with the output of one head at one
position replaced by its value on a clean text, and measures a difference of two logits at the last
position. Both sides have the same random weights, exported to a folder that transformers loads.

The torch side is GPT2LMHeadModel in eval mode under inference_mode, with a forward pre-hook on the
output projection of each layer's attention. It runs one site per forward pass, as TransformerLens
does, or a batch of sites of one layer. Its time is measured on a random subset of sites, of all
layers and positions, and multiplied by the number of sites; its effects are compared with ours.
`logits of the last position` is torch with logits_to_keep=1, which omits most of the output map.

Needs torch and transformers.
"""

import multiprocessing
import resource
import tempfile
import time

import numpy as np
from record import Parser, at_least, conclude, require, run

VOCAB, RIGHT, WRONG = 50_257, 11, 222


def texts(length: int):
    """Returns a clean and a corrupted text [1, length], which differ in every third token."""
    rng = np.random.default_rng(0)
    clean = rng.integers(0, VOCAB, (1, length)).astype(np.int32)
    corrupted = clean.copy()
    corrupted[:, ::3] = rng.integers(0, VOCAB, corrupted[:, ::3].shape)
    return clean, corrupted


def build(preset: str, folder: str) -> tuple:
    """Exports a model with random weights, enlarged so that effects exceed rounding."""
    import jax

    import jaxformer as jf
    from jaxformer.models.parameters import init

    model = jf.Decoder(jf.preset(preset))
    variables = init(model, jax.random.key(0))
    variables = jax.tree.map(lambda x: 2.0 * x if x.ndim > 1 else x, variables)
    jf.export(folder, model, variables)
    return model, variables


def ours(connection, preset: str, folder: str, length: int, chunk: int):
    """Sends (effects, seconds of the first sweep, of the second one, peak bytes)."""
    import jaxformer as jf
    from jaxformer.interpret.metrics import LogitDifference
    from jaxformer.interpret.sweep import patch_sweep

    jf.keep_freed_memory()
    model, variables = build(preset, folder)
    connection.send("exported")
    connection.recv()
    before, seconds = peak_memory(), []
    for _ in range(2):
        begin = time.perf_counter()
        metric = LogitDifference(RIGHT, WRONG)
        sweep = patch_sweep(model, variables, *texts(length), metric, chunk=chunk)
        seconds.append(time.perf_counter() - begin)
    connection.send((sweep.effects, *seconds, peak_memory() - before))


def peak_memory() -> int:
    """Returns the largest resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
        """The output projections, whose input has the outputs of the heads side by side."""
        return [block.attn.c_proj for block in self.model.transformer.h]

    def captured(self, tokens) -> list:
        """Returns the outputs of the heads of each layer, [1, length, dim]."""
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
        """Returns the effects of some sites of one layer, by one pass over a batch of them."""
        clean = self.values[layer]

        def patch(_, given):
            (x,) = given
            x = x.clone()
            for row, (head, position) in enumerate(zip(heads, positions, strict=True)):
                part = slice(head * self.head_dim, (head + 1) * self.head_dim)
                x[row, position, part] = clean[0, position, part]
            return (x,)

        hook = self.outputs()[layer].register_forward_pre_hook(patch)
        try:
            return (self.metric(self.corrupted.expand(len(heads), -1)) - self.base).numpy()
        finally:
            hook.remove()


def torch_seconds(patching, sites: np.ndarray, batch_size: int) -> tuple[np.ndarray, float]:
    """Returns (effects of the sites, median seconds per site).

    Args:
        patching: a `TorchPatching`.
        sites: (layer, head, position) of each site, sorted by layers if the batch size is not 1.
        batch_size: number of sites of a pass, which are in one layer.
    """
    effects, times, rows = np.zeros(len(sites)), [], np.arange(len(sites))
    for layer in range(sites[:, 0].max() + 1):
        of_layer = rows[sites[:, 0] == layer]
        for some in np.array_split(of_layer, max(1, -(-len(of_layer) // batch_size))):
            if not len(some):
                continue
            begin = time.perf_counter()
            effects[some] = patching.effects(layer, *sites[some, 1:].T)
            times += [(time.perf_counter() - begin) / len(some)] * len(some)
    return effects, float(np.median(times))


def main():
    parser = Parser(__doc__)
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--length", type=at_least(2), default=64)
    parser.add_argument("--chunk", type=at_least(1), default=32, help="our runs at a time")
    parser.add_argument("--sites", type=at_least(12), default=192, help="sites of the torch sweep")
    parser.add_argument("--batch-size", type=at_least(2), default=16, help="of batched torch")
    arguments = parser.parse_args()
    require("torch", "transformers")
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        given = (theirs, arguments.preset, f"{folder}/model", arguments.length, arguments.chunk)
        process = context.Process(target=ours, args=given, daemon=True)
        process.start()
        connection.recv()
        patching = TorchPatching(given[2], arguments.length)
        connection.send("run")
        effects, first, second, memory = connection.recv()
        process.join()
        conclude(compare(arguments, patching, effects, first, second, memory), arguments.record)


def compare(arguments, patching, effects, first, second, memory) -> dict:
    """Runs the torch sweeps over a subset of the sites, prints a table, returns its figures."""
    rng, count = np.random.default_rng(1), effects.size
    sites = np.sort(rng.choice(count, min(arguments.sites, count), replace=False))
    sites = np.stack(np.unravel_index(sites, effects.shape), axis=1)
    print(f"{effects.shape} = {count:,} sites of {arguments.length} tokens")
    print(f"jaxformer: {second:.1f} s, {first:.1f} s with compilation; {memory / 1e6:.0f} MB added")
    figures = {"shape": effects.shape, "seconds": second, "seconds with compilation": first}
    figures |= {"added memory, bytes": memory, "torch sites": len(sites), "torch": {}}
    wanted = effects[tuple(sites.T)]
    for name, size, options in (
        ("one site per pass", 1, {}),
        ("one site per pass, logits of the last position", 1, {"logits_to_keep": 1}),
        ("batched", arguments.batch_size, {}),
        ("batched, logits of the last position", arguments.batch_size, {"logits_to_keep": 1}),
    ):
        patching.options = options
        torch_seconds(patching, sites[:4], size)
        found, seconds = torch_seconds(patching, sites, size)
        error, whole = float(abs(found - wanted).max()), seconds * count
        tolerance = 1e-4 * max(1.0, float(abs(effects).max()))
        if error > tolerance:
            raise ValueError(f"torch's effects differ by {error:.1e}, more than {tolerance:.1e}")
        print(
            f"torch, {name}: {1e3 * seconds:.1f} ms per site on {len(sites)} sites, {whole:.0f} s "
            f"for all (extrapolated): jaxformer is {whole / second:.1f} times as fast "
            f"({whole / first:.1f} with compilation); effects differ by {error:.1e} at most"
        )
        figures["torch"][name] = {
            "seconds per site": seconds,
            "seconds, extrapolated": whole,
            "ratio": whole / second,
            "ratio with compilation": whole / first,
            "largest difference": error,
        }
    return figures | {"largest effect": float(abs(effects).max())}


if __name__ == "__main__":
    run(main)
