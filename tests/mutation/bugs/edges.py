"""Bugs of edges and circuits: wrong graphs, wrong patches and wrong gradients."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace

GRAPH, PATCH = "interpret/test_graph.py", "interpret/test_edges.py"
ATTRIBUTION, CIRCUITS = "interpret/test_edge_attribution.py", "interpret/test_circuits.py"
PAIRS = f"{GRAPH}::test_edges_are_all_pairs_whose_sender_is_computed_before_the_receiver"
NODES = f"{GRAPH}::test_circuit_built_from_nodes_contains_every_edge_between_them"
PARALLEL = "test_parallel_blocks_have_no_edge_from_a_head_to_its_own_feed_forward_layer"
PARALLEL = f"{GRAPH}::{PARALLEL}"
NUMPY_PATCH = f"{PATCH}::test_path_patching_effects_equal_a_numpy_implementation[none]"
SLOPES = f"{ATTRIBUTION}::test_attributed_edges_equal_finite_differences_of_a_numpy_model[none]"
NUMPY = f"{CIRCUITS}::test_metric_of_a_circuit_equals_a_numpy_implementation[none]"
SHARES = f"{CIRCUITS}::test_faithfulness_and_completeness_are_fractions_of_clean_minus_corrupted"
TIME = 'node.name == "feedforward" and not self.is_parallel'

BUGS = (
    # ---- the graph
    Bug(
        "a feed-forward layer does not read the heads of its layer",
        "interpret.graph:Graph.time",
        Replace(TIME, "False"),
        PAIRS,
    ),
    Bug(
        "a feed-forward layer of a parallel block reads the heads of its layer",
        "interpret.graph:Graph.time",
        Replace(TIME, 'node.name == "feedforward"'),
        f"{PAIRS} {PARALLEL}",
    ),
    Bug(
        "a circuit of nodes lacks the keys that several heads share",
        "interpret.graph:edges_between",
        Replace("node.head // shared_by", "node.head"),
        NODES,
    ),
    Bug(
        "path patching accepts attention gates, which are not nodes of the graph",
        "interpret.graph:check_is_sum",
        Replace("self_attention_layer(model.architecture.stack.layers[0]).has_gate", "False"),
        f"{GRAPH}::test_error_states_why_a_model_has_no_graph_of_edges",
    ),
    Bug(
        "an edge whose receiver precedes its sender is accepted",
        "interpret.graph:Graph.indices",
        Replace("not self.exists[tuple(found[number])]", "False"),
        f"{GRAPH}::test_error_names_an_edge_that_does_not_exist",
    ),
    # ---- values of senders and receivers
    Bug(
        "a feed-forward layer reads the residual stream before the heads of its layer",
        "interpret.streams:read_stream",
        Replace(
            'captured["block.input" if graph.is_parallel else "block.middle"]',
            'captured["block.input"]',
        ),
        f"{NUMPY} {SLOPES} {NUMPY_PATCH}",
    ),
    Bug(
        "the corrupted summand is patched in place of the clean one",
        "interpret.streams:sender_differences",
        Replace("x - y", "y - x"),
        f"{NUMPY} {SLOPES} {NUMPY_PATCH}",
    ),
    Bug(
        "the summand of a head contains all heads of its layer",
        "interpret.streams:head_outputs",
        Replace("jnp.where(only, values, 0)", "values"),
        f"{NUMPY} {SLOPES} {NUMPY_PATCH}",
    ),
    Bug(
        "a patch of the input of one head changes all heads of the layer",
        "interpret.edges:run_edges",
        Replace("is_at(head, value.shape[-3])[:, None, None]", "True"),
        NUMPY_PATCH,
    ),
    Bug(
        "a patch of an input of one layer changes all layers",
        "interpret.edges:run_edges",
        Replace("is_at(layer, model.config.num_layers)", "is_at(-1, model.config.num_layers)"),
        NUMPY_PATCH,
    ),
    Bug(
        "a feed-forward layer reads the residual stream without its norm",
        "interpret.streams:layer_value",
        Replace("layer[-1].sublayer_input(feedforward, weights, residual)", "residual"),
        f"{NUMPY} {NUMPY_PATCH}",
    ),
    Bug(
        "all heads of a layer read the residual stream of its first head",
        "interpret.streams:layer_values",
        Replace("values[n, :, n]", "values[0, :, n]"),
        f"{NUMPY} {SLOPES}",
    ),
    Bug(
        "the strongest edges are those with the largest positive effects",
        "interpret.edges:EdgeSweep.strongest",
        Replace("-np.abs(self.effects)", "-self.effects"),
        f"{PATCH}::test_strongest_edges_have_the_largest_absolute_effects",
    ),
    # ---- attribution
    Bug(
        "the gradient of an edge to the logits omits the final norm",
        "interpret.edge_attribution:edge_scores",
        Replace(
            "jax.vjp(finish, state.stream.output[0])",
            "jax.vjp(lambda x: x, state.stream.output[0])",
        ),
        SLOPES,
    ),
    Bug(
        "gradients of all edges are taken at the input of the first layer",
        "interpret.edge_attribution:edge_scores",
        Replace("state.stream.read_by(name)[index]", "state.stream.read_by(name)[0]"),
        SLOPES,
    ),
    # ---- circuits
    Bug(
        "the complement of a circuit is the circuit",
        "interpret.circuits:evaluate_circuits",
        Replace("graph.exists & ~circuit", "circuit"),
        NUMPY,
    ),
    Bug(
        "the heads of a circuit have the queries, keys and values of the corrupted text",
        "interpret.circuits:run_attention",
        Replace('Hooks(("attention.heads",), patch)', 'Hooks(("attention.heads",))'),
        NUMPY,
    ),
    Bug(
        "the logits of a circuit read all senders",
        "interpret.circuits:run_circuits",
        Replace("circuit[-1:]", "jnp.ones_like(circuit[-1:])"),
        NUMPY,
    ),
    Bug(
        "the feed-forward layers of a circuit read the corrupted heads of their layer",
        "interpret.circuits:layer_differences",
        Replace(
            "jax.lax.dynamic_update_slice_in_dim(differences, written, first, axis=0)",
            "differences",
        ),
        NUMPY,
    ),
    Bug(
        "the faithfulness is a fraction of the clean metric instead of the difference",
        "interpret.circuits:CircuitSweep.faithfulness",
        Replace(
            "fraction_of_gap(self.metrics - self.corrupted, self.clean, self.corrupted)",
            "fraction_of_gap(self.metrics - self.corrupted, self.clean, 0.0)",
        ),
        SHARES,
    ),
    Bug(
        "the completeness is the faithfulness of the circuit itself",
        "interpret.circuits:CircuitSweep.completeness",
        Replace("self.complements", "self.metrics"),
        SHARES,
    ),
)
