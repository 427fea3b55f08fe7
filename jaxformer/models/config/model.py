"""Base class of the model configs."""

from abc import ABC, abstractmethod
from dataclasses import Field, replace
from typing import Any, ClassVar, Literal, Self

from jaxformer.models.config.check import check_fields
from jaxformer.models.config.needs import Needs

CheckpointDType = Literal["float32", "bfloat16", "float16"]


class ModelConfig(ABC):
    """Base class of the model configs, with defaults that fields of subclasses override.

    The defaults are read-only properties, like the fields of a frozen dataclass.

    Attributes:
        reads_source: whether the model reads a source, such as a text to translate.
        bidirectional: whether tokens attend to later tokens. A bidirectional model cannot generate
            text.
        patterns: names of the fields that may be a tuple with an entry for each layer.
        needs: conditions under which a field has an effect.
    """

    # Type checkers need this declaration to accept `replace(self)`.
    __dataclass_fields__: ClassVar[dict[str, Field]]

    reads_source: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False
    patterns: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Needs] = {}

    def __post_init__(self) -> None:
        """Checks the types of the fields."""
        check_fields(self)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Maximum number of tokens per document."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    @abstractmethod
    def embed_dim(self) -> int:
        """Width of the token vectors."""

    @property
    @abstractmethod
    def tie_embeddings(self) -> bool:
        """Whether the output projection is the transposed table of token vectors."""

    @property
    @abstractmethod
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """The dtype of activations."""

    @property
    @abstractmethod
    def dropout(self) -> float:
        """Dropout rate, which applies only in training."""

    @property
    def longest_source(self) -> int:
        """Maximum number of tokens of a source; 0 for a model without a source."""
        return 0

    @property
    def num_source_ids(self) -> int:
        """Number of token ids of a source; 0 without a source, and for a source of features."""
        return 0

    @property
    def source_features(self) -> int | None:
        """Number of features per position of a source; None for a source of tokens."""
        return None

    @property
    def residual(self) -> bool:
        """Whether each layer's input is added to its output."""
        return False

    @property
    def window(self) -> int | tuple[int | None, ...] | None:
        """The size of the attention window in tokens; None without a window."""
        return None

    @property
    def prefix(self) -> int:
        """Length of the prefix of a document, whose tokens attend in both directions."""
        return 0

    @property
    def layer_types(self) -> str | tuple[str, ...]:
        """Type of the sub-layer with which a layer combines tokens, such as attention."""
        return "attention"

    @property
    def positions(self) -> str:
        """Position encoding."""
        return "none"

    @property
    def num_token_types(self) -> int:
        """Number of token types."""
        return 0

    @property
    def scale_embeddings(self) -> bool:
        """Whether token vectors are multiplied by √embed_dim."""
        return False

    @property
    def logits_softcap(self) -> float | None:
        """Soft cap of the logits, or None."""
        return None

    @property
    def open_fields(self) -> dict[str, Any]:
        """The values that `resolved` sets in fields that are None, by the names of the fields."""
        return {}

    @property
    def resolved(self) -> Self:
        """The config with a computed value in place of each size that is None."""
        found = {name: x for name, x in self.open_fields.items() if getattr(self, name) is None}
        return replace(self, **found) if found else self

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers of query heads, key heads and any other heads; () without any heads."""
        return ()

    @property
    def stacks(self) -> dict[str, "ModelConfig"]:
        """The config of each stack of layers, by the prefix of its parameters' paths."""
        return {"": self}
