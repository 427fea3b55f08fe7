"""Figures that other projects published, to compare with."""

from typing import NamedTuple

from jaxformer.bench.measurement import DECODING, TRAINING


class Anchor(NamedTuple):
    """Figure that a project published for a part of the measurement.

    "of peak" is the share of the published operations per second. Projects count operations in
    different ways.
    """

    part: str
    model: str
    device: str
    figure: str
    source: str


ANCHORS = (
    Anchor(TRAINING, "GPT-2 124M", "1 H100", "468,000 tokens/s, 40% of peak", "llm.c"),
    Anchor(TRAINING, "GPT-2 124M", "8 A100", "107,000 tokens/s per GPU, 29%", "nanoGPT"),
    Anchor(TRAINING, "GPT-2 350M", "1 A100", "62% of peak", "llm.c"),
    Anchor(TRAINING, "nanochat d12, d18", "H100", "41%, about 46% of peak", "nanochat"),
    Anchor(
        TRAINING,
        "1.3B",
        "1 H100",
        "60,178 tokens/s, 56.4% of peak",
        "jax-linear-attention 0.1.0, average causal context",
    ),
    Anchor(TRAINING, "GPT-2 1.5B", "1 H100", "48.7% of peak", "llm.c"),
    Anchor(TRAINING, "Llama 2 7B", "8 H100", "50–54% of peak", "JAX-Toolbox"),
    Anchor(TRAINING, "8B", "8 H100", "33–39% of peak", "torchtitan"),
    Anchor(TRAINING, "8B; 70B", "TPU v6e", "45.5%; 50.3% of peak", "MaxText"),
    Anchor(TRAINING, "32B; 70B", "TPU v5p", "71.5%; 65.4% of peak", "MaxText"),
    Anchor(TRAINING, "70B", "H200", "51% of peak", "MaxText"),
    Anchor(DECODING, "7B, batch 1", "1 A100", "104.9 tokens/s, 69% of bandwidth", "gpt-fast"),
    Anchor(DECODING, "70B, batch 8", "16 TPU v5e", "85% of bandwidth", "jax-llm-examples"),
)
