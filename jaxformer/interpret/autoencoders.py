"""Sparse autoencoders of activations: loading them, and splicing them into a forward pass.

    f = act((x − c) W_enc + b_enc)        x̂ = f W_dec + b_dec

c is b_dec or 0. act is one of three functions of z:

- ReLU: max(z, 0).
- JumpReLU: max(z, 0) where z exceeds the threshold of the feature, and 0 elsewhere.
- TopK: the k largest entries of max(z, 0), and 0 elsewhere.

A gated autoencoder is equivalent to a JumpReLU autoencoder with rescaled weights. With
h = (x − c) W_enc, its feature is max(exp(r) h + b_mag, 0) where h + b_gate > 0. This condition is
exp(r) h + b_mag > θ for the threshold θ = b_mag − exp(r) b_gate.

Reference:
    Bricken et al. 2023, "Towards monosemanticity"; Rajamanoharan et al. 2024 (gated, JumpReLU);
    Gao et al. 2024, "Scaling and evaluating sparse autoencoders" (TopK); SAELens' format: cfg.json
    and sae_weights.safetensors.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
# The tensors of each architecture, in addition to W_enc, W_dec and b_dec.
_TENSORS = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
# Options of SAELens that change the function, with the values that this module supports.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "architecture": tuple(_TENSORS),
    "normalize_activations": ("none", None),
    "finetuning_scaling_factor": (False, None),
    "reshape_activations": ("none", None),
    "rescale_acts_by_decoder_norm": (False, None),
    "hook_head_index": (None,),
}
# Hook points of TransformerLens, "blocks.{layer}.{name}", that have the same value in jaxformer for
# every model. The names hook_attn_out and hook_mlp_out are missing: in a model with norms of these
# outputs, such as Gemma 2, TransformerLens captures the values after the norms.
_POINTS = {
    "hook_resid_pre": "block.input",
    "hook_resid_mid": "block.middle",
    "hook_resid_post": "block.output",
    "mlp.hook_post": "feedforward.hidden",
}
_HOOK = re.compile(r"blocks\.(\d+)\.(.+)")


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
        threshold: the threshold of each feature; zeros for ReLU and TopK.
        k: for TopK, the number of features that may be above 0 for each input; otherwise None.
        layer: the layer that the autoencoder was trained on, or None.
        point: the name of the hook point that the autoencoder was trained on, or None.
    """

    encoder: Float[Array, "dim features"]
    encoder_bias: Float[Array, " features"]
    decoder: Float[Array, "features dim"]
    decoder_bias: Float[Array, " dim"]
    center: Float[Array, " dim"]
    threshold: Float[Array, " features"]
    k: int | None = field(default=None, metadata={"static": True})
    layer: int | None = field(default=None, metadata={"static": True})
    point: str | None = field(default=None, metadata={"static": True})

    def encode(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch features"]:
        """Computes the features f."""
        z = (x - self.center) @ self.encoder + self.encoder_bias
        features = jnp.where(z > self.threshold, jax.nn.relu(z), 0.0)
        if self.k is None:
            return features
        largest, index = jax.lax.top_k(features, self.k)
        zeros = jnp.zeros_like(features)
        return jnp.put_along_axis(zeros, index, largest, axis=-1, inplace=False)

    def decode(self, features: Float[Array, "*batch features"]) -> Float[Array, "*batch dim"]:
        """Computes the reconstruction x̂."""
        return features @ self.decoder + self.decoder_bias

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Computes the reconstruction x̂ of x."""
        return self.decode(self.encode(x))


def load_autoencoder(folder: str | Path) -> SparseAutoencoder:
    """Reads an autoencoder in the format of SAELens.

    The function supports the architectures "standard", "jumprelu", "topk" and "gated". SAELens
    saves batch-top-k autoencoders as "jumprelu". The config's hook name determines `layer` and
    `point` of the result: "blocks.5.hook_resid_post" is the hook point "block.output" of layer 5.
    `point` is None if no hook point has the same value as the hook in every model, for example for
    "blocks.5.hook_mlp_out".

    Args:
        folder: a folder with cfg.json and sae_weights.safetensors.

    Raises:
        ValueError: A file is missing or damaged, the tensors do not fit each other, or the
            autoencoder has an option that is not supported.
    """
    config_path, weights_path = (Path(folder) / name for name in _FILES)
    config = _read_config(config_path)
    if not weights_path.is_file():
        raise ValueError(
            f"{weights_path} does not exist; the folder must contain {' and '.join(_FILES)}"
        )
    try:
        tensors = load_file(weights_path)
    except SafetensorError as error:
        raise ValueError(f"{weights_path} cannot be read: {error}") from None
    architecture = config.get("architecture", "standard")
    _check_tensors(weights_path, tensors, _TENSORS[architecture])
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in tensors.items()}
    encoder, decoder, bias = (arrays[name] for name in ("W_enc", "W_dec", "b_dec"))
    if architecture == "gated":
        factor = jnp.exp(arrays["r_mag"])
        encoder, encoder_bias = factor * encoder, arrays["b_mag"]
        threshold = encoder_bias - factor * arrays["b_gate"]
    else:
        encoder_bias = arrays["b_enc"]
        threshold = arrays["threshold"] if architecture == "jumprelu" else 0 * encoder_bias
    center = bias if config.get("apply_b_dec_to_input", True) else jnp.zeros_like(bias)
    layer, point = _hook_point(config)
    return SparseAutoencoder(
        encoder,
        encoder_bias,
        decoder,
        bias,
        center,
        threshold,
        _top_k(config_path, config, encoder.shape[1]),
        layer,
        point,
    )


def _read_config(path: Path) -> dict[str, Any]:
    """Reads cfg.json, and moves the entries of "metadata" (added in SAELens 6) to the top level.

    Raises:
        ValueError: The file cannot be read, or an option is not supported.
    """
    config = read_json(path)
    metadata = config.get("metadata")
    config = {**(metadata if isinstance(metadata, dict) else {}), **config}
    activations = ("relu", "topk") if config.get("architecture") == "topk" else ("relu",)
    accepts = {**_SUPPORTED, "activation_fn": activations, "activation_fn_str": activations}
    for name, accepted in accepts.items():
        if config.get(name, accepted[0]) not in accepted:
            values = [repr(x) for x in accepted if x is not None] or ["null"]
            raise ValueError(
                f"{path}: {name} is {shown(config[name])}; it must be {' or '.join(values)}"
            )
    return config


def _top_k(path: Path, config: Mapping[str, Any], features: int) -> int | None:
    """Returns k of a TopK autoencoder, and None for other architectures.

    Earlier versions of SAELens stored k in "activation_fn_kwargs".
    """
    if config.get("architecture") != "topk":
        return None
    options = config.get("activation_fn_kwargs")
    k = config.get("k", options.get("k") if isinstance(options, dict) else None)
    if isinstance(k, bool) or not isinstance(k, int) or not 0 < k <= features:
        raise ValueError(
            f"{path}: k is {shown(k)}; it must be a whole number from 1 to {features}, the number "
            "of features"
        )
    return k


def _hook_point(config: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Returns the layer and the hook point of a config's hook name; see `load_autoencoder`."""
    match = _HOOK.fullmatch(str(config.get("hook_name")))
    return (None, None) if match is None else (int(match[1]), _POINTS.get(match[2]))


def _check_tensors(path: Path, tensors: Mapping[str, np.ndarray], own: tuple[str, ...]) -> None:
    """Raises ValueError unless the tensors of an autoencoder exist and have consistent shapes.

    Args:
        path: the file, for messages.
        tensors: the tensors of the file.
        own: the names of the additional tensors of the architecture, each of shape [features].
    """
    names = ("W_enc", "W_dec", "b_dec", *own)
    for name in names:
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name} is missing")
    dim, features = tensors["W_enc"].shape if tensors["W_enc"].ndim == 2 else (0, 0)
    shapes = {"W_enc": (dim, features), "W_dec": (features, dim), "b_dec": (dim,)}
    for name in names:
        shape = shapes.get(name, (features,))
        if tensors[name].shape != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {tensors[name].shape}; it must be {shape}"
            )


