"""Checkpoint formats: how options correspond to config fields, and tensors to parameters."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np

from jaxformer.hub.generation import OPTIONS
from jaxformer.hub.options import HARMLESS, READ_BY_ALL, REQUIRED, Options, pattern, per_layer
from jaxformer.hub.table import Row
from jaxformer.models.config import RotaryScaling
from jaxformer.models.config.transformer import TransformerConfig

_OF_RUNNING = ("dtype", "dropout")
_READERS = {int: Options.whole, float: Options.number, bool: Options.flag}
Config = TypeVar("Config", bound=TransformerConfig)
Settings = TypeVar("Settings", bound=TransformerConfig | RotaryScaling)


class Field(NamedTuple):
    """A field of jaxformer's config that corresponds to an option in config.json.

    Attributes:
        ours: The name of the config field. Names of fields with the same value are joined by +.
        default: The value that transformers uses if the option is missing. Without a default, the
            option is required.
        choices: {option value: field value}. If None, the option and the field have the same value.
            If several option values give the same field value, export writes the last of them.
        null_is_none: Whether null in the file sets the field to None instead of the default.
    """

    ours: str
    default: Any = REQUIRED
    choices: dict | None = None
    null_is_none: bool = False

    def read(self, options: Options, theirs: str, config: type[TransformerConfig]) -> Any:
        """Returns the value of the field for an option of config.json."""
        if self.null_is_none and options.is_null(theirs):
            return None
        if self.choices is not None:
            return options.choice(theirs, self.choices, self.default)
        annotation = config.__dataclass_fields__[self.ours.split("+")[0]].type
        kind = next(x for x in (annotation, *get_args(annotation)) if x in _READERS)
        return _READERS[kind](options, theirs, self.default)

    def write(self, config: TransformerConfig) -> Any:
        """Returns the value of the option, or None if no option value gives the field's value."""
        value = getattr(config, self.ours.split("+")[0])
        if self.choices is None:
            return value
        return {ours: theirs for theirs, ours in self.choices.items()}.get(value)


def required(**renamed: str) -> dict[str, Field]:
    """Returns a `Field` for each required option; `renamed` maps options to config fields."""
    return {theirs: Field(ours) for theirs, ours in renamed.items()}


USUAL = required(
    vocab_size="vocab_size",
    hidden_size="embed_dim",
    intermediate_size="mlp_dim",
    num_hidden_layers="num_layers",
    num_attention_heads="num_heads",
)


class Part(NamedTuple):
    """A reader and a writer for options that no `Field` can express.

    Attributes:
        read: Function that returns jaxformer's config fields for the options.
        write: Function that returns the options for jaxformer's config.
    """

    read: Callable[[Options], dict]
    write: Callable[[Any], dict] = lambda config: {}


def unused(*names: str, because: str) -> Part:
    """Returns a `Part` that ignores options; `because` says why transformers does not use them."""

    def read(options: Options) -> dict:
        options.ignore(*names, because=because)
        return {}

    return Part(read)


class Constant(NamedTuple):
    """A tensor whose values follow from the config.

    Attributes:
        shape: The shape.
        array: Function that computes the float32 array from the shape.
        is_saved: Whether the class in transformers saves the tensor. If False, the tensor may occur
            only in files of older versions of transformers.
    """

    shape: tuple[int, ...]
    array: Callable[[Any], np.ndarray]
    is_saved: bool = True


