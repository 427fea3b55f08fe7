"""Fits presets to the user's values: if a preset's value contradicts them, it changes."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import lcm
from typing import Any

from jaxformer.training.config import (
    LEARNING_RATES,
    OptimizerConfig,
    TextTraining,
    TrainingConfig,
)
from jaxformer.training.mesh_sizes import Mesh


@dataclass
class Settings:
    """Fields of a run by name, and the names that the user set.

    Attributes:
        values: The fields of the model and of the training, from the user or the preset.
        given: The names of the fields that must not change.
    """

    values: dict[str, Any]
    given: frozenset[str]

    def __getitem__(self, name: str):
        """Returns the value of a field."""
        return self.values[name]

    def is_free(self, name: str) -> bool:
        """Returns whether the field came from the preset, so that it may change."""
        return name not in self.given

    def let(self, **values) -> None:
        """Sets the first of these fields that the user did not set, if there is one."""
        if (name := next(filter(self.is_free, values), None)) is not None:
            self.values[name] = values[name]


def fit_preset(
    training: TrainingConfig,
    values: dict[str, Any],
    names: Collection[str] = (),
    model_is_fixed: bool = False,
) -> TrainingConfig:
    """Returns a preset with the user's values; preset values that contradict them change.

    Args:
        training: The preset.
        values: The user's values by the names of fields. Fields of the optimizer, the execution
            and LoRA are ignored, except `optimizer`.
        names: Further fields that the user set, whose values no rule needs.
        model_is_fixed: Whether the model comes from a checkpoint, so that its fields must not
            change.

    Raises:
        ValueError: A user's value is not accepted, or two of them contradict each other.
    """
    model = training.model
    of_model = {x.name: getattr(model, x.name) for x in fields(model)}
    of_run = {x.name: getattr(training, x.name) for x in fields(training) if x.name != "model"}
    fixed = of_model if model_is_fixed else {}
    # The section `optimizer` has a field `optimizer`.
    sections = {name for name, x in of_run.items() if is_dataclass(x) and not isinstance(x, Mesh)}
    settings = Settings({**of_model, **of_run}, frozenset({*values, *names, *fixed}))
    known = settings.values.keys() - fixed.keys() - sections
    settings.values |= {name: value for name, value in values.items() if name in known}
    for follow in _rules_of(training):
        follow(settings)
    model = replace(model, **{name: settings[name] for name in of_model})
    run = {name: settings[name] for name in of_run}
    optimizer = _with_own_rate(training.optimizer, values.get("optimizer"), settings)
    return replace(training, model=model, **run | {"optimizer": optimizer})


def _with_own_rate(
    preset: OptimizerConfig, name: str | None, settings: Settings
) -> OptimizerConfig:
    """Returns the settings with the user's optimizer and a learning rate that suits it.

    Args:
        preset: The preset's settings.
        name: The user's optimizer; None: the preset's.
        settings: The fields of the run, which say whether the user set `learning_rate`.
    """
    if name not in LEARNING_RATES or not settings.is_free("learning_rate"):
        return preset
    return preset.with_optimizer(name)


def _rules_of(training: TrainingConfig) -> Sequence[Callable[[Settings], None]]:
    """Returns the rules for this kind of run, each of which resolves one contradiction."""
    rules, names = [_end], {field.name for field in fields(training.model)}
    for name, of_field in _RULES.items():
        rules += of_field if name in names else ()
    if isinstance(training, TextTraining):
        rules += [_window, _batch]
    return rules


def _pooler(settings: Settings) -> None:
    """Classification (`num_labels`) needs the pooler."""
    if settings["num_labels"]:
        settings.let(pooler=True)


def _end(settings: Settings) -> None:
    """If the user sets minutes, the preset's steps do not limit the run as well."""
    if not settings.is_free("minutes") and settings["minutes"] is not None:
        settings.let(steps=None)


