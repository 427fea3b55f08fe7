"""Model, weights and random test inputs of a certificate.

The values at the model's named hook points show the layer at which two forward passes differ.
`model.hook_points` lists the hook points in the order of computation. The second to last axis of
every value is the token axis.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxformer.functional.hooks import Patch
from jaxformer.functional.layers.layer import layer_hook_points
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import check_variables
from jaxformer.models.config.check import whole_number
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.verify import rules
from jaxformer.verify.comparison import Comparison, compare
from jaxformer.verify.dependency import Dependency, dependency_matrix
from jaxformer.verify.taint import NO_RULE

# The accepted rounding error of each dtype, relative to max(1, the largest value).
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05}

Tokens = Int[np.ndarray, "batch length"]
Embeddings = Float[np.ndarray, "batch length dim"]
Source = Int[np.ndarray, "1 source"] | Float[np.ndarray, "1 source features"]
# Each result is (whether the property holds, the measurements as text, the first layer at which the
# property fails). If the layer is unknown, the last entry is None or absent.
Result = tuple[bool, str] | tuple[bool, str, str | None]
OneSequence = Float[Array, "1 length dim"]
Hidden = Float[Array, "batch length dim"]


class Value(NamedTuple):
    """The value at a named hook point of a model.

    Attributes:
        point: The name of the hook point.
        layer: The number of the layer; None for hook points outside the blocks.
        value: float32 [batch, …, length, features].
    """

    point: str
    layer: int | None
    value: np.ndarray

    def __str__(self) -> str:
        """Returns a text such as "layer 0, block.output"."""
        return self.point if self.layer is None else f"layer {self.layer}, {self.point}"


@dataclass(frozen=True)
class CertifiedModel:
    """A model to certify, with random inputs for the checks.

    Attributes:
        model: The model, which computes in the dtype of the certificate.
        variables: The model's parameters.
        length: Tokens per sequence.
        seed: Seed of the random inputs.
        dtype: The dtype in the original config of the model.
        batch_size: Batch size of the forward passes. If None, each property has its own batch size
            from 1 to 32.
    """

    model: LanguageModel
    variables: Variables
    length: int
    seed: int = 0
    dtype: str = "float32"
    batch_size: int | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config

    @property
    def tolerance(self) -> float:
        """The accepted rounding error, relative to max(1, the largest value)."""
        return TOLERANCES[self.config.dtype]

    def batch_size_or(self, default: int) -> int:
        """Returns `batch_size`, or `default` if `batch_size` is None."""
        return self.batch_size or default

    @property
    def minimum_prefill(self) -> int:
        """The minimum number of tokens in the first chunk of a text."""
        return self.model.minimum_prefill

    @cached_property
    def source(self) -> Source | None:
        """The source that every sequence reads: ids or features; None without cross-attention."""
        if not self.config.reads_source:
            return None
        length = max(1, min(self.length, self.model.config.longest_source) - 3)
        if self.config.source_features is not None:
            return self.source_vectors(length)
        rng = np.random.default_rng((self.seed, 2))
        return rng.integers(0, self.model.config.num_source_ids, (1, length)).astype(np.int32)

    def source_arguments(self, batch_size: int = 1) -> dict[str, np.ndarray]:
        """Returns the source arguments of `apply` for a batch of `batch_size`."""
        return {} if self.source is None else {"source": np.repeat(self.source, batch_size, axis=0)}

    @cached_property
    def padded_source_arguments(self) -> dict[str, np.ndarray]:
        """Source arguments for one sequence, with padding before, inside and after the source."""
        if self.source is None:
            return {}
        number = self.source.shape[1]
        length = min(number + 3, self.model.config.longest_source)
        places = np.sort(np.random.default_rng(self.seed).permutation(length)[:number])
        source = np.zeros((1, length, *self.source.shape[2:]), self.source.dtype)
        segment_ids = np.zeros((1, length), np.int32)
        source[0, places], segment_ids[0, places] = self.source[0], 1
        return {"source": source, "source_segment_ids": segment_ids}

    @cached_property
    def compiled(self) -> Callable[[Tokens], Float[Array, "batch length vocab"]]:
        """The compiled function that computes logits from tokens."""
        run = jax.jit(self.model.apply)
        return lambda tokens: run(self.variables, tokens, **self.source_arguments(len(tokens)))

    @cached_property
    def dependency(self) -> Dependency:
        """The dependency of the hidden states on the embeddings of the last batch element.

        Each batch element consists of two documents and padding (`segment_ids`).
        """
        x, others = self.inputs
        segment_ids = jnp.asarray(self.segment_ids)

        def hidden(variables: Variables, x: OneSequence) -> Hidden:
            x = self.in_batch(x)
            read = self.source_arguments(len(x))
            return self.model.apply(variables, x, segment_ids, **read, method="hidden_states")

        options = {"weights": self.variables, "others": others, "seed": self.seed}
        if self.batch_size_or(1) > 1:
            options["sample"] = self.length
        matrix = dependency_matrix(hidden, x, **options)
        if not any(remark.startswith(NO_RULE) for remark in matrix.remarks):
            return matrix
        without = dependency_matrix(hidden, x, witnesses=("derivative", "change"), **options)
        return replace(
            without, remarks=(*matrix.remarks, "the check was repeated without taint analysis")
        )

    @property
    def witnesses(self) -> tuple[str, ...]:
        """Methods for the dependency matrices of single layers; "derivative" would be too slow."""
        return tuple(name for name in ("taint", "change") if name in self.dependency.witnesses)

    @property
    def inputs(self) -> tuple[Embeddings, Embeddings]:
        """Embeddings of one sequence, and their replacements: two arrays [1, length, embed_dim]."""
        return self.embeddings(1, self.length), self.embeddings(1, self.length, stream=1)

    def in_batch(self, x: OneSequence) -> Hidden:
        """Returns a batch whose last element is x [1, length, embed_dim]."""
        if self.batch_size_or(1) == 1:
            return x
        others = self.embeddings(self.batch_size_or(1) - 1, self.length, stream=4)
        return jnp.concatenate([others.astype(x.dtype), x])

    @cached_property
    def rule(self) -> Bool[np.ndarray, "batch length 1 length"]:
        """The rule that `dependency` must equal: bool [batch, length, 1, length].

        Only outputs of the last batch element depend on the inputs of the last batch element.
        """
        table = np.zeros((self.batch_size_or(1), self.length, 1, self.length), bool)
        mask, layers = self.model.mask, self.model.layers
        table[-1:] = rules.model_rule(self.config, self.segment_ids[-1:], mask=mask, layers=layers)
        return table

    @property
    def segment_ids(self) -> Int[np.ndarray, "batch length"]:
        """Segment ids of two documents per sequence; padding is around and inside document 2."""
        first, segment_ids = self.length // 2, np.full((self.batch_size_or(1), self.length), 2)
        segment_ids[:, :first] = 1
        segment_ids[:, [first, first + 3, self.length - 1]] = 0
        return segment_ids

    def tokens(self, *shape: int, stream: int = 0) -> Tokens:
        """Draws uniformly random token ids."""
        rng = np.random.default_rng((self.seed, stream))
        return rng.integers(0, self.config.vocab_size, shape).astype(np.int32)

    def embeddings(self, *shape: int, stream: int = 0) -> Embeddings:
        """Draws embeddings with the standard deviation of the embedding table."""
        table = np.asarray(self.variables["params"]["embedding"]["tokens"], np.float32)
        rng = np.random.default_rng((self.seed, stream))
        return (table.std() * rng.normal(size=(*shape, table.shape[1]))).astype(np.float32)

    def source_vectors(self, length: int) -> Embeddings:
        """Draws a source of floats: features, or embeddings if the model reads source tokens."""
        if self.config.source_features is None:
            return self.embeddings(1, length, stream=3)
        size = 1, length, self.config.source_features
        return np.random.default_rng((self.seed, 3)).normal(size=size).astype(np.float32)

    def hook_point_values(
        self,
        tokens: Tokens,
        segment_ids: Tokens | None = None,
        read: dict[str, np.ndarray] | None = None,
    ) -> list[Value]:
        """Returns the values at the model's hook points, in order, and then the logits.

        Attention scores and weights are omitted, because capturing them changes the computation.
        For an encoder-decoder, the encoder's hook points are omitted, because their values belong
        to source tokens.

        Args:
            tokens: int [batch, length].
            segment_ids: Segment ids of the tokens, 0 for padding; one document if None.
            read: The source arguments of the model. If None, the model reads its source without
                padding.
        """
        model, read = self.model, self.source_arguments(len(tokens)) if read is None else read
        over_keys = (".scores", ".weights")
        points = [
            x
            for x in model.hook_points
            if not x.startswith("encoder.") and not x.endswith(over_keys)
        ]
        hooks = {"capture": tuple(points), "method": "inspect"}
        logits, captured = model.apply(self.variables, tokens, segment_ids, **read, **hooks)
        inner = [point for point in points if point in model.layer_hook_points]
        first = points.index(inner[0])
        outer = [Value(x, None, captured[x]) for x in points if x not in inner]
        blocks = [Value(x, i, captured[x][place]) for x, i, place in _block_points(model, inner)]
        values = [*outer[:first], *blocks, *outer[first:], Value("logits", None, logits)]
        return [value._replace(value=np.asarray(value.value, np.float32)) for value in values]

    def block(self, layer: int) -> Callable[[Variables, OneSequence], Hidden]:
        """Returns one block of the model as a function of (variables, embeddings).

        The embeddings, [1, length, dim], become the last batch element of this layer's
        "block.input". The function returns this layer's "block.output".
        """
        segment_ids, read = (
            jnp.asarray(self.segment_ids),
            self.source_arguments(len(self.segment_ids)),
        )
        tokens = jnp.zeros(segment_ids.shape, jnp.int32)
        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        where = (layers == layer)[:, None, None, None]

        def run(variables: Variables, x: OneSequence) -> Hidden:
            patch = {"block.input": Patch(where, self.in_batch(x)[None])}
            hooks = {"capture": ("block.output",), "patch": patch, "method": "inspect"}
            _, captured = self.model.apply(variables, tokens, segment_ids, **read, **hooks)
            return captured["block.output"][layer]

        return run


def certified_model(
    model: LanguageModel,
    variables: Variables,
    *,
    length: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    dtype: str = "float32",
) -> CertifiedModel:
    """Checks the arguments of a certificate and builds the `CertifiedModel`.

    Args:
        model: A language model, which must be autoregressive unless it is an encoder.
        variables: The model's parameters.
        length: Tokens per sequence, more than the model's prefix and at most max_length. If None,
            the allowed length nearest to 128 is used.
        seed: Seed of the random inputs.
        batch_size: Batch size of the forward passes. If None, each property has its own batch size
            from 1 to 32.
        dtype: The dtype in which the model computes; it replaces the config's dtype. float32 is
            exact enough to show bugs that the rounding of bfloat16 (2⁻⁸) hides. bfloat16 shows bugs
            in code that only runs in bfloat16, such as fused attention on a GPU.

    Raises:
        ValueError: The model cannot be certified, or an argument is invalid.
    """
    if not model.config.bidirectional:
        require_autoregressive(model)
    check_variables(variables)
    if any(x.dtype == np.int8 for x in jax.tree.leaves(variables["params"])):
        raise ValueError(
            "variables have integer kernels. The rounding of their products changes with the batch "
            "size, which would look like a dependency between batch elements. Certify the model "
            "before quantization"
        )
    least, longest = max(12, model.minimum_prefill + 1), model.config.max_length
    if longest < least:
        raise ValueError(f"max_length is {longest}, but a certificate needs at least {least}")
    default = min(longest, max(least, 128))
    length = default if length is None else whole_number("length", length, 1)
    if not least <= length <= longest:
        raise ValueError(
            f"length is {length}; it must be between {least} and {longest} (the model's max_length)"
        )
    seed = whole_number("seed", seed, 0)
    batch_size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(TOLERANCES)}")
    # `copy` keeps the model's class, which may be a user's subclass.
    twin = model.copy(config=replace(model.config, dtype=dtype))
    params = {"params": variables["params"]}
    return CertifiedModel(twin, params, length, seed, model.config.dtype, batch_size)


def _block_points(model: LanguageModel, names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yields (hook point, layer, index) layer by layer.

    A hook point's array contains only the layers that have the hook point, and `index` is the
    layer's index in this array.
    """
    places = dict.fromkeys(names, 0)
    for number, layer in enumerate(model.architecture.stack.layers):
        there = layer_hook_points(layer)
        for name in (x for x in names if x in there):
            yield name, number, places[name]
            places[name] += 1


def first_failing_layer(subject: CertifiedModel) -> tuple[int, Comparison] | None:
    """Finds the first block whose dependencies differ from the rule of its layer.

    Returns:
        (layer, Comparison); None if the dependencies of all blocks equal their rules, or if the
        model does not have the hook point "block.input".
    """
    model, config, ids = subject.model, subject.config, subject.segment_ids[-1]
    if "block.input" not in model.hook_points:
        return None
    x, others = subject.inputs
    options = {"weights": subject.variables, "witnesses": subject.witnesses, "others": others}
    for layer, table in enumerate(rules.with_residuals(config, ids, model.mask, model.layers)):
        dependency = dependency_matrix(subject.block(layer), x, **options)
        rule = np.zeros(dependency.matrix.shape, bool)
        rule[-1, :, 0] = table
        compared = compare(dependency, rule)
        if not compared.holds:
            return layer, compared
    return None


def distance(x: ArrayLike, y: ArrayLike) -> float:
    """Returns max |x − y| / max(1, max |y|), or ∞ if an element is NaN."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    off = np.abs(x - y).max() / max(1.0, np.nan_to_num(np.abs(y)).max())
    return float(np.nan_to_num(off, nan=np.inf))
