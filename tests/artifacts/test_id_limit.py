"""A text with an id outside the vocabulary is rejected; JSON output never contains NaN."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import jaxformer
import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.files import json_text
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.artifacts.tokenizer_copies import bind, lowercased
from jaxformer.cli import main
from tests.errors import error_of
from tests.hub import foreign
from tests.properties import tiny
from tests.slow import mostly_slow


def with_word(kind):
    """Returns a tokenizer of either class with one more token than its model has ids."""
    backend = tokenizers.Tokenizer.from_str(foreign.tokenizer().to_json())
    backend.add_tokens(["tidewater"])
    size = foreign.tokenizer().vocab_size
    made = (
        ByteTokenizer(backend)
        if kind is ByteTokenizer
        else Subwords(backend, SpecialTokens((0,), 0))
    )
    return bind(made, size), size


@pytest.mark.parametrize("kind", [ByteTokenizer, Subwords])
@pytest.mark.parametrize("lower", [False, True])
def test_encoding_error_names_the_token_with_an_id_beyond_the_vocabulary(kind, lower):
    tokenizer, size = with_word(kind)
    tokenizer = lowercased(tokenizer) if lower else tokenizer
    assert max(tokenizer.encode("the tide came in")) < size
    assert max(tokenizer.encode("the tidewater")) == size
    for encode in (lambda text: tokenizer.encode_many(["the", text]), tokenizer.encode_source):
        said = error_of(encode, "the tidewater")
        assert "'tidewater'" in said and f"id {size};" in said


def test_tokenizer_with_special_id_beyond_vocabulary_is_rejected():
    backend = tokenizers.Tokenizer.from_str(foreign.tokenizer().to_json())
    backend.add_special_tokens(["<end>", "<mask>"])
    size = foreign.tokenizer().vocab_size
    assert "'<end>'" in error_of(bind, Subwords(backend, SpecialTokens((size,))), size)
    assert bind(Subwords(backend, SpecialTokens((0,))), size).mask_token is None


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A decoder, an encoder and an encoder-decoder whose tokenizers have one word more."""
    folder = tmp_path_factory.mktemp("beyond")
    foreign.write(folder / "theirs", "gpt2")
    content = json.loads((folder / "theirs" / "tokenizer.json").read_text())
    size = foreign.tokenizer().vocab_size
    word = {"id": size, "content": "tidewater", "special": False, "normalized": True}
    content["added_tokens"].append(word | dict.fromkeys(("lstrip", "rstrip", "single_word"), False))
    (folder / "theirs" / "tokenizer.json").write_text(json.dumps(content))
    backend = tokenizers.Tokenizer.from_str(foreign.tokenizer().to_json())
    backend.add_special_tokens(["<|mask|>"])
    backend.add_tokens(["tidewater"])
    sizes = {"vocab_size": size + 1, "max_length": 32, "embed_dim": 16, "num_heads": 2}
    for name, config in (
        ("encoder", jf.EncoderConfig(**sizes, num_layers=1)),
        ("pair", replace(jf.EncoderDecoderConfig(), **sizes, num_layers=1)),
    ):
        model = jf.build(config)
        variables = tiny.weights(model, 0)
        jf.save(folder / name, model, variables, ByteTokenizer(backend))
    for name, text in (("train", "a tidewater"), ("held", "the tide")):
        (folder / f"{name}.txt").write_text(f"{text} came in. \n" * 300)
    return folder


COMMANDS = [
    "evaluate theirs train.txt",
    "evaluate theirs train.txt --json",
    "generate theirs --prompt tidewater",
    "train train.txt --init-from theirs --out run --steps 1 --batch-size 1 --window-length 8",
    "fill-mask encoder --text tidewater[MASK]",
    "evaluate encoder train.txt",
    "generate pair --prompt tidewater",
    "evaluate pair --source train.txt --target held.txt",
    "evaluate pair --source held.txt --target train.txt",
]


@pytest.mark.parametrize("command", mostly_slow(COMMANDS, COMMANDS[1], COMMANDS[4]))
def test_every_command_rejects_text_with_token_id_above_vocab_size(
    command, folders, monkeypatch, capsys
):
    monkeypatch.chdir(folders)
    assert main(command.split()) == 2
    said = capsys.readouterr()
    assert "'tidewater'" in said.err and "vocab_size" in said.err
    assert len(said.err.splitlines()) == 1 and said.out.strip() in ("", "preparing the data …")


@pytest.mark.slow
def test_commands_fail_if_scores_are_nan(tmp_path, capsys):
    """With NaN in the weights, every command fails without printing NaN as JSON."""
    model, variables = foreign.write(tmp_path / "theirs", "gpt2")
    variables = jax.tree.map(lambda x: x * np.nan, variables)
    jf.save(tmp_path / "broken", model, variables, foreign.tokenizer())
    (tmp_path / "text.txt").write_text("the tide came in. " * 20)
    for more in ([], ["--json"]):
        assert main(["evaluate", str(tmp_path / "broken"), str(tmp_path / "text.txt"), *more]) == 1
        said = capsys.readouterr()
        assert "loss is nan" in said.err and "nan" not in said.out.lower()


numbers = st.floats() | st.integers() | st.none() | st.text(max_size=3)
contents = st.recursive(
    numbers,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=2), x, max_size=3),
    max_leaves=5,
)


@given(contents)
def test_json_writer_rejects_nan(content):
    def refuse(constant):
        raise AssertionError(constant)

    def finite(part):
        parts = part.values() if isinstance(part, dict) else part
        if isinstance(part, dict | list):
            return all(map(finite, parts))
        return not isinstance(part, float) or math.isfinite(part)

    if finite(content):
        assert json.loads(json_text(content), parse_constant=refuse) == content
    else:
        with pytest.raises(FloatingPointError, match="not finite"):
            json_text(content)


def test_json_is_written_only_by_the_files_module_and_the_chat_template_sandbox():
    package = Path(jaxformer.__file__).parent
    writers = [p for p in package.rglob("*.py") if re.search(r"json\.dumps?\(", p.read_text())]
    assert sorted(path.name for path in writers) == ["files.py", "sandbox.py"]
