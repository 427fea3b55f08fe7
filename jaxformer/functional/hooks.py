"""Hook points: named places in a forward pass where a value can be captured or changed.

The functions of this package call `hook(name, value)` and continue with the returned value, which
usually is `value` itself. A `Patch` replaces a value by given numbers, and an `Edit` replaces it by
the result of a function. The `HookPoints` object of a forward pass applies both, constrains the
sharding of each value, and stores the values to capture. The object exists only during a trace, so
jit compiles a model together with its captures and changes.

The second-to-last axis of every value at a hook point is the token axis.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from jaxformer.functional.placement import OneDevice, Placement
from jaxformer.functional.symbolic import broadcasts

HookFunction = Callable[[str, Array], Array]


class Patch(NamedTuple):
    """Replaces entries of a value at a hook point: entries where `where` is true become `value`.

    `where` and `value` broadcast against the replaced value. At hook points inside layers, the
    first axis of `where` and `value` is the layer; the size of this axis is 1 or the number of
    layers that have the hook point.

    Attributes:
        where: bool, the entries to replace.
        value: the new values.
        positions: int [p], positions of tokens in their document, or None for all tokens of the
            pass. Only tokens at these positions change. The token axis (the second-to-last) of
            `where` and `value` must have size 1 or p; with size p, entry k belongs to positions[k].
            A patch with positions has the same effect in a pass over complete sequences and in
            cached steps. Padding never changes. Outside jit, a position that no token can have
            raises an error.
        steps: int [s], indices of tokens that `generate` generates, or None for all of them. The
            patch changes only the passes that predict these tokens. Token 0 is predicted by the
            pass over the prompt.
    """

    where: Any
    value: Any
    positions: Any = None
    steps: Any = None

    def split_layers(self, name: str, layers: Sequence[int]) -> list["Patch"]:
        """Splits the patch into one patch for each layer that has the hook point.

        Raises:
            ValueError: The size of the first axis of `where` or `value` is neither 1 nor the number
                of layers.
        """
        num_layers = len(layers)
        for part, x in (("where", self.where), ("value", self.value)):
            if jnp.shape(x)[:1] not in ((1,), (num_layers,)):
                raise ValueError(
                    f"patch {name!r}: {part} has shape {jnp.shape(x)}; for a hook point inside the "
                    f"layers, the first axis must have size 1 or {num_layers} (one per layer)"
                )

        def at(x: Any, layer: int) -> Array:
            return jnp.asarray(x)[min(layer, len(x) - 1)]

        return [
            self._replace(where=at(self.where, layer), value=at(self.value, layer))
            for layer in range(num_layers)
        ]

    def changed(
        self, name: str, value: Shaped[Array, "*shape"], points: "HookPoints"
    ) -> Shaped[Array, "*shape"]:
        """Returns the new value.

        Raises:
            ValueError: `where` or `value` does not broadcast to the value.
        """
        where, new = self.where, jnp.asarray(self.value, value.dtype)
        if self.positions is not None:
            matches = points.matches(self.positions)
            index, is_there = matches.argmax(axis=-1), matches.any(axis=-1)
            where, new = (_aligned(name, x, index, matches, value) for x in (where, new))
            where = jnp.logical_and(where, _per_token(is_there, value)[..., None])
        where = points.at_steps(self.steps, where)
        for part, x in (("where", where), ("value", new)):
            if not broadcasts(jnp.shape(x), value.shape):
                raise ValueError(
                    f"patch {name!r}: {part} is {jnp.shape(x)}; it must broadcast to {value.shape}"
                )
        return jnp.where(where, new, value)

    def for_token(self, index: Int[Array, ""], length: int) -> "Patch":
        """Returns the patch for the token at `index` in a pass over `length` tokens."""

        def at(x: Array) -> Array:
            has_tokens = self.positions is None and np.ndim(x) > 1 and jnp.shape(x)[-2] == length
            return jax.lax.dynamic_slice_in_dim(x, index, 1, axis=-2) if has_tokens else x

        return self._replace(where=at(jnp.asarray(self.where)), value=at(jnp.asarray(self.value)))


class EditAt(NamedTuple):
    """Where an `Edit` is applied: the second argument of its function.

    Attributes:
        layer: int [], the number of the layer, counted from 0; None outside the layers.
        positions: int [*batch, length], the position of each token in its document.
        step: in `generate`, int [], the index of the generated token that the pass predicts;
            otherwise None.
    """

    layer: Int[Array, ""] | None
    positions: Int[Array, "*batch length"] | None
    step: Any = None


@jax.tree_util.register_pytree_node_class
class Edit:
    """Replaces a value at a hook point by the result of a function.

    >>> steer = Edit(lambda value, at, vector: value + 4 * vector, vector, layers=(3,))
    >>> generate(model, variables, prompts, max_new_tokens=20, patch={"block.output": steer}, …)

    The result must have the shape of the replaced value, and is converted to the dtype of this
    value. A compiled program is reused for another `Edit` with the same function object and other
    arrays. Define the function once, because each evaluation of a `lambda` expression creates a new
    object.

    Attributes:
        function: pure function (value, at, *arrays) → new value; see `EditAt`.
        arrays: the arrays that the function receives. All layers receive the same arrays; select
            the entry of a layer by `array[at.layer]`.
        layers: the layers whose value changes; None for all layers that have the hook point.
        positions: int [p], positions of tokens in their document; None for all tokens. Only tokens
            at these positions change. Padding never changes if `positions` is given.
        steps: int [s], indices of tokens that `generate` generates, or None for all of them. The
            edit changes only the passes that predict these tokens.
        layer: the number of the layer, which `split_layers` sets; None before.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arrays: Any,
        layers: Sequence[int] | None = None,
        positions: Any = None,
        steps: Any = None,
    ) -> None:
        """Creates an edit; see the attributes of the class."""
        self.function, self.arrays = function, arrays
        self.layers = None if layers is None else tuple(layers)
        self.positions, self.steps = positions, steps
        self.layer: Any = None

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns (arrays, static fields)."""
        return (self.arrays, self.positions, self.steps, self.layer), (self.function, self.layers)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: tuple[Any, ...]) -> "Edit":
        """Rebuilds an edit from the result of `tree_flatten`."""
        (function, layers), (arrays, positions, steps, layer) = static, children
        edit = cls(function, layers=layers, positions=positions, steps=steps)
        edit.arrays, edit.layer = arrays, layer
        return edit

    def split_layers(self, name: str, layers: Sequence[int]) -> list["Edit"]:
        """Returns the edit of each layer that has the hook point.

        Raises:
            ValueError: One of the edit's layers does not have the hook point.
        """
        for layer in self.layers or ():
            if layer not in layers:
                raise ValueError(
                    f"patch {name!r}: layers contain {layer}; the layers with this hook point are "
                    f"{', '.join(map(str, layers))}"
                )
        edits: list[Edit] = [copy(self) for _ in layers]
        for edit, layer in zip(edits, layers, strict=True):
            edit.layer = jnp.asarray(layer, jnp.int32)
        return edits

    def for_token(self, index: Int[Array, ""], length: int) -> "Edit":
        """Returns the edit unchanged, because its function accepts any number of tokens."""
        return self

    def changed(
        self, name: str, value: Shaped[Array, "*shape"], points: "HookPoints"
    ) -> Shaped[Array, "*shape"]:
        """Returns the new value.

        Raises:
            ValueError: The function returns an array of another shape, or the edit has layers but
                the hook point is outside the layers.
        """
        if self.layers is not None and self.layer is None:
            raise ValueError(
                f"patch {name!r}: layers were given, but the hook point is outside the layers"
            )
        at = EditAt(self.layer, points.positions, points.hooks.step)
        new = self.function(value, at, *self.arrays)
        if jnp.shape(new) != value.shape:
            raise ValueError(
                f"patch {name!r}: the function returns an array of shape {jnp.shape(new)}; it must "
                f"return the shape of the value, {value.shape}"
            )
        new = jnp.asarray(new, value.dtype)
        where: Any = True
        if self.layers is not None:
            where = (self.layer == jnp.asarray(self.layers, jnp.int32)).any()
        if self.positions is not None:
            is_there = points.matches(self.positions).any(axis=-1)
            where = jnp.logical_and(where, _per_token(is_there, value)[..., None])
        where = points.at_steps(self.steps, where)
        return new if where is True else jnp.where(where, new, value)


@dataclass(frozen=True)
class _Zeros:
    """Function of an `Edit` that returns zeros, for one head or for the whole value."""

    head: int | None = None

    def __call__(self, value: Array, at: EditAt) -> Array:
        """Returns `value` with zeros."""
        if self.head is None:
            return jnp.zeros_like(value)
        if value.ndim < 3 or not 0 <= self.head < value.shape[-3]:
            raise ValueError(
                f"head is {self.head}; the value has the shape {value.shape}, in which the "
                "third-to-last axis is the head"
            )
        return value.at[..., self.head, :, :].set(0)


def ablate(
    point: str, *, layer: int | None = None, head: int | None = None, positions: Any = None
) -> dict[str, Edit]:
    """Returns the patch that sets a value to zero.

    >>> inspect(model, variables, tokens, patch=ablate("attention.heads", layer=3, head=5))

    Args:
        point: the name of a hook point.
        layer: the layer; None for all layers.
        head: the head, for a value with an axis of heads; None for the whole value.
        positions: positions of tokens in their document; None for all tokens.
    """
    layers = None if layer is None else (layer,)
    return {point: Edit(_Zeros(head), layers=layers, positions=positions)}


# Changes of a value at a hook point.
Intervention = Patch | Edit


@dataclass(frozen=True)
class Hooks:
    """Hook points to capture and to change in a forward pass.

    Attributes:
        capture: names of hook points to capture.
        patch: {name: Patch or Edit}.
        step: in `generate`, the index of the generated token that the pass predicts.
    """

    capture: tuple[str, ...] = ()
    patch: Mapping[str, Intervention] = field(default_factory=dict)
    step: Any = None

    def of(self, names: Collection[str]) -> "Hooks":
        """Returns the hooks whose hook points are in `names`."""
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
        """Returns the hooks for the pass that predicts the generated token with index `step`."""
        return replace(self, step=step) if self.patch else self

    def for_token(self, index: Int[Array, ""], length: int) -> "Hooks":
        """Returns the hooks of one token; see `Patch.for_token`."""
        patch = {name: entry.for_token(index, length) for name, entry in self.patch.items()}
        return replace(self, patch=patch)


NO_HOOKS = Hooks()
jax.tree_util.register_dataclass(Hooks, data_fields=["patch", "step"], meta_fields=["capture"])


class HookPoints:
    """The hook points of one pass, with the captured values in `captured`."""

    def __init__(
        self,
        hooks: Hooks = NO_HOOKS,
        positions: Int[Array, "*batch length"] | None = None,
        documents: Shaped[Array, "*batch length"] | None = None,
        placement: Placement = OneDevice(),  # noqa: B008 (frozen)
    ) -> None:
        """Creates the hook points of a forward pass.

        Args:
            hooks: hook points to capture and patch.
            positions: the position of each token in its document; may be None if patches do not use
                positions.
            documents: int, the document of each token, 0 for padding; or bool, False for padding.
                None without padding.
            placement: how values are sharded over devices.
        """
        self.hooks, self.positions, self.documents = hooks, positions, documents
        self.placement, self.captured = placement, {}

    def __call__(self, name: str, value: Array) -> Array:
        """Applies the change of the hook point to `value`, and captures the result if requested."""
        if name in self.hooks.patch:
            value = self.hooks.patch[name].changed(name, value, self)
        value = self.placement.place(name, value)
        if name in self.hooks.capture:
            self.captured[name] = value
        return value

    def has(self, name: str) -> bool:
        """Returns whether the hook point is captured or patched."""
        return name in self.hooks.capture or name in self.hooks.patch

    def changes(self, name: str) -> bool:
        """Returns whether the hook point is patched."""
        return name in self.hooks.patch

    def at_steps(self, steps: Any, where: Any) -> Any:
        """Returns `where` if the pass predicts one of the tokens `steps`; otherwise False."""
        if steps is None:
            return where
        return jnp.logical_and(where, (self.hooks.step == jnp.asarray(steps)).any())

    def matches(self, positions: Any) -> Bool[Array, "*batch length p"]:
        """Compares the position of each token with p positions: bool [*batch, length, p]."""
        matches = jnp.asarray(self.positions)[..., None] == jnp.asarray(positions)
        return matches if self.documents is None else matches & (self.documents != 0)[..., None]


def _per_token(x: Shaped[Array, "*batch length"], value: Array) -> Shaped[Array, "..."]:
    """Inserts axes into x [*batch, length], so that x broadcasts over the other axes of `value`."""
    return x if x.ndim == 1 else x.reshape(len(x), *[1] * (value.ndim - 3), -1)


def _aligned(
    name: str,
    x: Any,
    index: Int[Array, "*batch length"],
    matches: Bool[Array, "*batch length p"],
    value: Array,
) -> Any:
    """Returns an array with one entry of x for each token: entry k for a token at positions[k]."""
    size = matches.shape[-1]
    if np.ndim(x) < 2 or jnp.shape(x)[-2] == 1:
        return x
    if jnp.shape(x)[-2] != size:
        raise ValueError(
            f"patch {name!r}: an array has size {jnp.shape(x)[-2]} on its token axis (the "
            f"second-to-last); this size must be 1 or {size}, the number of positions"
        )
    x = jnp.asarray(x)
    if index.ndim == 1:
        return jnp.take(x, index, axis=-2)
    x = x.reshape(*[1] * (value.ndim - x.ndim), *x.shape)
    x = jnp.broadcast_to(x, (len(index), *x.shape[1:]))
    return jnp.take_along_axis(x, _per_token(index, value)[..., None], axis=-2)


# The default hook neither captures nor replaces values.
NO_HOOK = HookPoints()
