"""Every option of every verb acts or is refused: one table says in which modes.

`test_option_effects_are_tested_for_every_option_of_each_command` fails if an option has no row.
A row in `ACTS` states that the option acts in every mode of its verb. A row in `SOMETIMES` gives
command lines with which the option acts, and command lines with which it is refused because it
would have no effect.
"""

import keyword
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxformer.cli import VERBS, evaluate, explain, main, train
from jaxformer.cli.arguments import parse
from jaxformer.cli.flags import list_flags
from jaxformer.cli.train_arguments import TrainArguments
from jaxformer.models.config import KINDS, DecoderConfig
from jaxformer.training.presets import training_preset, usual_preset

SAMPLING = """
    --mesh --trust-code --max-new-tokens --temperature --parse-special --ignore-generation-config
    --repetition-penalty --frequency-penalty --presence-penalty --no-repeat-ngram-size
    --min-new-tokens --stop --json-schema
"""
ACTS = {
    "train": """
        --vocab-size --max-length --num-layers --embed-dim --num-heads --num-kv-heads --head-dim
        --mlp-dim --num-experts --output-activation --norm --parallel-block --residual
        --attention-scale --attention-softcap --attention-sinks --attention-gate
        --output-scale --logits-softcap
        --query-key-value-bias --attention-output-bias --feedforward-bias --head-bias
        --tie-embeddings --scale-embeddings --dropout --dtype --remat
        --layer-types --optimizer --schedule --learning-rate --warmup-steps --final-fraction
        --weight-decay --clip-norm --ema-decay --lora-rank
        --mesh --steps --max-minutes --gradient-accumulation-steps --validation-fraction
        --label-smoothing --seed --evaluate-every --checkpoint-every --max-to-keep --keep-period
        --non-finite --trackers --profile --batch-size --window-length --packing
        --evaluation-windows --sample-tokens --source --init-from --model --out --resume
        --coordinator --num-token-types --transform --pooler --mask-rate --source-vocab-size
        --max-source-length --share-embeddings --num-encoder-layers --num-encoder-heads
        --encoder-mlp-dim --batch-tokens --lengths --lowercase --evaluation-pairs --bleu-tokenize
        --cell --hidden-dim --kernel-size --attends --parse-special
    """,
    "generate": f"{SAMPLING} --truncate-prompt --prompts",
    "chat": f"{SAMPLING} --system",
    "translate": """
        --mesh --trust-code --beam-width --batch-size --parse-special --ignore-generation-config
    """,
    "fill-mask": "--mesh --trust-code --top-k --json --parse-special",
    "evaluate": "--mesh --trust-code --source --json --parse-special",
    "sweep": "--vary --list --out --together --score-all --json",
    "compare": "-o --json",
    "explain": "--mesh --trust-code -o --target --compare --parse-special",
    "import": "",
    "export": "--format --model-type",
    "doctor": "--preset --json",
    "bench": "-o --dtype --seconds --quick --json",
    "verify": "--mesh --trust-code --length --batch-size --dtype --seed --json",
    "plot-attention": "--mesh --trust-code -o --layer --head --attention --parse-special",
}
PAIRS = "--model encoder-decoder --source pairs.tsv"
LEARNED, ROTARY = "--preset shakespeare", "--preset stdlib"
RELATIVE = "--positions relative"
ALL_BIASES = "--query-key-value-bias True --attention-output-bias True --feedforward-bias True"
TINY = "--preset tiny"
SAMPLED = {
    "--top-k 3": (["", "--temperature 0.5"], ["--temperature 0"]),
    "--top-p 0.5": ([""], ["--temperature 0"]),
    "--min-p 0.5": ([""], ["--temperature 0"]),
    "--seed 1": ([""], ["--temperature 0"]),
    "--regex a": ([""], ["--json-schema s.json"]),
    "--grammar g.lark": ([""], ["--json-schema s.json", "--regex a"]),
}
SOMETIMES = {
    "train": {
        "--norm-position post": (["", "--norm layer"], ["--norm none"]),
        "--norm-epsilon 1e-6": (
            ["", "--model convolutional"],
            ["--norm none", "--model convolutional --norm none"],
        ),
        "--embedding-norm": ([""], ["--norm none"]),
        "--query-key-norm head": ([""], ["--norm none"]),
        "--no-first-attention-norm": (
            ["", "--norm-position sandwich"],
            ["--norm none", "--norm-position post", "--norm-position post_sublayer"],
        ),
        "--experts-per-token 1": (["--num-experts 4"], [""]),
        "--expert-dim 8": (["--num-experts 4"], [""]),
        "--normalize-router False": (["--num-experts 4"], [""]),
        "--router-bias": (["--num-experts 4"], [""]),
        "--shared-expert-dim 8": (["--num-experts 4", "--num-experts 0 4"], [""]),
        "--shared-expert-gate": (["--num-experts 4 --shared-expert-dim 8"], ["--num-experts 4"]),
        "--convolution-kernel-size 4": (
            ["--layer-types short_convolution attention", "--layer-types gated_delta"],
            [""],
        ),
        "--delta-key-heads 1": (["--layer-types gated_delta attention"], [""]),
        "--delta-value-heads 8": (["--layer-types gated_delta"], ["--layer-types attention"]),
        "--delta-key-dim 8": (["--layer-types gated_delta"], [""]),
        "--delta-value-dim 8": (["--layer-types gated_delta"], [""]),
        "--convolution-bias": (["--layer-types short_convolution"], [""]),
        "--norm-bias False": (["--norm layer"], ["--norm rms", ""]),
        "--no-use-bias": (
            ["", f"{LEARNED} {ALL_BIASES}", "--query-key-value-bias True"],
            [ALL_BIASES, f"--norm layer {ALL_BIASES} --norm-bias True"],
        ),
        "--position-offset 2": ([LEARNED], [ROTARY, RELATIVE, "--positions none"]),
        "--relative-buckets 16": ([RELATIVE], [ROTARY, LEARNED]),
        "--relative-distance 64": ([RELATIVE], [ROTARY, LEARNED]),
        "--rotary-base 500": (["", f"{LEARNED} --positions rotary"], [LEARNED, RELATIVE]),
        "--rotary-scaling linear,factor=2": ([""], [LEARNED, "--positions alibi"]),
        "--rotary-fraction 0.5": ([""], [LEARNED, "--positions sinusoidal"]),
        "--rotary-interleaved": ([""], [LEARNED, PAIRS]),
        "--dilation-growth 3": (
            ["--model convolutional"],
            ["--model convolutional --num-layers 1", "--model convolutional --kernel-size 1"],
        ),
        "--attention-implementation explicit": (
            ["", PAIRS, f"{PAIRS} --model recurrent-encoder-decoder"],
            [
                "--model recurrent",
                "--model convolutional",
                f"{PAIRS} --model recurrent-encoder-decoder --no-attends",
            ],
        ),
        "--scan-layers scan": (["", "--model encoder", PAIRS, "--model recurrent"], []),
        "--decay-fraction 0.3": (["--schedule warmup-stable-decay"], ["", "--schedule linear"]),
        "--beta1 0.8": (["", "--optimizer muon"], ["--optimizer adafactor"]),
        "--beta2 0.8": (["", "--optimizer lion"], ["--optimizer adafactor"]),
        "--lora-alpha 8": (["--init-from base --lora-rank 2"], ["", "--init-from base"]),
        "--lora-target-modules query": (
            ["--init-from base --lora-rank 2"],
            ["", "--init-from base"],
        ),
        "--text-field body": (["text.jsonl", "text.parquet.gz", "hf:A/B", "."], ["", "text.txt"]),
        "--target target.txt": ([PAIRS], ["", "--model encoder-decoder"]),
        "--preset tiny": ([""], ["--resume"]),
        "--num-processes 2": (["--coordinator a:1 --process-id 0 --out x"], [""]),
        "--process-id 0": (["--coordinator a:1 --num-processes 2 --out x"], [""]),
        "--process-timeout 9": (["--coordinator auto --out x"], [""]),
        "--num-labels 2": ([], ["--model encoder"]),
        "--source-features 3": ([], [PAIRS]),
        "--ignore-generation-config top_k": (["--init-from base"], ["", "--model encoder"]),
        "--activation relu": (["", PAIRS], ["--own-activation jax.nn:relu"]),
        "--positions none": ([""], ["--own-positions m:f"]),
        "--window 8": ([""], ["--own-mask m:f"]),
        "--prefix 0": ([""], ["--own-mask m:f"]),
        "--own-activation jax.nn:silu": (
            ["", "--model encoder", "--model convolutional", PAIRS],
            ["--model recurrent"],
        ),
        "--own-positions tests.cli.test_every_option:two_waves": (
            ["", "--model encoder", PAIRS],
            ["--model recurrent", "--model convolutional"],
        ),
        "--own-mask operator:ge": (["", PAIRS], ["--model recurrent", "--model convolutional"]),
        "--trust-code": (["--init-from base"], [""]),
    },
    "generate": {
        **SAMPLED,
        "-o x.jsonl": (["--prompts p.jsonl"], [""]),
        "--num-samples 2": (["--prompts p.jsonl -o x.jsonl"], [""]),
        "--batch-size 2": (["--prompts p.jsonl -o x.jsonl"], [""]),
    },
    "chat": SAMPLED,
    "evaluate": {
        "--text-field body": (["a.jsonl", "b.txt ."], ["a.txt", "--source s.tsv"]),
        "--stride 3": (["a.txt"], ["--source s.tsv"]),
        "--batch-size 3": (["a.txt"], ["--source s.tsv"]),
        "--score-first-token": (["a.txt"], ["--source s.tsv"]),
        "--ignore-generation-config top_k": (["--source s.tsv"], ["a.txt"]),
        "--target t.txt": (["--source s.txt"], ["a.txt"]),
        "--beam-width 2": (["--source s.tsv"], ["a.txt"]),
        "--bleu-tokenize zh": (["--source s.tsv"], ["a.txt"]),
    },
    "explain": {"--ignore-generation-config top_k": ([""], ["--target x"])},
    "export": {
        "--dtype q8_0": (["--format gguf"], ["", "--adapter"]),
        "--dtype f32": (["--format gguf"], [""]),
        "--adapter": ([""], ["--format gguf"]),
    },
    "doctor": {
        "--model encoder": ([TINY], ["", "--json"]),
        "--target cpu:2": ([TINY, f"{TINY} --explain-attention"], [""]),
        "--mesh data=2": ([TINY, f"{TINY} --decode"], ["", f"{TINY} --explain-attention"]),
        "--batch-size 8": ([TINY, f"{TINY} --decode"], ["", f"{TINY} --explain-attention"]),
        "--length 8": ([TINY, f"{TINY} --explain-attention"], [""]),
        "--dtype bfloat16": ([TINY, f"{TINY} --decode"], [""]),
        "--dtype float32": ([TINY], [""]),
        "--attention-implementation blockwise": (
            [TINY, f"{TINY} --explain-attention", f"{TINY} --model encoder-decoder"],
            ["", f"{TINY} --model recurrent"],
        ),
        "--scan-layers scan": (
            [TINY, f"{TINY} --decode", f"{TINY} --model convolutional"],
            ["", f"{TINY} --explain-attention"],
        ),
        "--remat full": (
            [TINY, f"{TINY} --model recurrent"],
            ["", f"{TINY} --explain-attention", f"{TINY} --decode"],
        ),
        "--decode": ([TINY], ["", f"{TINY} --explain-attention"]),
        "--explain-attention": ([TINY], ["", f"{TINY} --decode"]),
    },
}
POSITIONAL = dict.fromkeys(("generate", "chat", "translate", "verify", "evaluate"), "run")
POSITIONAL |= {
    "export": "run out",
    "explain": "run text",
    "fill-mask": "run text",
    "plot-attention": "run text",
}


