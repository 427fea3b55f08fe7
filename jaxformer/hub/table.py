"""Tables that relate jaxformer's parameters to the tensors of transformers, in both directions.

"Ours" are jaxformer's parameters, "theirs" the tensors of transformers. A row names a parameter of
ours, the tensor of theirs and, if it is not the usual one, the layout of theirs. Our parameters are
those of `model.init`, stacked over the layers. The names of theirs have `*` for the number of the
layer, and a second `*` for the number of the expert. A row whose parameters a model lacks is
skipped, so one table serves all variants of a family. If the layers of a model differ, each group
of equal layers is one stacked tree, and a row stands for all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.artifacts.tensors import Tensor, empty, in_threads
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.parameters import layers_by_tree

_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
Shapes = Sequence[tuple[int, ...]]


def _alone(tensor: np.ndarray, shapes: Shapes, num_groups: int) -> list[np.ndarray]:
    return [tensor]


class TensorLayout(NamedTuple):
    """Layout of one of their tensors, which holds one or more of our leaves.

    `join` and `split` work on the arrays of one layer with the outputs on the last axis, as in our
    leaves.

    Attributes:
        join: Returns their array from our arrays and the number of groups.
        split: Returns our arrays from their array, our shapes and the number of groups.
        is_transposed: Whether their matrices are [outputs, inputs].
        first_layer: The first layer that has the tensor. In earlier layers our leaves are ones and
            have no effect.
        shape: Returns the shape of the joined array from our shapes.
        groups: The field of the config that is the number of groups of columns, such as heads, of
            which each has columns of all our arrays; "" for one group.
    """

    join: Callable[[Sequence[np.ndarray], int], np.ndarray] = lambda arrays, num_groups: arrays[0]
    split: Callable[[np.ndarray, Shapes, int], list[np.ndarray]] = _alone
    is_transposed: bool = True
    first_layer: int = 0
    shape: Callable[[Shapes], tuple[int, ...]] = lambda shapes: shapes[0]
    groups: str = ""


def _joined_shape(shapes: Shapes) -> tuple[int, ...]:
    return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))


def _concatenate(arrays: Sequence[np.ndarray], num_groups: int) -> np.ndarray:
    groups = [x.reshape(*x.shape[:-1], num_groups, -1) for x in arrays]
    return np.concatenate(groups, axis=-1).reshape(*arrays[0].shape[:-1], -1)


def _cut(tensor: np.ndarray, shapes: Shapes, num_groups: int) -> list[np.ndarray]:
    groups = tensor.reshape(*tensor.shape[:-1], num_groups, -1)
    parts = np.split(groups, np.cumsum([x[-1] // num_groups for x in shapes])[:-1], axis=-1)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _interleave(arrays: Sequence[np.ndarray], num_groups: int) -> np.ndarray:
    return np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)


def _take_turns(tensor: np.ndarray, shapes: Shapes, num_groups: int) -> list[np.ndarray]:
    return [tensor[..., first :: len(shapes)] for first in range(len(shapes))]


LAYOUTS = {
    "": TensorLayout(),
    # The outputs of several projections, concatenated as a whole or head by head.
    "fused": TensorLayout(_concatenate, _cut, shape=_joined_shape),
    "fused-by-head": TensorLayout(_concatenate, _cut, shape=_joined_shape, groups="num_heads"),
    "fused-by-delta-key-head": TensorLayout(
        _concatenate, _cut, shape=_joined_shape, groups="delta_key_heads"
    ),
    "as-ours": TensorLayout(is_transposed=False),  # matrices are [inputs, outputs]
    "fused-as-ours": TensorLayout(_concatenate, _cut, False, shape=_joined_shape),
    # Columns 0, 2, 4, … are our first leaf, columns 1, 3, 5, … our second.
    "interleaved-as-ours": TensorLayout(_interleave, _take_turns, False, shape=_joined_shape),
    "one-row": TensorLayout(
        lambda arrays, _: arrays[0][None],
        lambda tensor, *_: [tensor[0]],
        shape=lambda shapes: (1, *shapes[0]),
    ),
    "after-first": TensorLayout(first_layer=1),
    # The filter of a convolution for each feature, [features, 1, kernel_size].
    "filter": TensorLayout(
        lambda arrays, _: arrays[0].T[:, None],
        lambda tensor, *_: [tensor[:, 0].T],
        shape=lambda shapes: (shapes[0][1], 1, shapes[0][0]),
    ),
}


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        ours: The path of one of our leaves, or of a branch. The branch's kernel or scale is their
            weight, its bias their bias. Several names at one place of the path are joined by +.
        theirs: The name of a tensor or, for a branch, of a module.
        layout: A key of `LAYOUTS`.
    """

    ours: str
    theirs: str
    layout: str = ""

    def tensors(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yields (our leaves, their tensor) for the leaves that the model has."""
        names = ["/".join(x) for x in product(*(x.split("+") for x in self.ours.split("/")))]
        if names[0] in shapes:
            yield tuple(names), self.theirs
            return
        for leaf, theirs in _LEAVES.items():
            if self.fits(leaf, shapes.get(f"{names[0]}/{leaf}")):
                yield tuple(f"{name}/{leaf}" for name in names), f"{self.theirs}.{theirs}"

    def fits(self, leaf: str, shape: tuple[int, ...] | None) -> bool:
        """Returns whether a leaf exists and has one axis for each `*` of the row, and its own.

        Dense layers and layers with experts have leaves of the same names, but separate rows.
        """
        num_axes = self.theirs.count("*")
        return shape is not None and len(shape) == num_axes + (2 if leaf == "kernel" else 1)


def table(text: str, **names: str) -> tuple[Row, ...]:
    """Parses a table with one row per line, after replacing the words `names` in the text."""
    for name, value in names.items():
        text = text.replace(name, value)
    return tuple(Row(*line.split()) for line in text.splitlines() if line.strip())


class TensorEntry(NamedTuple):
    """One of their tensors and the leaves of ours that it holds.

    Attributes:
        theirs: The name of their tensor.
        ours: The paths of our leaves.
        shapes: The shapes of their parts of our leaves.
        place: The indices of these parts on the first axes of our leaves: none, (layer,) or
            (layer, expert). The layer counts those of its stacked tree.
        layout: The layout of their tensor.
        num_groups: The number of groups of columns (see `TensorLayout`).
    """

    theirs: str
    ours: tuple[str, ...]
    shapes: Shapes
    place: tuple[int, ...]
    layout: TensorLayout
    num_groups: int

    @property
    def is_transposed(self) -> bool:
        """Whether their tensor is the transpose of our kernel."""
        return self.layout.is_transposed and self.ours[0].endswith("/kernel")

    @property
    def is_as_ours(self) -> bool:
        """Whether their tensor holds the same numbers as our leaf in the same order."""
        return self.layout.split is _alone and not self.is_transposed

    def to_theirs(self, leaves: dict) -> np.ndarray:
        """Returns their tensor from our leaves."""
        parts = [np.asarray(leaves[name])[self.place] for name in self.ours]
        whole = self.layout.join(parts, self.num_groups)
        return whole.T if self.is_transposed else whole

    def to_ours(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Returns our arrays at this place from their tensor."""
        tensor = tensor.T if self.is_transposed else tensor
        return self.layout.split(tensor, self.shapes, self.num_groups)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of their tensor."""
        shape = self.layout.shape(self.shapes)
        return shape[::-1] if self.is_transposed else shape


def entries(
    rows: Iterable[Row], config: TransformerConfig, shapes: dict[str, tuple[int, ...]]
) -> list[TensorEntry]:
    """Returns the entries of all their tensors for a model.

    Args:
        rows: The family's table.
        config: The model's config.
        shapes: The shapes of our leaves by their paths.

    Raises:
        ValueError: If no row names one of the leaves. The message names it.
    """
    tensors, covered = [], set()
    for row, layers in _rows_by_tree(rows, config):
        layout = LAYOUTS[row.layout]
        for ours, theirs in row.tensors(shapes):
            covered.update(ours)
            whole = tuple(shapes[name] for name in ours)
            num_groups = getattr(config, layout.groups) if layout.groups else 1
            num_axes = theirs.count("*")
            parts = tuple(shape[num_axes:] for shape in whole)
            for place in np.ndindex(whole[0][:num_axes]):
                if num_axes and layers[place[0]] < layout.first_layer:
                    continue
                numbers = (layers[place[0]], *place[1:]) if num_axes else ()
                name = reduce(lambda name, n: name.replace("*", str(n), 1), numbers, theirs)
                tensors.append(TensorEntry(name, ours, parts, place, layout, num_groups))
    if missing := sorted(set(shapes) - covered):
        raise ValueError(f"it has no tensor for {', '.join(missing)}")
    return tensors


def _rows_by_tree(
    rows: Iterable[Row], config: TransformerConfig
) -> Iterator[tuple[Row, tuple[int, ...]]]:
    """Yields each row for each tree of stacked layers, with the numbers of its layers."""
    trees = layers_by_tree(config)  # such as "blocks/2"
    stacks = {tree: tree.rstrip("0123456789").rstrip("/") for tree in trees}
    for row in rows:
        inside = [tree for tree, stack in stacks.items() if row.ours.startswith(f"{stack}/")]
        for tree in inside:
            yield replace(row, ours=tree + row.ours.removeprefix(stacks[tree])), trees[tree]
        if not inside:  # a row of no stack
            yield row, ()


def read_leaves(
    wanted: list[TensorEntry], tensors: dict[str, Tensor], like: dict, dtype: str
) -> dict[str, jax.Array]:
    """Reads our leaves from their tensors.

    Args:
        wanted: The entries to read.
        tensors: Their tensors by the names of the table.
        like: The shapes, with shardings, of our leaves.
        dtype: dtype of the leaves.

    Raises:
        ValueError: If a tensor has another shape.
    """
    by_leaf: dict[tuple, list[TensorEntry]] = {}
    for entry in wanted:
        tensors[entry.theirs].check(entry.their_shape)
        by_leaf.setdefault(entry.ours, []).append(entry)
    arrays = {name: empty(like[name].shape, dtype) for ours in by_leaf for name in ours}

    def leaves(ours: tuple[str, ...]) -> dict[str, jax.Array]:
        for entry in by_leaf[ours]:
            fill_arrays(arrays, entry, tensors[entry.theirs])
        return {name: jax.device_put(arrays.pop(name), like[name].sharding) for name in ours}

    parts = in_threads(leaves, by_leaf, lambda ours: sum(like[x].size for x in ours))
    read = {name: leaf for part in parts for name, leaf in part.items()}
    # Leaves that no tensor holds: a norm that the first layer lacks, in a model of one layer.
    alone = {name: x for name, x in like.items() if name not in read}
    return read | {name: jnp.ones(x.shape, dtype, device=x.sharding) for name, x in alone.items()}


def fill_arrays(arrays: dict, entry: TensorEntry, tensor: Tensor) -> None:
    """Copies one of their tensors into our arrays."""
    places = [arrays[name][entry.place] for name in entry.ours]
    if entry.is_as_ours and isinstance(tensor, Tensor):  # without a copy in between
        tensor.read_into(places[0])
    else:
        for place, part in zip(places, entry.to_ours(tensor.mapped()), strict=True):
            place[...] = part
    if entry.place == (entry.layout.first_layer,):
        for name in entry.ours:
            arrays[name][: entry.layout.first_layer] = 1
