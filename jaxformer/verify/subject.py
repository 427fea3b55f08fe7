"""What a certificate is about: a model, its weights, and the texts on which it is tried."""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decoding.protocol import require_autoregressive
from jaxformer.models.config import EncoderConfig
from jaxformer.models.config.encoder_decoder import ReadsSource
from jaxformer.verify import rules
from jaxformer.verify.dependency import Dependency, dependency_matrix, is_whole
from jaxformer.verify.layers import trace


@dataclass(frozen=True)
class Subject:
    """What is certified, and the texts on which it is.

    model: in float32, whatever the dtype of the model that was given.
    """

    model: object
    variables: dict
    length: int
    seed: int = 0
    dtype: str = "float32"

    @property
    def config(self):
        return self.model.config

    @property
    def is_autoregressive(self) -> bool:
        return not isinstance(self.config, EncoderConfig)

    @property
    def minimum_prefill(self) -> int:
        """The fewest tokens of a text that can be read at once at its start; none is predicted."""
        return self.model.minimum_prefill

    @cached_property
    def source(self):
        """Ids of the one source that every text is of [1, length]; None: the model reads none."""
        if not isinstance(self.config, ReadsSource):
            return None
        length = max(1, min(self.length, self.config.max_source_length) - 3)
        rng = np.random.default_rng((self.seed, 2))
        return rng.integers(0, self.config.source_vocab_size, (1, length)).astype(np.int32)

    def read(self, rows: int = 1) -> dict:
        """What `apply` takes for so many rows of that source."""
        return {} if self.source is None else {"source": np.repeat(self.source, rows, axis=0)}

    @cached_property
    def padded_read(self) -> dict:
        """The same source, some padding before, inside and after it, for one row."""
        if self.source is None:
            return {}
        room = self.config.max_source_length - self.source.shape[1]
        length = self.source.shape[1] + min(3, room)
        places = np.sort(np.random.default_rng(self.seed).permutation(length)[: self.source.size])
        source, segments = np.zeros((2, 1, length), np.int32)
        source[0, places], segments[0, places] = self.source[0], 1
        return {"source": source, "source_segments": segments}

    @cached_property
    def compiled(self):
        """tokens → logits."""
        run = jax.jit(self.model.apply)
        return lambda tokens: run(self.variables, tokens, **self.read(len(tokens)))

    @cached_property
    def dependency(self) -> Dependency:
        """What the hidden states depend on, for a row of packed documents and padding."""
        x, others = self.inputs
        segments = jnp.asarray(self.segments)

        def hidden(x):
            read = self.read(len(x))
            return self.model.apply(self.variables, x, segments, **read, method="hidden_states")

        return dependency_matrix(hidden, x, others=others)

    @property
    def inputs(self):
        """(embeddings of one row, others to put in their places)."""
        return tuple(self.embeddings(1, self.length, stream=i) for i in (0, 1))

    @property
    def rule(self):
        return rules.of(self.config, self.segments, mask=rules.mask_of(self.model))

    @property
    def segments(self):
        """One row: two documents, the second with padding before, inside and after it."""
        first, segments = self.length // 2, np.full((1, self.length), 2)
        segments[0, :first] = 1
        segments[0, [first, first + 3, self.length - 1]] = 0
        return segments

    def tokens(self, *shape, stream: int = 0):
        """Ids drawn uniformly."""
        rng = np.random.default_rng((self.seed, stream))
        return rng.integers(0, self.config.vocab_size, shape).astype(np.int32)

    def embeddings(self, *shape, stream: int = 0):
        """Rows that could be of the embedding table, in size."""
        table = np.asarray(self.variables["params"]["embedding"]["tokens"], np.float32)
        rng = np.random.default_rng((self.seed, stream))
        return np.float32(table.std() * rng.normal(size=(*shape, table.shape[1])))

    def passed(self, tokens, segments=None, read=None):
        read = self.read(len(tokens)) if read is None else read
        return trace(self.model, self.variables, tokens, segments, **read)


def subject_of(model, variables, *, length: int | None = None, seed: int = 0) -> Subject:
    """length: tokens of the rows on which the properties are tried, more than the model's prefix;
    None: the model's, and no more of them than 128 or than a prefix needs. ValueError: a model
    that cannot be certified, and why.

    The properties are exact, and the rounding of bfloat16 (2⁻⁸) would hide a bug of its size: a
    model is certified as the same model, of the same parameters, in float32.
    """
    if not isinstance(model.config, EncoderConfig):
        require_autoregressive(model)
    if "params" not in variables:
        raise ValueError(f"variables hold {', '.join(variables)}; they must hold 'params'")
    least, longest = max(12, model.minimum_prefill + 1), model.config.max_length
    if longest < least:
        raise ValueError(f"max_length is {longest}; to be certified it must be at least {least}")
    length = min(longest, max(least, 128)) if length is None else length
    if not (is_whole(length) and least <= length <= longest):
        raise ValueError(
            f"length is {length!r}; it must be in {least} … {longest}, the model's max_length"
        )
    if not (is_whole(seed) and seed >= 0):
        raise ValueError(f"seed is {seed!r}; it must be a whole number of at least 0")
    # A copy, for a model of somebody's own class must stay one.
    twin = model.copy(config=replace(model.config, dtype="float32"))
    return Subject(twin, {"params": variables["params"]}, length, seed, model.config.dtype)
