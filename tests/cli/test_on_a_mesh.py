"""Every verb that uses a model prints the same on eight simulated devices as on one."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.cli import main
from jaxformer.models.parameters import init
from tests.cli.conftest import TEXT

pytestmark = pytest.mark.slow

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "16"}
EIGHT["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
SIZES = {"vocab_size": 280, "max_length": 32, "embed_dim": 32, "num_layers": 2, "num_heads": 4}
ONE_LAYER = SIZES | {"num_layers": 1}  # certificates compile many programs
CONFIGS = {
    "decoder": jf.DecoderConfig(**SIZES),
    "encoder": jf.EncoderConfig(**SIZES),
    "pairs": jf.EncoderDecoderConfig(**SIZES),
    "small-decoder": jf.DecoderConfig(**ONE_LAYER),
    "small-encoder": jf.EncoderConfig(**ONE_LAYER),
}
VERBS = {
    "generate": ("generate decoder def --temperature 0 --max-new-tokens 9", "fsdp=8"),
    "a source": ("generate pairs --prompt def --temperature 0 --max-new-tokens 9", "tensor=8"),
    "translate": ("translate pairs --beam-width 3", "data=2,fsdp=2,tensor=2"),
    "fill-mask": ("fill-mask encoder de[MASK]f --json", "fsdp=2,tensor=4"),
    "text": ("evaluate decoder text.py --json", "data=2,fsdp=2,tensor=2"),
    "masked tokens": ("evaluate encoder text.py --json", "data=8"),
    "pairs": ("evaluate pairs --source pairs.tsv --json", "fsdp=4,tensor=2"),
}
CERTIFIED = (
    "verify small-decoder --length 16 --mesh fsdp=2,tensor=4",
    "verify small-encoder --length 16 --mesh tensor=4,data=2",
)
SCRIPT = """
import contextlib, io, json, sys
from jaxformer.cli import main
found = []
for words in json.load(open("verbs.json")):
    said = io.StringIO()
    sys.stdin = open("lines.txt")
    with contextlib.redirect_stdout(said):
        found.append((main(words), said.getvalue()))
print(json.dumps(found))
"""


@pytest.fixture
def folders(tmp_path):
    """Untrained models whose weights are large enough to give distinct outputs."""
    tokenizer = ByteTokenizer.train([TEXT], SIZES["vocab_size"], mask=True)
    for name, config in CONFIGS.items():
        model = jf.build(config)
        variables = jax.tree.map(lambda x: 4 * x, init(model, jax.random.key(0)))
        jf.save(tmp_path / name, model, variables, tokenizer)
    (tmp_path / "text.py").write_text(TEXT[:600])
    (tmp_path / "lines.txt").write_text("return\nx * 1\ndef f\n")
    (tmp_path / "pairs.tsv").write_text("return\tx\nx * 1\ty\n")


def on_eight(folder, commands):
    """Returns (exit status, output) of each command."""
    (folder / "verbs.json").write_text(json.dumps(commands))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=folder,
        env={**os.environ, **EIGHT},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_commands_print_equal_output_on_a_mesh_and_on_one_device(folders, tmp_path):
    """The words are the same as on one device; figures agree up to float32 rounding."""
    figure = r"\d+\.\d+(?:e-\d+)?"
    commands = [
        [*words.split(), *where]
        for words, mesh in VERBS.values()
        for where in ([], ["--mesh", mesh])
    ]
    said = on_eight(tmp_path, commands)
    for name, (status, one), (status_there, there) in zip(
        VERBS, said[::2], said[1::2], strict=True
    ):
        assert status == status_there == 0, name
        assert re.sub(figure, "#", one) == re.sub(figure, "#", there), name
        figures, figures_there = (map(float, re.findall(figure, x)) for x in (one, there))
        assert list(figures) == pytest.approx(list(figures_there), rel=1e-5), name


@pytest.mark.rare
def test_verify_confirms_all_properties_of_models_on_a_mesh(folders, tmp_path):
    for status, said in on_eight(tmp_path, [words.split() for words in CERTIFIED]):
        assert status == 0, said


@pytest.mark.parametrize(
    "mesh, message",
    [
        ("data=3", "mesh is data=3,fsdp=1,expert=1,tensor=1, which needs 3 devices; there are"),
        ("model=2", "the axes are data, fsdp, expert, tensor"),
    ],
)
def test_commands_reject_mesh_that_does_not_fit_the_devices(folders, capsys, mesh, message):
    assert main(["generate", "decoder", "--mesh", mesh]) == 2
    assert message in capsys.readouterr().err
