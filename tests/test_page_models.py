"""A command on a page builds the model that the page describes in Python, words or a table.

Each command that builds a model has an entry in `STATED` or, with a reason, in `UNSTATED`.
"""

import ast
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest

import jaxformer as jf
from jaxformer.cli import doctor, train
from jaxformer.cli.arguments import parse
from jaxformer.cli.flags import field_values
from jaxformer.models.sharding.parameters import AXES
from tests.page_commands import PAGES as PATHS
from tests.page_commands import ROOT, Words, commands_of

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PATHS}


def built_by(words: Words, patch) -> dict[str, Any]:
    """Returns the model and run fields of a command, without running the command."""
    if words[0] == "train":
        seen = []
        patch.setattr(
            train, "train_run", lambda folder, inputs, arguments, **_: seen.append(arguments)
        )
        train.main(list(words[1:]))
        model = seen[0].training.model.resolved
        return {**field_values(seen[0].training), **vars(model), "parameters": millions(model)}
    arguments = parse(doctor.DoctorArguments, "doctor", list(words[1:]))
    config, target, mesh, batch_size, length = doctor._requested(arguments.preset, arguments)
    scans = arguments.execution.scans(config.num_layers, few_tokens=arguments.decode)
    run = {"target": str(target), "mesh": asdict(mesh), "batch_size": batch_size, "length": length}
    run |= {"layers": "scan" if scans else "unrolled", "remat": arguments.execution.remat}
    return {**vars(config.resolved), **run, "preset": arguments.preset}


def millions(model) -> str:
    return f"{jf.parameter_count(model) / 1e6:.2f} M parameters"


def assigned(page: str, name: str) -> dict[str, Any]:
    """Returns the config fields that a page's Python code assigns to a name."""
    tree = ast.parse("\n".join(re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)))
    imports = [x for x in tree.body if isinstance(x, ast.Import | ast.ImportFrom)]
    values = [
        x for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == name
    ]
    names: dict[str, Any] = {}
    exec(ast.unparse(ast.Module([*imports, values[0]], [])), names)
    return vars(names[name].resolved)


def trained_in_python(page: str, patch) -> dict[str, Any]:
    """Returns the fields of the run that a page's first Python block starts."""
    block = re.search(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    assert block is not None
    started = []
    patch.setattr("jaxformer.cli.main", started.append)
    patch.setattr(tempfile, "mkdtemp", lambda: ".")
    exec(block[1], {})
    return built_by(tuple(started[0]), patch)


def recorded(name: str, preset: str, **mesh: int) -> dict[str, Any]:
    """Returns the settings in one line of a record, whose figures a page shows."""
    record = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())
    every = dict.fromkeys(AXES, 1)  # a record from before an axis existed lacks the axis
    [line] = [
        x for x in record["figures"] if x["preset"] == preset and every | x["mesh"] == every | mesh
    ]
    names = ("preset", "target", "batch_size", "length", "dtype", "layers", "remat")
    return {**{name: line[name] for name in names}, "mesh": every | mesh}


def in_words(page: str, **said: str) -> dict[str, Any]:
    assert all(words in " ".join(PAGES[page].split()) for words in said.values())
    return said


@dataclass(frozen=True)
class Stated:
    """What a page says about the model of a command.

    Attributes:
        fields: Computes the stated values by field name, with a monkeypatch.
        differs: Fields whose value differs in the command, and the words of the page that say so.
    """

    fields: Callable[[Any], dict[str, Any]]
    differs: tuple[tuple[str, str], ...] = ()


