"""Records of experiments are complete, and the figures of the pages are those of the records."""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest

from jaxformer.hub.families import FAMILIES
from tests.mutation.bugs import BUGS

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "experiments" / "results").glob("*.json"))
CIRCUMSTANCES = {"command", "date", "commit", "processor", "cores", "python", "versions"}


@cache
def figures(name: str):
    """Returns the figures of a record, lists of sizes as a dictionary by size."""
    path = ROOT / "experiments" / "results" / f"{name}.json"
    found = json.loads(path.read_text())["figures"]
    by_size = isinstance(found, list) and "size" in found[0]
    return {x["size"]: x for x in found} if by_size else found


@cache
def text(page: str) -> str:
    """Returns the words of a page with single spaces."""
    return " ".join((ROOT / page).read_text().split())


def ratios(record: str, *keys) -> str:
    """Returns the cells of a line of the table of speeds: torch eager and torch.compile."""
    found = figures(record)
    for key in keys:
        found = found[key]
    shown = [f"{found[name]['ratio']:.2f}" for name in ("torch eager", "torch.compile")]
    return " | ".join(shown)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def _default_run() -> str:
    run = figures("stdlib-cpu")
    return (
        f"the training took {minutes(run['seconds'])}. It reached {run['bits_per_byte']:.3f} bits "
        f"per byte of held-out text; `gzip -9` needs {run['gzip']:.3f} and `xz -9e` {run['xz']:.3f}"
    )


def _range_of_speeds() -> str:
    training = [
        size[name]["ratio"]
        for record in ("train-cpu", "train-long-cpu")
        for size in figures(record).values()
        for name in ("torch eager", "torch.compile")
    ]
    decoding = [
        x[name]["ratio"]
        for x in [*figures("decode-cpu"), *figures("translate-decode-cpu").values()]
        for name in ("torch eager", "torch.compile", "torch Marian")
        if name in x
    ]
    return (
        f"training is {min(training):.2f} to {max(training):.2f} times and decoding "
        f"{min(decoding):.2f} to {max(decoding):.2f} times as fast"
    )


def _bfloat16() -> str:
    found = figures("bfloat16-cpu")
    one, other = (found[name] for name in ("bfloat16", "float32"))
    return (
        f"takes {one['seconds']:.2f} s in bfloat16 and {other['seconds']:.2f} s in float32: "
        f"bfloat16 is {other['ratio']:.2f} times as fast"
    )


def _losses() -> str:
    large, small = (
        figures(f"bfloat16-{name}")["largest relative differences of losses"]
        for name in ("cpu", "small-cpu")
    )
    return (
        f"by at most {large['bfloat16']:.1%}. For scale: rounding only the initial weights to "
        "bfloat16 and then training in float32 changes the losses by up to "
        f"{large['float32, weights rounded once']:.1%}. With 0.8 M parameters bfloat16 changes "
        f"them by at most {small['bfloat16']:.2%}"
    )


def _products() -> str:
    sums = next(iter(figures("products-cpu").values()))["sums"]
    weights, attention = sums["with weights"], sums["of attention"]
    whole = figures("train-xeon-cpu")["10.8m"]["torch.compile"]["seconds"]
    return (
        f"{weights['XLA']:.2f} s in XLA and {weights['torch']:.2f} s in torch, which calls MKL. "
        f"The products of attention take {attention['XLA']:.2f} s and {attention['torch']:.2f} s "
        f"(record `products-cpu`). A whole step of `torch.compile` takes {whole:.2f} s"
    )


def _attention_memory() -> str:
    used = [round(x["megabytes above those before"]) for x in figures("attention-memory-cpu")]
    return "took {}, {} and {} MB beside its inputs".format(*used)


def _sources() -> str:
    long, short = (figures("translate-sources-cpu")[f"small {n}"] for n in (256, 16))
    return (
        f"of 256 tokens takes {long['milliseconds_to_read']:.0f} ms; each further token of all 32 "
        f"translations takes {long['a_token']:.1f} ms ({short['a_token']:.1f} ms for sources of 16"
    )


def _survival() -> str:
    found = figures("survival-cpu")
    return f"was killed {found['kills']} times, {found['during a save']} of them while it wrote"


