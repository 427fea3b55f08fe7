"""What is here: devices, versions, memory, the cache of compiled programs, and what is missing."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from jaxformer.training.doctor.machines import missing, parse_target

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers")
# What is not needed for a run, by the module that it is: what for, and how to install it.
OPTIONAL = {
    "huggingface_hub": ("hub ids as checkpoints", 'pip install "jaxformer[hub]"'),
    "gguf": ("export to llama.cpp", 'pip install "jaxformer[gguf]"'),
    "transformers": ("import, compared with it", 'pip install "transformers>=5" torch'),
}
TARGETS = {"gpu": "gpu:h100:8", "tpu": "tpu:v5e:4x4"}


def what_is_here() -> dict:
    """All of it, as JSON has it. JAX is started."""
    from jaxformer import __version__
    from jaxformer.cli.runtime import start_jax

    start_jax()
    import jax

    return {
        "jaxformer": __version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": [_device(device) for device in jax.local_devices()],
        "processes": jax.process_count(),
        "memory": _memory(),
        "cores": os.cpu_count(),
        "cache": _cache(Path(jax.config.jax_compilation_cache_dir)),
        "missing": _missing(),
    }


def lines_of(found: dict) -> list[tuple[str, ...]]:
    """(what, how much, more), line by line."""
    memory, cache = found["memory"], found["cache"]
    devices = {}
    for device in found["devices"]:
        said = (device["kind"], device["platform"], device["memory"])
        devices[said] = devices.get(said, 0) + 1
    used = f"{cache['files']} programs, {cache['bytes'] / 1e6:,.0f} MB"
    return [
        ("jaxformer", found["jaxformer"], f"Python {found['python']}, {found['system']}"),
        *((name, said or "missing", "") for name, said in found["versions"].items()),
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


def _device(device) -> dict:
    limits = device.memory_stats() or {}
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "memory": limits.get("bytes_limit"),
    }


def _memory() -> int | None:
    """Bytes of the host; None where that is not told."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _cache(folder: Path) -> dict:
    files = [path for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    return {"folder": str(folder), "files": len(files), "bytes": size}


def _missing() -> dict[str, str]:
    """What could be installed besides, what for, and how."""
    found = {
        f"{name}: {what}": how for name, (what, how) in OPTIONAL.items() if find_spec(name) is None
    }
    for name, target in TARGETS.items():
        if how := missing(parse_target(target)):
            found[f"compiler for {name.upper()}s that are not here"] = how
    return found


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
