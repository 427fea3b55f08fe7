"""Hooks as data: named points at which a value can be captured or replaced.

The functions of this package call `tap(name, value)` and continue with the returned value. Usually
that is `value` itself. The `Tap` of a pass replaces the values that a patch names, constrains each
value to its devices, and stores those to capture. No state outlives a trace, so a model with
captures and patches is still one compiled function.

Every tapped value has its tokens on the last axis but one.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from jaxformer.functional.placement import OneDevice, Placement

TapFunction = Callable[[str, Array], Array]


class Patch(NamedTuple):
    """Replacement by `value` where `where` is true; both broadcast against the tapped value.

    At points inside the layers both have the layer as their first axis (size num_layers or 1).

    Attributes:
        where: bool, the entries to replace.
        value: the new values.
        positions: int [p], positions of tokens in their document. Only these tokens change, and the
            token axis (the last but one) of `where` and `value` has size p, with entry k for
            positions[k], or size 1. The patch then means the same in a pass over complete sequences
            and in cached steps. Padding has no position and never changes. None: every token of the
            pass. A position that no text can have is refused, except inside jit.
        steps: int [s], for `generate`: the generated tokens whose predicting pass changes. 0 is the
            first one, which the pass over the prompt predicts. None: all.
    """

    where: Any
    value: Any
    positions: Any = None
    steps: Any = None

    def of_layers(self, name: str, num_layers: int) -> list["Patch"]:
        """Returns the patch of each layer.

        Raises:
            ValueError: the first axis of `where` or `value` is not that of the layers.
        """
        for part, x in (("where", self.where), ("value", self.value)):
            if jnp.shape(x)[:1] not in ((1,), (num_layers,)):
                raise ValueError(
                    f"patch {name!r}: {part} is {jnp.shape(x)}; inside the layers its first axis "
                    f"is the layer, of size 1 or {num_layers}"
                )

        def at(x: Any, layer: int) -> Array:
            return jnp.asarray(x)[min(layer, len(x) - 1)]

        return [
            self._replace(where=at(self.where, layer), value=at(self.value, layer))
            for layer in range(num_layers)
        ]

    def of_token(self, index: Int[Array, ""], length: int) -> "Patch":
        """Returns the patch of token number `index` in a pass over `length` tokens."""

        def at(x: Array) -> Array:
            has_tokens = self.positions is None and np.ndim(x) > 1 and jnp.shape(x)[-2] == length
            return jax.lax.dynamic_slice_in_dim(x, index, 1, axis=-2) if has_tokens else x

        return self._replace(where=at(jnp.asarray(self.where)), value=at(jnp.asarray(self.value)))


@dataclass(frozen=True)
class Hooks:
    """Points of a pass to capture and to patch.

    Attributes:
        capture: names of points to capture.
        patch: {name: Patch}.
        step: in `generate`, the index of the generated token that the pass predicts.
    """

    capture: tuple[str, ...] = ()
    patch: Mapping[str, Patch] = field(default_factory=dict)
    step: Any = None

    def of(self, names: Collection[str]) -> "Hooks":
        """Returns the hooks at the points in `names`."""
        return replace(
            self,
            capture=tuple(name for name in self.capture if name in names),
            patch={name: entry for name, entry in self.patch.items() if name in names},
        )

    def within(self, prefix: str) -> "Hooks":
        """Returns the hooks whose names start with `prefix`, with the prefix removed."""
        return replace(
            self,
            capture=tuple(x.removeprefix(prefix) for x in self.capture if x.startswith(prefix)),
            patch={
                name.removeprefix(prefix): entry
                for name, entry in self.patch.items()
                if name.startswith(prefix)
            },
        )

    def at_step(self, step: Int[Array, ""] | int) -> "Hooks":
        """Returns the hooks for the pass that predicts generated token number `step`."""
        return replace(self, step=step) if self.patch else self

    def of_token(self, index: Int[Array, ""], length: int) -> "Hooks":
        """Returns the hooks of one token; see `Patch.of_token`."""
        patch = {name: entry.of_token(index, length) for name, entry in self.patch.items()}
        return replace(self, patch=patch)


NO_HOOKS = Hooks()
jax.tree_util.register_dataclass(Hooks, data_fields=["patch", "step"], meta_fields=["capture"])


class Tap:
    """The points of one pass, with the captured values in `captured`."""

    def __init__(
        self,
        hooks: Hooks = NO_HOOKS,
        positions: Int[Array, "*batch length"] | None = None,
        documents: Shaped[Array, "*batch length"] | None = None,
        placement: Placement = OneDevice(),  # noqa: B008 (frozen)
    ) -> None:
        """Creates the tap of a pass.

        Args:
            hooks: points to capture and patch.
            positions: the position of each token in its document; None: no patch has positions.
            documents: the document of each token, 0 or False for padding; None: no padding.
            placement: where the values lie on devices.
        """
        self.hooks, self.positions, self.documents = hooks, positions, documents
        self.placement, self.captured = placement, {}

    def __call__(self, name: str, value: Array) -> Array:
        """Captures `value` at the point `name`; returns it, patched if a patch names the point."""
        if name in self.hooks.patch:
            value = self._patched(name, self.hooks.patch[name], value)
        value = self.placement.place(name, value)
        if name in self.hooks.capture:
            self.captured[name] = value
        return value

    def has(self, name: str) -> bool:
        """Returns whether the value at a point is captured or patched."""
        return name in self.hooks.capture or name in self.hooks.patch

    def _patched(
        self, name: str, patch: Patch, value: Shaped[Array, "*shape"]
    ) -> Shaped[Array, "*shape"]:
        where, new = patch.where, jnp.asarray(patch.value, value.dtype)
        if patch.positions is not None:
            matches = self._matches(patch.positions)
            index, is_there = matches.argmax(axis=-1), matches.any(axis=-1)
            where, new = (_aligned(name, x, index, matches, value) for x in (where, new))
            where = jnp.logical_and(where, _per_token(is_there, value)[..., None])
        if patch.steps is not None:
            where = jnp.logical_and(where, (self.hooks.step == jnp.asarray(patch.steps)).any())
        for part, x in (("where", where), ("value", new)):
            if not _fits(jnp.shape(x), value.shape):
                raise ValueError(
                    f"patch {name!r}: {part} is {jnp.shape(x)}; it must broadcast to {value.shape}"
                )
        return jnp.where(where, new, value)

    def _matches(self, positions: Any) -> Bool[Array, "*batch length p"]:
        """Returns bool [*batch, length, p]: whether a token has one of the positions."""
        matches = jnp.asarray(self.positions)[..., None] == jnp.asarray(positions)
        return matches if self.documents is None else matches & (self.documents != 0)[..., None]


def _per_token(x: Shaped[Array, "*batch length"], value: Array) -> Shaped[Array, "..."]:
    """Inserts axes into x [*batch, length] for those between batch and tokens in `value`."""
    return x if x.ndim == 1 else x.reshape(len(x), *[1] * (value.ndim - 3), -1)


def _aligned(
    name: str,
    x: Any,
    index: Int[Array, "*batch length"],
    matches: Bool[Array, "*batch length p"],
    value: Array,
) -> Any:
    """Moves the entries of x along its token axis, of size p, to the tokens at these positions."""
    size = matches.shape[-1]
    if np.ndim(x) < 2 or jnp.shape(x)[-2] == 1:
        return x
    if jnp.shape(x)[-2] != size:
        raise ValueError(
            f"patch {name!r}: its token axis is {jnp.shape(x)[-2]} long; it must be 1 or, as there "
            f"are positions, {size}"
        )
    x = jnp.asarray(x)
    if index.ndim == 1:
        return jnp.take(x, index, axis=-2)
    x = x.reshape(*[1] * (value.ndim - x.ndim), *x.shape)
    x = jnp.broadcast_to(x, (len(index), *x.shape[1:]))
    return jnp.take_along_axis(x, _per_token(index, value)[..., None], axis=-2)


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, whole) == whole
    except ValueError:
        return False


NO_TAP = Tap()  # captures and replaces no value