def _memory_of_loading() -> str:
    peak = figures("load-cpu")["peak_memory"]
    return f"takes {peak:.2f} times the memory of its parameters at the peak"


def _cost_of_taint() -> str:
    found = figures("dependency-cpu")
    taint, all_three = (found[name] for name in ("taint", "taint and derivative and change"))
    used = [x["memory, MB"]["highest"] - x["memory, MB"]["before"] for x in (taint, all_three)]
    pairs = all_three["pairs"]
    return (
        f"| taint | all {pairs['taint']:,} | {taint['seconds']:.0f} s | {used[0]} MB | "
        f"| all three | {pairs['taint']:,} for taint, {pairs['change']:,} for each of the other "
        f"two | {all_three['seconds']:.0f} s | {used[1]} MB |"
    )


def _large_text() -> str:
    small, large = (figures("large-text")["peak_mb"][name] for name in ("small", "large"))
    cells = [
        f"{x[part]['anonymous'] / 1e3:.2f} GB"
        for part in ("preparation", "training")
        for x in (small, large)
    ]
    return (
        "| while the text is prepared | {} | {} | | while a small model trains | {} | {} |"
    ).format(*cells)


def _speeds_of_kinds() -> str:
    found = {name: x["decoding_tokens_per_second"] for name, x in figures("zoo-cpu").items()}
    ends = {name: (round(min(x.values())), round(max(x.values()))) for name, x in found.items()}
    first, last = (round(found["Transformer"][at]) for at in ("32", "3968"))
    (r, rr), (s, ss), (c, cc) = (ends[name] for name in ("RNN", "LSTM", "causal CNN"))
    return (
        f"({r:,} to {rr:,} and {s:,} to {ss:,} tokens per second), and so does the CNN ({c:,} to "
        f"{cc:,}). The Transformer slows down as the past grows: {first:,} tokens per second at "
        f"position 32, {last:,} at position 3,968"
    )


def _losses_of_kinds() -> str:
    names = ("LSTM", "RNN", "causal CNN", "Transformer")
    losses = [figures("zoo-cpu")[name]["curve"][-1][-1] for name in names]
    return "({:.2f} nats per token; RNN {:.2f}, CNN {:.2f}, Transformer {:.2f})".format(*losses)


def _phrases() -> str:
    found = figures("translate-phrases-cpu")
    exact = [found[name]["exact"] for name in ("transformer", "attention-lstm")]
    one, two, three, _ = found["lstm"]["exact_by_phrases"].values()
    return (
        f"translates {exact[0]:.1%} of them exactly, the LSTM with attention {exact[1]:.1%}. - The "
        "LSTM without attention carries the whole source in one state of fixed size. It translates "
        f"{one:.0%} of single phrases, {two:.0%} of two phrases, {three:.0%} of three"
    )


def _captions() -> str:
    german, french = (figures(f"translate-multi30k-{to}-cpu") for to in ("de", "fr"))
    models = {"Transformer": "transformer", "LSTM with attention": "attention-lstm", "LSTM": "lstm"}
    lines = []
    for shown, name in models.items():
        x = german[name]
        bleu = f" {french[name]['bleu']:.1f} " if name in french else " "
        lines.append(
            f"| {shown} | {x['parameters'] / 1e6:.2f} M | {x['steps']:,} | "
            f"{x['tokens_per_second']:,} | {x['bleu']:.1f} |{bleu}|"
        )
    return " ".join(lines)


def _products_of_bfloat16() -> str:
    return "| {:.0f} | {:.0f} | {:.0f} |".format(
        *figures("hazards-cpu")["products"]["GFLOP/s"].values()
    )


def _transposition() -> str:
    found = figures("hazards-cpu")["products"]["milliseconds of the gradient of weights"]
    return f"takes {found['transposed in memory']:.1f} instead of {found['as it is']:.1f} ms"


def _loop_of_integers() -> str:
    found = figures("hazards-cpu")["loop"]
    return (
        f"take {found['without the barrier']:.1f} ms per step this way, and "
        f"{found['with the barrier']:.1f} ms with integers"
    )


def _page_faults() -> str:
    kept, default = (figures("hazards-cpu")["faults"][x] for x in ("freed memory kept", "default"))
    return f"takes {kept['seconds']:.2f} s instead of {default['seconds']:.2f} s"


