"""Reference implementation of the models: plain NumPy loops in float64.

It shares no code with `jaxformer.functional`, so that both cannot have the same bug. Every function
takes one batch element. Visibility comes from `verify.rules`, which is loops as well and is tested
against hand-drawn tables.
"""

import math
from dataclasses import replace

import numpy as np

from jaxformer.verify import rules


def softmax(scores):
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def kept(
    logits, temperature, top_k, top_p, min_p, typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0
):
    """Returns bool [vocab]: the tokens that a sampler may draw. Tied logits are kept together."""
    logits = np.asarray(logits, np.float64)
    left = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        left &= logits >= np.sort(logits)[-top_k]
    gaps = (logits - logits.max()) / temperature
    probabilities = np.where(left, np.exp(gaps), 0.0) / np.exp(gaps[left]).sum()
    if top_p < 1.0:
        largest_first = np.argsort(-logits)
        enough = np.searchsorted(np.cumsum(probabilities[largest_first]), top_p)
        left &= logits >= logits[largest_first[min(enough, len(logits) - 1)]]
    left &= gaps >= (np.log(min_p) if min_p else -np.inf)
    if typical_p < 1.0:
        log_probs = log_softmax(np.where(left, gaps, -np.inf))
        away = np.abs(log_probs - (np.exp(log_probs[left]) * log_probs[left]).sum())
        nearest_first = np.argsort(away)
        enough = np.searchsorted(np.cumsum(np.exp(log_probs[nearest_first])), typical_p)
        left &= away <= away[nearest_first[min(enough, left.sum() - 1)]]
    for cutoff, depends_on_entropy in ((epsilon_cutoff, False), (eta_cutoff, True)):
        log_probs = log_softmax(np.where(left, gaps, -np.inf))
        if depends_on_entropy:
            entropy = -(np.exp(log_probs[left]) * log_probs[left]).sum()
            cutoff = min(cutoff, math.sqrt(cutoff) * math.exp(-entropy))
        left &= (np.exp(log_probs) >= cutoff) | (log_probs == log_probs.max())
    return left


def attention(query, key, value, seen, scale=None, cap=None, bias=None, sink=None):
    """Computes attention in loops over heads and queries.

    Args:
        query: [heads, queries, head_dim].
        key: [kv_heads, keys, head_dim].
        value: [kv_heads, keys, value_dim].
        seen: bool [queries, keys], True where the key is visible.
        scale: factor of the scores, 1/√head_dim by default.
        cap: soft cap of the scores, if any.
        bias: [heads, queries, keys], if any.
        sink: [heads], if any: the score of one more key, whose value is zero.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    shared_by = len(query) // len(key)
    output = np.zeros((*query.shape[:2], value.shape[-1]))
    for head in range(len(query)):
        for i in range(query.shape[1]):
            keys = np.flatnonzero(seen[i])
            if len(keys):
                k, v = key[head // shared_by, keys], value[head // shared_by, keys]
                scores = scale * k @ query[head, i]
                if cap is not None:
                    scores = cap * np.tanh(scores / cap)
                if bias is not None:
                    scores = scores + bias[head, i, keys]
                if sink is not None:
                    scores, v = np.append(scores, sink[head]), np.append(v, 0 * v[:1], axis=0)
                output[head, i] = softmax(scores) @ v
    return output


def attention_gradients(query, key, value, seen, cotangent, scale=None):
    """Computes the gradients of Σ cotangent · attention(…) from the Jacobian of the softmax."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    shared_by = len(query) // len(key)
    d_query, d_key, d_value = (np.zeros_like(x) for x in (query, key, value))
    for head in range(len(query)):
        kv = head // shared_by
        for i in range(query.shape[1]):
            keys = np.flatnonzero(seen[i])
            if not len(keys):
                continue
            weights = softmax(scale * key[kv, keys] @ query[head, i])
            d_weights = value[kv, keys] @ cotangent[head, i]
            d_scores = (np.diag(weights) - np.outer(weights, weights)) @ d_weights
            d_query[head, i] = scale * d_scores @ key[kv, keys]
            d_key[kv, keys] += scale * np.outer(d_scores, query[head, i])
            d_value[kv, keys] += np.outer(weights, cotangent[head, i])
    return d_query, d_key, d_value


def layer_norm(x, scale, bias=0.0, epsilon=1e-5):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    return scale * centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon) + bias


def rms_norm(x, scale, epsilon=1e-5):
    x = np.asarray(x, np.float64)
    return scale * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon)


