"""Descriptions of the sizes of a model as text."""

from jaxformer.models.config import architecture_name
from jaxformer.models.config.model import ModelConfig

# The label of each size of a stack of layers, by config field, in the order of the description.
_STACK = {
    "num_layers": "layers",
    "embed_dim": "width",
    "hidden_dim": "state width",
    "num_heads": "heads",
    "head_dim": "head width",
    "num_kv_heads": "key and value heads",
    "mlp_dim": "feed-forward width",
    "kernel_size": "kernel size",
}
_MODEL = {"vocab_size": "vocabulary", "max_length": "maximum length"}


def describe_sizes(config: ModelConfig) -> list[str]:
    """Returns the kind and the sizes of a model as text, one line per stack of layers.

    Args:
        config: The model's config.
    """
    config = config.resolved
    model = _sizes(config, _MODEL)
    stacks = {prefix.rstrip("/"): _sizes(x, _STACK) for prefix, x in config.stacks.items()}
    decoder = stacks.pop("")
    if not stacks:
        return [f"model: {architecture_name(config)}, {decoder}, {model}"]
    parts = {**stacks, "decoder": decoder}
    return [
        f"model: {architecture_name(config)}, {model}",
        *(f"{name}: {sizes}" for name, sizes in parts.items()),
    ]


def _sizes(config: ModelConfig, labels: dict[str, str]) -> str:
    """Formats the sizes in a config, such as the number of layers, as a line of text."""
    sizes = {label: getattr(config, name, None) for name, label in labels.items()}
    return ", ".join(f"{label} {size:,}" for label, size in sizes.items() if size is not None)
