"""Fits presets to the user's values: sizes follow them, and values that contradict them change."""

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from itertools import chain
from math import lcm
from typing import Any

from jaxformer.models.config.check import entries
from jaxformer.training.config import LEARNING_RATES, OptimizerConfig, TrainingConfig

_MOST_HEADS = 4096  # larger numbers are not tried, so that a mistyped width is answered at once


class Settings(dict[str, Any]):
    """Fields of the model and of the training by name, from the user or the preset."""

    def __init__(self, values: dict[str, Any], given: Collection[str], preset: dict[str, Any]):
        """Stores the fields.

        Args:
            values: The fields.
            given: The names of the fields that must not change.
            preset: The fields of the preset's model.
        """
        super().__init__(values)
        self.given, self.preset = given, preset

    def is_free(self, name: str) -> bool:
        """Returns whether the field came from the preset, so that it may change."""
        return name not in self.given

    def let(self, **values: Any) -> None:
        """Sets the first of these fields that the user did not set, if there is one."""
        if (name := next(filter(self.is_free, values), None)) is not None:
            self[name] = values[name]


def fit_preset(
    training: TrainingConfig, values: dict[str, Any], model_is_fixed: bool = False
) -> TrainingConfig:
    """Returns a preset with the user's values.

    Sizes that the user did not set follow from those that the user set: the widths stay in
    proportion to `embed_dim`, and the heads keep their width. Other values of the preset change
    if they contradict the user's values.

    Args:
        training: The preset.
        values: The user's values by the names of fields. Fields of the optimizer, the execution
            and LoRA are ignored, except `optimizer`.
        model_is_fixed: Whether the model comes from a checkpoint, so that its fields must not
            change.

    Raises:
        ValueError: A user's value is not accepted, or two of them contradict each other.
    """
    model = training.model
    of_model = {x.name: getattr(model, x.name) for x in fields(model)}
    of_run = {x.name: getattr(training, x.name) for x in fields(training) if x.name != "model"}
    fixed = of_model if model_is_fixed else {}
    settings = Settings({**of_model, **of_run}, {*values, *fixed}, of_model)
    known = settings.keys() - fixed.keys()
    settings.update({name: value for name, value in values.items() if name in known})
    for rule in chain.from_iterable(_RULES[name] for name in _RULES if name in settings):
        rule(settings)
    model = replace(model, **{name: settings[name] for name in of_model})
    run = {name: settings[name] for name in of_run}
    return replace(training, model=model, **run | {"optimizer": _optimizer(training, values)})


def _optimizer(preset: TrainingConfig, values: dict[str, Any]) -> OptimizerConfig:
    """Returns the preset's settings for the user's optimizer, with a learning rate that suits it.

    If both the user and the preset set no learning rate, it is the optimizer's default. Otherwise
    the preset's is multiplied by the ratio of the optimizers' default learning rates.
    """
    config, name = preset.optimizer, values.get("optimizer")
    if name == config.optimizer or name not in LEARNING_RATES or "learning_rate" in values:
        return config
    if config.learning_rate is None:
        return replace(config, optimizer=name)
    rate = config.learning_rate * LEARNING_RATES[name] / LEARNING_RATES[config.optimizer]
    return replace(config, optimizer=name, learning_rate=float(f"{rate:.2g}"))


def _pooler(settings: Settings) -> None:
    """Classification (`num_labels`) needs the pooler."""
    if settings["num_labels"]:
        settings.let(pooler=True)


def _end(settings: Settings) -> None:
    """If the user sets minutes, the preset's steps do not limit the run as well."""
    if not settings.is_free("minutes") and settings["minutes"] is not None:
        settings.let(steps=None)


def _lengths(settings: Settings) -> None:
    """A run of N minutes has at most N + 2 batch lengths, because each of them is compiled.

    On Multi30k, with 8 s for a compilation, this number makes the most updates in the time that
    training and compilation take together.
    """
    if (minutes := settings["minutes"]) is not None:
        settings.let(lengths=min(settings["lengths"], int(minutes) + 2))


def _sinusoidal_width(settings: Settings) -> None:
    """Sinusoidal positions need an even embed_dim; with an odd one, positions are learned."""
    is_odd = settings["embed_dim"] % 2 == 1 and not settings.is_free("embed_dim")
    if is_odd and settings["positions"].startswith("sinusoidal"):
        settings.let(positions="learned")


def _heads(settings: Settings) -> None:
    """num_heads × head_dim stays in proportion to embed_dim; mostly the two are equal.

    If the user sets embed_dim or head_dim, num_heads follows. Otherwise embed_dim is the smallest
    width, from the preset's on, that num_heads divides.
    """
    before = settings.preset
    groups = 1 if settings.is_free("num_kv_heads") else settings["num_kv_heads"] or 1
    head_dim = None if settings.is_free("head_dim") else settings["head_dim"]
    ratio = before["num_heads"] * _head_width(settings) / before["embed_dim"]
    if not settings.is_free("num_heads"):
        if head_dim is not None:
            settings.let(embed_dim=round(settings["num_heads"] * head_dim / ratio))
    elif head_dim is not None:
        settings.let(num_heads=_nearest(settings["embed_dim"] * ratio / head_dim, groups))
    elif settings.is_free("embed_dim"):
        settings.let(num_heads=_round_up(settings["num_heads"], groups))
    elif before["head_dim"] is None:
        _split_width(settings, groups)
    else:
        settings.let(num_heads=_nearest(settings["embed_dim"] * ratio / before["head_dim"], groups))
    heads = settings["num_heads"] if settings["head_dim"] is None else 1
    of_encoder = settings.get("num_encoder_heads") or settings["num_heads"]
    others = heads if of_encoder == settings["num_heads"] else of_encoder
    settings.let(embed_dim=_round_up(settings["embed_dim"], _unit(settings, lcm(heads, others))))


