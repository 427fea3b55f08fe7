"""An adapter: the low-rank updates of a model's maps as a tree of their own, beside frozen weights.

For every map that has one, {"lora_a": A [*layers, in_dim, rank], "lora_b": B [*layers, rank,
out_dim]} stands where the map's weights stand in the parameters. W and its update make
y = x W + scale · x A B (LoRA, Hu et al. 2021).
"""

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.functional.kernels import LowRankKernel, dense, init_low_rank
from jaxformer.models.config.lora import LoraConfig

_USUAL = ("query", "value")


def adapted_maps(shapes, config: LoraConfig) -> list[str]:
    """The paths of the maps that have an update, "blocks/attention/query".

    ValueError for a name that no map has, or a rank that is more than a map's.
    """
    kernels = dict(_kernels(shapes))
    last = {path: path.rpartition("/")[2] for path in kernels}
    if config.lora_maps is not None:
        words = config.lora_maps.split(",")
    elif "query" in last.values():
        words = _USUAL
    else:
        words = [name for name in last.values() if name != "head"]
    for word in words:
        if not any(_ends(path, word) for path in kernels):
            raise ValueError(
                f"lora_maps names {word!r}; the maps of this model are "
                f"{', '.join(dict.fromkeys(last.values()))}"
            )
    found = [path for path in kernels if any(_ends(path, word) for word in words)]
    for path in found:
        most = min(kernels[path].shape[-2:])
        if config.lora_rank > most:
            raise ValueError(f"lora_rank is {config.lora_rank}; of {path} it is at most {most}")
    return found


def init_adapter(key, params, config: LoraConfig) -> dict:
    """Updates that are 0 at first: A ~ N(0, 1/in_dim), B = 0. params: arrays or shapes."""
    kernels, adapter = dict(_kernels(params)), {}
    paths = adapted_maps(params, config)
    for own, path in zip(jax.random.split(key, len(paths)), paths, strict=True):
        made = init_low_rank(own, kernels[path], config.lora_rank)
        branch = adapter
        for name in path.split("/"):
            branch = branch.setdefault(name, {})
        branch |= {"lora_a": made.down, "lora_b": made.up}
    return adapter


def adapter_shapes(params, config: LoraConfig) -> dict:
    """Of the updates of parameters given as shapes; where they live, if those say where they do."""
    made = jax.eval_shape(lambda key: init_adapter(key, params, config), jax.random.key(0))
    where = jax.tree.map(lambda x: x.sharding, params)
    if None in jax.tree.leaves(where, is_leaf=lambda x: x is None):
        return made
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        made,
        adapter_shardings(made, where),
    )


def adapted(params, adapter, scale: float):
    """The parameters with a `LowRankKernel` for each map that has an update."""
    return _at_updates(
        lambda kernel, update: LowRankKernel(kernel, update["lora_a"], update["lora_b"], scale),
        params,
        adapter,
    )


def merged(params, adapter, scale: float):
    """The parameters with the updates added: those of a model like any other."""
    return jax.tree.map(
        dense, adapted(params, adapter, scale), is_leaf=lambda x: isinstance(x, LowRankKernel)
    )


def adapter_shardings(adapter, params) -> dict:
    """Where the updates live: A is cut as W's inputs are, B as its outputs. params: where those
    live, a tree of `NamedSharding`."""
    where = {}
    for name, branch in adapter.items():
        if "lora_a" not in branch:
            where[name] = adapter_shardings(branch, params[name])
            continue
        kernel = params[name]["kernel"]
        *layers, inputs, outputs = kernel.spec
        specs = {"lora_a": (*layers, inputs, None), "lora_b": (*layers, None, outputs)}
        where[name] = {
            x: NamedSharding(kernel.mesh, PartitionSpec(*spec)) for x, spec in specs.items()
        }
    return where


def _at_updates(function: Callable, params, adapter):
    """The parameters with function(kernel, update) for the kernel of every map that has one."""
    if "lora_a" in adapter:
        return {**params, "kernel": function(params["kernel"], adapter)}
    changed = {x: _at_updates(function, params[x], branch) for x, branch in adapter.items()}
    return {**params, **changed}


def _ends(path: str, word: str) -> bool:
    """Whether a path is that word, or ends in it."""
    return f"/{path}".endswith(f"/{word}")


def _kernels(params, prefix: str = ""):
    """(path of its map, kernel) for each kernel."""
    for name, branch in params.items():
        if name == "kernel":
            yield prefix, branch
        elif isinstance(branch, dict):
            yield from _kernels(branch, f"{prefix}/{name}" if prefix else name)