def _one_arena() -> str:
    one, usual = (figures("hazards-cpu")["arenas"][x] for x in ("one arena", "default"))
    return f"takes {one['decoding_seconds'] / usual['decoding_seconds']:.2f} times as long"


def _this_machine() -> str:
    found = json.loads((ROOT / "experiments" / "results" / "bench-cpu.json").read_text())["figures"]
    of = {(x["part"], x["name"]): x for x in found["output"]["measurements"]}
    product = {key: x["shares"].get("matrix product", 0.0) for key, x in of.items()}
    small, large = (
        ("training step", x) for x in ("10.8M, 8 × 256 tokens", "gpt2-124m, 1 × 256 tokens")
    )
    one = of["decoding", "gpt2-124m, batch 1"]
    short, long = (
        ("attention", x) for x in ("16 × 256 tokens, forward", "4 × 1,024 tokens, forward")
    )
    return (
        f"ran at {product[small]:.0%} of the speed of the matrix product, those of GPT-2 124M (one "
        f"row of 256 tokens) at {product[large]:.0%}. GPT-2 124M decoded "
        f"{one['tokens_per_second']:.1f} tokens/s at batch size 1, at "
        f"{one['shares']['memory']:.0%} of the measured bandwidth of the memory. Attention alone "
        "is far below the roof: at "
        f"{product[short]:.0%} of the matrix product with 256 tokens, and at {product[long]:.0%} "
        "with 1,024"
    )


def _half_built() -> str:
    found = figures("build-up-cpu")["taken away"]
    bits = {name: sum(losses) / len(losses) / math.log(2) for name, losses in found.items()}
    rise = {name[2:]: x - bits["finished"] for name, x in bits.items()}
    least = max(abs(rise[name]) for name in ("several heads", "positions", "one activation"))
    return (
        f"Without the residual the loss rises by {rise['residual']:.2f} bits per byte: the model "
        "learns little more than how frequent each byte is. Without the norm it rises by "
        f"{rise['norm']:.2f}. - Removing several heads, positions or the single activation changes "
        f"it by at most {least:.2f}. - Without scaling by √d, with heads of 16 features, it falls "
        f"by {-rise['scaling by √d']:.2f}"
    )


SPEEDS = {  # a line of the table of speeds, and where its figures are
    "GPT-2, training step, 0.8 M parameters, 12 × 64 tokens | AMD EPYC": ("train-cpu", "0.8m"),
    "GPT-2, training step, 10.8 M, 16 × 256 tokens | AMD EPYC": ("train-cpu", "10.8m"),
    "GPT-2, training step, 124 M, 2 × 256 tokens | AMD EPYC": ("train-cpu", "124m/256"),
    "GPT-2, training step, 124 M, 1 × 1,024 tokens | AMD EPYC": ("train-long-cpu", "124m/1024"),
    "GPT-2, training step in bfloat16, 10.8 M, 16 × 256 tokens | AMD EPYC": (
        "train-bfloat16-cpu",
        "10.8m",
    ),
    "GPT-2, training step in bfloat16, 124 M, 2 × 256 tokens | AMD EPYC": (
        "train-bfloat16-cpu",
        "124m/256",
    ),
    "GPT-2, training step, 10.8 M, 16 × 256 tokens | Intel Xeon": ("train-xeon-cpu", "10.8m"),
    "GPT-2, decoding, 124 M, batch 1 | AMD EPYC": ("decode-cpu", 0),
    "GPT-2, decoding, 124 M, batch 8 | AMD EPYC": ("decode-cpu", 1),
}


def _many_rows() -> str:
    found = {(x["call"], x["rows"], x["at_once"]): x["mb"] for x in figures("rows-cpu")}
    return "".join(
        f"| `{call}` | {found[call, 500, True]:,.0f} | {found[call, 500, False]:,.0f} | "
        f"{found[call, 5000, False]:,.0f} | "
        for call in ("generate", "beam_search", "score", "fill")
    ).strip()


def _bugs() -> str:
    return f"inserts {len(BUGS)} known bugs"


