"""Data of the drawing of a model: facts of its config, and parameter counts of its parts."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from jaxformer.functional.model import Model
from jaxformer.functional.trees import Weights
from jaxformer.models.config import architecture_name
from jaxformer.models.language_model import LanguageModel

# The config fields that the drawing shows. A config has only some of them.
_FACTS = """vocab_size max_length num_layers embed_dim num_heads num_kv_heads head_dim mlp_dim
    activation norm norm_position parallel_block residual positions prefix window tie_embeddings
    first_attention_norm num_experts experts_per_token bidirectional cell hidden_dim kernel_size
    dilation_growth source_vocab_size source_features max_source_length num_encoder_layers
    num_encoder_heads encoder_mlp_dim""".split()


def drawing_data(model: LanguageModel, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts and the parameter counts that the drawing of a model shows.

    Args:
        model: Any model.
        variables: The model's variables, {"params": …}.

    Returns:
        A dict with "kind" (the name of the architecture), "facts" (config fields by name), "total"
        (the number of parameters) and "decoder" and "encoder". Each of the last two is a dict with
        "outside" (the number of parameters by part, such as "embedding.tokens") and "layers" (a
        dict of the same form for each layer). "encoder" is None if the model does not read a
        source. The numbers of all parts sum to "total".
    """
    config, params = model.config, dict(variables["params"])
    encoder = params.pop("encoder", None)
    facts = {name: getattr(config, name) for name in _FACTS if hasattr(config, name)}
    inner = model.architecture.encoder
    return {
        "kind": architecture_name(config),
        "facts": facts,
        "total": _size(variables["params"]),
        "decoder": _counts(model.architecture, params),
        "encoder": None if inner is None or encoder is None else _counts(inner, encoder),
    }


def _counts(architecture: Model, params: Weights) -> dict[str, Any]:
    """Returns the number of parameters of each part outside the layers, and of each layer."""
    outside = {name: tree for name, tree in params.items() if name != "blocks"}
    # `eval_shape` computes the shapes of the layers without copying their weights.
    layers = jax.eval_shape(architecture.stack.layer_trees, params["blocks"])
    return {
        "outside": _by_part(outside),
        "layers": [{name: _size(tree) for name, tree in layer.items()} for layer in layers],
    }


def _by_part(tree: Weights) -> dict[str, int]:
    """Returns the number of parameters by name. Token and position vectors are separate parts."""
    counts: Counter[str] = Counter()
    for name, part in tree.items():
        if name == "embedding":
            counts.update({f"{name}.{inner}": _size(leaf) for inner, leaf in part.items()})
        else:
            counts[name] += _size(part)
    return dict(counts)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
