"""Atomic writing of files and folders, small JSON files, and checks of symbolic links."""

import json
import math
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer.models.config.check import converted
from jaxformer.terminal import kind_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BYTES = {"config.json": 2**20, "generation_config.json": 2**20}
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Python's int() accepts at most 4,300 digits.
_MOST_DIGITS = 4000
# Weights & Biases writes links to its cache into this folder. jaxformer does not read the folder.
_WANDB = "wandb"


def json_text(
    content: Any,
    *,
    indent: int | None = None,
    default: Callable[[Any], Any] | None = None,
    ascii_only: bool = True,
) -> str:
    """Serializes `content` to JSON.

    Args:
        content: A tree of dicts, lists, strings, numbers, bools and None.
        indent: Number of spaces per level. If None, the result is a single line.
        default: Function that converts objects of other types to JSON types.
        ascii_only: Whether characters outside ASCII are written as escapes.

    Raises:
        FloatingPointError: a number is not finite, which JSON cannot represent. The message gives
            the key of the number in `content`.
    """
    try:
        return json.dumps(
            content, allow_nan=False, indent=indent, default=default, ensure_ascii=ascii_only
        )
    except ValueError:
        name = _not_finite(content)
        if name is None:
            raise
        raise FloatingPointError(name) from None


def without_surrogates(text: str) -> str:
    """Replaces lone surrogates by U+FFFD, because UTF-8 cannot encode lone surrogates.

    Python represents bytes that are not UTF-8 in file names and arguments by lone surrogates.
    """
    return _SURROGATE.sub("\ufffd", text)


def read_text(path: Path) -> str:
    """Reads UTF-8 text without its byte order mark."""
    return path.read_text(encoding="utf-8-sig")


def _not_finite(content: Any, name: str = "") -> str | None:
    """Returns the name and the value of the first number that is not finite."""
    if isinstance(content, float) and not math.isfinite(content):
        return f"{name.lstrip('.') or 'a number'} is {content}, which is not finite"
    parts = {}
    if isinstance(content, dict):
        parts = {f"{name}.{key}": value for key, value in content.items()}
    elif isinstance(content, list | tuple):
        parts = {f"{name}[{place}]": value for place, value in enumerate(content)}
    faults = (_not_finite(value, inner) for inner, value in parts.items())
    return next(filter(None, faults), None)


def read_json(path: Path) -> dict:
    """Returns the object in a small JSON file.

    Raises:
        ValueError: The file is missing or too large, is not a JSON object, or repeats a key.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    size, most = path.stat().st_size, _MOST_BYTES.get(path.name, 2**26)
    if size > most:
        raise ValueError(f"{path} has {size} bytes; the file may have at most {most} bytes")
    try:
        content = parse_json(read_text(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains {kind_of(content)}; it must contain an object")
    return content


def read_optional(path: Path) -> dict:
    """Returns the object in a small JSON file, or {} if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text; raises ValueError if an object repeats a key.

    An integer of more than 4,000 digits becomes infinity, which the later check of its field
    rejects with an error that names the field.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_int=_whole)
    except RecursionError:
        raise ValueError("its objects are nested too deeply") from None


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else math.inf


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict from key-value pairs; raises ValueError if a key is repeated."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return content


