"""Reader and writer of rotary positions and windows in a config.json.

Layers may have different rotary positions and windows. In files of transformers 5, the option
`layer_types` contains the type of each layer: "sliding_attention" (with a window) or
"full_attention". The option `rope_parameters` contains either the rotary parameters of all layers,
or one object for each type of layer. Earlier versions use `rope_theta`, `rope_scaling` and, in some
families, other names.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxformer.hub.checkpoint_format import Part
from jaxformer.hub.options import REQUIRED, Default, Options, pattern, per_layer
from jaxformer.models.config import DecoderConfig, EncoderConfig, RotaryScaling
from jaxformer.models.config.check import entries
from jaxformer.models.config.transformer import TransformerConfig

LOCAL, GLOBAL = "sliding_attention", "full_attention"
_FACTOR = {"factor": "factor"}
_LENGTH = {"original_max_position_embeddings": "original_length"}
_BANDS = {"low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"}
_YARN = _FACTOR | _LENGTH | {x: x for x in ("beta_fast", "beta_slow", "attention_factor")}
# {type of scaling: {key in config.json: field of `RotaryScaling`}}. The fields have the same
# defaults as the keys in transformers.
_FIELDS = {
    "default": {},
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "llama3": _FACTOR | _LENGTH | _BANDS,
    "yarn": _YARN | {"truncate": "whole_pairs"},
}
# If each type of layer has its own rotary parameters, transformers ignores `truncate`.
_FIELDS_BY_TYPE = _FIELDS | {"yarn": _YARN}
_REQUIRED = ("factor", "low_freq_factor", "high_freq_factor")
_ELSEWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# {type of scaling: keys that transformers reads and jaxformer does not implement}.
_NOT_IMPLEMENTED = {"yarn": ("mscale", "mscale_all_dim")}
_WHOLE_HEADS = "the class in transformers rotates all features of each head"


class RotaryEntry(Options):
    """Options in a JSON object with rotary parameters, such as the value of `rope_parameters`.

    Attributes:
        outside: The options of the whole config.json.
        name: The name of the option whose value is this object, such as "rope_parameters".
        fields: {type of rotary scaling: {key in the JSON object: field of `RotaryScaling`}}, for
            the types that the class in transformers implements.
        kind: The type of rotary scaling that the object specifies; "default" means no scaling.
    """

    def __init__(self, outside: Options, name: str, given: dict, fields: dict[str, dict[str, str]]):
        """Stores the JSON object; raises ValueError if `fields` lacks its type of scaling."""
        super().__init__(given, f"{outside.file}: {name}")
        self.outside, self.name, self.fields = outside, name, fields
        self.kind = given.get("rope_type", given.get("type", "default"))
        if not isinstance(self.kind, str) or self.kind not in fields:
            raise self.error("rope_type", f"it must be one of {', '.join(fields)}")

    def number(self, key: str, default: Default = REQUIRED) -> float | Default:
        """Returns a numeric option as a float; as in transformers, null is an error."""
        if self.is_null(key):
            raise self.error(key, "it must be a number")
        return super().number(key, default)

    def check_whole_heads(self, option: str) -> None:
        """Raises ValueError if scaled positions are combined with a rotated fraction other than 1.

        Call this for classes of transformers that rotate all features of each head. Such a class
        ignores the rotated fraction if positions are not scaled. If positions are scaled, the class
        fails for a fraction other than 1.

        Args:
            option: The option in config.json for the rotated fraction, used if the JSON object does
                not set the fraction.
        """
        self.outside.ignore(option, because=_WHOLE_HEADS)
        fraction = self.options.get("partial_rotary_factor", self.outside.options.get(option))
        if self.kind != "default" and fraction not in (None, 1.0):
            raise ValueError(
                f"{self.outside.file}: partial_rotary_factor is {fraction!r}; with rope_type "
                f"{self.kind!r} it must be 1.0, since {_WHOLE_HEADS}"
            )

    def scaling(self, length: int | None) -> RotaryScaling | None:
        """Returns the rotary scaling; None if positions are not scaled.

        Args:
            length: The original training length from config.json, which in transformers takes
                precedence over the length in the JSON object. None if config.json does not set it.
        """
        known = self.fields[self.kind]
        given = {key: value for key, value in self.options.items() if value is not None}
        others = [x for x in given if x not in (*_ELSEWHERE, *known)]
        closed = _NOT_IMPLEMENTED.get(self.kind, ())
        if read := [x for x in others if x in closed or isinstance(given[x], dict | list)]:
            raise self.error(read[0], f"it is not implemented for rope_type {self.kind!r}")
        self.outside.unread += [f"{self.name}.{x}" for x in others]
        for key in known:
            if key in _REQUIRED or (key in given and key != "truncate"):
                self.number(key)
        if self.kind in ("default", "dynamic"):
            # Dynamic scaling only affects texts longer than max_position_embeddings.
            return None
        fields = {ours: given[x] for x, ours in known.items() if x in given}
        fields["kind"] = self.kind
        if uses_length(self.kind):
            # Unlike `options`, `taken` includes the default of the class in transformers.
            longest = self.outside.taken["max_position_embeddings"]
            fields["original_length"] = length or fields.get("original_length", longest)
        try:
            return RotaryScaling(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.file}: {error}") from None


def uses_length(kind: str) -> bool:
    """Returns whether a type of rotary scaling depends on the model's original training length."""
    return "original_max_position_embeddings" in _FIELDS[kind]


