"""The tools of `interpret` agree with TransformerLens on a tiny GPT-2 with random weights."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.interpret import (
    Edge,
    InterchangeSite,
    LogitDifference,
    Node,
    attribute,
    attribute_edges,
    attribute_neurons,
    attribution_sweep,
    composition_scores,
    evaluate_circuits,
    interchange_patch,
    model_edges,
    patch_edges,
    patch_sweep,
)
from tests.properties import tiny

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
lens = pytest.importorskip("transformer_lens", reason="TransformerLens is not installed")
analysis = pytest.importorskip("transformer_lens.tools.analysis")
patching = pytest.importorskip("transformer_lens.patching")

LENGTH, RIGHT, WRONG = 10, 3, 5
METRIC = LogitDifference(RIGHT, WRONG)
# Hook points of jaxformer inside layers, and the names of TransformerLens after "blocks.LAYER.".
POINTS = {
    "block.input": "hook_resid_pre",
    "attention_norm.divisor": "ln1.hook_scale",
    "attention.query": "attn.hook_q",
    "attention.key": "attn.hook_k",
    "attention.value": "attn.hook_v",
    "attention.scores": "attn.hook_attn_scores",
    "attention.weights": "attn.hook_pattern",
    "attention.heads": "attn.hook_z",
    "attention.output": "hook_attn_out",
    "block.middle": "hook_resid_mid",
    "feedforward_norm.divisor": "ln2.hook_scale",
    "feedforward.hidden": "mlp.hook_post",
    "feedforward.output": "hook_mlp_out",
    "block.output": "hook_resid_post",
}
# In TransformerLens, the axis of heads comes after the axis of tokens.
HEADS_LAST = ("attention.query", "attention.key", "attention.value", "attention.heads")


class Pair(NamedTuple):
    """One model in both libraries, and a clean and a corrupted text."""

    model: jf.Decoder
    variables: dict
    bridge: object
    clean: np.ndarray
    corrupted: np.ndarray
    folder: Path


def booted(folder):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    boot = lens.TransformerBridge.boot_transformers
    return boot(str(folder), hf_model=theirs, tokenizer=None, device="cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model = tiny.build(num_layers=3, num_kv_heads=4, head_dim=2, activation="gelu_tanh")
    variables = tiny.weights(model, 0)
    folder = tmp_path_factory.mktemp("tiny") / "gpt2"
    jf.export(folder, model, variables)
    bridge = booted(folder)
    clean = tiny.tokens(1, 1, LENGTH)
    corrupted = clean.copy()
    corrupted[0, [1, 4]] = (clean[0, [1, 4]] + 1) % model.config.vocab_size
    return Pair(model, variables, bridge, clean, corrupted, folder)


def as_ids(tokens):
    return torch.tensor(tokens, dtype=torch.long)


def their_metric(logits):
    return logits[0, -1, RIGHT] - logits[0, -1, WRONG]


def arguments(pair):
    return pair.model, pair.variables, pair.clean, pair.corrupted, METRIC


def test_values_at_hook_points_equal_those_of_transformer_lens(pair):
    logits, cache = pair.bridge.run_with_cache(as_ids(pair.clean))
    capture = (*POINTS, "embedding", "final_norm.divisor", "final_norm")
    seen = jf.inspect(pair.model, pair.variables, pair.clean, capture=capture)
    tiny.close(seen.logits, logits.detach())
    for point, name in POINTS.items():
        theirs = np.stack([cache[f"blocks.{n}.{name}"].detach() for n in range(3)])
        if point in HEADS_LAST:
            theirs = theirs.swapaxes(2, 3)
        # In TransformerLens, masked scores are the smallest float32 number.
        theirs = np.where(theirs == np.finfo(np.float32).min, -np.inf, theirs)
        tiny.close(seen.captured[point], theirs)
    tiny.close(seen.captured["final_norm.divisor"], cache["ln_final.hook_scale"].detach())
    tiny.close(seen.captured["final_norm"], cache["ln_final.hook_out"].detach())


@pytest.mark.parametrize("point", ["attention.heads", "block.input", "feedforward.output"])
def test_activation_patching_effects_equal_those_of_transformer_lens(pair, point):
    theirs = {
        "attention.heads": patching.get_act_patch_attn_head_out_by_pos,
        "block.input": patching.get_act_patch_resid_pre,
        "feedforward.output": patching.get_act_patch_mlp_out,
    }[point]
    _, cache = pair.bridge.run_with_cache(as_ids(pair.clean))
    with torch.no_grad():
        found = theirs(pair.bridge, as_ids(pair.corrupted), cache, their_metric)
    found = np.asarray(found.detach())  # [layers, positions] or [layers, positions, heads]
    found = found.swapaxes(1, 2) if found.ndim == 3 else found
    sweep = patch_sweep(*arguments(pair), point)
    tiny.close(sweep.corrupted + sweep.effects, found)


def node_of(node):
    """Returns jaxformer's node for a node of TransformerLens, without its position."""
    names = {"embed": "embedding", "attn_head_out": "head", "mlp_out": "feedforward"}
    names |= {"q_input": "query", "k_input": "key", "v_input": "value", "mlp_in": "feedforward"}
    layer = None if node.kind in ("embed", "logits") else node.layer
    return Node(names.get(node.kind, node.kind), layer, node.head)


def their_attribution(pair, granularity):
    config = analysis.EdgeAttributionConfig(granularity=granularity)
    texts = map(as_ids, (pair.clean, pair.corrupted))
    return analysis.attribution_patch(pair.bridge, *texts, their_metric, config)


