"""Tunes a run to add two numbers: first on examples, then by reinforcement learning (GRPO).

    python experiments/addition.py runs/stdlib --record addition-cpu --picture addition.png

The first stage is `jaxformer train records.jsonl --init-from RUN`. The second stage practises 256
of the questions. In each step, the model generates eight answers to each of 64 questions. A right
answer has the reward 1. The loss raises the probability of answers whose reward is above the mean
of their question. Half of the sums are held out from both stages.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from record import Parser, at_least, conclude, picture, run

import jaxformer as jf
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.cli import main as jaxformer
from jaxformer.functional import (
    clipped_policy_loss,
    group_advantages,
    masked_mean,
    token_log_probs,
)
from jaxformer.runtime import tune_cpu_runtime

LARGEST, HELD_OUT, SCORED, PRACTISED = 99, 0.5, 500, 256
QUESTIONS, ANSWERS, NEW, RATE, WARMUP = 64, 8, 8, 1e-4, 10
SEED = 0


class Sum(NamedTuple):
    """A question with its answer."""

    question: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


def make_sum(a: int, b: int) -> Sum:
    """Returns a sum with spaces between digits, as the tokenizer merges only some digit pairs."""
    first, second, total = (" ".join(str(number)) for number in (a, b, a + b))
    return Sum(f"What is {first} + {second} ?", total)


def make_sums() -> tuple[list[Sum], list[Sum]]:
    """Returns training sums and held-out sums in random order."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    order = np.random.default_rng(SEED).permutation(len(pairs))
    sums = [make_sum(*pairs[i]) for i in order]
    number = int(HELD_OUT * len(sums))
    return sums[number:], sums[:number]


def prompts_of(tokenizer: Tokenizer, sums: list[Sum]) -> list[list[int]]:
    apply = tokenizer.apply_chat_template
    return [apply(x.messages, add_generation_prompt=True).ids for x in sums]


def read_answers(tokenizer: Tokenizer, out: jf.Generation) -> list[str]:
    pairs = zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)
    return [tokenizer.decode(ids[:length]).strip() for ids, length in pairs]


def accuracy(model, params, tokenizer: Tokenizer, sums: list[Sum]) -> float:
    """Returns the fraction of sums whose most probable answer is right."""
    out = jf.generate(
        model,
        {"params": params},
        prompts_of(tokenizer, sums),
        max_new_tokens=NEW,
        sampler=jf.Sampler(0.0),
        stop_tokens=tokenizer.turn_end_tokens,
    )
    answers = read_answers(tokenizer, out)
    return float(np.mean([a == x.answer for a, x in zip(answers, sums, strict=True)]))


def read_scores(folder: Path) -> list[dict]:
    """Returns the metrics of a run's steps that have a held-out loss."""
    return [x for x in RunFolder(folder).read_metrics() if "held_out_loss" in x]


def tune(base: Path, sums: list[Sum], folder: Path, steps: int) -> list[dict]:
    """Tunes the run on examples; returns its metrics with a held-out loss."""
    records = folder / "sums.jsonl"
    lines = ({"messages": [*x.messages, {"role": "assistant", "content": x.answer}]} for x in sums)
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = f"--steps {steps} --evaluate-every {max(steps // 8, 1)} --learning-rate 2e-3"
    words += " --batch-size 16 --evaluation-records 400"
    command = ["train", records, "--init-from", base, "--out", folder / "tuned", *words.split()]
    assert jaxformer(list(map(str, command))) == 0
    return read_scores(folder / "tuned")


class Attempts(NamedTuple):
    """Answers that the model generated, with their prompts.

    Attributes:
        tokens: int [answers, length], prompt and answer, padded with 0 on the right.
        mask: bool [answers, length - 1], True where the target belongs to the answer.
        rewards: float [questions, answers per question], 1 for a right answer.
    """

    tokens: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray


