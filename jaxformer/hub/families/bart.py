"""BART (Lewis et al. 2020), Marian (Junczys-Dowmunt et al. 2018) and PEGASUS (Zhang et al. 2020).

BART and Marian are post-norm encoder-decoders whose logits have a bias. PEGASUS is pre-norm and has
sinusoidal positions.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from jaxformer.hub.checkpoint_format import CheckpointFormat, Constant, Field, required
from jaxformer.hub.families.gpt2 import ACTIVATIONS
from jaxformer.hub.table import table
from jaxformer.models.config import EncoderDecoderConfig

STACK = """
    OURSembedding/positions         model.STACK.embed_positions.weight
    OURSembedding_norm              model.STACK.layernorm_embedding
    OURSblocks/attention/query      model.STACK.layers.*.self_attn.q_proj
    OURSblocks/attention/key        model.STACK.layers.*.self_attn.k_proj
    OURSblocks/attention/value      model.STACK.layers.*.self_attn.v_proj
    OURSblocks/attention/output     model.STACK.layers.*.self_attn.out_proj
    OURSblocks/attention_norm       model.STACK.layers.*.self_attn_layer_norm
    OURSblocks/feedforward/up       model.STACK.layers.*.fc1
    OURSblocks/feedforward/down     model.STACK.layers.*.fc2
    OURSblocks/feedforward_norm     model.STACK.layers.*.final_layer_norm
"""
ROWS = (
    *table(STACK, OURS="encoder/", STACK="encoder"),
    *table(STACK, OURS="", STACK="decoder"),
    *table("""
    embedding/tokens                model.shared.weight
    blocks/cross_attention/query    model.decoder.layers.*.encoder_attn.q_proj
    blocks/cross_attention/key      model.decoder.layers.*.encoder_attn.k_proj
    blocks/cross_attention/value    model.decoder.layers.*.encoder_attn.v_proj
    blocks/cross_attention/output   model.decoder.layers.*.encoder_attn.out_proj
    blocks/cross_attention_norm     model.decoder.layers.*.encoder_attn_layer_norm
    head/bias                       final_logits_bias one-row
"""),
)


SIZES = {
    **required(vocab_size="vocab_size", d_model="embed_dim", encoder_layers="num_encoder_layers"),
    **required(decoder_layers="num_layers"),
    "max_position_embeddings": Field("max_length", 1024),
    "scale_embedding": Field("scale_embeddings", False),
    **required(encoder_attention_heads="num_encoder_heads", decoder_attention_heads="num_heads"),
    **required(encoder_ffn_dim="encoder_mlp_dim", decoder_ffn_dim="mlp_dim"),
    "activation_function": Field("activation", "gelu", ACTIVATIONS),
}
FIXED = {"norm_position": "post", "share_embeddings": True, "head_bias": True}
DEMANDED = {"tie_word_embeddings": True, "is_decoder": False}
REPEATED = {"num_hidden_layers": "encoder_layers"}
BART = CheckpointFormat(
    "bart",
    EncoderDecoderConfig,
    {"BartForConditionalGeneration": {"head_bias": True}, "BartModel": {"head_bias": False}},
    SIZES,
    lambda config: ROWS,
    base="model.",
    repeated=REPEATED,
    fixed=FIXED | {"positions": "learned", "position_offset": 2, "embedding_norm": True},
    demanded=DEMANDED,
    generation={"forced_eos_token_id": 2},
    not_implemented=(),
)


def sinusoids(shape: tuple[int, int]) -> np.ndarray:
    """Returns the table of sinusoids [length, dim]."""
    length, dim = shape
    frequencies = 10_000.0 ** (-2 * np.arange(dim // 2) / dim)
    # The angles are float64, as in transformers.
    angles = np.arange(length)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def positions(config: EncoderDecoderConfig, is_saved: bool = True) -> dict[str, Constant]:
    """Returns the sinusoid tables, which transformers computes and does not train."""
    table = Constant((config.max_length, config.embed_dim), sinusoids, is_saved)
    return {f"model.{stack}.embed_positions.weight": table for stack in ("encoder", "decoder")}


MARIAN = replace(
    BART,
    model_type="marian",
    architectures={"MarianMTModel": {}},
    base="",
    repeated=REPEATED | {"decoder_vocab_size": "vocab_size"},
    fixed=FIXED | {"positions": "sinusoidal_halves"},
    demanded=DEMANDED | {"share_encoder_decoder_embeddings": True},
    constants=partial(positions, is_saved=False),
    ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    generation={"forced_eos_token_id": 0},
)


FINAL_NORMS = table("""
    encoder/final_norm              model.encoder.layer_norm
    final_norm                      model.decoder.layer_norm
""")


PEGASUS = replace(
    BART,
    model_type="pegasus",
    architectures={
        "PegasusForConditionalGeneration": {"head_bias": True},
        "PegasusModel": {"head_bias": False},
    },
    rows=lambda config: ROWS + FINAL_NORMS,
    fixed={"norm_position": "pre", "positions": "sinusoidal_halves", "share_embeddings": True},
    constants=positions,
    ignored=(r"model\.(encoder|decoder)\.embed_positions\.weight",),
    generation={"forced_eos_token_id": 1},
)
FAMILIES = (BART, MARIAN, PEGASUS)
