"""The README: its Python runs, and its links and files exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_the_python_in_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    small = (
        "import dataclasses\nmodel = jf.Decoder(dataclasses.replace(model.config, vocab_size=97, "
        "num_layers=1, embed_dim=24))\ntokens ="
    )
    names = {}
    exec("".join(blocks).replace("tokens =", small, 1), names)
    assert names["logits"].shape == (1, 16, 97) and names["logits"].dtype == "float32"
    assert names["out"].tokens.shape == (1, 8)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "experiments/README.md"])
def test_links_lead_to_files(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert (folder / link).exists(), link


def test_every_experiment_is_listed():
    helpers = {"alone.py", "record.py", "side_by_side.py", "windows.py"}
    listed = set(re.findall(r"`(\w+\.py)`", (ROOT / "experiments" / "README.md").read_text()))
    scripts = {path.name for path in (ROOT / "experiments").glob("*.py")}
    assert listed == scripts - helpers