def _grouped_heads(settings: Settings) -> None:
    """num_kv_heads divides num_heads."""
    heads, groups = settings["num_heads"], settings["num_kv_heads"]
    if groups is not None and heads % groups:
        divisor = max((x for x in range(1, groups + 1) if heads % x == 0), default=1)
        settings.let(num_kv_heads=divisor, num_heads=_round_up(heads, groups))


def _width(settings: Settings) -> None:
    """num_heads divides embed_dim; with rotary positions, a head has an even number of features.

    embed_dim changes first, num_heads second. If no number of heads fits, head_dim is set.
    """
    is_odd = settings["embed_dim"] % 2 == 1 and not settings.is_free("embed_dim")
    if is_odd and settings["positions"].startswith("sinusoidal"):
        settings.let(positions="learned")
    heads = settings["num_heads"] if settings["head_dim"] is None else 1
    of_encoder = settings.values.get("num_encoder_heads") or settings["num_heads"]
    others = heads if of_encoder == settings["num_heads"] else of_encoder
    unit = _unit(settings, lcm(heads, others))
    width = settings["embed_dim"]
    if width % unit == 0:
        return
    if settings.is_free("embed_dim"):
        settings.let(embed_dim=_round_up(width, unit))
        return
    if not settings.is_free("num_heads"):
        return
    groups = 1 if settings.is_free("num_kv_heads") else settings["num_kv_heads"] or 1
    fitting = [x for x in range(groups, heads + 1, groups) if width % _unit(settings, x) == 0]
    if fitting:
        settings.let(num_heads=fitting[-1])
    else:
        settings.let(head_dim=_round_up(max(1, width // heads), 2))


def _unit(settings: Settings, heads: int) -> int:
    """Returns the number that embed_dim must be a multiple of, with this number of heads."""
    positions = settings["positions"]
    if positions == "rotary":
        return 2 * heads
    return lcm(2, heads) if positions.startswith("sinusoidal") else heads


def _relative_distances(settings: Settings) -> None:
    """relative_distance is greater than half of relative_buckets."""
    distance, buckets = settings["relative_distance"], settings["relative_buckets"]
    if distance <= buckets // 2:
        settings.let(relative_distance=buckets, relative_buckets=max(4, distance))


def _parallel_layers(settings: Settings) -> None:
    """Parallel sub-layers need pre-norm and a residual."""
    if settings["norm_position"] != "pre" or not settings["residual"]:
        settings.let(parallel="no")
    if settings["parallel"] != "no":
        settings.let(norm_position="pre")
        settings.let(residual=True)


def _tied_width(settings: Settings) -> None:
    """With tied embeddings, hidden_dim equals embed_dim."""
    hidden = settings["hidden_dim"]
    if settings["tie_embeddings"] and hidden not in (None, settings["embed_dim"]):
        settings.let(tie_embeddings=False, embed_dim=hidden)


def _source_vocabulary(settings: Settings) -> None:
    """Both sides share one tokenizer, so vocab_size equals source_vocab_size."""
    if settings["source_vocab_size"] is not None:
        settings.let(vocab_size=settings["source_vocab_size"])


def _window(settings: Settings) -> None:
    """window_length is at most max_length, and equals it if positions are learned."""
    window, longest = settings["window_length"], settings["max_length"]
    if window is None:
        return
    learned = settings.values.get("positions") == "learned"
    if window > longest or (learned and window < longest):
        settings.let(window_length=None, max_length=window)


def _batch(settings: Settings) -> None:
    """batch_size is a multiple of the number of parts into which the mesh divides a batch."""
    if settings["mesh"] is not None:
        settings.let(batch_size=_round_up(settings["batch_size"], settings["mesh"].parts))


def _round_up(value: int, unit: int) -> int:
    """Returns the smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


# The rules about the config's field of each name.
_RULES = {
    "num_kv_heads": (_grouped_heads, _width, _grouped_heads, _relative_distances, _parallel_layers),
    "num_labels": (_pooler,),
    "hidden_dim": (_tied_width,),
    "source_vocab_size": (_source_vocabulary,),
}
