"""Verbs that generate refuse options that are not implemented, and --ignore-generation-config."""

import jax
import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.cli import main
from jaxformer.hub.generation import without_options
from jaxformer.models.config.generation import Constraints
from jaxformer.models.parameters import init
from tests.cli.test_errors import files_below
from tests.slow import mostly_slow

PAIRS = "".join(f"{number}\tnumber {number}\n" for number in range(40))
UNSUPPORTED = jf.GenerationDefaults(
    do_sample=False,
    max_new_tokens=4,
    constraints=Constraints(repetition_penalty=1.5),
    unsupported=('stop_strings=["x"]', "top_h=0.5"),
)
FLAGS = ["--ignore-generation-config", "stop_strings", "--ignore-generation-config", "top_h"]
SHORT = "--steps 1 --warmup-steps 0 --evaluate-every 1 --validation-fraction 0.1 --batch-tokens 64"
SHORT = SHORT.split()
COMMANDS = {
    "generate": ["generate", "saved", "--prompt", "1"],
    "translate": ["translate", "saved", "lines.txt"],
    "evaluate": ["evaluate", "saved", "--source", "pairs.tsv"],
    "explain": ["explain", "saved", "1"],
    "train": ["train", "--init-from", "saved", "--source", "pairs.tsv", "--out", "run", *SHORT],
}


@pytest.fixture(autouse=True)
def saved(own_folder, tmp_path):
    """A folder of a model with options that are not implemented, and files of its language."""
    tokenizer = ByteTokenizer.train([PAIRS], 260)
    config = jf.RecurrentEncoderDecoderConfig(
        vocab_size=tokenizer.vocab_size, max_length=32, embed_dim=8, num_layers=1
    )
    model = jf.build(config)
    variables = {"params": init(model, jax.random.key(0))["params"]}
    jf.save("saved", model.clone(generation=UNSUPPORTED), variables, tokenizer)
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    (tmp_path / "lines.txt").write_text("1\n")


@pytest.mark.parametrize("verb", mostly_slow(COMMANDS, "generate", slow=COMMANDS))
def test_command_rejects_unsupported_generation_options_before_computing(verb, tmp_path, capsys):
    """The message names the options and the flags that leave them out. No file is written."""
    before = files_below(tmp_path)
    assert main(COMMANDS[verb]) == 2
    output = capsys.readouterr()
    assert 'stop_strings=["x"], top_h=0.5' in output.err and " ".join(FLAGS) in output.err
    assert output.out == "" and len(output.err.splitlines()) == 1
    assert files_below(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("verb", COMMANDS)
def test_command_runs_if_unsupported_generation_options_are_ignored(verb, capsys):
    """One flag for each option. The run of `train` stores the settings without them."""
    assert main([*COMMANDS[verb], *FLAGS[:2]]) == 2
    assert "top_h=0.5" in (message := capsys.readouterr().err) and "stop_strings" not in message
    assert main([*COMMANDS[verb], *FLAGS]) == 0
    if verb == "train":
        generation = jf.load("run").model.generation
        assert generation == without_options(UNSUPPORTED, ["stop_strings", "top_h"])
        assert main(["translate", "run", "lines.txt"]) == 0


def test_ignore_generation_config_flag_rejects_an_unknown_option(capsys):
    assert main([*COMMANDS["translate"], "--ignore-generation-config", "stop_string"]) == 2
    message = capsys.readouterr().err
    assert "'stop_string' is not an option of generation_config.json" in message
    assert "stop_strings, top_h" in message


def test_train_rejects_ignore_generation_config_flag_without_a_checkpoint(capsys):
    command = ["train", "--source", "pairs.tsv", "--model", "recurrent-encoder-decoder", *FLAGS]
    assert main(command) == 2
    assert "--ignore-generation-config stop_strings has no effect" in capsys.readouterr().err


def test_ignored_generation_options_are_reset_to_their_defaults():
    """Whether it is a constraint, another setting or not implemented."""
    names = ["repetition_penalty", "do_sample", "max_new_tokens", "top_h", "guidance_scale"]
    found = without_options(UNSUPPORTED, names)
    unsupported = UNSUPPORTED.unsupported[:1]
    assert found == jf.GenerationDefaults(do_sample=False, unsupported=unsupported)
