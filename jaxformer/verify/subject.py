"""The subject of a certificate: a model, its weights, and the texts on which it is tried.

The values at the model's named points show the layer at which two passes differ. `model.points`
lists the names in the order of computation. In every value, the second to last axis is that of the
tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxformer.functional.layers.layer import layer_points
from jaxformer.functional.taps import Patch
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import check_variables
from jaxformer.models.config.check import whole_number
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.verify import rules
from jaxformer.verify.comparison import Comparison, compare
from jaxformer.verify.dependency import Dependency, dependency_matrix
from jaxformer.verify.taint import NO_RULE

# Accepted difference of equal values, relative to max(1, the largest value).
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05}

Tokens = Int[np.ndarray, "batch length"]
Embeddings = Float[np.ndarray, "batch length dim"]
# Whether a property holds, the measured figures and, if it fails, the first layer if known.
Result = tuple[bool, str] | tuple[bool, str, str | None]
Row = Float[Array, "1 length dim"]
Hidden = Float[Array, "batch length dim"]


class Value(NamedTuple):
    """The value at a named point of a model.

    Attributes:
        point: The name of the point.
        layer: The layer; None: the point is outside the blocks.
        value: float32 [batch, …, length, features].
    """

    point: str
    layer: int | None
    value: np.ndarray

    def __str__(self) -> str:
        """Returns a text such as "layer 0, block.output"."""
        return self.point if self.layer is None else f"layer {self.layer}, {self.point}"


@dataclass(frozen=True)
class Subject:
    """A model to certify, and the random texts for the checks.

    Attributes:
        model: The model, with the dtype of the certificate.
        variables: Its parameters.
        length: Tokens per row.
        seed: Seed of the texts.
        dtype: The dtype of the model's own config.
        batch_size: Batch elements of every pass; None: 1 to 32, depending on the property.
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
        """Accepted difference of equal values, relative to max(1, the largest value)."""
        return TOLERANCES[self.config.dtype]

    def rows(self, default: int) -> int:
        """Returns the batch size of the certificate; `default` if it has none."""
        return self.batch_size or default

    @property
    def minimum_prefill(self) -> int:
        """The minimum number of tokens in the first chunk of a text."""
        return self.model.minimum_prefill

    @cached_property
    def source(self) -> Int[np.ndarray, "1 source"] | None:
        """Ids of the source of all texts [1, length]; None: the model reads no source."""
        if not self.config.reads_source:
            return None
        length = max(1, min(self.length, self.model.config.longest_source) - 3)
        rng = np.random.default_rng((self.seed, 2))
        return rng.integers(0, self.model.config.num_source_ids, (1, length)).astype(np.int32)

    def read(self, rows: int = 1) -> dict[str, np.ndarray]:
        """Returns the arguments of `apply` for `rows` batch elements with that source."""
        return {} if self.source is None else {"source": np.repeat(self.source, rows, axis=0)}

    @cached_property
    def padded_read(self) -> dict[str, np.ndarray]:
        """The same source for one row, with padding before, inside and after it."""
        if self.source is None:
            return {}
        length = min(self.source.size + 3, self.model.config.longest_source)
        places = np.sort(np.random.default_rng(self.seed).permutation(length)[: self.source.size])
        source, segments = np.zeros((2, 1, length), np.int32)
        source[0, places], segments[0, places] = self.source[0], 1
        return {"source": source, "source_segments": segments}

    @cached_property
    def compiled(self) -> Callable[[Tokens], Float[Array, "batch length vocab"]]:
        """A compiled function from tokens to logits."""
        run = jax.jit(self.model.apply)
        return lambda tokens: run(self.variables, tokens, **self.read(len(tokens)))

    @cached_property
    def dependency(self) -> Dependency:
        """Dependency of the hidden states on the embeddings of the last batch element.

        Its row holds two documents and padding (`segments`).
        """
        x, others = self.inputs
        segments = jnp.asarray(self.segments)

        def hidden(variables: Variables, x: Row) -> Hidden:
            x = self.in_batch(x)
            read = self.read(len(x))
            return self.model.apply(variables, x, segments, **read, method="hidden_states")

        options = {"weights": self.variables, "others": others, "seed": self.seed}
        if self.rows(1) > 1:
            options["sample"] = self.length
        matrix = dependency_matrix(hidden, x, **options)
        if not any(remark.startswith(NO_RULE) for remark in matrix.remarks):
            return matrix
        without = dependency_matrix(hidden, x, witnesses=("derivative", "change"), **options)
        return replace(without, remarks=(*matrix.remarks, "taint was left out for that"))

    @property
    def witnesses(self) -> tuple[str, ...]:
        """The witnesses to use for further matrices, without the derivative, the slowest one."""
        return tuple(name for name in ("taint", "change") if name in self.dependency.witnesses)

    @property
    def inputs(self) -> tuple[Embeddings, Embeddings]:
        """Embeddings of one row, and their replacements: two arrays [1, length, embed_dim]."""
        return self.embeddings(1, self.length), self.embeddings(1, self.length, stream=1)

    def in_batch(self, x: Row) -> Hidden:
        """Returns a batch whose last element is x [1, length, embed_dim]."""
        if self.rows(1) == 1:
            return x
        others = self.embeddings(self.rows(1) - 1, self.length, stream=4)
        return jnp.concatenate([others.astype(x.dtype), x])

    @cached_property
    def rule(self) -> Bool[np.ndarray, "batch length 1 length"]:
        """Rule for `dependency`: bool [batch, length, 1, length], for the last batch element."""
        table = np.zeros((self.rows(1), self.length, 1, self.length), bool)
        mask, layers = self.model.mask, self.model.layers
        table[-1:] = rules.of(self.config, self.segments[-1:], mask=mask, layers=layers)
        return table

    @property
    def segments(self) -> Int[np.ndarray, "batch length"]:
        """Two documents in each row, the second with padding before, inside and after it."""
        first, segments = self.length // 2, np.full((self.rows(1), self.length), 2)
        segments[:, :first] = 1
        segments[:, [first, first + 3, self.length - 1]] = 0
        return segments

    def tokens(self, *shape: int, stream: int = 0) -> Tokens:
        """Draws ids uniformly."""
        rng = np.random.default_rng((self.seed, stream))
        return rng.integers(0, self.config.vocab_size, shape).astype(np.int32)

    def embeddings(self, *shape: int, stream: int = 0) -> Embeddings:
        """Draws embeddings with the standard deviation of the embedding table."""
        table = np.asarray(self.variables["params"]["embedding"]["tokens"], np.float32)
        rng = np.random.default_rng((self.seed, stream))
        return (table.std() * rng.normal(size=(*shape, table.shape[1]))).astype(np.float32)

    def passed(
        self,
        tokens: Tokens,
        segments: Tokens | None = None,
        read: dict[str, np.ndarray] | None = None,
    ) -> list[Value]:
        """Returns the values at the model's points, in order, and the logits at the end.

        It omits attention weights, because capturing them changes the computation. It also omits
        the points of an encoder–decoder's encoder, whose tokens are those of the source.

        Args:
            tokens: int [batch, length].
            segments: The documents of the tokens, 0 for padding; None: one document.
            read: Further arguments of the model; None: the source without padding.
        """
        model, read = self.model, self.read(len(tokens)) if read is None else read
        points = [x for x in model.points if not x.startswith("encoder.") and ".weights" not in x]
        hooks = {"capture": tuple(points), "method": "inspect"}
        logits, captured = model.apply(self.variables, tokens, segments, **read, **hooks)
        inner = [point for point in points if point in model.layer_points]
        first = points.index(inner[0])
        outer = [Value(x, None, captured[x]) for x in points if x not in inner]
        blocks = [Value(x, i, captured[x][place]) for x, i, place in _block_points(model, inner)]
        values = [*outer[:first], *blocks, *outer[first:], Value("logits", None, logits)]
        return [value._replace(value=np.asarray(value.value, np.float32)) for value in values]

    def block(self, layer: int) -> Callable[[Variables, Row], Hidden]:
        """Returns a block as a function of (variables, embeddings).

        The embeddings [1, length, dim] are those of the last batch element. They replace
        "block.input" at the block's layer, and the function returns "block.output".
        """
        segments, read = jnp.asarray(self.segments), self.read(len(self.segments))
        tokens = jnp.zeros(segments.shape, jnp.int32)
        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        where = (layers == layer)[:, None, None, None]

        def run(variables: Variables, x: Row) -> Hidden:
            patch = {"block.input": Patch(where, self.in_batch(x)[None])}
            hooks = {"capture": ("block.output",), "patch": patch, "method": "inspect"}
            _, captured = self.model.apply(variables, tokens, segments, **read, **hooks)
            return captured["block.output"][layer]

        return run


