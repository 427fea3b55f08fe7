"""Tables that convert between jaxformer's parameters and the tensors of transformers.

Each row of a table describes one parameter:

- the path of jaxformer's parameter in the tree that `model.init` returns,
- the name of the tensor in transformers,
- the layout of the tensor, unless it is the default.

A parameter of jaxformer contains the values of all layers, stacked on its first axis. If the layers
differ in their weight shapes, each group of layers with equal weight shapes has its own stacked
parameter, and the row applies to all these parameters. In a tensor name, the first `*` stands for
the index of the layer, and the second `*` for the index of the expert.

One table serves all variants of a family, because a row is skipped if the model does not have the
parameter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.artifacts.tensors import Tensor, empty, in_threads, place_array
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.parameters import layers_by_tree

_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
Shapes = Sequence[tuple[int, ...]]


def _alone(tensor: np.ndarray, shapes: Shapes, num_groups: int) -> list[np.ndarray]:
    return [tensor]


class TensorLayout(NamedTuple):
    """Layout of a transformers tensor that contains one or more parameters of jaxformer.

    `join` and `split` work on the arrays of a single layer, with the outputs on the last axis as in
    jaxformer.

    Attributes:
        join: Function (jaxformer's arrays, number of column groups) → combined array.
        split: Function (combined array, shapes of jaxformer's arrays, number of column groups) →
            jaxformer's arrays.
        is_transposed: Whether a matrix is [outputs, inputs] in transformers; it is [inputs,
            outputs] in jaxformer.
        first_layer: The index of the first layer that has the tensor in transformers. For layers
            before `first_layer`, jaxformer's stacked parameter is filled with ones, which have no
            effect.
        shape: Function (shapes of jaxformer's arrays) → shape of the combined array.
        groups: The name of the config field that contains the number of column groups, such as
            "num_heads"; "" means a single group. Each column group of the combined array contains
            columns from each of jaxformer's arrays.
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
    # Each of these tensors contains the weights of several projections, concatenated along their
    # outputs. The concatenation happens once for all heads or separately for each head.
    "fused": TensorLayout(_concatenate, _cut, shape=_joined_shape),
    "fused-by-head": TensorLayout(_concatenate, _cut, shape=_joined_shape, groups="num_heads"),
    "fused-by-delta-key-head": TensorLayout(
        _concatenate, _cut, shape=_joined_shape, groups="delta_key_heads"
    ),
    "as-ours": TensorLayout(is_transposed=False),
    "fused-as-ours": TensorLayout(_concatenate, _cut, False, shape=_joined_shape),
    # Columns 0, 2, 4, … belong to the first parameter, columns 1, 3, 5, … to the second.
    "interleaved-as-ours": TensorLayout(_interleave, _take_turns, False, shape=_joined_shape),
    "one-row": TensorLayout(
        lambda arrays, _: arrays[0][None],
        lambda tensor, *_: [tensor[0]],
        shape=lambda shapes: (1, *shapes[0]),
    ),
    "after-first": TensorLayout(first_layer=1),
    # In transformers, the filters of a depthwise convolution are [features, 1, kernel_size].
    "filter": TensorLayout(
        lambda arrays, _: arrays[0].T[:, None],
        lambda tensor, *_: [tensor[:, 0].T],
        shape=lambda shapes: (shapes[0][1], 1, shapes[0][0]),
    ),
}


@dataclass(frozen=True)
class Row:
    """A row of a table that converts parameters to tensors.

    Attributes:
        ours: The path of a parameter or a module in jaxformer. In a module, the parameter
            "kernel" or "scale" corresponds to "weight" in transformers, and "bias" to "bias". A
            path with +, such as "attention/query+key", stands for several paths, whose parameters
            form one tensor.
        theirs: The name in transformers of the tensor, or of the module if `ours` is a module.
        layout: A key of `LAYOUTS`.
    """

    ours: str
    theirs: str
    layout: str = ""

    def tensors(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yields (jaxformer's paths, tensor name) for the parameters that the model has."""
        names = ["/".join(x) for x in product(*(x.split("+") for x in self.ours.split("/")))]
        if names[0] in shapes:
            yield tuple(names), self.theirs
            return
        for leaf, theirs in _LEAVES.items():
            if self.fits(leaf, shapes.get(f"{names[0]}/{leaf}")):
                yield tuple(f"{name}/{leaf}" for name in names), f"{self.theirs}.{theirs}"

    def fits(self, leaf: str, shape: tuple[int, ...] | None) -> bool:
        """Returns whether a parameter exists and has one leading axis for each `*` in `theirs`.

        A dense layer and a layer with experts have equal parameter names, but separate rows in the
        table. The number of axes of the parameter determines which row applies.
        """
        num_axes = self.theirs.count("*")
        return shape is not None and len(shape) == num_axes + (2 if leaf == "kernel" else 1)


def table(text: str, **names: str) -> tuple[Row, ...]:
    """Parses a table with one row per line; each key of `names` is replaced by its value."""
    for name, value in names.items():
        text = text.replace(name, value)
    return tuple(Row(*line.split()) for line in text.splitlines() if line.strip())


class TensorEntry(NamedTuple):
    """A tensor of transformers and the parameters of jaxformer that it contains.

    Attributes:
        theirs: The name of the tensor.
        ours: The paths of jaxformer's parameters.
        shapes: The shapes of the parameters, without the leading axes for layers and experts.
        place: The indices on the leading axes of the parameters: (), (layer,) or (layer, expert).
            The layer index counts only the layers that the parameter contains.
        layout: The layout of the tensor.
        num_groups: The number of column groups (see `TensorLayout`).
    """

    theirs: str
    ours: tuple[str, ...]
    shapes: Shapes
    place: tuple[int, ...]
    layout: TensorLayout
    num_groups: int

    @property
    def is_transposed(self) -> bool:
        """Whether the tensor is the transpose of jaxformer's kernel."""
        return self.layout.is_transposed and self.ours[0].endswith("/kernel")

    @property
    def is_as_ours(self) -> bool:
        """Whether the tensor and jaxformer's array have the same shape and order of values."""
        return self.layout.split is _alone and not self.is_transposed

    def to_theirs(self, leaves: dict) -> np.ndarray:
        """Converts jaxformer's parameters to the tensor of transformers."""
        parts = [np.asarray(leaves[name])[self.place] for name in self.ours]
        whole = self.layout.join(parts, self.num_groups)
        return whole.T if self.is_transposed else whole

    def to_ours(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Converts the tensor of transformers to jaxformer's arrays."""
        tensor = tensor.T if self.is_transposed else tensor
        return self.layout.split(tensor, self.shapes, self.num_groups)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in transformers."""
        shape = self.layout.shape(self.shapes)
        return shape[::-1] if self.is_transposed else shape


def entries(
    rows: Iterable[Row], config: TransformerConfig, shapes: dict[str, tuple[int, ...]]
) -> list[TensorEntry]:
    """Returns a `TensorEntry` for each tensor that the model has in transformers.

    Args:
        rows: The family's table.
        config: The model's config.
        shapes: The shapes of jaxformer's parameters, by path.

    Raises:
        ValueError: The table has no row for a parameter. The message gives its path.
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
        raise ValueError(f"the family has no tensor for {', '.join(missing)}")
    return tensors


def _rows_by_tree(
    rows: Iterable[Row], config: TransformerConfig
) -> Iterator[tuple[Row, tuple[int, ...]]]:
    """Yields (row, indices of the layers) for each row and each group of stacked layers.

    If the row's parameter is outside the layers, as the embedding is, the indices are ().
    """
    trees = layers_by_tree(config)
    stacks = {tree: tree.rstrip("0123456789").rstrip("/") for tree in trees}
    for row in rows:
        inside = [tree for tree, stack in stacks.items() if row.ours.startswith(f"{stack}/")]
        for tree in inside:
            yield replace(row, ours=tree + row.ours.removeprefix(stacks[tree])), trees[tree]
        if not inside:
            yield row, ()


def read_leaves(
    wanted: list[TensorEntry], tensors: dict[str, Tensor], like: dict, dtype: str
) -> dict[str, jax.Array]:
    """Reads jaxformer's parameters from the tensors of transformers.

    Args:
        wanted: The tensors to read, with the parameters that each tensor contains.
        tensors: The tensors by their names (`TensorEntry.theirs`).
        like: {path of jaxformer's parameter: its shape and sharding}.
        dtype: dtype of the parameters.

    Raises:
        ValueError: A tensor does not have the expected shape.
    """
    by_leaf: dict[tuple, list[TensorEntry]] = {}
    for entry in wanted:
        tensors[entry.theirs].check(entry.their_shape)
        by_leaf.setdefault(entry.ours, []).append(entry)
    arrays = {name: empty(like[name].shape, dtype) for ours in by_leaf for name in ours}

    def leaves(ours: tuple[str, ...]) -> dict[str, jax.Array]:
        for entry in by_leaf[ours]:
            fill_arrays(arrays, entry, tensors[entry.theirs])
        return {name: place_array(arrays.pop(name), like[name].sharding) for name in ours}

    parts = in_threads(leaves, by_leaf, lambda ours: sum(like[x].size for x in ours))
    read = {name: leaf for part in parts for name, leaf in part.items()}
    # If a norm does not exist in the first layer, a model with one layer has no tensor for the
    # norm. In this case, the parameter of the norm is filled with ones.
    alone = {name: x for name, x in like.items() if name not in read}
    return read | {name: jnp.ones(x.shape, dtype, device=x.sharding) for name, x in alone.items()}


def fill_arrays(arrays: dict, entry: TensorEntry, tensor: Tensor) -> None:
    """Copies a tensor of transformers into jaxformer's arrays."""
    places = [arrays[name][entry.place] for name in entry.ours]
    if entry.is_as_ours and isinstance(tensor, Tensor):
        # Reading into the final array avoids an intermediate copy.
        tensor.read_into(places[0])
    else:
        for place, part in zip(places, entry.to_ours(tensor.mapped()), strict=True):
            place[...] = part
    if entry.place == (entry.layout.first_layer,):
        for name in entry.ours:
            arrays[name][: entry.layout.first_layer] = 1
