"""A family of models as one value: the pure functions that a module is made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.positions import DocumentCursor

Weights = Mapping[str, Any]


@runtime_checkable
class ForwardPass(Protocol):
    """Runs one pass over complete sequences or, with a cache, over the next tokens."""

    def __call__(
        self, weights: Weights, inputs: Inputs, config: Any, run: Run, cache: Any = None
    ) -> Forward:
        """Computes the hidden states of the inputs."""


@runtime_checkable
class Start(Protocol):
    """Makes the cache of rows that have read only their source."""

    def __call__(
        self,
        weights: Weights,
        source: Inputs | None,
        config: Any,
        run: Run,
        size: "CacheSize",
    ) -> tuple[Any, dict[str, Array]]:
        """Returns (the cache, the values captured while the source was read)."""


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
        reach: how many tokens a token of a ring sees, itself included; None: this is no ring.
    """

    batch_size: int
    capacity: int
    reach: int | None = None


@dataclass(frozen=True)
class Family:
    """The pure functions of a kind of model. `config` is the kind's config, resolved.

    Attributes:
        initializers: config → {name of a part: initializer of its weights, a function of a key}.
        forward: see `ForwardPass`.
        points: config → names of the points to capture or patch, in the order of computation.
        layer_points: config → the points that every layer has.
        start: see `Start`; None if the model is not autoregressive.
        prepare: (weights, config, number of parts of a packed kernel) → weights for decoding; None
            if the model is not autoregressive.
        masks: (config, the caller's mask or None) → the mask of each layer; None if the model has
            no self-attention.
    """

    initializers: Callable[[Any], dict[str, Callable[[PRNGKeyArray], Any]]]
    forward: ForwardPass
    points: Callable[[Any], tuple[str, ...]]
    layer_points: Callable[[Any], tuple[str, ...]]
    start: Start | None = None
    prepare: Callable[[Weights, Any, int], Weights] | None = None
    masks: Callable[[Any, Mask | None], tuple[Mask, ...]] | None = None

    @cache  # noqa: B019 (families are constants)
    def weight_shapes(self, config: Any) -> dict[str, Any]:
        """Returns the shapes of the weights, {name of a part: shapes}."""
        key = jax.random.key(0)
        parts = self.initializers(config).items()
        return {name: jax.eval_shape(init, key) for name, init in parts}