def _head_width(settings: Settings) -> int:
    """Returns the width of one head in the preset."""
    before = settings.preset
    return before["head_dim"] or before["embed_dim"] // before["num_heads"]


def _split_width(settings: Settings, groups: int) -> None:
    """Chooses the number of heads that divides embed_dim into widths near the preset's.

    If none of these widths is between half and twice the preset's, the heads keep the preset's
    width (head_dim), and num_heads × head_dim is only near embed_dim.

    Args:
        settings: The settings.
        groups: The number that num_heads must be a multiple of.
    """
    width = settings["embed_dim"]
    usual = min(_head_width(settings), width)
    near = range(groups, min(2 * width // usual, _MOST_HEADS) + 1, groups)
    factors = {
        heads: max(width / heads / usual, usual * heads / width)
        for heads in near
        if width % _unit(settings, heads) == 0
    }
    best = min(factors, key=factors.__getitem__, default=None)
    if best is not None and factors[best] <= 2:
        settings.let(num_heads=best)
    else:
        settings.let(head_dim=_round_up(usual, 2))
        settings.let(num_heads=_nearest(width / usual, groups))


def _key_heads(settings: Settings) -> None:
    """num_kv_heads divides num_heads, and each one serves at least as many as in the preset."""
    before, heads = settings.preset, settings["num_heads"]
    if before["num_kv_heads"] is not None and settings.is_free("num_kv_heads"):
        most = max(1, heads * before["num_kv_heads"] // before["num_heads"])
        settings.let(num_kv_heads=max(x for x in range(1, most + 1) if heads % x == 0))


def _chosen_experts(settings: Settings) -> None:
    """A token has at most as many experts as there are."""
    if counts := [num for num in entries(settings["num_experts"]) if num]:
        settings.let(experts_per_token=min(settings["experts_per_token"], *counts))


def _feedforward_widths(settings: Settings) -> None:
    """The widths of the feed-forward layers stay in proportion to embed_dim."""
    for name in ("mlp_dim", "encoder_mlp_dim"):
        if (width := settings.preset.get(name)) is not None:
            scaled = width * settings["embed_dim"] / settings.preset["embed_dim"]
            settings.let(**{name: max(1, round(scaled))})


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
    """embed_dim and hidden_dim stay in proportion; tied embeddings need them to be equal."""
    before, hidden = settings.preset, settings["hidden_dim"]
    if hidden is None:
        return
    ratio = (before["hidden_dim"] or before["embed_dim"]) / before["embed_dim"]
    if settings.is_free("hidden_dim"):
        settings.let(hidden_dim=max(1, round(settings["embed_dim"] * ratio)))
    else:
        settings.let(embed_dim=max(1, round(hidden / ratio)))
    if settings["hidden_dim"] != settings["embed_dim"]:
        settings.let(tie_embeddings=False)


def _source_vocabulary(settings: Settings) -> None:
    """Both sides share one tokenizer, so vocab_size equals source_vocab_size."""
    if settings["source_vocab_size"] is not None:
        settings.let(vocab_size=settings["source_vocab_size"])


def _window(settings: Settings) -> None:
    """window_length is at most max_length, and equals it if positions are learned."""
    window, longest = settings["window_length"], settings["max_length"]
    if window is None:
        return
    learned = settings.get("positions") == "learned"
    if window > longest or (learned and window < longest):
        settings.let(window_length=None, max_length=window)


def _batch(settings: Settings) -> None:
    """batch_size is a multiple of the number of parts into which the mesh divides a batch."""
    if settings["mesh"] is not None:
        settings.let(batch_size=_round_up(settings["batch_size"], settings["mesh"].parts))


def _round_up(value: int, unit: int) -> int:
    """Returns the smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def _nearest(value: float, unit: int) -> int:
    """Returns the positive multiple of `unit` that is nearest to `value`."""
    return max(1, round(value / unit)) * unit


# The rules about the field of each name, in order.
_RULES: dict[str, tuple[Callable[[Settings], None], ...]] = {
    "minutes": (_end,),
    "num_kv_heads": (_sinusoidal_width, _heads, _key_heads, _relative_distances, _parallel_layers),
    "mlp_dim": (_feedforward_widths,),
    "num_experts": (_chosen_experts,),
    "num_labels": (_pooler,),
    "hidden_dim": (_tied_width,),
    "source_vocab_size": (_source_vocabulary,),
    "window_length": (_window, _batch),
    "lengths": (_lengths,),
}
