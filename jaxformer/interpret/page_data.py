"""Data of a page: the dependency matrix, the head atlas, and values computed by JAX for a text."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.decoding.autoregressive import inspect
from jaxformer.interpret.atlas import AtlasSettings, HeadAtlas, head_atlas
from jaxformer.interpret.attribution import attribute, cannot_attribute
from jaxformer.interpret.encoded_text import EncodedText
from jaxformer.interpret.layers import layers_with
from jaxformer.interpret.lens import prediction
from jaxformer.interpret.page_file import pack, pack_attention_weights
from jaxformer.interpret.page_masks import masked_keys
from jaxformer.interpret.texts import repeated_batch
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.verify import rules
from jaxformer.verify.comparison import compare
from jaxformer.verify.dependency import dependency_matrix

# After each layer, the page stores this number of the most probable tokens.
NUM_SHOWN = 5
# At each position, the page stores this number of the largest logits.
NUM_LOGITS = 256
# The page stores the residual stream at this number of positions.
MOST_POSITIONS = 12
# If a text has more attention weights than this number, the page stores only their mean over the
# heads.
MOST_WEIGHTS = 8_000_000
DEPENDENCY_LENGTH = 16
_ATLAS_SEQUENCES, _ATLAS_LENGTH = 16, 64

_ATTENTION = {
    "attention.weights": ("Self-attention", "tokens", "tokens"),
    "cross_attention.weights": ("Cross-attention to the source", "tokens", "source"),
    "encoder.attention.weights": ("Self-attention of the encoder", "source", "source"),
}


def captured_data(
    model: LanguageModel, variables: Variables, inputs: EncodedText
) -> dict[str, Any]:
    """Runs the model and returns the values for a page that cannot run the model.

    Returns:
        A dict with "attention" (attention weights), "logits" (the largest logits of each position),
        "lens" (predictions after each layer) and "vectors" (the residual stream at some positions).
        The keys "lens" and "vectors" are missing if the model has no residual stream of equal width
        in all layers.
    """
    wanted = [*_ATTENTION]
    # A lens applies the output head to the input and the output of every layer, so all layers must
    # have the same width.
    if len(set(model.architecture.stack.dims)) == 1:
        wanted += ["block.input", "block.output", "attention.output"]
    names = [name for name in wanted if name in model.hook_points]
    passed, captured = run_captured(model, variables, inputs, names)
    data = {
        "attention": attention_data(model, captured, len(inputs.tokens)),
        "logits": _largest_logits(passed.logits[0]),
    }
    if "block.output" in captured:
        stream = jnp.concatenate([captured["block.input"][:1], captured["block.output"]])
        data["lens"] = _lens(model, variables, stream)
        data["vectors"] = _vectors(captured, np.asarray(stream, np.float32))
    return data


def run_captured(
    model: LanguageModel,
    variables: Variables,
    inputs: EncodedText,
    names: Iterable[str] | None = None,
) -> tuple[Any, dict[str, Array]]:
    """Runs the model on a text.

    Args:
        model: The model.
        variables: The model's variables.
        inputs: The encoded text.
        names: The hook points to capture; the attention weights if None.

    Returns:
        The result of `inspect`, and {hook point: captured value} without the batch axis.
    """
    if names is None:
        names = [name for name in _ATTENTION if name in model.hook_points]
    tokens, source = inputs.as_batch()
    passed = inspect(model, variables, tokens, source=source, capture=list(names))
    return passed, {name: x[:, 0] for name, x in passed.captured.items()}


def attention_data(
    model: LanguageModel, captured: dict[str, Array], length: int
) -> list[dict[str, Any]]:
    """Returns the attention weights of each kind of attention, and the keys that are masked.

    Args:
        model: The model.
        captured: The captured values from `run_captured`.
        length: The number of tokens, without the source.
    """
    entries = []
    for name, about in _ATTENTION.items():
        if name in captured:
            layers = layers_with(model, name)
            entries.append(_attention(captured[name], layers, *about))
            # In the other kinds of attention, no key is masked.
            if name == "attention.weights":
                entries[-1]["masks"] = masked_keys(model, layers, length)
    return entries


def _attention(
    weights: Float[Array, "layers heads queries keys"],
    layers: list[int],
    label: str,
    queries: str,
    keys: str,
) -> dict[str, Any]:
    values = np.asarray(weights, np.float32)
    num_heads = values.shape[1]
    if values.size > MOST_WEIGHTS:
        values = values.mean(axis=1, keepdims=True)
    return {
        "label": label,
        "queries": queries,
        "keys": keys,
        "num_heads": num_heads,
        "layers": layers,
        "weights": pack_attention_weights(values),
    }


def _largest_logits(logits: Float[Array, "length vocab"]) -> dict[str, Any]:
    """Returns the largest logits of each position, and the log-sum-exp of all logits."""
    values, ids = jax.lax.top_k(logits, min(NUM_LOGITS, logits.shape[-1]))
    return {
        "ids": pack(ids, "int32"),
        "values": pack(values, "float32"),
        "log_sum": pack(jax.nn.logsumexp(logits, axis=-1), "float32"),
        "vocab_size": logits.shape[-1],
    }


def _lens(
    model: LanguageModel, variables: Variables, stream: Float[Array, "states length dim"]
) -> dict[str, Any]:
    """Returns the predictions of the logit lens after each layer."""
    predict, ids, shares = jax.jit(prediction, static_argnums=0), [], []
    for state in stream:
        log_shares = predict(model, variables["params"], state[None])[0]
        best, tokens = jax.lax.top_k(log_shares, min(NUM_SHOWN, log_shares.shape[-1]))
        ids.append(tokens)
        shares.append(np.exp(best))
    return {"ids": pack(np.stack(ids), "int32"), "shares": pack(np.stack(shares), "float16")}


def _vectors(
    captured: dict[str, Array], stream: Float[np.ndarray, "states length dim"]
) -> dict[str, Any]:
    length = stream.shape[1]
    places = np.unique(np.linspace(0, length - 1, min(MOST_POSITIONS, length)).round().astype(int))
    vectors = {"positions": places.tolist(), "stream": pack(stream[:, places], "float32")}
    # The page shows the attention outputs only if every layer has attention.
    if len(captured.get("attention.output", ())) == len(stream) - 1:
        added = np.asarray(captured["attention.output"], np.float32)[:, places]
        vectors["attention"] = pack(added, "float32")
    return vectors


def dependency_data(
    model: LanguageModel, variables: Variables, inputs: EncodedText
) -> dict[str, Any]:
    """Returns which logits depend on which tokens, and whether `rules.model_rule` agrees."""
    tokens, source = inputs.as_batch()
    tokens = tokens[0, :DEPENDENCY_LENGTH]

    def logits(variables: Variables, tokens: Array) -> Array:
        return model.apply(variables, tokens[None], source=source)[0]

    # The method "taint" compiles more than a hundred small programs, which takes ten seconds.
    options = {"weights": {"params": variables["params"]}, "witnesses": ("change",)}
    found = dependency_matrix(logits, tokens, **options)
    segment_ids = np.ones((1, len(tokens)), int)
    rule = rules.model_rule(model.config, segment_ids, mask=model.mask, layers=model.layers)[
        0, :, 0
    ]
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


def all_logits(
    model: LanguageModel, params: Any, inputs: EncodedText
) -> Float[np.ndarray, "length vocab"]:
    """Returns JAX's logits at all positions, with which the page compares its own logits."""
    tokens, source = inputs.as_batch()
    return np.asarray(_apply(model, {"params": params}, tokens, source)[0], np.float32)


