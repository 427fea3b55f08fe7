"""Training on simulated devices, in separate processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxformer as jf
from jaxformer.models.config import KINDS, DecoderConfig
from jaxformer.models.parameters import init
from tests.slow import mostly_rare

PROJECT = Path(__file__).parents[2]
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compilation takes most of the time
ON_ONE = {"XLA_FLAGS": "", "NPROC": "2", **QUICKLY}
AS_USERS_DO = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "16"}
ON_EIGHT = {**AS_USERS_DO, **QUICKLY}
# Decoders with several types of layers.
HYBRIDS = ("short-convolution", "qwen3-next", "gpt-oss")
MESH = "data=2,fsdp=2,tensor=2"

pytestmark = pytest.mark.slow


def run(*words, cwd=None, devices=ON_EIGHT):
    environment = {**os.environ, **devices}
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(
    "kind, mesh",
    mostly_rare(
        [
            (kind, "fsdp=8" if kind == "recurrent-encoder-decoder" else MESH)
            for kind in (*KINDS, *HYBRIDS)
        ],
        *(("decoder", MESH), ("qwen3-next", MESH)),
    ),
)
def test_training_and_decoding_on_a_mesh_equal_one_device(kind, mesh):
    """The losses of 20 updates, the gradients and the generated tokens are equal.

    XLA's partitioner prints no warning, for example about gathering an array to reshard it.
    """
    words = ["experiments/meshes.py", "--kinds", kind, "--meshes", mesh]
    done = run(*words, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert "rematerialization" not in done.stderr
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert found["losses"] < 1e-5 and found["gradients"] < 1e-5 and found["same tokens"]


@pytest.mark.parametrize(
    "kind, mesh",
    mostly_rare(
        [("decoder", "tensor=8"), *((kind, MESH) for kind in (*KINDS, *HYBRIDS))],
        ("decoder", "tensor=8"),
    ),
)
def test_training_with_indivisible_sizes_on_a_mesh_equals_one_device(kind, mesh):
    """With five heads and a vocabulary of 65, the batch is sharded instead of heads and
    vocabulary."""
    words = ["experiments/meshes.py", "--odd", "--kinds", kind, "--meshes", mesh]
    done = run(*words, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert "rematerialization" not in done.stderr
    for found in json.loads(done.stdout.splitlines()[-1]):
        assert found["losses"] < 1e-5 and found["gradients"] < 1e-5 and found["same tokens"]


@pytest.mark.parametrize(
    "families, mesh",
    mostly_rare(
        [
            (("mixtral", "qwen2-moe"), "data=2,expert=4"),
            (("olmoe", "qwen3-moe"), "data=2,expert=4"),
            (("mixtral", "qwen2-moe"), "fsdp=2,expert=2,tensor=2"),
            (("olmoe", "lfm2"), MESH),
        ],
        (("mixtral", "qwen2-moe"), "data=2,expert=4"),
    ),
)
def test_training_a_model_family_on_a_mesh_equals_one_device(families, mesh):
    """The losses of 100 updates, the gradients and the generated tokens are equal."""
    words = ["experiments/meshes.py", "--kinds", *families, "--meshes", mesh, "--steps", "100"]
    done = run(*words, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert "rematerialization" not in done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert [found["kind"] for found in figures] == list(families)
    for found in figures:
        assert found["losses"] < 1e-5 and found["gradients"] < 1e-5 and found["same tokens"]


def test_compiled_training_step_has_no_superfluous_collectives():
    """The compiled step of a two-layer decoder has only the necessary collectives.

    Over `tensor`: two all-reduces per layer and direction, and those of the embedding and the head.
    Over `fsdp`: one gather per matrix. Only embedding lookups use permutations.
    """
    words = ["experiments/meshes.py", "--exchanges", "--meshes", "tensor=8", "fsdp=8"]
    done = run(*words, cwd=PROJECT, devices=AS_USERS_DO)
    assert done.returncode == 0, done.stderr
    tensor, fsdp = json.loads(done.stdout.splitlines()[-1])
    layers, matrices = 2, 7
    assert set(tensor["exchanges"]) == {"all-reduce"}
    assert tensor["exchanges"]["all-reduce"] <= 4 * layers + 6
    assert set(fsdp["exchanges"]) <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    assert fsdp["exchanges"]["all-to-all"] <= 2
    assert fsdp["exchanges"]["all-gather"] <= matrices * layers + 2


INT8 = """
import jax, jaxformer as jf
from jaxformer.models.sharding.parameters import make_mesh
tokens = jax.random.randint(jax.random.key(1), (8, 8), 0, 64)
said = []
for sizes in ({"data": 2, "fsdp": 2, "tensor": 2}, None):
    mesh = make_mesh(sizes or {}, None if sizes else jax.devices()[:1])
    with jax.set_mesh(mesh):
        model, variables, _ = jf.load("saved", mesh=mesh, kernels="int8")
        logits = jax.jit(model.apply)(variables, tokens)
        greedy = jf.Sampler(temperature=0.0)
        out = jf.generate(model, variables, tokens, max_new_tokens=4, sampler=greedy)
        said.append((jax.device_get(logits), out.tokens))
