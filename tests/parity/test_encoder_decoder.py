"""BERT, Marian and BART give the vectors and logits of transformers, with padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from tests.parity import peers  # noqa: E402

BATCH, LENGTH, SOURCE, DIM, HEADS, MLP, VOCAB = 3, 17, 23, 48, 4, 80, 61
SIZES = {"embed_dim": DIM, "num_heads": HEADS, "mlp_dim": MLP, "num_layers": 2}
PARTS = ("query", "key", "value", "output")
SOURCE_REAL, REAL = peers.padded(SOURCE, 23, 11, 1), peers.padded(LENGTH, 9, 17, 2)


def tokens(seed, *shape):
    return np.random.default_rng(seed).integers(3, VOCAB, shape)


def bert_params(take):
    """Converts BERT's parameters. All tokens have type 0: its vector is added to the positions."""

    def layer(number):
        at = f"bert.encoder.layer.{number}"
        heads = {part: peers.linear(take, f"{at}.attention.self.{part}") for part in PARTS[:3]}
        return {
            "attention": {**heads, "output": peers.linear(take, f"{at}.attention.output.dense")},
            "attention_norm": peers.norm(take, f"{at}.attention.output.LayerNorm"),
            "feedforward": {
                "up": peers.linear(take, f"{at}.intermediate.dense"),
                "down": peers.linear(take, f"{at}.output.dense"),
            },
            "feedforward_norm": peers.norm(take, f"{at}.output.LayerNorm"),
        }

    at = "bert.embeddings"
    types = take(f"{at}.token_type_embeddings.weight")[0]
    return {
        "embedding": {
            "tokens": take(f"{at}.word_embeddings.weight"),
            "positions": take(f"{at}.position_embeddings.weight") + types,
        },
        "embedding_norm": peers.norm(take, f"{at}.LayerNorm"),
        "blocks": peers.stacked([layer(number) for number in range(2)]),
        "transform": peers.linear(take, "cls.predictions.transform.dense"),
        "transform_norm": peers.norm(take, "cls.predictions.transform.LayerNorm"),
        "head": {"bias": take("cls.predictions.bias")},
    }


@pytest.mark.parametrize("attention", ["explicit", "blockwise"])
def test_bert_logits_and_hidden_states_and_pooled_vectors_equal_transformers(attention):
    """Post-norm, embedding norm, erf GELU, pooler and masked-token head, with padding."""
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=MLP,
        max_position_embeddings=32,
    )
    masked = peers.randomised(transformers.BertForMaskedLM(config))
    pooling = peers.randomised(transformers.BertModel(config))
    pooling.load_state_dict(masked.bert.state_dict(), strict=False)
    params = bert_params(peers.weights(masked))
    params["pooler"] = peers.linear(peers.weights(pooling), "pooler.dense")
    model = jf.Encoder(
        jf.EncoderConfig(
            **SIZES,
            vocab_size=VOCAB,
            max_length=32,
            activation="gelu",
            norm_position="post",
            norm_epsilon=1e-12,
            embedding_norm=True,
            head_bias=True,
        ),
        jf.Execution(attention=attention),
    )
    ids = tokens(0, BATCH, SOURCE)
    given = (torch.as_tensor(ids), torch.as_tensor(SOURCE_REAL))
    variables, segment_ids = {"params": jax.tree.map(jnp.asarray, params)}, jnp.asarray(SOURCE_REAL)

    def ours(method):
        return jax.jit(lambda ids: model.apply(variables, ids, segment_ids, method=method))(ids)

    peers.same(ours(None), masked(*given).logits, SOURCE_REAL)
    theirs = pooling(*given)
    peers.same(ours("encode"), theirs.last_hidden_state, SOURCE_REAL)
    peers.same(ours("pooled"), theirs.pooler_output, np.ones(BATCH))


