"""Adapts a preset to the user's values by changing dependent sizes and conflicting values."""

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from itertools import chain
from math import lcm
from typing import Any

from jaxformer.models.config.check import entries
from jaxformer.training.config import LEARNING_RATES, OptimizerConfig, TrainingConfig
from jaxformer.training.own_names import OwnNames

# Largest number of heads that `_split_width` tries, so that a mistyped width fails quickly.
_MOST_HEADS = 4096


class Settings(dict[str, Any]):
    """Values of the fields of a model config and a training config, by field name."""

    def __init__(self, values: dict[str, Any], given: Collection[str], preset: dict[str, Any]):
        """Stores the fields.

        Args:
            values: The values by field name.
            given: The names of the fields that must not change.
            preset: The preset's model config, by field name.
        """
        super().__init__(values)
        self.given, self.preset = given, preset

    def is_free(self, name: str) -> bool:
        """Returns whether the value of the field comes from the preset and may be changed."""
        return name not in self.given

    def let(self, **values: Any) -> None:
        """Sets only the first field in `values` that may be changed, if there is one."""
        if (name := next(filter(self.is_free, values), None)) is not None:
            self[name] = values[name]


def fit_preset(
    training: TrainingConfig, values: dict[str, Any], model_is_fixed: bool = False
) -> TrainingConfig:
    """Applies the user's values to a preset, and adapts the preset's other values.

    The preset's other sizes are computed from the user's sizes. Widths stay in proportion to
    `embed_dim`, and heads keep their width. Other values of the preset change only if they conflict
    with the user's values.

    Args:
        training: The preset.
        values: The user's values by field name, including the fields of `training.own`. The fields
            of `training.execution`, `training.lora` and `training.optimizer` are ignored, except
            that without a `learning_rate`, `optimizer` sets the optimizer and its learning rate.
        model_is_fixed: Whether the model comes from a checkpoint. The fields of such a model must
            not change.

    Raises:
        ValueError: A user's value is not accepted, or two of the user's values conflict.
    """
    model = training.model
    own = {name: x for name, x in values.items() if name in OwnNames.__dataclass_fields__}
    training = replace(training, own=replace(training.own, **own))
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
    """Returns the preset's settings for the user's optimizer, with a suitable learning rate.

    If neither the user nor the preset sets a learning rate, the optimizer's default is used. If
    only the preset sets a learning rate, that rate is multiplied by the ratio of the two
    optimizers' default learning rates.
    """
    config, name = preset.optimizer, values.get("optimizer")
    if name == config.optimizer or name not in LEARNING_RATES or "learning_rate" in values:
        return config
    if config.learning_rate is None:
        return replace(config, optimizer=name)
    rate = config.learning_rate * LEARNING_RATES[name] / LEARNING_RATES[config.optimizer]
    return replace(config, optimizer=name, learning_rate=float(f"{rate:.2g}"))


def _own_parts(settings: Settings) -> None:
    """Removes the parts of the config that user-defined functions replace."""
    for name, value in settings["own"].unused.items():
        if name in settings:
            settings.let(**{name: value})


def _pooler(settings: Settings) -> None:
    """Adds the pooler if `num_labels` is set, because classification requires a pooler."""
    if settings["num_labels"]:
        settings.let(pooler=True)


def _end(settings: Settings) -> None:
    """Removes the preset's step limit if the user sets a time limit."""
    if not settings.is_free("max_minutes") and settings["max_minutes"] is not None:
        settings.let(steps=None)


def _lengths(settings: Settings) -> None:
    """Limits `lengths`, the number of batch lengths, to N + 2 for a run of N minutes.

    Each batch length needs a compilation. On Multi30k, with 8 s per compilation, this limit gives
    the most updates for the total time of training and compilation.
    """
    if (minutes := settings["max_minutes"]) is not None:
        settings.let(lengths=min(settings["lengths"], int(minutes) + 2))


def _sinusoidal_width(settings: Settings) -> None:
    """Uses learned positions if embed_dim is odd, as sinusoidal positions need an even size."""
    is_odd = settings["embed_dim"] % 2 == 1 and not settings.is_free("embed_dim")
    if is_odd and settings["positions"].startswith("sinusoidal"):
        settings.let(positions="learned")


