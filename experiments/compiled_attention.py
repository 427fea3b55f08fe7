"""Compiles training steps for absent devices, with a fused kernel and with blockwise attention.

    python experiments/compiled_attention.py tpu:v5e:4x4 --record compiled-attention-v5e
    python experiments/compiled_attention.py tpu:v6e:4x4 --models llama-1.1b
    python experiments/compiled_attention.py gpu:h100:8 --models llama-1.1b pairs
    python experiments/compiled_attention.py gpu:h100:8 --dense --models llama-1.1b llama-window
    python experiments/compiled_attention.py gpu:h100:8 --models gemma-like llama-window  # tokamax

Sequences have 4,096 tokens, or 4,224 tokens if the model has 4,096 features. Sequences contain
packed documents or, with `--dense`, one document. The encoder-decoder `pairs` reads padded sources
together with packed documents. For each program the script counts the calls of the kernel, searches
for arrays with the full score matrix of a sequence, and reports the memory per device. The script
cannot measure time, because the devices are absent. `jaxformer doctor` prints the requirements for
compiling for a target.
"""

import json
import re
import time
from dataclasses import replace

from record import Parser, at_least, conclude, run

from jaxformer.doctor.targets import as_if_on, parse_target, start_for, target_devices
from jaxformer.models.config import DecoderConfig, EncoderDecoderConfig, Execution, preset

LENGTH = 4096
# This config has the shape of Gemma 2 2B (Gemma Team 2024, table 1).
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
    norm_position="sandwich",
    positions="rotary",
    use_bias=False,
    attention_softcap=50.0,
    logits_softcap=30.0,
    scale_embeddings=True,
)
# The windows are shorter than the sequences, because longer windows would have no effect.
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
    """Returns a length of at least `length` that differs from all feature sizes.

    So every array with two axes of the returned length is a matrix of attention scores.
    """
    heads = (config.num_heads + 2 * (config.num_kv_heads or config.num_heads)) * config.head_dim
    return length + 128 if length in (config.embed_dim, config.mlp_dim, heads) else length


def score_arrays(text: str, length: int) -> list[str]:
    """Returns the shapes of the arrays in a program that have two axes of size `length`."""
    shapes = set(re.findall(r"\b(?:f32|bf16|pred)\[([\d,]+)\]", text))
    return sorted(x for x in shapes if x.split(",").count(str(length)) > 1)


def compiled(config, attention: str, devices, shape: tuple[int, int], *, is_packed: bool) -> dict:
    """Compiles the step for (batch size, length) and returns the measurements."""
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
        "full score matrices": score_arrays(text, shape[1]),
        "memory": memory,
        "compiled in": round(time.perf_counter() - begin),
    }


def main():
    parser = Parser(__doc__)
    parser.add_argument("target")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=PACKED)
    parser.add_argument("--length", type=at_least(128), default=LENGTH)
    parser.add_argument("--batch-size", type=at_least(1), default=16, help="global batch size")
    parser.add_argument("--dense", action="store_true", help="one document per sequence")
    arguments = parser.parse_args()
    target = parse_target(arguments.target)
    start_for(target)
    import jax

    from jaxformer.models.sharding.parameters import make_mesh

    mesh = {"fsdp": target.count}
    devices, is_packed = make_mesh(mesh, target_devices(target)), not arguments.dense
    figures = []
    for name in arguments.models:
        length = length_for(MODELS[name].resolved, arguments.length)
        config = replace(MODELS[name], dtype="bfloat16", max_length=length)
        for attention in ("fused", "blockwise"):
            try:
                with as_if_on(target):
                    shape = (arguments.batch_size, length)
                    found = compiled(config, attention, devices, shape, is_packed=is_packed)
            except jax.errors.JaxRuntimeError as error:  # The program needs too much memory.
                found = {"attention": attention, "error": str(error).splitlines()[0]}
            figures.append({"model": name, "length": length, "packed": is_packed, **found})
            print(json.dumps(figures[-1]), flush=True)
    found = {"target": str(target), "mesh": mesh, "batch_size": arguments.batch_size}
    conclude(found | {"steps": figures}, arguments.record)


if __name__ == "__main__":
    run(main)
