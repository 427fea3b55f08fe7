"""The same weights in transformers' Llama and Mistral: the same logits and gradients."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from tests.parity import peers  # noqa: E402

OURS = {
    "vocab_size": 97,
    "max_length": 512,
    "num_layers": 2,
    "embed_dim": 48,
    "num_heads": 6,
    "num_kv_heads": 2,  # 1 < kv heads < heads
    "head_dim": 8,
    "mlp_dim": 56,
    "activation": "swiglu",
    "norm": "rms",
    "norm_epsilon": 1e-6,
    "positions": "rotary",
    "rotary_base": 500.0,
}
THEIRS = {
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 56,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "attn_implementation": "eager",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def converter(tied=False, use_bias=False):
    """converted(take) for `peers.assert_parity`; their kernels are [out, in]."""

    def converted(take):
        def linear(name):
            weights = {"kernel": take(f"{name}.weight").T}
            return {**weights, "bias": take(f"{name}.bias")} if use_bias else weights

        def norm(name):
            return {"scale": take(f"{name}.weight")}

        def block(layer):
            at = f"model.layers.{layer}"
            return {
                "attention_norm": norm(f"{at}.input_layernorm"),
                "attention": {
                    part: linear(f"{at}.self_attn.{part[0]}_proj")
                    for part in ("query", "key", "value", "output")
                },
                "feedforward_norm": norm(f"{at}.post_attention_layernorm"),
                "feedforward": {
                    part: linear(f"{at}.mlp.{part}_proj") for part in ("gate", "up", "down")
                },
            }

        params = {
            "embedding": {"tokens": take("model.embed_tokens.weight")},
            "blocks": peers.stacked([block(layer) for layer in range(OURS["num_layers"])]),
            "final_norm": norm("model.norm"),
        }
        return params if tied else {**params, "head": {"kernel": take("lm_head.weight").T}}

    return converted


def ours(attention="auto", **changes):
    return jf.Decoder(
        jf.DecoderConfig(**{**OURS, **changes}), execution=jf.Execution(attention=attention)
    )


@pytest.mark.parametrize("tied", [False, True])
def test_llama_gives_the_same_logits_and_gradients(tied):
    """Rotary halves, RMS norm, SwiGLU, three query heads a key head, biases everywhere."""
    config = transformers.LlamaConfig(
        **THEIRS, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True
    )
    peer = peers.randomised(transformers.LlamaForCausalLM(config))
    peers.assert_parity(ours(tie_embeddings=tied), peer, converter(tied, use_bias=True))


@pytest.mark.parametrize("attention", ["explicit", "blockwise"])
def test_mistral_gives_the_same_logits_and_gradients(attention):
    """A sliding window of 100 over 512 tokens and two layers."""
    config = transformers.MistralConfig(**THEIRS, tie_word_embeddings=False, sliding_window=100)
    peer = peers.randomised(transformers.MistralForCausalLM(config))
    model = ours(attention, window=100, use_bias=False, tie_embeddings=False)
    peers.assert_parity(model, peer, converter())


def test_the_window_has_a_say():
    """The comparison with Mistral tells a window of 100 from 101 and from none."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, OURS["vocab_size"], (1, 128))
    config = transformers.MistralConfig(**THEIRS, tie_word_embeddings=False, sliding_window=100)
    peer = peers.randomised(transformers.MistralForCausalLM(config))
    params = {"params": converter()(peers.weights(peer))}
    theirs = peer(torch.as_tensor(tokens)).logits.detach().numpy()
    for window, same in ((100, True), (99, False), (101, False), (None, False)):
        model = ours(window=window, use_bias=False, tie_embeddings=False)
        logits = np.asarray(jax.jit(model.apply)(params, tokens))
        assert (abs(logits - theirs).max() < 1e-4) == same
