"""Lower bound on the communication of a training step.

Let s be the size of an array in bytes, in the dtype of the activations. Let n be the number of
devices over which the array is split. Collectives run in a ring, in which each device sends

    all-gather or reduce-scatter     s · (n − 1)/n
    all-reduce                       2 s · (n − 1)/n      (a reduce-scatter and an all-gather)

The axes of the mesh cause these collectives:

    fsdp     A layer's matrix is gathered in the forward and the backward pass, and its
             gradient is scattered: 3 s (n − 1)/n. The matrix of the output head is gathered
             once, and its gradient is scattered: 2 s (n − 1)/n. Embeddings are looked up where they
             are stored, and the results are exchanged: 2 (n − 1)/n of the activations' bytes.
             Gradients of vectors (biases, scales) are all-reduced.
    data     Gradients are all-reduced: 2 s (n − 1)/n of each device's part of the gradient.
    expert   Gradients are all-reduced as for data, except for the gradients of experts, because
             each device along this axis has different experts. Each layer with experts gathers
             its input and scatters its output. The backward pass gathers the gradient of the
             output and scatters the gradient of the input: 4 (n − 1)/n of the bytes of the
             activations of n devices.
    tensor   The outputs of each sub-layer and the gradients of its inputs are all-reduced:
             four all-reduces of the activations per layer. A sharded vocabulary adds one
             all-reduce for the logits and another for the lookup. If the number of heads (or
             the vocabulary size) is not divisible by `tensor`, batch elements are sharded over
             `tensor` instead. Then outputs and gradients are gathered, and parameters are
             sharded over both `fsdp` and `tensor`.

Reference:
    Rajbhandari et al. 2020 (ZeRO), §7. Shoeybi et al. 2019, §3.
"""

from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.models.language_model import LanguageModel
from jaxformer.models.parameters import shape_tree
from jaxformer.models.sharding.parameters import num_batch_shards, shardings


def least_exchange(
    model: LanguageModel, mesh: Mesh, batch_size: int, length: int
) -> dict[str, float]:
    """Returns a lower bound of the bytes that one device sends in a step with one micro-batch.

    Args:
        model: The model.
        mesh: The device mesh.
        batch_size: The batch size over all devices.
        length: Tokens per sequence.

    Returns:
        {mesh axis: bytes that one device sends because of this axis}, for "fsdp", "data", "expert"
        and "tensor".
    """
    config, sizes = model.config, mesh.shape
    params = shape_tree(model)
    placed = shardings(params, model, mesh)
    item = jnp.dtype(config.dtype).itemsize
    activations = batch_size // num_batch_shards(mesh) * length * config.embed_dim * item
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
    """Returns how often a matrix is gathered plus how often its gradient is scattered."""
    if names[-1] == "tokens":
        return 2 if tied else 0
    return 3 if names[-1] == "kernel" and names[0] != "head" else 2


def _sums(names: list[str], tied: bool) -> int:
    """Returns how often activations are exchanged along the mesh axis `tensor` for a matrix.

    The function counts all exchanges of a sub-layer at its last matrix, and returns 0 for its other
    matrices.
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
