"""Checks of the variables and inputs of a model."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxformer.functional.hooks import Edit, Hooks, Intervention, Patch
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.linear.kernels import Int8Table, Kernel
from jaxformer.functional.symbolic import Size, exceeds
from jaxformer.models.config.check import whole_number
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.sequences import bucket, id_sequence, padded, vector_sequence
from jaxformer.terminal import did_you_mean, kind_of

AnyArray = Shaped[Array | np.ndarray, "..."]
# Each batch element has one source, which consists of token ids or vectors.
Sources = Sequence[Sequence[int] | Sequence[Sequence[float]] | AnyArray] | AnyArray


def as_array(name: str, x: Any) -> Any:
    """Converts lists, and arrays of other libraries, to NumPy arrays.

    JAX and NumPy arrays, and None, are returned unchanged. The result is a NumPy array, because
    inside a jit `jnp.asarray` would trace even known values.
    """
    if x is None or isinstance(getattr(x, "dtype", None), np.dtype):
        return x
    try:
        return np.asarray(x)
    except ValueError:
        raise ValueError(
            f"{name} are sequences of unequal lengths; pad them to one length, "
            "and give segment_ids with 0 for padding"
        ) from None


def check_variables(variables: object) -> None:
    """Raises ValueError unless the variables are {"params": …} with float parameters."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        names = ", ".join(map(str, variables)) if isinstance(variables, Mapping) else variables
        raise ValueError(
            f"variables contain {names}; they must contain 'params', as the "
            "result of model.init does"
        )
    for name, leaf in _leaves(variables["params"]).items():
        is_float = isinstance(leaf, _VALUES) or jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        if not is_float:
            raise ValueError(f"parameter {name} is {jnp.result_type(leaf)}; parameters are floats")


def check_parameters(part: str, given: Any, shapes: Any) -> None:
    """Raises ValueError unless the parameters have the names and shapes of the model."""
    given, wanted = _leaves(given), _leaves(shapes)
    for name in wanted.keys() | given.keys():
        found, right = (side[name].shape if name in side else None for side in (given, wanted))
        if found != right:
            is_, must = (x or "absent" for x in (found, right))
            raise ValueError(f"parameter {part}/{name} is {is_}; for this config it must be {must}")


# Objects of these classes may replace the arrays of kernels and tables.
_VALUES = (Kernel, Int8Table)


def _leaves(tree: Any) -> dict:
    def is_value(x: object) -> bool:
        return isinstance(x, _VALUES)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_value)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def check_tokens(
    tokens: AnyArray, config: ModelConfig, segment_ids: AnyArray | None = None
) -> None:
    """Raises ValueError if the dtype, shape or ids of the tokens do not fit the config.

    Inside jit, the ids are not checked.
    """
    _check_ids("tokens", tokens, config.vocab_size, config.embed_dim)
    if exceeds(tokens.shape[1], config.max_length) and segment_ids is None:
        raise ValueError(
            f"tokens have length {tokens.shape[1]}, more than max_length ({config.max_length})"
        )
    _check_segment_ids("segment_ids", segment_ids, "tokens", tokens)


def check_source(
    source: AnyArray | None,
    config: ModelConfig,
    segment_ids: AnyArray | None,
    batch_size: Size,
) -> None:
    """Raises ValueError unless there is one non-empty source for each batch element."""
    if source is None:
        raise ValueError(
            f"source is missing; this model needs a source, {_accepted_source(config)}"
        )
    _check_ids("source", source, config.num_source_ids, source_width(config))
    if source.shape[0] == 0:
        raise ValueError("source has batch size 0; it must be the batch size of tokens")
    if exceeds(source.shape[1], config.longest_source):
        raise ValueError(
            f"source has length {source.shape[1]}, more than max_source_length "
            f"({config.longest_source})"
        )
    _check_segment_ids("source_segment_ids", segment_ids, "source", source)
    if source.shape[0] != batch_size:
        raise ValueError(
            f"source has batch size {source.shape[0]}, but tokens have batch size {batch_size}"
        )
    if segment_ids is not None and not isinstance(segment_ids, jax.core.Tracer):
        empty = ~(np.asarray(segment_ids) != 0).any(axis=1)
        if empty.any():
            raise ValueError(f"source[{int(empty.argmax())}] contains only padding")
    elif source.shape[1] == 0:
        raise ValueError("source does not contain any tokens")
    _check_finite(source, segment_ids)