def rotary(x, positions, base=10_000.0):
    """Rotates x [heads, length, d]: pair (i, i + d/2) as a complex number times e^{i angle}."""
    half = x.shape[-1] // 2
    turned = np.array(x, np.float64)
    for t, position in enumerate(positions):
        for i in range(half):
            angle = position * base ** (-2 * i / x.shape[-1])
            pair = (x[:, t, i] + 1j * x[:, t, i + half]) * np.exp(1j * angle)
            turned[:, t, i], turned[:, t, i + half] = pair.real, pair.imag
    return turned


def sinusoids(positions, dim, base=10_000.0):
    table = np.zeros((len(positions), dim))
    for t, position in enumerate(positions):
        for i in range(0, dim, 2):
            angle = position / base ** (i / dim)
            table[t, i], table[t, i + 1] = math.sin(angle), math.cos(angle)
    return table


_ERF = np.vectorize(math.erf, otypes=[float])
ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + _ERF(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "squared_relu": lambda x: np.where(x > 0, x * x, 0.0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
}
GATES = {
    "swiglu": ACTIVATIONS["silu"],
    "geglu": ACTIVATIONS["gelu"],
    "geglu_tanh": ACTIVATIONS["gelu_tanh"],
    "clipped_swiglu": lambda x: np.minimum(x, 7.0) / (1 + np.exp(-1.702 * np.minimum(x, 7.0))),
}


def linear(weights, x):
    return x @ weights["kernel"] + weights.get("bias", 0.0)


def feed_forward(weights, x, activation, output_activation=False):
    act = (ACTIVATIONS | GATES)[activation]
    hidden = linear(weights["up"], x)
    if activation == "clipped_swiglu":
        hidden = np.clip(hidden, -7.0, 7.0) + 1.0
    is_gated = activation in GATES
    hidden = act(linear(weights["gate"], x)) * hidden if is_gated else act(hidden)
    y = linear(weights["down"], hidden)
    return act(y) if output_activation else y


def mixture(weights, x, function, num_chosen, renormalises):
    """Returns Σ p_e FFN_e(x) by a loop over tokens [tokens, dim] and their experts."""
    experts = {name: weights[name] for name in ("up", "gate", "down") if name in weights}
    logits = linear(weights["router"], x)
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    rows = []
    for token, p in zip(x, probabilities, strict=True):
        chosen = np.argsort(-p, kind="stable")[:num_chosen]
        shares = p[chosen] / (p[chosen].sum() if renormalises else 1.0)
        outputs = [function(_layer(experts, e), token) for e in chosen]
        rows.append(sum(share * y for share, y in zip(shares, outputs, strict=True)))
        if "shared" in weights:
            gate = linear(weights["shared_gate"], token) if "shared_gate" in weights else np.inf
            rows[-1] = rows[-1] + function(weights["shared"], token) / (1 + np.exp(-gate))
    return np.stack(rows)


def decoder(params, tokens, segment_ids, config):
    """Returns the logits [length, vocab] of one text. Values at padding are meaningless."""
    params = float64(params)
    return logits_of(params, hidden(params, tokens, segment_ids, config), config)


def encoder(params, tokens, segment_ids, config, token_type_ids=None):
    """Returns the hidden vectors and the logits of one text."""
    params = float64(params)
    vectors = hidden(params, tokens, segment_ids, config, token_type_ids)
    act, x = (ACTIVATIONS | GATES)[config.activation], vectors
    if config.transform:
        x = _norm(params["transform_norm"], act(linear(params["transform"], x)), config)
    return vectors, logits_of(params, x, config)


def hidden(params, tokens, segment_ids, config, token_type_ids=None):
    positions = rules.read(segment_ids)[1]
    x = params["embedding"]["tokens"][np.asarray(tokens)]
    x = x * (config.embed_dim**0.5 if config.scale_embeddings else 1.0)
    if config.positions == "learned":
        x = x + params["embedding"]["positions"][positions + config.position_offset]
    elif config.positions.startswith("sinusoidal"):
        table = sinusoids(positions, config.embed_dim)
        if config.positions == "sinusoidal_halves":
            table = np.concatenate([table[:, ::2], table[:, 1::2]], axis=1)
        x = x + table
    if "token_types" in params["embedding"]:
        types = np.zeros(len(x), int) if token_type_ids is None else token_type_ids
        x = x + params["embedding"]["token_types"][types]
    if config.embedding_norm:
        x = _norm(params["embedding_norm"], x, config)
    seen = rules.layer_rules(config, segment_ids)
    bias = scores_bias(params, positions, config)
    for layer in range(config.num_layers):
        own = _layer_in_group(params["blocks"], config, layer)
        if layer == 0 and not config.first_attention_norm:
            own["attention_norm"] = None
        x = _block(own, x, seen[layer], positions, bias, of_layer(config, layer))
    if "final_norm" in params:
        x = _norm(params["final_norm"], x, config)
    return x * (config.output_scale or 1.0)


def _layer_in_group(blocks, config, layer):
    """Returns the weights of one layer. Layers of other shapes are stacked apart."""
    patterns = (config.num_experts, getattr(config, "layer_types", "attention"))
    patterns = [x if isinstance(x, tuple) else (x,) for x in patterns]
    kinds = [tuple(x[i % len(x)] for x in patterns) for i in range(config.num_layers)]
    equal = [i for i, kind in enumerate(kinds) if kind == kinds[layer]]
    own = blocks if len(set(kinds)) == 1 else blocks[str(equal[0])]
    return _layer(own, equal.index(layer))


def logits_of(params, x, config):
    head = params.get("head", {})
    kernel = params["embedding"]["tokens"].T if config.tie_embeddings else head["kernel"]
    logits = x @ kernel + head.get("bias", 0.0)
    cap = config.logits_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)