class Rotary(NamedTuple):
    """Reader and writer of rotary positions that are equal in all layers.

    Args:
        base: The rotary base if config.json does not set it.
        fraction: The rotated fraction of each head if config.json does not set it; None if the
            class in transformers rotates all features of each head.
        base_option: The option in config.json for the rotary base, used if `rope_parameters` does
            not set the base.
        fraction_option: The option in config.json for the rotated fraction, used if
            `rope_parameters` does not set the fraction.
        kinds: The types of rotary scaling that the class in transformers implements.
        usual: The value of `rope_parameters` if config.json does not set it; {} means no scaling.
    """

    base: float = 10_000.0
    fraction: float | None = None
    base_option: str = "rope_theta"
    fraction_option: str = "partial_rotary_factor"
    kinds: tuple[str, ...] = tuple(_FIELDS)
    usual: Mapping[str, Any] = MappingProxyType({})

    @property
    def part(self) -> Part:
        """The methods `read` and `write` as a `Part` of a `CheckpointFormat`."""
        return Part(self.read, self.write)

    def read(self, options: Options, types: Sequence[str] = ()) -> dict[str, Any]:
        """Returns rotary_base, rotary_scaling and rotary_fraction, which apply to all layers."""
        usual = {"rope_theta": self.base_option, "partial_rotary_factor": self.fraction_option}
        for option, actual in usual.items():
            if option != actual:
                options.ignore(option, because=f"transformers reads {actual} instead")
        name = "rope_scaling" if options.mapping("rope_scaling") else "rope_parameters"
        if name == "rope_scaling":
            options.ignore("rope_parameters", because="rope_scaling replaces it")
        fields = {kind: _FIELDS[kind] for kind in self.kinds}
        given = options.mapping(name) if name in options else dict(self.usual)
        entry = RotaryEntry(options, name, given, fields)
        if uses_length(entry.kind):
            length = options.whole("original_max_position_embeddings", None, least=1)
        else:
            length = None
            because = (
                f"rotary scaling of type {entry.kind} does not depend on this option; remove this "
                "option"
            )
            options.ignore("original_max_position_embeddings", because=because)
        return {
            "rotary_base": entry.number("rope_theta", options.number(self.base_option, self.base)),
            "rotary_scaling": entry.scaling(length),
            "rotary_fraction": self.read_fraction(options, entry),
        }

    def read_fraction(self, options: Options, entry: RotaryEntry) -> float:
        """Returns which fraction of each head's features is rotated."""
        if self.fraction is not None:
            outside = options.number(self.fraction_option, self.fraction)
            return entry.number("partial_rotary_factor", outside)
        entry.check_whole_heads(self.fraction_option)
        return 1.0

    def write(self, config: TransformerConfig, types: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the option `rope_parameters`, which applies to all layers."""
        patterns = config.rotary_base, config.rotary_scaling, config.rotary_fraction
        base, scaling, fraction = (entries(x)[0] for x in patterns)
        written = written_rotary(base, scaling, _FIELDS)
        if self.fraction is not None:
            written["partial_rotary_factor"] = fraction
        return {"rope_parameters": written}


class RotaryByType(NamedTuple):
    """Reader and writer of rotary positions that depend on the type of a layer.

    Args:
        bases: {type of layer: the rotary base if config.json does not set it}.
        base_options: {type of layer: the option in config.json for the rotary base, used if
            `rope_parameters` does not set the base}.
        scaled: The types of layers to which the older option `rope_scaling` applies.
    """

    bases: dict[str, float]
    base_options: dict[str, str]
    scaled: tuple[str, ...]

    def read(self, options: Options, types: Sequence[str]) -> dict[str, Any]:
        """Returns rotary_base and rotary_scaling for layers of the types `types`."""
        given = options.mapping("rope_parameters")
        older = options.mapping("rope_scaling")
        if unknown := [key for key in given if key not in self.bases]:
            names = " and ".join(self.bases)
            raise options.error("rope_parameters", f"its keys must be {names}, not {unknown[0]}")
        because = "the class in transformers reads this option only in rope_parameters"
        options.ignore("original_max_position_embeddings", because=because)
        bases, scalings = {}, {}
        for kind, base in self.bases.items():
            parameters = {} if given.get(kind) is None else given[kind]
            if not isinstance(parameters, dict):
                raise options.error("rope_parameters", f"its entry {kind} must be a JSON object")
            parameters = parameters | (older if kind in self.scaled else {})
            entry = RotaryEntry(options, f"rope_parameters of {kind}", parameters, _FIELDS_BY_TYPE)
            entry.check_whole_heads("partial_rotary_factor")
            outside = options.number(self.base_options[kind], base)
            bases[kind], scalings[kind] = entry.number("rope_theta", outside), entry.scaling(None)
        by_type = {"rotary_base": bases, "rotary_scaling": scalings}
        return {name: pattern([values[x] for x in types]) for name, values in by_type.items()}

    def write(self, config: TransformerConfig, types: Sequence[str]) -> dict[str, Any]:
        """Returns the option `rope_parameters`.

        Args:
            config: jaxformer's config.
            types: The type of each layer. All layers of a type should have equal rotary parameters;
                otherwise, the parameters of the type's last layer are written.
        """
        layers = zip(types, config.layers, strict=True)
        values = {kind: (base, None) for kind, base in self.bases.items()}
        values |= {kind: (layer.rotary_base, layer.rotary_scaling) for kind, layer in layers}
        written = {kind: written_rotary(*x, _FIELDS_BY_TYPE) for kind, x in values.items()}
        return {"rope_parameters": written}


def written_rotary(base: float | None, scaling: RotaryScaling | None, fields: dict) -> dict:
    """Returns the rotary parameters of a layer as the JSON object that `RotaryEntry` reads."""
    written = {"rope_type": "default", "rope_theta": base}
    if scaling is not None:
        written |= {theirs: getattr(scaling, x) for theirs, x in fields[scaling.kind].items()}
        written["rope_type"] = scaling.kind
    return {key: value for key, value in written.items() if value is not None}


# ---- windows

# A function (options, number of layers, window) → type of each layer, for files without the option
# `layer_types`.
TypesOf = Callable[[Options, int, int | None], list[str]]


class Window(NamedTuple):
    """Reader and writer of the window, which all layers of type LOCAL share.

    Attributes:
        read: Function that returns the size of the window in tokens, or None if the file has no
            window.
        write: Function that converts this size, or None if no layer has a window, to the options of
            config.json.
    """

    read: Callable[[Options], int | None]
    write: Callable[[int | None], dict[str, Any]]


def usual_window(default: int | None) -> Window:
    """Returns a `Window` that reads and writes the option `sliding_window`; null means no window.

    Args:
        default: The window if the option is missing.
    """

    def read(options: Options) -> int | None:
        option = "sliding_window"
        return None if options.is_null(option) else options.whole(option, default)

    return Window(read, lambda window: {"sliding_window": window or default})


def every_nth_global(period: int, option: str | None = None) -> TypesOf:
    """Returns a `TypesOf` for a class in which layers n, 2n, 3n, … (counted from 1) are global.

    Args:
        period: The distance n between global layers if config.json does not set `option`.
        option: The name of the option that contains this distance; None if the class has no such
            option.
    """

    def list_layer_types(options: Options, num_layers: int, window: int | None) -> list[str]:
        n = period if option is None else options.whole(option, period, least=1)
        return [LOCAL if (layer + 1) % n else GLOBAL for layer in range(num_layers)]

    return list_layer_types


def layers_part(list_layer_types: TypesOf, rotary: Rotary | RotaryByType, window: Window) -> Part:
    """Returns the `Part` of a `CheckpointFormat` for windows and rotary positions.

    Args:
        list_layer_types: Function that returns the type of each layer; see `TypesOf`.
        rotary: Reader and writer of rotary positions.
        window: Reader and writer of the window.
    """

    def read(options: Options) -> dict:
        num_layers = options.whole("num_hidden_layers", least=1)
        length = window.read(options)
        usual = list_layer_types(options, num_layers, length)
        types = options.take_list("layer_types", num_layers, str, usual)
        if not set(types) <= {LOCAL, GLOBAL}:
            raise options.error("layer_types", f"its entries must be {LOCAL} or {GLOBAL}")
        if LOCAL in types and length is None:
            raise options.error(
                "layer_types", "some layers have a sliding window, but sliding_window is not set"
            )
        windows = pattern([length if x == LOCAL else None for x in types])
        return {"window": windows, **rotary.read(options, types)}

    def write(config: DecoderConfig | EncoderConfig) -> dict:
        windows = per_layer(config.window, config.num_layers)
        types = [GLOBAL if x is None else LOCAL for x in windows]
        written = window.write(next((x for x in windows if x is not None), None))
        return {**written, "layer_types": types, **rotary.write(config, types)}

    return Part(read, write)
