"""The recurrent language models' config."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxformer.models.config.check import at_least, fraction, one_of


@dataclass(frozen=True)
class RecurrentConfig:
    """An RNN or LSTM language model. A None is worked out from the other fields (`resolved`)."""

    vocab_size: int = 50_257
    """number of token ids"""
    max_length: int = 1024
    """most tokens of one document; no parameter depends on it"""
    cell: Literal["rnn", "lstm"] = "lstm"
    """h_t = tanh(…), or the gated cell"""
    num_layers: int = 2
    """recurrent layers, each reading the states of the one below"""
    embed_dim: int = 512
    """width of the token vectors"""
    hidden_dim: int | None = None
    """width of the states; None: embed_dim"""
    tie_embeddings: bool = True
    """the output map is the token embedding, transposed"""
    head_bias: bool = True
    """a bias on the logits"""
    dropout: float = 0.0
    """on the embeddings and on what each layer hands up, while training"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of activations; parameters, states, logits and losses are float32"""

    def __post_init__(self):
        at_least(1, self, "vocab_size", "max_length", "num_layers", "embed_dim", "hidden_dim")
        one_of(self)
        fraction(self, "dropout")
        if self.tie_embeddings and self.hidden_dim not in (None, self.embed_dim):
            raise ValueError(
                f"hidden_dim is {self.hidden_dim}; with tie_embeddings it must be embed_dim "
                f"({self.embed_dim})"
            )

    @property
    def resolved(self) -> "RecurrentConfig":
        """The same config with every None that stands for a size worked out."""
        return replace(self, hidden_dim=self.embed_dim) if self.hidden_dim is None else self
