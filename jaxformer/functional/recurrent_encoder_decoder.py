"""A recurrent encoder–decoder as pure functions of its weights.

    source → recurrent layers → e_1 … e_S, and their last states, which start the decoder
    α_t = softmax_j(h_t · K e_j)      a_t = Σ_j α_tj V e_j      hidden_t = tanh(W [a_t; h_t] + b)

h_t is the decoder's state (Bahdanau et al. 2015; in this form, Luong et al. 2015). Without
attention hidden_t is h_t, and the last states, which have a fixed size, must represent the whole
source.

Reference:
    Notes, lecture 10 §1–2.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer.functional import recurrent
from jaxformer.functional.architecture import CacheSize, Initializers
from jaxformer.functional.attention.attend import Context, KeysValues, attend
from jaxformer.functional.attention.contexts import Pass
from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.source_cache import SourceCache
from jaxformer.functional.embedding import init_embedding, pack_kernels
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.positions import DocumentCursor, continued_segments, document_positions
from jaxformer.functional.recurrent import RecurrentCache, init_layers
from jaxformer.functional.taps import NO_TAP, Tap
from jaxformer.functional.trees import Weights, split_key

PREFIX = "encoder."  # of the names of the encoder's points
CROSS_POINTS = (
    "cross_attention.input",
    "cross_attention.query",
    "cross_attention.weights",
    "cross_attention.heads",
    "cross_attention.output",
)
_SCORES = Scores(scale=1.0)  # h · K e is not scaled, as in the lecture


def points(config: Any) -> tuple[str, ...]:
    """Returns the names of the points at which a pass can be captured or patched."""
    names = recurrent.points(config)
    cross = CROSS_POINTS if config.attends else ()
    return (*(PREFIX + name for name in names), *names, *cross)


def layer_points(config: Any) -> tuple[str, ...]:
    """Returns the points that every layer has."""
    names = recurrent.layer_points(config)
    return (*(PREFIX + name for name in names), *names)


def initializers(config: Any) -> dict:
    """Returns {name: initializer}, each a pure function of a key; the decoder's as in `recurrent`.

    Unlike in `recurrent`, the input weights of the first layers are not enlarged: W ~ N(0, 1/dim)
    reads vectors of size 1/√dim. With enlarged weights the model learned the phrases of
    experiments/translate.py less exactly at every learning rate tried.
    """
    parts = {**recurrent.initializers(config), "layers": lambda key: init_layers(key, config)}
    parts["encoder"] = lambda key: init_encoder(key, config)
    if config.attends:
        parts["attention"] = lambda key: init_attention(key, config.hidden_dim)
    return parts


def init_encoder(key: PRNGKeyArray, config: Any) -> Weights:
    """Returns layers like the decoder's and, unless shared, token vectors of the source."""
    table_key, layers_key = jax.random.split(key)
    weights = {"layers": init_layers(layers_key, config)}
    if not config.share_embeddings:
        dim, size = config.embed_dim, config.source_vocab_size
        weights["embedding"] = init_embedding(table_key, size, dim, stddev=dim**-0.5)
    return weights


def init_attention(key: PRNGKeyArray, dim: int) -> Weights:
    """Returns K and V ~ N(0, 1/dim), and "output", the map W of [a; h], ~ N(0, 1/(2 dim))."""
    keys = jax.random.split(key, 3)
    return {
        "key": init_linear(keys[0], dim, dim, use_bias=False, stddev=dim**-0.5),
        "value": init_linear(keys[1], dim, dim, use_bias=False, stddev=dim**-0.5),
        "output": init_linear(keys[2], 2 * dim, dim, stddev=(2 * dim) ** -0.5),
    }


def encode(weights: Weights, source: Inputs, config: Any, run: Run) -> Forward:
    """Encodes a source; the cache of the result has the last states of each layer."""
    tables = weights["encoder"].get("embedding", weights["embedding"])
    encoder_weights = {"embedding": tables, "layers": weights["encoder"]["layers"]}
    encoded = recurrent.read(encoder_weights, source, config, run)
    return encoded._replace(captured={PREFIX + name: x for name, x in encoded.captured.items()})


def cross_keys_values(weights: Weights, encoded: Float[Array, "batch source hidden"]) -> KeysValues:
    """Computes (K e, V e), each with one head, [batch, 1, source, hidden]."""
    return linear(weights["key"], encoded)[:, None], linear(weights["value"], encoded)[:, None]


def cross_attend(
    weights: Weights,
    hidden: Float[Array, "batch length hidden"],
    keys_values: KeysValues,
    context: Context,
    tap: Tap = NO_TAP,
) -> Float[Array, "batch length hidden"]:
    """Computes tanh(W [a; h] + b), where a is the result of attention by h to the source."""
    hidden = tap("cross_attention.input", hidden)
    query = tap("cross_attention.query", hidden[:, None])
    attended = tap("cross_attention.heads", attend(query, *keys_values, context, tap))[:, 0]
    both = jnp.concatenate([attended, hidden], axis=-1)
    return tap("cross_attention.output", jnp.tanh(linear(weights["output"], both)))


