"""What the README shows is run, in order, as one program."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_the_python_in_the_readme_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves a model
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    small = '"gpt2-124m")', '"gpt2-124m")\nimport dataclasses\nconfig = dataclasses.replace('
    small = (small[0], small[1] + "config, vocab_size=97, num_layers=1, embed_dim=24)")
    exec("".join(blocks).replace(*small), {})
    assert capsys.readouterr().out
