"""The graph of a pre-norm decoder: which parts write to the residual stream, and which read it.

The residual stream is the sum of the embedding and of the outputs of all heads and feed-forward
layers. These summands are the *senders*. The *receivers* compute a value from the residual stream:
the queries, keys and values of each head, each feed-forward layer, and the logits. An *edge* is the
direct path from a sender to a receiver. An edge exists if the residual stream that the receiver
reads contains the output of the sender:

    the queries, keys and values of layer l    read the embedding and all layers before l
    the feed-forward layer of layer l          reads the same summands and the heads of layer l
    the logits                                 read all summands

In parallel blocks, the feed-forward layer of layer l does not read the heads of layer l. With
grouped-query attention, several heads share the keys and values of one key/value head.

Reference:
    Elhage et al. 2021 (the residual stream as a sum); Conmy et al. 2023, "Towards Automated Circuit
    Discovery" (the graph with split queries, keys and values).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxformer.interpret.layers import (
    heads_shape,
    mixed_layers,
    self_attention_layer,
    transformer_config,
)
from jaxformer.models.kinds import Decoder
from jaxformer.models.language_model import LanguageModel
from jaxformer.terminal import kind_of

INPUTS = ("query", "key", "value")
# The kinds of receivers inside a layer, in the order of `Graph.receivers`.
LAYER_RECEIVERS = (*INPUTS, "feedforward")
NodeName = Literal["embedding", "head", "feedforward", "query", "key", "value", "logits"]


class Node(NamedTuple):
    """A sender or a receiver of the residual stream.

    >>> Node("embedding"), Node("head", 0, 1), Node("query", 1, 2), Node("feedforward", 1)

    Attributes:
        name: "embedding" or "head" for a sender; "query", "key", "value" or "logits" for a
            receiver; "feedforward" for both.
        layer: index of the layer; None for the embedding and the logits.
        head: index of the head; for "key" and "value", index of the key/value head; None for other
            names.
    """

    name: NodeName
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        """Returns a short text, such as "head 0.1" for head 1 of layer 0."""
        numbers = ".".join(str(x) for x in (self.layer, self.head) if x is not None)
        return f"{self.name} {numbers}".rstrip()


class Edge(NamedTuple):
    """The direct path from a sender to a receiver through the residual stream.

    >>> Edge(Node("head", 0, 1), Node("query", 1, 2))

    Attributes:
        sender: the embedding, a head or a feed-forward layer.
        receiver: the query, key or value of a head, a feed-forward layer, or the logits.
    """

    sender: Node
    receiver: Node

    def __str__(self) -> str:
        """Returns a short text, such as "head 0.1 → query 1.2"."""
        return f"{self.sender} → {self.receiver}"


@dataclass(frozen=True)
class Graph:
    """The nodes and edges of a decoder.

    Arrays over edges have the shape [receivers, senders] and the order of `receivers` and
    `senders`.

    Attributes:
        num_layers: number of layers.
        num_heads: number of heads per layer.
        num_kv_heads: number of key/value heads per layer.
        is_parallel: whether the attention and the feed-forward layer of a layer read the same
            residual stream.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    is_parallel: bool

    @cached_property
    def senders(self) -> tuple[Node, ...]:
        """The embedding; then, layer by layer, the heads and the feed-forward layer."""
        layers = [
            (*(Node("head", layer, n) for n in range(self.num_heads)), Node("feedforward", layer))
            for layer in range(self.num_layers)
        ]
        return (Node("embedding"), *(node for nodes in layers for node in nodes))

    @cached_property
    def receivers(self) -> tuple[Node, ...]:
        """Layer by layer, all queries, keys and values and the feed-forward layer; the logits."""
        found = []
        for layer in range(self.num_layers):
            found += [Node("query", layer, n) for n in range(self.num_heads)]
            found += [Node("key", layer, n) for n in range(self.num_kv_heads)]
            found += [Node("value", layer, n) for n in range(self.num_kv_heads)]
            found.append(Node("feedforward", layer))
        return (*found, Node("logits"))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of receivers per layer of each kind in `LAYER_RECEIVERS`."""
        return self.num_heads, self.num_kv_heads, self.num_kv_heads, 1

    def time(self, node: Node) -> int:
        """Returns the order of a node: an edge exists if its sender comes before its receiver."""
        if node.layer is None:
            return -1 if node.name == "embedding" else 2 * self.num_layers
        return 2 * node.layer + (node.name == "feedforward" and not self.is_parallel)

    @cached_property
    def exists(self) -> Bool[np.ndarray, "receivers senders"]:
        """Whether each edge exists."""
        sent = np.array([self.time(node) for node in self.senders])
        read = np.array([self.time(node) for node in self.receivers])
        return sent < read[:, None]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, in the row-major order of `exists`."""
        return tuple(
            Edge(self.senders[s], self.receivers[r]) for r, s in np.argwhere(self.exists).tolist()
        )

    def indices(self, name: str, edges: Sequence[Any]) -> Int[np.ndarray, "edges 2"]:
        """Returns the indices (receiver, sender) of edges.

        Args:
            name: name of the argument, for error messages.
            edges: the edges; tuples are accepted in place of `Edge` and `Node`.

        Raises:
            ValueError: An edge does not exist.
        """
        senders, receivers = (
            {x: n for n, x in enumerate(y)} for y in (self.senders, self.receivers)
        )
        found = np.zeros((len(edges), 2), int)
        for number, edge in enumerate(edges):
            sender, receiver = _checked_pair(f"{name}[{number}]", edge)
            if sender not in senders or receiver not in receivers:
                raise ValueError(f"{name}[{number}] is {edge!r}; {self._accepted}")
            found[number] = receivers[receiver], senders[sender]
            if not self.exists[tuple(found[number])]:
                raise ValueError(
                    f"{name}[{number}] is {Edge(sender, receiver)}; the receiver must read the "
                    "residual stream after the sender writes to it"
                )
        return found

    def mask(self, name: str, circuit: Iterable[Any]) -> Bool[np.ndarray, "receivers senders"]:
        """Returns which edges a circuit contains; see `indices`."""
        mask = np.zeros(self.exists.shape, bool)
        mask[tuple(self.indices(name, list(circuit)).T)] = True
        return mask

    @property
    def _accepted(self) -> str:
        """The accepted senders and receivers, for error messages."""
        layers, heads, kv_heads = (
            f"0 to {n - 1}" for n in (self.num_layers, self.num_heads, self.num_kv_heads)
        )
        return (
            "its sender must be Node('embedding'), Node('head', layer, head) or "
            "Node('feedforward', layer), and its receiver Node('query', layer, head), "
            "Node('key' or 'value', layer, key/value head), Node('feedforward', layer) or "
            f"Node('logits'), with layers from {layers}, heads from {heads} and key/value heads "
            f"from {kv_heads}"
        )


