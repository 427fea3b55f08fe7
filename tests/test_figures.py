"""Records of experiments are complete, and the figures on the pages come from the records."""

import json
import math
import re
import statistics
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
    """Returns the figures of a record, with lists of sizes as a dictionary by size."""
    path = ROOT / "experiments" / "results" / f"{name}.json"
    found = json.loads(path.read_text())["figures"]
    by_size = isinstance(found, list) and "size" in found[0]
    return {x["size"]: x for x in found} if by_size else found


@cache
def text(page: str) -> str:
    """Returns the words of a page, separated by single spaces."""
    return " ".join((ROOT / page).read_text().split())


def ratios(record: str, *keys) -> str:
    """Returns the cells of a row in the table of speeds: torch eager and torch.compile."""
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
        f"the training took {minutes(run['seconds'])}. The model reached "
        f"{run['bits_per_byte']:.3f} bits per byte of held-out text. `gzip -9` needs "
        f"{run['gzip']:.3f} bits per byte and `xz -9e` needs {run['xz']:.3f}"
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
        f"| AMD EPYC, float32 | {min(training):.2f} to {max(training):.2f} "
        f"| {min(decoding):.2f} to {max(decoding):.2f} |"
    )


def _bfloat16() -> str:
    found = figures("bfloat16-cpu")
    return (
        f"| 10.8 M parameters | {found['float32']['seconds']:.2f} s | "
        f"{found['bfloat16']['seconds']:.2f} s | {found['float32']['ratio']:.2f} |"
    )


def _losses() -> str:
    large, small = (
        figures(f"bfloat16-{name}")["largest relative differences of losses"]
        for name in ("cpu", "small-cpu")
    )
    return (
        f"| 10.8 M | bfloat16 activations | {large['bfloat16']:.1%} | `bfloat16-cpu` | "
        "| 10.8 M | float32, with initial weights rounded once to bfloat16 | "
        f"{large['float32, weights rounded once']:.1%} | `bfloat16-cpu` | "
        f"| 0.8 M | bfloat16 activations | {small['bfloat16']:.2%} | `bfloat16-small-cpu` |"
    )


def _products() -> str:
    sums = next(iter(figures("products-cpu").values()))["sums"]
    weights, attention = sums["with weights"], sums["of attention"]
    whole = figures("train-xeon-cpu")["10.8m"]["torch.compile"]["seconds"]
    return (
        f"| all products with weights | {weights['XLA']:.2f} s | {weights['torch']:.2f} s | "
        f"| all products of attention | {attention['XLA']:.2f} s | {attention['torch']:.2f} s | "
        f"| a whole training step with `torch.compile` | | {whole:.2f} s |"
    )


def _attention_memory() -> str:
    return " ".join(
        f"| {x['length']:,} | {x['megabytes above those before']:.0f} MB | "
        f"{x['scores of the whole sequence would be']:,.0f} MB |"
        for x in figures("attention-memory-cpu")
    )


def _sources() -> str:
    found = {length: figures("translate-sources-cpu")[f"small {length}"] for length in (16, 256)}
    return " ".join(
        f"| {length} | {x['milliseconds_to_read']:.0f} ms | {x['a_token']:.1f} ms |"
        for length, x in found.items()
    )


def _survival() -> str:
    found = figures("survival-cpu")
    return f"was killed {found['kills']} times, {found['during a save']} of them while it wrote"


def _flax_classes() -> str:
    cases = figures("flax-classes-cpu")["cases"]
    alike = {name: x["difference"] for name, x in cases.items() if name != "mistral with a window"}
    window = cases["mistral with a window"]
    assert window["difference_of_wider_window"] < 1e-5 < window["difference"]
    without_t5 = max(x for name, x in alike.items() if not name.startswith(("t5", "mt5")))
    return (
        f"differ by {max(alike.values()):.1e} at most, and by {without_t5:.1e} without T5 and mT5"
    )


def _number_of_flax_models() -> str:
    return f"transformers 4.49 saved {len(figures('flax-classes-cpu')['cases'])} tiny models"


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
    names = ("LSTM", "RNN", "causal CNN", "Transformer")
    return " ".join(
        f"| {name} | {figures('zoo-cpu')[name]['curve'][-1][-1]:.2f} | "
        f"{found[name]['32']:,.0f} | {found[name]['3968']:,.0f} | "
        f"{min(found[name].values()):,.0f} to {max(found[name].values()):,.0f} |"
        for name in names
    )


