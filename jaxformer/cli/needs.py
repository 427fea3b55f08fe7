"""What a program needs of a machine, as the lines of a table."""


def lines_of_step(found: dict) -> list[tuple[str, ...]]:
    """Of a training step: (what, how much, more)."""
    memory, least = found["memory"], found["least"]
    needed = sum(least.values())
    ratio = f"{found['exchanged'] / needed:.2f} times the least" if needed else "none is needed"
    lines = [
        *_circumstances(found, "training step"),
        (),
        ("on each device", "", ""),
        ("  parameters", _bytes(memory["parameters"]), ""),
        ("  optimizer", _bytes(memory["optimizer"]), ""),
        ("  activations, gradients, …", _bytes(memory["temporaries"]), ""),
        _total(memory),
        (),
        ("each device sends, a step", "", ""),
        *_exchanges(found["exchanges"]),
        ("  total", _bytes(found["exchanged"]), ratio),
        *((f"  least for {axis}", _bytes(sent), "") for axis, sent in least.items() if sent),
        (),
        ("operations, each device", f"{found['flops']:.3g}", "by formula (models/flops.py)"),
    ]
    return [*lines, *_times(found["seconds"]), *_notes(found)]


def lines_of_decoding(found: dict) -> list[tuple[str, ...]]:
    """Of a decoding loop."""
    memory = found["memory"]
    copies = found["cache_copies_per_token"]
    gathered = found["gathered_per_token"]
    lines = [
        *_circumstances(found, "decoding, a token of every row"),
        (),
        ("on each device", "", ""),
        ("  weights, prepared", _bytes(memory["weights"]), ""),
        ("  cache", _bytes(memory["cache"]), ""),
        ("  temporaries", _bytes(memory["temporaries"]), ""),
        _total(memory),
        (),
        ("each device sends, a token", "", ""),
        *_exchanges(found["exchanges"], found["steps"]),
        ("  gathered", _bytes(gathered), f"{gathered / memory['weights']:.1%} of its weights"),
        ("cache", _copied(copies), ""),
        (),
        ("operations, each device", f"{found['flops_per_token']:.3g}", "for a token, by formula"),
    ]
    return [*lines, *_times(found["seconds"]), *_notes(found)]


def _copied(copies: float | None) -> str:
    if copies is None:
        return "a state of one size"
    return f"{copies:g} copies of a layer for each token" if copies else "in place"


def _circumstances(found: dict, what: str) -> list[tuple[str, ...]]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in found["mesh"].items() if size > 1)
    how = f"{found['dtype']}, layers {found['layers']}, remat {found['remat']}"
    return [
        (what, f"{found['rows']} × {found['length']} tokens", how),
        ("mesh", mesh or "one device", f"compiled in {found['compiled_in']:.0f} s"),
    ]


def _total(memory: dict) -> tuple[str, ...]:
    if memory["device"] is None:
        return ("  total", _bytes(memory["total"]), "")
    fits = "fits" if memory["fits"] else "does NOT fit"
    return ("  total", _bytes(memory["total"]), f"of {_bytes(memory['device'])}: {fits}")


def _exchanges(exchanges: dict, steps: int = 1) -> list[tuple[str, ...]]:
    return [
        (f"  {kind}", _bytes(total["sent"] / steps), f"{total['count'] / steps:g} of them")
        for kind, total in exchanges.items()
    ]


def _times(seconds: dict | None) -> list[tuple[str, ...]]:
    """What published figures allow."""
    by = {
        "operations": "at the device's peak",
        "links": "by its links, all of them in use",
        "memory": "reading weights and cache once",
    }
    return [
        (f"time at best: {name}", f"{1e3 * value:,.2f} ms", by[name])
        for name, value in (seconds or {}).items()
    ]


def _notes(found: dict) -> list[tuple[str, ...]]:
    return [("note", note, "") for note in found["notes"]]


def _bytes(size: float) -> str:
    """In units of 1,000."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"