def _checked_pair(name: str, edge: Any) -> Edge:
    """Returns an edge as an `Edge`; raises ValueError unless it is a pair of nodes."""
    try:
        sender, receiver = edge
        return Edge(Node(*sender), Node(*receiver))
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} is {edge!r}; it must be Edge(sender, receiver), such as "
            "Edge(Node('head', 0, 1), Node('query', 1, 2))"
        ) from None


def model_graph(model: LanguageModel) -> Graph:
    """Returns the graph of a decoder.

    Raises:
        ValueError: The model's residual stream is not the sum of the outputs of its parts.
    """
    check_is_sum(model)
    config = transformer_config(model)
    is_parallel = len(model.architecture.stack.layers[0]) == 1
    return Graph(config.num_layers, config.num_heads, config.sizes.num_kv_heads, is_parallel)


def model_edges(model: LanguageModel) -> tuple[Edge, ...]:
    """Returns all edges of a decoder, ordered by receiver.

    Args:
        model: a decoder whose blocks have norm_position "pre" and residuals.

    Raises:
        ValueError: The model's residual stream is not the sum of the outputs of its parts.
    """
    return model_graph(model).edges


def edges_between(model: LanguageModel, nodes: Iterable[Any]) -> tuple[Edge, ...]:
    """Returns all edges between the given nodes, the embedding and the logits.

    The result is the circuit that consists of these nodes. The node of a head contains its queries,
    keys and values.

    Args:
        model: a decoder whose blocks have norm_position "pre" and residuals.
        nodes: heads, `Node("head", layer, head)`, and feed-forward layers,
            `Node("feedforward", layer)`.

    Raises:
        ValueError: A node does not exist, or the model's residual stream is not the sum of the
            outputs of its parts.
    """
    graph, chosen = model_graph(model), {Node("embedding"), Node("logits")}
    for number, node in enumerate(nodes):
        if node not in graph.senders:
            raise ValueError(
                f"nodes[{number}] is {node!r}; it must be Node('head', layer, head) or "
                f"Node('feedforward', layer), with a layer from 0 to {graph.num_layers - 1} and a "
                f"head from 0 to {graph.num_heads - 1}"
            )
        chosen.add(Node(*node))
    shared_by = graph.num_heads // graph.num_kv_heads

    def parts(node: Node) -> set[Node]:
        """Returns the receivers that belong to a chosen node."""
        if node.name != "head" or node.head is None:
            return {node}
        kv_head = node.head // shared_by
        return {
            Node("query", node.layer, node.head),
            *(Node(name, node.layer, kv_head) for name in ("key", "value")),
        }

    receivers = set().union(*map(parts, chosen))
    return tuple(x for x in graph.edges if x.sender in chosen and x.receiver in receivers)


def check_is_sum(model: LanguageModel) -> None:
    """Raises ValueError unless the parts of the model add their outputs to a residual stream."""
    if type(model) is not Decoder:
        raise ValueError(f"model is {kind_of(model)}; path patching requires a Decoder")
    if model.layers is not None:
        raise ValueError(
            "model has user-defined layers; path patching requires layers built from a config"
        )
    heads_shape(model, "attention")
    if (reason := mixed_layers(model)) is not None:
        raise ValueError(reason)
    if model.config.norm_position != "pre":
        raise ValueError(
            f"norm_position is {model.config.norm_position!r}; path patching requires 'pre', "
            "because with other norms the residual stream is not the sum of the heads' outputs"
        )
    if not model.config.residual:
        raise ValueError("residual is False; path patching requires residual connections")
    if self_attention_layer(model.architecture.stack.layers[0]).has_gate:
        raise ValueError(
            "attention_gate is True; path patching requires attention without gates, because a "
            "gate reads the residual stream, but is not a node of the graph"
        )
