"""Sparse autoencoders of activations: loading them, and splicing them into a forward pass.

    f = act((x − c) W_enc + b_enc)        x̂ = f W_dec + b_dec

c is b_dec or 0. act is ReLU, or JumpReLU, which is z where z exceeds the threshold of the feature,
and 0 elsewhere.

Reference:
    Bricken et al. 2023, "Towards monosemanticity"; Rajamanoharan et al. 2024 (JumpReLU);
    SAELens' format: cfg.json and sae_weights.safetensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxformer.artifacts.files import read_json
from jaxformer.functional.hooks import Edit, EditAt
from jaxformer.models.config.check import shown

_FILES = ("cfg.json", "sae_weights.safetensors")
_TENSORS = ("W_enc", "b_enc", "W_dec", "b_dec")
# Options of SAELens that change the function, with the values that this module supports.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "architecture": ("standard", "jumprelu"),
    "activation_fn": ("relu",),
    "activation_fn_str": ("relu",),
    "normalize_activations": ("none", None),
    "finetuning_scaling_factor": (False, None),
    "reshape_activations": ("none", None),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseAutoencoder:
    """A sparse autoencoder of the value at a hook point.

    Attributes:
        encoder: W_enc.
        encoder_bias: b_enc.
        decoder: W_dec.
        decoder_bias: b_dec.
        center: c, which is subtracted from the input.
        threshold: the threshold of each feature; zeros for ReLU.
    """

    encoder: Float[Array, "dim features"]
    encoder_bias: Float[Array, " features"]
    decoder: Float[Array, "features dim"]
    decoder_bias: Float[Array, " dim"]
    center: Float[Array, " dim"]
    threshold: Float[Array, " features"]

    def encode(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch features"]:
        """Computes the features f."""
        z = (x - self.center) @ self.encoder + self.encoder_bias
        return jnp.where(z > self.threshold, jax.nn.relu(z), 0.0)

    def decode(self, features: Float[Array, "*batch features"]) -> Float[Array, "*batch dim"]:
        """Computes the reconstruction x̂."""
        return features @ self.decoder + self.decoder_bias

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Computes the reconstruction x̂ of x."""
        return self.decode(self.encode(x))


def load_autoencoder(folder: str | Path) -> SparseAutoencoder:
    """Reads an autoencoder in the format of SAELens.

    Args:
        folder: a folder with cfg.json and sae_weights.safetensors.

    Raises:
        ValueError: A file is missing or damaged, the tensors do not fit each other, or the
            autoencoder has an option that is not supported.
    """
    config_path, weights_path = (Path(folder) / name for name in _FILES)
    config = read_json(config_path)
    if not weights_path.is_file():
        raise ValueError(f"{weights_path} does not exist")
    try:
        tensors = load_file(weights_path)
    except SafetensorError as error:
        raise ValueError(f"{weights_path} cannot be read: {error}") from None
    for name, accepted in _SUPPORTED.items():
        if config.get(name, accepted[0]) not in accepted:
            raise ValueError(
                f"{config_path}: {name} is {shown(config[name])}; it must be "
                f"{' or '.join(repr(x) for x in accepted if x is not None)}"
            )
    _check_tensors(weights_path, tensors)
    encoder, encoder_bias, decoder, bias = (
        jnp.asarray(tensors[name], jnp.float32) for name in _TENSORS
    )
    threshold = tensors.get("threshold", np.zeros(encoder.shape[1], np.float32))
    center = bias if config.get("apply_b_dec_to_input", True) else jnp.zeros_like(bias)
    return SparseAutoencoder(
        encoder, encoder_bias, decoder, bias, center, jnp.asarray(threshold, jnp.float32)
    )


def _check_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError unless the tensors of an autoencoder exist and fit each other."""
    for name in _TENSORS:
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name} is missing")
    dim, features = tensors["W_enc"].shape if tensors["W_enc"].ndim == 2 else (0, 0)
    shapes = {"W_enc": (dim, features), "b_enc": (features,), "W_dec": (features, dim)}
    shapes |= {"b_dec": (dim,), "threshold": (features,)}
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {tensors[name].shape}; it must be {shape}"
            )


def splice(
    autoencoders: Mapping[int, SparseAutoencoder],
    point: str = "block.output",
    change: Callable[[Float[Array, "*batch features"]], Float[Array, "*batch features"]]
    | None = None,
) -> dict[str, Edit]:
    """Returns a patch that passes the values of several layers through their autoencoders.

    >>> patch = splice({2: first, 5: second})
    >>> inspect(model, variables, tokens, patch=patch)

    Args:
        autoencoders: {layer: autoencoder}, all with the same sizes.
        point: the name of the hook point.
        change: a function of the features. With it, a value x becomes x + decode(change(f)) −
            decode(f), so the part of x that the autoencoder does not reconstruct is kept. Without
            it, x becomes its reconstruction.

    Raises:
        ValueError: There is no autoencoder, or the autoencoders have different sizes.
    """
    if not autoencoders:
        raise ValueError("autoencoders is empty; it must map layers to autoencoders")
    sizes = {layer: x.encoder.shape for layer, x in autoencoders.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "the autoencoders have different sizes [dim, features]: "
            + ", ".join(f"{size} in layer {layer}" for layer, size in sizes.items())
        )
    layers = tuple(autoencoders)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *autoencoders.values())
    numbers = jnp.asarray(layers, jnp.int32)
    return {point: Edit(_Spliced(change), numbers, stacked, layers=layers)}


@dataclass(frozen=True)
class _Spliced:
    """Function of an `Edit` that replaces a value by its reconstruction; see `splice`."""

    change: Callable[..., Any] | None

    def __call__(
        self,
        value: Float[Array, "*batch dim"],
        at: EditAt,
        layers: Int[Array, " layers"],
        stacked: SparseAutoencoder,
    ) -> Float[Array, "*batch dim"]:
        """Returns the new value, computed in float32."""
        index = jnp.equal(layers, jnp.asarray(at.layer)).argmax()
        autoencoder = jax.tree.map(lambda x: x[index], stacked)
        x = value.astype(jnp.float32)
        features = autoencoder.encode(x)
        if self.change is None:
            return autoencoder.decode(features)
        return x + (self.change(features) - features) @ autoencoder.decoder
