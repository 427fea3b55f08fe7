"""Generation and long-sequence attention at realistic sizes, with a user's XLA flags.

    python -m tests.decoding.real_sizes    # takes one to two minutes; `pytest -m slow` runs it too

The test suite compiles with its own XLA flags, and one of these flags once hid a miscompilation by
XLA:CPU (docs/hazards.md). Therefore this module runs in a separate process with default flags.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf
from jaxformer.functional import Causal, dot_product_attention, layer_norm
from jaxformer.models.parameters import init

WIDTH, VOCAB_SIZE, NEW = 512, 64, 4
CHECKED = 3  # batch elements per case that are compared with a batch of one

TRANSFORMER = jf.DecoderConfig(
    vocab_size=VOCAB_SIZE,
    max_length=8192 + NEW,
    num_layers=1,
    embed_dim=WIDTH,
    num_heads=8,
    mlp_dim=WIDTH,
    tie_embeddings=False,
)
CONFIGS = {
    "layer norm": TRANSFORMER,
    "rms norm, grouped heads": dataclasses.replace(
        TRANSFORMER, norm="rms", positions="rotary", num_kv_heads=2, activation="swiglu"
    ),
    "post-norm": dataclasses.replace(TRANSFORMER, norm_position="post", positions="sinusoidal"),
    "convolutional": jf.ConvolutionalConfig(
        VOCAB_SIZE, max_length=8192 + NEW, num_layers=1, embed_dim=WIDTH
    ),
}
PAIR = jf.EncoderDecoderConfig(
    vocab_size=VOCAB_SIZE,
    max_length=2048,
    num_layers=1,
    embed_dim=WIDTH,
    num_heads=8,
    num_kv_heads=1,
    mlp_dim=WIDTH,
)


def made(config):
    """Returns a model and enlarged weights, so that logits differ clearly."""
    model = jf.build(config)
    variables = init(model, jax.random.key(0))
    return model, jax.tree.map(lambda x: x if x.ndim == 1 else 3 * x, variables)


def ragged(rng, batch: int, longest: int, shortest: int = 1) -> list[list[int]]:
    """Draws `batch` token lists of random lengths; the first list has the length `longest`."""
    lengths = [longest, *rng.integers(shortest, longest + 1, batch - 1)]
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def same(what: str, found, alone, index: int) -> None:
    """Checks that a batch element has the tokens and log probabilities of a batch of size 1."""
    np.testing.assert_array_equal(
        found.tokens[index], alone.tokens[0], f"{what}, sequence {index}: tokens"
    )
    np.testing.assert_allclose(
        found.log_probs[index],
        alone.log_probs[0],
        0,
        2e-3,
        err_msg=f"{what}, sequence {index}: log_probs",
    )


def generated(name: str, batch: int, bucket: int) -> None:
    model, variables = made(CONFIGS[name])
    prompts = ragged(np.random.default_rng(batch), batch, bucket, 3 * bucket // 4 + 1)
    how = {"max_new_tokens": NEW, "sampler": jf.Sampler(temperature=0.0)}
    found = jf.generate(model, variables, prompts, **how)
    for index in np.unique(np.linspace(0, batch - 1, CHECKED, dtype=int)):
        if batch == 1:  # compare a batch of size 1 with a prefill in pieces
            alone = by_pieces(model, variables, prompts[0])
        else:
            alone = jf.generate(model, variables, [prompts[index]], **how)
        same(f"{name}, {batch} × {bucket}", found, alone, index)


def by_pieces(model, variables, prompt, piece: int = 64):
    """Generates greedily with `extend`, with a prefill of `piece` tokens per call."""
    cache = jf.init_cache(model, variables, 1, len(prompt) + NEW)
    for begin in range(0, len(prompt), piece):
        some = np.array([prompt[begin : begin + piece]])
        logits, cache = jf.extend(model, variables, some, cache)
    tokens, log_probs = [], []
    for _ in range(NEW):
        log_p = jax.nn.log_softmax(logits[0, -1])
        tokens.append(int(log_p.argmax()))
        log_probs.append(float(log_p.max()))
        logits, cache = jf.extend(model, variables, np.array([[tokens[-1]]]), cache)
    return jf.Generation(np.array([tokens]), np.array([NEW]), np.array([log_probs]), captured={})


def searched(batch: int, bucket: int, beam_width: int, source: tuple[int, int] | None) -> None:
    """Checks beam search over a batch, with optional sources, against batches of size 1."""
    config = PAIR if source else dataclasses.replace(CONFIGS["layer norm"], num_kv_heads=1)
    model, variables = made(config)
    rng = np.random.default_rng(batch)
    prompts = ragged(rng, batch, bucket)
    sources = ragged(rng, *source) if source else None
    how = {"max_new_tokens": NEW, "beam_width": beam_width}
    found = jf.beam_search(model, variables, prompts, source=sources, **how)
    for index in np.unique(np.linspace(0, batch - 1, CHECKED, dtype=int)):
        read = None if sources is None else [sources[index]]
        alone = jf.beam_search(model, variables, [prompts[index]], source=read, **how)
        what = f"beam {batch} × {bucket} × {beam_width}"
        np.testing.assert_allclose(
            found.scores[index],
            alone.scores[0],
            0,
            2e-3,
            err_msg=f"{what}, sequence {index}: scores",
        )


def attended(length: int) -> None:
    """Checks causal attention over one long sequence against float64 NumPy.

    The inputs come from a norm and projections for two heads. Only some positions are compared,
    outputs and gradients.
    """
    rng = np.random.default_rng(length)
    shapes = (length, 64), (3, 2, 64, 64), (2, length, 64)
    x, kernels, cotangent = (np.float32(rng.normal(size=shape)) for shape in shapes)

    @jax.jit
    def run(x, kernels, cotangent):
        inputs = jnp.einsum("ld,nhde->nhle", layer_norm(x, jnp.ones(64), jnp.zeros(64)), kernels)
        attend = partial(dot_product_attention, mask=Causal(), implementation="blockwise")
        output, pull_back = jax.vjp(attend, *inputs / 4)
        return inputs / 4, output, *pull_back(cotangent)

    inputs, *found = map(np.asarray, run(x, kernels, cotangent))
    normed = (x - x.mean(-1, keepdims=True, dtype=float)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    wanted = np.einsum("ld,nhde->nhle", normed, kernels, optimize=True) / 4
    np.testing.assert_allclose(inputs, wanted, 0, 1e-4, err_msg="norm and projections")
    some = np.unique(np.linspace(0, length - 1, 9, dtype=int))
    for head, given in enumerate(zip(*np.float64(inputs), cotangent, strict=True)):
        expected = causal_reference(*given, some)
        for name, one, other in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
            atol = 1e-4 * max(1.0, abs(other).max())
            np.testing.assert_allclose(one[head, some], other, 0, atol, err_msg=name)


def causal_reference(query, key, value, cotangent, some):
    """Computes output and gradients at the positions `some`, in blocks of 512 queries."""
    length, head_dim = query.shape
    output, d_query = np.zeros(value.shape), np.zeros(query.shape)
    d_key, d_value = np.zeros((len(some), head_dim)), np.zeros((len(some), head_dim))
    for start in range(0, length, 512):
        rows = np.arange(start, min(start + 512, length))
        scores = query[rows] @ key.T / np.sqrt(head_dim)
        scores[rows[:, None] < np.arange(length)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        output[rows] = weights @ value
        d_weights = cotangent[rows] @ value.T
        d_weights -= (output[rows] * cotangent[rows]).sum(axis=-1, keepdims=True)
        d_scores = weights * d_weights / np.sqrt(head_dim)
        d_query[rows] = d_scores @ key
        d_key += d_scores[:, some].T @ query[rows]
        d_value += weights[:, some].T @ cotangent[rows]
    return output[some], d_query[some], d_key, d_value


CASES = (
    partial(attended, 8192),
    partial(generated, "layer norm", 32, 128),
    partial(generated, "layer norm", 64, 128),
    partial(searched, 1024, 1, 4, None),  # 4,096 hypotheses with one prompt token each
    partial(generated, "layer norm", 128, 32),
    partial(generated, "rms norm, grouped heads", 32, 128),
    partial(generated, "post-norm", 32, 128),
    partial(generated, "convolutional", 32, 128),
    partial(generated, "layer norm", 1, 4096),
    partial(searched, 32, 128, 2, None),
    partial(searched, 64, 1, 2, (64, 128)),
)


def main() -> None:
    for case in CASES:
        case()
        print(case.func.__name__, *case.args, "passed", flush=True)


if __name__ == "__main__":
    main()
