"""Reader and writer of rotary positions and windows in a config.json.

Both may differ by layer. transformers 5 stores the type of each layer in `layer_types`, and rotary
positions in `rope_parameters`, for all layers or for each type of layer. Earlier
versions use `rope_theta`, `rope_scaling` and, in some families, other names.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxformer.hub.family import Part
from jaxformer.hub.options import REQUIRED, Default, Options, pattern, per_layer
from jaxformer.models.config import DecoderConfig, EncoderConfig, RotaryScaling
from jaxformer.models.config.check import entries
from jaxformer.models.config.transformer import TransformerConfig

LOCAL, GLOBAL = "sliding_attention", "full_attention"
_FACTOR = {"factor": "factor"}
_LENGTH = {"original_max_position_embeddings": "original_length"}
_BANDS = {"low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"}
_YARN = _FACTOR | _LENGTH | {x: x for x in ("beta_fast", "beta_slow", "attention_factor")}
# {kind of scaling: {their key: our field}}. A missing key has the same default on both sides.
_FIELDS = {
    "default": {},
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "llama3": _FACTOR | _LENGTH | _BANDS,
    "yarn": _YARN | {"truncate": "whole_pairs"},
}
# transformers ignores `truncate` inside the parameters of one type of layer.
_FIELDS_BY_TYPE = _FIELDS | {"yarn": _YARN}
_REQUIRED = ("factor", "low_freq_factor", "high_freq_factor")
_ELSEWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Keys that transformers reads for a kind of scaling and that are not implemented here.
_NOT_IMPLEMENTED = {"yarn": ("mscale", "mscale_all_dim")}
_WHOLE_HEADS = "the class rotates whole heads"


class RotaryEntry(Options):
    """Options of one object of rotary parameters.

    Attributes:
        outside: The options of the file.
        name: The option that holds the object.
        fields: The kinds of scaling that the class implements, and the fields of each.
        kind: The kind of scaling.
    """

    def __init__(self, outside: Options, name: str, given: dict, fields: dict[str, dict[str, str]]):
        """Wraps an object; raises ValueError if the class does not implement its kind."""
        super().__init__(given, f"{outside.file}: {name}")
        self.outside, self.name, self.fields = outside, name, fields
        self.kind = given.get("rope_type", given.get("type", "default"))
        if not isinstance(self.kind, str) or self.kind not in fields:
            raise self.error("rope_type", f"it must be one of {', '.join(fields)}")

    def number(self, key: str, default: Default = REQUIRED) -> float | Default:
        """Returns a finite number. null is an error, as in the class."""
        if self.is_null(key):
            raise self.error(key, "it must be a number")
        return super().number(key, default)

    def check_whole_heads(self, option: str) -> None:
        """Raises ValueError if scaled positions are combined with a fraction other than 1.

        For classes that rotate whole heads. With default positions such a class ignores the
        fraction. With scaled ones it fails.

        Args:
            option: The option outside the object that holds the fraction.
        """
        self.outside.ignore(option, because=_WHOLE_HEADS)
        fraction = self.options.get("partial_rotary_factor", self.outside.options.get(option))
        if self.kind != "default" and fraction not in (None, 1.0):
            raise ValueError(
                f"{self.outside.file}: partial_rotary_factor is {fraction!r}; with rope_type "
                f"{self.kind!r} it must be 1.0, since {_WHOLE_HEADS}"
            )

    def scaling(self, length: int | None) -> RotaryScaling | None:
        """Returns the scaling, or None.

        Args:
            length: The original length that the file gives outside the object, which transformers
                prefers; None if there is none.
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
            return None  # dynamic scaling has no effect up to max_position_embeddings
        fields = {ours: given[x] for x, ours in known.items() if x in given}
        fields["kind"] = self.kind
        if uses_length(self.kind):
            longest = self.outside.whole("max_position_embeddings")
            fields["original_length"] = length or fields.get("original_length", longest)
        try:
            return RotaryScaling(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.file}: {error}") from None


def uses_length(kind: str) -> bool:
    """Returns whether a kind of scaling depends on the model's original training length."""
    return "original_max_position_embeddings" in _FIELDS[kind]


