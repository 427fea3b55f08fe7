"""The least that the devices of a mesh must exchange for one training step, by formula.

With s the bytes of an array in the type of the activations, n the devices that share it, and every
exchange passed around a ring, one device sends

    gather, scatter of an array     s · (n − 1)/n
    sum that all devices want       2 s · (n − 1)/n      (a scatter and a gather)

    fsdp     a layer's matrix is gathered when it runs and again going back, and its gradient is
             scattered: 3 s (n − 1)/n. The table that logits are made by is gathered once: 2 s
             (n − 1)/n. Tokens are looked up where their vectors are, and these are exchanged: twice
             the activations' (n − 1)/n. Vectors (biases, scales) are summed.
    data     gradients are summed: 2 s (n − 1)/n of what a device holds of each.
    tensor   of each sub-layer the outputs are summed, and going back the gradients of its inputs:
             four sums of the activations a layer. Logits, if words are cut, add one sum, and the
             lookup one. Where heads (or words) are not cut, rows are: the outputs are gathered, and
             going back the gradients, and to the matrices `tensor` is another fsdp.

Sources: Rajbhandari et al. 2020 (ZeRO, §7), Shoeybi et al. 2019 (§3).
"""

from math import prod

import jax
import jax.numpy as jnp

from jaxformer.models.build import build, shape_tree
from jaxformer.models.placement import shardings


def least_exchange(config, mesh, rows: int, length: int) -> dict[str, float]:
    """Bytes that one device sends in a step of one micro-batch, by what they are for: "fsdp",
    "data" and "tensor". rows: of the whole batch."""
    config, sizes = config.resolved, mesh.shape
    params = shape_tree(build(config))
    placed = shardings(params, config, mesh)
    item = jnp.dtype(config.dtype).itemsize
    activations = rows // (sizes["data"] * sizes["fsdp"]) * length * config.embed_dim * item
    sent = dict.fromkeys(("fsdp", "data", "tensor"), 0.0)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), where in zip(leaves, jax.tree.leaves(placed), strict=True):
        names, cuts = [key.key for key in path], [_axes(axes) for axes in where.spec]
        gathered = next((axes for axes in cuts if "fsdp" in axes), ())
        size = leaf.size * item / prod(sizes["tensor"] for axes in cuts if axes == ("tensor",))
        over = prod(sizes[axis] for axis in gathered)
        tied = config.tie_embeddings
        if gathered:
            sent["fsdp"] += _passes(names, tied) * _part(size, over)
        else:
            sent["fsdp"] += _summed(size, sizes["fsdp"])
        if names[-1] == "tokens":
            sent["fsdp"] += 2 * _part(activations, sizes["fsdp"])
        sent["data"] += _summed(size / over, sizes["data"])
        layers = prod(leaf.shape[:-2])
        once = _part if "tensor" in gathered else _summed
        sent["tensor"] += layers * _sums(names, tied) * once(activations, sizes["tensor"])
    return sent


def _passes(names: list[str], tied: bool) -> int:
    """How often a matrix is gathered, and its gradient scattered."""
    if names[-1] == "tokens":
        return 2 if tied else 0
    return 3 if names[-1] == "kernel" and names[0] != "head" else 2


def _sums(names: list[str], tied: bool) -> int:
    """How often activations are exchanged over `tensor` for a matrix: the last of a sub-layer
    stands for all of it."""
    if names[-1] == "tokens":
        return 2 if tied else 1
    if names[-1] != "kernel":
        return 0
    if names[0] == "head":
        return 1
    return 2 if "blocks" in names and names[-2] in ("output", "down") else 0


def _axes(axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _part(size: float, devices: int) -> float:
    return size * (devices - 1) / devices


def _summed(size: float, devices: int) -> float:
    return 2 * _part(size, devices)
