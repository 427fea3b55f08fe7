"""Every view of a model whose kernels have a LoRA update or are quantized.

The reference is the same view of the arrays that these kernels represent.
"""

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.functional.linear.affine import dense_all, quantize_all
from jaxformer.functional.linear.low_rank import LowRankKernel, is_low_rank
from jaxformer.interpret import explain
from jaxformer.interpret.ablation import ablate_heads
from jaxformer.interpret.atlas import head_atlas
from jaxformer.interpret.attention import attention_maps
from jaxformer.interpret.attribution import attribute, input_gradients, state_norms
from jaxformer.interpret.circuits import evaluate_circuits
from jaxformer.interpret.edge_attribution import attribute_edges
from jaxformer.interpret.edges import patch_edges
from jaxformer.interpret.encoded_text import EncodedText
from jaxformer.interpret.graph import Edge, Node
from jaxformer.interpret.lens import jacobian_lens, logit_lens, train_tuned_lens
from jaxformer.interpret.page_data import dependency_data
from jaxformer.interpret.patching import LogitDifference
from jaxformer.interpret.sweep import patch_sweep
from jaxformer.interpret.texts import next_token_batch
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.lora import adapt
from jaxformer.verify import certify
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTH = 6
TOKENS, OTHERS = (tiny.tokens(seed, 2, LENGTH) for seed in (0, 1))
TEXT = EncodedText(TOKENS[0].tolist())
TARGET = np.array([3, 4])
METRIC = LogitDifference(TARGET, TARGET + 1)
EDGES = [Edge(Node("head", 0, 1), Node(name, 1, 0)) for name in ("query", "key", "value")]

VIEWS = {
    "lens": lambda *of: logit_lens(*of, TOKENS),
    "jacobian lens": lambda *of: jacobian_lens(*of, TOKENS),
    "tuned lens": lambda *of: train_tuned_lens(*of, [TOKENS]),
    "sweep": lambda *of: patch_sweep(*of, TOKENS, OTHERS, METRIC).effects,
    "edges": lambda *of: patch_edges(*of, TOKENS, OTHERS, METRIC, EDGES).effects,
    "edge attribution": lambda *of: attribute_edges(*of, TOKENS, OTHERS, METRIC).effects,
    "circuits": lambda *of: evaluate_circuits(*of, TOKENS, OTHERS, METRIC, [EDGES])[:2],
    "ablation": lambda model, variables: ablate_heads(
        model, variables, next_token_batch(model, TOKENS)
    ),
    "atlas": lambda *of: head_atlas(*of, TOKENS).effect,
    "attribution": lambda *of: attribute(*of, TOKENS, TARGET),
    "gradients": lambda *of: input_gradients(*of, TOKENS, TARGET),
    "state norms": lambda *of: state_norms(*of, TOKENS),
    "attention maps": lambda *of: attention_maps(*of, TEXT).weights,
    "dependencies": lambda *of: dependency_data(*of, TEXT)["matrix"],
}


def stored(model, kind: str):
    """Returns parameters of the model with kernels of one class, and the plain parameters."""
    params = tiny.weights(model, 0)["params"]
    if kind == "int8":
        return quantize_all(params), params
    adapted = adapt(jax.random.key(0), params, LoraConfig(lora_rank=2))
    updated = jax.tree.map(
        lambda x: LowRankKernel(x.frozen, x.down, x.up + 0.3, x.scale) if is_low_rank(x) else x,
        adapted,
        is_leaf=is_low_rank,
    )
    return updated, params


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LoRA", "int8"])
def test_lora_and_int8_kernels_give_the_logits_of_dense_weights(kind):
    model = tiny.build(kind=jf.DecoderConfig)
    params, plain = stored(model, kind)
    arrays = dense_all(params)
    assert jax.tree.map(np.shape, arrays) == jax.tree.map(np.shape, plain)
    found, wanted = (model.apply({"params": x}, TOKENS) for x in (arrays, params))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    assert np.abs(found - model.apply({"params": plain}, TOKENS)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LoRA", "int8"])
def test_quantized_kernels_include_the_lora_update(kind):
    """Quantizing again changes each number by at most one rounding."""
    params, _ = stored(tiny.build(kind=jf.DecoderConfig), kind)
    arrays = dense_all(params)
    again = dense_all(quantize_all(params))
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=np.ptp(y) / 200 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LoRA", "int8"])
@pytest.mark.parametrize("view", VIEWS)
def test_interpret_results_of_lora_and_int8_equal_those_of_dense_weights(view, kind):
    model = tiny.build(kind=jf.DecoderConfig, num_layers=2)
    params, _ = stored(model, kind)
    found, wanted = (VIEWS[view](model, {"params": x}) for x in (params, dense_all(params)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_certify_accepts_lora_weights_and_refuses_int8_weights():
    """Products of integers are rounded differently in passes of other sizes."""
    model = tiny.build(kind=jf.DecoderConfig, num_layers=2)
    assert all(found.holds for found in certify(model, {"params": stored(model, "LoRA")[0]}))
    with pytest.raises(ValueError, match=r"integer kernels.*before quantization"):
        next(certify(model, {"params": stored(model, "int8")[0]}))


CONFIGS = {
    "decoder": jf.DecoderConfig,
    "encoder": jf.EncoderConfig,
    "encoder-decoder": jf.EncoderDecoderConfig,
    "recurrent": jf.RecurrentConfig,
}


@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_slow(
        [(name, kind) for name in CONFIGS for kind in ("LoRA", "int8")], slow=[("decoder", "LoRA")]
    ),
)
def test_explain_page_of_lora_or_int8_model_equals_that_of_dense_weights(name, kind):
    model = tiny.build(kind=CONFIGS[name])
    params, _ = stored(model, kind)
    target = [1, 2, 3] if model.config.reads_source else None
    found, wanted = (
        explain(model, {"params": x}, [3, 4, 5, 6], target=target)
        for x in (params, dense_all(params))
    )
    assert found == wanted and found.reason == (None if name == "decoder" else wanted.reason)