def attempt(model, params, tokenizer: Tokenizer, sums: list[Sum], key) -> Attempts:
    """Answers each question ANSWERS times."""
    prompts = [ids for ids in prompts_of(tokenizer, sums) for _ in range(ANSWERS)]
    out = jf.generate(
        model,
        {"params": params},
        prompts,
        max_new_tokens=NEW,
        sampler=jf.Sampler(1.0),
        key=key,
        stop_tokens=tokenizer.turn_end_tokens,
        batch_size=len(prompts),
    )
    width = 8 * -(-(max(map(len, prompts)) + NEW) // 8)
    tokens = np.zeros((len(prompts), width), np.int32)
    mask = np.zeros((len(prompts), width - 1), bool)
    for i, (prompt, length) in enumerate(zip(prompts, out.lengths.tolist(), strict=True)):
        tokens[i, : len(prompt)] = prompt
        tokens[i, len(prompt) : len(prompt) + length] = out.tokens[i, :length]
        mask[i, len(prompt) - 1 : len(prompt) + length - 1] = True
    wanted = [x.answer for x in sums for _ in range(ANSWERS)]
    answers = read_answers(tokenizer, out)
    rewards = np.array([a == b for a, b in zip(answers, wanted, strict=True)], np.float32)
    return Attempts(tokens, mask, rewards.reshape(len(sums), ANSWERS))


def make_update(model, optimizer):
    """Returns a compiled GRPO update.

    Each batch of answers is used for only one update. The ratio of new to old probabilities is
    therefore 1, and only the gradient of the ratio matters.
    """

    @jax.jit
    def update(params, state, attempts):
        advantages = group_advantages(attempts.rewards).reshape(-1)

        def loss(params):
            logits = model.apply({"params": params}, attempts.tokens[:, :-1])
            log_probs = token_log_probs(logits, attempts.tokens[:, 1:])
            old = jax.lax.stop_gradient(log_probs)
            return masked_mean(clipped_policy_loss(log_probs, old, advantages), attempts.mask)

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    return update


def improve(model, params, tokenizer: Tokenizer, sums, held_out, steps: int) -> list[dict]:
    """Tunes by rewards; returns the accuracy on practised and held-out sums during the training."""
    # Warm-up is needed, because Adam's first updates are large even for small gradients.
    rate = optax.warmup_constant_schedule(0.0, RATE, WARMUP)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    update = make_update(model, optimizer)
    state, random = optimizer.init(params), np.random.default_rng(SEED)
    curve, begin = [], time.perf_counter()
    for step in range(steps + 1):
        if step % max(steps // 10, 1) == 0:
            practised, unseen = (accuracy(model, params, tokenizer, x) for x in (sums, held_out))
            seconds = time.perf_counter() - begin
            line = {"step": step, "practised": practised, "held out": unseen, "seconds": seconds}
            curve.append(line)
            print(curve[-1], flush=True)
        chosen = [sums[i] for i in random.choice(len(sums), QUESTIONS, replace=False)]
        attempts = attempt(model, params, tokenizer, chosen, jax.random.key(step))
        params, state = update(params, state, attempts)
    return curve


def draw(figures: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [x["step"] for x in figures["tuning"]]
    left.plot(steps, [x["held_out_loss"] for x in figures["tuning"]], "o-")
    left.set(xlabel="steps", ylabel="nats per token of the answer")
    left.set_title("tuning on examples: loss of held-out answers")
    curve = figures["grpo"]
    for sums in ("practised", "held out"):
        right.plot([x["step"] for x in curve], [100 * x[sums] for x in curve], "o-", label=sums)
    right.axhline(100 * figures["accuracy of the base"], color="gray", ls=":", label="base run")
    right.set(xlabel="steps", ylabel="right answers (%)", ylim=(-3, 103))
    right.set_title("practice by GRPO")
    right.legend(loc="upper left")
    for axes in (left, right):
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=110)


def main():
    parser = Parser(__doc__)
    parser.add_argument("base", type=Path, help="run to tune, such as runs/stdlib")
    parser.add_argument("--steps", type=at_least(1), default=600, help="steps on examples")
    parser.add_argument("--grpo-steps", type=at_least(1), default=100, help="steps of GRPO")
    parser.add_argument("--picture", type=picture, default="addition.png")
    arguments = parser.parse_args()
    tune_cpu_runtime()
    sums, held_out = make_sums()
    scored = held_out[:SCORED]
    with tempfile.TemporaryDirectory() as temporary:
        folder, begin = Path(temporary), time.perf_counter()
        metrics = tune(arguments.base, sums, folder, arguments.steps)
        seconds = time.perf_counter() - begin
        tuned = jf.load(folder / "tuned")
    base = jf.load(arguments.base)
    before = accuracy(tuned.model, base.variables["params"], tuned.tokenizer, scored)
    begin = time.perf_counter()
    curve = improve(
        tuned.model,
        tuned.variables["params"],
        tuned.tokenizer,
        sums[:PRACTISED],
        scored,
        arguments.grpo_steps,
    )
    figures = {
        "base": read_scores(arguments.base)[-1],
        "accuracy of the base": before,
        "tuning": metrics,
        "seconds of tuning": seconds,
        "grpo": curve,
        "seconds of grpo": time.perf_counter() - begin,
    }
    draw(figures, arguments.picture)
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
