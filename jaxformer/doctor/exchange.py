"""Lower bound on the communication of one training step, by formula.

Let s be the bytes of an array in the dtype of the activations, and n the number of devices that
share it. Collectives run around a ring. Then one device sends

    all-gather or reduce-scatter     s · (n − 1)/n
    all-reduce                       2 s · (n − 1)/n      (a reduce-scatter and an all-gather)

The axes of the mesh cause these collectives:

    fsdp     A layer's matrix is gathered in the forward pass and again in the backward pass, and
             its gradient is scattered: 3 s (n − 1)/n. The head's matrix is gathered once and its
             gradient scattered: 2 s (n − 1)/n. Embeddings are looked up on the devices that hold
             them, and the results are exchanged: 2 (n − 1)/n of the activations' bytes. Gradients
             of vectors (biases, scales) are all-reduced.
    data     Gradients are all-reduced: 2 s (n − 1)/n of the part of each that a device holds.
    expert   Gradients are all-reduced as along data, except those of experts, which the devices
             along this axis do not share. Each layer with experts gathers its input and scatters
             its output, and in the backward pass the gradients of both: 4 (n − 1)/n of the bytes of
             the activations of n devices.
    tensor   The outputs of each sub-layer and the gradients of its inputs are all-reduced: four
             all-reduces of the activations per layer. A sharded vocabulary adds one for the logits
             and one for the lookup. If `tensor` does not divide the heads (or the vocabulary),
             batch elements are sharded over it instead. Then outputs and gradients are gathered,
             and parameters are sharded over `tensor` as over fsdp.

Reference:
    Rajbhandari et al. 2020 (ZeRO), §7. Shoeybi et al. 2019, §3.
"""

from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.models.config.model import ModelConfig
from jaxformer.models.kinds import build
from jaxformer.models.mesh import num_row_parts, shardings
from jaxformer.models.parameters import shape_tree


def least_exchange(config: ModelConfig, mesh: Mesh, rows: int, length: int) -> dict[str, float]:
    """Returns the bytes that one device sends in a step of one micro-batch.

    Args:
        config: The config of the model.
        mesh: The mesh.
        rows: Rows of the batch, of all devices together.
        length: Tokens per row.

    Returns:
        The bytes by the axis that causes them: "fsdp", "data", "expert" and "tensor".
    """
    config, sizes = config.resolved, mesh.shape
    model = build(config)
    params = shape_tree(model)
    placed = shardings(params, model, mesh)
    item = jnp.dtype(config.dtype).itemsize
    activations = rows // num_row_parts(mesh) * length * config.embed_dim * item
    sent = dict.fromkeys(("fsdp", "data", "expert", "tensor"), 0.0)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), where in zip(leaves, jax.tree.leaves(placed), strict=True):
        names, cuts = [key.key for key in path], [_axes(axes) for axes in where.spec]
        gathered = next((axes for axes in cuts if "fsdp" in axes), ())
        alone = [axis for axes in cuts for axis in axes if axes in (("tensor",), ("expert",))]
        size = leaf.size * item / prod(sizes[axis] for axis in alone)
        over = prod(sizes[axis] for axis in gathered)
        tied = config.tie_embeddings
        if gathered:
            sent["fsdp"] += _passes(names, tied) * _part(size, over)
        else:
            sent["fsdp"] += _summed(size, sizes["fsdp"])
        if names[-1] == "tokens":
            sent["fsdp"] += 2 * _part(activations, sizes["fsdp"])
        sent["data"] += _summed(size / over, sizes["data"])
        if "expert" not in alone:
            both = sizes["data"] * sizes["expert"]
            sent["expert"] += _summed(size / over, both) - _summed(size / over, sizes["data"])
        elif names[-2:] == ["down", "kernel"]:
            of_group = sizes["expert"] * activations
            sent["expert"] += 4 * leaf.shape[0] * _part(of_group, sizes["expert"])
        layers = prod(leaf.shape[:-2]) / (leaf.shape[1] if "expert" in alone else 1)
        once = _part if "tensor" in gathered else _summed
        sent["tensor"] += layers * _sums(names, tied) * once(activations, sizes["tensor"])
    return sent


def _passes(names: list[str], tied: bool) -> int:
    """Returns the number of gathers of a matrix and scatters of its gradient together."""
    if names[-1] == "tokens":
        return 2 if tied else 0
    return 3 if names[-1] == "kernel" and names[0] != "head" else 2


def _sums(names: list[str], tied: bool) -> int:
    """Returns the number of exchanges of activations over `tensor` for a matrix.

    The last matrix of a sub-layer counts for the whole sub-layer.
    """
    if names[-1] == "tokens":
        return 2 if tied else 1
    if names[-1] != "kernel":
        return 0
    if names[0] == "head":
        return 1
    return 2 if "blocks" in names and names[-2] in ("output", "down") else 0


def _axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _part(size: float, devices: int) -> float:
    return size * (devices - 1) / devices


def _summed(size: float, devices: int) -> float:
    return 2 * _part(size, devices)
