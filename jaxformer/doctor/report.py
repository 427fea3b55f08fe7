"""Tables that `jaxformer doctor` prints: this machine's setup, and a program's needs."""

import os
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from jaxformer.doctor.machines import missing_compiler, parse_target
from jaxformer.runtime import start_jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tokenizers")
# Optional modules: (their purpose, the command that installs them).
OPTIONAL = {
    "huggingface_hub": ("hub ids as checkpoints", 'pip install "jaxformer[hub]"'),
    "gguf": ("export to llama.cpp", 'pip install "jaxformer[gguf]"'),
    "transformers": ("check of imported models", 'pip install "transformers>=5" torch'),
}
_TIMES = {
    "operations": "at the device's peak FLOP/s",
    "links": "with all links of the device in use",
    "memory": "to read weights and cache once",
}
TARGETS = {"gpu": "gpu:h100:8", "tpu": "tpu:v5e:4x4"}


def machine_setup() -> dict:
    """Starts JAX and returns the setup as values that JSON can store."""
    from jaxformer import __version__

    start_jax()
    import jax

    return {
        "jaxformer": __version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": [
            {
                "kind": device.device_kind,
                "platform": device.platform,
                "memory": (device.memory_stats() or {}).get("bytes_limit"),
            }
            for device in jax.local_devices()
        ],
        "processes": jax.process_count(),
        "memory": _memory(),
        "cores": os.cpu_count(),
        "cache": _cache(Path(jax.config.values["jax_compilation_cache_dir"])),
        "missing": _missing(),
    }


def lines_of_setup(found: dict) -> list[tuple[str, ...]]:
    """Returns the lines of the table: (label, value, remark)."""
    memory, cache = found["memory"], found["cache"]
    devices = Counter((x["kind"], x["platform"], x["memory"]) for x in found["devices"])
    used = f"{cache['files']} files, {cache['bytes'] / 1e6:,.0f} MB"
    return [
        ("jaxformer", found["jaxformer"], f"Python {found['python']}, {found['system']}"),
        *((name, number or "missing", "") for name, number in found["versions"].items()),
        (),
        *(
            ("devices", f"{count} × {kind}", f"{_gigabytes(size)} each" if size else where)
            for (kind, where, size), count in devices.items()
        ),
        ("host", f"{found['cores']} cores", f"{_gigabytes(memory)} of memory" if memory else ""),
        ("compiled programs", used, cache["folder"]),
        (),
        *(("not installed", what, how) for what, how in found["missing"].items()),
    ]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory() -> int | None:
    """Returns the host's memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _cache(folder: Path) -> dict:
    files = [path for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    return {"folder": str(folder), "files": len(files), "bytes": size}


def _missing() -> dict[str, str]:
    """Returns the missing optional packages: name and purpose, and how to install them."""
    found = {f"{x}: {use}": how for x, (use, how) in OPTIONAL.items() if find_spec(x) is None}
    for name, target in TARGETS.items():
        if how := missing_compiler(parse_target(target)):
            found[f"compiler for {name.upper()}s, to examine them without having one"] = how
    return found


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def lines_of_step(found: dict) -> list[tuple[str, ...]]:
    """Returns the lines of the table for a training step: (label, value, remark)."""
    least = found["least"]
    needed = sum(least.values())
    ratio = f"{found['exchanged'] / needed:.2f} × the minimum" if needed else "the minimum is 0"
    sent = [
        *_exchanges(found["exchanges"]),
        ("  total", _bytes(found["exchanged"]), ratio),
        *((f"  minimum for {axis}", _bytes(size), "") for axis, size in least.items() if size),
    ]
    names = {"temporaries": "activations, gradients, …"}
    flops = f"{found['flops']:.3g}", "by formula (models/flops.py)"
    return _lines_of_program(found, "training step", "step", names, sent, flops)


def lines_of_decoding(found: dict) -> list[tuple[str, ...]]:
    """Returns the lines of the table for a decoding loop: (label, value, remark)."""
    gathered, copies = found["gathered_per_token"], found["cache_copies_per_token"]
    share = f"{gathered / found['memory']['weights']:.1%} of its weights"
    update = f"{copies:g} copies of a layer's cache per token" if copies else "in place"
    if copies is None:
        update = "state of a fixed size"
    sent = [
        *_exchanges(found["exchanges"], found["steps"]),
        ("  gathered", _bytes(gathered), share),
        ("cache update", update, ""),
    ]
    names = {"weights": "weights, prepared"}
    flops = f"{found['flops_per_token']:.3g}", "by formula"
    return _lines_of_program(found, "decoding, one token per row", "token", names, sent, flops)


def _lines_of_program(
    found: dict,
    title: str,
    unit: str,
    names: dict[str, str],
    sent: list[tuple[str, ...]],
    flops: tuple[str, str],
) -> list[tuple[str, ...]]:
    """Returns the lines of the table for a program.

    Args:
        found: The values that the program's examination found.
        title: What the program does.
        unit: What the program repeats: "step" or "token".
        names: The names of kinds of memory that differ from their keys.
        sent: The lines about the bytes that a device sends.
        flops: The FLOP of a device, and a remark.
    """
    mesh = ", ".join(f"{axis}={size}" for axis, size in found["mesh"].items() if size > 1)
    settings = f"{found['dtype']}, layers {found['layers']}, remat {found['remat']}"
    memory = dict(found["memory"])
    total, device, fits = (memory.pop(name) for name in ("total", "device", "fits"))
    fit = "" if device is None else f"of {_bytes(device)}: {'fits' if fits else 'does NOT fit'}"
    # The times are lower bounds, from the published figures of the device.
    times = (found["seconds"] or {}).items()
    return [
        (title, f"{found['rows']} rows × {found['length']} tokens", settings),
        ("mesh", mesh or "one device", f"compiled in {found['compiled_in']:.0f} s"),
        (),
        ("memory of each device", "", ""),
        *((f"  {names.get(x, x)}", _bytes(size), "") for x, size in memory.items()),
        ("  total", _bytes(total), fit),
        (),
        *_experts(found["experts"]),
        (f"sent by each device, per {unit}", "", ""),
        *sent,
        (),
        (f"FLOP of each device, per {unit}", *flops),
        *((f"minimum time: {x}", f"{1e3 * value:,.2f} ms", _TIMES[x]) for x, value in times),
        *(("note", note, "") for note in found["notes"]),
    ]


def _experts(found: dict | None) -> list[tuple[str, ...]]:
    if found is None:
        return []
    sentence = "each token is computed by its chosen experts only"
    if not found["only_chosen"]:
        sentence = (
            "FAILED: the program computes all experts for every token, not only the chosen ones. "
            f"It has arrays [experts, tokens, features], such as {found['dense'][0]}"
        )
    return [("experts", sentence, ""), ()]


def _exchanges(exchanges: dict, steps: int = 1) -> list[tuple[str, ...]]:
    return [
        (f"  {kind}", _bytes(total["sent"] / steps), f"number: {total['count'] / steps:g}")
        for kind, total in exchanges.items()
    ]


def _bytes(size: float) -> str:
    """Returns a size as text, in decimal units."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"