@dataclass(frozen=True)
class CheckpointFormat:
    """Description of a family of checkpoints, used for import and export.

    Attributes:
        model_type: The family's model_type in config.json.
        config: The class of jaxformer's config.
        architectures: {class in transformers: {config field: its value in this class}}.
        renamed: {option in config.json: the corresponding `Field`}.
        rows: Function that returns the table of tensors for a config.
        fixed: Config fields that have the same value in the whole family.
        demanded: {option in config.json: the only implemented value}.
        parts: Readers and writers of options that `renamed` cannot express.
        ignored: Patterns for the names of tensors that the class in transformers does not read.
        base: A prefix of tensor names, such as "model."; files of a bare model omit it.
        older: {part of a tensor name in older files: its replacement}.
        repeated: {option: another option that must have the same value}.
        constants: Function that returns the untrained tensors, which transformers computes. If a
            file contains one of these tensors, its values must equal the computed values.
        copies: {tensor name: name of the tensor to which the class ties it}. If a file contains
            both tensors, their values must be equal.
        generation: Default options for generation in the config class of transformers.
        not_implemented: Unsupported options of the class in transformers, besides those that
            `hub.options` lists. Other unknown options are ignored with a warning. If None, every
            unknown option is an error.
    """

    model_type: str
    config: type[TransformerConfig]
    architectures: dict[str, dict]
    renamed: dict[str, Field]
    rows: Callable[[Any], tuple[Row, ...]]
    fixed: dict = field(default_factory=dict)
    demanded: dict = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    ignored: tuple[str, ...] = ()
    base: str = ""
    older: dict = field(default_factory=dict)
    repeated: dict = field(default_factory=dict)
    constants: Callable[[Any], dict[str, Constant]] = lambda config: {}
    copies: dict[str, str] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    not_implemented: tuple[str, ...] | None = None

    def to_config(self, options: Options) -> TransformerConfig:
        """Converts the options of a config.json to jaxformer's config.

        Raises:
            ValueError: An option cannot be read. The message names the option.
        """
        ours = dict(self.fixed)
        for theirs, how in self.renamed.items():
            ours |= dict.fromkeys(how.ours.split("+"), how.read(options, theirs, self.config))
        ours |= self.architectures[self.class_name(options)]
        try:
            for part in self.parts:
                ours |= part.read(options)
        except (ArithmeticError, TypeError) as error:
            raise ValueError(f"{options.file}: {error}") from None
        options.require(self.demanded)
        options.require({x: options.options.get(same) for x, same in self.repeated.items()})
        own = self.not_implemented
        options.nothing_left(HARMLESS | OPTIONS, None if own is None else READ_BY_ALL.union(own))
        try:
            return self.config(**ours).resolved
        except (TypeError, ValueError) as error:
            raise ValueError(f"{options.file}: {error}") from None

    def class_name(self, options: Options) -> str:
        """Returns the class name in the file; if it is missing, the family's first class."""
        named = options.take("architectures", None) or [next(iter(self.architectures))]
        name = named[0] if isinstance(named, list) else named
        if not isinstance(name, str) or name not in self.architectures:
            supported = ", ".join(self.architectures)
            raise ValueError(
                f"{options.file}: architectures is {named!r}; it must be one of {supported}"
            )
        return name

    def to_options(self, config: TransformerConfig) -> dict:
        """Converts jaxformer's config to the options of config.json.

        Raises:
            ValueError: The family cannot represent the model. The message gives the fields that
                differ.
        """
        config, reasons = canonical(config), []
        for name, decided in self.architectures.items():
            changed = [x for x, value in decided.items() if getattr(config, x) != value]
            written = {theirs: how.write(config) for theirs, how in self.renamed.items()}
            written |= self.demanded
            for part in self.parts:
                written |= part.write(replace(config, **decided))
            written |= {"model_type": self.model_type, "architectures": [name]}
            # For T5, `to_config` finds out from the tensor names whether the head is tied.
            tensors = ("shared.weight", *(() if config.tie_embeddings else ("lm_head.weight",)))
            try:
                again = canonical(self.to_config(Options(dict(written), self.model_type, tensors)))
            except ValueError as error:
                reasons.append(str(error))
                continue
            changed += config_differences(config, again)
            if not changed:
                return written
            both = ((x, getattr(config, x), getattr(again, x)) for x in dict.fromkeys(changed))
            differing = (
                f"{x} is {ours!r} in jaxformer, but {theirs!r} in transformers"
                for x, ours, theirs in both
            )
            reasons.append("; ".join(differing))
        raise ValueError(min(reasons, key=len))

    def newer(self, name: str) -> str:
        """Converts the tensor name of an older file to the name in the table."""
        for older, newer in self.older.items():
            name = name.replace(older, newer)
        return name

    def is_ignored(self, name: str) -> bool:
        """Returns whether an import may ignore a tensor."""
        return name in self.copies or any(re.fullmatch(pattern, name) for pattern in self.ignored)


def canonical(config: Config) -> Config:
    """Sets the fields that have no effect to their defaults, and shortens per-layer patterns.

    If two configs differ only in unused fields or in the notation of per-layer patterns, the
    results are equal.
    """
    config = _without_unused(config)
    layers = {name: per_layer(getattr(config, name), config.num_layers) for name in config.patterns}
    layers["rotary_scaling"] = [
        None if base is None or scaling is None else _without_unused(scaling)
        for base, scaling in zip(layers["rotary_base"], layers["rotary_scaling"], strict=True)
    ]
    config = replace(config, **{name: pattern(entries) for name, entries in layers.items()})
    # `pattern` may shorten the lists of layer options, so that more fields have no effect.
    config = _without_unused(config)
    changed: dict[str, Any] = {}
    if all(layers["num_experts"]):
        changed["mlp_dim"] = config.expert_dim
    scale = config.attention_scale
    # pyrefly: ignore[unsupported-operation] (in a resolved config head_dim is not None)
    if scale is not None and math.isclose(scale, config.head_dim**-0.5, rel_tol=1e-9):
        changed["attention_scale"] = None
    return replace(config, **changed)


def _without_unused(settings: Settings) -> Settings:
    """Sets the fields that have no effect to their defaults."""
    values = {x.name: getattr(settings, x.name) for x in fields(settings)}
    unmet = {
        name
        for name, needs in settings.needs.items()
        if not all(need.holds(values) for need in needs)
    }
    return replace(settings, **{x.name: x.default for x in fields(settings) if x.name in unmet})


def config_differences(config: TransformerConfig, other: TransformerConfig) -> list[str]:
    """Returns the names of the fields that change the model and differ in two canonical configs."""
    return [
        x.name
        for x in fields(config)
        if x.name not in _OF_RUNNING and not _same(getattr(config, x.name), getattr(other, x.name))
    ]


def _same(ours: object, theirs: object) -> bool:
    """Returns whether two values are equal; floats may differ by rounding (1e-9)."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return ours == theirs