def of_layer(config, layer):
    """Returns the config with this layer's entry of the repeating `rotary_base` pattern."""
    base = config.rotary_base
    base = base[layer % len(base)] if isinstance(base, tuple) else base
    config = replace(config, num_experts=int(np.resize(config.num_experts, layer + 1)[layer]))
    if base is None:
        return replace(config, positions="none", rotary_base=1.0)
    return replace(config, rotary_base=base)


def scores_bias(params, positions, config):
    """Returns ALiBi's or T5's bias [heads, queries, keys], or None."""
    if config.positions not in ("alibi", "relative"):
        return None
    length = len(positions)
    bias = np.zeros((config.num_heads, length, length))
    for head in range(config.num_heads):
        for i in range(length):
            for j in range(length):
                offset = positions[j] - positions[i]
                if config.positions == "alibi":  # the number of heads is a power of two
                    slope = 2.0 ** (-8 * (head + 1) / config.num_heads)
                    bias[head, i, j] = -slope * abs(offset)
                else:
                    bucket = relative_bucket(offset, config)
                    bias[head, i, j] = params["relative_bias"]["table"][bucket, head]
    return bias


def relative_bucket(offset, config):
    """Returns T5's bucket of one offset, key position − query position."""
    buckets, later = config.relative_buckets, 0
    if config.bidirectional:
        buckets //= 2
        later = buckets if offset > 0 else 0
    distance = abs(offset) if config.bidirectional else max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return later + distance
    share = math.log(distance / exact) / math.log(config.relative_distance / exact)
    return later + min(exact + int(share * (buckets - exact)), buckets - 1)


def _feed_forward(weights, x, config):
    def one(weights, x):
        return feed_forward(weights, x, config.activation, config.output_activation)

    if not config.num_experts:
        return one(weights, x)
    return mixture(weights, x, one, config.experts_per_token, config.normalize_router)


def _block(weights, x, seen, positions, bias, config):
    start = x
    for name, sublayer in (
        (
            "attention",
            lambda x: _self_attention(weights["attention"], x, seen, positions, bias, config),
        ),
        (
            "short_convolution",
            lambda x: short_convolution(weights["short_convolution"], x, seen, positions),
        ),
        (
            "gated_delta",
            lambda x: gated_delta(weights["gated_delta"], x, seen, positions, config),
        ),
        (
            "feedforward",
            lambda x: _feed_forward(weights["feedforward"], x, config),
        ),
    ):
        if name not in weights:
            continue
        norm, where = weights.get(f"{name}_norm"), config.norm_position
        if config.parallel_block != "none" and name == "feedforward":
            norm = norm or weights["attention_norm"]
            return x + sublayer(_norm(norm, start, config))
        y = sublayer(_norm(norm, x, config) if where in ("pre", "sandwich") else x)
        if where == "post_sublayer":
            y = _norm(norm, y, config)
        if where == "sandwich":
            y = _norm(weights[f"{name}_output_norm"], y, config)
        x = x + y if config.residual else y
        x = _norm(norm, x, config) if where == "post" else x
    return x


def convolution(weights, x, seen, positions):
    """Returns Σ w_j x_{t−j} + b over the visible tokens; w_0 is the last row of the filter."""
    y = np.zeros_like(x)
    for i in range(len(x)):
        for j in np.flatnonzero(seen[i]):
            y[i] += (
                weights["filter"][len(weights["filter"]) - 1 - positions[i] + positions[j]] * x[j]
            )
    return y + weights.get("bias", 0.0)


