"""What every model is: a value with pure functions of its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.positions import DocumentCursor
from jaxformer.functional.trees import Weights

Initializers = dict[str, Callable[[PRNGKeyArray], Weights]]


@runtime_checkable
class DecodingCache(Protocol):
    """What all caches have; `functional.cache.key_values.Cache` describes each part."""

    @property
    def cursor(self) -> DocumentCursor:
        """How far each row has been read."""

    @property
    def length(self) -> Array:
        """Number of tokens read, int [], padding included."""

    @property
    def capacity(self) -> int | None:
        """The largest number of tokens of a row; None if there is no limit."""

    @property
    def reach(self) -> int | None:
        """How many tokens a token of a ring sees; None if this is no ring."""

    def live_prefix(self, slots: int | None) -> Any:
        """Returns the first slots in the layout for a decoding loop."""

    def merge_prefix(self, prefix: Any) -> Any:
        """Returns `prefix` followed by the remaining slots of this cache."""

    def gather_rows(self, rows: ArrayLike | Sequence[Any]) -> Any:
        """Returns a cache whose row i is row rows[i] of this one."""

    def rewind(self, lengths: ArrayLike | Sequence[Any]) -> Any:
        """Drops the last tokens of each row."""


@dataclass(frozen=True)
class CacheSize:
    """Size of a cache.

    Attributes:
        batch_size: number of rows.
        capacity: the most tokens of a row, padding included.
        ring: True: every layer has a window, and a ring of `capacity` slots. False: all layers have
            `capacity` slots. None: layers with a window have a ring if that is smaller.
        most: the capacity to which the cache may grow; None: it does not grow.
    """

    batch_size: int
    capacity: int
    ring: bool | None = None
    most: int | None = None


@runtime_checkable
class Architecture(Protocol):
    """What a model computes, as a frozen, hashable value.

    Attributes:
        initializers: {name of a part: initializer of its weights, a function of a key}.
        points: the names of the points to capture or patch, in the order of computation.
        layer_points: the points inside the layers; captured values have the layer as first axis.
        masks: the mask of each layer with self-attention.
        generates: whether the model is autoregressive.
    """

    @property
    def initializers(self) -> Initializers:
        """See `Architecture`."""

    @property
    def points(self) -> tuple[str, ...]:
        """See `Architecture`."""

    @property
    def layer_points(self) -> tuple[str, ...]:
        """See `Architecture`."""

    @property
    def masks(self) -> tuple[Mask, ...]:
        """See `Architecture`."""

    @property
    def generates(self) -> bool:
        """See `Architecture`."""

    def forward(
        self, weights: Weights, inputs: Inputs, run: Run, cache: DecodingCache | None = None
    ) -> Forward:
        """Runs one pass over complete sequences or, with a cache, over the next tokens."""

    def finish(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Computes the input of the head from the last layer's output."""

    def start(
        self, weights: Weights, source: Inputs | None, run: Run, size: CacheSize
    ) -> tuple[DecodingCache, dict[str, Array]]:
        """Returns (the cache of rows that have read only their source, values captured then)."""

    def prepare(self, weights: Weights, parts: int = 1) -> Weights:
        """Repacks weights for decoding, with each packed kernel split into `parts` parts."""


@cache
def weight_shapes(architecture: Architecture) -> Mapping[str, Any]:
    """Returns the shapes of the weights, {name of a part: shapes}."""
    key = jax.random.key(0)
    parts = architecture.initializers.items()
    return {name: jax.eval_shape(init, key) for name, init in parts}
