"""LoRA: low-rank updates of a model's kernels (Hu et al. 2021).

An adapted kernel is a `LowRankKernel`, which computes y = x W + scale · x A B. An adapter consists
of the matrices A and B of all adapted kernels. These matrices are the trainable part of the
parameters (`models.trainable`).
"""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from jaxformer.functional.linear.kernels import dense, is_kernel
from jaxformer.functional.linear.low_rank import LowRankKernel, init_low_rank, is_low_rank
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.trainable import partition

_USUAL = ("query", "value")


def adapted_maps(shapes: Any, config: LoraConfig) -> list[str]:
    """Returns the paths of the adapted linear layers, such as "blocks/attention/query".

    Raises:
        ValueError: The config names a linear layer that the model does not have, or the rank is
            too large for a layer.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_kernel)
    names = {_name(path): x for path, x in leaves}
    kernels = {x.removesuffix("/kernel"): names[x] for x in names if x.endswith("/kernel")}
    last = {path: path.rpartition("/")[2] for path in kernels}
    if config.lora_target_modules is not None:
        words = config.lora_target_modules.split(",")
    elif "query" in last.values():
        words = _USUAL
    else:
        words = [name for name in last.values() if name != "head"]
    for word in words:
        if not any(_ends(path, word) for path in kernels):
            raise ValueError(
                f"lora_target_modules has {word!r}, but the linear layers of this model are "
                f"{', '.join(dict.fromkeys(last.values()))}"
            )
    found = [path for path in kernels if any(_ends(path, word) for word in words)]
    for path in found:
        most = min(kernels[path].shape[-2:])
        if config.lora_rank is not None and config.lora_rank > most:
            raise ValueError(
                f"lora_rank is {config.lora_rank}; for {path} it must be at most {most}"
            )
    return found


def adapt(key: PRNGKeyArray, params: Any, config: LoraConfig) -> Any:
    """Replaces each adapted kernel by a `LowRankKernel`.

    The updates are initially 0: A is drawn from N(0, 1/in_dim), and B is 0.

    Args:
        key: a random key.
        params: the parameters.
        config: selects the linear layers and the rank.
    """
    rank = config.lora_rank
    if rank is None:
        raise ValueError("lora_rank is None; set lora_rank to train an adapter")
    names = [f"{path}/kernel" for path in adapted_maps(params, config)]
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))

    def adapted(path: tuple[Any, ...], x: Any) -> Any:
        name = _name(path)
        if name not in keys:
            return x
        return init_low_rank(keys[name], x, rank, config.scale)

    return jax.tree_util.tree_map_with_path(adapted, params, is_leaf=is_kernel)


def adapter_shapes(params: Any, config: LoraConfig) -> Any:
    """Returns the shapes of the adapter, with shardings if the parameters have shardings."""
    adapter, _ = partition(jax.eval_shape(lambda x: adapt(jax.random.key(0), x, config), params))

    def placed(update: LowRankKernel | None, kernel: Any) -> LowRankKernel | None:
        if update is None or kernel.sharding is None:
            return update
        down, up = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
            for x, where in zip(
                (update.down, update.up), low_rank_shardings(kernel.sharding), strict=True
            )
        )
        return replace(update, down=down, up=up)

    return jax.tree.map(placed, adapter, params, is_leaf=_is_none_or_low_rank)


def low_rank_shardings(kernel: NamedSharding) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of the matrices A and B, which update a kernel W.

    A is sharded like the inputs of W, and B is sharded like the outputs of W.

    Args:
        kernel: the sharding of W.
    """
    *layers, inputs, outputs = kernel.spec
    down, up = (*layers, inputs, None), (*layers, None, outputs)
    mesh = kernel.mesh
    return NamedSharding(mesh, PartitionSpec(*down)), NamedSharding(mesh, PartitionSpec(*up))


def merged(params: Any, adapter: Any) -> Any:
    """Adds the updates of an adapter to the kernels of the parameters."""
    return jax.tree.map(
        lambda update, x: x if update is None else dense(replace(update, frozen=x)),
        adapter,
        params,
        is_leaf=_is_none_or_low_rank,
    )


def merge_adapter(variables: Any) -> Any:
    """Replaces each `LowRankKernel` by W + scale · A B.

    The result has the same shapes as before `adapt`, so it can be saved and exported.

    Args:
        variables: the variables, `{"params": …}`, or only the parameters.
    """
    return jax.tree.map(lambda x: dense(x) if is_low_rank(x) else x, variables, is_leaf=is_low_rank)


def _is_none_or_low_rank(x: Any) -> bool:
    return x is None or is_low_rank(x)


def _ends(path: str, word: str) -> bool:
    """Returns whether a path is `word` or ends with /`word`."""
    return f"/{path}".endswith(f"/{word}")


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