def test_attributions_of_heads_and_feedforward_layers_equal_those_of_transformer_lens(pair):
    theirs = their_attribution(pair, "node").node_scores
    heads = attribution_sweep(*arguments(pair), "attention.heads").effects
    hidden = attribution_sweep(*arguments(pair), "feedforward.output").effects
    compared = 0
    for node, score in theirs.items():
        if node.kind == "attn_head_out":
            tiny.close(heads[node.layer, node.head, node.position], score)
        elif node.kind == "mlp_out":
            tiny.close(hidden[node.layer, node.position], score)
        compared += node.kind != "embed"
    assert compared == heads.size + hidden.size


def test_edge_attributions_equal_those_of_transformer_lens(pair):
    """TransformerLens scores an edge at each position. jaxformer returns the sum of the scores."""
    theirs = {}
    for (sender, receiver), score in their_attribution(pair, "edge").edge_scores.items():
        edge = Edge(node_of(sender), node_of(receiver))
        theirs[edge] = theirs.get(edge, 0.0) + score
    found = attribute_edges(*arguments(pair))
    assert set(theirs) == set(found.edges) == set(model_edges(pair.model))
    tiny.close(found.effects, [theirs[edge] for edge in found.edges])


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_effects_of_patching_direct_paths_equal_those_of_transformer_lens(pair, name):
    caches = [pair.bridge.run_with_cache(as_ids(x))[1] for x in (pair.clean, pair.corrupted)]
    with torch.no_grad():
        found = patching.get_act_patch_direct_path(
            pair.bridge, as_ids(pair.corrupted), *caches, their_metric, 0, 1, name[0], verbose=False
        )
    sender = Node("head", 0, 1)
    edges = [Edge(sender, Node(name, layer, head)) for layer in (1, 2) for head in range(4)]
    ours = patch_edges(*arguments(pair), edges)
    tiny.close(ours.corrupted + ours.effects, found[1:].reshape(-1))


@pytest.mark.parametrize("count", [0, 12, 60])
def test_faithfulness_of_circuits_equals_that_of_transformer_lens(pair, count):
    """TransformerLens has one edge for each position, from and to nodes at this position.

    The circuit contains an edge at all positions.
    """
    chosen = set(attribute_edges(*arguments(pair)).strongest(count))
    theirs = their_attribution(pair, "edge").edge_scores
    kept = [pair_ for pair_ in theirs if Edge(*map(node_of, pair_)) in chosen]
    texts = map(as_ids, (pair.clean, pair.corrupted))
    found = analysis.faithfulness(pair.bridge, *texts, their_metric, kept)
    ours = evaluate_circuits(*arguments(pair), [chosen])
    tiny.close(ours.faithfulness, [found.recovered], 1e-4)
    assert len(kept) == count * LENGTH


@pytest.fixture(scope="module")
def folded(pair):
    """Returns TransformerLens' model with the norms folded into the weights that read them."""
    bridge = booted(pair.folder)
    bridge.enable_compatibility_mode(
        disable_warnings=True,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    return bridge


def test_composition_scores_of_heads_equal_those_of_transformer_lens(pair, folded):
    found = composition_scores(pair.model, pair.variables)
    for name in ("query", "key", "value"):
        theirs = folded.all_composition_scores(name[0].upper()).scores.detach()
        tiny.close(getattr(found, name), theirs)


def test_attributions_of_a_logit_to_heads_and_units_equal_those_of_transformer_lens(pair, folded):
    """TransformerLens' contributions exclude the biases of the final norm and of the head."""
    logits, cache = folded.run_with_cache(as_ids(pair.clean))
    tiny.close(logits.detach(), pair.model.apply(pair.variables, pair.clean))
    direction = folded.W_U[:, RIGHT]
    target = np.array([RIGHT])
    heads = cache.stack_head_results(layer=-1, pos_slice=-1, apply_ln=True) @ direction
    found = attribute(pair.model, pair.variables, pair.clean, target)
    tiny.close(found.heads.reshape(-1), heads[:, 0].detach())
    units = cache.stack_neuron_results(layer=-1, pos_slice=-1, apply_ln=True) @ direction
    neurons = attribute_neurons(pair.model, pair.variables, pair.clean, target)
    tiny.close(neurons.units.reshape(-1), units[:, 0].detach())


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_logits_after_an_interchange_in_a_subspace_equal_those_of_transformer_lens(pair, rank):
    basis = analysis.random_basis(8, rank, seed=rank)
    site = InterchangeSite(1, (LENGTH - 1,), "block.output")
    name, position = "blocks.1.hook_resid_post", torch.tensor([LENGTH - 1])
    _, cache = pair.bridge.run_with_cache(as_ids(pair.corrupted))
    theirs = analysis.run_with_intervention(
        pair.bridge,
        name,
        analysis.SubspaceInterchange(basis),
        as_ids(pair.clean),
        cache[name][:, -1],
        lambda tokens: pair.bridge(tokens)[:, -1],
        positions=position,
    )
    seen = jf.inspect(pair.model, pair.variables, pair.corrupted, capture=(site.point,))
    values = seen.captured[site.point][site.layer][:, -1:]
    patch = interchange_patch(values, basis.numpy().T, site)
    found = jf.inspect(pair.model, pair.variables, pair.clean, patch=patch)
    tiny.close(found.logits[:, -1], theirs.detach())
