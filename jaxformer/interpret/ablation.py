"""Ablation of attention heads: how much the loss grows if heads output only their mean.

Mean ablation replaces the output of a head at every token by the mean of that output over all
tokens of the batch. This removes the part of the output that differs from token to token.

Reference:
    Wang et al. 2022, §2.2 (mean ablation); Michel et al. 2019 (removal of heads).
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxformer.functional.losses.chunked import chunked_token_losses
from jaxformer.functional.taps import NO_HOOKS, Hooks, Patch
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import heads_shape
from jaxformer.interpret.texts import checked_batch, inputs_of, map_rows, query_inputs
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import Batch


class Ablation(NamedTuple):
    """Effects of ablating sets of heads on the loss, in nats per token.

    The loss of a row is the weighted mean over its targets. The effect on a row is its loss without
    the heads minus its loss with all heads. All rows count alike.

    Attributes:
        loss: the mean loss of the rows with all heads.
        effect: the mean effect over the rows. Above 0: the loss is larger without the heads.
        standard_error: the standard error of the effect, s / √rows, with the standard deviation s
            of the paired differences (n − 1 in the denominator).
        differences: the effect on each row.
    """

    loss: Float[Array, ""]
    effect: Float[Array, "*sets"]
    standard_error: Float[Array, "*sets"]
    differences: Float[Array, "*sets rows"]


def ablate_heads(
    model: LanguageModel,
    variables: Variables,
    batch: Batch,
    attention: str = "attention",
    rows_at_once: int = 8,
) -> Ablation:
    """Measures the effect of each head alone.

    All heads are measured in one compiled program, which holds `rows_at_once` rows in memory.

    Args:
        model: a Transformer.
        variables: its variables.
        batch: at least two rows (see `texts.next_token_batch`).
        attention: "attention", "cross_attention" or "encoder.attention".
        rows_at_once: number of rows in memory at once.

    Returns:
        effect [layers, heads], standard_error [layers, heads], differences [layers, heads, rows].

    Raises:
        ValueError: an argument is not accepted.
    """
    layers, heads = heads_shape(model, attention)
    each = np.eye(layers * heads, dtype=bool).reshape(-1, layers, heads)
    found = ablate_sets(model, variables, batch, each, attention, rows_at_once)
    parts = (x.reshape(layers, heads, *x.shape[1:]) for x in found[1:])
    return Ablation(found.loss, *parts)


def ablate_sets(
    model: LanguageModel,
    variables: Variables,
    batch: Batch,
    sets: Bool[Array | np.ndarray, "sets layers heads"],
    attention: str = "attention",
    rows_at_once: int = 8,
) -> Ablation:
    """Measures the effect of ablating all heads of a set together, for each of several sets.

    The means of all heads are measured once, in the model without ablation.

    Args:
        model: as in `ablate_heads`.
        variables: as in `ablate_heads`.
        batch: as in `ablate_heads`.
        sets: True for the heads of each set (see `head_sets`).
        attention: as in `ablate_heads`.
        rows_at_once: as in `ablate_heads`.

    Returns:
        effect [sets], standard_error [sets], differences [sets, rows].

    Raises:
        ValueError: an argument is not accepted.
    """
    shape = check_measurement(model, variables, attention, rows_at_once)
    if np.ndim(sets) != 3 or np.shape(sets)[1:] != shape or np.asarray(sets).dtype != bool:
        raise ValueError(
            f"sets are {jnp.result_type(sets)} {np.shape(sets)}; they must be bool [sets, "
            f"{shape[0]}, {shape[1]}] (layers, heads)"
        )
    if not len(sets):
        raise ValueError(f"sets are {np.shape(sets)}; there must be at least one set")
    checked = checked_batch(model, batch), jnp.asarray(sets)
    return _ablate(model, variables["params"], *checked, attention, rows_at_once)


def head_sets(
    shape: tuple[int, int], sets: Iterable[Iterable[tuple[int, int]]]
) -> Bool[np.ndarray, "sets layers heads"]:
    """Returns sets of heads as an array for `ablate_sets`.

    Args:
        shape: (number of layers, number of heads).
        sets: the (layer, head) pairs of each set.

    Raises:
        ValueError: there is no such head.
    """
    rows = [list(heads) for heads in sets]
    result = np.zeros((len(rows), *shape), bool)
    for number, heads in enumerate(rows):
        for layer, head in heads:
            if not (0 <= layer < shape[0] and 0 <= head < shape[1]):
                raise ValueError(
                    f"set {number} holds layer {layer}, head {head}; layers are 0 … "
                    f"{shape[0] - 1} and heads 0 … {shape[1] - 1}"
                )
            result[number, layer, head] = True
    return result


def check_measurement(
    model: LanguageModel, variables: Variables, attention: str, rows_at_once: int
) -> tuple[int, int]:
    """Returns `heads_shape`; raises ValueError unless the heads of this model can be measured."""
    shape = heads_shape(model, attention)
    whole_number("rows_at_once", rows_at_once, 1)
    model.check(variables)
    return shape


def row_losses(
    model: LanguageModel, params: Weights, batch: Batch, hidden: Float[Array, "rows length dim"]
) -> Float[Array, " rows"]:
    """Computes the weighted mean loss of each row, in nats per token."""
    head = model.output_map(params)
    losses = chunked_token_losses(
        hidden, head["kernel"], batch.targets, bias=head.get("bias"), cap=head.get("cap")
    )
    weights = jnp.asarray(batch.weights)
    return jnp.where(weights != 0, weights * losses, 0.0).sum(axis=1) / weights.sum(axis=1)


@partial(jax.jit, static_argnums=(0, 4, 5))
def _ablate(
    model: LanguageModel,
    params: Weights,
    batch: Batch,
    sets: Bool[Array, "sets layers heads"],
    attention: str,
    rows_at_once: int,
) -> Ablation:
    means = _mean_outputs(model, params, batch, attention, rows_at_once)

    def losses(hooks: Hooks) -> Float[Array, " rows"]:
        def of_rows(rows: Batch) -> Float[Array, " rows"]:
            hidden = model.forward(params, inputs_of(rows), hooks=hooks).hidden
            return row_losses(model, params, rows, hidden)

        return map_rows(of_rows, batch, rows_at_once)

    def without(heads: Bool[Array, "layers heads"]) -> Float[Array, " rows"]:
        patch = Patch(heads[:, None, :, None, None], means)
        return losses(Hooks(patch={f"{attention}.heads": patch}))

    whole = losses(NO_HOOKS)
    differences = jax.lax.map(without, sets) - whole
    error = differences.std(axis=-1, ddof=1) / np.sqrt(len(whole))
    return Ablation(whole.mean(), differences.mean(axis=-1), error, differences)


def _mean_outputs(
    model: LanguageModel, params: Weights, batch: Batch, attention: str, rows_at_once: int
) -> Float[Array, "layers 1 heads 1 head_dim"]:
    """Computes the mean output of each head over all tokens except padding."""
    point = f"{attention}.heads"

    def of_rows(rows: Batch) -> tuple[Array, Array]:
        passed = model.forward(params, inputs_of(rows), hooks=Hooks((point,)))
        queries = query_inputs(rows, attention)
        real = jnp.ones(queries.tokens.shape, bool)
        if queries.segments is not None:
            real = queries.segments != 0
        outputs = passed.captured[point].astype(jnp.float32)
        outputs = jnp.where(real[None, :, None, :, None], outputs, 0.0)
        return jnp.moveaxis(outputs.sum(axis=3), 1, 0), real.sum(axis=1)

    total, count = map_rows(of_rows, batch, rows_at_once)
    return (total.sum(axis=0) / count.sum())[:, None, :, None, :]