def subject_of(
    model: LanguageModel,
    variables: Variables,
    *,
    length: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    dtype: str = "float32",
) -> Subject:
    """Checks the arguments of a certificate and returns its `Subject`.

    Args:
        model: A language model, which must be autoregressive unless it is an encoder.
        variables: Its parameters.
        length: Tokens per row, more than the model's prefix and at most its max_length; None: 128,
            or less if max_length is smaller.
        seed: Seed of the texts.
        batch_size: Batch elements of every pass; None: 1 to 32, depending on the property.
        dtype: The dtype in which the model computes, instead of that of its config. float32 is
            exact enough to show bugs that the rounding of bfloat16 (2⁻⁸) hides. bfloat16 shows bugs
            in code that only runs in bfloat16, such as fused attention on a GPU.

    Raises:
        ValueError: The model cannot be certified, or an argument is not as described.
    """
    if not model.config.bidirectional:
        require_autoregressive(model)
    check_variables(variables)
    if any(x.dtype == np.int8 for x in jax.tree.leaves(variables["params"])):
        raise ValueError(
            "variables have integer kernels; their products are rounded differently in passes of "
            "other sizes, which looks like a dependency. Certify the model without quantization"
        )
    least, longest = max(12, model.minimum_prefill + 1), model.config.max_length
    if longest < least:
        raise ValueError(f"max_length is {longest}; a certificate needs at least {least}")
    default = min(longest, max(least, 128))
    length = default if length is None else whole_number("length", length, 1)
    if not least <= length <= longest:
        raise ValueError(
            f"length is {length}; it must be in {least} … {longest}, the model's max_length"
        )
    seed = whole_number("seed", seed, 0)
    batch_size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(TOLERANCES)}")
    # `copy` keeps the class of the model, which may be the user's own.
    twin = model.copy(config=replace(model.config, dtype=dtype))
    params = {"params": variables["params"]}
    return Subject(twin, params, length, seed, model.config.dtype, batch_size)


