"""The nodes and edges of a decoder."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.interpret import Edge, Node, edges_between, model_edges
from jaxformer.interpret.graph import Graph, model_graph
from tests.errors import error_of
from tests.properties import tiny

graphs = st.builds(
    lambda layers, kv_heads, shared_by, is_parallel: Graph(
        layers, kv_heads * shared_by, kv_heads, is_parallel
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)


def listed(graph):
    """Returns all edges, from a loop over the layers in the order of computation."""
    edges, sent = [], [Node("embedding")]
    for layer in range(graph.num_layers):
        heads = [Node("head", layer, n) for n in range(graph.num_heads)]
        readers = [Node("query", layer, n) for n in range(graph.num_heads)]
        for name in ("key", "value"):
            readers += [Node(name, layer, n) for n in range(graph.num_kv_heads)]
        edges += itertools.product(sent, readers)
        feedforward = Node("feedforward", layer)
        edges += itertools.product(sent if graph.is_parallel else sent + heads, [feedforward])
        sent += [*heads, feedforward]
    return edges + list(itertools.product(sent, [Node("logits")]))


@given(graphs)
def test_edges_are_all_pairs_whose_sender_is_computed_before_the_receiver(graph):
    assert len(set(graph.edges)) == len(graph.edges)
    assert set(graph.edges) == set(listed(graph))


@given(graphs)
def test_mask_of_a_circuit_has_one_entry_per_edge(graph):
    assert len(graph.receivers) == graph.num_layers * sum(graph.counts) + 1
    half = graph.edges[::2]
    mask = graph.mask("circuit", half)
    chosen = {(graph.senders[s], graph.receivers[r]) for r, s in np.argwhere(mask)}
    assert chosen == set(half)
    assert (graph.mask("circuit", graph.edges) == graph.exists).all()


def test_gpt2_small_has_about_32000_edges():
    """Conmy et al. 2023 give 32,000 edges in the abstract."""
    assert len(model_edges(jf.Decoder(jf.preset("gpt2-124m")))) == 32_491


def test_parallel_blocks_have_no_edge_from_a_head_to_its_own_feed_forward_layer():
    edge = Edge(Node("head", 0, 1), Node("feedforward", 0))
    for block, is_there in (("none", True), ("separate_norms", False), ("shared_norm", False)):
        assert (edge in model_edges(tiny.build(parallel_block=block))) == is_there


def test_circuit_built_from_nodes_contains_every_edge_between_them():
    """Two heads share the keys and values of a key/value head."""
    model = tiny.build()
    assert edges_between(model, []) == (Edge(Node("embedding"), Node("logits")),)
    everything = model_graph(model).senders
    assert edges_between(model, everything) == model_edges(model)
    found = edges_between(model, [Node("head", 0, 0), Node("head", 1, 3)])
    sides = [Node("query", 1, 3), Node("key", 1, 1), Node("value", 1, 1), Node("logits")]
    own = [Node(name, 0, 0) for name in ("query", "key", "value")]
    wanted = {Edge(Node("embedding"), node) for node in own + sides}
    wanted |= {Edge(Node("head", 0, 0), node) for node in sides}
    assert set(found) == wanted | {Edge(Node("head", 1, 3), Node("logits"))}


def test_nodes_and_edges_are_printed_with_their_layer_and_head_numbers():
    edge = Edge(Node("head", 0, 1), Node("query", 1, 2))
    assert str(edge) == "head 0.1 → query 1.2"
    assert str(Edge(Node("feedforward", 0), Node("logits"))) == "feedforward 0 → logits"


HEAD, QUERY = Node("head", 0, 0), Node("query", 1, 0)
WRONG_EDGES = {
    "edges[1] is Edge(sender=Node(name='head', layer=0, head=4)": Edge(Node("head", 0, 4), QUERY),
    "with layers from 0 to 1, heads from 0 to 3 and key/value heads from 0 to 1": Edge(
        HEAD, Node("key", 1, 2)
    ),
    "its sender must be Node('embedding'), Node('head', layer, head) or": Edge(QUERY, QUERY),
    "its receiver Node('query', layer, head), Node('key' or": Edge(HEAD, HEAD),
    "edges[1] is head 0.0 → query 0.1; the receiver must read": Edge(HEAD, Node("query", 0, 1)),
    "edges[1] is feedforward 1 → feedforward 1; the receiver": Edge(
        Node("feedforward", 1), Node("feedforward", 1)
    ),
    "edges[1] is (0, 1); it must be Edge(sender, receiver)": (0, 1),
}


@pytest.mark.parametrize("message", WRONG_EDGES)
def test_error_names_an_edge_that_does_not_exist(message):
    graph = model_graph(tiny.build())
    assert message in error_of(graph.indices, "edges", [Edge(HEAD, QUERY), WRONG_EDGES[message]])


def test_error_names_a_node_that_does_not_exist():
    found = error_of(edges_between, tiny.build(), [HEAD, Node("head", 2, 0)])
    assert "nodes[1] is Node(name='head', layer=2, head=0); it must be Node('head'" in found
    assert "with a layer from 0 to 1 and a head from 0 to 3" in found


WRONG_MODELS = {
    "norm_position is 'post'; path patching requires 'pre'": {"norm_position": "post"},
    "norm_position is 'sandwich'; path patching requires 'pre'": {"norm_position": "sandwich"},
    "residual is False; path patching requires residual connections": {"residual": False},
    "model is a Recurrent; path patching requires a Decoder": {"kind": jf.RecurrentConfig},
    "attention_gate is True; path patching requires attention without gates": {
        "attention_gate": True
    },
}


@pytest.mark.parametrize("message", WRONG_MODELS)
def test_error_states_why_a_model_has_no_graph_of_edges(message):
    assert message in error_of(model_edges, tiny.build(**WRONG_MODELS[message]))
