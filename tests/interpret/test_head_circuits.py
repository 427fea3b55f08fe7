"""Circuits equal products of full matrices in float64, and predict the model's outputs."""

from dataclasses import replace
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.linear.affine import dense_all, quantize_all
from jaxformer.interpret import (
    attribute,
    composition_scores,
    copying_scores,
    head_weights,
    token_circuits,
)
from tests.errors import error_of
from tests.properties import oracle, tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, *(tiny.SIZES[x] for x in ("num_heads", "num_kv_heads")), 4
DIM = tiny.SIZES["embed_dim"]

MODELS = {
    "rotary": {"positions": "rotary", "norm": "rms", "query_key_norm": "head"},
    "layer-norm": {"output_scale": 0.5},
    "sandwich": {"norm": "rms_one_plus", "norm_position": "sandwich", "scale_embeddings": True},
    "output-norm": {"norm_position": "post_sublayer", "query_key_norm": "all"},
    "parallel": {"parallel_block": "separate_norms", "tie_embeddings": False},
    "shared-norm": {"parallel_block": "shared_norm", "embedding_norm": True},
    "encoder-decoder": {"kind": jf.EncoderDecoderConfig, "norm": "none"},
    "encoder": {"kind": jf.EncoderConfig, "positions": "rotary", "transform": False},
}


def built(name):
    options = {"num_layers": LAYERS, **MODELS[name]}
    return tiny.build(**options)


def sign_of(model):
    """Returns the sign of the distances to test; a negative distance is that to a later key."""
    return (-1 if model.config.bidirectional else 1) * (model.config.positions == "rotary")


def norm_matrix(config, weights):
    """Returns the matrix L of a norm with scale 1, for which the norm of x is x L."""
    if config.norm == "none":
        return np.eye(DIM)
    size = len(weights["scale"])
    if config.norm == "layer":
        return (np.eye(size) - 1 / size) @ np.diag(weights["scale"])
    return np.diag(weights["scale"] + (config.norm == "rms_one_plus"))


def rotation(distance):
    """Returns the matrix that rotates pair (i, i + d/2) by distance · 10000^(−2i/d)."""
    matrix, half = np.zeros((HEAD_DIM, HEAD_DIM)), HEAD_DIM // 2
    for i in range(half):
        angle = distance * 10_000.0 ** (-2 * i / HEAD_DIM)
        matrix[i, i] = matrix[i + half, i + half] = np.cos(angle)
        matrix[i, i + half], matrix[i + half, i] = np.sin(angle), -np.sin(angle)
    return matrix


def full_circuits(model, variables, distance):
    """Returns (OV, QK); OV[layer][head] and QK[layer][head] are matrices [dim, dim]."""
    params, config = oracle.float64(variables["params"]), model.config
    ov, qk = [], []
    for layer in range(LAYERS):
        block = jax.tree.map(itemgetter(layer), params["blocks"])
        own = {name: block["attention"][name]["kernel"] for name in ("query", "key", "value")}
        output = block["attention"]["output"]["kernel"]
        norm = norm_matrix(config, block.get("attention_norm"))
        if config.norm_position == "post_sublayer":
            output = output @ norm
        else:
            own = {name: norm @ kernel for name, kernel in own.items()}
        if config.norm_position == "sandwich":
            output = output @ norm_matrix(config, block["attention_output_norm"])
        for name in ("query", "key"):
            if config.query_key_norm == "all":
                own[name] = own[name] @ norm_matrix(config, block["attention"][f"{name}_norm"])
        ov.append([])
        qk.append([])
        for head in range(HEADS):
            mine = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            first = head // (HEADS // KV_HEADS) * HEAD_DIM
            shared = slice(first, first + HEAD_DIM)
            query, key = own["query"][:, mine], own["key"][:, shared]
            if config.query_key_norm == "head":
                query = query @ norm_matrix(config, block["attention"]["query_norm"])
                key = key @ norm_matrix(config, block["attention"]["key_norm"])
            if config.positions == "rotary":
                query = query @ rotation(distance)
            ov[-1].append(own["value"][:, shared] @ output[mine])
            qk[-1].append(query @ key.T)
    return ov, qk


