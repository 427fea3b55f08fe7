"""jaxformer's blocks give the outputs of torch's Transformer layers, with padding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")

import jaxformer as jf  # noqa: E402
from jaxformer.functional import (  # noqa: E402
    TokenInfo,
    block,
)
from jaxformer.functional.inputs import Forward, Inputs, Run  # noqa: E402
from jaxformer.functional.tokens import Tokens  # noqa: E402
from jaxformer.models.builders.transformers import build_stack  # noqa: E402
from tests.parity import peers  # noqa: E402

BATCH, LENGTH, SOURCE, DIM, HEADS, MLP = 3, 17, 23, 48, 4, 80
SIZES = {"embed_dim": DIM, "num_heads": HEADS, "mlp_dim": MLP, "num_layers": 2}
SOURCE_REAL, REAL = peers.padded(SOURCE, 23, 11, 1), peers.padded(LENGTH, 9, 17, 2)


def torch_attention(take, name):
    """Splits torch's in_proj, which stacks the query, key and value kernels."""
    kernels = np.split(take(f"{name}.in_proj_weight"), 3)
    biases = np.split(take(f"{name}.in_proj_bias"), 3)
    parts = [{"kernel": k.T, "bias": b} for k, b in zip(kernels, biases, strict=True)]
    query, key, value = parts
    output = peers.linear(take, f"{name}.out_proj")
    return {"query": query, "key": key, "value": value, "output": output}


def padded_sequences(x, segment_ids):
    """The pass over padded sequences, each of which is one document."""
    return Tokens.from_sequences(
        Inputs(jnp.asarray(x), jnp.asarray(segment_ids)), Run(jf.Execution())
    )


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_block_output_equals_torch_transformer_encoder_layer(norm_position):
    """torch.nn.TransformerEncoderLayer with both values of norm_first, and padding."""
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_position == "pre"}
    peer = peers.randomised(torch.nn.TransformerEncoderLayer(DIM, HEADS, MLP, **options))
    x, take = peers.normal(0, BATCH, SOURCE, DIM), peers.weights(peer)
    theirs = peer(torch.as_tensor(x), src_key_padding_mask=torch.as_tensor(SOURCE_REAL == 0))
    config = jf.EncoderConfig(**SIZES, activation="relu", norm_position=norm_position)
    layer = build_stack(config.resolved).layers[0]
    ours = block(
        jax.tree.map(
            jnp.asarray,
            {
                "attention_norm": peers.norm(take, "norm1"),
                "attention": torch_attention(take, "self_attn"),
                "feedforward_norm": peers.norm(take, "norm2"),
                "feedforward": {
                    "up": peers.linear(take, "linear1"),
                    "down": peers.linear(take, "linear2"),
                },
            },
        ),
        jnp.asarray(x),
        layer,
        padded_sequences(x, SOURCE_REAL),
    ).x
    peers.same(ours, theirs, SOURCE_REAL)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_cross_attention_block_output_equals_torch_decoder_layer(norm_position):
    """torch.nn.TransformerDecoderLayer with both values of norm_first, padded on both sides."""
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_position == "pre"}
    peer = peers.randomised(torch.nn.TransformerDecoderLayer(DIM, HEADS, MLP, **options))
    x, encoded = peers.normal(0, BATCH, LENGTH, DIM), peers.normal(1, BATCH, SOURCE, DIM)
    take = peers.weights(peer)
    theirs = peer(
        torch.as_tensor(x),
        torch.as_tensor(encoded),
        tgt_mask=torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1),
        tgt_key_padding_mask=torch.as_tensor(REAL == 0),
        memory_key_padding_mask=torch.as_tensor(SOURCE_REAL == 0),
    )
    config = jf.EncoderDecoderConfig(**SIZES, activation="relu", norm_position=norm_position)
    weights = jax.tree.map(
        jnp.asarray,
        {
            "attention_norm": peers.norm(take, "norm1"),
            "attention": torch_attention(take, "self_attn"),
            "cross_attention_norm": peers.norm(take, "norm2"),
            "cross_attention": torch_attention(take, "multihead_attn"),
            "feedforward_norm": peers.norm(take, "norm3"),
            "feedforward": {
                "up": peers.linear(take, "linear1"),
                "down": peers.linear(take, "linear2"),
            },
        },
    )
    layer = build_stack(config.resolved, reads_source=True).layers[0]
    source = TokenInfo(SOURCE, None, jnp.asarray(SOURCE_REAL))
    tokens = replace(
        padded_sequences(x, REAL), source=source, encoded=Forward(jnp.asarray(encoded), {})
    )
    ours = block(weights, jnp.asarray(x), layer, tokens).x
    peers.same(ours, theirs, REAL)
