"""Hooks as data: named points at which a value can be read out or replaced.

The functions of this package call `tap(name, value)` and go on with what it returns. Most of the
time that is `value` itself; a `Tap` made for a pass remembers the values that were asked for and
replaces those that a patch names. Nothing is mutable outside one trace, so a captured, patched
model is still one compiled function.

Every value tapped has its tokens on the last axis but one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def no_tap(name: str, value):
    """Read nothing, replace nothing."""
    return value


class Patch(NamedTuple):
    """Put `value` where `where` is true; both broadcast against the value tapped.

    At points inside the layers both carry the layer as their first axis (size num_layers or 1).

    positions: int [p], the positions in their document of the tokens that are changed; `where` and
    `value` then have a token axis (the last but one) of size p or 1, entry k for positions[k]. So
    one patch means the same in a pass over whole rows and in cached steps. None: every token of the
    pass. Padding has no position and is never changed.
    steps: int [s], in `generate`: which of the generated tokens are predicted by a changed pass; 0
    is the first one, predicted by the pass over the prompt. None: all.
    """

    where: Any
    value: Any
    positions: Any = None
    steps: Any = None

    def of_layers(self, name: str, num_layers: int) -> list["Patch"]:
        """The patch of each layer. ValueError if the first axes are not of layers."""
        for part, x in (("where", self.where), ("value", self.value)):
            if jnp.shape(x)[:1] not in ((1,), (num_layers,)):
                raise ValueError(
                    f"patch {name!r}: {part} is {jnp.shape(x)}; inside the layers its first axis "
                    f"is the layer, of size 1 or {num_layers}"
                )

        def at(x, layer):
            return jnp.asarray(x)[min(layer, len(x) - 1)]

        return [
            self._replace(where=at(self.where, layer), value=at(self.value, layer))
            for layer in range(num_layers)
        ]

    def of_token(self, index, length: int) -> "Patch":
        """The patch of one token of a pass over `length` tokens: what a step through time needs."""

        def at(x):
            has_tokens = self.positions is None and np.ndim(x) > 1 and jnp.shape(x)[-2] == length
            return jax.lax.dynamic_slice_in_dim(x, index, 1, axis=-2) if has_tokens else x

        return self._replace(where=at(jnp.asarray(self.where)), value=at(jnp.asarray(self.value)))


@dataclass(frozen=True)
class Hooks:
    """What a pass is asked for: names to capture, values to put in place.

    step: the number of the generated token that the pass predicts, inside `generate`.
    """

    capture: tuple[str, ...] = ()
    patch: Mapping[str, Patch] = field(default_factory=dict)
    step: Any = None

    def of(self, names) -> "Hooks":
        """The hooks at these points alone."""
        return replace(
            self,
            capture=tuple(name for name in self.capture if name in names),
            patch={name: entry for name, entry in self.patch.items() if name in names},
        )

    def within(self, prefix: str) -> "Hooks":
        """The hooks whose names begin with `prefix`, without it."""
        return replace(
            self,
            capture=tuple(x.removeprefix(prefix) for x in self.capture if x.startswith(prefix)),
            patch={
                name.removeprefix(prefix): entry
                for name, entry in self.patch.items()
                if name.startswith(prefix)
            },
        )

    def at_step(self, step) -> "Hooks":
        """The hooks of the pass that predicts the generated token of this number."""
        return replace(self, step=step) if self.patch else self

    def of_layers(self, num_layers: int) -> list["Hooks"]:
        """The hooks of each layer."""
        patches = {name: entry.of_layers(name, num_layers) for name, entry in self.patch.items()}
        return [
            replace(self, patch={name: entries[layer] for name, entries in patches.items()})
            for layer in range(num_layers)
        ]

    def of_token(self, index, length: int) -> "Hooks":
        patch = {name: entry.of_token(index, length) for name, entry in self.patch.items()}
        return replace(self, patch=patch)


NO_HOOKS = Hooks()
jax.tree_util.register_dataclass(Hooks, data_fields=["patch", "step"], meta_fields=["capture"])


class Tap:
    """One pass's hooks; `captured` holds what was asked for.

    positions: int [*batch, length], the position of each token in its document; documents: int
    [*batch, length], 0 for padding (None: there is none).
    """

    def __init__(self, hooks: Hooks, positions, documents=None):
        self.hooks, self.positions, self.documents = hooks, positions, documents
        self.captured = {}

    def __call__(self, name, value):
        if name in self.hooks.patch:
            value = self._patched(name, self.hooks.patch[name], value)
        if name in self.hooks.capture:
            self.captured[name] = value
        return value

    def _patched(self, name, patch: Patch, value):
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

    def _matches(self, positions):
        """bool [*batch, length, p]: which token stands at which of the positions."""
        matches = jnp.asarray(self.positions)[..., None] == jnp.asarray(positions)
        return matches if self.documents is None else matches & (self.documents != 0)[..., None]


def _per_token(x, value):
    """[*batch, length] with axes for what lies between batch and tokens in `value`."""
    return x if x.ndim == 1 else x.reshape(len(x), *[1] * (value.ndim - 3), -1)


def _aligned(name, x, index, matches, value):
    """The entries of x along its token axis, of size p, moved to the tokens where they belong."""
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


def _fits(shape, whole) -> bool:
    try:
        return np.broadcast_shapes(shape, whole) == whole
    except ValueError:
        return False