def splice(
    autoencoders: Mapping[int, SparseAutoencoder],
    point: str | None = None,
    change: Callable[[Float[Array, "*batch features"]], Float[Array, "*batch features"]]
    | None = None,
) -> dict[str, Edit]:
    """Returns a patch that passes the values of several layers through their autoencoders.

    >>> patch = splice({sae.layer: sae for sae in (first, second)})
    >>> inspect(model, variables, tokens, patch=patch)

    Args:
        autoencoders: {layer: autoencoder}, all with the same sizes.
        point: the name of the hook point; defaults to the hook point of the autoencoders.
        change: a function of the features f. If given, a value x becomes x + decode(change(f)) −
            decode(f), so the part of x that the autoencoder does not reconstruct is kept. If None,
            x becomes its reconstruction.

    Raises:
        ValueError: There is no autoencoder, the autoencoders have different sizes, or `point` is
            None and the autoencoders do not have the same hook point.
    """
    if not autoencoders:
        raise ValueError("autoencoders is empty; it must map layers to autoencoders")
    sizes = {layer: (*x.encoder.shape, x.k) for layer, x in autoencoders.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "the autoencoders have different sizes (dim, features, k): "
            + ", ".join(f"{size} in layer {layer}" for layer, size in sizes.items())
        )
    points = list(dict.fromkeys(x.point for x in autoencoders.values()))
    name = points[0] if point is None else point
    if name is None or (point is None and len(points) > 1):
        raise ValueError(
            f"the hook points of the autoencoders are {', '.join(map(str, points))}; they must be "
            'known and equal, or pass point, such as point="block.output"'
        )
    layers = tuple(autoencoders)
    alike = [replace(x, layer=None, point=None) for x in autoencoders.values()]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *alike)
    numbers = jnp.asarray(layers, jnp.int32)
    return {name: Edit(_Spliced(change), numbers, stacked, layers=layers)}


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