def _check_finite(source: AnyArray, segment_ids: AnyArray | None) -> None:
    """Raises ValueError if float features of a source are not finite outside padding."""
    if source.ndim == 2 or any(isinstance(x, jax.core.Tracer) for x in (source, segment_ids)):
        return
    is_wrong = ~np.isfinite(np.asarray(source)).all(axis=-1)
    if segment_ids is not None:
        is_wrong &= np.asarray(segment_ids) != 0
    if is_wrong.any():
        index, position = np.argwhere(is_wrong)[0]
        raise ValueError(f"source {index} is not finite at position {position}; it must be finite")


def source_width(config: ModelConfig) -> int:
    """Returns the number of float features per position of a source."""
    return config.source_features or config.embed_dim


def source_shape(config: ModelConfig, batch_size: int, length: int) -> jax.ShapeDtypeStruct | None:
    """Returns the shape of a source with these sizes; None for a model without a source."""
    if not config.reads_source:
        return None
    if config.source_features is not None:
        return jax.ShapeDtypeStruct((batch_size, length, config.source_features), np.float32)
    return jax.ShapeDtypeStruct((batch_size, length), np.int32)


def checked_inputs(inputs: Inputs, config: ModelConfig) -> Inputs:
    """Checks the inputs, which may be lists, and converts them to JAX arrays.

    A source is one text, so its segment ids become 1 for tokens and 0 for padding.
    """
    given = {x.name: as_array(x.name, getattr(inputs, x.name)) for x in fields(inputs)}
    tokens, segment_ids, types, source, source_segment_ids = given.values()
    check_tokens(tokens, config, segment_ids)
    if types is not None:
        check_token_type_ids(types, tokens, config.num_token_types)
    if config.reads_source:
        check_source(source, config, source_segment_ids, tokens.shape[0])
        if source_segment_ids is not None:
            source_segment_ids = jnp.asarray(source_segment_ids != 0, int)
    elif source is not None or source_segment_ids is not None:
        raise ValueError(
            f"source is not accepted, because {type(config).__name__} does not have an encoder"
        )
    arrays = (tokens, segment_ids, types, source, source_segment_ids)
    return Inputs(*(None if x is None else jnp.asarray(x) for x in arrays))


def padded_source(source: Sources | None, config: ModelConfig, name: str) -> Inputs | None:
    """Converts the sources of all batch elements to the inputs of an encoder.

    Lists are padded on the right to one of a few lengths. Arrays are not padded.

    Args:
        source: a list of ids [length] or of vectors [length, features], or one array with a batch
            axis.
        config: the model's config.
        name: the name of the model's class.

    Returns:
        The inputs of the encoder; None for a model without a source.

    Raises:
        ValueError: The source is missing, empty, too long or of a wrong type, or the model
            does not accept a source.
    """
    if not config.reads_source:
        if source is not None:
            raise ValueError(f"source is not accepted, because {name} does not have an encoder")
        return None
    if source is None:
        raise ValueError(f"source is missing; {name} needs a source: {_accepted_source(config)}")
    if getattr(source, "ndim", None) in (2, 3):
        array = as_array("source", source)
        check_source(array, config, None, len(array))
        return Inputs(jnp.asarray(array))
    sequences = [
        _source_sequence(f"source {i}", sequence, config) for i, sequence in enumerate(source)
    ]
    if not sequences:
        raise ValueError("source is empty; it must have one entry for each prompt")
    if len({sequence.ndim for sequence in sequences}) > 1:
        raise ValueError("source has both ids and embeddings; give only ids or only embeddings")
    items, segment_ids = padded(
        sequences, min(config.longest_source, bucket(max(map(len, sequences))))
    )
    return Inputs(jnp.asarray(items), jnp.asarray(segment_ids))


