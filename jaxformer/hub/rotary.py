"""Rotary positions of a foreign config: `rope_parameters` of transformers 5, or `rope_theta` and
`rope_scaling` of the versions before it."""

from jaxformer.hub.family import Part
from jaxformer.hub.options import Options, pattern
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


def read_rotary(options: Options, base: float, fraction: float = 1.0) -> dict:
    """rotary_base, rotary_scaling and rotary_fraction; the two are their defaults."""
    options.take("original_max_position_embeddings", None)  # for longrope, refused below
    given = {**options.mapping("rope_scaling"), **options.mapping("rope_parameters")}
    base = options.number("rope_theta", options.number("rotary_emb_base", base))
    share = options.number("partial_rotary_factor", options.number("rotary_pct", fraction))
    return _one(options, given, base, share)


def read_rotary_by_kind(options: Options, bases: dict) -> dict:
    """{kind of layer: (rotary_base, rotary_scaling)}; bases: their defaults."""
    given = options.mapping("rope_parameters")
    found = {}
    for kind, base in bases.items():
        own = given.get(kind) or {}
        if not isinstance(own, dict):
            raise options.error("rope_parameters", f"{kind} must be an object")
        one = _one(options, own, base, 1.0)
        if one["rotary_fraction"] != 1.0:
            raise options.error("rope_parameters", "partial_rotary_factor is not implemented here")
        found[kind] = (one["rotary_base"], one["rotary_scaling"])
    return found


def rotary_part(base: float, fraction: float = 1.0) -> Part:
    """Rotary positions that are the same in all layers; the two are their defaults."""

    def write(config):
        own = write_rotary(config.rotary_base, config.rotary_scaling, config.rotary_fraction)
        return {"rope_parameters": own}

    return Part(lambda options: read_rotary(options, base, fraction), write)


def patterns(settings: list) -> dict:
    """window, rotary_base and rotary_scaling of an entry of the three for each layer."""
    names = ("window", "rotary_base", "rotary_scaling")
    return {name: pattern([one[i] for one in settings]) for i, name in enumerate(names)}


def _one(options: Options, given: dict, base: float, share: float) -> dict:
    kind = given.get("rope_type", given.get("type", "default"))
    base = given.get("rope_theta", base)
    share = given.get("partial_rotary_factor", share)
    numbers = [x for key, x in given.items() if key not in ("rope_type", "type", "truncate")]
    is_number = all(type(x) in (int, float) for x in (base, share, *numbers) if x is not None)
    if not is_number or kind not in ("default", *_FIELDS):
        accepted = ", ".join(_FIELDS)
        raise ValueError(
            f"{options.file}: rope_parameters has rope_type {kind!r} and {given}; implemented are "
            f"default, {accepted}, of numbers"
        )
    known = _FIELDS.get(kind, {})
    for key, value in given.items():
        if key not in (*_ELSEWHERE, *known) and value is not None:
            # Of other kinds that were written out with it, as older versions did.
            raise ValueError(
                f"{options.file}: rope_parameters has {key} {value!r}; rope_type {kind!r} knows "
                f"{', '.join(known) or 'none'}"
            )
    scaling = None
    if kind not in ("default", "dynamic"):  # dynamic: unscaled up to the length trained on
        fields = {ours: given[x] for x, ours in known.items() if given.get(x) is not None}
        if kind == "yarn":
            fields.setdefault("original_length", options.whole("max_position_embeddings"))
        try:
            scaling = RotaryScaling(kind, **fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{options.file}: rope_parameters: {error}") from None
    return {"rotary_base": float(base), "rotary_scaling": scaling, "rotary_fraction": float(share)}


def write_rotary(base: float, scaling: RotaryScaling | None, fraction: float = 1.0) -> dict:
    """The entry of rope_parameters that `read_rotary` reads."""
    written = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": fraction}
    if scaling is not None:
        fields = _FIELDS[scaling.kind]
        written |= {theirs: getattr(scaling, ours) for theirs, ours in fields.items()}
        written["rope_type"] = scaling.kind
    return {key: value for key, value in written.items() if value is not None}
