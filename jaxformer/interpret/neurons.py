"""Attribution of one logit to the hidden units of the feed-forward layers.

The output of a feed-forward layer is the sum of a_u w_u over its hidden units u, plus a bias. Here
a_u is the value of the unit at the hook point "feedforward.hidden", and w_u is row u of W₂. The
contribution of the unit to a logit is a_u (w_u · g). The vector g is the derivative of the logit
with respect to the output of the layer, along the residual stream and with fixed scales of the
norms, as in `attribute`. The contributions of all units and of the bias therefore add up to the
feed-forward contribution that `attribute` computes.

Reference:
    Geva et al. 2022, "Transformer Feed-Forward Layers Build Predictions by Promoting Concepts in
    the Vocabulary Space"; Elhage et al. 2021.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.linear.kernels import dense
from jaxformer.functional.trees import Weights
from jaxformer.interpret.attribution import cannot_attribute, logit_slopes
from jaxformer.interpret.layers import transformer_config
from jaxformer.interpret.summary import summary
from jaxformer.interpret.texts import Read, read_logits
from jaxformer.models.check import Sources
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables

HIDDEN = "feedforward.hidden"


class TopUnits(NamedTuple):
    """The units with the largest absolute contributions, in descending order.

    Attributes:
        layer: the layer of each unit.
        unit: the index of each unit in its layer.
        contribution: the contribution of each unit.
    """

    layer: Int[Array, "batch k"]
    unit: Int[Array, "batch k"]
    contribution: Float[Array, "batch k"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


class NeuronAttribution(NamedTuple):
    """Contributions of hidden units to the logit of one token, for each batch element.

    Attributes:
        units: the contribution of each unit.
        bias: the contribution of the bias of each layer's second projection.
        activations: the value of each unit at the position.
    """

    units: Float[Array, "batch layers width"]
    bias: Float[Array, "batch layers"]
    activations: Float[Array, "batch layers width"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)

    @property
    def total(self) -> Float[Array, "batch layers"]:
        """The contribution of each layer, equal to `attribute(…).feedforward` up to rounding."""
        return self.units.sum(axis=-1) + self.bias

    def top(self, k: int) -> TopUnits:
        """Returns the k units of all layers with the largest absolute contributions.

        Raises:
            ValueError: `k` is below 1 or exceeds the number of units of all layers.
        """
        batch, layers, width = self.units.shape
        if whole_number("k", k, 1) > layers * width:
            raise ValueError(
                f"k is {k}; it must be at most {layers * width}, the number of units of all layers"
            )
        flat = self.units.reshape(batch, -1)
        _, index = jax.lax.top_k(jnp.abs(flat), k)
        return TopUnits(index // width, index % width, jnp.take_along_axis(flat, index, axis=1))


def attribute_neurons(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    target: Int[Array, " batch"],
    position: int = -1,
    source: Sources | None = None,
) -> NeuronAttribution:
    """Splits the feed-forward contributions to one logit into the contributions of hidden units.

    The contribution of a unit counts only the direct path through the residual stream; see
    `attribute`.

    Args:
        model: a model that `attribute` supports, with feed-forward layers without experts.
        variables: the model's variables.
        tokens: ids of complete sequences.
        target: for each batch element, the token whose logit is split.
        position: the position that predicts the target; negative positions count from the end.
        source: the source sequences, for models with a source.

    Raises:
        ValueError: An argument is invalid, or the output of a feed-forward layer is not a sum over
            hidden units.
    """
    if (reason := cannot_attribute(model)) is not None:
        raise ValueError(reason)
    if HIDDEN not in model.hook_points:
        raise ValueError(
            f"the model does not have the hook point {HIDDEN!r}, because its feed-forward layers "
            "have experts; neuron attribution requires layers without experts"
        )
    if transformer_config(model).output_activation:
        raise ValueError(
            "output_activation is True; neuron attribution requires False, because the output of a "
            "layer with an activation after the second projection is not a sum over hidden units"
        )
    read = read_logits(model, variables, tokens, target, position, source)
    return _attribute_neurons(model, variables["params"], read)


@partial(jax.jit, static_argnums=0)
def _attribute_neurons(model: LanguageModel, weights: Weights, read: Read) -> NeuronAttribution:
    found = logit_slopes(model, weights, read, (HIDDEN,))
    slopes = found.slopes["feedforward"]
    hidden = found.passed.captured[HIDDEN][:, :, read.position].astype(jnp.float32)
    down = weights["blocks"]["feedforward"]["down"]
    unit_slopes = jnp.einsum("lud,lbd->blu", dense(down["kernel"]), slopes)
    activations = hidden.swapaxes(0, 1)
    bias = jnp.zeros(activations.shape[:2], jnp.float32)
    if "bias" in down:
        bias = jnp.einsum("ld,lbd->bl", down["bias"], slopes)
    return NeuronAttribution(activations * unit_slopes, bias, activations)
