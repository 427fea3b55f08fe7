"""Sizes of a model as text."""

from jaxformer.models.config import kind_of
from jaxformer.models.config.model import ModelConfig

# Labels of the sizes of one stack of layers, by field, in the order of the text.
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
    """Returns the kind and the sizes of a model as lines, one for each stack of layers.

    Args:
        config: The model's config.
    """
    config = config.resolved
    model = _sizes(config, _MODEL)
    stacks = {prefix.rstrip("/"): _sizes(x, _STACK) for prefix, x in config.stacks.items()}
    decoder = stacks.pop("")
    if not stacks:
        return [f"model: {kind_of(config)}, {decoder}, {model}"]
    parts = {**stacks, "decoder": decoder}
    return [
        f"model: {kind_of(config)}, {model}",
        *(f"{name}: {sizes}" for name, sizes in parts.items()),
    ]


def _sizes(config: ModelConfig, labels: dict[str, str]) -> str:
    """Returns the sizes that a config has."""
    sizes = {label: getattr(config, name, None) for name, label in labels.items()}
    return ", ".join(f"{label} {size:,}" for label, size in sizes.items() if size is not None)