MESHES, RUNS_WHERE = "docs/meshes.md", "docs/what-runs-where.md"
STATED = {
    ("README.md", "train"): Stated(lambda _: in_words("README.md", parameters="1.05 M parameters")),
    (
        "docs/lecture-10.md",
        "train --preset tiny --vocab-size 257 --num-layers 4 --num-heads 1 --no-residual "
        "--norm none --output-activation --attention-scale 1 --steps 300 --out runs/half-built",
    ): Stated(lambda _: assigned("docs/lecture-10.md", "half_built")),
    ("docs/train-on-your-text.md", "train my.txt --preset tiny --out runs/tide"): Stated(
        lambda patch: trained_in_python("docs/train-on-your-text.md", patch)
    ),
    (
        "docs/training.md",
        "train --model encoder-decoder --preset tiny --source sums.tsv --out sums "
        "--vocab-size 300 --max-length 32 --steps 40 --evaluate-every 20",
    ): Stated(lambda patch: trained_in_python("docs/training.md", patch)),
    (
        MESHES,
        "doctor --preset gpt2-1.5b --mesh fsdp=8 --target gpu:h100:8 --scan-layers scan "
        "--remat dots",
    ): Stated(
        lambda _: recorded("placements-h100", "gpt2-1.5b", fsdp=8) | assigned(MESHES, "config")
    ),
    (
        MESHES,
        "doctor --preset llama-1.1b --mesh fsdp=4,tensor=4 --target tpu:v5e:4x4 "
        "--scan-layers scan --remat dots",
    ): Stated(lambda _: recorded("placements-v5e", "llama-1.1b", fsdp=4, tensor=4)),
    (
        MESHES,
        "doctor --preset gpt2-124m --mesh data=8 --target gpu:h100:8 --batch-size 32 --decode",
    ): Stated(lambda _: recorded("decoding-h100", "gpt2-124m", data=8)),
    (RUNS_WHERE, "doctor --preset llama-1.1b --target gpu:h100:8 --explain-attention"): Stated(
        lambda _: assigned(RUNS_WHERE, "config"),
        (("window", "every second layer has a window of 1,024 tokens"),),
    ),
    (RUNS_WHERE, "doctor --preset gpt2-124m --target tpu:v5e:2x2 --scan-layers scan"): Stated(
        lambda _: (
            {"batch_size": 32, "length": 1024, "remat": "none", "dtype": "bfloat16"}
            | in_words(RUNS_WHERE, preset="gpt2-124m", target="tpu:v5e:2x2")
        )
    ),
}
UNSTATED = {  # the reason why there is nothing to compare
    **dict.fromkeys(
        [
            (page, "train my.txt --embed-dim 384")
            for page in ("README.md", "docs/train-on-your-text.md")
        ],
        "the page shows no model of this width",
    ),
    (
        "README.md",
        "train --model encoder-decoder --source train.en --target train.de",
    ): "the page shows no model of this kind",
    **{
        (
            "docs/meshes.md",
            f"train my.txt --mesh fsdp=16 --out runs/shared --coordinator {more}",
        ): ("this part of the page is about processes, and shows no decoder of a run")
        for more in ("auto", "first-machine:8476 --num-processes 2 --process-id 0")
    },
}


def builds_a_model(words: Words) -> bool:
    """Returns whether a command trains or examines a model that the command's words describe."""
    is_new = not {"--resume", "--init-from", "--help", "--help-all"} & {*words}
    return is_new and (words[0] == "train" or (words[0] == "doctor" and "--preset" in words))


def test_every_docs_command_that_builds_a_model_is_tested():
    found = {(page, x) for page, text in PAGES.items() for x in commands_of(text)}
    commands = {(page, tuple(shlex.split(command))) for page, command in (*STATED, *UNSTATED)}
    assert {(page, words) for page, words in found if builds_a_model(words)} == commands


@pytest.mark.parametrize(("page", "command"), STATED)
def test_command_on_docs_page_builds_the_model_that_the_page_describes(
    page, command, monkeypatch, tmp_path
):
    """Each stated field is equal, except for the differences that the page mentions."""
    monkeypatch.chdir(tmp_path)
    row = STATED[page, command]
    stated = row.fields(monkeypatch)
    built = built_by(tuple(shlex.split(command)), monkeypatch)
    assert stated
    assert {x for x in stated if stated[x] != built[x]} == {field for field, _ in row.differs}
    assert all(words in " ".join(PAGES[page].split()) for _, words in row.differs)


def test_lecture_10_page_lists_differences_of_decoder_from_its_picture(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import build_up

    shown, lesson = (
        vars(build_up.built_up()["half built"].resolved),
        assigned("docs/lecture-10.md", "half_built"),
    )
    for name in ("build_up", "record", "windows"):
        sys.modules.pop(name, None)
    differs = {name: shown[name] for name in shown if shown[name] != lesson[name]}
    assert differs == {"vocab_size": 256, "activation": "relu", "positions": "none"}
    words = "a vocabulary of 256 tokens, the activation ReLU, and at first no positions"
    assert words in " ".join(PAGES["docs/lecture-10.md"].split())