def token_matrices(model, variables):
    """Returns (W_E, W_U) in float64."""
    params, config = oracle.float64(variables["params"]), model.config
    tokens = params["embedding"]["tokens"]
    kernel = tokens.T if config.tie_embeddings else params["head"]["kernel"]
    kernel = norm_matrix(config, params.get("final_norm")) @ kernel
    if config.scale_embeddings:
        tokens = tokens * np.sqrt(DIM)
    if config.embedding_norm:
        tokens = oracle.layer_norm(tokens, **params["embedding_norm"])
    return tokens, kernel * (config.output_scale or 1.0)


@pytest.mark.parametrize("name", mostly_slow(MODELS, "rotary", slow=("layer-norm", "output-norm")))
@settings(max_examples=3)
@given(seed=tiny.seeds, distance=st.integers(1, 9))
def test_composition_scores_equal_norms_of_products_of_full_matrices(name, seed, distance):
    model = built(name)
    distance = sign_of(model) * distance
    variables = tiny.weights(model, seed)
    found = composition_scores(model, variables, distance)
    ov, qk = full_circuits(model, variables, distance)
    for earlier, head, later, other in np.ndindex(found.query.shape):
        first, ov2, qk2 = ov[earlier][head], ov[later][other], qk[later][other]
        for part, second in (("query", qk2), ("key", qk2.T), ("value", ov2)):
            ratio = np.linalg.norm(first @ second)
            ratio /= np.linalg.norm(first) * np.linalg.norm(second)
            wanted = ratio if later > earlier else 0.0
            actual = getattr(found, part)[earlier, head, later, other]
            assert actual == pytest.approx(wanted, abs=1e-5), (part, earlier, head, later, other)


@pytest.mark.parametrize(
    "name", mostly_slow(MODELS, "layer-norm", slow=("sandwich", "shared-norm"))
)
@settings(max_examples=5)
@given(seed=tiny.seeds)
def test_copying_scores_equal_eigenvalues_of_the_full_ov_circuit(name, seed):
    model = built(name)
    variables = tiny.weights(model, seed)
    found = copying_scores(model, variables)
    ov, _ = full_circuits(model, variables, 0)
    tokens, kernel = token_matrices(model, variables)
    for layer, head in np.ndindex(found.shape):
        values = np.linalg.eigvals(tokens @ ov[layer][head] @ kernel)
        assert found[layer, head] == pytest.approx(values.sum().real / abs(values).sum(), abs=2e-4)


@pytest.mark.parametrize("name", mostly_slow(MODELS, "rotary", slow=("sandwich", "shared-norm")))
@settings(max_examples=5)
@given(seed=tiny.seeds, ids=st.lists(st.integers(0, 12), min_size=3, max_size=3))
def test_token_circuits_equal_products_of_the_full_ov_and_qk_matrices(name, seed, ids):
    model = built(name)
    variables = tiny.weights(model, seed)
    distance = 3 * sign_of(model)
    found = token_circuits(model, variables, ids, distance)
    ov, qk = full_circuits(model, variables, distance)
    tokens, kernel = token_matrices(model, variables)
    tokens, kernel = tokens[ids], kernel[:, ids]
    tiny.close(found.ov, np.array([[tokens @ x @ kernel for x in layer] for layer in ov]))
    scores = np.array([[tokens @ x @ tokens.T for x in layer] for layer in qk])
    tiny.close(found.qk, scores / np.sqrt(HEAD_DIM))


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=tiny.seeds)
def test_token_circuits_predict_attention_and_logits_of_a_model_without_norms(seed):
    """log w_ij − log w_ii is a difference of scores; a head contributes Σ_j w_ij OV_j."""
    model = tiny.build(num_layers=1, norm="none", positions="rotary", use_bias=False)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 1, 6)
    last, target = tokens.shape[1] - 1, 5
    weights = jf.inspect(model, variables, tokens, capture=("attention.weights",)).captured
    weights = np.asarray(weights["attention.weights"][0, 0, :, last], np.float64)
    ids = [*tokens[0], target]
    scores = [token_circuits(model, variables, ids, last - j).qk[0, :, last, j] for j in range(6)]
    scores = np.array(scores).T
    tiny.close(np.log(weights / weights[:, -1:]), scores - scores[:, -1:], 1e-4)
    found = attribute(model, variables, tokens, np.array([target]))
    ov = np.asarray(token_circuits(model, variables, ids).ov, np.float64)[0, :, :6, -1]
    tiny.close(found.heads[0, 0], (weights * ov).sum(-1), 1e-4)


