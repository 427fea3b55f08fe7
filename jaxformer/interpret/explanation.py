"""Interactive page about a model and a text: one HTML file that needs no network.

    page = explain(model, variables, "def f(x):", tokenizer)
    page.write("page.html")

A page of a small decoder holds the weights, and its JavaScript computes the model: editing a token
or switching off a head gives new logits. A page of any other model holds the values that JAX
computed.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.artifacts.files import write_whole
from jaxformer.functional.linear.affine import dense_all
from jaxformer.functional.trees import Weights, stack_trees
from jaxformer.interpret.atlas import HeadAtlas
from jaxformer.interpret.encoded_text import EncodedText, encode_text, token_names
from jaxformer.interpret.layers import layers_with, transformer_config
from jaxformer.interpret.page_data import (
    atlas_data,
    attribution_data,
    captured_data,
    dependency_data,
    final_logits,
    repeated_atlas,
)
from jaxformer.interpret.page_file import pack, page_html, unpack
from jaxformer.interpret.page_weights import (
    live_reason,
    packed_weights,
    page_config,
    unpacked_weights,
)
from jaxformer.models.config import kind_of
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import LanguageModel

PAGE_FORMAT = 1


@dataclass(frozen=True)
class Page:
    """A self-contained HTML page.

    Attributes:
        html: The complete document.
        mode: "live" if the page computes the model, "captured" if it shows stored values.
        reason: Why the mode is not "live"; None if it is.
        num_tokens: The number of tokens of the text.
    """

    html: str
    mode: str
    reason: str | None
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return len(self.html.encode())

    def write(self, path: str | Path) -> Path:
        """Writes the page to a file, which replaces one of the same name, and returns its path."""
        write_whole(Path(path), self.html)
        return Path(path)

    def _repr_html_(self) -> str:
        """Returns the page in a sandboxed frame, for Jupyter.

        Several pages in one notebook are separate documents, so their names do not clash.
        """
        return (
            '<iframe sandbox="allow-scripts" title="jaxformer page" width="100%" height="820" '
            f'style="border:0" srcdoc="{html.escape(self.html)}"></iframe>'
        )


def explain(
    model: LanguageModel,
    variables: Mapping[str, Any],
    text: str | Sequence[int],
    tokenizer: Any = None,
    *,
    target: str | Sequence[int] | None = None,
    title: str = "",
    atlas: HeadAtlas | None = None,
) -> Page:
    """Computes the page of a text.

    Args:
        model: A model of any kind.
        variables: Its variables, {"params": …}. Kernels with a LoRA update or integers are
            replaced by the arrays that they represent.
        text: The text, or its token ids with their opening. For a model that reads a source, this
            is the source.
        tokenizer: The tokenizer; None: `text` must be ids, and the page shows ids.
        target: The decoder's text, for a model that reads a source. None: the model's own greedy
            translation.
        title: The name of the model on the page; None: its kind.
        atlas: The head atlas to show. None: an atlas on random tokens that occur twice, for a model
            that the page computes; none for other models.

    Returns:
        The page.

    Raises:
        ValueError: A text is empty, too long or without a tokenizer, or the variables do not fit
            the model.
    """
    if "params" not in variables:
        raise ValueError(f"variables hold {', '.join(variables)}; they must hold 'params'")
    inputs = encode_text(model, variables, text, tokenizer, target)
    model.check(variables)
    variables = {"params": dense_all(variables["params"])}  # the page stores arrays
    reason = live_reason(model, variables)
    data: dict[str, Any] = {
        "format": PAGE_FORMAT,
        "mode": "captured" if reason else "live",
        "reason": reason,
        "title": title or type(model).__name__,
        "kind": kind_of(model.config),
        "facts": _facts(model, variables),
        "tokens": inputs.tokens,
        "source": inputs.source,
        "dependency": dependency_data(model, variables, inputs),
    }
    if reason:
        data["config"] = _sizes(model.config)
        data |= _captured(model, variables, inputs)
    else:
        data |= _live(model, variables["params"], inputs)
    data["names"] = _names(data, tokenizer, model.config.vocab_size)
    if atlas is not None:
        data["atlas"] = atlas_data(atlas, "text")
    elif not reason and (found := repeated_atlas(model, variables)) is not None:
        data["atlas"] = atlas_data(found, "random tokens that occur twice")
    document = page_html(data, f"{data['title']}: attention, layers and decoding")
    return Page(document, data["mode"], reason, len(inputs.tokens))


def _captured(model: LanguageModel, variables: Weights, inputs: EncodedText) -> dict[str, Any]:
    """Returns the values that JAX computed, and those of the norms and parts that the model has."""
    captured = captured_data(model, variables, inputs)
    best = int(unpack(captured["logits"]["ids"])[-1, 0])
    optional = {
        "norms": _norms(model, variables["params"]),
        "attribution": attribution_data(model, variables, inputs, best),
    }
    return {"captured": captured} | {name: x for name, x in optional.items() if x is not None}


def _live(model: LanguageModel, params: Weights, inputs: EncodedText) -> dict[str, Any]:
    """Returns the weights and the config, and JAX's logits for a comparison on the page."""
    weights = packed_weights(params)
    expected = final_logits(model, unpacked_weights(weights), inputs)
    return {
        "config": page_config(transformer_config(model), params),
        "weights": weights,
        "expected": pack(expected, "float32"),
    }


def _facts(model: LanguageModel, variables: Weights) -> list[list[str]]:
    """Returns labelled figures for the head of the page."""
    config = model.config
    size = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    found = [["kind", kind_of(config)], ["parameters", f"{size:,}"]]
    fields = {"num_layers": "layers", "num_heads": "heads", "embed_dim": "width"}
    fields |= {"vocab_size": "vocabulary"}
    found += [
        [x, f"{getattr(config, name):,}"] for name, x in fields.items() if hasattr(config, name)
    ]
    return found


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a config that the views of captured values read."""
    names = """vocab_size max_length num_layers num_heads num_kv_heads head_dim embed_dim norm
        norm_position norm_epsilon bidirectional"""
    return {name: getattr(config, name) for name in names.split() if hasattr(config, name)}


def _norms(model: LanguageModel, params: Weights) -> dict[str, Any] | None:
    """Returns γ and β of the norm of attention.

    Returns None if a layer has no attention, or its norm has other weights.
    """
    stack = model.architecture.stack
    if len(layers_with(model, "attention.output")) < len(stack.layers):
        return None
    trees = stack.layer_trees(params["blocks"])
    norms = stack_trees([tree.get("attention_norm", {}) for tree in trees])
    if not norms or not norms.keys() <= {"scale", "bias"}:
        return None
    return {name: pack(np.asarray(x, np.float32), "float32") for name, x in norms.items()}


def _names(data: dict, tokenizer: Any, vocab_size: int) -> Any:
    """Returns the texts of tokens: of all ids if the page is live, otherwise of those shown."""
    if data["mode"] == "live":
        return token_names(tokenizer, range(vocab_size))
    shown = {*data["tokens"], *(data["source"] or ())}
    for part in ("logits", "lens"):
        if part in data["captured"]:
            shown |= set(np.unique(unpack(data["captured"][part]["ids"])).tolist())
    ids = sorted(shown)
    return dict(zip(map(str, ids), token_names(tokenizer, ids), strict=True))
