"""Checked inputs of the functions that look inside a model."""

from dataclasses import replace
from typing import Any

from jaxformer.functional.inputs import Inputs
from jaxformer.models.check import as_array, checked_inputs
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