# `model` is static, so that pages of the same model and length share a compiled program.
@partial(jax.jit, static_argnums=0)
def _apply(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[np.ndarray, "batch length"],
    source: Int[np.ndarray, "batch source"] | None,
) -> Float[Array, "batch length vocab"]:
    return model.apply(variables, tokens, source=source)


def rounding_data(
    exact: Float[np.ndarray, "length vocab"], rounded: Float[np.ndarray, "length vocab"]
) -> dict[str, Any]:
    """Returns how far rounding the weights to 8 bits changes the logits of a text.

    Args:
        exact: The logits of the model.
        rounded: The logits of the model with rounded weights.
    """
    same = exact.argmax(axis=-1) == rounded.argmax(axis=-1)
    return {
        "difference": float(np.abs(exact - rounded).max()),
        "spread": float(exact.std(axis=-1).mean()),
        "same": int(same.sum()),
        "tokens": len(same),
    }


def repeated_atlas(model: LanguageModel, variables: Variables) -> HeadAtlas | None:
    """Measures the head atlas of a decoder on a random sequence that is repeated once.

    Returns None if the model's max_length is less than four tokens.
    """
    config = model.config
    length = min(config.max_length, _ATLAS_LENGTH)
    if length < 4:
        return None
    batch = repeated_batch(config.vocab_size, length, _ATLAS_SEQUENCES)
    return head_atlas(
        model, variables, batch, AtlasSettings(batch_size_within_memory=_ATLAS_SEQUENCES)
    )


def atlas_data(atlas: HeadAtlas, text: str) -> dict[str, Any]:
    """Returns the scores, the effects and the standard errors as lists.

    A score that is NaN for some head is omitted.

    Args:
        atlas: The head atlas.
        text: The name of the text on which the atlas was measured, for a note on the page.
    """
    scores = {name: x.tolist() for name, x in atlas.scores.items() if np.isfinite(x).all()}
    return {
        "scores": scores,
        "effects": atlas.effect.tolist(),
        "errors": atlas.standard_error.tolist(),
        "text": f"Measured on {atlas.num_sequences} sequences of {text}.",
    }


def attribution_data(
    model: LanguageModel, variables: Variables, inputs: EncodedText, target: int
) -> dict[str, Any] | None:
    """Splits the last position's logit of `target` into the contributions of the sub-layers.

    Returns None if the model is not supported.
    """
    if cannot_attribute(model) is not None:
        return None
    tokens, source = inputs.as_batch()
    found = attribute(model, variables, jnp.asarray(tokens), jnp.array([target]), source=source)
    names = {"cross_heads": "cross", "biases": "rest"}
    return {"target": target} | {
        names.get(name, name): np.asarray(x[0], float).tolist()
        for name, x in found._asdict().items()
        if x is not None
    }
