"""Settings files that stand beside a ``tokenizer.json`` in folders of transformers.

They hold the roles of special tokens, the chat templates, and how batches are padded and cut. They
do not decide the ids of a text. The package carries them along unread, so that an exported folder
has the settings of the folder that was imported.
"""

from collections.abc import Mapping
from pathlib import Path

from jaxformer.artifacts.files import json_text, parse_json, read_optional, read_text, write_whole

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # a folder with a file for each named template
NAMES = (CONFIG, MAP, ADDED, TEMPLATE, TEMPLATES)
# The class of transformers that takes tokenizer.json as it is. Others rebuild parts of it.
GENERIC_CLASS = "PreTrainedTokenizerFast"
_MOST_BYTES = 2**24


def read_settings_files(folder: Path) -> dict[str, str]:
    """Returns the text of each settings file in a folder, by its path in the folder.

    Raises:
      ValueError: If a file is too large, or is no UTF-8 text or no JSON object. The message names
        it.
    """
    objects = [folder / name for name in (CONFIG, MAP, ADDED)]
    for path in objects:
        read_optional(path)  # checks it
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
    """Writes the settings files into a folder, each atomically."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_whole(folder / name, text)


def with_generic_class(files: Mapping[str, str]) -> dict[str, str]:
    """Returns the files with the class of transformers that takes tokenizer.json as it is."""
    if CONFIG not in files:
        return dict(files)
    content = parse_json(files[CONFIG]) | {"tokenizer_class": GENERIC_CLASS}
    return {**files, CONFIG: json_text(content, indent=2)}
