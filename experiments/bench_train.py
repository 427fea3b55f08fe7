"""Compares a training step with Hugging Face's torch GPT-2, eager and compiled.

    python experiments/bench_train.py                      # every size, float32
    python experiments/bench_train.py --sizes 10.8m --rounds 10
    python experiments/bench_train.py --dtype bfloat16     # on a GPU

The script measures the step of `jaxformer train` and a step written with the public API only. A
step consists of the forward pass, the backward pass, clipping by global norm, and AdamW, on random
tokens of the same shape. Needs torch and transformers.
"""

from dataclasses import dataclass, replace
from functools import partial

from record import Parser, at_least, conclude, require, run
from side_by_side import compare, table


@dataclass(frozen=True)
class Size:
    num_layers: int
    embed_dim: int
    num_heads: int
    vocab_size: int
    length: int
    batch_size: int


SIZES = {
    "0.8m": Size(4, 128, 4, 65, 64, 12),
    "10.8m": Size(6, 384, 6, 65, 256, 16),
    "124m/256": Size(12, 768, 12, 50257, 256, 2),
    "124m/1024": Size(12, 768, 12, 50257, 1024, 1),
}


def decoder_config(size: Size, dtype: str):
    """Returns the config of a decoder of this size."""
    from jaxformer import DecoderConfig

    return DecoderConfig(
        vocab_size=size.vocab_size,
        max_length=size.length,
        num_layers=size.num_layers,
        embed_dim=size.embed_dim,
        num_heads=size.num_heads,
        dtype=dtype,
    )


def jaxformer_step(size: Size, dtype: str, layers: str, remat: str):
    """Returns a function that runs one training step and returns the training metrics."""
    from jaxformer import Decoder, Execution
    from jaxformer.bench.models import RandomStep

    model = Decoder(decoder_config(size, dtype), Execution(layers=layers, remat=remat))
    return RandomStep(model, size.batch_size, size.length)


def public_step(size: Size, dtype: str):
    """Returns a function that runs one training step, written with the public API only."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxformer as jf

    jf.tune_cpu_runtime()
    model = jf.Decoder(decoder_config(size, dtype))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            6e-4, 0.9, 0.95, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
    )
    sequences = np.random.default_rng(0).integers(
        0, size.vocab_size, (size.batch_size, size.length + 1)
    )
    tokens = jnp.asarray(sequences, jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])
    state = variables, optimizer.init(variables)

    def loss(variables, tokens):
        logits = model.apply(variables, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state, tokens):
        variables, moments = state
        value, gradients = jax.value_and_grad(loss)(variables, tokens)
        updates, moments = optimizer.update(gradients, moments, variables)
        return (optax.apply_updates(variables, updates), moments), value

    def run():
        nonlocal state
        state, value = step(state, tokens)
        value.block_until_ready()

    return run


def torch_step(size: Size, dtype: str, compiled: bool):
    """Returns a function that runs one training step of Hugging Face's GPT2LMHeadModel."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(
        vocab_size=size.vocab_size,
        n_positions=size.length,
        n_embd=size.embed_dim,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).to(device).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if compiled else model
    tokens = torch.randint(size.vocab_size, (size.batch_size, size.length), device=device)
    lowered = dtype == "bfloat16"

    def run():
        with torch.autocast(device, torch.bfloat16, enabled=lowered):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return run


def main():
    parser = Parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument(
        "--batch-size",
        type=at_least(1),
        help="sequences per batch; the default depends on the model size",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--scan-layers", choices=("auto", "scan", "unrolled"), default="auto")
    parser.add_argument("--no-torch", action="store_true", help="measure only jaxformer")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="none")
    arguments = parser.parse_args()
    if not arguments.no_torch:
        require("torch", "transformers")
    lines = []
    for name in arguments.sizes:
        size = SIZES[name]
        if arguments.batch_size:
            size = replace(size, batch_size=arguments.batch_size)
        dtype = arguments.dtype
        ours = partial(jaxformer_step, size, dtype, arguments.layers, arguments.remat)
        makers = {"jaxformer": ours, "jaxformer, public API": partial(public_step, size, dtype)}
        if not arguments.no_torch:
            makers["torch eager"] = partial(torch_step, size, dtype, False)
            makers["torch.compile"] = partial(torch_step, size, dtype, True)
        subjects = compare(makers, arguments.rounds)
        lines.append(report(name, size, subjects))
    conclude(lines, arguments.record)


def report(name, size, subjects) -> dict:
    """Prints a table and returns the measurements."""
    print(f"\n{name}: batch {size.batch_size}, length {size.length}, vocabulary {size.vocab_size}")
    return {"size": name} | table(subjects, size.batch_size * size.length)


if __name__ == "__main__":
    run(main)
