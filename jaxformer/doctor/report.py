"""Tables that `jaxformer doctor` prints about this machine and about compiled programs."""

import os
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from jaxformer.doctor.targets import missing_compiler, parse_target
from jaxformer.optional import install_line
from jaxformer.runtime import start_jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tokenizers")
# Optional modules: (their purpose, the command that installs them).
OPTIONAL = {
    "huggingface_hub": ("hub ids as checkpoints", install_line("hub")),
    "gguf": ("export to llama.cpp", install_line("gguf")),
    "sentencepiece": ("tokenizers of models such as T5 and Marian", install_line("sentencepiece")),
    "transformers": ("check of imported models", 'pip install "transformers>=5" torch'),
}
_TIMES = {
    "operations": "at the device's peak FLOP/s",
    "links": "if all links of the device are used",
    "memory": "for one read of the weights and the cache",
}
TARGETS = {"gpu": "gpu:h100:8", "tpu": "tpu:v5e:4x4"}


def machine_setup() -> dict:
    """Starts JAX and returns the setup of this machine as JSON values."""
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


def setup_rows(found: dict) -> list[tuple[str, ...]]:
    """Returns the table rows about this machine: (label, value, remark)."""
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
    """Returns the host's memory in bytes, or None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _cache(folder: Path) -> dict:
    files = [path for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    return {"folder": str(folder), "files": len(files), "bytes": size}


def _missing() -> dict[str, str]:
    """Returns {name and purpose: install command} for each missing optional package."""
    found = {f"{x}: {use}": how for x, (use, how) in OPTIONAL.items() if find_spec(x) is None}
    for name, target in TARGETS.items():
        if how := missing_compiler(parse_target(target)):
            found[
                f"{name.upper()} compiler: analyses programs for devices that this machine lacks"
            ] = how
    return found


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def step_rows(found: dict) -> list[tuple[str, ...]]:
    """Returns the table rows of a training step: (label, value, remark)."""
    least = found["least"]
    needed = sum(least.values())
    ratio = f"{found['exchanged'] / needed:.2f} × the minimum" if needed else "the minimum is 0"
    sent = [
        *_exchanges(found["exchanges"]),
        ("  total", _bytes(found["exchanged"]), ratio),
        *((f"  minimum for {axis}", _bytes(size), "") for axis, size in least.items() if size),
    ]
    names = {"temporaries": "activations, gradients, …"}
    flops = f"{found['flops']:.3g}", "by the formulas in jaxformer/models/flops.py"
    return _program_rows(found, "training step", "step", names, sent, flops)


def decoding_rows(found: dict) -> list[tuple[str, ...]]:
    """Returns the table rows of a decoding loop: (label, value, remark)."""
    gathered, copies = found["gathered_per_token"], found["cache_copies_per_token"]
    share = f"{gathered / found['memory']['weights']:.1%} of the weights on the device"
    update = f"each token copies a layer's cache {copies:g} times" if copies else "in place"
    if copies is None:
        update = "state of a fixed size"
    sent = [
        *_exchanges(found["exchanges"], found["steps"]),
        ("  gathered", _bytes(gathered), share),
        ("cache update", update, ""),
    ]
    names = {"weights": "weights, packed"}
    flops = f"{found['flops_per_token']:.3g}", "by the formulas in jaxformer/models/flops.py"
    return _program_rows(found, "decoding, one token per sequence", "token", names, sent, flops)


def _program_rows(
    found: dict,
    title: str,
    unit: str,
    names: dict[str, str],
    sent: list[tuple[str, ...]],
    flops: tuple[str, str],
) -> list[tuple[str, ...]]:
    """Returns the table rows about a compiled program: (label, value, remark).

    Args:
        found: The results of `examine_step` or `examine_decoding`.
        title: A name for the program, such as "training step".
        unit: "step" or "token"; the rows show bytes and FLOPs per step or per token.
        names: {key of `found["memory"]`: label}. A key without a label is shown unchanged.
        sent: The rows about the bytes that a device sends.
        flops: (FLOPs per device, remark).
    """
    mesh = ", ".join(f"{axis}={size}" for axis, size in found["mesh"].items() if size > 1)
    settings = f"{found['dtype']}, layers {found['layers']}, remat {found['remat']}"
    memory = dict(found["memory"])
    total, device, fits = (memory.pop(name) for name in ("total", "device", "fits"))
    fit = "" if device is None else f"of {_bytes(device)}: {'fits' if fits else 'does NOT fit'}"
    # The times are lower bounds, computed from the published specifications of the device.
    times = (found["seconds"] or {}).items()
    return [
        (title, f"{found['batch_size']} sequences × {found['length']} tokens", settings),
        ("mesh", mesh or "one device", f"compiled in {found['compiled_in']:.0f} s"),
        (),
        ("memory per device", "", ""),
        *((f"  {names.get(x, x)}", _bytes(size), "") for x, size in memory.items()),
        ("  total", _bytes(total), fit),
        (),
        *_experts(found["experts"]),
        (f"bytes sent per device and {unit}", "", ""),
        *sent,
        (),
        (f"FLOPs per device and {unit}", *flops),
        *((f"minimum time: {x}", f"{1e3 * value:,.2f} ms", _TIMES[x]) for x, value in times),
        *(("note", note, "") for note in found["notes"]),
    ]


def _experts(found: dict | None) -> list[tuple[str, ...]]:
    if found is None:
        return []
    sentence = "OK: each token is computed by its chosen experts only"
    if not found["only_chosen"]:
        sentence = (
            "FAILED: the program computes all experts for every token, not only the chosen ones. "
            f"Example of an array [experts, tokens, features]: {found['dense'][0]}"
        )
    return [("experts", sentence, ""), ()]


def _exchanges(exchanges: dict, steps: int = 1) -> list[tuple[str, ...]]:
    return [
        (f"  {kind}", _bytes(total["sent"] / steps), f"{total['count'] / steps:g} times")
        for kind, total in exchanges.items()
    ]


def _bytes(size: float) -> str:
    """Formats a size in decimal units."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"