def _losses_by_rate() -> str:
    found = figures("zoo-rates-cpu")

    def cell(losses: list[float] | None, is_best: bool) -> str:
        if losses is None:
            return " "
        assert len(losses) == 3
        shown = "diverged" if None in losses else f"{statistics.mean(losses):.3f}"
        return f" **{shown}** " if is_best else f" {shown} "

    lines = []
    for rate in sorted({rate for x in found.values() for rate in x["losses"]}, key=float):
        cells = [cell(x["losses"].get(rate), float(rate) == x["best"]) for x in found.values()]
        lines.append(f"| {float(rate):g} |{'|'.join(cells)}|")
    return " ".join(lines)


def _differences_between_rates() -> str:
    def cell(losses: list[float], lowest: list[float]) -> str:
        if None in losses:
            return "diverged"
        differences = [a - b for a, b in zip(losses, lowest, strict=True)]
        mean = f"{statistics.mean(differences):.3f}"
        if len(differences) == 1:
            return mean
        return f"{mean} ± {statistics.stdev(differences) / len(differences) ** 0.5:.3f}"

    lines = []
    for name, x in figures("zoo-rates-cpu").items():
        best, losses = x["best"], x["losses"]
        cells = [cell(losses[str(rate)], losses[str(best)]) for rate in (best / 2, 2 * best)]
        lines.append(f"| {name} | {best:g} | {' | '.join(cells)} |")
    return " ".join(lines)


def _phrases() -> str:
    models = {"Transformer": "transformer", "LSTM with attention": "attention-lstm", "LSTM": "lstm"}
    lines = []
    for shown, name in models.items():
        x = figures("translate-phrases-cpu")[name]
        cells = " | ".join(f"{share:.1%}" for share in x["exact_by_phrases"].values())
        lines.append(f"| {shown} | {x['exact']:.1%} | {cells} |")
    return " ".join(lines)


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
        f"take {found['without the barrier']:.1f} ms per step with the float32 copy, and "
        f"{found['with the barrier']:.1f} ms with int8 weights"
    )


def _page_faults() -> str:
    kept, default = (figures("hazards-cpu")["faults"][x] for x in ("freed memory kept", "default"))
    return f"takes {kept['seconds']:.2f} s instead of {default['seconds']:.2f} s"


def _one_arena() -> str:
    one, usual = (figures("hazards-cpu")["arenas"][x] for x in ("one arena", "default"))
    return f"takes {one['decoding_seconds'] / usual['decoding_seconds']:.2f} times as long"


def _this_machine() -> str:
    found = json.loads((ROOT / "experiments" / "results" / "bench-cpu.json").read_text())["figures"]
    lines = []
    for x in found["output"]["measurements"]:
        shown = f"{x['part']}, {x['name']}".replace("gpt2-124m", "GPT-2 124M")
        if x["part"] == "decoding":
            share = f"{x['shares']['memory']:.0%} of the memory bandwidth"
        elif x["part"] in ("training step", "attention") and "4,096" not in shown:
            share = f"{x['shares']['matrix product']:.0%} of the peak FLOP/s"
        else:
            continue
        pace = f" {x['tokens_per_second']:,.1f} " if x["tokens_per_second"] else " "
        lines.append(f"| {shown} |{pace}| {share} |")
    return " ".join(lines)


def _half_built() -> str:
    found = figures("build-up-cpu")["taken away"]
    bits = {name: sum(losses) / len(losses) / math.log(2) for name, losses in found.items()}
    rise = {name[2:]: x - bits["finished"] for name, x in bits.items() if name != "finished"}
    order = ("residual", "norm", "several heads", "positions", "one activation", "scaling by √d")
    return " ".join(f"| {name} | {rise[name]:+.2f} |" for name in order).replace("-", "−")


