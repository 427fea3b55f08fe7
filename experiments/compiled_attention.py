"""Compiles training steps for absent TPUs, with the splash kernel and with blockwise attention.

    python experiments/compiled_attention.py tpu:v5e:4x4 --record compiled-attention-v5e
    python experiments/compiled_attention.py tpu:v6e:4x4 --models llama-1.1b

Rows are packed documents of 4,096 tokens. For each program the script counts the calls of the
kernel, looks for an array with all scores of a row, and reports the memory of each device. Times
are not known without the device. `jaxformer doctor` says what compiling for a target requires.
"""

import json
import re
import time
from dataclasses import replace

from record import Parser, at_least, conclude, run

from jaxformer.doctor.machines import devices_of, parse_target, start_for
from jaxformer.models.config import DecoderConfig, Execution, preset

LENGTH = 4096
# The shape of Gemma 2 2B (Gemma Team 2024, table 1): windows in every second layer, and soft caps.
GEMMA = DecoderConfig(
    vocab_size=256_128,
    num_layers=26,
    embed_dim=2304,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    mlp_dim=9216,
    window=(4096, None) * 13,
    activation="geglu_tanh",
    norm="rms_one_plus",
    norm_position="both",
    positions="rotary",
    use_bias=False,
    attention_cap=50.0,
    logits_cap=30.0,
    scale_embeddings=True,
)
# Windows shorter than the row, so that they make a difference.
MODELS = {
    "gpt2-1.5b": preset("gpt2-1.5b"),
    "llama-1.1b": preset("llama-1.1b"),
    "gemma-like": replace(GEMMA, window=(1024, None) * 13),
}
MESHES = {"gpt2-1.5b": {"fsdp": 16}, "llama-1.1b": {"fsdp": 16}, "gemma-like": {"fsdp": 16}}


def score_arrays(text: str, length: int) -> list[str]:
    """Returns the shapes in a program that hold all scores of a row: two axes of `length`."""
    shapes = set(re.findall(r"\b(?:f32|bf16|pred)\[([\d,]+)\]", text))
    return sorted(x for x in shapes if x.split(",").count(str(length)) > 1)


def compiled(config, attention: str, target, mesh: dict, rows: int, length: int) -> dict:
    """Compiles the step of packed rows and returns its figures."""
    from jaxformer.doctor.compiled import compile_step
    from jaxformer.models.kinds import build
    from jaxformer.models.mesh import make_mesh
    from jaxformer.training.config import OptimizerConfig
    from jaxformer.training.optimizer import make_optimizer

    model = build(config, Execution(attention=attention, layers="scan", remat="full"))
    devices, begin = make_mesh(mesh, devices_of(target)), time.perf_counter()
    optimizer = make_optimizer(OptimizerConfig())
    program, memory = compile_step(model, optimizer, devices, rows, length, is_packed=True)
    text = program.as_text() or ""
    return {
        "attention": attention,
        "kernel calls": text.count('custom_call_target="tpu_custom_call"'),
        "arrays of all scores": score_arrays(text, length),
        "memory": memory._asdict(),
        "compiled in": round(time.perf_counter() - begin),
    }


def main():
    parser = Parser(__doc__)
    parser.add_argument("target")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--length", type=at_least(128), default=LENGTH)
    parser.add_argument("--rows", type=at_least(1), default=16, help="in the whole batch")
    arguments = parser.parse_args()
    target = parse_target(arguments.target)
    start_for(target)
    import jax

    figures = []
    for name in arguments.models:
        config = replace(MODELS[name], dtype="bfloat16", max_length=arguments.length)
        for attention in ("fused", "blockwise"):
            mesh = MESHES[name]
            try:
                found = compiled(config, attention, target, mesh, arguments.rows, arguments.length)
            except jax.errors.JaxRuntimeError as error:  # the program does not fit
                found = {"attention": attention, "error": str(error).splitlines()[0]}
            figures.append({"model": name, "mesh": mesh, "rows": arguments.rows, **found})
            print(json.dumps(figures[-1]), flush=True)
    conclude(
        {"target": str(target), "length": arguments.length, "steps": figures}, arguments.record
    )


if __name__ == "__main__":
    run(main)
