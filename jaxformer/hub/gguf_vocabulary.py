"""Header fields of a GGUF file for the vocabulary of a tokenizer.

llama.cpp has two algorithms for BPE. The algorithm "gpt2" merges the bytes of each word according
to a list of merges; the header field "pre" selects a fixed pattern that splits a text into words.
The algorithm "llama" merges the characters of the whole text according to the scores of the tokens,
as sentencepiece does. The algorithm "t5" finds the most probable tokens of a unigram model.
"""

import base64
import json
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from jaxformer.artifacts.files import parse_json
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.token_bytes import BYTE_TOKEN
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_files import CONFIG, MAP, TEMPLATE, TEMPLATES
from jaxformer.artifacts.tokenizer_parts import list_steps

_SPACE = "▁"
# Patterns of pre-tokenizers, exactly as in published tokenizer.json files.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS, _DIGIT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\p{N}"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + _WORDS + _DIGIT + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# {(patterns in the order in which the tokenizer applies them, ignore_merges): name in llama.cpp}.
_PRE = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
    ((_QWEN2,), False): "qwen2",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_TEKKEN,), True): "tekken",
}
_ROLES = ("unk_token", "sep_token", "pad_token", "mask_token")


def vocabulary(gguf: ModuleType, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Returns the header fields for the vocabulary of a tokenizer.

    Args:
        gguf: The module `gguf`.
        tokenizer: The tokenizer.
        vocab_size: The model's vocabulary size.

    Raises:
        ValueError: Llama.cpp would encode texts differently from `tokenizer`. The message names
            the unsupported part of the tokenizer.
    """
    parts = json.loads(tokenizer.to_json())
    model = parts["model"]
    if model["type"] not in ("BPE", "Unigram"):
        raise ValueError(
            f"the tokenizer's type is {model['type']}; only BPE and Unigram can be exported to GGUF"
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise ValueError(f"tokenizer has {name} {model[name]!r}, which GGUF does not support")
    is_of_bytes = any(step["type"] == "ByteLevel" for step in list_steps(parts, "pre_tokenizer"))
    words, unknown = _words(model)
    added = {entry["id"]: entry for entry in parts["added_tokens"]}
    names = words | {token: entry["content"] for token, entry in added.items()}
    tokens = [names.get(token, f"<unused{token}>") for token in range(vocab_size)]
    unknown = None if is_of_bytes else unknown
    has_bytes = not is_of_bytes and bool(model.get("byte_fallback"))
    types = [_type(token, words, added, unknown, has_bytes) for token in range(vocab_size)]
    header = {
        "token_list": tokens,
        "token_types": [gguf.TokenType[name] for name in types],
        **_special(tokenizer, vocab_size),
    }
    if (template := _chat_template(tokenizer)) is not None:
        header["chat_template"] = template
    if model["type"] == "Unigram":
        return _unigram(parts, vocab_size) | header | {"unk_token_id": unknown}
    pairs = [tuple(x.split(" ", 1)) if isinstance(x, str) else tuple(x) for x in model["merges"]]
    if is_of_bytes:
        merges = [" ".join(pair) for pair in pairs]
        return {
            "tokenizer_model": "gpt2",
            "tokenizer_pre": _pre(parts),
            "token_merges": merges,
            **header,
        }
    prefix = _space_prefix(parts)
    _warn_of_missing_merges(model["vocab"], pairs)
    return {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_scores": _scores(tokens, types, pairs),
        "add_space_prefix": prefix,
        "remove_extra_whitespaces": False,
        **header,
    }


def _words(model: dict) -> tuple[dict[int, str], int | None]:
    """Returns the text of each id, and the id of the unknown token."""
    if model["type"] == "Unigram":
        return {token: text for token, (text, _) in enumerate(model["vocab"])}, model["unk_id"]
    words = {token: word for word, token in model["vocab"].items()}
    return words, model["vocab"].get(model.get("unk_token"))


def _type(
    token: int, words: dict[int, str], added: dict, unknown: int | None, has_bytes: bool
) -> str:
    """Returns the GGUF name of a token's type."""
    if token not in words and token not in added:
        return "UNUSED"
    if token == unknown:
        return "UNKNOWN"
    if token in added:
        return "CONTROL" if added[token]["special"] else "USER_DEFINED"
    return "BYTE" if has_bytes and BYTE_TOKEN.fullmatch(words[token]) else "NORMAL"


# ---- byte-level BPE


def _pre(parts: dict) -> str:
    """Returns llama.cpp's name for the pattern that splits a text before byte-level BPE."""
    # llama.cpp does not implement NFC. NFC is accepted, because most texts are already in NFC.
    for step in list_steps(parts, "normalizer"):
        if step["type"] != "NFC":
            raise ValueError(
                f"tokenizer has the normalizer {step['type']}; for GGUF it must be NFC"
            )
    patterns = tuple(filter(None, map(_pattern, list_steps(parts, "pre_tokenizer"))))
    key = (patterns, bool(parts["model"].get("ignore_merges")))
    if key not in _PRE:
        named = " and ".join(map(repr, patterns))
        raise ValueError(
            f"tokenizer splits texts by the pattern {named} (ignore_merges is {key[1]}); for GGUF, "
            "pattern and ignore_merges must be as in GPT-2, SmolLM, Qwen 2, Llama 3 or Tekken"
        )
    return _PRE[key]


def _pattern(step: dict) -> str:
    """Returns the pattern of a pre-tokenizer, or "" if the pre-tokenizer does not split texts."""
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return _GPT2 if step.get("use_regex", True) else ""
    if step["type"] == "Digits" and step.get("individual_digits"):
        return _DIGIT
    how = (step.get("behavior"), step.get("invert", False))
    if step["type"] == "Split" and how in (("Isolated", False), ("Removed", True)):
        return step["pattern"].get("Regex", repr(step["pattern"]))
    raise ValueError(f"tokenizer has the pre-tokenizer {step}, which llama.cpp lacks")


# ---- BPE with byte fallback


def _space_prefix(parts: dict) -> bool:
    """Returns whether the tokenizer adds a space before a text.

    Raises:
        ValueError: GGUF does not support the tokenizer's normalizer or pre-tokenizer.
    """
    prefix, marks = False, False
    for step in list_steps(parts, "normalizer"):
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif step["type"] == "Replace" and step["content"] == _SPACE:
            marks = step["pattern"] == {"String": " "}
        else:
            raise ValueError(
                f"tokenizer has the normalizer {step['type']}, which GGUF does not support"
            )
    for step in list_steps(parts, "pre_tokenizer"):
        if step["type"] == "Metaspace" and step["replacement"] == _SPACE:
            prefix |= step.get("prepend_scheme", "always") != "never"
            marks = True
        elif step["type"] != "Split" or step["pattern"] != {"String": " "}:
            raise ValueError(
                f"tokenizer has the pre-tokenizer {step['type']}, which GGUF does not support"
            )
    if not marks or not parts["model"].get("byte_fallback"):
        raise ValueError(
            "tokenizer is BPE over characters; in GGUF it must be byte-level BPE, or BPE of "
            "sentencepiece with byte_fallback and ▁ for spaces"
        )
    return prefix


def _scores(tokens: list[str], types: list[str], merges: Iterable[tuple]) -> list[float]:
    """Returns a score for each token; a token from an earlier merge has a larger score."""
    order = dict.fromkeys(left + right for left, right in merges)
    score = {text: -float(place) for place, text in enumerate(order)}
    plain = [text for text, kind in zip(tokens, types, strict=True) if kind == "NORMAL"]
    single = [text for text in plain if text not in score]
    score |= {text: -float(len(order) + place) for place, text in enumerate(single)}
    return [
        score.get(text, 0.0) if kind == "NORMAL" else 0.0
        for text, kind in zip(tokens, types, strict=True)
    ]


def _warn_of_missing_merges(vocab: dict[str, int], merges: list[tuple]) -> None:
    """Warns if llama.cpp would merge two tokens that the tokenizer never merges."""
    known = set(merges)
    for text in vocab:
        for place in range(1, 0 if BYTE_TOKEN.fullmatch(text) else len(text)):
            pair = text[:place], text[place:]
            if pair not in known and pair[0] in vocab and pair[1] in vocab:
                warnings.warn(
                    f"tokenizer does not merge {pair[0]!r} and {pair[1]!r} to {text!r}; "
                    "llama.cpp does, so it encodes some texts differently",
                    stacklevel=4,
                )
                return


# ---- unigram models


def _unigram(parts: dict, vocab_size: int) -> dict[str, Any]:
    """Returns the header fields of a unigram model of sentencepiece.

    Raises:
        ValueError: The tokenizer has a part that llama.cpp does not support.
    """
    model = parts["model"]
    if model["unk_id"] is None:
        raise ValueError("tokenizer has no unknown token, which GGUF needs for Unigram")
    if model.get("byte_fallback"):
        raise ValueError("tokenizer is Unigram with byte_fallback, which llama.cpp lacks")
    header: dict[str, Any] = {"tokenizer_model": "t5", "tokenizer_pre": "default"}
    merges_spaces = False
    for step in list_steps(parts, "normalizer"):
        pattern = step.get("pattern", {}).get("Regex")
        if step["type"] == "Precompiled":
            header["precompiled_charsmap"] = base64.b64decode(step["precompiled_charsmap"])
        elif step["type"] == "Replace" and pattern == " {2,}":
            merges_spaces = True
        elif pattern != r"\A | \z" and not (step["type"] == "Strip" and step["strip_right"]):
            raise ValueError(
                f"tokenizer has the normalizer {step['type']}, which GGUF does not support"
            )
    steps = list_steps(parts, "pre_tokenizer")
    if [step["type"] for step in steps] != ["Metaspace"] or steps[0]["replacement"] != _SPACE:
        names = " and ".join(step["type"] for step in steps) or "none"
        raise ValueError(
            f"tokenizer has the pre-tokenizer {names}; for GGUF, a Unigram tokenizer needs exactly "
            f"one pre-tokenizer, Metaspace with the replacement {_SPACE!r}"
        )
    header["add_space_prefix"] = steps[0].get("prepend_scheme", "always") != "never"
    header["remove_extra_whitespaces"] = merges_spaces
    scores = [score for _, score in model["vocab"]][:vocab_size]
    header["token_scores"] = scores + [0.0] * (vocab_size - len(scores))
    return header


# ---- special tokens and chat templates


def _special(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int | bool]:
    """Returns the header fields for special tokens, and for tokens that are added to every text."""
    if not isinstance(tokenizer, Subwords):
        # In jaxformer's own tokenizers, the token end_of_text also begins a text.
        (end,) = tokenizer.stop_tokens
        return {"bos_token_id": end, "eos_token_id": end, "add_bos_token": True}
    named = _named(tokenizer)
    special, before, after = tokenizer.special, tokenizer.before, tokenizer.after
    begin = before[0] if before else named.get("bos_token", special.begin)
    stops = [*([named["eos_token"]] if "eos_token" in named else ()), *special.stop_tokens]
    end = after[-1] if after else next(iter(stops), None)
    if len(before) > 1 or len(after) > 1:
        raise ValueError(
            f"tokenizer adds the ids {before} before a text and {after} after it; in GGUF, a "
            "tokenizer can add at most one id at each end"
        )
    roles = {"bos": begin, "eos": end}
    # "eot" is a second token that ends a reply.
    roles["eot"] = next((x for x in stops if x != end), None)
    roles |= {role.removesuffix("_token"): named.get(role) for role in _ROLES}
    roles["pad"] = special.pad if roles["pad"] is None else roles["pad"]
    ids = {f"{role}_token_id": x for role, x in roles.items() if x is not None and x < vocab_size}
    return ids | {"add_bos_token": bool(before), "add_eos_token": bool(after)}


def _named(tokenizer: Subwords) -> dict[str, int]:
    """Returns the ids of the special tokens in the settings files, by role."""
    files = tokenizer.settings_files
    options: dict[str, Any] = parse_json(files.get(CONFIG, "{}"))
    if options.get("added_tokens_decoder") is None:
        options |= parse_json(files.get(MAP, "{}"))
    named = {}
    for role in ("bos_token", "eos_token", *_ROLES):
        value = options.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        token = tokenizer.token_to_id(text) if isinstance(text, str) else None
        if token is not None:
            named[role] = token
    return named


def _chat_template(tokenizer: Tokenizer) -> Any:
    """Returns the chat template, a list of named chat templates, or None."""
    files = tokenizer.settings_files if isinstance(tokenizer, Subwords) else {}
    if TEMPLATE not in files:
        template = parse_json(files.get(CONFIG, "{}")).get("chat_template")
        return template if isinstance(template, str | list) else None
    prefix = f"{TEMPLATES}/"
    further = {x.removeprefix(prefix)[:-6]: x for x in files if x.startswith(prefix)}
    if not further:
        return files[TEMPLATE]
    named = {"default": TEMPLATE, **further}
    return [{"name": name, "template": files[path]} for name, path in named.items()]
