"""Mean ablation of attention heads: the increase of the loss if heads output a constant.

Mean ablation replaces the output of a head at every token by the head's mean output over all tokens
of the batch. An ablated head outputs the same vector at every token.

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

from jaxformer.functional.hooks import NO_HOOKS, Hooks, Patch
from jaxformer.functional.losses.chunked import chunked_token_losses
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import heads_shape
from jaxformer.interpret.summary import summary
from jaxformer.interpret.texts import batch_inputs, checked_batch, map_sequences, query_inputs
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import Batch


class Ablation(NamedTuple):
    """Effects of ablating sets of heads on the loss, in nats per token.

    The loss of a sequence is the weighted mean loss of its targets. The effect on a sequence is
    the loss without the heads minus the loss with all heads. All sequences have equal weight.

    Attributes:
        loss: the mean loss of the sequences with all heads.
        effect: the mean effect over the sequences, positive if the ablation increases the loss.
        standard_error: the standard error of the effect, s / √n, with n sequences and the standard
            deviation s of the paired differences (n − 1 in the denominator).
        differences: the effect of the ablation on each sequence.
    """

    loss: Float[Array, ""]
    effect: Float[Array, "*sets"]
    standard_error: Float[Array, "*sets"]
    differences: Float[Array, "*sets batch"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


def ablate_heads(
    model: LanguageModel,
    variables: Variables,
    batch: Batch,
    attention: str = "attention",
    batch_size_within_memory: int = 8,
) -> Ablation:
    """Measures the effect of ablating each head alone.

    One compiled program measures all heads. The program processes `batch_size_within_memory`
    sequences at a time.

    Args:
        model: a Transformer.
        variables: the model's variables.
        batch: at least two sequences (see `texts.next_token_batch`).
        attention: "attention", "cross_attention" or "encoder.attention".
        batch_size_within_memory: the number of sequences in one forward pass.

    Returns:
        effect [layers, heads], standard_error [layers, heads] and differences
        [layers, heads, sequences].

    Raises:
        ValueError: An argument is invalid.
    """
    layers, heads = heads_shape(model, attention)
    each = np.eye(layers * heads, dtype=bool).reshape(-1, layers, heads)
    found = ablate_sets(model, variables, batch, each, attention, batch_size_within_memory)
    parts = (x.reshape(layers, heads, *x.shape[1:]) for x in found[1:])
    return Ablation(found.loss, *parts)


def ablate_sets(
    model: LanguageModel,
    variables: Variables,
    batch: Batch,
    sets: Bool[Array | np.ndarray, "sets layers heads"],
    attention: str = "attention",
    batch_size_within_memory: int = 8,
) -> Ablation:
    """Measures the effect of ablating all heads of a set together, for each of several sets.

    The mean outputs of all heads are computed once, in the model without ablation.

    Args:
        model: as in `ablate_heads`.
        variables: as in `ablate_heads`.
        batch: as in `ablate_heads`.
        sets: an entry is True if the set contains the head (see `head_sets`).
        attention: as in `ablate_heads`.
        batch_size_within_memory: as in `ablate_heads`.

    Returns:
        effect [sets], standard_error [sets] and differences [sets, sequences].

    Raises:
        ValueError: An argument is invalid.
    """
    shape = check_measurement(model, variables, attention, batch_size_within_memory)
    if np.ndim(sets) != 3 or np.shape(sets)[1:] != shape or np.asarray(sets).dtype != bool:
        raise ValueError(
            f"sets is {jnp.result_type(sets)} {np.shape(sets)}; it must be bool [number of sets, "
            f"{shape[0]} (layers), {shape[1]} (heads)]"
        )
    if not len(sets):
        raise ValueError("sets is empty; it must contain at least one set of heads")
    checked = checked_batch(model, batch), jnp.asarray(sets)
    return _ablate(model, variables["params"], *checked, attention, batch_size_within_memory)


def head_sets(
    shape: tuple[int, int], sets: Iterable[Iterable[tuple[int, int]]]
) -> Bool[np.ndarray, "sets layers heads"]:
    """Converts sets of (layer, head) pairs into the array that `ablate_sets` takes.

    Args:
        shape: (number of layers, number of heads).
        sets: the (layer, head) pairs of each set.

    Raises:
        ValueError: A layer or head does not exist.
    """
    lists = [list(heads) for heads in sets]
    result = np.zeros((len(lists), *shape), bool)
    for number, heads in enumerate(lists):
        for layer, head in heads:
            if not (0 <= layer < shape[0] and 0 <= head < shape[1]):
                raise ValueError(
                    f"set {number} contains layer {layer}, head {head}; layer must be in 0 … "
                    f"{shape[0] - 1} and head in 0 … {shape[1] - 1}"
                )
            result[number, layer, head] = True
    return result


def check_measurement(
    model: LanguageModel, variables: Variables, attention: str, batch_size_within_memory: int
) -> tuple[int, int]:
    """Returns (layers, heads) of a model; raises ValueError if its heads cannot be measured."""
    shape = heads_shape(model, attention)
    whole_number("batch_size_within_memory", batch_size_within_memory, 1)
    model.check(variables)
    return shape


def sequence_losses(
    model: LanguageModel, params: Weights, batch: Batch, hidden: Float[Array, "batch length dim"]
) -> Float[Array, " batch"]:
    """Computes the weighted mean loss of each sequence, in nats per token."""
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
    batch_size_within_memory: int,
) -> Ablation:
    means = _mean_outputs(model, params, batch, attention, batch_size_within_memory)

    def losses(hooks: Hooks) -> Float[Array, " batch"]:
        def batch_losses(sequences: Batch) -> Float[Array, " batch"]:
            hidden = model.forward(params, batch_inputs(sequences), hooks=hooks).hidden
            return sequence_losses(model, params, sequences, hidden)

        return map_sequences(batch_losses, batch, batch_size_within_memory)

    def without(heads: Bool[Array, "layers heads"]) -> Float[Array, " batch"]:
        patch = Patch(heads[:, None, :, None, None], means)
        return losses(Hooks(patch={f"{attention}.heads": patch}))

    whole = losses(NO_HOOKS)
    differences = jax.lax.map(without, sets) - whole
    error = differences.std(axis=-1, ddof=1) / np.sqrt(len(whole))
    return Ablation(whole.mean(), differences.mean(axis=-1), error, differences)


def _mean_outputs(
    model: LanguageModel,
    params: Weights,
    batch: Batch,
    attention: str,
    batch_size_within_memory: int,
) -> Float[Array, "layers 1 heads 1 head_dim"]:
    """Computes the mean output of each head over all tokens except padding."""
    point = f"{attention}.heads"

    def batch_losses(sequences: Batch) -> tuple[Array, Array]:
        passed = model.forward(params, batch_inputs(sequences), hooks=Hooks((point,)))
        queries = query_inputs(sequences, attention)
        real = jnp.ones(queries.tokens.shape, bool)
        if queries.segment_ids is not None:
            real = queries.segment_ids != 0
        outputs = passed.captured[point].astype(jnp.float32)
        outputs = jnp.where(real[None, :, None, :, None], outputs, 0.0)
        return jnp.moveaxis(outputs.sum(axis=3), 1, 0), real.sum(axis=1)

    total, count = map_sequences(batch_losses, batch, batch_size_within_memory)
    return (total.sum(axis=0) / count.sum())[:, None, :, None, :]
