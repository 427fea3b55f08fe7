"""Compares every mesh of eight devices with one device: losses, gradients and tokens.

    python experiments/meshes.py
    python experiments/meshes.py --kinds decoder --meshes fsdp=8 data=2,fsdp=2,tensor=2
    python experiments/meshes.py --kinds mixtral lfm2 --steps 100 --meshes data=2,expert=4 data=8
    python experiments/meshes.py --kinds qwen3-next --steps 100 --control
    python experiments/meshes.py --exchanges         # the collectives of each compiled step
    python experiments/meshes.py --processes 2       # two processes of four devices each

The devices are simulated on the CPU. For each model and each mesh, the script compares 20 updates,
the gradient of the first batch, greedy generation, and beam search with 4 beams. Some models are
decoders with the layer types of a published family, such as Mixtral. Only mixture-of-experts
models run on meshes with the axis "expert".

A rounding difference can change which expert a router chooses. With `--control`, the script also
trains on one device from weights that were changed by about one rounding error. A mesh
passes if its results deviate from the results on one device no more than the results of the control
run do.
"""

import itertools
import os
import socket
import subprocess
import sys
from dataclasses import replace

# These variables must be set before JAX starts. With few threads, collectives of many simulated
# devices deadlock.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
from record import Parser, at_least, conclude, run

import jaxformer as jf
from jaxformer.doctor.program import by_kind, collectives
from jaxformer.models.config import KINDS, EncoderConfig
from jaxformer.models.config.encoder import ReadsSource
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.parameters import parameter_count
from jaxformer.models.sharding.parameters import AXES, make_mesh, to_host
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig, Processes
from jaxformer.training.mesh import place_batch
from jaxformer.training.objectives import CrossEntropy, summed_loss
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.processes import is_first, join
from jaxformer.training.step import init_on, init_state, make_step, updates

STEPS, BATCH_SIZE, LENGTH, VOCAB = 20, 16, 32, 64
SIZES = {"vocab_size": VOCAB, "max_length": LENGTH, "embed_dim": 32, "num_layers": 2}
HEADS = {"num_heads": 8, "num_kv_heads": 8}
CONFIGS = {kind: config(**SIZES) for kind, config in KINDS.items() if "recurrent" in kind}
CONFIGS["convolutional"] = jf.ConvolutionalConfig(**SIZES)
CONFIGS["encoder"] = jf.EncoderConfig(**SIZES, **HEADS)
CONFIGS["decoder"] = jf.DecoderConfig(
    **SIZES, **HEADS, positions="rotary", norm="rms", activation="swiglu", tie_embeddings=False
)
CONFIGS["short-convolution"] = replace(
    CONFIGS["decoder"], layer_types=("short_convolution", "attention"), convolution_bias=True
)
CONFIGS |= {
    family: replace(CONFIGS["decoder"], use_bias=False, mlp_dim=48, **layers)
    for family, layers in {
        "mixtral": {"num_kv_heads": 4, "num_experts": 8, "experts_per_token": 2},
        "olmoe": {
            "query_key_norm": "all",
            "num_experts": 16,
            "experts_per_token": 4,
            "expert_dim": 16,
            "normalize_router": False,
        },
        "qwen2-moe": {
            "query_key_value_bias": True,
            "num_experts": (0, 4),
            "expert_dim": 32,
            "shared_expert_dim": 48,
            "shared_expert_gate": True,
            "normalize_router": False,
        },
        "qwen3-moe": {"query_key_norm": "head", "num_experts": 8, "expert_dim": 32},
        "lfm2": {
            "query_key_norm": "head",
            "layer_types": ("short_convolution", "short_convolution", "attention"),
            "num_layers": 3,
            "tie_embeddings": True,
        },
    }.items()
}
CONFIGS["qwen3-next"] = replace(
    CONFIGS["qwen3-moe"],
    norm="rms_one_plus",
    layer_types=("gated_delta", "attention"),
    delta_key_heads=4,
    delta_value_heads=8,
    attention_gate=True,
    shared_expert_dim=48,
    shared_expert_gate=True,
)
CONFIGS["encoder-decoder"] = jf.EncoderDecoderConfig(**SIZES, **HEADS)
CONFIGS["gpt-oss"] = replace(
    CONFIGS["decoder"],
    activation="clipped_swiglu",
    window=(8, None),
    attention_sinks=True,
    num_experts=8,
    router_bias=True,
    expert_dim=48,
)
MESHES = [
    ",".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True) if size > 1)
    for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES))
    if np.prod(sizes) == 8
]
RECIPE = OptimizerConfig(learning_rate=1e-3, warmup_steps=2)