def two_waves(positions, dim):
    """Position vectors as a user could define them."""
    return jnp.sin(positions[:, None] / jnp.arange(1, dim + 1))


def arguments_of(verb):
    """Returns the dataclass of a verb's arguments."""
    module = import_module(f"jaxformer.cli.{verb.replace('-', '_')}{'_' * keyword.iskeyword(verb)}")
    return getattr(module, f"{verb.title().replace('-', '')}Arguments")


def options_of(verb):
    """Returns the first spelling of each option of a verb."""
    if verb != "train":
        return {flag.name for flag in list_flags(arguments_of(verb)) if not flag.is_positional}
    options = set()
    for kind in KINDS:
        preset = usual_preset(kind)
        default = TrainArguments(training_preset(preset, kind), kind=kind, preset=preset)
        flags = list_flags(TrainArguments, default)
        options |= {flag.name for flag in flags if not flag.is_positional}
    return options


def option_in(row):
    """Returns the option of a row of `SOMETIMES`, without `no-`."""
    return row.split()[0].replace("--no-", "--")


@pytest.mark.parametrize("verb", VERBS)
def test_option_effects_are_tested_for_every_option_of_each_command(verb):
    always, sometimes = set(ACTS[verb].split()), set(map(option_in, SOMETIMES.get(verb, ())))
    assert always | sometimes == options_of(verb)
    assert not always & sometimes