def _heads(settings: Settings) -> None:
    """Keeps num_heads × head_dim in proportion to embed_dim (usually equal to embed_dim).

    If the user sets embed_dim or head_dim, but not num_heads, num_heads is computed from these
    sizes. Unless the user sets embed_dim, embed_dim is computed from num_heads and head_dim if the
    user sets both, and then rounded up to a multiple of the number that `_unit` returns.
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
    for_encoder = settings.get("num_encoder_heads") or settings["num_heads"]
    others = heads if for_encoder == settings["num_heads"] else for_encoder
    settings.let(embed_dim=_round_up(settings["embed_dim"], _unit(settings, lcm(heads, others))))


def _head_width(settings: Settings) -> int:
    """Returns the width of one head in the preset."""
    before = settings.preset
    return before["head_dim"] or before["embed_dim"] // before["num_heads"]


def _split_width(settings: Settings, groups: int) -> None:
    """Chooses num_heads so that heads are about as wide as in the preset.

    If no number of heads gives a width between half and twice the preset's width, head_dim is the
    preset's width. num_heads × head_dim is then only approximately embed_dim.

    Args:
        settings: The settings.
        groups: A number by which num_heads must be divisible.
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
    """Chooses num_kv_heads as a divisor of num_heads.

    Each key head is used by at least as many query heads as in the preset.
    """
    before, heads = settings.preset, settings["num_heads"]
    if before["num_kv_heads"] is not None and settings.is_free("num_kv_heads"):
        most = max(1, heads * before["num_kv_heads"] // before["num_heads"])
        settings.let(num_kv_heads=max(x for x in range(1, most + 1) if heads % x == 0))


def _chosen_experts(settings: Settings) -> None:
    """Limits the number of experts per token to the number of experts."""
    if counts := [num for num in entries(settings["num_experts"]) if num]:
        settings.let(experts_per_token=min(settings["experts_per_token"], *counts))


def _feedforward_widths(settings: Settings) -> None:
    """Keeps the widths of the feed-forward layers in proportion to embed_dim."""
    for name in ("mlp_dim", "encoder_mlp_dim"):
        if (width := settings.preset.get(name)) is not None:
            scaled = width * settings["embed_dim"] / settings.preset["embed_dim"]
            settings.let(**{name: max(1, round(scaled))})


def _unit(settings: Settings, heads: int) -> int:
    """Returns the number by which the embed_dim of a model with `heads` heads must be divisible."""
    positions = settings["positions"]
    if positions == "rotary":
        return 2 * heads
    return lcm(2, heads) if positions.startswith("sinusoidal") else heads


def _relative_distances(settings: Settings) -> None:
    """Keeps relative_distance greater than half of relative_buckets."""
    distance, buckets = settings["relative_distance"], settings["relative_buckets"]
    if distance <= buckets // 2:
        settings.let(relative_distance=buckets, relative_buckets=max(4, distance))


def _parallel_layers(settings: Settings) -> None:
    """Resolves conflicts between parallel_block, norm_position and residual.

    Parallel sub-layers require pre-norm and residual connections.
    """
    if settings["norm_position"] != "pre" or not settings["residual"]:
        settings.let(parallel_block="none")
    if settings["parallel_block"] != "none":
        settings.let(norm_position="pre")
        settings.let(residual=True)


def _tied_width(settings: Settings) -> None:
    """Scales embed_dim and hidden_dim by one factor, and unties embeddings if the two differ."""
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
    """Sets vocab_size and source_vocab_size to one value, because both sides share a tokenizer."""
    if settings["source_vocab_size"] is not None:
        settings.let(vocab_size=settings["source_vocab_size"])


def _window(settings: Settings) -> None:
    """Makes both lengths equal if window_length exceeds max_length or positions are learned."""
    window, longest = settings["window_length"], settings["max_length"]
    if window is None:
        return
    learned = settings.get("positions") == "learned"
    if window > longest or (learned and window < longest):
        settings.let(window_length=None, max_length=window)


def _batch(settings: Settings) -> None:
    """Makes batch_size a multiple of the number of shards into which the mesh splits a batch."""
    if settings["mesh"] is not None:
        settings.let(batch_size=_round_up(settings["batch_size"], settings["mesh"].parts))


def _round_up(value: int, unit: int) -> int:
    """Returns the smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


def _nearest(value: float, unit: int) -> int:
    """Returns the positive multiple of `unit` nearest to `value`."""
    return max(1, round(value / unit)) * unit


# {config field: rules}. `fit_preset` applies the rules of all fields that the config has, in this
# order.
_RULES: dict[str, tuple[Callable[[Settings], None], ...]] = {
    "own": (_own_parts,),
    "max_minutes": (_end,),
    "num_kv_heads": (_sinusoidal_width, _heads, _key_heads, _relative_distances, _parallel_layers),
    "mlp_dim": (_feedforward_widths,),
    "num_experts": (_chosen_experts,),
    "num_labels": (_pooler,),
    "hidden_dim": (_tied_width,),
    "source_vocab_size": (_source_vocabulary,),
    "window_length": (_window, _batch),
    "lengths": (_lengths,),
}