def _source_sequence(name: str, sequence: Any, config: ModelConfig) -> np.ndarray:
    """Converts one source to an array of ids [length] or of vectors [length, features].

    Raises:
        ValueError: The source is empty, too long or of a wrong type.
    """
    try:
        given = np.asarray(sequence)
    except ValueError:
        raise ValueError(
            f"{name} has positions with different numbers of features; all positions must have the "
            "same number"
        ) from None
    if given.shape[:1] == (0,):
        raise ValueError(f"{name} is empty; it must have at least one token")
    if config.num_source_ids and given.ndim != 2:
        found = id_sequence(name, given, config.num_source_ids, "source_vocab_size")
    else:
        found = vector_sequence(name, given, source_width(config))
    if len(found) > config.longest_source:
        raise ValueError(
            f"{name} has {len(found)} tokens, more than max_source_length ({config.longest_source})"
        )
    return found


def checked_hooks(
    capture: Iterable[str],
    patch: Mapping[str, Intervention] | None,
    points: Collection[str],
    *,
    length: int | None = None,
    source_length: int | None = None,
    steps: int | None = None,
) -> Hooks:
    """Checks captures and patches, and converts them to `Hooks`.

    Args:
        capture: names of hook points to capture.
        patch: {name: Patch or Edit}, or None.
        points: the names of the model's hook points.
        length: largest number of tokens of a text; if None, positions have no upper limit.
        source_length: largest number of tokens of a source; if None, positions in the source have
            no upper limit.
        steps: the number of tokens to generate. If None, patches must not have `steps`.

    Raises:
        ValueError: A name is not in `points`, or a patch is invalid. Inside jit, a patch at a
            position or step that does not exist is ignored.
    """
    if isinstance(capture, str):
        raise ValueError(f"capture is {capture!r}; it must be a tuple of names: ({capture!r},)")
    if not isinstance(patch, Mapping | None):
        raise ValueError(f"patch is {kind_of(patch)}; it must map names to Patch or Edit values")
    patch = dict(patch or {})
    for name in (*capture, *patch):
        if name not in points:
            raise ValueError(
                f"no hook point is named {name!r}{did_you_mean(str(name), points)}; the names "
                f"are {', '.join(points)}"
            )
    for name, entry in patch.items():
        _check_intervention(name, entry)
        if entry.steps is not None and steps is None:
            raise ValueError(
                f"patch {name!r} has steps, which only jf.generate accepts; use positions instead"
            )
        source_inputs = name.startswith("encoder.")
        limit, whose = (source_length, "source") if source_inputs else (length, "text")
        positions = _index_array(f"patch {name!r}: positions", entry.positions)
        _check_range(f"patch {name!r}: positions", positions, limit, f"tokens of a {whose}")
        steps_of_patch = _index_array(f"patch {name!r}: steps", entry.steps)
        _check_range(f"patch {name!r}: steps", steps_of_patch, steps, "generated tokens")
        if isinstance(entry, Patch):
            patch[name] = entry._replace(positions=positions, steps=steps_of_patch)
        else:
            how = {"layers": entry.layers, "positions": positions, "steps": steps_of_patch}
            patch[name] = Edit(entry.function, *entry.arrays, **how)
    return Hooks(tuple(capture), patch)


def _check_intervention(name: str, entry: Any) -> None:
    """Raises ValueError unless `entry` is a patch of arrays, or an edit by a function."""
    if isinstance(entry, Edit):
        if not callable(entry.function):
            raise ValueError(
                f"patch {name!r}: the first argument of Edit is {kind_of(entry.function)}; "
                "it must be a function (value, at, *arrays)"
            )
        for layer in entry.layers or ():
            whole_number(f"patch {name!r}: layers", layer, 0)
        return
    if not isinstance(entry, Patch):
        raise ValueError(
            f"patch {name!r} is {kind_of(entry)}; it must be a Patch(where, value) or an "
            "Edit(function, *arrays)"
        )
    for part, x in (("where", entry.where), ("value", entry.value)):
        if x is None or as_array(f"patch {name!r}: {part}", x).dtype == object:
            raise ValueError(f"patch {name!r}: {part} is {kind_of(x)}; it must be an array")


