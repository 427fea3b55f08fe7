"""What every model config has."""

from abc import ABC, abstractmethod
from dataclasses import Field, replace
from typing import Any, ClassVar, Literal, Self

from jaxformer.models.config.check import check_fields
from jaxformer.models.config.needs import Needs

CheckpointDType = Literal["float32", "bfloat16", "float16"]  # of the tensors in its files


class ModelConfig(ABC):
    """Base class of the configs: constants of a kind, which fields of a subclass may replace.

    Those that fields replace are properties, because the fields of a config are read-only as well.

    Attributes:
        reads_source: whether it reads a source before its own tokens.
        bidirectional: whether its tokens see later ones, so that it cannot generate.
        patterns: names of the fields that may have an entry for each layer.
        needs: conditions under which a field has an effect.
    """

    __dataclass_fields__: ClassVar[dict[str, Field]]  # those of the subclass, for `replace`

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
        """Dropout rate, in training only."""

    @property
    def causal(self) -> bool:
        """False for the counter-example that sees later tokens although it has a cache."""
        return True

    @property
    def longest_source(self) -> int:
        """Maximum number of tokens of a source; 0 if the model reads none."""
        return 0

    @property
    def num_source_ids(self) -> int:
        """Number of token ids of a source; 0 if the model reads none."""
        return 0

    @property
    def residual(self) -> bool:
        """Whether each layer's input is added to its output."""
        return False

    @property
    def window(self) -> int | tuple[int | None, ...] | None:
        """How many tokens a token sees; None: all."""
        return None

    @property
    def prefix(self) -> int:
        """Number of first tokens of a document that see one another."""
        return 0

    @property
    def layer_types(self) -> str | tuple[str, ...]:
        """Which sub-layer of a layer reads other tokens."""
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
    def logits_cap(self) -> float | None:
        """Soft cap of the logits; None: no cap."""
        return None

    @property
    def open_fields(self) -> dict[str, Any]:
        """The value of each field that may be None, for the case that it is None."""
        return {}

    @property
    def resolved(self) -> Self:
        """The same config with every open field that is None replaced by its value."""
        found = {name: x for name, x in self.open_fields.items() if getattr(self, name) is None}
        return replace(self, **found) if found else self

    @property
    def heads(self) -> tuple[int, ...]:
        """Numbers of heads of a resolved config, first of queries and of keys; () without heads."""
        return ()

    @property
    def stacks(self) -> dict[str, "ModelConfig"]:
        """The config of each stack of layers, by the prefix of its parameters' paths."""
        return {"": self}
