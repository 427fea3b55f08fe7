"""Hooks as data: named points at which a value can be read out or replaced.

The functions of this package call `tap(name, value)` and go on with what it returns. Most of the
time that is `value` itself; a `Tap` made for a pass remembers the values that were asked for and
replaces those that a patch names. Nothing is mutable outside one trace, so a captured, patched
model is still one compiled function.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


def no_tap(name: str, value):
    """Read nothing, replace nothing."""
    return value


class Patch(NamedTuple):
    """Put `value` where `where` is true; both broadcast against the value tapped.

    At points inside the blocks both carry the layer as their first axis (size num_layers or 1).
    """

    where: Array
    value: Array


class Tap:
    """One pass's hooks: `capture` names what to keep in `captured`, `patch` what to replace."""

    def __init__(self, capture=(), patch=None):
        self.capture, self.patch = frozenset(capture), dict(patch or {})
        self.captured = {}

    def __call__(self, name, value):
        if name in self.patch:
            where, replacement = self.patch[name]
            value = jnp.where(where, jnp.asarray(replacement, value.dtype), value)
        if name in self.capture:
            self.captured[name] = value
        return value
