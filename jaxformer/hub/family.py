"""What a family is: which options are which fields, and which tensors are which parameters."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, get_args

from jaxformer.artifacts.options import HARMLESS, Options
from jaxformer.artifacts.table import Row

_REQUIRED = object()
_READERS = {int: Options.whole, float: Options.number, bool: Options.flag}


class Field(NamedTuple):
    """A field of our config, or several of one value with + between them, and how an option of
    theirs says it. default: of their classes; without one the option must be there. choices: what
    their values stand for, if not for themselves; on export the last of several is written."""

    ours: str
    default: Any = _REQUIRED
    choices: dict | None = None

    def read(self, options: Options, theirs: str, config: type):
        default = () if self.default is _REQUIRED else (self.default,)
        if self.choices is not None:
            return options.choice(theirs, self.choices, *default)
        annotation = config.__dataclass_fields__[self.ours.split("+")[0]].type
        kind = next(x for x in (annotation, *get_args(annotation)) if x in _READERS)
        return _READERS[kind](options, theirs, *default)

    def write(self, config):
        value = getattr(config, self.ours.split("+")[0])
        if self.choices is None:
            return value
        return {ours: theirs for theirs, ours in self.choices.items()}.get(value)


def required(**renamed: str) -> dict[str, Field]:
    """Options that must be there, and our fields."""
    return {theirs: Field(ours) for theirs, ours in renamed.items()}


USUAL = required(
    vocab_size="vocab_size",
    hidden_size="embed_dim",
    intermediate_size="mlp_dim",
    num_hidden_layers="num_layers",
    num_attention_heads="num_heads",
)


class Part(NamedTuple):
    """What no `Field` says: read(options) gives fields of ours, write(config) options of theirs."""

    read: Callable[[Options], dict]
    write: Callable[[Any], dict]


@dataclass(frozen=True)
class Family:
    """A table and two functions, read in both directions.

    model_type: its name in config.json. config: the class of our config. architectures: {a class of
    theirs: the fields of our config that it decides}. renamed: {their option: our `Field`}. rows:
    the table of tensors of a config. fixed: our fields that are the same in all of the family.
    demanded: their options, with the only value that is implemented. parts: what is not as simple.
    ignored: patterns of other tensors, that hold nothing learnt, or what others hold too. base:
    what the names of tensors begin with that a file of their bare model leaves out; older: parts of
    those names, as older files have them, → as the table has them. repeated: {an option: the one
    that it repeats, where a file has both}.
    """

    model_type: str
    config: type
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

    def to_config(self, options: Options):
        """Our config; ValueError names the option that it cannot be made of."""
        own = dict(self.fixed)
        for theirs, how in self.renamed.items():
            own |= dict.fromkeys(how.ours.split("+"), how.read(options, theirs, self.config))
        own |= self.architecture(options)
        try:
            for part in self.parts:
                own |= part.read(options)
        except (ArithmeticError, TypeError) as error:
            raise ValueError(f"{options.file}: {error}") from None
        options.require(self.demanded)
        options.require({x: options.options.get(same) for x, same in self.repeated.items()})
        options.nothing_left(HARMLESS)
        try:
            return self.config(**own).resolved
        except (TypeError, ValueError) as error:
            raise ValueError(f"{options.file}: {error}") from None

    def architecture(self, options: Options) -> dict:
        """What the class that the file names decides; without a name, the first of ours."""
        return self.architectures[self.class_name(options)]

    def class_name(self, options: Options) -> str:
        """The name of that class."""
        named = options.take("architectures", None) or [next(iter(self.architectures))]
        name = named[0] if isinstance(named, list) else named
        if not isinstance(name, str) or name not in self.architectures:
            supported = ", ".join(self.architectures)
            raise ValueError(f"{options.file}: architectures is {named!r}; supported: {supported}")
        return name

    def to_options(self, config) -> dict:
        """Their options. ValueError names the fields in which no model of this family can be as
        this config says."""
        differing = []
        for name, decided in self.architectures.items():
            changed = [x for x, value in decided.items() if getattr(config, x) != value]
            written = {theirs: how.write(config) for theirs, how in self.renamed.items()}
            written |= self.demanded
            for part in self.parts:
                written |= part.write(replace(config, **decided))
            written |= {"model_type": self.model_type, "architectures": [name]}
            tensors = () if config.tie_embeddings else ("lm_head.weight",)
            try:
                again = self.to_config(Options(dict(written), self.model_type, tensors))
            except ValueError as error:
                differing.append(str(error))
                continue
            changed += [x.name for x in fields(config) if _differs(config, again, x.name)]
            if not changed:
                return written
            both = ((x, getattr(config, x), getattr(again, x)) for x in dict.fromkeys(changed))
            said = "; ".join(f"{x} is {ours!r}, there {theirs!r}" for x, ours, theirs in both)
            differing.append(said)
        raise ValueError(min(differing, key=len))

    def newer(self, name: str) -> str:
        """The name of a tensor as the table has it."""
        for older, newer in self.older.items():
            name = name.replace(older, newer)
        return name

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


def _differs(config, other, name: str) -> bool:
    of_running = ("dtype", "dropout")
    return name not in of_running and getattr(config, name) != getattr(other, name)
