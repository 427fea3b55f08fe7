"""Compiles training steps for absent devices, with a fused kernel and with blockwise attention.

    python experiments/compiled_attention.py tpu:v5e:4x4 --record compiled-attention-v5e
    python experiments/compiled_attention.py tpu:v6e:4x4 --models llama-1.1b
    python experiments/compiled_attention.py gpu:h100:8 --models llama-1.1b pairs
    python experiments/compiled_attention.py gpu:h100:8 --dense --models llama-1.1b llama-window
    python experiments/compiled_attention.py gpu:h100:8 --models gemma-like llama-window  # tokamax

Rows have 4,096 tokens, or 4,224 where a model has 4,096 features. They are packed documents or,
with `--dense`, one document. Packed pairs have sources with padding. For each program the script
counts the calls of the kernel, looks for an array with all scores of a row, and reports the memory
of each device. Times are not known without the device. `jaxformer doctor` says what compiling for
a target requires.
"""

import json
import re
import time
from dataclasses import replace

from record import Parser, at_least, conclude, run

from jaxformer.doctor.machines import as_if_on, devices_of, parse_target, start_for
from jaxformer.models.config import DecoderConfig, EncoderDecoderConfig, Execution, preset

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
    "llama-window": replace(preset("llama-1.1b"), window=1024),
    "pairs": EncoderDecoderConfig(vocab_size=32_000, embed_dim=512, num_heads=8, num_layers=6),
}
PACKED = ("gpt2-1.5b", "llama-1.1b", "gemma-like")
KERNELS = ("tpu_custom_call", "__cudnn$fmha", "mosaic_gpu")


def length_for(config, length: int) -> int:
    """Returns a length from `length` on that no axis of features has, so that scores are found."""
    heads = (config.num_heads + 2 * (config.num_kv_heads or config.num_heads)) * config.head_dim
    return length + 128 if length in (config.embed_dim, config.mlp_dim, heads) else length


def score_arrays(text: str, length: int) -> list[str]:
    """Returns the shapes in a program that hold all scores of a row: two axes of `length`."""
    shapes = set(re.findall(r"\b(?:f32|bf16|pred)\[([\d,]+)\]", text))
    return sorted(x for x in shapes if x.split(",").count(str(length)) > 1)


def compiled(config, attention: str, devices, shape: tuple[int, int], *, is_packed: bool) -> dict:
    """Compiles the step for (rows, length) and returns its figures."""
    from jaxformer.doctor.examine import compile_step
    from jaxformer.models.kinds import build
    from jaxformer.training.config import OptimizerConfig
    from jaxformer.training.optimizer import make_optimizer

    model = build(config, Execution(attention=attention, layers="scan", remat="full"))
    begin, optimizer = time.perf_counter(), make_optimizer(OptimizerConfig())
    text, memory, _ = compile_step(model, optimizer, devices, *shape, is_packed=is_packed)
    return {
        "attention": attention,
        "kernel calls": sum(text.count(f'custom_call_target="{name}') for name in KERNELS),
        "arrays of all scores": score_arrays(text, shape[1]),
        "memory": memory,
        "compiled in": round(time.perf_counter() - begin),
    }


def main():
    parser = Parser(__doc__)
    parser.add_argument("target")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=PACKED)
    parser.add_argument("--length", type=at_least(128), default=LENGTH)
    parser.add_argument("--rows", type=at_least(1), default=16, help="in the whole batch")
    parser.add_argument("--dense", action="store_true", help="rows of one document")
    arguments = parser.parse_args()
    target = parse_target(arguments.target)
    start_for(target)
    import jax

    from jaxformer.models.mesh import make_mesh

    mesh = {"fsdp": target.count}
    devices, is_packed = make_mesh(mesh, devices_of(target)), not arguments.dense
    figures = []
    for name in arguments.models:
        length = length_for(MODELS[name].resolved, arguments.length)
        config = replace(MODELS[name], dtype="bfloat16", max_length=length)
        for attention in ("fused", "blockwise"):
            try:
                with as_if_on(target):
                    shape = (arguments.rows, length)
                    found = compiled(config, attention, devices, shape, is_packed=is_packed)
            except jax.errors.JaxRuntimeError as error:  # the program does not fit
                found = {"attention": attention, "error": str(error).splitlines()[0]}
            figures.append({"model": name, "length": length, "packed": is_packed, **found})
            print(json.dumps(figures[-1]), flush=True)
    found = {"target": str(target), "mesh": mesh, "rows": arguments.rows}
    conclude(found | {"steps": figures}, arguments.record)


if __name__ == "__main__":
    run(main)