def _block_points(model: LanguageModel, names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yields (point, layer, place of the layer among those that have the point), by layer."""
    places = dict.fromkeys(names, 0)
    for number, layer in enumerate(model.architecture.stack.layers):
        there = layer_points(layer)
        for name in (x for x in names if x in there):
            yield name, number, places[name]
            places[name] += 1


def first_broken(subject: Subject) -> tuple[int, Comparison] | None:
    """Finds the first block whose dependencies differ from the rule of its layer.

    Returns:
        (layer, Comparison); None if all blocks obey their rules, or if the model has no point
        "block.input".
    """
    model, config, ids = subject.model, subject.config, subject.segments[-1]
    if "block.input" not in model.points:
        return None
    x, others = subject.inputs
    options = {"weights": subject.variables, "witnesses": subject.witnesses, "others": others}
    for layer, table in enumerate(rules.of_layers(config, ids, model.mask, model.layers)):
        dependency = dependency_matrix(subject.block(layer), x, **options)
        rule = np.zeros(dependency.matrix.shape, bool)
        rule[-1, :, 0] = rules.composed([table], len(ids), config.residual)
        compared = compare(dependency, rule)
        if not compared.holds:
            return layer, compared
    return None


def distance(x: ArrayLike, y: ArrayLike) -> float:
    """Returns the largest difference relative to max(1, the largest |y|); ∞ if one is NaN."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    off = np.abs(x - y).max() / max(1.0, np.nan_to_num(np.abs(y)).max())
    return float(np.nan_to_num(off, nan=np.inf))