def short_convolution(weights, x, seen, positions):
    before, after, value = (
        linear(weights[name], x) for name in ("input_gate", "output_gate", "value")
    )
    y = after * convolution(weights["convolution"], before * value, seen, positions)
    return linear(weights["output"], y)


def gated_delta(weights, x, seen, positions, config):
    """Computes the delta rule for each token anew, over the tokens that it sees."""
    key_heads, value_heads, key_dim, value_dim = config.delta_sizes
    maps = [linear(weights[name], x) for name in ("query", "key", "value")]
    near = seen & (np.subtract.outer(positions, positions) < len(weights["convolution"]["filter"]))
    joined = convolution(weights["convolution"], np.concatenate(maps, axis=1), near, positions)
    joined = np.split(ACTIVATIONS["silu"](joined), np.cumsum([key_heads * key_dim] * 2), axis=1)
    query, key, value = (
        part.reshape(len(x), heads, -1)
        for part, heads in zip(joined, (key_heads, key_heads, value_heads), strict=True)
    )
    query, key = (y / np.sqrt((y**2).sum(axis=-1, keepdims=True) + 1e-6) for y in (query, key))
    decay = np.exp(
        -np.exp(weights["decay"]["log_scale"]) * np.logaddexp(0, linear(weights["decay"], x))
    )
    rate = 1 / (1 + np.exp(-linear(weights["rate"], x)))
    heads = np.zeros(value.shape)
    for i, head in np.ndindex(heads.shape[:2]):
        memory, own = np.zeros((key_dim, value_dim)), head * key_heads // value_heads
        for j in np.flatnonzero(seen[i]):
            memory = decay[j, head] * memory
            error = value[j, head] - key[j, own] @ memory
            memory = memory + np.outer(key[j, own], rate[j, head] * error)
        heads[i, head] = query[i, own] @ memory / math.sqrt(key_dim)
    gate = ACTIVATIONS["silu"](linear(weights["gate"], x))
    heads = rms_norm(heads, weights["norm"]["scale"], config.norm_epsilon).reshape(len(x), -1)
    return linear(weights["output"], heads * gate)


def _self_attention(weights, x, seen, positions, bias, config):
    query, key, value = (
        linear(weights[name], x).reshape(len(x), -1, config.head_dim).transpose(1, 0, 2)
        for name in ("query", "key", "value")
    )
    query, key = (
        _query_key_norm(weights, name, side, config)
        for name, side in (("query_norm", query), ("key_norm", key))
    )
    if config.positions == "rotary":
        query, key = (_rotary_of(side, positions, config) for side in (query, key))
    scale, cap = config.attention_scale, config.attention_softcap
    output = attention(query, key, value, seen, scale, cap, bias, weights.get("sink"))
    output = output.transpose(1, 0, 2).reshape(len(x), -1)
    if config.attention_gate:
        output = output / (1 + np.exp(-linear(weights["gate"], x)))
    return linear(weights["output"], output)


def _query_key_norm(weights, name, x, config):
    if config.query_key_norm == "none":
        return x
    if config.query_key_norm == "head":
        return _norm(weights[name], x, config)
    rows = x.transpose(1, 0, 2)
    whole = _norm(weights[name], rows.reshape(len(rows), -1), config)
    return whole.reshape(rows.shape).transpose(1, 0, 2)


def _rotary_of(x, positions, config):
    dim, result = int(x.shape[-1] * config.rotary_fraction), np.array(x)
    order = np.arange(dim)
    if config.rotary_interleaved:
        order = order.reshape(-1, 2).T.ravel()
    result[..., order] = rotary(x[..., order], positions, config.rotary_base)
    return result


def _norm(weights, x, config):
    if weights is None:
        return x
    if config.norm == "layer":
        return layer_norm(x, weights["scale"], weights.get("bias", 0.0), config.norm_epsilon)
    if config.norm == "none":
        return x
    if config.norm == "dynamic_tanh":
        y = np.tanh(weights["input"]["scale"] * np.asarray(x, np.float64))
        return weights["scale"] * y + weights.get("bias", 0.0)
    return rms_norm(x, weights["scale"] + (config.norm == "rms_one_plus"), config.norm_epsilon)


def float64(tree):
    if isinstance(tree, dict):
        return {name: float64(branch) for name, branch in tree.items()}
    return np.asarray(tree, np.float64)


def _layer(tree, layer):
    return {
        name: _layer(branch, layer) if isinstance(branch, dict) else branch[layer]
        for name, branch in tree.items()
    }
