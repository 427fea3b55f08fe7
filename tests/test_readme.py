"""The README: its Python runs, and its links and files exist."""

import ast
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.functional import explicit_attention

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_python_code_in_the_readme_runs(tmp_path, capsys):
    """A folder with a small GPT-2 in the format of the hub takes the place of the hub id."""
    tokenizer = ByteTokenizer.train(["The tide came in"] * 9, 300)
    config = jf.DecoderConfig(
        vocab_size=tokenizer.vocab_size, max_length=64, num_layers=1, embed_dim=24, num_heads=2
    )
    model = jf.Decoder(config)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 1), int))
    jf.export(tmp_path / "gpt2", model, variables, tokenizer)
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert block.count('"openai-community/gpt2"') == 1
    names = {}
    exec(block.replace('"openai-community/gpt2"', repr(str(tmp_path / "gpt2"))), names)
    assert names["out"].tokens.shape == (1, 20)
    assert capsys.readouterr().out.strip()


def test_attention_code_in_readme_equals_the_source():
    (block,) = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    code = ast.parse(inspect.getsource(explicit_attention))
    del code.body[0].body[0]  # the docstring
    assert ast.dump(ast.parse(block)) == ast.dump(code)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "experiments/README.md"])
def test_relative_links_in_readme_lead_to_files(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert (folder / link).exists(), link


def test_experiments_readme_lists_every_script():
    helpers = {"alone.py", "record.py", "side_by_side.py", "windows.py"}
    listed = set(re.findall(r"`(\w+\.py)`", (ROOT / "experiments" / "README.md").read_text()))
    scripts = {path.name for path in (ROOT / "experiments").glob("*.py")}
    assert listed == scripts - helpers
