"""Vocabulary of a GGUF file: a tokenizer in the terms of llama.cpp.

llama.cpp has two algorithms for BPE. "gpt2" merges the bytes of a word by a list of merges; the key
"pre" names a fixed pattern that divides a text into words. "llama" merges the characters of a whole
text by the scores of the resulting tokens, as sentencepiece does.
"""

import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxformer.artifacts.files import parse_json
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer, steps_of
from jaxformer.artifacts.tokenizer_files import CONFIG, MAP, TEMPLATE, TEMPLATES

if TYPE_CHECKING:
    from gguf import GGUFWriter

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPACE = "▁"
# Patterns of pre-tokenizers as published tokenizer.json files spell them.
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
# (patterns in the order in which they divide a text, ignore_merges): llama.cpp's name.
_PRE = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
    ((_QWEN2,), False): "qwen2",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_TEKKEN,), True): "tekken",
}
_ROLES = ("unk_token", "sep_token", "pad_token", "mask_token")


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary as the keys `tokenizer.ggml.…` describe it.

    Attributes:
        model: "gpt2" or "llama", the algorithm.
        pre: The name of the pattern that divides a text.
        tokens: The text of each id.
        types: The name in `gguf.TokenType` of each id.
        merges: The merges; None if the scores decide.
        scores: The score of each id; None if the merges decide.
        space_prefix: Whether a space is put before a text.
        ids: The ids of special tokens, by llama.cpp's names of their roles.
        adds: Whether bos and eos are put around a text.
        chat_template: The chat template, or several with their names; None if there is none.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[str]
    merges: list[str] | None
    scores: list[float] | None
    space_prefix: bool
    ids: dict[str, int]
    adds: dict[str, bool]
    chat_template: Any


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """Returns the vocabulary of a tokenizer.

    Args:
        tokenizer: The tokenizer.
        vocab_size: Number of ids of the model.

    Raises:
        ValueError: If llama.cpp cannot encode as the tokenizer does. The message names the part.
    """
    parts = json.loads(tokenizer.to_json())
    model = parts["model"]
    if model["type"] != "BPE":
        raise ValueError(f"tokenizer is {model['type']}; only BPE can be exported to GGUF")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise ValueError(f"tokenizer has {name} {model[name]!r}; in GGUF it must have none")
    is_of_bytes = any(step["type"] == "ByteLevel" for step in steps_of(parts, "pre_tokenizer"))
    words = {token: word for word, token in model["vocab"].items()}
    added = {entry["id"]: entry for entry in parts["added_tokens"]}
    names = words | {token: entry["content"] for token, entry in added.items()}
    tokens = [names.get(token, f"<unused{token}>") for token in range(vocab_size)]
    types = [_type(token, words, added, model, is_of_bytes) for token in range(vocab_size)]
    ids, adds = _special(tokenizer, vocab_size)
    common = {"ids": ids, "adds": adds, "chat_template": _chat_template(tokenizer)}
    pairs = [tuple(x.split(" ", 1)) if isinstance(x, str) else tuple(x) for x in model["merges"]]
    if is_of_bytes:
        merges = [" ".join(pair) for pair in pairs]
        pre = _pre(parts)
        return Vocabulary("gpt2", pre, tokens, types, merges, None, False, **common)
    prefix = _space_prefix(parts)
    _warn_of_missing_merges(model["vocab"], pairs)
    scores = _scores(tokens, types, pairs)
    return Vocabulary("llama", "default", tokens, types, None, scores, prefix, **common)


def write_vocabulary(writer: "GGUFWriter", gguf: ModuleType, vocabulary: Vocabulary) -> None:
    """Writes a vocabulary into the header of a GGUF file."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([gguf.TokenType[name] for name in vocabulary.types])
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_prefix)
        writer.add_remove_extra_whitespaces(False)
    for role, token in vocabulary.ids.items():
        getattr(writer, f"add_{role}_token_id")(token)
    for role, is_added in vocabulary.adds.items():
        getattr(writer, f"add_add_{role}_token")(is_added)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _type(token: int, words: dict, added: dict, model: dict, is_of_bytes: bool) -> str:
    """Returns the name of a token's type."""
    if token not in words and token not in added:
        return "UNUSED"
    if not is_of_bytes and words.get(token) == model.get("unk_token"):
        return "UNKNOWN"
    if token in added:
        return "CONTROL" if added[token]["special"] else "USER_DEFINED"
    return "BYTE" if not is_of_bytes and _BYTE.fullmatch(words[token]) else "NORMAL"


# ---- byte-level BPE


