"""Translation: Transformer, LSTM with attention and LSTM without, for equal time.

    python experiments/translate.py                        # dates and amounts, English to French
    python experiments/translate.py --source train.en.gz --target train.de.gz \\
        --test-source test.en.gz --test-target test.de.gz --lowercase --minutes 60

Without files it learns phrases that Babel writes from the Unicode CLDR (`phrases.py`): real
language, exactly right or not, and as long as one likes. A run that was ended goes on when the same
command is given again. Needs `pip install -e ".[experiments]"`.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
from record import Parser, at_least, conclude, require, run

import jaxformer as jf
from jaxformer.artifacts.tokenizer import NUM_BYTES, Tokenizer
from jaxformer.cli.runtime import start_jax
from jaxformer.training.pairs import read_pairs

MODELS = ("transformer", "attention-lstm", "lstm")
LABELS = {"transformer": "Transformer", "attention-lstm": "LSTM, attention", "lstm": "LSTM"}


@dataclass(frozen=True)
class Task:
    """What is learnt and what is asked: texts side by side; groups: for the picture by length."""

    name: str
    train: list
    test: list
    vocab_size: int
    tokens: int  # places a batch, on each side
    groups: list[int] | None = None


def phrase_task(seed: int) -> Task:
    """Phrases for training and others, never seen singly either, to be asked."""
    require("babel")
    from phrases import phrases, strung

    train, held_out = phrases(40_000, seed)
    test = strung(held_out, 1200, seed + 2, mostly_short=False)
    groups = [count for *_, count in test]
    train = [pair[:2] for pair in strung(train, 40_000, seed + 1, mostly_short=True)]
    return Task("phrases", train, [pair[:2] for pair in test], 512, 1024, groups)


def text_task(arguments) -> Task:
    """The files given; without a test pair, every fiftieth line is held out for it."""
    pairs = read_pairs(arguments.source, arguments.target)
    if not arguments.test_source and len(pairs) < 2:
        raise ValueError(f"{arguments.source} has one line; without --test-source it needs two")
    if arguments.test_source:
        test = read_pairs(arguments.test_source, arguments.test_target)
    else:
        test, pairs = pairs[::50], [pair for i, pair in enumerate(pairs) if i % 50]
    if arguments.lowercase:
        pairs, test = ([tuple(map(str.lower, pair)) for pair in side] for side in (pairs, test))
    require("sacrebleu")
    name = f"{arguments.source.name} to {arguments.target.name}"
    return Task(name, pairs, test, arguments.vocab_size or 5000, 2048)


def config_of(name: str, vocab_size: int, max_length: int, text: bool):
    """Two to three million parameters for text, half a million for phrases."""
    common = {"vocab_size": vocab_size, "max_length": max_length, "dropout": 0.2 if text else 0.0}
    if name == "transformer":
        return jf.EncoderDecoderConfig(
            **common,
            num_layers=4 if text else 2,
            embed_dim=128 if text else 96,
            num_heads=4,
            mlp_dim=256,
            activation="relu",
            positions="rotary",
        )
    return jf.RecurrentEncoderDecoderConfig(
        **common,
        attends=name == "attention-lstm",
        num_layers=2 if text else 1,
        embed_dim=192 if text else 128,
    )


# (optimizer, its highest learning rate): of a model this small Muon's step costs more than Adam's,
# and makes up for it where what is learnt is a rule; an LSTM gained nothing by it.
RECIPES = {
    "text": dict.fromkeys(MODELS, ("adamw", 3e-3)),
    "phrases": dict.fromkeys(MODELS, ("adamw", 5e-3)) | {"transformer": ("muon", 4e-3)},
}


def prepare(task: Task, folder: Path):
    """(tokenizer, pairs of ids, longest side): the tokenizer learnt from both languages."""
    path = folder / "tokenizer.json"
    if not path.exists():
        sides = (side for pair in task.train[:30_000] for side in pair)
        Tokenizer.train(sides, task.vocab_size, split_digits=True).save(path)
    tokenizer = Tokenizer.load(path)
    sides = [tokenizer.encode_many(side) for side in zip(*task.train, strict=True)]
    pairs = list(zip(*sides, strict=True))
    asked = tokenizer.encode_many(source for source, _ in task.test)
    longest = max(max(len(row) for row in side) for side in (*sides, asked))
    return tokenizer, pairs, longest


def learn(name, task, tokenizer, pairs, longest, arguments) -> dict:
    """Train one model and score it; returns its figures, and its answers under "found"."""
    from translation import Trainer, same_run, translate

    text = task.groups is None
    config = config_of(name, tokenizer.vocab_size, -(-longest * 2 // 64) * 64, text)
    model = jf.build(config, jf.Execution(layers="unrolled"))
    folder, smoothing = arguments.out / name, 0.1 if text else 0.0
    optimizer, peak = RECIPES["text" if text else "phrases"][name]
    recipe = {"optimizer": optimizer, "peak": peak, "smoothing": smoothing}
    same_run(folder, {"config": asdict(config), **recipe})
    trainer = Trainer(
        model,
        pairs,
        folder,
        **recipe,
        seconds=60 * arguments.minutes,
        tokens=task.tokens,
        end_of_text=tokenizer.end_of_text,
        seed=arguments.seed,
        num_buckets=6 if text else 4,
    )
    trainer.run(LABELS[name])
    sources, targets = zip(*task.test, strict=True)
    width = (arguments.beam_width or 5) if text else 1
    found = translate(model, trainer.state.params, tokenizer, sources, beam_width=width)
    lines = "\n".join(map("\t".join, zip(sources, targets, found, strict=True)))
    (folder / "translations.tsv").write_text(lines + "\n")
    return {
        "parameters": jf.parameter_count(config),
        "steps": int(trainer.state.step),
        "epochs": trainer.batches.epoch,
        "seconds": round(trainer.elapsed, 1),
        "tokens_per_second": round(trainer.tokens_read / trainer.elapsed),
        **score(targets, found, task.groups),
        "found": found,
        "history": trainer.history,
    }


def score(targets, found, groups: list[int] | None) -> dict:
    """BLEU with its signature for text; for phrases what share of texts is exactly right, in all
    and of so many phrases each."""
    if groups is not None:
        right = np.array([a == b for a, b in zip(targets, found, strict=True)])
        shares = {n: float(right[np.array(groups) == n].mean()) for n in sorted(set(groups))}
        return {"exact": float(right.mean()), "exact_by_phrases": shares}
    from sacrebleu.metrics import BLEU

    metric = BLEU(lowercase=True)
    bleu = metric.corpus_score(found, [targets])
    return {"bleu": round(bleu.score, 2), "signature": str(metric.get_signature())}


def draw(task: Task, results: dict, path: Path) -> None:
    """For phrases, what share is right by how many were strung together; for text, the losses."""
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
        right.bar([LABELS[name] for name in names], [results[name]["bleu"] for name in names])
        right.set(ylabel="BLEU", title="held-out text")
    for axes in (left, right):
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=120)


def check(arguments) -> None:
    """Refuse what makes no sense before anything is made."""
    for one, other in (("source", "target"), ("test_source", "test_target")):
        if bool(getattr(arguments, one)) != bool(getattr(arguments, other)):
            raise ValueError(f"--{one} and --{other} belong together".replace("_", "-"))
    if not 0 < arguments.minutes < float("inf"):
        raise ValueError(f"--minutes is {arguments.minutes}; it must be above 0, and finite")
    for name in ("test_source", "vocab_size", "lowercase", "beam_width"):
        if getattr(arguments, name) and not arguments.source:
            raise ValueError(f"--{name} needs --source".replace("_", "-"))


def main():
    parser = Parser(__doc__)
    for name in ("--source", "--target", "--test-source", "--test-target"):
        parser.add_argument(name, type=Path, help="a text, plain or .gz, a sentence a line")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--minutes", type=float, default=4.2, help="of training, for each model")
    parser.add_argument("--vocab-size", type=at_least(NUM_BYTES + 1), help="for text; else 5000")
    parser.add_argument("--lowercase", action="store_true", help="all text, on both sides")
    parser.add_argument("--beam-width", type=at_least(1), help="for text; else 5")
    parser.add_argument("--out", type=Path, default=Path("runs/translate"))
    parser.add_argument("--seed", type=at_least(0), default=0)
    arguments = parser.parse_args()
    check(arguments)
    task = text_task(arguments) if arguments.source else phrase_task(arguments.seed)
    start_jax()  # what is compiled is kept: going on does not compile again
    from translation import fingerprint, same_run

    settings = {name: getattr(arguments, name) for name in ("minutes", "seed")}
    settings |= {"text": fingerprint(task.train, task.test), "vocab_size": task.vocab_size}
    same_run(arguments.out, {"task": task.name, **settings, "tokens": task.tokens})
    data = prepare(task, arguments.out)
    results = {name: learn(name, task, *data, arguments) for name in arguments.models}
    figures = {"task": task.name, "pairs": len(task.train), "asked": len(task.test)}
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
