"""Interactive page about a model and a text: one HTML file that works offline.

    page = explain(model, variables, "def f(x):", tokenizer)
    page.write("page.html")

For a model of at most 30 million parameters, the page contains the weights, and JavaScript runs
the model in the browser: typing a text, editing a token or ablating a head changes the logits. For
any other model, the page shows values that JAX computed.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.artifacts.files import write_whole
from jaxformer.artifacts.saved import Checkpoint
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.functional.linear.affine import dense_all
from jaxformer.functional.trees import Weights, stack_trees
from jaxformer.interpret.atlas import HeadAtlas
from jaxformer.interpret.encoded_text import EncodedText, encode_text, token_names
from jaxformer.interpret.layers import layers_with
from jaxformer.interpret.page_compare import Compared, check_comparable, compare_data, shown_ids
from jaxformer.interpret.page_data import (
    all_logits,
    atlas_data,
    attribution_data,
    captured_data,
    dependency_data,
    repeated_atlas,
    rounding_data,
)
from jaxformer.interpret.page_drawing import drawing_data
from jaxformer.interpret.page_file import pack, page_html, unpack
from jaxformer.interpret.page_kinds import page_config
from jaxformer.interpret.page_tokenizer import tokenizer_data
from jaxformer.interpret.page_weights import (
    for_page,
    has_8_bits,
    live_reason,
    num_parameters,
    packed_weights,
    unpacked_weights,
)
from jaxformer.models.config import DecoderConfig, architecture_name
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import LanguageModel

PAGE_FORMAT = 1
# A decoder with at most this number of parameters gets a head atlas on its page.
MOST_MEASURED = 5_000_000


@dataclass(frozen=True)
class Page:
    """A self-contained HTML page.

    Attributes:
        html: The complete document.
        mode: "live" if the page runs the model, "captured" if the page shows stored values.
        reason: The reason why the mode is "captured"; None if the mode is "live".
        num_tokens: The number of tokens of the text.
    """

    html: str
    mode: str
    reason: str | None
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """The size of the HTML file in bytes."""
        return len(self.html.encode())

    def write(self, path: str | Path) -> Path:
        """Writes the page to a file and returns the path. An existing file is replaced."""
        write_whole(Path(path), self.html)
        return Path(path)

    def __repr__(self) -> str:
        """Describes the page on one line."""
        return f"Page({self.mode}, {self.num_tokens} tokens, {self.num_bytes:,} bytes)"

    def _repr_html_(self) -> str:
        """Returns the page in a sandboxed iframe, for Jupyter.

        Each page in a notebook is a separate document, so the scripts of several pages do not share
        names.
        """
        return (
            '<iframe sandbox="allow-scripts allow-downloads" title="jaxformer page" width="100%" '
            f'height="820" style="border:0" srcdoc="{html.escape(self.html)}"></iframe>'
        )


def explain(
    model: LanguageModel,
    variables: Mapping[str, Any],
    text: str | Sequence[int],
    tokenizer: Tokenizer | None = None,
    *,
    target: str | Sequence[int] | None = None,
    title: str = "",
    atlas: HeadAtlas | None = None,
    compare: Checkpoint | Compared | None = None,
) -> Page:
    """Creates an interactive page about a model and a text.

    Args:
        model: Any model.
        variables: The model's variables, {"params": …}. Kernels with a LoRA update and integer
            kernels are replaced by dense float kernels.
        text: The text, or token ids that include the start token. For a model with a source, `text`
            is the source.
        tokenizer: The tokenizer. If None, `text` and `target` must be token ids, and the page shows
            ids.
        target: For a model with a source: the text of the decoder. If None, the model translates
            the source greedily.
        title: The name of the model on the page. If empty, the page shows the name of the model's
            class.
        atlas: The result of `head_atlas` to show. If None, a page that runs the model shows a head
            atlas that was measured on repeated random tokens.
        compare: A second model, as `jaxformer.load` returns it. An additional tab compares the two
            models on the same text. Both models must have the same tokenizer.

    Returns:
        The page.

    Raises:
        ValueError: A text is empty, too long or passed without a tokenizer, the variables do not
            fit the model, or the second model cannot be compared with the first.
    """
    if "params" not in variables:
        raise ValueError(
            f"variables have the keys {', '.join(variables)}; they must contain 'params'"
        )
    inputs = encode_text(model, variables, text, tokenizer, target)
    model.check(variables)
    if compare is not None:
        compare = compare if isinstance(compare, Compared) else Compared(compare)
        check_comparable(model, tokenizer, compare.checkpoint, inputs)
        compare.checkpoint.model.check(compare.checkpoint.variables)
    # The page stores dense arrays only, without LoRA updates or integer kernels.
    variables = {"params": dense_all(variables["params"])}
    reason = live_reason(model, variables)
    data: dict[str, Any] = {
        "format": PAGE_FORMAT,
        "mode": "captured" if reason else "live",
        "reason": reason,
        "title": title or type(model).__name__,
        "kind": architecture_name(model.config),
        "facts": _facts(model, variables),
        "tokens": inputs.tokens,
        "source": inputs.source,
        "dependency": dependency_data(model, variables, inputs),
        "drawing": drawing_data(model, variables),
    }
    if reason:
        data["config"] = _sizes(model.config)
        data |= _captured(model, variables, inputs)
    else:
        data |= _live(model, variables["params"], inputs)
        data |= tokenizer_data(tokenizer, model.config)
    if compare is not None:
        data["compare"] = compare_data(model, variables, data["title"], compare, inputs)
    data["mask"] = tokenizer.mask_token if tokenizer and model.config.bidirectional else None
    data["names"] = _names(data, tokenizer, model.config.vocab_size)
    if atlas is not None:
        data["atlas"] = atlas_data(atlas, "text")
    elif _measures_heads(model, variables, reason):
        found = repeated_atlas(model, variables)
        if found is not None:
            data["atlas"] = atlas_data(found, "repeated random tokens")
    document = page_html(data, f"{data['title']}: attention, layers and decoding")
    return Page(document, data["mode"], reason, len(inputs.tokens))


def _captured(model: LanguageModel, variables: Weights, inputs: EncodedText) -> dict[str, Any]:
    """Returns values that JAX computed.

    Norms and attributions are missing if the model does not support them.
    """
    captured = captured_data(model, variables, inputs)
    best = int(unpack(captured["logits"]["ids"])[-1, 0])
    optional = {
        "norms": _norms(model, variables["params"]),
        "attribution": attribution_data(model, variables, inputs, best),
    }
    return {"captured": captured} | {name: x for name, x in optional.items() if x is not None}


def _live(model: LanguageModel, params: Weights, inputs: EncodedText) -> dict[str, Any]:
    """Returns the config, the weights, and JAX's logits for comparison with the page's logits."""
    weights = packed_weights(params)
    expected = all_logits(model, unpacked_weights(weights), inputs)
    data = {
        "config": page_config(model.config, params),
        "weights": for_page(weights),
        "expected": pack(expected[-1], "float32"),
    }
    if has_8_bits(params):
        data["rounding"] = rounding_data(all_logits(model, params, inputs), expected)
    return data


def _measures_heads(model: LanguageModel, variables: Weights, reason: str | None) -> bool:
    """Returns whether `explain` measures a head atlas if the caller does not pass one.

    A larger model would take minutes, because the effect of each head needs a forward pass.
    """
    small = num_parameters(variables["params"]) <= MOST_MEASURED
    return reason is None and small and isinstance(model.config, DecoderConfig)


def _facts(model: LanguageModel, variables: Weights) -> list[list[str]]:
    """Returns pairs of a label and a value for the header of the page."""
    config = model.config
    size = num_parameters(variables["params"])
    found = [["kind", architecture_name(config)], ["parameters", f"{size:,}"]]
    fields = {"num_layers": "layers", "num_heads": "heads", "embed_dim": "width"}
    fields |= {"vocab_size": "vocabulary"}
    found += [
        [x, f"{getattr(config, name):,}"] for name, x in fields.items() if hasattr(config, name)
    ]
    return found


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """Returns the config fields that a page without the model's weights needs."""
    names = """vocab_size max_length num_layers num_heads num_kv_heads head_dim embed_dim norm
        norm_position norm_epsilon bidirectional cell"""
    return {name: getattr(config, name) for name in names.split() if hasattr(config, name)}


