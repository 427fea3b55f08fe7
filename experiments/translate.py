r"""Compares translation by a Transformer, an LSTM with attention and an LSTM, for equal time.

    python experiments/translate.py                        # dates and amounts, English to French
    python experiments/translate.py --source train.en.gz --target train.de.gz \
        --test-source test.en.gz --test-target test.de.gz --lowercase --max-minutes 60

Without files, the models learn phrases that Babel generates from the Unicode CLDR (`phrases.py`).
The phrases are real language, each translation is either right or wrong, and texts can have any
length. Each model is a run of `jaxformer train` in a folder below --out; the same command resumes
the run. Needs `pip install -e ".[experiments]"`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from record import Parser, at_least, conclude, require, run

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import NUM_BYTES
from jaxformer.artifacts.files import write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli.train import main as train
from jaxformer.decoding.translate import translate_ids
from jaxformer.runtime import start_jax
from jaxformer.training.data.pairs import read_pairs
from jaxformer.training.evaluate import bleu

_TRANSFORMER = "--model encoder-decoder --preset translation"
_LSTM = "--model recurrent-encoder-decoder --preset translation"
MODELS = {"transformer": _TRANSFORMER, "attention-lstm": _LSTM, "lstm": f"{_LSTM} --no-attends"}
LABELS = {"transformer": "Transformer", "attention-lstm": "LSTM, attention", "lstm": "LSTM"}

# For small models, a step of Muon takes longer than a step of Adam. Nevertheless, Muon gave better
# results than Adam for the Transformer on these regular phrases, but not for the LSTM.
_PHRASES = (
    "--vocab-size 512 --dropout 0 --label-smoothing 0 --batch-tokens 1024 --lengths 4 "
    "--learning-rate 5e-3"
)
_SMALL, _SMALL_LSTM = "--num-layers 2 --embed-dim 96", "--num-layers 1 --embed-dim 128"
PHRASES = {
    "transformer": f"{_PHRASES} {_SMALL} --optimizer muon --learning-rate 4e-3",
    "attention-lstm": f"{_PHRASES} {_SMALL_LSTM}",
    "lstm": f"{_PHRASES} {_SMALL_LSTM}",
}


@dataclass(frozen=True)
class Task:
    """A translation task.

    Attributes:
        name: The name in the output and in records.
        inputs: Flags of `jaxformer train` for the training text.
        test: (source, target) pairs.
        groups: How many phrases each pair in `test` has. None if the pairs come from text files.
    """

    name: str
    inputs: list[str]
    test: list
    groups: list[int] | None = None


def phrase_task(arguments) -> Task:
    """Returns the task of translating generated phrases.

    The training text does not contain any test phrase.
    """
    require("babel")
    from phrases import phrases, strung

    seed = arguments.seed
    learnt, held_out = phrases(40_000, seed)
    test = strung(held_out, 1200, seed + 2, mostly_short=False)
    pairs = [pair[:2] for pair in strung(learnt, 40_000, seed + 1, mostly_short=True)]
    path = arguments.out / f"phrases-{seed}.jsonl"
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(pair) + "\n" for pair in pairs))
    groups = [count for *_, count in test]
    return Task("phrases", ["--source", str(path)], [pair[:2] for pair in test], groups)


def text_task(arguments) -> Task:
    """Returns the task of translating the files that the command line names."""
    inputs = ["--source", str(arguments.source), "--target", str(arguments.target)]
    test = read_pairs(arguments.test_source, arguments.test_target)
    if arguments.lowercase:
        inputs.append("--lowercase")
        test = [tuple(map(str.lower, pair)) for pair in test]
    if arguments.vocab_size:
        inputs += ["--vocab-size", str(arguments.vocab_size)]
    return Task(f"{arguments.source.name} to {arguments.target.name}", inputs, test)


def learn(name: str, task: Task, arguments) -> dict:
    """Trains a model, or resumes its training, and scores it.

    Returns the results, with the translations as "found" and the losses as "history".
    """
    folder = RunFolder(arguments.out / name)
    words = ["--out", str(folder.path)]
    if folder.holds_run:
        train([*words, "--resume", "--max-minutes", str(arguments.max_minutes)])
    else:
        words += MODELS[name].split() + task.inputs
        words += [] if task.groups is None else PHRASES[name].split()
        train([*words, "--max-minutes", str(arguments.max_minutes), "--seed", str(arguments.seed)])
    model, variables, tokenizer = jf.load(folder.path)
    sources, targets = zip(*task.test, strict=True)
    width = (arguments.beam_width or 5) if task.groups is None else 1
    ids = [tokenizer.encode_source(text) for text in sources]
    found = translate_ids(model, variables, tokenizer, ids, beam_width=width)
    lines = "\n".join(map("\t".join, zip(sources, targets, found, strict=True)))
    write_whole(folder.path / "translations.tsv", lines + "\n")
    metrics = [line for line in folder.read_metrics() if "seconds" in line]
    return {
        "parameters": jf.parameter_count(model.config),
        "steps": metrics[-1]["step"],
        "seconds": metrics[-1]["seconds"],
        "tokens_per_second": round(float(np.median([x["tokens_per_second"] for x in metrics]))),
        **score(targets, found, task.groups),
        "found": found,
        "history": [(line["step"], line["seconds"], line["loss"]) for line in metrics],
    }


def score(targets, found, groups: list[int] | None) -> dict:
    """Returns the scores of the translations `found`.

    If `groups` is None, the scores are BLEU, with its signature. Otherwise, `groups` contains the
    number of phrases of each text, and the scores are the share of exact translations, overall and
    by number of phrases.
    """
    if groups is not None:
        right = np.array([a == b for a, b in zip(targets, found, strict=True)])
        shares = {n: float(right[np.array(groups) == n].mean()) for n in sorted(set(groups))}
        return {"exact": float(right.mean()), "exact_by_phrases": shares}
    return bleu(found, targets, lowercase=True)._asdict()


def draw(task: Task, results: dict, path: Path) -> None:
    """Plots the losses against the time, and the quality of the translations.

    For phrases, the quality is the share of exact translations by number of phrases. For text, the
    quality is BLEU.
    """
    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, result in results.items():
        _, seconds, losses = zip(*result["history"], strict=True)
        left.plot(np.array(seconds) / 60, losses, label=LABELS[name])
    left.set(xlabel="minutes of training", ylabel="loss (nats per token)", yscale="log")
    left.set_title("learning, for equal time")
    left.legend()
    if task.groups is not None:
        for name, result in results.items():
            counts, shares = zip(*result["exact_by_phrases"].items(), strict=True)
            right.plot(counts, 100 * np.array(shares), "o-", label=LABELS[name])
        right.set(xlabel="phrases in the text", ylabel="translated exactly (%)", ylim=(-3, 103))
        right.set_title("held-out text by length")
        right.set_xticks(counts)
    else:
        names = list(results)
        right.bar([LABELS[name] for name in names], [results[name]["score"] for name in names])
        right.set(ylabel="BLEU", title="held-out text")
    for axes in (left, right):
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=120)


def check(arguments) -> None:
    """Raises ValueError for inconsistent arguments, before any file is written."""
    files = ("source", "target", "test_source", "test_target")
    if any(getattr(arguments, x) for x in files) and not all(getattr(arguments, x) for x in files):
        raise ValueError(
            "give all of --source, --target, --test-source and --test-target, or none of them"
        )
    if not 0 < arguments.max_minutes < float("inf"):
        raise ValueError(f"--max-minutes is {arguments.max_minutes}; it must be above 0 and finite")
    for name in ("vocab_size", "lowercase", "beam_width"):
        if getattr(arguments, name) and not arguments.source:
            raise ValueError(f"--{name} needs --source".replace("_", "-"))


def main():
    parser = Parser(__doc__)
    for name in ("--source", "--target", "--test-source", "--test-target"):
        parser.add_argument(name, type=Path, help="text, plain or .gz, one sentence per line")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--max-minutes", type=float, default=4.2, help="minutes of training per model"
    )
    parser.add_argument(
        "--vocab-size", type=at_least(NUM_BYTES + 1), help="default with --source: 5000"
    )
    parser.add_argument("--lowercase", action="store_true", help="lowercase all text")
    parser.add_argument("--beam-width", type=at_least(1), help="default with --source: 5")
    parser.add_argument("--out", type=Path, default=Path("runs/translate"))
    parser.add_argument("--seed", type=at_least(0), default=0)
    arguments = parser.parse_args()
    check(arguments)
    task = text_task(arguments) if arguments.source else phrase_task(arguments)
    # With the compilation cache, resuming a run does not compile again.
    start_jax()
    results = {name: learn(name, task, arguments) for name in arguments.models}
    figures = {"task": task.name, "asked": len(task.test)}
    for name, result in results.items():
        shown = {key: result[key] for key in result if key not in ("found", "history")}
        print(f"{LABELS[name]:16} " + ", ".join(f"{key} {value}" for key, value in shown.items()))
        figures[name] = shown
    some = results[arguments.models[0]]["found"][:5]
    for (source, target), found in zip(task.test, some, strict=False):
        print(f"  {source}\n    → {found}\n    = {target}")
    conclude(figures, arguments.record)
    draw(task, results, arguments.out / "translate.png")


if __name__ == "__main__":
    run(main)
