"""Configs of baseline language models: RNN, LSTM and CNN."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxformer.models.config.check import check_at_least, check_fraction, check_positive
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.needs import Needs, is_above, is_one_of
from jaxformer.models.config.transformer import Plain


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """Config of an RNN or LSTM language model.

    `resolved` replaces each size that is None by a value computed from the other fields.
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
    """width of the hidden states; default: embed_dim"""
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
                f"hidden_dim is {self.hidden_dim}; with tie_embeddings it must equal embed_dim "
                f"({self.embed_dim})"
            )

    @property
    def open_fields(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        return {"hidden_dim": self.embed_dim}


@dataclass(frozen=True)
class ConvolutionalConfig(ModelConfig):
    """Config of a CNN language model; each layer computes x + act(Convolution(Norm(x)))."""

    needs: ClassVar[Needs] = {
        "norm_epsilon": (is_one_of("norm", "layer", "rms"),),
        "dilation_growth": (is_above("kernel_size", 1), is_above("num_layers", 1)),
    }

    vocab_size: int = 50_257
    """number of token ids"""
    max_length: int = 1024
    """maximum number of tokens per document; no parameter depends on it"""
    num_layers: int = 8
    """number of convolutional layers"""
    embed_dim: int = 512
    """width of the residual stream"""
    kernel_size: int = 3
    """number of tokens that the kernel of a convolution covers"""
    dilation_growth: int = 1
    """factor by which the dilation grows from layer to layer; with 2, the dilations are 1, 2, 4,
    …"""
    activation: Plain = "relu"
    """activation after each convolution"""
    norm: Literal["layer", "rms", "none"] = "layer"
    """normalisation over the features, before each convolution and after the last layer"""
    norm_epsilon: float = 1e-5
    """added to the variance inside the square root"""
    residual: bool = True
    """add a layer's input to its output"""
    tie_embeddings: bool = True
    """use the token embedding, transposed, as the output projection"""
    head_bias: bool = True
    """add a bias to the logits"""
    dropout: float = 0.0
    """dropout rate, on the embeddings and on each layer's output, in training only"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of activations; parameters, norm statistics, logits and losses are float32"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_at_least(1, self, "vocab_size", "max_length", "num_layers", "embed_dim")
        check_at_least(1, self, "kernel_size", "dilation_growth")
        check_fraction(self, "dropout")
        check_positive(self, "norm_epsilon")

    @property
    def norm_bias(self) -> bool:
        """Whether layer norms have a bias."""
        return True
