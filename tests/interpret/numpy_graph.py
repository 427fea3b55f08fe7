"""The graph of a pre-norm decoder in NumPy and float64, which shares no code with the package.

Each receiver adds up the summands that it reads, one by one.
"""

import numpy as np

from jaxformer.interpret.graph import Node
from tests.properties import oracle

RIGHT, WRONG = 1, 2


def run(params, tokens, config, other=None, reads_other=lambda sender, receiver: False):
    """Runs a decoder with layer norms and learned positions on one text.

    Args:
        params: the parameters.
        tokens: the text.
        config: the config.
        other: {sender: summand} of another run. The biases of attention are senders named "bias".
        reads_other: returns whether a receiver reads the other run's summand of a sender.

    Returns:
        (metric, {sender: summand}). The metric is the logit of `RIGHT` minus the logit of `WRONG`
        at the last token.
    """
    params, sent = oracle.float64(params), {}
    embedding = params["embedding"]
    sent[Node("embedding")] = embedding["tokens"][tokens] + embedding["positions"][: len(tokens)]

    def read(receiver, senders):
        return sum(other[s] if reads_other(s, receiver) else sent[s] for s in senders)

    for layer in range(config.num_layers):
        block, before = take(params["blocks"], layer), list(sent)
        sent |= run_heads(block, layer, config, lambda node, senders=before: read(node, senders))
        node, norm = Node("feedforward", layer), "feedforward_norm"
        if config.parallel_block == "shared_norm":
            norm = "attention_norm"
        x = read(node, before if config.parallel_block != "none" else list(sent))
        normed = oracle.layer_norm(x, **block[norm])
        sent[node] = oracle.feed_forward(block["feedforward"], normed, config.activation)
    x = oracle.layer_norm(read(Node("logits"), list(sent)), **params["final_norm"])
    logits = x[-1] @ embedding["tokens"].T
    return logits[RIGHT] - logits[WRONG], sent


def run_heads(block, layer, config, read):
    """Returns the summands of the heads and of the bias of one layer."""
    weights, d, sent = block["attention"], config.head_dim, {}

    def project(name, head):
        normed = oracle.layer_norm(read(Node(name, layer, head)), **block["attention_norm"])
        return oracle.linear(weights[name], normed)[:, head * d : (head + 1) * d]

    for head in range(config.num_heads):
        kv_head = head * config.num_kv_heads // config.num_heads
        query, key, value = (
            project(name, n)[None]
            for name, n in (("query", head), ("key", kv_head), ("value", kv_head))
        )
        seen = np.tril(np.ones((query.shape[1],) * 2, bool))
        kernel = weights["output"]["kernel"][head * d : (head + 1) * d]
        sent[Node("head", layer, head)] = oracle.attention(query, key, value, seen)[0] @ kernel
    return sent | {
        Node("bias", layer): weights["output"]["bias"] + 0 * sent[Node("head", layer, 0)]
    }


def take(tree, layer):
    return {name: take(x, layer) if isinstance(x, dict) else x[layer] for name, x in tree.items()}