class Rotary(NamedTuple):
    """How the class of a family reads rotary positions that are the same in all layers.

    Args:
        base: The default of `base_option`.
        fraction: The default of `fraction_option`; None if the class rotates whole heads.
        base_option: The option outside `rope_parameters` that holds the base.
        fraction_option: The option outside `rope_parameters` that holds the rotated fraction.
        kinds: The kinds of scaling that the class implements.
        usual: The parameters if the file has none; {}: without scaling.
    """

    base: float = 10_000.0
    fraction: float | None = None
    base_option: str = "rope_theta"
    fraction_option: str = "partial_rotary_factor"
    kinds: tuple[str, ...] = tuple(_FIELDS)
    usual: Mapping[str, Any] = MappingProxyType({})

    @property
    def part(self) -> Part:
        """The part that reads and writes these options."""
        return Part(self.read, self.write)

    def read(self, options: Options, types: Sequence[str] = ()) -> dict[str, Any]:
        """Returns rotary_base, rotary_scaling and rotary_fraction, which all `types` share."""
        usual = {"rope_theta": self.base_option, "partial_rotary_factor": self.fraction_option}
        for option, actual in usual.items():
            if option != actual:
                options.ignore(option, because=f"the class reads {actual}")
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
            because = f"{entry.kind} rotary positions do not depend on it"
            options.ignore("original_max_position_embeddings", because=because)
        return {
            "rotary_base": entry.number("rope_theta", options.number(self.base_option, self.base)),
            "rotary_scaling": entry.scaling(length),
            "rotary_fraction": self.read_fraction(options, entry),
        }

    def read_fraction(self, options: Options, entry: RotaryEntry) -> float:
        """Returns the fraction of each head that is rotated."""
        if self.fraction is not None:
            outside = options.number(self.fraction_option, self.fraction)
            return entry.number("partial_rotary_factor", outside)
        entry.check_whole_heads(self.fraction_option)
        return 1.0

    def write(self, config: TransformerConfig, types: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the option `rope_parameters`, which all `types` share."""
        patterns = config.rotary_base, config.rotary_scaling, config.rotary_fraction
        base, scaling, fraction = (entries(x)[0] for x in patterns)
        written = written_rotary(base, scaling, _FIELDS)
        if self.fraction is not None:
            written["partial_rotary_factor"] = fraction
        return {"rope_parameters": written}


class RotaryByType(NamedTuple):
    """How the class of a family reads rotary positions that differ by the type of a layer.

    Args:
        bases: The default base of each type.
        base_options: The option outside `rope_parameters` that holds the base of each type.
        scaled: The types to which `rope_scaling` of earlier versions applies.
    """

    bases: dict[str, float]
    base_options: dict[str, str]
    scaled: tuple[str, ...]

    def read(self, options: Options, types: Sequence[str]) -> dict[str, Any]:
        """Returns the patterns rotary_base and rotary_scaling for layers of these types."""
        given = options.mapping("rope_parameters")
        older = options.mapping("rope_scaling")
        if unknown := [key for key in given if key not in self.bases]:
            names = " and ".join(self.bases)
            raise options.error("rope_parameters", f"its keys must be {names}, not {unknown[0]}")
        because = "the class looks for it in rope_parameters only"
        options.ignore("original_max_position_embeddings", because=because)
        bases, scalings = {}, {}
        for kind, base in self.bases.items():
            parameters = {} if given.get(kind) is None else given[kind]
            if not isinstance(parameters, dict):
                raise options.error("rope_parameters", f"{kind} must be an object")
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
            config: Our config.
            types: The type of each layer. The last layer of a type decides its values.
        """
        layers = zip(types, config.layers, strict=True)
        values = {kind: (base, None) for kind, base in self.bases.items()}
        values |= {kind: (layer.rotary_base, layer.rotary_scaling) for kind, layer in layers}
        written = {kind: written_rotary(*x, _FIELDS_BY_TYPE) for kind, x in values.items()}
        return {"rope_parameters": written}


def written_rotary(base: float | None, scaling: RotaryScaling | None, fields: dict) -> dict:
    """Returns the object that `RotaryEntry` reads."""
    written = {"rope_type": "default", "rope_theta": base}
    if scaling is not None:
        written |= {theirs: getattr(scaling, x) for theirs, x in fields[scaling.kind].items()}
        written["rope_type"] = scaling.kind
    return {key: value for key, value in written.items() if value is not None}


# ---- windows

# Returns the type of each layer if `layer_types` is missing, from the options, the number of layers
# and the window.
TypesOf = Callable[[Options, int, int | None], list[str]]


class Window(NamedTuple):
    """How a class reads and writes the window of its layers of type LOCAL.

    Attributes:
        read: Returns our `window` in positions, or None if the file has no window.
        write: Returns the options for that window, which is None if no layer has one.
    """

    read: Callable[[Options], int | None]
    write: Callable[[int | None], dict[str, Any]]


def usual_window(default: int | None) -> Window:
    """Returns the window of the option `sliding_window`, in which null means no window."""

    def read(options: Options) -> int | None:
        option = "sliding_window"
        return None if options.is_null(option) else options.whole(option, default)

    return Window(read, lambda window: {"sliding_window": window or default})


def every_nth_global(period: int, option: str | None = None) -> TypesOf:
    """Returns `types_of` for classes in which every nth layer is global.

    Args:
        period: The number n, or its default.
        option: The option that holds n; None if the class has no such option.
    """

    def types_of(options: Options, num_layers: int, window: int | None) -> list[str]:
        n = period if option is None else options.whole(option, period, least=1)
        return [LOCAL if (layer + 1) % n else GLOBAL for layer in range(num_layers)]

    return types_of


def layers_part(types_of: TypesOf, rotary: Rotary | RotaryByType, window: Window) -> Part:
    """Returns the part for windows in the layers of type LOCAL, and for rotary positions.

    Args:
        types_of: See `TypesOf`.
        rotary: How the class reads rotary positions.
        window: How the class reads the window.
    """

    def read(options: Options) -> dict:
        num_layers = options.whole("num_hidden_layers", least=1)
        length = window.read(options)
        usual = types_of(options, num_layers, length)
        types = options.list_of("layer_types", num_layers, str, usual)
        if not set(types) <= {LOCAL, GLOBAL}:
            raise options.error("layer_types", f"its entries must be {LOCAL} or {GLOBAL}")
        if LOCAL in types and length is None:
            raise options.error("layer_types", "it has layers with a window, but no window is set")
        windows = pattern([length if x == LOCAL else None for x in types])
        return {"window": windows, **rotary.read(options, types)}

    def write(config: DecoderConfig | EncoderConfig) -> dict:
        windows = per_layer(config.window, config.num_layers)
        types = [GLOBAL if x is None else LOCAL for x in windows]
        written = window.write(next((x for x in windows if x is not None), None))
        return {**written, "layer_types": types, **rotary.write(config, types)}

    return Part(read, write)
