"""Which tensor is which: the rows of a family's table, read in both directions.

A row names a part of our parameters and one of theirs, and how theirs is laid out if not as usual.
Ours are those of `model.init`, stacked over the layers; theirs have the number of the layer in the
place of *. A row of which a model has nothing counts for nothing, so one table serves all the
variations of a family.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.artifacts.tensors import Tensor, empty, in_threads

_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}


def _alone(tensor, shapes, num_heads):
    return [tensor]


class Layout(NamedTuple):
    """How a tensor of theirs holds leaves of ours.

    join(our arrays) gives theirs; split(theirs, shapes of ours) gives ours. Both of one layer, and
    of arrays with the outputs last, as ours are. is_transposed: their matrices are [outputs,
    inputs]; first_layer: the first that has it, before which ours are ones, and have no effect.
    """

    join: Callable = lambda arrays, num_heads: arrays[0]
    split: Callable = _alone
    is_transposed: bool = True
    first_layer: int = 0
    shape: Callable = lambda shapes: shapes[0]  # of the joined array, of the shapes of ours


def _concatenate(arrays, num_heads):
    return np.concatenate(arrays, axis=-1)


def _joined_shape(shapes):
    return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))


def _cut(tensor, shapes, num_heads):
    return np.split(tensor, np.cumsum([shape[-1] for shape in shapes])[:-1], axis=-1)


def _concatenate_by_head(arrays, num_heads):
    heads = [x.reshape(*x.shape[:-1], num_heads, -1) for x in arrays]
    return np.concatenate(heads, axis=-1).reshape(*arrays[0].shape[:-1], -1)


def _cut_by_head(tensor, shapes, num_heads):
    heads = tensor.reshape(*tensor.shape[:-1], num_heads, -1)
    parts = np.split(heads, len(shapes), axis=-1)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


LAYOUTS = {
    "": Layout(),
    # Outputs of several maps, one after the other, or head by head.
    "fused": Layout(_concatenate, _cut, shape=_joined_shape),
    "fused-by-head": Layout(_concatenate_by_head, _cut_by_head, shape=_joined_shape),
    "as-ours": Layout(is_transposed=False),  # matrices are [inputs, outputs]
    "fused-as-ours": Layout(_concatenate, _cut, False, shape=_joined_shape),
    "one-row": Layout(
        lambda arrays, _: arrays[0][None],
        lambda tensor, *_: [tensor[0]],
        shape=lambda shapes: (1, *shapes[0]),
    ),
    "after-first": Layout(first_layer=1),
}


@dataclass(frozen=True)
class Row:
    """ours: a leaf, or a branch whose kernel or scale is their weight and whose bias their bias, or
    several, with + between them; theirs: a tensor, or the module that holds those."""

    ours: str
    theirs: str
    layout: str = ""

    def tensors(self, shapes: dict):
        """(our leaves, their tensor): of a branch, those that the model has."""
        if self.ours in shapes:
            yield (self.ours,), self.theirs
            return
        *branch, last = self.ours.split("/")
        names = ["/".join([*branch, name]) for name in last.split("+")]
        for leaf, theirs in _LEAVES.items():
            if f"{names[0]}/{leaf}" in shapes:
                yield tuple(f"{name}/{leaf}" for name in names), f"{self.theirs}.{theirs}"


def table(text: str, **names: str) -> tuple[Row, ...]:
    """The rows of a text, one a line; names: what stands for a word in it."""
    for name, value in names.items():
        text = text.replace(name, value)
    return tuple(Row(*line.split()) for line in text.splitlines() if line.strip())


class Entry(NamedTuple):
    """One tensor of theirs and the leaves of ours that it holds. shapes: of those, in one layer;
    layer: their index on the first axis of ours, None where there is no such axis."""

    theirs: str
    ours: tuple[str, ...]
    shapes: tuple
    layer: int | None
    layout: Layout
    num_heads: int

    @property
    def is_transposed(self) -> bool:
        return self.layout.is_transposed and self.ours[0].endswith("/kernel")

    @property
    def is_as_ours(self) -> bool:
        """Whether theirs holds the same numbers in the same order."""
        return self.layout.split is _alone and not self.is_transposed

    def to_theirs(self, arrays: list):
        """Their tensor, of our arrays of this layer."""
        whole = self.layout.join(arrays, self.num_heads)
        return whole.T if self.is_transposed else whole

    def to_ours(self, tensor) -> list:
        """Our arrays of this layer, of their tensor."""
        tensor = tensor.T if self.is_transposed else tensor
        return self.layout.split(tensor, self.shapes, self.num_heads)

    @property
    def their_shape(self) -> tuple:
        shape = self.layout.shape(self.shapes)
        return shape[::-1] if self.is_transposed else shape


def entries(rows, config, shapes: dict) -> list[Entry]:
    """Every tensor of theirs for a model whose leaves have these shapes.

    ValueError names a leaf that no row of the table has.
    """
    found, covered = [], set()
    for row in rows:
        layout = LAYOUTS[row.layout]
        for ours, theirs in row.tensors(shapes):
            covered.update(ours)
            whole, how = tuple(shapes[name] for name in ours), (layout, config.num_heads)
            if "*" not in theirs:
                found.append(Entry(theirs, ours, whole, None, *how))
                continue
            of_layer = tuple(shape[1:] for shape in whole)
            for n in range(layout.first_layer, whole[0][0]):
                found.append(Entry(theirs.replace("*", str(n)), ours, of_layer, n, *how))
    missing = sorted(set(shapes) - covered)
    if missing:
        raise ValueError(f"it has no tensor for {', '.join(missing)}")
    return found


def read_leaves(wanted: list[Entry], tensors: dict[str, Tensor], like: dict, dtype) -> dict:
    """Our leaves, of their tensors by the names of the table. like: their shapes, and where each is
    to live. ValueError for another shape."""
    by_leaf: dict[tuple, list[Entry]] = {}
    for entry in wanted:
        tensors[entry.theirs].check(entry.their_shape)
        by_leaf.setdefault(entry.ours, []).append(entry)
    arrays = {name: empty(like[name].shape, dtype) for ours in by_leaf for name in ours}

    def leaves(ours):
        for entry in by_leaf[ours]:
            fill(arrays, entry, tensors[entry.theirs])
        return {name: jax.device_put(arrays.pop(name), like[name].sharding) for name in ours}

    parts = in_threads(leaves, by_leaf, lambda ours: sum(like[x].size for x in ours))
    found = {name: leaf for part in parts for name, leaf in part.items()}
    # A first layer that is alone and has none.
    alone = {name: x for name, x in like.items() if name not in found}
    return found | {name: jnp.ones(x.shape, dtype, device=x.sharding) for name, x in alone.items()}


def fill(arrays: dict, entry: Entry, tensor: Tensor) -> None:
    """Put a tensor of theirs where it belongs in ours."""
    places = [arrays[name][... if entry.layer is None else entry.layer] for name in entry.ours]
    if entry.is_as_ours:
        tensor.read_into(places[0])
    else:
        for place, part in zip(places, entry.to_ours(tensor.mapped()), strict=True):
            place[...] = part
    if entry.layer == entry.layout.first_layer:
        for name in entry.ours:
            arrays[name][: entry.layer] = 1
