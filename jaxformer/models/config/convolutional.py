"""The convolutional language models' config."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.models.config.check import at_least, fraction, one_of, positive


@dataclass(frozen=True)
class ConvolutionalConfig:
    """A CNN language model: x + act(Convolution(Norm(x))) layer by layer."""

    vocab_size: int = 50_257
    """number of token ids"""
    max_length: int = 1024
    """most tokens of one document; no parameter depends on it"""
    num_layers: int = 8
    """convolutions"""
    embed_dim: int = 512
    """width of the residual stream"""
    kernel_size: int = 3
    """tokens that a convolution joins"""
    dilation_growth: int = 1
    """each layer's dilation over that of the layer below; 2: 1, 2, 4, …"""
    causal: bool = True
    """a kernel ends at its own position; False: it is centred on it, and sees what is to come"""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    """after each convolution"""
    norm: Literal["layer", "rms", "none"] = "layer"
    """before each convolution, over the features, and after the stack"""
    norm_epsilon: float = 1e-5
    """inside the root"""
    residual: bool = True
    """add a layer's input to its output"""
    tie_embeddings: bool = True
    """the output map is the token embedding, transposed"""
    head_bias: bool = True
    """a bias on the logits"""
    dropout: float = 0.0
    """on the embeddings and on what each layer adds, while training"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of activations; parameters, statistics, logits and losses are float32"""

    def __post_init__(self):
        at_least(1, self, "vocab_size", "max_length", "num_layers", "embed_dim", "kernel_size")
        at_least(1, self, "dilation_growth")
        one_of(self)
        fraction(self, "dropout")
        positive(self, "norm_epsilon")
        if not self.causal and self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size is {self.kernel_size}; a centred kernel needs it odd")

    @property
    def resolved(self) -> "ConvolutionalConfig":
        return self