def forward(weights: Weights, inputs: Inputs, config: Any, run: Run, cache: Any = None) -> Forward:
    """Computes the last hidden states [batch, length, hidden] of tokens [batch, length].

    Each document of a row starts with the last states of the source.

    Args:
        weights: those of `initializers`.
        inputs: the tokens and, without a cache, their sources.
        config: a RecurrentEncoderDecoderConfig, or a value with its fields.
        run: how the pass runs.
        cache: a cache that has read the sources; None: the tokens are complete sequences.
    """
    encoder_key, decoder_key = split_key(run.dropout_key, 2)
    decoder_run, keys_values, captured = replace(run, dropout_key=decoder_key), None, {}
    if cache is None:
        source = inputs.of_source()
        encoded = encode(weights, source, config, run.of_encoder(PREFIX, encoder_key))
        self_cache, initial, captured = None, encoded.cache.states, encoded.captured
        info = TokenInfo(source.tokens.shape[1], None, source.segments)
        if config.attends:
            keys_values = cross_keys_values(weights["attention"], encoded.hidden)
    else:
        self_cache, initial, info = cache.self_cache, cache.initial, cache.source
        keys_values = cache.cross_keys_values
    passed = recurrent.read(weights, inputs, config, decoder_run, self_cache, initial)
    hidden, captured = passed.hidden, {**captured, **passed.captured}
    if keys_values is not None:
        length, is_cached = hidden.shape[1], cache is not None
        encoded_here = None if is_cached else keys_values[0][:, 0]
        tokens = Pass(TokenInfo(length), run, source=info, encoded=encoded_here)
        context = tokens.source_attention(_SCORES)
        tap = Tap(run.hooks, *_positions(inputs, self_cache), run.placement)
        hidden = cross_attend(weights["attention"], hidden, keys_values, context, tap)
        captured |= tap.captured
    if cache is not None:
        cache = replace(cache, self_cache=passed.cache)
    return Forward(hidden, captured, cache)


def _positions(
    inputs: Inputs, cache: RecurrentCache | None
) -> tuple[Int[Array, "*batch length"], Int[Array, "batch length"] | None]:
    """Returns (positions, documents or None) of the tokens."""
    tokens, segments = inputs.tokens, inputs.segments
    if segments is None and cache is None:
        return jnp.arange(tokens.shape[1], dtype=jnp.int32), None
    cursor = DocumentCursor.begin(tokens.shape[0]) if cache is None else cache.cursor
    segments = continued_segments(segments, cursor, tokens.shape[:2])
    documents, positions, _ = document_positions(segments, cursor)
    return positions, documents


def start(
    weights: Weights, source: Inputs | None, config: Any, run: Run, size: CacheSize
) -> tuple[SourceCache, dict[str, Array]]:
    """Reads the sources.

    Returns:
        (cache, captured): the cache of rows that have read only their source, and the captured
        values of the encoder.
    """
    if source is None:
        raise ValueError("source is None; this model reads one")
    encoded = encode(weights, source, config, run.of_encoder(PREFIX, None))
    cross = cross_keys_values(weights["attention"], encoded.hidden) if config.attends else None
    # With fewer sources than devices the partitioner would shard the states by their features, and
    # replicate them at every step to divide the rows among the sources.
    place, rows = run.placement.place, size.batch_size
    initial = jax.tree.map(
        lambda x: place("recurrent.initial", jnp.repeat(x, rows // x.shape[0], axis=0)),
        encoded.cache.states,
    )
    self_cache, _ = recurrent.start(weights, None, config, run, size)
    return SourceCache.of(self_cache, cross, source, initial), encoded.captured


def prepare(weights: Weights, config: Any, parts: int = 1) -> Weights:
    """Repacks the decoder's weights for decoding; the encoder's are unchanged, as it runs once."""
    weights = recurrent.prepare(weights, config.dtype, parts)
    if config.attends:
        weights["attention"] = pack_kernels(weights["attention"], config.dtype, parts)
    return weights


@dataclass(frozen=True)
class RecurrentSequenceToSequence:
    """The `Architecture` of a recurrent encoder–decoder.

    Attributes:
        config: the resolved config.
    """

    config: Any

    @property
    def masks(self) -> tuple[Mask, ...]:
        """See `Architecture`."""
        return ()

    @property
    def generates(self) -> bool:
        """See `Architecture`."""
        return True

    @property
    def initializers(self) -> Initializers:
        """See `Architecture`."""
        return initializers(self.config)

    @property
    def points(self) -> tuple[str, ...]:
        """See `Architecture`."""
        return points(self.config)

    @property
    def layer_points(self) -> tuple[str, ...]:
        """See `Architecture`."""
        return layer_points(self.config)

    def forward(self, weights: Weights, inputs: Inputs, run: Run, cache: Any = None) -> Forward:
        """See `Architecture`."""
        return forward(weights, inputs, self.config, run, cache)

    def finish(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """See `Architecture`."""
        return x

    def start(
        self, weights: Weights, source: Inputs | None, run: Run, size: CacheSize
    ) -> tuple[SourceCache, dict[str, Array]]:
        """See `Architecture`."""
        return start(weights, source, self.config, run, size)

    def prepare(self, weights: Weights, parts: int = 1) -> Weights:
        """See `Architecture`."""
        return prepare(weights, self.config, parts)
