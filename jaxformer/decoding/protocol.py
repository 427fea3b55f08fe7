"""What decoding and certificates ask of a model: the interface of everything autoregressive."""

from typing import Any, Protocol, runtime_checkable

from jaxformer.functional.contexts import Source
from jaxformer.functional.layers import Forward
from jaxformer.functional.taps import Hooks


@runtime_checkable
class AutoregressiveModel(Protocol):
    """Output i predicts token i + 1 and depends on tokens ≤ i. All are plain functions of weights,
    which are a model's params or what `prepare` makes of them.

    A cache that `start` gives knows its `length`, its `capacity` (None: it has no end) and its
    `cursor`, has a `live_prefix` that is merged back by `merge_prefix`, and its rows can be
    gathered and rewound (`functional.cache`). A model's config has at least vocab_size and
    max_length.
    """

    config: Any

    @property
    def unsupported_reason(self) -> str | None:
        """Why this very model is not autoregressive after all; None: it is."""

    @property
    def minimum_prefill(self) -> int:
        """The fewest tokens of a document that can be read at once at its start."""

    @property
    def reach(self) -> int | None:
        """How many tokens back, itself counted, a token sees in each layer; None: all."""

    @property
    def points(self) -> tuple[str, ...]:
        """The names at which a pass can be looked into, in the order of computation."""

    @property
    def layer_points(self) -> tuple[str, ...]:
        """Those of them that every layer has."""

    def read_source(self, source) -> Source | None:
        """The source that `start` and `forward` take, checked; None for a model that reads none."""

    def prepare(self, params, parts: int) -> Any:
        """The weights as many small steps want them."""

    def start(self, weights, batch_size: int, capacity: int, source, hooks: Hooks) -> tuple:
        """(An empty cache, what was captured of the source)."""

    def forward(self, weights, tokens, *, cache, segments, source, hooks: Hooks) -> Forward:
        """One pass over whole rows or, with a cache, over the next tokens."""

    def logits(self, weights, hidden):
        """float32 logits of hidden states."""

    def output_map(self, weights) -> dict:
        """The head: kernel [dim, vocab_size] and, if it has them, bias and cap."""

    def check(self, variables) -> None:
        """Raise ValueError unless these are variables of this very model."""


def require_autoregressive(model) -> None:
    """Raise ValueError, with the reason, unless the model is autoregressive."""
    reason = "it has no cache to start and go on from"
    if isinstance(model, AutoregressiveModel):
        reason = model.unsupported_reason
    if reason:
        raise ValueError(
            f"{type(model).__name__} is not autoregressive ({reason}), so nothing can be generated "
            "from it or scored by it token by token"
        )
