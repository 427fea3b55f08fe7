"""Which models are autoregressive, and why the others are not."""

from typing import Any

from jaxformer.functional.masks import first_forward_edge
from jaxformer.models.language_model import LanguageModel


def unsupported_reason(model: LanguageModel) -> str | None:
    """Returns why a model cannot generate; None if it is autoregressive."""
    if model.functions.start is None:
        return "it has no cache"
    if not model.config.causal:
        return "its kernels are centred: they see later tokens"
    if model.mask is None:
        return None
    rule = model.self_attention_masks[0]
    edge = first_forward_edge(rule, min(model.config.max_length, 512))
    return edge and f"its mask lets position {edge[0]} see the later position {edge[1]}"


def require_autoregressive(model: Any) -> None:
    """Raises ValueError, with the reason, unless the model is autoregressive."""
    is_model = isinstance(model, LanguageModel)
    if reason := unsupported_reason(model) if is_model else "it has no cache":
        raise ValueError(
            f"{type(model).__name__} is not autoregressive ({reason}), so it can neither generate "
            "nor score token by token"
        )