SPEEDS = {  # a row in the table of speeds, and the source of its figures
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


def _many_sequences() -> str:
    found = {
        (x["call"], x["num_sequences"], x["at_once"]): x["mb"] for x in figures("sequences-cpu")
    }
    return "".join(
        f"| `{call}` | {found[call, 500, True]:,.0f} | {found[call, 500, False]:,.0f} | "
        f"{found[call, 5000, False]:,.0f} | "
        for call in ("generate", "beam_search", "score", "fill")
    ).strip()


def _answers() -> str:
    names = {
        "10,000 in batches | jaxformer, one prompt at a time": "one prompt at a time",
        "10,000 in batches | transformers, batches of 64": "transformers, batches of 64",
        "one at a time | transformers, one at a time": "transformers, one at a time",
        "512 with constraints and stop strings | transformers, batches of 64": (
            "constraints, transformers in batches of 64"
        ),
        "256 with a JSON schema | transformers, batches of 64": (
            "a JSON schema, both in batches of 64"
        ),
    }
    found = {x["case"]: x for x in figures("answers-cpu")}
    lines = []
    for shown, name in names.items():
        x = found[name]
        times = f"{x['ms_per_prompt']:.1f} ms | {x['other_ms_per_prompt']:.1f} ms"
        lines.append(f"| {shown} | {times} | {x['ratio']:.1f} |")
    seconds = found["one prompt at a time"]["seconds_of_command"]
    return f"{' '.join(lines)} The command with `--prompts` took {seconds:.0f} s"


def _addition() -> str:
    found = figures("addition-cpu")
    first, last = found["grpo"][0], found["grpo"][-1]
    steps = found["tuning"][-1]["step"]
    assert found["base"]["step"] == figures("stdlib-cpu")["step"], "this is not the default run"
    return (
        f"answers {first['held out']:.0%} of the held-out sums after {steps:,} "
        f"steps on examples ({found['seconds of tuning']:.0f} s). In {last['step']} steps of GRPO "
        f"({found['seconds of grpo']:.0f} s), the share of right answers grows from "
        f"{first['practised']:.0%} to {last['practised']:.0%} on the practised sums. "
        "On the held-out sums, which GRPO never sees, it falls from "
        f"{first['held out']:.0%} to {last['held out']:.0%}"
    )


def _integers() -> str:
    found = figures("int8-cpu")
    same = [x["same_argmax"] for x in found]
    times = [x["jaxformer, int8"]["ratio"] for x in figures("decode-cpu")]
    return (
        f"| bytes of the parameters | {found[0]['bytes']:.2f} | | positions with the same most "
        f"likely token | {min(same):.0%} to {max(same):.0%} | | time per token, batch size 1 | "
        f"{times[0]:.2f} | | time per token, batch size 8 | {times[1]:.2f} |"
    )


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
    return f"bfloat16 (torch with autocast) | {min(found):.2f} to {max(found):.2f} |"


def _speed_on_the_xeon() -> str:
    size = figures("train-xeon-cpu")["10.8m"]
    found = [size[name]["ratio"] for name in ("torch eager", "torch.compile")]
    return f"Intel Xeon, float32, one model | {min(found):.2f} to {max(found):.2f} |"


SENTENCES = {  # a sentence of a page, computed from the record or the code
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
    "many sequences": ("docs/results.md", _many_sequences),
    "answers": ("docs/results.md", _answers),
    "addition": ("docs/tune.md", _addition),
    "int8": ("docs/troubleshooting.md", _integers),
    "memory of loading": ("docs/checkpoints.md", _memory_of_loading),
    "cost of taint": ("docs/certificates.md", _cost_of_taint),
    "large text": ("docs/training.md", _large_text),
    "loss and decoding speed of each kind": ("docs/results.md", _speeds_of_kinds),
    "losses of learning rates": ("docs/results.md", _losses_by_rate),
    "differences between learning rates": ("docs/results.md", _differences_between_rates),
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
    "Flax classes": ("docs/from-flax-transformers.md", _flax_classes),
    "number of Flax models": ("docs/from-flax-transformers.md", _number_of_flax_models),
}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_each_experiment_record_names_its_command_and_commit_and_machine(path):
    record = json.loads(path.read_text())
    missing = CIRCUMSTANCES - record.keys()
    assert not missing
    assert re.fullmatch(r"[0-9a-f]{7,}", record["commit"]), "the code had uncommitted changes"


@pytest.mark.parametrize("line", SPEEDS)
def test_table_of_speeds_in_results_matches_the_records(line):
    record, *keys = SPEEDS[line]
    assert f"| {line} | {ratios(record, *keys)} | `{record}` |" in text("docs/results.md")


@pytest.mark.parametrize("name", ["v5e", "v6e", "h100-dense", "h100-packed", "h100-tokamax"])
def test_docs_table_of_compiled_attention_matches_the_records(name):
    steps = figures(f"compiled-attention-{name}")["steps"]
    fused, blockwise = ([x for x in steps if x["attention"] == y] for y in ("fused", "blockwise"))
    assert fused
    for x, y in zip(fused, blockwise, strict=True):
        calls, *memory = x["kernel calls"], x["memory"]["total"], y["memory"]["total"]
        cells = rf"{calls}(, tokamax)? \| {memory[0] / 1e9:.2f} \| {memory[1] / 1e9:.2f} \|"
        assert re.search(cells, text("docs/what-runs-where.md")), x


@pytest.mark.parametrize("name", SENTENCES)
def test_docs_sentences_with_measurements_match_their_records(name):
    page, said = SENTENCES[name]
    assert said().lower() in text(page).lower()


def test_every_experiment_record_named_in_docs_results_exists():
    names = set(re.findall(r"(?:record )?`([a-z0-9-]+-cpu)`", text("docs/results.md")))
    assert names and not names - {path.stem for path in RECORDS}