def _families() -> str:
    _, table = (ROOT / "docs/checkpoints.md").read_text().split("| family (`model_type`) |")
    rows = re.findall(r"^\|[^|]+\((`[^)|]+)\) \|", table, re.MULTILINE)
    named = {name.strip("`") for row in rows for name in row.split(", ")}
    assert named == set(FAMILIES)
    return f"{len(rows)} Hugging Face families load and export"


def _range_of_speeds_in_bfloat16() -> str:
    found = [
        size[name]["ratio"]
        for size in figures("train-bfloat16-cpu").values()
        for name in ("torch eager", "torch.compile")
    ]
    return f"In bfloat16, training is {min(found):.2f} to {max(found):.2f} times as fast"


def _speed_on_the_xeon() -> str:
    ratio = figures("train-xeon-cpu")["10.8m"]["torch.compile"]["ratio"]
    return f"On an Intel Xeon, training is slower: {ratio:.2f} of `torch.compile`"


SENTENCES = {  # what a page says, from the record or the code
    "default run": ("README.md", _default_run),
    "range of speeds": ("README.md", _range_of_speeds),
    "number of bugs": ("README.md", _bugs),
    "number of families": ("README.md", _families),
    "range of speeds in bfloat16": ("README.md", _range_of_speeds_in_bfloat16),
    "speed on the Xeon": ("README.md", _speed_on_the_xeon),
    "bfloat16": ("docs/results.md", _bfloat16),
    "losses in bfloat16": ("docs/results.md", _losses),
    "products": ("docs/results.md", _products),
    "memory of attention": ("docs/results.md", _attention_memory),
    "sources": ("docs/results.md", _sources),
    "many rows": ("docs/results.md", _many_rows),
    "memory of loading": ("docs/checkpoints.md", _memory_of_loading),
    "cost of taint": ("docs/certificates.md", _cost_of_taint),
    "large text": ("docs/training.md", _large_text),
    "decoding speed of each kind": ("docs/results.md", _speeds_of_kinds),
    "losses of each kind": ("docs/results.md", _losses_of_kinds),
    "translated phrases": ("docs/results.md", _phrases),
    "translated captions": ("docs/results.md", _captions),
    "products of bfloat16": ("docs/hazards.md", _products_of_bfloat16),
    "transposition": ("docs/hazards.md", _transposition),
    "loop of integers": ("docs/hazards.md", _loop_of_integers),
    "page faults": ("docs/hazards.md", _page_faults),
    "one arena": ("docs/hazards.md", _one_arena),
    "this machine": ("docs/results.md", _this_machine),
    "half-built decoder": ("docs/results.md", _half_built),
    "survival": ("docs/training.md", _survival),
}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_record_names_its_command_commit_and_machine(path):
    record = json.loads(path.read_text())
    missing = CIRCUMSTANCES - record.keys()
    assert not missing
    assert re.fullmatch(r"[0-9a-f]{7,}", record["commit"]), "the code had uncommitted changes"


@pytest.mark.parametrize("line", SPEEDS)
def test_table_of_speeds_has_the_figures_of_the_records(line):
    record, *keys = SPEEDS[line]
    assert f"| {line} | {ratios(record, *keys)} | `{record}` |" in text("docs/results.md")


@pytest.mark.parametrize("name", ["v5e", "v6e", "h100-dense", "h100-packed", "h100-tokamax"])
def test_table_of_compiled_steps_has_the_figures_of_the_records(name):
    steps = figures(f"compiled-attention-{name}")["steps"]
    fused, blockwise = ([x for x in steps if x["attention"] == y] for y in ("fused", "blockwise"))
    assert fused
    for x, y in zip(fused, blockwise, strict=True):
        calls, *memory = x["kernel calls"], x["memory"]["total"], y["memory"]["total"]
        cells = rf"{calls}(, tokamax)? \| {memory[0] / 1e9:.2f} \| {memory[1] / 1e9:.2f} \|"
        assert re.search(cells, text("docs/what-runs-where.md")), x


@pytest.mark.parametrize("name", SENTENCES)
def test_sentence_has_the_figures_of_its_record(name):
    page, said = SENTENCES[name]
    assert said().lower() in text(page).lower()


def test_every_record_that_the_results_name_exists():
    names = set(re.findall(r"(?:record )?`([a-z0-9-]+-cpu)`", text("docs/results.md")))
    assert names and not names - {path.stem for path in RECORDS}
