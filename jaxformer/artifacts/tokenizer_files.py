"""The tokenizer of a foreign folder, in and out, and the ids with a meaning that stand in others of
its files."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers, processors

from jaxformer.artifacts.sentencepiece import of_marian, of_t5
from jaxformer.artifacts.subwords import MOST_BYTES, SpecialTokens, Subwords
from jaxformer.artifacts.tensors import read_json, write_json
from jaxformer.models.config import EncoderConfig, EncoderDecoderConfig

_SPECIAL = {"begin": "bos_token_id", "start": "decoder_start_token_id", "pad": "pad_token_id"}


def read_tokenizer(folder: Path) -> Subwords | None:
    """Of tokenizer.json, or of the vocabulary files of before it; None if there is neither."""
    special = special_tokens(folder)
    if (folder / "tokenizer.json").is_file():
        return Subwords.load(folder / "tokenizer.json", special)
    backend = _older(folder)
    return None if backend is None else Subwords(backend, special)


def _older(folder: Path) -> tokenizers.Tokenizer | None:
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    try:
        for path in (vocabulary, merges, folder / "vocab.txt"):
            if path.is_file() and path.stat().st_size > MOST_BYTES:
                raise ValueError(f"{path.name} has more than {MOST_BYTES} bytes")
        if vocabulary.is_file() and merges.is_file():
            if model_type(folder) != "gpt2":
                raise ValueError(
                    "vocab.json and merges.txt alone are enough for GPT-2 only; with transformers, "
                    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes "
                    "tokenizer.json"
                )
            model = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
            backend = tokenizers.Tokenizer(model)
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            backend.add_special_tokens(["<|endoftext|>"])
            return backend
        if (folder / "source.spm").is_file():
            return of_marian(folder / "source.spm", read_json(vocabulary))
        if (folder / "spiece.model").is_file() and model_type(folder) in ("t5", "mt5"):
            return of_t5(folder / "spiece.model")
        if (folder / "vocab.txt").is_file():
            how = folder / "tokenizer_config.json"
            lower = read_json(how).get("do_lower_case", True) if how.is_file() else True
            words = tokenizers.BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=lower)
            return words._tokenizer
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"{folder}: its vocabulary cannot be read: {error}") from None
    models = [*folder.glob("*.model"), *folder.glob("*.spm")]
    if models:
        raise ValueError(
            f"{models[0]} is not read; convert it once: in Python, with transformers, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes tokenizer.json"
        )
    return None


def model_type(folder: Path):
    """What config.json calls the model."""
    return read_json(folder / "config.json").get("model_type")


def special_tokens(folder: Path) -> SpecialTokens:
    """The ids that generation_config.json and config.json name."""
    found = {}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            found |= {k: x for k, x in read_json(folder / name).items() if k.endswith("_token_id")}
    ends = found.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    is_id = [type(token) is int for token in ends]
    stop_tokens = tuple(token for token, is_one in zip(ends, is_id, strict=True) if is_one)
    others = {ours: found.get(theirs) for ours, theirs in _SPECIAL.items()}
    return SpecialTokens(stop_tokens, **{k: x for k, x in others.items() if type(x) is int})


def write_tokenizer(folder: Path, tokenizer, config) -> dict:
    """Write its files; returns the ids with a meaning, for config.json."""
    special = _special_of(tokenizer, config)
    settings = {theirs: getattr(special, ours) for ours, theirs in _SPECIAL.items()}
    ends = list(special.stop_tokens)
    settings["eos_token_id"] = None if not ends else ends[0] if len(ends) == 1 else ends
    if tokenizer is None:
        return settings
    tokenizer.save(folder / "tokenizer.json")
    content = json.loads((folder / "tokenizer.json").read_text())
    words = {x["id"]: x["content"] for x in content["added_tokens"]}
    if not isinstance(
        tokenizer, Subwords
    ):  # ours: a document begins with the end of the one before
        (end,), name = special.stop_tokens, words[special.stop_tokens[0]]
        template = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, end)])
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = template
        backend.save(str(folder / "tokenizer.json"))
    named = {"eos_token": settings["eos_token_id"], "bos_token": special.begin}
    named |= {"pad_token": special.pad}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_length}
    about["clean_up_tokenization_spaces"] = False
    about |= {k: words[x] for k, x in named.items() if isinstance(x, int) and x in words}
    write_json(folder / "tokenizer_config.json", about)
    return settings


def _special_of(tokenizer, config) -> SpecialTokens:
    """What the tokenizer says; of ours, and of none, what their classes need."""
    if isinstance(tokenizer, Subwords):
        return tokenizer.special
    end = None if tokenizer is None else tokenizer.end_of_text
    pads = isinstance(config, EncoderDecoderConfig | EncoderConfig)
    start = (end or 0) if isinstance(config, EncoderDecoderConfig) else None
    pad = getattr(config, "position_offset", 0) - 1
    pad = max(pad, 0) if pads else None
    return SpecialTokens(() if end is None else (end,), end, start, pad)