assert abs(said[0][0] - said[1][0]).max() < 1e-5 and (said[0][1] == said[1][1]).all()
"""


def test_int8_model_has_the_same_logits_and_tokens_on_a_mesh(tmp_path):
    """This includes the embedding table, whose looked-up vectors are sharded like the batch."""
    config = DecoderConfig(vocab_size=64, max_length=32, num_layers=1, embed_dim=32, num_heads=4)
    model = jf.build(config)
    jf.save(tmp_path / "saved", model, init(model, jax.random.key(0)))
    done = run("-c", INT8, cwd=tmp_path)
    assert done.returncode == 0 and "rematerialization" not in done.stderr, done.stderr


SETTINGS = (
    "--preset tiny --vocab-size 300 --max-length 32 --embed-dim 32 --num-heads 4 --batch-size 8 "
    "--steps 6 --checkpoint-every 3 --evaluate-every 3 --evaluation-windows 8 --sample-tokens 0"
).split()


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("held_out_loss")) for line in lines]


PAIR_SETTINGS = (
    "--model encoder-decoder --preset tiny --vocab-size 300 --max-length 32 --embed-dim 32 "
    "--num-heads 4 --num-layers 1 --batch-tokens 200 --lengths 1 --gradient-accumulation-steps 2 "
    "--dropout 0.1 --steps 6 --checkpoint-every 3 --evaluate-every 3 --evaluation-pairs 8"
).split()


@pytest.mark.parametrize(
    "name, given, settings",
    [
        ("text.py", ["text.py"], SETTINGS),
        pytest.param("pairs.tsv", ["--source", "pairs.tsv"], PAIR_SETTINGS, marks=pytest.mark.rare),
    ],
)
def test_run_can_be_resumed_on_another_mesh(tmp_path, name, given, settings):
    """A run on eight devices continues on a different mesh of eight devices, and on one device.

    The losses equal a run on one device, and one device loads what eight devices saved.
    """
    line = "def f{0}(x):\n    return x * {0}\n" if name == "text.py" else "{0} and one\t{0} + 1\n"
    (tmp_path / name).write_text("".join(map(line.format, range(600))))

    def train(devices, *words):
        done = run("-m", "jaxformer", "train", *words, cwd=tmp_path, devices=devices)
        assert done.returncode == 0, done.stderr
        return done.stdout

    train(ON_ONE, *given, *settings, "--out", "one")
    said = train(ON_EIGHT, *given, *settings, "--out", "eight", "--mesh", MESH)
    assert "mesh: data=2, fsdp=2, expert=1, tensor=2" in said
    assert losses(tmp_path / "eight") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    shutil.copytree(tmp_path / "eight", tmp_path / "again")
    train(ON_ONE, "--resume", "--out", "one", "--steps", "9")
    for devices, folder, mesh in ((ON_EIGHT, "eight", "fsdp=8"), (ON_ONE, "again", "data=1")):
        said = train(devices, "--resume", "--out", folder, "--steps", "9", "--mesh", mesh)
        assert "resuming from the checkpoint of step 6" in said
        assert losses(tmp_path / folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    words = ("evaluate", "eight", *given, "--json")
    done = run("-m", "jaxformer", *words, cwd=tmp_path, devices=ON_ONE)
    assert done.returncode == 0 and json.loads(done.stdout)["loss"] > 0, done.stderr


@pytest.mark.rare
def test_lora_adapter_training_on_a_mesh_equals_one_device(tmp_path):
    """An adapter with an average has the same losses on eight devices as on one device.

    One device saved the frozen weights. The adapter is sharded like the frozen weights. One device
    loads what eight devices saved.
    """
    text = "".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(600))
    (tmp_path / "text.py").write_text(text)
    tune = ["text.py", "--init-from", "base", "--lora-rank", "2", "--ema-decay", "0.9"]
    tune += [
        "--lora-target-modules",
        "query,output,up,down",
        "--learning-rate",
        "0.01",
        *SETTINGS[-12:],
    ]
    for devices, words in (
        (ON_ONE, ["text.py", *SETTINGS, "--out", "base"]),
        (ON_ONE, [*tune, "--out", "one"]),
        (ON_EIGHT, [*tune, "--out", "eight", "--mesh", MESH]),
    ):
        done = run("-m", "jaxformer", "train", *words, cwd=tmp_path, devices=devices)
        assert done.returncode == 0 and "rematerialization" not in done.stderr, done.stderr
    assert losses(tmp_path / "eight") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    words = ("evaluate", "eight", "text.py", "--json")
    done = run("-m", "jaxformer", *words, cwd=tmp_path, devices=ON_ONE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--mesh", "fsdp=4"],
            "mesh is data=1,fsdp=4,expert=1,tensor=1, which needs 4 devices; there are 8 (cpu)",
        ),
        (
            ["--mesh", "data=8", "--batch-size", "12"],
            "batch_size is 12; it must be a multiple of data",
        ),
        (["--mesh", "fsdp=8", "--embed-dim", "36"], "36 is not divisible by fsdp=8"),
        (["--mesh", "tensor=8", "--mlp-dim", "36"], "36 is not divisible by tensor=8"),
        (
            ["--mesh", "expert=8"],
            "mesh has expert=8, but must have expert=1 for a model without experts",
        ),
        (
            ["--mesh", "expert=8", "--num-experts", "6"],
            "6 is not divisible by expert=8",
        ),
        (["--mesh", "model=8"], "the axes are data, fsdp, expert, tensor"),
    ],
)
def test_train_rejects_a_mesh_incompatible_with_devices_or_model(tmp_path, words, message):
    (tmp_path / "text.py").write_text("def f(x):\n    return x\n" * 2000)
    done = run(
        "-m", "jaxformer", "train", "text.py", *SETTINGS, "--out", "run", *words, cwd=tmp_path
    )
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
