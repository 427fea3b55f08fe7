"""Checked inputs of the functions that look inside a model."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxformer.functional.inputs import Inputs
from jaxformer.models.check import as_array, checked_inputs
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables


def read_inputs(
    model: LanguageModel, variables: Variables, tokens: Any, source: Any = None
) -> Inputs:
    """Returns the inputs of a pass over complete sequences, after all checks.

    Args:
        model: any model.
        variables: its variables.
        tokens: ids, int [batch, length].
        source: for a model that reads one, rows of ids of any lengths, or int [batch, source].

    Raises:
        ValueError: an argument is not accepted.
    """
    model.check(variables)
    read = model.read_source(source)
    tokens = as_array("tokens", tokens)
    if tokens.ndim == 2 and not tokens.shape[1]:
        raise ValueError(f"tokens are {tokens.shape}; each text needs at least one token")
    inputs = Inputs(tokens)
    if read is not None:
        inputs = replace(inputs, source=read.tokens, source_segments=read.segments)
    return checked_inputs(inputs, model.config)


def read_logits(
    model: LanguageModel, variables: Variables, tokens: Any, target: Any, position: int, source: Any
) -> tuple[Inputs, Int[Array, " batch"], int]:
    """Returns the inputs of a pass, and which logit of each text to explain, after all checks.

    Args:
        model: any model.
        variables: its variables.
        tokens: ids, int [batch, length].
        target: one id for each text: the token of the logit.
        position: the position that predicts it; negative: counted from the end.
        source: for a model that reads one, the sources.

    Returns:
        (inputs, target, position counted from the beginning).

    Raises:
        ValueError: an argument is not accepted.
    """
    inputs = read_inputs(model, variables, tokens, source)
    batch_size, length = inputs.tokens.shape[:2]
    target, vocab_size = jnp.asarray(as_array("target", target)), model.config.vocab_size
    if target.shape != (batch_size,):
        raise ValueError(f"target is {target.shape}; it must be ({batch_size},), one id per text")
    if (target < 0).any() or (target >= vocab_size).any():
        raise ValueError(f"target is {target}; ids are 0 … {vocab_size - 1}")
    if whole_number("position", position, -length) >= length:
        raise ValueError(f"position is {position}; the texts have {length} tokens")
    return inputs, target, position % length
