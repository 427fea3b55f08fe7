"""The parts of a model that a user may define: a mask, an activation and positions."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.own_masks import TableMask
from jaxformer.functional.layers.feedforward import check_activation
from jaxformer.functional.position_vectors import FunctionPositions, PositionVectors, TablePositions
from jaxformer.models.config.check import shown
from jaxformer.models.config.model import ModelConfig


class OwnParts(NamedTuple):
    """The user's parts of a model. A part that is None comes from the config.

    Attributes:
        mask: the mask of self-attention within documents.
        activation: the activation of the feed-forward layers, an elementwise function.
        positions: the position vectors that are added to the embeddings.
    """

    mask: Mask | None = None
    activation: Callable[..., Any] | None = None
    positions: TablePositions | FunctionPositions | None = None


NO_OWN_PARTS = OwnParts()


def check_own_parts(own: OwnParts, config: ModelConfig, accepted: tuple[str, ...]) -> None:
    """Raises ValueError unless the user's parts fit the config.

    Args:
        own: the user's parts.
        config: the config of the model.
        accepted: the names of the parts that have an effect in the model.
    """
    for name, part in own._asdict().items():
        if part is None:
            continue
        if name not in accepted:
            lacks = {"mask": "use attention", "activation": "have feed-forward layers"}
            raise ValueError(
                f"{name} is not accepted, because {type(config).__name__} does not "
                f"{lacks.get(name, 'add positions')}"
            )
        try:
            hash(part)
        except TypeError as error:
            raise ValueError(
                f"{name} is {shown(part)}, which is not hashable ({error}): use hashable fields, "
                "such as a tuple in place of a list or an array"
            ) from None
    if isinstance(own.activation, str):
        raise ValueError(
            f"activation is {own.activation!r}; pass a function, or set activation in the config"
        )
    if own.activation is not None:
        check_activation(own.activation)
    if own.mask is not None:
        check_own_mask(own.mask, config)


def check_own_mask(mask: Mask, config: ModelConfig) -> None:
    """Raises ValueError unless the user's mask fits the config."""
    for name in ("window", "prefix"):
        if getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(config, name)}; with a mask it must not be set: the "
                "mask alone determines which keys each query attends to"
            )
    tables = [rule for rule in mask.rules() if isinstance(rule, TableMask)]
    for table in tables:
        if table.size < config.max_length:
            raise ValueError(
                f"mask has shape ({table.size}, {table.size}), but max_length is "
                f"{config.max_length}; pass an array with a row and a column for each position, or "
                f"set max_length={table.size}"
            )


def check_own_positions(positions: PositionVectors, config: ModelConfig) -> None:
    """Raises ValueError unless the user's position vectors fit the config."""
    if config.positions in ("rotary", "relative", "alibi"):
        raise ValueError(
            f"positions was given, but the config has positions {config.positions!r}, which are "
            "part of attention; set positions='none' in the config"
        )
    if not isinstance(positions, TablePositions):
        return
    if positions.dim != config.embed_dim or positions.length < config.max_length:
        raise ValueError(
            f"positions has shape ({positions.length}, {positions.dim}); it must be [max_length, "
            f"embed_dim], which is ({config.max_length}, {config.embed_dim})"
        )