def bart_params(take, offset, embedding_norm):
    """Converts the parameters of Marian or BART. BART's position table starts at row 2."""

    def attention(at):
        parts = [peers.linear(take, f"{at}.{part}_proj") for part in ("q", "k", "v", "out")]
        return dict(zip(PARTS, parts, strict=True))

    def layer(at, crosses):
        weights = {
            "attention": attention(f"{at}.self_attn"),
            "attention_norm": peers.norm(take, f"{at}.self_attn_layer_norm"),
            "feedforward": {
                "up": peers.linear(take, f"{at}.fc1"),
                "down": peers.linear(take, f"{at}.fc2"),
            },
            "feedforward_norm": peers.norm(take, f"{at}.final_layer_norm"),
        }
        if crosses:
            weights["cross_attention"] = attention(f"{at}.encoder_attn")
            weights["cross_attention_norm"] = peers.norm(take, f"{at}.encoder_attn_layer_norm")
        return weights

    def stack(side, number, crosses):
        at = f"model.{side}"
        layers = [layer(f"{at}.layers.{i}", crosses) for i in range(number)]
        weights = {
            "embedding": {"positions": take(f"{at}.embed_positions.weight")[offset:]},
            "blocks": peers.stacked(layers),
        }
        if embedding_norm:
            weights["embedding_norm"] = peers.norm(take, f"{at}.layernorm_embedding")
        return weights

    decoder = stack("decoder", 2, True)
    decoder["embedding"]["tokens"] = take("model.shared.weight")
    bias = {"bias": take("final_logits_bias")[0]}
    return {**decoder, "encoder": stack("encoder", 3, False), "head": bias}


PEERS = {
    "marian": (transformers.MarianConfig, transformers.MarianMTModel, 0, False),
    "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration, 2, True),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("attention", ["explicit", "blockwise"])
def test_marian_and_bart_logits_equal_those_of_transformers(name, attention):
    """Three encoder and two decoder layers, post-norm, with shared embeddings.

    Marian scales the embeddings and BART normalizes them. Both sides have padding, and one pass and
    cached chunks are compared.
    """
    config_of, model_of, offset, embedding_norm = PEERS[name]
    config = config_of(
        vocab_size=VOCAB,
        d_model=DIM,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=MLP,
        decoder_ffn_dim=MLP,
        activation_function="silu" if name == "marian" else "gelu",
        scale_embedding=name == "marian",
        max_position_embeddings=32,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    peer = peers.randomised(model_of(config))
    peer.final_logits_bias.copy_(torch.as_tensor(peers.normal(3, 1, VOCAB)))
    source, target = tokens(0, BATCH, SOURCE), tokens(1, BATCH, LENGTH)
    theirs = peer(
        input_ids=torch.as_tensor(source),
        attention_mask=torch.as_tensor(SOURCE_REAL),
        decoder_input_ids=torch.as_tensor(target),
        decoder_attention_mask=torch.as_tensor(REAL),
    ).logits
    model = jf.EncoderDecoder(
        jf.EncoderDecoderConfig(
            **SIZES,
            vocab_size=VOCAB,
            max_length=32,
            num_encoder_layers=3,
            activation="silu" if name == "marian" else "gelu",
            norm_position="post",
            embedding_norm=embedding_norm,
            scale_embeddings=name == "marian",
            head_bias=True,
        ),
        jf.Execution(attention=attention),
    )
    variables = {"params": bart_params(peers.weights(peer), offset, embedding_norm)}
    read = {"source": source, "source_segment_ids": SOURCE_REAL}
    ours = jax.jit(model.apply)(variables, target, segment_ids=REAL, **read)
    peers.same(ours, theirs, REAL)

    sequences = [sequence[real != 0] for sequence, real in zip(source, SOURCE_REAL, strict=True)]
    cache, pieces = jf.init_cache(model, variables, BATCH, LENGTH, sequences), []
    for begin, end in ((0, 8), (8, LENGTH)):
        segment_ids = jnp.asarray(REAL[:, begin:end])
        logits, cache = jf.extend(model, variables, target[:, begin:end], cache, segment_ids)
        pieces.append(logits)
    peers.same(np.concatenate(pieces, axis=1), theirs, REAL)
