"""Settings files that accompany a ``tokenizer.json`` in folders of transformers.

The files set the roles of special tokens, the chat templates, padding and truncation, but do not
affect the ids of a text. jaxformer copies the files from the imported folder to the exported folder
without interpreting them.
"""

from collections.abc import Mapping
from pathlib import Path

from jaxformer.artifacts.files import json_text, parse_json, read_optional, read_text, write_whole

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
# This folder contains one file per named chat template.
TEMPLATES = "additional_chat_templates"
NAMES = (CONFIG, MAP, ADDED, TEMPLATE, TEMPLATES)
# Name of the class in transformers that uses tokenizer.json unchanged. The other tokenizer classes
# in transformers rebuild parts of the tokenizer.
GENERIC_CLASS = "PreTrainedTokenizerFast"
_MOST_BYTES = 2**24


def read_settings_files(folder: Path) -> dict[str, str]:
    """Reads the settings files of a folder; returns their contents by relative path.

    Raises:
        ValueError: a file is too large, is not UTF-8, or is not a JSON object. The message gives
            the file's path.
    """
    objects = [folder / name for name in (CONFIG, MAP, ADDED)]
    for path in objects:
        read_optional(path)  # `read_optional` raises for a file that is not a JSON object.
    templates = [folder / TEMPLATE, *sorted((folder / TEMPLATES).glob("*.jinja"))]
    paths = [path for path in (*objects, *templates) if path.is_file()]
    return {path.relative_to(folder).as_posix(): _text(path) for path in paths}


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes; at most {_MOST_BYTES} are read")
    try:
        return read_text(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def write_settings_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes each settings file into a folder, atomically."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_whole(folder / name, text)


def with_generic_class(files: Mapping[str, str]) -> dict[str, str]:
    """Sets tokenizer_class to the class of transformers that uses tokenizer.json unchanged."""
    if CONFIG not in files:
        return dict(files)
    content = parse_json(files[CONFIG]) | {"tokenizer_class": GENERIC_CLASS}
    return {**files, CONFIG: json_text(content, indent=2)}
