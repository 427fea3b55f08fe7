"""Every preset exports to a class of transformers, if there is one for its kind."""

import pytest

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.hub.export import counterpart
from jaxformer.hub.families import FAMILIES
from jaxformer.models.config import PRESETS
from jaxformer.training.presets import RUNS

PROMPT = "def read(self"
MODELS = {f"{name}-{kind}": run.model for name, runs in RUNS.items() for kind, run in runs.items()}
WITH_CLASS = {family.config for family in FAMILIES.values()}
EXPORTED = {name: config for name, config in MODELS.items() if type(config) in WITH_CLASS}
EXPORTED |= PRESETS


@pytest.mark.parametrize("name", EXPORTED)
def test_every_preset_can_be_exported(name):
    family, config, options = counterpart(EXPORTED[name].resolved, FAMILIES.values())
    assert type(config) is family.config
    is_bare = not family.architectures[options["architectures"][0]].get("head_bias", True)
    assert not is_bare, "this class computes no logits"


def default_run(folder):
    """Trains two steps with the default settings and exports to `folder`/out and out.gguf.

    Returns:
        The checkpoint, a prompt and its greedy continuation.
    """
    text = folder / "text.py"
    text.write_text(
        "".join(f"def f{n}(self, x):\n    return x * {n} + {n % 7}\n" for n in range(999))
    )
    short = "--steps 2 --evaluate-every 2 --sample-tokens 0 --evaluation-windows 2"
    run = str(folder / "run")
    assert main(["train", str(text), "--out", run, *short.split()]) == 0
    assert main(["export", run, str(folder / "out")]) == 0
    assert main(["export", run, str(folder / "out.gguf"), "--format", "gguf"]) == 0
    checkpoint = jf.load(run)
    prompt = [*checkpoint.tokenizer.opening, *checkpoint.tokenizer.encode(PROMPT)]
    greedy = {"max_new_tokens": 40, "sampler": jf.Sampler(temperature=0.0)}
    out = jf.generate(checkpoint.model, checkpoint.variables, [prompt], **greedy)
    return checkpoint, prompt, out.tokens[0]
