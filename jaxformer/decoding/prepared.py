"""The weights as many small steps want them."""

import operator
import os
import weakref
from functools import partial

import jax

from jaxformer.decoding.protocol import require_autoregressive
from jaxformer.functional.spread import platform, refuse_explicit


def prepare(model, variables):
    """{"prepared": …}: to be given to `start`, `advance` and `generate` in place of variables.

    These are the weights laid out for many small steps, a second copy of them in memory. `generate`
    and `beam_search` do this themselves and keep the copy made last for as long as the parameters
    that it was made of are alive; who goes to and fro between several models keeps them apart.
    """
    require_autoregressive(model)
    name, weights = held(variables, "prepared", "params")
    if name == "prepared":
        return variables
    return {"prepared": prepare_weights(model, weights, cores_side_by_side())}


@partial(jax.jit, static_argnums=(0, 2))
def prepare_weights(model, params, parts: int):
    return model.prepare(params, parts)


def cores_side_by_side() -> int:
    """How many parts of a product XLA computes one beside the other: a CPU's cores, 8 at most; an
    accelerator takes a product whole."""
    return min(os.cpu_count() or 1, 8) if platform() == "cpu" else 1


class LastPrepared:
    """What `prepare` gave last, until one of the parameters that it was made of is gone."""

    def __init__(self):
        self._drop()

    def _drop(self, _=None):
        self._model, self._parameters, self._prepared = None, (), None

    def of(self, model, variables):
        """`prepare(model, variables)`; the second time in a row, what it gave the first time."""
        leaves = jax.tree.leaves(variables)
        writable = not all(isinstance(x, jax.Array) for x in leaves)
        if writable or held(variables, "prepared", "params")[0] == "prepared":
            return prepare(model, variables)
        before = [reference() for reference in self._parameters]
        same = len(before) == len(leaves) and all(map(operator.is_, before, leaves))
        if not same or self._model != model or any(x.is_deleted() for x in leaves):
            self._drop()  # before the new ones are made: two at once would not be needed
            prepared = prepare(model, variables)
            self._model, self._prepared = model, prepared
            self._parameters = tuple(weakref.ref(x, self._drop) for x in leaves)
        return self._prepared


_LAST = LastPrepared()


def prepared_variables(model, variables):
    """What `generate` and `beam_search` work with: see `prepare`."""
    return _LAST.of(model, variables)


def weights_of(variables):
    """The weights that a model's own methods take."""
    return held(variables, "prepared", "params")[1]


def held(variables, *accepted: str):
    """(name, weights) of the first of these that the variables hold."""
    for name in accepted:
        if name in variables:
            refuse_explicit("variables", variables[name])
            return name, variables[name]
    raise ValueError(
        f"variables hold {', '.join(variables) or 'nothing'}; they must hold "
        f"{' or '.join(map(repr, accepted))} (model.init gives 'params', prepare 'prepared')"
    )
