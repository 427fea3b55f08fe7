"""Config of the recurrent language models."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from jaxformer.models.config.check import check_at_least, check_fraction
from jaxformer.models.config.model import ModelConfig


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """Config of an RNN or LSTM language model.

    `resolved` replaces a size that is None by its value, computed from the other fields.
    """

    vocab_size: int = 50_257
    """number of token ids"""
    max_length: int = 1024
    """maximum number of tokens per document; no parameter depends on it"""
    cell: Literal["rnn", "lstm"] = "lstm"
    """recurrent cell: rnn is h_t = tanh(…); lstm is the gated cell"""
    num_layers: int = 2
    """number of recurrent layers; each one reads the states of the layer below it"""
    embed_dim: int = 512
    """width of the token embeddings"""
    hidden_dim: int | None = None
    """width of the hidden states; None: embed_dim"""
    tie_embeddings: bool = True
    """use the token embedding, transposed, as the output projection"""
    head_bias: bool = True
    """add a bias to the logits"""
    dropout: float = 0.0
    """dropout rate, on the embeddings and on each layer's output, in training only"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of activations; parameters, states, logits and losses are float32"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_at_least(1, self, "vocab_size", "max_length", "num_layers", "embed_dim", "hidden_dim")
        check_fraction(self, "dropout")
        if self.tie_embeddings and self.hidden_dim not in (None, self.embed_dim):
            raise ValueError(
                f"hidden_dim is {self.hidden_dim}; with tie_embeddings it must be embed_dim "
                f"({self.embed_dim})"
            )

    @property
    def resolved(self) -> Self:
        """The same config with every size that is None replaced by its value."""
        return replace(self, hidden_dim=self.embed_dim) if self.hidden_dim is None else self
