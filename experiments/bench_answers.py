"""Measures `generate` on many prompts, with constraints and with a JSON schema.

    python experiments/bench_answers.py --record answers-cpu

The references are jaxformer with one prompt at a time, and transformers with the same exported
model and sorted batches. The model has the size of the default run and random weights. Its
tokenizer is trained on the source code of Python's json package. Needs torch, transformers and
llguidance.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from record import Parser, at_least, conclude, require, run

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.training.presets import training_preset

NEW, BATCH, SEED = 32, 64, 0
CONSTRAINTS = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 8}
STOPS = ("\n\n", "return")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["area", "length"]}, "value": {"type": "integer"}},
    "required": ["name", "value"],
    "additionalProperties": False,
}


def make_model(folder: Path):
    """Writes a model with random weights in Hugging Face format, and loads it."""
    texts = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    tokenizer = ByteTokenizer.train(texts, 2048)
    config = training_preset("stdlib", "decoder").model
    model = jf.build(config)
    variables = jax.jit(model.init)(jax.random.key(SEED), np.zeros((1, 8), np.int32))
    jf.export(folder, model, variables, tokenizer)
    return jf.load(folder)


def make_prompts(number: int) -> list[str]:
    """Returns excerpts of the source code of Python's json package, 8 to 159 characters long."""
    text = "\n".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    random = np.random.default_rng(SEED)
    starts = random.integers(0, len(text) - 200, number)
    return [text[start : start + int(random.integers(8, 160))] for start in starts]


def measure_ours(checkpoint, prompts: list[list[int]], **options) -> tuple[float, int]:
    """Returns the seconds of a call, and the number of new tokens."""
    model, variables, _ = checkpoint
    begin = time.perf_counter()
    out = jf.generate(
        model, variables, prompts, max_new_tokens=NEW, sampler=jf.Sampler(0.0), **options
    )
    return time.perf_counter() - begin, int(out.lengths.sum())


def measure_theirs(model, prompts: list[list[int]], batch: int, make=None, **options):
    """Returns the seconds of transformers in sorted batches, and the number of new tokens."""
    import torch

    begin, new = time.perf_counter(), 0
    ordered = sorted(prompts, key=len)
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(x)) + x for x in part])
        mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in part])
        more = dict(options)
        if make is not None:
            more["logits_processor"] = [make(len(part), width)]
        with torch.no_grad():
            more |= {"attention_mask": mask, "pad_token_id": 0, "do_sample": False}
            found = model.generate(ids, max_new_tokens=NEW, **more)
        new += int((found[:, width:] != 0).sum())
    return time.perf_counter() - begin, new


def row(name: str, number: int, ours: tuple[float, int], other: tuple[float, int], count: int):
    """Returns the times per prompt in ms, and how many times as fast jaxformer is."""
    mine, theirs = 1e3 * ours[0] / number, 1e3 * other[0] / count
    figures = {
        "case": name,
        "prompts": number,
        "ms_per_prompt": mine,
        "other_ms_per_prompt": theirs,
        "ratio": theirs / mine,
        "new_tokens_per_prompt": ours[1] / number,
        "other_new_tokens_per_prompt": other[1] / count,
    }
    print(figures, flush=True)
    return figures


def measure_command(folder: Path, prompts: list[str]) -> float:
    """Returns the seconds of the whole command for a file of prompts."""
    source, out = folder / "prompts.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    words = ["--max-new-tokens", str(NEW), "--temperature", "0", "--prompts", source, "-o", out]
    begin = time.perf_counter()
    command = [sys.executable, "-m", "jaxformer", "generate", folder / "model", *words]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    assert len(out.read_text().splitlines()) == len(prompts)
    return time.perf_counter() - begin


def main():
    parser = Parser(__doc__)
    parser.add_argument("--prompts", type=at_least(200), default=10_000)
    arguments = parser.parse_args()
    require("torch", "transformers")
    import llguidance
    import llguidance.hf
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = make_model(folder / "model")
        tokenizer = checkpoint.tokenizer
        ready = checkpoint._replace(variables=checkpoint.packed())
        texts = make_prompts(arguments.prompts)
        prompts = [[*tokenizer.text_opening, *ids] for ids in tokenizer.encode_many(texts)]
        seconds = measure_command(folder, texts)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
        their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    figures, few = [], prompts[:100]

    def alone():
        found = [measure_ours(ready, [prompt]) for prompt in few]
        return sum(x[0] for x in found), sum(x[1] for x in found)

    alone()  # compiles
    one = alone()
    measure_ours(ready, prompts)  # compiles
    whole = measure_ours(ready, prompts)
    figures.append(row("one prompt at a time", len(prompts), whole, one, len(few)))
    figures[-1]["seconds_of_command"] = seconds
    some = prompts[:1000]
    measure_theirs(model, some[:BATCH], BATCH)
    theirs = measure_theirs(model, some, BATCH)
    figures.append(row("transformers, batches of 64", len(prompts), whole, theirs, len(some)))
    theirs = measure_theirs(model, few, 1)
    figures.append(row("transformers, one at a time", len(few), one, theirs, len(few)))

    some = prompts[:512]
    stop = jf.StopStrings(tokenizer, STOPS)
    options = {"constraints": jf.Constraints(**CONSTRAINTS), "stop_strings": stop}
    options["stop_tokens"] = tokenizer.stop_tokens
    measure_ours(ready, some, **options)
    ours = measure_ours(ready, some, **options)
    options = {**CONSTRAINTS, "stop_strings": list(STOPS), "tokenizer": their_tokenizer}
    theirs = measure_theirs(model, some, BATCH, **options)
    figures.append(row("constraints, transformers in batches of 64", len(some), ours, theirs, 512))

    class TheirGrammar(transformers.LogitsProcessor):
        """Logits processor of transformers that applies an llguidance grammar to a batch."""

        def __init__(self, vocabulary, source, size, width):
            self.matchers = [llguidance.LLMatcher(vocabulary, source) for _ in range(size)]
            self.width, self.done = width, [False] * size

        def __call__(self, input_ids, scores):
            allowed = np.ones(scores.shape, bool)
            for index, matcher in enumerate(self.matchers):
                new = input_ids[index, self.width :]
                if len(new) and not self.done[index]:
                    self.done[index] = int(new[-1]) in tokenizer.stop_tokens
                    matcher.consume_token(int(new[-1]))
                if not self.done[index]:
                    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                    allowed[index] = np.unpackbits(bits, bitorder="little", count=scores.shape[1])
            return torch.where(torch.tensor(allowed), scores, -torch.inf)

    some = prompts[:256]
    grammar = jf.json_schema(tokenizer, SCHEMA)
    options = {"grammar": grammar, "stop_tokens": tokenizer.stop_tokens, "batch_size": BATCH}
    measure_ours(ready, some, **options)
    ours = measure_ours(ready, some, **options)
    vocabulary = llguidance.hf.from_tokenizer(their_tokenizer, n_vocab=model.config.vocab_size)

    def make(size, width):
        return TheirGrammar(vocabulary, grammar.source, size, width)

    measure_theirs(model, some[:BATCH], BATCH, make)
    theirs = measure_theirs(model, some, BATCH, make)
    figures.append(row("a JSON schema, both in batches of 64", len(some), ours, theirs, len(some)))
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
