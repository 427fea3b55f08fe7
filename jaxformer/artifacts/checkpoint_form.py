"""Form of a training state in the files of a checkpoint.

In memory, the trainable part of parameters with low-rank updates has a `LowRankKernel` for each
adapted kernel and None for each frozen array. Its moments and averages have the same structure.
Files hold {"lora_a": A, "lora_b": B} in place of {"kernel": `LowRankKernel`, …}, and no entry for a
frozen array.
"""

from typing import Any

import jax

from jaxformer.functional.linear.low_rank import LowRankKernel


def stored_form(tree: Any) -> Any:
    """Returns a tree in the form of files. Trees without low-rank updates are unchanged."""

    def converted(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        parts = {}
        for name, branch in node.items():
            if isinstance(branch, LowRankKernel):
                parts |= {"lora_a": branch.down, "lora_b": branch.up}
            else:
                parts[name] = stored_form(branch)
        return {name: x for name, x in parts.items() if not _is_empty(x)}

    return jax.tree.map(converted, tree, is_leaf=lambda x: isinstance(x, dict))


def _is_empty(x: Any) -> bool:
    return x is None or (isinstance(x, dict) and not x)


def in_memory(stored: Any, like: Any) -> Any:
    """Returns the arrays of a tree in the form of files, in the structure of `like`.

    Both forms have the same arrays in the same order.
    """
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(stored))
