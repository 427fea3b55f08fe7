"""Description of a family: how options map to config fields, and tensors to parameters."""

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
    """A field of our config and how one of their options sets it.

    Attributes:
        ours: The field, or several fields of the same value joined by +.
        default: Their class's value if the option is missing. Without it the option is required.
        choices: Our values by theirs; None: the values are the same. If several of their values
            map to one of ours, the export writes the last of them.
        null_is_none: Whether null in the file sets our field to None, and not to the default.
    """

    ours: str
    default: Any = REQUIRED
    choices: dict | None = None
    null_is_none: bool = False

    def read(self, options: Options, theirs: str, config: type[TransformerConfig]) -> Any:
        """Returns our value for their option."""
        if self.null_is_none and options.is_null(theirs):
            return None
        if self.choices is not None:
            return options.choice(theirs, self.choices, self.default)
        annotation = config.__dataclass_fields__[self.ours.split("+")[0]].type
        kind = next(x for x in (annotation, *get_args(annotation)) if x in _READERS)
        return _READERS[kind](options, theirs, self.default)

    def write(self, config: TransformerConfig) -> Any:
        """Returns their value for our field; None if they have none."""
        value = getattr(config, self.ours.split("+")[0])
        if self.choices is None:
            return value
        return {ours: theirs for theirs, ours in self.choices.items()}.get(value)


def required(**renamed: str) -> dict[str, Field]:
    """Returns fields for required options. `renamed` maps each option to our field."""
    return {theirs: Field(ours) for theirs, ours in renamed.items()}


USUAL = required(
    vocab_size="vocab_size",
    hidden_size="embed_dim",
    intermediate_size="mlp_dim",
    num_hidden_layers="num_layers",
    num_attention_heads="num_heads",
)


class Part(NamedTuple):
    """Options that no `Field` can express.

    Attributes:
        read: Returns fields of our config from their options.
        write: Returns their options from our config.
    """

    read: Callable[[Options], dict]
    write: Callable[[Any], dict] = lambda config: {}


def unused(*names: str, because: str) -> Part:
    """Returns the part for options that the class in transformers does not use, or not always."""

    def read(options: Options) -> dict:
        options.ignore(*names, because=because)
        return {}

    return Part(read)


class Constant(NamedTuple):
    """A tensor that a config determines.

    Attributes:
        shape: Its shape.
        array: Returns it as a float32 array from its shape.
        is_saved: Whether the class in transformers saves the tensor. If not, files of older
            versions may still have it.
    """

    shape: tuple[int, ...]
    array: Callable[[Any], np.ndarray]
    is_saved: bool = True


@dataclass(frozen=True)
class Family:
    """A family of checkpoints: a description that works in both directions.

    "Ours" means jaxformer, "theirs" transformers.

    Attributes:
        model_type: Its name in config.json.
        config: The class of our config.
        architectures: Their classes, each with the fields of our config that the class decides.
        renamed: Their options, each with our `Field`.
        rows: Returns the table of tensors for a config.
        fixed: Our fields that have the same value in the whole family.
        demanded: Their options, each with the only implemented value.
        parts: Options that `renamed` cannot express.
        ignored: Patterns of names of tensors that the class in transformers does not read.
        base: The prefix of tensor names that a file of their bare model leaves out.
        older: Parts of tensor names in older files, each with its replacement.
        repeated: Options that repeat another one if a file has both.
        constants: Returns the tensors that their class computes and does not train, by name. An
            import requires that those in the file hold the computed numbers.
        copies: Names of tensors that their class ties to others, and these others. An import
            requires that both are equal.
        generation: Options for generation that their class of configs has by default.
        not_implemented: Options that their class reads and no reader accepts, beside those in
            `hub.options`. An option that no reader knows is an error if it is one of these, and
            otherwise ignored with a warning. None: unknown, so every such option is an error.
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
        """Returns our config.

        Raises:
            ValueError: If an option cannot be read. The message names it.
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
        """Returns the name of the file's class; without one in the file, the family's first."""
        named = options.take("architectures", None) or [next(iter(self.architectures))]
        name = named[0] if isinstance(named, list) else named
        if not isinstance(name, str) or name not in self.architectures:
            supported = ", ".join(self.architectures)
            raise ValueError(f"{options.file}: architectures is {named!r}; supported: {supported}")
        return name

    def to_options(self, config: TransformerConfig) -> dict:
        """Returns the options of config.json for a model of this family.

        Raises:
            ValueError: If the family has no such model. The message names the fields that differ.
        """
        config, reasons = canonical(config), []
        for name, decided in self.architectures.items():
            changed = [x for x, value in decided.items() if getattr(config, x) != value]
            written = {theirs: how.write(config) for theirs, how in self.renamed.items()}
            written |= self.demanded
            for part in self.parts:
                written |= part.write(replace(config, **decided))
            written |= {"model_type": self.model_type, "architectures": [name]}
            # T5's reader learns from them whether the head is tied.
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
            differing = (f"{x} is {ours!r}, there {theirs!r}" for x, ours, theirs in both)
            reasons.append("; ".join(differing))
        raise ValueError(min(reasons, key=len))

    def newer(self, name: str) -> str:
        """Returns the table's name of a tensor with an older name."""
        for older, newer in self.older.items():
            name = name.replace(older, newer)
        return name

    def is_ignored(self, name: str) -> bool:
        """Returns whether a tensor may be left unread."""
        return name in self.copies or any(re.fullmatch(pattern, name) for pattern in self.ignored)


def canonical(config: Config) -> Config:
    """Returns the config with default values in the fields that have no effect.

    Two configs that differ only in such fields, or in how they write a per-layer pattern, describe
    the same function.
    """
    config = _without_unused(config)
    layers = {name: per_layer(getattr(config, name), config.num_layers) for name in config.patterns}
    layers["rotary_scaling"] = [
        None if base is None or scaling is None else _without_unused(scaling)
        for base, scaling in zip(layers["rotary_base"], layers["rotary_scaling"], strict=True)
    ]
    config = replace(config, **{name: pattern(entries) for name, entries in layers.items()})
    config = _without_unused(config)  # once more: a pattern may have had entries of no layer
    changed: dict[str, Any] = {}
    if all(layers["num_experts"]):
        changed["mlp_dim"] = config.expert_dim
    scale = config.attention_scale
    # pyrefly: ignore[unsupported-operation] (in a resolved config head_dim is not None)
    if scale is not None and math.isclose(scale, config.head_dim**-0.5, rel_tol=1e-9):
        changed["attention_scale"] = None
    return replace(config, **changed)


def _without_unused(settings: Settings) -> Settings:
    """Returns the settings with default values in the fields that have no effect."""
    values = {x.name: getattr(settings, x.name) for x in fields(settings)}
    unmet = {
        name
        for name, needs in settings.needs.items()
        if not all(need.holds(values) for need in needs)
    }
    return replace(settings, **{x.name: x.default for x in fields(settings) if x.name in unmet})


def config_differences(config: TransformerConfig, other: TransformerConfig) -> list[str]:
    """Returns the fields that make two canonical configs of one type compute different results."""
    return [
        x.name
        for x in fields(config)
        if x.name not in _OF_RUNNING and not _same(getattr(config, x.name), getattr(other, x.name))
    ]


def _same(ours: object, theirs: object) -> bool:
    """Returns whether two values are equal; floats may differ by a root's rounding."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return ours == theirs
