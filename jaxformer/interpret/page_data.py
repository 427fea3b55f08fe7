"""Data of the page: the values that JAX computes for a text, and the dependency matrix."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxformer.decoding.autoregressive import inspect
from jaxformer.functional.taps import Patch
from jaxformer.interpret.encoded_text import EncodedText
from jaxformer.interpret.layers import layers_with
from jaxformer.interpret.page_arrays import pack, pack_rows
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.verify import rules
from jaxformer.verify.comparison import compare
from jaxformer.verify.dependency import dependency_matrix

NUM_SHOWN = 5  # predictions after each layer
NUM_LOGITS = 256  # logits of each position
MOST_POSITIONS = 12  # positions whose vectors are stored
MOST_WEIGHTS = 8_000_000  # attention weights; beyond that only the mean over the heads is stored
DEPENDENCY_LENGTH = 16

_ATTENTION = {
    "attention.weights": ("Self-attention", "tokens", "tokens"),
    "cross_attention.weights": ("Cross-attention to the source", "tokens", "source"),
    "encoder.attention.weights": ("Self-attention of the encoder", "source", "source"),
}


def captured_data(
    model: LanguageModel, variables: Variables, inputs: EncodedText
) -> dict[str, Any]:
    """Runs the model and returns the values that the page shows when it cannot compute them.

    Returns:
        {"attention": attention weights; "logits": the largest logits of each position; "lens":
        predictions after each layer; "vectors": residual stream at some positions}, each only if
        the model has such values.
    """
    wanted = [*_ATTENTION, "block.input", "block.output", "attention.output"]
    names = [name for name in wanted if name in model.points]
    tokens, source = _batches(inputs)
    passed = inspect(model, variables, tokens, source=source, capture=names)
    captured = {name: x[:, 0] for name, x in passed.captured.items()}
    data = {
        "attention": [
            _attention(captured[name], layers_with(model, name), inputs, *about)
            for name, about in _ATTENTION.items()
            if name in captured
        ],
        "logits": _largest_logits(np.asarray(passed.logits[0], np.float32)),
    }
    if "block.output" in captured:
        stream = [captured["block.input"][:1], captured["block.output"]]
        stream = np.concatenate([np.asarray(x, np.float32) for x in stream])
        data["lens"] = _lens(model, variables, inputs, stream)
        data["vectors"] = _vectors(captured, stream)
    return data


def _batches(inputs: EncodedText) -> tuple[Any, Any]:
    tokens = np.asarray([inputs.tokens], np.int32)
    return tokens, None if inputs.source is None else np.asarray([inputs.source], np.int32)


def _attention(
    weights: Float[Array, "layers heads queries keys"],
    layers: list[int],
    inputs: EncodedText,
    label: str,
    queries: str,
    keys: str,
) -> dict[str, Any]:
    lengths = {"tokens": len(inputs.tokens), "source": len(inputs.source or ())}
    rows = np.asarray(weights, np.float32)[:, :, : lengths[queries], : lengths[keys]]
    num_heads = rows.shape[1]
    if rows.size > MOST_WEIGHTS:
        rows = rows.mean(axis=1, keepdims=True)
    about = {"label": label, "queries": queries, "keys": keys, "num_heads": num_heads}
    about["layers"] = layers
    return {**about, "weights": pack_rows(rows)}


def _largest_logits(logits: Float[np.ndarray, "length vocab"]) -> dict[str, Any]:
    """Returns the largest logits of each position, and the log-sum-exp of all logits."""
    num = min(NUM_LOGITS, logits.shape[-1])
    ids = _largest(logits, num)
    return {
        "ids": pack(ids, "int32"),
        "values": pack(np.take_along_axis(logits, ids, axis=-1), "float32"),
        "log_sum": pack(_log_sum(logits), "float32"),
        "vocab_size": logits.shape[-1],
    }


def _lens(
    model: LanguageModel,
    variables: Variables,
    inputs: EncodedText,
    stream: Float[np.ndarray, "states length dim"],
) -> dict[str, Any]:
    """Returns the predictions if the rest of the model after a layer is skipped.

    A patch replaces the output of the last block by the residual stream after each earlier one, so
    the model's own final norm and head compute the logits.
    """
    num_layers = model.config.num_layers
    is_last = (np.arange(num_layers) == num_layers - 1)[:, None, None, None]
    tokens, source = _batches(inputs)
    ids, shares = [], []
    for x in stream:
        patch = {"block.output": Patch(is_last, x[None, None])}
        found = inspect(model, variables, tokens, source=source, patch=patch).logits[0]
        logits = np.asarray(found, np.float32)
        best = _largest(logits, min(NUM_SHOWN, logits.shape[-1]))
        ids.append(best)
        log_shares = np.take_along_axis(logits, best, axis=-1) - _log_sum(logits)[:, None]
        shares.append(np.exp(log_shares))
    return {"ids": pack(np.stack(ids), "int32"), "shares": pack(np.stack(shares), "float16")}


def _vectors(
    captured: dict[str, Array], stream: Float[np.ndarray, "states length dim"]
) -> dict[str, Any]:
    length = stream.shape[1]
    places = np.unique(np.linspace(0, length - 1, min(MOST_POSITIONS, length)).round().astype(int))
    vectors = {"positions": places.tolist(), "stream": pack(stream[:, places], "float32")}
    if len(captured.get("attention.output", ())) == len(stream) - 1:  # every layer has attention
        added = np.asarray(captured["attention.output"], np.float32)[:, places]
        vectors["attention"] = pack(added, "float32")
    return vectors


def dependency_data(
    model: LanguageModel, variables: Variables, inputs: EncodedText
) -> dict[str, Any]:
    """Returns which logits change with which tokens, and how the rule of the model compares."""
    tokens = np.asarray(inputs.tokens[:DEPENDENCY_LENGTH], np.int32)
    read = {} if inputs.source is None else {"source": np.asarray([inputs.source], np.int32)}

    def logits(variables: Variables, tokens: Array) -> Array:
        return model.apply(variables, tokens[None], **read)[0]

    # The witness "taint" compiles more than a hundred small programs, which takes ten seconds.
    options = {"weights": {"params": variables["params"]}, "witnesses": ("change",)}
    found = dependency_matrix(logits, tokens, **options)
    segments = np.ones((1, len(tokens)), int)
    rule = rules.of(model.config, segments, mask=model.mask, layers=model.layers)[0, :, 0]
    compared = compare(found, rule)
    return {
        "effects": pack(np.nan_to_num(found.effects), "float32"),
        "matrix": found.matrix.astype(int).tolist(),
        "rule": rule.astype(int).tolist(),
        "witnesses": list(found.witnesses),
        "holds": bool(compared.holds),
        "summary": str(compared),
        "remarks": [*found.remarks, *found.notes],
    }


def final_logits(
    model: LanguageModel, params: Any, inputs: EncodedText
) -> Float[np.ndarray, " vocab"]:
    """Returns JAX's logits of the last position, with which the page compares its own."""
    tokens, _ = _batches(inputs)
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens)[0, -1], np.float32)


def _largest(logits: Float[np.ndarray, "*batch vocab"], num: int) -> Any:
    """Returns the ids of the `num` largest logits, the largest first."""
    ids = np.argpartition(-logits, num - 1, axis=-1)[..., :num]
    order = np.argsort(-np.take_along_axis(logits, ids, axis=-1), axis=-1, kind="stable")
    return np.take_along_axis(ids, order, axis=-1).astype(np.int32)


def _log_sum(logits: Float[np.ndarray, "*batch vocab"]) -> Float[np.ndarray, "*batch"]:
    largest = logits.max(axis=-1)
    return largest + np.log(np.exp(logits - largest[..., None]).sum(axis=-1))
