"""The same weights in transformers' GPT-2: the same logits and gradients over 512 tokens."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from tests.parity import peers  # noqa: E402

SIZES = {"vocab_size": 97, "max_length": 512, "num_layers": 2, "embed_dim": 32, "num_heads": 4}


def peer():
    config = transformers.GPT2Config(
        vocab_size=SIZES["vocab_size"],
        n_positions=SIZES["max_length"],
        n_embd=SIZES["embed_dim"],
        n_layer=SIZES["num_layers"],
        n_head=SIZES["num_heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return peers.randomised(transformers.GPT2LMHeadModel(config))


def converted(take):
    """Our parameters from theirs, by name: their kernels are [in, out] as ours are."""

    def linear(name, part=slice(None)):
        return {
            "kernel": take(f"{name}.weight")[:, part],
            "bias": take(f"{name}.bias")[part],
        }

    def norm(name):
        return {"scale": take(f"{name}.weight"), "bias": take(f"{name}.bias")}

    def block(layer):
        at, dim = f"transformer.h.{layer}", SIZES["embed_dim"]
        query, key, value = (slice(i * dim, (i + 1) * dim) for i in range(3))
        return {
            "attention_norm": norm(f"{at}.ln_1"),
            "attention": {
                "query": linear(f"{at}.attn.c_attn", query),
                "key": linear(f"{at}.attn.c_attn", key),
                "value": linear(f"{at}.attn.c_attn", value),
                "output": linear(f"{at}.attn.c_proj"),
            },
            "feedforward_norm": norm(f"{at}.ln_2"),
            "feedforward": {
                "up": linear(f"{at}.mlp.c_fc"),
                "down": linear(f"{at}.mlp.c_proj"),
            },
        }

    return {
        "embedding": {
            "tokens": take("transformer.wte.weight"),
            "positions": take("transformer.wpe.weight"),
        },
        "blocks": peers.stacked([block(layer) for layer in range(SIZES["num_layers"])]),
        "final_norm": norm("transformer.ln_f"),
    }


@pytest.mark.parametrize("attention", ["explicit", "blockwise"])
def test_gpt2_gives_the_same_logits_and_gradients(attention):
    """Learned positions, pre-norm, gelu by tanh, tied head; every bias and scale counts."""
    model = jf.Decoder(jf.DecoderConfig(**SIZES), execution=jf.Execution(attention=attention))
    peers.assert_parity(model, peer(), converted)


def test_gpt2_initialises_the_tree_that_was_compared():
    """The converted tree is the whole tree: no weight was left out of the comparison."""
    model = jf.Decoder(jf.DecoderConfig(**SIZES))
    tree = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"]
    theirs = converted(peers.weights(peer()))
    assert jax.tree.map(np.shape, theirs) == jax.tree.map(lambda leaf: leaf.shape, tree)
