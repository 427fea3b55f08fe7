"""What differs from layer to layer in a foreign config: windows and rotary positions.

These are `layer_types` and, of transformers 5, `rope_parameters`, for all or for each type; of
the versions before it, `rope_theta` and `rope_scaling`.
"""

from collections.abc import Callable

from jaxformer.artifacts.options import Options, pattern, spread
from jaxformer.hub.family import Part
from jaxformer.models.config import RotaryScaling

LOCAL, GLOBAL = "sliding_attention", "full_attention"
# theirs → ours; what is not there has the same default on both sides.
_FIELDS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "whole_pairs",
    },
}
_ELSEWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def layers_part(
    default: Callable[[Options, int], str],
    base: float | dict = 10_000.0,
    *,
    window: str = "sliding_window",
    default_window: int | None = None,
    times: int = 1,
) -> Part:
    """Windows in the layers of type LOCAL, and rotary positions.

    default(options, layer): the type of a layer that `layer_types` does not say; base: the default
    of rope_theta, or of each type; window: their option for its length, `times` ours.
    """

    def read(options: Options) -> dict:
        num_layers = options.whole("num_hidden_layers", least=1)
        types = [default(options, layer) for layer in range(num_layers)]
        types = options.list_of("layer_types", num_layers, str, types)
        if not set(types) <= {LOCAL, GLOBAL}:
            raise options.error("layer_types", f"implemented are {LOCAL} and {GLOBAL}")
        length = options.whole(window, default_window)
        if LOCAL in types and length is None:
            raise options.error(window, "layer_types has layers with a window")
        windows = [length // times if x == LOCAL else None for x in types]
        if not isinstance(base, dict):
            return {"window": pattern(windows), **read_rotary(options, base)}
        turns = read_rotary_by_type(options, base)
        names = ("rotary_base", "rotary_scaling")
        each = {name: pattern([turns[x][name] for x in types]) for name in names}
        return {"window": pattern(windows), **each}

    def write(config) -> dict:
        windows = spread(config.window, config.num_layers)
        types = [GLOBAL if x is None else LOCAL for x in windows]
        lengths = [times * x for x in windows if x is not None]
        written = {window: lengths[0] if lengths else default_window, "layer_types": types}
        if not isinstance(base, dict):
            return written | write_rotary(config)
        names = ("rotary_base", "rotary_scaling")
        turns = zip(*(spread(getattr(config, x), config.num_layers) for x in names), strict=True)
        each = {x: written_rotary(*one) for x, one in zip(types, turns, strict=True)}
        unused = {x: written_rotary(y, None) for x, y in base.items() if x not in each}
        return written | {"rope_parameters": each | unused}

    return Part(read, write)


def rotary_part(base: float, fraction: float = 1.0, *, may_be_part: bool = False) -> Part:
    """Rotary positions that are the same in all layers; the two are their defaults. may_be_part:
    their class turns a fraction of a head if it is told so; others take no notice of it."""

    def read(options: Options) -> dict:
        own = read_rotary(options, base, fraction)
        if own["rotary_fraction"] != 1.0 and not (may_be_part or fraction != 1.0):
            raise options.error("rope_parameters", "partial_rotary_factor is not implemented here")
        return own

    return Part(read, write_rotary)


def read_rotary(options: Options, base: float, fraction: float = 1.0) -> dict:
    """rotary_base, rotary_scaling and rotary_fraction; the two are their defaults."""
    options.take("original_max_position_embeddings", None)  # for longrope, refused below
    given = {**options.mapping("rope_scaling"), **options.mapping("rope_parameters")}
    base = options.number("rope_theta", options.number("rotary_emb_base", base))
    share = options.number("partial_rotary_factor", options.number("rotary_pct", fraction))
    return _one(options, given, base, share)


def read_rotary_by_type(options: Options, bases: dict) -> dict:
    """The same for each type of layer; bases: their defaults."""
    given = options.mapping("rope_parameters")
    older = {GLOBAL: options.mapping("rope_scaling")}
    for kind, (*names,) in _OLDER_BASES.items():
        for name in names:
            bases = bases | {kind: options.number(name, bases[kind])}
    found = {}
    for kind, base in bases.items():
        own = given.get(kind, older.get(kind, {}))
        if not isinstance(own, dict):
            raise options.error("rope_parameters", f"{kind} must be an object")
        found[kind] = _one(options, own, base, 1.0)
        if found[kind]["rotary_fraction"] != 1.0:
            raise options.error("rope_parameters", "partial_rotary_factor is not implemented here")
    return found


_OLDER_BASES = {
    LOCAL: ("rope_local_base_freq", "local_rope_theta"),
    GLOBAL: ("rope_theta", "global_rope_theta"),
}


def _one(options: Options, given: dict, base: float, share: float) -> dict:
    kind = given.get("rope_type", given.get("type", "default"))
    base = given.get("rope_theta", base)
    share = given.get("partial_rotary_factor", share)
    numbers = [x for key, x in given.items() if key not in ("rope_type", "type", "truncate")]
    numbers = [base, share, *(x for x in numbers if x is not None)]
    is_number = all(type(x) in (int, float) and abs(x) < 1e300 for x in numbers)
    if not is_number or kind not in ("default", *_FIELDS):
        kinds = ", ".join(_FIELDS)
        raise ValueError(
            f"{options.file}: rope_parameters are {given}; implemented: default, {kinds}"
        )
    known = _FIELDS.get(kind, {})
    unknown = [x for x in given if x not in (*_ELSEWHERE, *known) and given[x] is not None]
    if unknown:
        raise ValueError(
            f"{options.file}: rope_parameters has {unknown[0]}; {kind!r} knows {', '.join(known)}"
        )
    scaling = None
    if kind not in ("default", "dynamic"):  # dynamic: unscaled up to the length trained on
        fields = {ours: given[x] for x, ours in known.items() if given.get(x) is not None}
        if kind in ("yarn", "llama3"):
            fields.setdefault("original_length", options.whole("max_position_embeddings"))
        try:
            scaling = RotaryScaling(kind, **fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{options.file}: rope_parameters: {error}") from None
    return {"rotary_base": float(base), "rotary_scaling": scaling, "rotary_fraction": float(share)}


def write_rotary(config) -> dict:
    own = (config.rotary_base, config.rotary_scaling, config.rotary_fraction)
    return {"rope_parameters": written_rotary(*own)}


def written_rotary(base: float, scaling: RotaryScaling | None, fraction: float = 1.0) -> dict:
    """What `_one` reads."""
    written = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": fraction}
    if scaling is not None:
        fields = _FIELDS[scaling.kind]
        written |= {theirs: getattr(scaling, ours) for theirs, ours in fields.items()}
        written["rope_type"] = scaling.kind
    return {key: value for key, value in written.items() if value is not None}
