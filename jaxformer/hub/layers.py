"""Options of a config.json that differ by layer: windows and rotary positions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxformer.hub.family import Part
from jaxformer.hub.options import Options, pattern, per_layer
from jaxformer.hub.rotary import GLOBAL, LOCAL, Rotary, RotaryByType
from jaxformer.models.config import DecoderConfig, EncoderConfig


def window_of(option: str, default: int | None) -> Callable[[Options], int | None]:
    """Returns a reader of the window's length, for classes in which null means no window."""

    def read(options: Options) -> int | None:
        return None if options.is_null(option) else options.whole(option, default)

    return read


def read_layer_types(
    options: Options, usual: Sequence[str], names: Mapping[str, str]
) -> dict[str, Any]:
    """Reads which sub-layer of each layer reads other tokens.

    Args:
        options: The options of the file.
        usual: The type of each layer if `layer_types` is missing.
        names: Our name of each of the class's types.
    """
    types = options.list_of("layer_types", len(usual), str, list(usual))
    if not set(types) <= names.keys():
        raise options.error("layer_types", f"its entries must be {' or '.join(names)}")
    return {"layer_types": pattern([names[x] for x in types])}


def write_layer_types(config: DecoderConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the option that `read_layer_types` reads. Types without a name are unchanged."""
    of_ours = {ours: theirs for theirs, ours in names.items()}
    types = per_layer(config.layer_types, config.num_layers)
    return {"layer_types": [of_ours.get(x, x) for x in types]}


def layers_part(
    types_of: Callable[[Options, int, int | None], list[str]],
    rotary: Rotary | RotaryByType,
    read_window: Callable[[Options], int | None],
    write_window: Callable[[int | None], dict],
) -> Part:
    """Returns the part for windows in the layers of type LOCAL, and for rotary positions.

    Args:
        types_of: Returns the type of each layer if `layer_types` is missing, from the options, the
            number of layers and the window.
        rotary: How the class reads rotary positions.
        read_window: Returns our `window` of the LOCAL layers in positions, or None if the file has
            no window.
        write_window: Returns the options for that window.
    """

    def read(options: Options) -> dict:
        num_layers = options.whole("num_hidden_layers", least=1)
        window = read_window(options)
        types = types_of(options, num_layers, window)
        types = options.list_of("layer_types", num_layers, str, types)
        if not set(types) <= {LOCAL, GLOBAL}:
            raise options.error("layer_types", f"its entries must be {LOCAL} or {GLOBAL}")
        if LOCAL in types and window is None:
            raise options.error("layer_types", "it has layers with a window, but no window is set")
        windows = pattern([window if x == LOCAL else None for x in types])
        return {"window": windows, **rotary.read(options, types)}

    def write(config: DecoderConfig | EncoderConfig) -> dict:
        windows = per_layer(config.window, config.num_layers)
        types = [GLOBAL if x is None else LOCAL for x in windows]
        written = write_window(next((x for x in windows if x is not None), None))
        return {**written, "layer_types": types, **rotary.write(config, types)}

    return Part(read, write)