def batch_of(config) -> Batch:
    """Returns a padded batch with some targets of weight 0 and, if the model needs it, a source."""
    random = np.random.default_rng(0)
    sequences = random.integers(1, VOCAB, (1, BATCH_SIZE, LENGTH + 1)).astype(np.int32)
    real = (np.arange(LENGTH) < random.integers(4, LENGTH, (1, BATCH_SIZE, 1))).astype(np.int32)
    parts = [sequences[..., :-1], sequences[..., 1:], real.astype(np.float32), real]
    return Batch(
        *parts, *([sequences[..., 5:21], real[..., 5:21] | 1] * isinstance(config, ReadsSource))
    )


def rounded(params):
    """Changes each value of the parameters by about one rounding error of float32."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: x * np.float32(1 + 1e-7 * random.normal(size=x.shape)), params)


def trained(kind: str, mesh, steps: int, change=lambda params: params):
    """Returns (losses of all updates, the gradient of the first batch, generated tokens).

    Args:
        kind: The name of a config.
        mesh: The mesh; one device if None.
        steps: The number of updates.
        change: A function that changes the initial parameters.
    """
    config = CONFIGS[kind]
    model, optimizer, batch = jf.build(config), make_optimizer(RECIPE), batch_of(config)
    if mesh is None:
        start = jax.jit(lambda: init_state(model, optimizer, 0))()
        start = start._replace(params=change(start.params))
    else:
        start, batch = init_on(mesh, model, optimizer, 0), place_batch(batch, mesh)

    def loss(params, batch):
        one = jax.tree.map(lambda x: x[0], batch)
        return summed_loss(model, params, one) / CrossEntropy().count(one)

    gradient = jax.tree.map(to_host, jax.jit(jax.grad(loss))(start.params, batch))
    losses, rates = [], Schedule(RECIPE, steps).rates()
    step, data = make_step(model, optimizer), itertools.repeat(batch)
    for state, now in updates(step, start, data, rates):
        # Reading the loss waits for the step, so that only one step runs at a time (see NPROC).
        losses.append(float(now.loss))
        params = state.params
    return np.array(losses), gradient, generated(model, {"params": params})


def exchanges(kind: str, mesh) -> dict[str, int]:
    """Returns the number of collectives of each kind in the compiled training step."""
    model, optimizer = jf.build(CONFIGS[kind]), make_optimizer(RECIPE)
    state, batch = init_on(mesh, model, optimizer, 0), place_batch(batch_of(model.config), mesh)
    program = make_step(model, optimizer).lower(state, batch, np.float32(0)).compile().as_text()
    return {kind: total.count for kind, total in by_kind(collectives(program)).items()}


def generated(model, variables):
    """Returns greedy continuations of 8 prompts, and beam search continuations of 2 of the prompts.

    Beam search has fewer prompts (2) than the 8 devices, and as many beams (2 prompts × 4) as
    devices.
    """
    if isinstance(model.config, EncoderConfig):
        return []
    prompts = np.random.default_rng(1).integers(1, VOCAB, (8, 7)).tolist()
    reads_source, few = isinstance(model.config, ReadsSource), prompts[:2]
    how = {"max_new_tokens": 12, "source": prompts if reads_source else None}
    greedy = jf.generate(model, variables, prompts, sampler=jf.Sampler(temperature=0.0), **how)
    how["source"] = few if reads_source else None
    beam = jf.beam_search(model, variables, few, beam_width=4, **how)
    return [np.asarray(greedy.tokens), np.asarray(beam.tokens)]


def odd(config):
    """Returns a copy of the config whose sizes most meshes do not divide evenly.

    The vocabulary has 65 tokens, the source vocabulary has 66 tokens, and each attention layer of a
    Transformer has five heads.
    """
    sizes = {"vocab_size": VOCAB + 1}
    if isinstance(config, ReadsSource):
        sizes |= {"source_vocab_size": VOCAB + 2, "share_embeddings": False}
    if isinstance(config, TransformerConfig):
        sizes |= {"num_heads": 5, "num_kv_heads": 5, "head_dim": 8}
    return replace(config, **sizes)


def difference(one, other) -> dict:
    """Returns the largest relative differences, and whether the generated tokens are equal."""
    losses = np.abs(other[0] / one[0] - 1).max()
    gradient = max(
        np.abs(x - y).max() / max(np.abs(x).max(), 1e-6)
        for x, y in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True)
    )
    same = all(np.array_equal(x, y) for x, y in zip(one[2], other[2], strict=True))
    return {"losses": float(losses), "gradients": float(gradient), "same tokens": same}


def several(number: int) -> int:
    """Runs this command in `number` processes and returns the largest of their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // number}"}
    started = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, **devices, "PROCESS": f"{coordinator} {number} {place}"},
            stdout=None if place == 0 else subprocess.DEVNULL,
        )
        for place in range(number)
    ]
    return max([process.wait() for process in started])