def _norms(model: LanguageModel, params: Weights) -> dict[str, Any] | None:
    """Returns the scale γ and the bias β of the norm before the attention of each layer.

    Returns None if a layer has no attention, or if its norm has parameters other than γ and β.
    """
    stack = model.architecture.stack
    if len(layers_with(model, "attention.output")) < len(stack.layers):
        return None
    trees = stack.layer_trees(params["blocks"])
    norms = stack_trees([tree.get("attention_norm", {}) for tree in trees])
    if not norms or not norms.keys() <= {"scale", "bias"}:
        return None
    return {name: pack(np.asarray(x, np.float32), "float32") for name, x in norms.items()}


def _names(data: dict, tokenizer: Tokenizer | None, vocab_size: int) -> Any:
    """Returns labels of all token ids if the page runs the model, else of the ids on the page."""
    if data["mode"] == "live":
        num_ids = max(vocab_size, data["config"].get("source_vocab_size", 0))
        return token_names(tokenizer, range(num_ids))
    shown = {*data["tokens"], *(data["source"] or ())}
    for part in ("logits", "lens"):
        if part in data["captured"]:
            shown |= set(np.unique(unpack(data["captured"][part]["ids"])).tolist())
    if "compare" in data:
        shown |= shown_ids(data["compare"])
    ids = sorted(shown)
    return dict(zip(map(str, ids), token_names(tokenizer, ids), strict=True))
