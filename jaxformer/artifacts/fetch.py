"""A source as a folder on this machine; a hub id is downloaded by huggingface_hub."""

import re
from pathlib import Path

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
)
_TOKENIZERS = (
    "tokenizer*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.spm",
    "special_tokens_map.json",
)


def fetched(source: str | Path) -> Path:
    """The folder, or that of a hub id once it is downloaded (its own cache is asked first).

    ValueError if it is neither, or cannot be downloaded.
    """
    if Path(source).is_dir():
        return Path(source)
    name = str(source)
    if not _ID.fullmatch(name) or Path(source).exists() or name.count("/") != 1:
        raise ValueError(f"{source} is no folder (and no hub id, OWNER/NAME)")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ValueError(
            f"{source} is no folder; to download it as a hub id, install jaxformer[hub]"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=[*_FILES, *_TOKENIZERS]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
        raise ValueError(
            f"{source} is no folder here, and as a hub id it cannot be downloaded: {reason}"
        ) from None