def main():
    parser = Parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=CONFIGS, default=list(KINDS))
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=MESHES)
    parser.add_argument("--steps", type=at_least(1), default=STEPS, help="number of updates")
    parser.add_argument(
        "--control",
        action="store_true",
        help="as a control, also train on one device with weights changed by one rounding error",
    )
    parser.add_argument(
        "--odd", action="store_true", help="use an odd vocabulary size and number of heads"
    )
    parser.add_argument(
        "--exchanges",
        action="store_true",
        help="count the collectives of the decoder's compiled training step, and do not train",
    )
    parser.add_argument("--processes", type=int, choices=(1, 2, 4), default=1)
    arguments = parser.parse_args()
    if arguments.processes > 1:
        if "PROCESS" not in os.environ:
            sys.exit(several(arguments.processes))
        coordinator, number, place = os.environ["PROCESS"].split()
        join(Processes(coordinator, int(number), int(place)))
    meshes = {
        name: make_mesh({axis: int(n) for axis, n in (x.split("=") for x in name.split(","))})
        for name in arguments.meshes
    }
    if arguments.odd:
        CONFIGS.update({kind: odd(config) for kind, config in CONFIGS.items()})
    figures = []
    if arguments.exchanges:
        for name, mesh in meshes.items():
            with jax.set_mesh(mesh):
                figures.append({"mesh": name, "exchanges": exchanges("decoder", mesh)})
                print(f"{name:24} {figures[-1]['exchanges']}", flush=True)
        return conclude(figures, arguments.record)
    for kind in arguments.kinds:
        one = trained(kind, None, arguments.steps)
        has_experts = getattr(CONFIGS[kind], "has_experts", False)
        print(f"{kind}: {parameter_count(CONFIGS[kind]):,} parameters", flush=True)
        if arguments.control:
            found = difference(one, trained(kind, None, arguments.steps, rounded))
            figures.append({"kind": kind, "mesh": "one device, rounded", **found})
            print(f"  {'one device, rounded':24} losses {found['losses']}", flush=True)
        for name, mesh in meshes.items():
            if mesh.shape["expert"] > 1 and not has_experts:
                continue
            with jax.set_mesh(mesh):
                found = difference(one, trained(kind, mesh, arguments.steps))
            print(f"  {name:24} " + ", ".join(f"{k} {v}" for k, v in found.items()), flush=True)
            figures.append({"kind": kind, "mesh": name, **found})
    if is_first():
        conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