def _pre(parts: dict) -> str:
    """Returns llama.cpp's name of the pattern that divides a text before byte-level BPE."""
    for step in steps_of(parts, "normalizer"):
        if step["type"] != "NFC":  # llama.cpp has no NFC, but most texts have this form already
            raise ValueError(f"tokenizer has the normalizer {step['type']}; in GGUF it must be NFC")
    patterns = tuple(filter(None, map(_pattern, steps_of(parts, "pre_tokenizer"))))
    key = (patterns, bool(parts["model"].get("ignore_merges")))
    if key not in _PRE:
        named = " and ".join(map(repr, patterns))
        raise ValueError(
            f"tokenizer divides a text by {named} (ignore_merges is {key[1]}); in GGUF it must be "
            "as in GPT-2, SmolLM, Qwen 2, Llama 3 or Tekken"
        )
    return _PRE[key]


def _pattern(step: dict) -> str:
    """Returns the pattern of a pre-tokenizer; "" if it does not divide a text."""
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return _GPT2 if step.get("use_regex", True) else ""
    if step["type"] == "Digits" and step.get("individual_digits"):
        return _DIGIT
    how = (step.get("behavior"), step.get("invert", False))
    if step["type"] == "Split" and how in (("Isolated", False), ("Removed", True)):
        return step["pattern"].get("Regex", repr(step["pattern"]))
    raise ValueError(f"tokenizer has the pre-tokenizer {step}, which llama.cpp lacks")


# ---- BPE of sentencepiece


def _space_prefix(parts: dict) -> bool:
    """Returns whether a space is put before a text; raises ValueError for unknown steps."""
    prefix, marks = False, False
    for step in steps_of(parts, "normalizer"):
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif step["type"] == "Replace" and step["content"] == _SPACE:
            marks = step["pattern"] == {"String": " "}
        else:
            raise ValueError(f"tokenizer has the normalizer {step['type']}, which GGUF lacks")
    for step in steps_of(parts, "pre_tokenizer"):
        if step["type"] == "Metaspace" and step["replacement"] == _SPACE:
            prefix |= step.get("prepend_scheme", "always") != "never"
            marks = True
        elif step["type"] != "Split" or step["pattern"] != {"String": " "}:
            raise ValueError(f"tokenizer has the pre-tokenizer {step['type']}, which GGUF lacks")
    if not marks or not parts["model"].get("byte_fallback"):
        raise ValueError(
            "tokenizer is BPE over characters; in GGUF it must be byte-level BPE, or BPE of "
            "sentencepiece with byte_fallback and ▁ for spaces"
        )
    return prefix


def _scores(tokens: list[str], types: list[str], merges: Iterable[tuple]) -> list[float]:
    """Returns a score for each token: the earlier its first merge, the higher."""
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
    """Warns if llama.cpp merges two tokens that the tokenizer does not merge."""
    known = set(merges)
    for text in vocab:
        for place in range(1, 0 if _BYTE.fullmatch(text) else len(text)):
            pair = text[:place], text[place:]
            if pair not in known and pair[0] in vocab and pair[1] in vocab:
                warnings.warn(
                    f"tokenizer has the tokens {pair[0]!r}, {pair[1]!r} and {text!r} but no merge "
                    "of the first two; llama.cpp merges them, so some texts get other ids there",
                    stacklevel=4,
                )
                return


# ---- special tokens and chat templates


def _special(tokenizer: Tokenizer, vocab_size: int) -> tuple[dict[str, int], dict[str, bool]]:
    """Returns the ids of special tokens by role, and which of them are put around a text."""
    if not isinstance(tokenizer, Subwords):  # our own: the end of text also begins the next one
        (end,) = tokenizer.stop_tokens
        return {"bos": end, "eos": end}, {"bos": True}
    named = _named(tokenizer)
    special, before, after = tokenizer.special, tokenizer.before, tokenizer.after
    begin = before[0] if before else named.get("bos_token", special.begin)
    stops = [*([named["eos_token"]] if "eos_token" in named else ()), *special.stop_tokens]
    end = after[-1] if after else next(iter(stops), None)
    if len(before) > 1 or len(after) > 1:
        raise ValueError(
            f"tokenizer puts the ids {before} before and {after} after a text; in GGUF it must be "
            "at most one id each"
        )
    roles = {"bos": begin, "eos": end}
    roles["eot"] = next((x for x in stops if x != end), None)  # another token that ends a reply
    roles |= {role.removesuffix("_token"): named.get(role) for role in _ROLES}
    roles["pad"] = special.pad if roles["pad"] is None else roles["pad"]
    ids = {role: x for role, x in roles.items() if x is not None and x < vocab_size}
    return ids, {"bos": bool(before), "eos": bool(after)}


def _named(tokenizer: Subwords) -> dict[str, int]:
    """Returns the ids of the special tokens that the settings files name, by role."""
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
    """Returns the chat template, or a list of named ones; None if there is none."""
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