@pytest.mark.slow
def test_composition_scores_do_not_depend_on_the_order_of_sublayers_that_share_a_norm():
    model = built("shared-norm")
    variables, layers = tiny.weights(model, 0), model.architecture.stack.layers
    swapped = [(replace(part, sublayers=part.sublayers[::-1]),) for (part,) in layers]
    blocks = dict(variables["params"]["blocks"])
    blocks["feedforward_norm"] = blocks.pop("attention_norm")
    renamed = {"params": {**variables["params"], "blocks": blocks}}
    found = composition_scores(jf.Decoder(model.config, layers=tuple(swapped)), renamed)
    tiny.all_close(found, composition_scores(model, variables))


@pytest.mark.slow
def test_circuits_of_quantized_weights_are_those_of_the_dense_weights():
    model = built("layer-norm")
    quantized = quantize_all(tiny.weights(model, 0)["params"])
    pair = [{"params": x} for x in (quantized, dense_all(quantized))]
    for function in (head_weights, composition_scores, copying_scores):
        tiny.all_close(*(function(model, variables) for variables in pair))


def test_a_head_of_zero_weights_has_score_zero():
    model = built("layer-norm")
    variables = jax.tree.map(jnp.zeros_like, tiny.weights(model, 0))
    for scores in composition_scores(model, variables):
        np.testing.assert_array_equal(scores, np.zeros((LAYERS, HEADS) * 2))
    np.testing.assert_array_equal(copying_scores(model, variables), np.zeros((LAYERS, HEADS)))


def test_circuits_refuse_models_whose_heads_are_not_linear():
    def message_of(function=composition_scores, arguments=(), **options):
        model = tiny.build(**options)
        return error_of(function, model, tiny.weights(model, 0), *arguments)

    assert "layer 0 of the model has norm_position 'post'" in message_of(norm_position="post")
    assert "has no residual connection" in message_of(residual=False)
    assert "has attention_gate" in message_of(attention_gate=True)
    assert "has the norm DynamicTanh" in message_of(norm="dynamic_tanh")
    assert "distance is 2; it must be 0" in message_of(arguments=(2,))
    assert "distance is -1; it must be" in message_of(arguments=(-1,), positions="rotary")
    assert "without 'attention' heads" in message_of(kind=jf.RecurrentConfig)
    bert = {"kind": jf.EncoderConfig, "transform": True}
    assert "BERT's transform" in message_of(copying_scores, **bert)
    layers = built("layer-norm").architecture.stack.layers
    config = replace(built("layer-norm").config, norm="dynamic_tanh")
    mixed = jf.Decoder(config, layers=layers)
    assert "has the norm DynamicTanh before the head" in error_of(
        copying_scores, mixed, tiny.weights(mixed, 0)
    )
    assert "they must be ids from 0 to 12" in message_of(token_circuits, ([13],))
    assert "they must be int [tokens]" in message_of(token_circuits, ([[1]],))
