"""The head atlas: scores of every attention head, and the effect of its ablation on the loss.

The atlas reports where heads attend and how much the loss depends on them. It claims no meaning: a
high induction score, for example, does not prove that the head copies.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.run import RunFolder, parse_kind
from jaxformer.functional.taps import Hooks
from jaxformer.functional.trees import Weights
from jaxformer.hub.load import lora_of
from jaxformer.interpret.ablation import ablate_heads, check_measurement, row_losses
from jaxformer.interpret.head_scores import (
    CrossScores,
    HeadScores,
    ScoreSettings,
    ScoreSums,
    check_settings,
    cross_score_sums,
    score_sums,
)
from jaxformer.interpret.texts import (
    checked_batch,
    inputs_of,
    map_rows,
    next_token_batch,
    query_inputs,
)
from jaxformer.models.check import AnyArray
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.mesh import parameter_shapes
from jaxformer.training.batch import Batch


class AtlasSettings(NamedTuple):
    """Settings of an atlas.

    Attributes:
        attention: the heads to measure: "attention" (self-attention), "cross_attention" or
            "encoder.attention" of an encoder–decoder.
        delimiters: ids of the tokens that count as delimiters.
        window: largest distance, in tokens, that the local score counts.
        rows_at_once: number of rows in memory at once.
    """

    attention: str = "attention"
    delimiters: tuple[int, ...] = ()
    window: int = 4
    rows_at_once: int = 8


class HeadAtlas(NamedTuple):
    """Scores and effects of every head; all arrays are [layers, heads].

    Attributes:
        scores: {name: score}, the fields of `HeadScores` or `CrossScores`.
        effect: the increase of the loss if the head outputs its mean, in nats per token.
        standard_error: the standard error of `effect` over the rows.
        loss: the mean loss of the rows with all heads, in nats per token.
        num_rows: the number of rows of text.
    """

    scores: dict[str, np.ndarray]
    effect: Float[np.ndarray, "layers heads"]
    standard_error: Float[np.ndarray, "layers heads"]
    loss: float
    num_rows: int

    def table(self, sort_by: str = "effect") -> list[dict[str, float]]:
        """Returns one row per head: layer, head, scores, effect and standard error.

        Args:
            sort_by: the name of the column to sort by, largest first; NaN comes last.

        Raises:
            ValueError: there is no such column.
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
        steps: the step of each checkpoint.
        scores: {name: score [steps, layers, heads]}.
        loss: the mean loss of the rows at each step, in nats per token.
    """

    steps: np.ndarray
    scores: dict[str, np.ndarray]
    loss: Float[np.ndarray, " steps"]


def head_atlas(
    model: LanguageModel,
    variables: Variables,
    tokens: Batch | AnyArray,
    settings: AtlasSettings = AtlasSettings(),  # noqa: B008 (immutable)
) -> HeadAtlas:
    """Measures the scores of every head, and the effect of its ablation.

    It runs the model layers · heads + 3 times over the text.

    Args:
        model: a Transformer: Decoder, Encoder or EncoderDecoder.
        variables: its variables.
        tokens: int [batch, length], rows of text for a decoder, at least two. Otherwise a `Batch`,
            which can also have padding, packed documents, a source and other targets (see
            `texts.next_token_batch`).
        settings: the heads to measure, and settings of the scores.

    Raises:
        ValueError: an argument is not accepted.
    """
    batch = checked_measurement(model, variables, tokens, settings)
    scores, loss = _observe(model, variables, batch, settings)
    ablation = ablate_heads(model, variables, batch, settings.attention, settings.rows_at_once)
    effect, error = np.asarray(ablation.effect), np.asarray(ablation.standard_error)
    return HeadAtlas(scores, effect, error, loss, len(batch.inputs))


def atlas_over_checkpoints(
    model: LanguageModel,
    checkpoints: Iterable[tuple[int, Variables]],
    tokens: Batch | AnyArray,
    settings: AtlasSettings = AtlasSettings(),  # noqa: B008 (immutable)
) -> AtlasHistory:
    """Measures the scores of every head at each checkpoint, and the loss.

    It reads one checkpoint at a time, so only one is in memory if the iterator loads them one by
    one (see `read_checkpoints`).

    Args:
        model: as in `head_atlas`.
        checkpoints: (step, variables) of each checkpoint.
        tokens: as in `head_atlas`.
        settings: as in `head_atlas`.

    Raises:
        ValueError: an argument is not accepted, or there is no checkpoint.
    """
    steps, scores, losses = [], [], []
    for step, variables in checkpoints:
        batch = checked_measurement(model, variables, tokens, settings)
        observed = _observe(model, variables, batch, settings)
        steps.append(step)
        scores.append(observed[0])
        losses.append(observed[1])
    if not steps:
        raise ValueError("checkpoints are empty; there must be at least one")
    by_name = {name: np.stack([each[name] for each in scores]) for name in scores[0]}
    return AtlasHistory(np.array(steps), by_name, np.array(losses))


def read_checkpoints(
    folder: RunFolder, steps: Sequence[int] | None = None
) -> Iterator[tuple[int, Variables]]:
    """Yields (step, variables) of the checkpoints of a run, oldest first.

    A run keeps only its newest checkpoints, unless it was trained with `--keep-every`. Each
    checkpoint is read when the iterator reaches it.

    Args:
        folder: the run.
        steps: the steps to read; None: every complete checkpoint.

    Raises:
        ValueError: the run trains a LoRA adapter, or has no checkpoint of a step, or it is damaged.
    """
    sections = folder.read_config("model")
    if lora_of(sections, folder.config).lora_rank is not None:
        raise ValueError(
            f"{folder.path} is a LoRA run, whose checkpoints hold only the adapter; give the run "
            "of a complete model"
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
    """Returns the batch to measure on, after all checks of the arguments of `head_atlas`."""
    check_measurement(model, variables, settings.attention, settings.rows_at_once)
    check_settings(_score_settings(model, settings))
    batch = tokens if isinstance(tokens, Batch) else next_token_batch(model, tokens)
    return checked_batch(model, batch)


def _score_settings(model: LanguageModel, settings: AtlasSettings) -> ScoreSettings:
    both_ways = model.config.bidirectional or settings.attention.startswith("encoder.")
    return ScoreSettings(tuple(settings.delimiters), settings.window, both_ways)


def _observe(
    model: LanguageModel, variables: Variables, batch: Batch, settings: AtlasSettings
) -> tuple[dict[str, np.ndarray], float]:
    """Returns the scores of every head, {name: [layers, heads]}, and the mean loss of the rows."""
    settings = settings._replace(delimiters=tuple(settings.delimiters))  # hashable
    means, loss = _measure(model, variables["params"], batch, settings)
    kind = CrossScores if settings.attention == "cross_attention" else HeadScores
    return kind(*np.asarray(means))._asdict(), float(loss)


@partial(jax.jit, static_argnums=(0, 3))
def _measure(
    model: LanguageModel, params: Weights, batch: Batch, settings: AtlasSettings
) -> tuple[Float[Array, "scores layers heads"], Float[Array, ""]]:
    """Computes all scores and the mean loss in one pass, `rows_at_once` rows at a time."""
    attention = settings.attention
    point, of_scores = f"{attention}.weights", _score_settings(model, settings)

    def of_row(weights: Float[Array, "layers heads length keys"], row: Batch) -> ScoreSums:
        row, weights = jax.tree.map(lambda x: x[None], row), weights[:, None]
        if attention == "cross_attention":
            return cross_score_sums(weights, row.segments, row.source_segments)
        queries = query_inputs(row, attention)
        return score_sums(weights, queries.tokens, queries.segments, of_scores)

    def of_rows(rows: Batch) -> tuple[ScoreSums, Float[Array, " rows"]]:
        passed = model.forward(params, inputs_of(rows), hooks=Hooks((point,)))
        sums = jax.vmap(of_row, in_axes=(1, 0))(passed.captured[point], rows)
        return sums, row_losses(model, params, rows, passed.hidden)

    sums, losses = map_rows(of_rows, batch, settings.rows_at_once)
    return jax.tree.map(lambda x: x.sum(axis=0), sums).mean(), losses.mean()