def write_figure(figure: "Figure", title: str, path: Path, dpi: int) -> None:
    """Writes a matplotlib figure to a PNG, atomically.

    The title is not parsed as mathematics, because the name of a run may contain a `$`. A character
    that the font lacks is drawn as a box. In all texts of the figure, U+FFFD replaces lone
    surrogates.

    Args:
        figure: The figure.
        title: The title of the figure.
        path: The file to write.
        dpi: Dots per inch.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure)
    figure.suptitle(title, parse_math=False)
    for text in figure.findobj(Text):
        text.set_text(without_surrogates(text.get_text()))
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        figure.savefig(temporary, dpi=dpi, format="png")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yields a temporary path; at the end of the context, its file replaces `path`.

    If the `with` block raises an exception, the temporary file is removed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: if the process is killed, the file has its old or new content."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(text.encode(errors="surrogateescape"))
        file.flush()
        os.fsync(file.fileno())


def read_whole(path: Path, hint: Any) -> Any:
    """Reads the JSON that `write_whole` wrote.

    Args:
        path: The file.
        hint: The expected type of the value, such as `dict[str, float]`.

    Raises:
        ValueError: The file cannot be read, or its value has a different type. The message names
            the file.
    """
    try:
        return converted("it", parse_json(read_text(path)), hint)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def check_utf8(path: Path) -> None:
    """Raises ValueError for a path that is not UTF-8, which safetensors and Orbax cannot write."""
    if _SURROGATE.search(str(path.absolute())):
        raise ValueError(f"{path} is not UTF-8; use a path that can be encoded as UTF-8")


def require_new(path: Path) -> Path:
    """Checks that a file or folder can be created at `path`, and returns the absolute path.

    Raises:
        ValueError: The path exists and is not an empty folder, its parent does not exist, or the
            path is not UTF-8.
    """
    check_utf8(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} already exists; choose a path that does not exist yet")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder, so {path.name} cannot be created there")
    return path.absolute()


def next_free(folder: Path, name: str, *suffixes: str) -> Path:
    """Returns folder/name, or the first of folder/name-2, -3, … that does not exist yet.

    Args:
        folder: The folder.
        name: The preferred file name, without a suffix.
        *suffixes: The suffixes of the files to write, such as ".png". No file with the returned
            name and one of the suffixes exists. The returned path ends with the first suffix.
    """
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    groups = ([folder / f"{x}{suffix}" for suffix in suffixes or ("",)] for x in names)
    return next(paths[0] for paths in groups if not any(map(Path.exists, paths)))


@contextmanager
def new_folder(path: str | Path) -> Generator[Path]:
    """Yields a temporary folder, which is renamed to `path` at the end of the context.

    If the `with` block raises an exception, the temporary folder is removed.

    Raises:
        ValueError: `path` exists and is not an empty folder.
    """
    path = require_new(Path(path))
    unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
    unfinished.mkdir()
    try:
        yield unfinished
        if path.exists():
            path.rmdir()  # This raises an error if another process has filled the folder.
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_json(path: Path, content: dict) -> None:
    """Writes indented JSON with a final line break, atomically."""
    write_whole(path, json_text(content, indent=2) + "\n")


# ---- links


def check_links(folder: Path, *, whole_tree: bool) -> None:
    """Checks that all symbolic links in the folder lead to targets in the folder.

    A link out of the folder could reveal a file that the folder's author cannot access, and
    appending to the link would change the file. The folder itself may be a link. Snapshots in the
    cache of huggingface_hub are allowed: they consist of links to the `blobs` folder of the same
    repository.

    Args:
        folder: A run, a folder that `save` wrote, or a folder in Hugging Face's format.
        whole_tree: Whether to check subfolders too. If False, only the direct entries of the folder
            are checked, which include all files of a model.

    Raises:
        ValueError: a link leads out of the folder. The message gives the link and its target.
    """
    for entry in _entries(folder, whole_tree):
        if entry.is_symlink() and not stays(Path(entry.path), folder):
            raise ValueError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, outside {folder}; replace "
                "the link by the file"
            )


def stays(path: Path, folder: Path) -> bool:
    """Returns whether the final target of `path`, after all links, belongs to `folder`.

    Args:
        path: A path in `folder`, which may be a link.
        folder: The folder.
    """
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # The symbolic links form a loop.
        return False
    if target.is_relative_to(home):
        return target.relative_to(home).parts[:1] != (_WANDB,)
    snapshots, repository = home.parent, home.parent.parent  # models--OWNER--NAME/snapshots/COMMIT
    is_snapshot = snapshots.name == "snapshots" and repository.name.startswith("models--")
    return is_snapshot and target.parent == repository / "blobs"


def _entries(folder: Path, whole_tree: bool) -> Iterator[os.DirEntry]:
    """Yields the entries of a folder and, with `whole_tree`, of all its subfolders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == _WANDB and not entry.is_symlink():
                continue
            yield entry
            if whole_tree and entry.is_dir(follow_symlinks=False):
                # A running training process renames each checkpoint folder once it is complete, so
                # the old name may no longer exist.
                with suppress(FileNotFoundError):
                    yield from _entries(Path(entry.path), whole_tree)