def hooks_of_texts(
    capture: Iterable[str],
    patch: Mapping[str, Intervention] | None,
    points: Collection[str],
    inputs: Inputs,
) -> Hooks:
    """Returns the hooks for a pass over complete texts; see `checked_hooks`."""
    length = longest_text(inputs.tokens, inputs.segment_ids)
    source_length = None
    if inputs.source is not None:
        source_length = longest_text(inputs.source, inputs.source_segment_ids)
    return checked_hooks(capture, patch, points, length=length, source_length=source_length)


def _index_array(name: str, values: Any) -> Int[Array, " values"] | None:
    """Converts whole numbers to an array with one axis; None is returned unchanged."""
    if values is None:
        return None
    indices = jnp.asarray(values)
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"{name} are {values!r}; they must be a list of whole numbers")
    return indices


def _check_range(name: str, indices: Array | None, limit: int | None, what: str) -> None:
    """Raises ValueError if an entry is negative or, with a `limit`, not below the limit."""
    if indices is None or isinstance(indices, jax.core.Tracer):
        return
    for value in np.asarray(indices):
        if value < 0 or (limit is not None and value >= limit):
            accepted = "they must not be negative"
            if limit is not None:
                accepted = f"they must be in 0 … {limit - 1} (the {what})"
            raise ValueError(f"{name} contain {value}; {accepted}")


def longest_text(tokens: AnyArray, segment_ids: AnyArray | None) -> int:
    """Returns the length of the longest document; for traced segment ids, an upper bound."""
    if segment_ids is None or isinstance(segment_ids, jax.core.Tracer):
        return tokens.shape[1]
    sequences = np.asarray(segment_ids)
    found = (np.unique(sequence[sequence != 0], return_counts=True)[1] for sequence in sequences)
    return max((int(counts.max()) for counts in found if counts.size), default=0)


def _accepted_source(config: ModelConfig) -> str:
    return _accepted(config.num_source_ids, source_width(config))


def _accepted(vocab_size: int, width: int) -> str:
    """Describes the accepted inputs: features if `vocab_size` is 0, else ids or embeddings."""
    if not vocab_size:
        return f"float [batch, length, {width}] (features)"
    return f"int [batch, length] or float [batch, length, {width}] (embeddings)"


def _check_ids(name: str, tokens: AnyArray, vocab_size: int, width: int) -> None:
    """Raises ValueError unless the model accepts the dtype and shape of the inputs."""
    is_id = jnp.issubdtype(tokens.dtype, jnp.integer) and tokens.ndim == 2
    is_vectors = jnp.issubdtype(tokens.dtype, jnp.floating) and tokens.shape[2:] == (width,)
    if not (is_vectors or (is_id and vocab_size)):
        raise ValueError(
            f"{name} are {tokens.dtype} {tokens.shape}; they must be {_accepted(vocab_size, width)}"
        )
    if is_id and not isinstance(tokens, jax.core.Tracer) and tokens.size:
        ids = np.asarray(tokens)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            limit = "vocab_size" if name == "tokens" else f"{name}_vocab_size"
            raise ValueError(f"{name} contain id {bad}, but {limit} is {vocab_size}")


def check_token_type_ids(types: AnyArray, tokens: AnyArray, num_token_types: int) -> None:
    """Raises ValueError if token types do not fit the model or the tokens."""
    _check_segment_ids("token_type_ids", types, "tokens", tokens)
    if not num_token_types:
        raise ValueError(
            "token_type_ids are not accepted, because num_token_types of this model is 0"
        )
    if not isinstance(types, jax.core.Tracer) and types.size:
        low, high = int(np.min(types)), int(np.max(types))
        if low < 0 or high >= num_token_types:
            bad = low if low < 0 else high
            raise ValueError(
                f"token_type_ids contain {bad}, but num_token_types is {num_token_types}"
            )


def _check_segment_ids(name: str, segment_ids: AnyArray | None, of: str, tokens: AnyArray) -> None:
    if segment_ids is not None and segment_ids.shape != tokens.shape[:2]:
        raise ValueError(
            f"{name} have shape {segment_ids.shape}, but {of} have shape {tokens.shape[:2]}"
        )