ROWS = [(verb, row) for verb, rows in SOMETIMES.items() for row in rows]


@pytest.fixture
def parsed(monkeypatch, tmp_path):
    """Returns a function that parses the command line of a verb and computes nothing."""
    monkeypatch.setattr(train, "train_run", lambda *_, **__: 0)
    opened = training_preset("tiny", "decoder")
    values = {"training": opened, "kind": "decoder", "accept": staticmethod(lambda config: None)}
    values["ignoring"] = staticmethod(lambda names: None)
    monkeypatch.setattr(train, "open_base", lambda *_: type("Base", (), values))

    def run(verb, words):
        if verb == "train":
            return main([verb, *words.split()])
        return parse(arguments_of(verb), verb, [*POSITIONAL.get(verb, "").split(), *words.split()])

    return run


@pytest.mark.parametrize(("verb", "row"), ROWS)
def test_commands_accept_options_that_have_an_effect(verb, row, parsed):
    for words in SOMETIMES[verb][row][0]:
        assert parsed(verb, f"{words} {row}") != 2, words


@pytest.mark.parametrize(("verb", "row"), ROWS)
def test_commands_reject_options_that_have_no_effect(verb, row, parsed, capsys):
    """The line names the option and what would make it act."""
    option = row.split()[0]
    for words in SOMETIMES[verb][row][1]:
        assert main([verb, *POSITIONAL.get(verb, "").split(), *words.split(), *row.split()]) == 2
        said = capsys.readouterr().err
        names = (option.replace("--no-", "--"), option.lstrip("-").replace("-", "_"))
        assert said.count("\n") == 1 and any(name in said for name in names), said
        assert "effect" in said or "must" in said or "needs" in said, said


def test_evaluate_refuses_next_token_options_for_an_encoder():
    """The kind of the model is known only after it is loaded."""
    for option in ({"stride": 2}, {"score_first_token": True}):
        arguments = evaluate.EvaluateArguments(run="x", **option)
        with pytest.raises(ValueError, match=r"has no effect here.*predicts masked tokens"):
            evaluate._hidden((None, None, None, arguments, None), [])


def test_explain_refuses_translation_options_for_a_decoder(monkeypatch):
    model = SimpleNamespace(config=DecoderConfig())
    monkeypatch.setattr(explain, "load_model", lambda _: nullcontext((model, {}, object())))
    with pytest.raises(ValueError, match=r"has no effect here.*model that translates"):
        explain.main(["x", "a text", "--ignore-generation-config", "top_k"])


def test_train_accepts_flags_that_disable_fields_of_the_preset(parsed):
    """Only flags are refused: the presets set rotary, norm and window fields."""
    words = "--positions learned", "--norm none", "--optimizer adafactor", "--schedule linear"
    assert parsed("train", " ".join(words)) == 0
    assert parsed("train", "--model convolutional --num-layers 1 --norm none") == 0
