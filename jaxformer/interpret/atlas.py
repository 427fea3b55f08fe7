"""Head atlas: attention scores of every head, and the effect of ablating each head on the loss.

The atlas reports which tokens the heads attend to and how much the loss depends on each head. The
scores are descriptive: a high induction score, for example, does not prove that a head copies
tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.run import RunFolder, parse_kind
from jaxformer.functional.hooks import Hooks
from jaxformer.functional.trees import Weights
from jaxformer.hub.load import read_lora
from jaxformer.interpret.ablation import ablate_heads, check_measurement, sequence_losses
from jaxformer.interpret.scores import (
    CrossScores,
    HeadScores,
    ScoreSettings,
    ScoreSums,
    check_settings,
    cross_score_sums,
    score_sums,
)
from jaxformer.interpret.summary import summary
from jaxformer.interpret.texts import (
    batch_inputs,
    checked_batch,
    map_sequences,
    next_token_batch,
    query_inputs,
)
from jaxformer.models.check import AnyArray
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.sharding.parameters import parameter_shapes
from jaxformer.training.batch import Batch


class AtlasSettings(NamedTuple):
    """Settings of `head_atlas`.

    Attributes:
        attention: the heads to measure: "attention" (self-attention), "cross_attention" or
            "encoder.attention" of an encoder–decoder.
        delimiters: the ids of the tokens that count as delimiters.
        window: the largest distance, in tokens, between a query and a key in the local score.
        batch_size_within_memory: the number of sequences in one forward pass.
    """

    attention: str = "attention"
    delimiters: tuple[int, ...] = ()
    window: int = 4
    batch_size_within_memory: int = 8


class HeadAtlas(NamedTuple):
    """Scores and ablation effects of every head; all arrays are [layers, heads].

    Attributes:
        scores: {name: score}, the fields of `HeadScores` or `CrossScores`.
        effect: the increase of the loss by mean ablation of the head, in nats per token.
        standard_error: the standard error of `effect` over the sequences.
        loss: the mean loss of the sequences with all heads, in nats per token.
        num_sequences: the number of sequences.
    """

    scores: dict[str, np.ndarray]
    effect: Float[np.ndarray, "layers heads"]
    standard_error: Float[np.ndarray, "layers heads"]
    loss: float
    num_sequences: int

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)

    def table(self, sort_by: str = "effect") -> list[dict[str, float]]:
        """Returns one row per head with its layer, index, scores, effect and standard error.

        Args:
            sort_by: the name of the column to sort by, largest first; NaN comes last.

        Raises:
            ValueError: The column does not exist.
        """
        columns = {**self.scores, "effect": self.effect, "standard_error": self.standard_error}
        if sort_by not in columns:
            raise ValueError(f"sort_by is {sort_by!r}; it must be one of {', '.join(columns)}")
        rows: list[dict[str, float]] = [
            {"layer": layer, "head": head}
            | {name: float(column[layer, head]) for name, column in columns.items()}
            for layer, head in np.ndindex(self.effect.shape)
        ]
        return sorted(rows, key=lambda row: -np.nan_to_num(row[sort_by], nan=-np.inf))


class AtlasHistory(NamedTuple):
    """Scores of every head over the checkpoints of a run.

    Attributes:
        steps: the training step of each checkpoint.
        scores: {name: score}; each score is an array [steps, layers, heads].
        loss: the mean loss of the sequences at each checkpoint, in nats per token.
    """

    steps: np.ndarray
    scores: dict[str, np.ndarray]
    loss: Float[np.ndarray, " steps"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


def head_atlas(
    model: LanguageModel,
    variables: Variables,
    tokens: Batch | AnyArray,
    settings: AtlasSettings = AtlasSettings(),  # noqa: B008 (immutable)
) -> HeadAtlas:
    """Measures the scores of every head, and the effect of ablating each head.

    The measurement takes layers · heads + 3 forward passes over the text.

    Args:
        model: a Transformer: Decoder, Encoder or EncoderDecoder.
        variables: the model's variables.
        tokens: for a decoder, at least two sequences of token ids, int [batch, length]. All models
            accept a `Batch`, which may have padding, packed documents, a source, and targets that
            are not the next tokens (see `texts.next_token_batch`).
        settings: the heads to measure, and the options of the scores.

    Raises:
        ValueError: An argument is invalid.
    """
    batch = checked_measurement(model, variables, tokens, settings)
    scores, loss = _observe(model, variables, batch, settings)
    ablation = ablate_heads(
        model, variables, batch, settings.attention, settings.batch_size_within_memory
    )
    effect, error = np.asarray(ablation.effect), np.asarray(ablation.standard_error)
    return HeadAtlas(scores, effect, error, loss, len(batch.inputs))


def atlas_over_checkpoints(
    model: LanguageModel,
    checkpoints: Iterable[tuple[int, Variables]],
    tokens: Batch | AnyArray,
    settings: AtlasSettings = AtlasSettings(),  # noqa: B008 (immutable)
) -> AtlasHistory:
    """Measures the loss and the scores of every head at each checkpoint.

    `read_checkpoints` returns an iterator that loads one checkpoint at a time, so only one is in
    memory.

    Args:
        model: as in `head_atlas`.
        checkpoints: (step, variables) of each checkpoint.
        tokens: as in `head_atlas`.
        settings: as in `head_atlas`.

    Raises:
        ValueError: An argument is invalid or the iterator is empty.
    """
    steps, scores, losses = [], [], []
    for step, variables in checkpoints:
        batch = checked_measurement(model, variables, tokens, settings)
        observed = _observe(model, variables, batch, settings)
        steps.append(step)
        scores.append(observed[0])
        losses.append(observed[1])
    if not steps:
        raise ValueError("checkpoints has no item; pass at least one checkpoint")
    by_name = {name: np.stack([each[name] for each in scores]) for name in scores[0]}
    return AtlasHistory(np.array(steps), by_name, np.array(losses))


def read_checkpoints(
    folder: RunFolder, steps: Sequence[int] | None = None
) -> Iterator[tuple[int, Variables]]:
    """Yields (step, variables) of the checkpoints of a run, oldest first.

    A run keeps only the newest checkpoints, unless it was trained with `--keep-period`. Each
    checkpoint is loaded when the iterator reaches it.

    Args:
        folder: the run folder.
        steps: the steps to read; all complete checkpoints if None.

    Raises:
        ValueError: The run trains a LoRA adapter, or a checkpoint is missing or damaged.
    """
    sections = folder.read_config("model")
    if read_lora(sections, folder.config).lora_rank is not None:
        raise ValueError(
            f"{folder.path} is a LoRA run, whose checkpoints contain only the adapter; pass "
            "a run that trains all parameters"
        )
    checkpoints = Checkpoints(folder.checkpoints)
    there = checkpoints.steps()
    missing = sorted(set(there if steps is None else steps) - set(there))
    if missing or not there:
        raise ValueError(
            f"{folder.path} has no complete checkpoint of step {missing[0] if missing else 0}; its "
            f"checkpoints are of steps {', '.join(map(str, there)) or 'none'}"
        )
    model = build(parse_kind(sections, folder.config))
    like = parameter_shapes(model, None)
    for step in sorted(there if steps is None else steps):
        yield step, {"params": checkpoints.read(step, like)}


def checked_measurement(
    model: LanguageModel, variables: Variables, tokens: Batch | AnyArray, settings: AtlasSettings
) -> Batch:
    """Checks the arguments of `head_atlas` and returns the tokens as a batch."""
    check_measurement(model, variables, settings.attention, settings.batch_size_within_memory)
    check_settings(_score_settings(model, settings))
    batch = tokens if isinstance(tokens, Batch) else next_token_batch(model, tokens)
    return checked_batch(model, batch)


def _score_settings(model: LanguageModel, settings: AtlasSettings) -> ScoreSettings:
    both_ways = model.config.bidirectional or settings.attention.startswith("encoder.")
    return ScoreSettings(tuple(settings.delimiters), settings.window, both_ways)


def _observe(
    model: LanguageModel, variables: Variables, batch: Batch, settings: AtlasSettings
) -> tuple[dict[str, np.ndarray], float]:
    """Returns the scores of every head, {name: [layers, heads]}, and the mean loss."""
    settings = settings._replace(delimiters=tuple(settings.delimiters))
    means, loss = _measure(model, variables["params"], batch, settings)
    kind = CrossScores if settings.attention == "cross_attention" else HeadScores
    return kind(*np.asarray(means))._asdict(), float(loss)


@partial(jax.jit, static_argnums=(0, 3))
def _measure(
    model: LanguageModel, params: Weights, batch: Batch, settings: AtlasSettings
) -> tuple[Float[Array, "scores layers heads"], Float[Array, ""]]:
    """Computes all scores and the mean loss, for `batch_size_within_memory` sequences at a time."""
    attention = settings.attention
    point, of_scores = f"{attention}.weights", _score_settings(model, settings)

    def sequence_scores(
        weights: Float[Array, "layers heads length keys"], sequence: Batch
    ) -> ScoreSums:
        sequence, weights = jax.tree.map(lambda x: x[None], sequence), weights[:, None]
        if attention == "cross_attention":
            return cross_score_sums(weights, sequence.segment_ids, sequence.source_segment_ids)
        queries = query_inputs(sequence, attention)
        return score_sums(weights, queries.tokens, queries.segment_ids, of_scores)

    def batch_scores(sequences: Batch) -> tuple[ScoreSums, Float[Array, " batch"]]:
        passed = model.forward(params, batch_inputs(sequences), hooks=Hooks((point,)))
        sums = jax.vmap(sequence_scores, in_axes=(1, 0))(passed.captured[point], sequences)
        return sums, sequence_losses(model, params, sequences, passed.hidden)

    sums, losses = map_sequences(batch_scores, batch, settings.batch_size_within_memory)
    return jax.tree.map(lambda x: x.sum(axis=0), sums).mean(), losses.mean()
