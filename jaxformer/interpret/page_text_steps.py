r"""Converts the steps of a tokenizer.json to simple steps that `page/tokenizer_steps.js` runs.

The page has these steps: "form" (a Unicode normalization form), "lower", "characters" (see
`page_charsmap.py`), "replace", "prepend", "split" and "bytes". A step that has no translation
raises `Unsupported`.
"""

from typing import Any

from jaxformer.artifacts.tokenizer_parts import list_steps
from jaxformer.interpret.page_charsmap import characters_step
from jaxformer.interpret.page_patterns import (
    END,
    WHITE_SPACE,
    Unsupported,
    js_literal,
    js_pattern,
)

# GPT-2's pattern, which the ByteLevel step uses.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The characters that `\w` matches in the Rust crate regex; Oniguruma's `\w` differs.
RUST_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_C}"
_PUNCTUATION = r"[!-\/:-@\[-`\{-~\p{P}]"  # the punctuation of ASCII and of Unicode
_CHINESE = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}"
    r"\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]"
)
_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}

Step = dict[str, Any]


def normalizer_steps(parts: dict[str, Any]) -> list[Step]:
    """Returns the steps that replace the normalizer.

    Raises:
        Unsupported: The page does not implement the normalizer.
    """
    return [new for old in list_steps(parts, "normalizer") for new in _normalizer(old)]


def pre_tokenizer_steps(parts: dict[str, Any]) -> list[Step]:
    """Returns the steps that replace the pre-tokenizer.

    Raises:
        Unsupported: The page does not implement the pre-tokenizer.
    """
    old_steps = list_steps(parts, "pre_tokenizer")
    shortens = {"Strip", "StripAccents", "BertNormalizer", "Precompiled"}
    kinds = {step["type"] for step in list_steps(parts, "normalizer")}
    if kinds & shortens and any(step.get("prepend_scheme") == "first" for step in old_steps):
        raise Unsupported(
            "the page has no Metaspace with the prepend_scheme 'first' after the normalizer "
            f"{min(kinds & shortens)}"
        )
    return [new for old in old_steps for new in _pre_tokenizer(old)]


def decoder_steps(parts: dict[str, Any]) -> list[Step]:
    """Returns the steps of the decoder, which `page/token_decoder.js` runs without changes.

    Raises:
        Unsupported: The page does not implement the decoder.
    """
    steps = list_steps(parts, "decoder")
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            continue
        if step["type"] not in _DECODERS:
            raise Unsupported(f"the page has no decoder {step['type']}")
    return steps


def _normalizer(step: Step) -> list[Step]:
    kind = step["type"]
    if kind in _FORMS:
        return [{"type": "form", "form": kind}]
    if kind == "Lowercase":
        return [{"type": "lower"}]
    if kind == "StripAccents":
        return [_replace(r"\p{M}", "")]
    if kind == "Strip":
        left = [_replace(f"^{WHITE_SPACE}+", "")] if step["strip_left"] else []
        # Without the lookbehind, the time is quadratic in the number of spaces within the text.
        right = _replace(f"(?<!{WHITE_SPACE}){WHITE_SPACE}+{END}", "")
        return left + [right] * step["strip_right"]
    if kind == "Prepend":
        return [{"type": "prepend", "text": step["prepend"]}]
    if kind == "Replace":
        return [_replace(_source(step["pattern"]), _as_content(step["content"]))]
    if kind == "Precompiled":
        return [characters_step(step["precompiled_charsmap"])]
    if kind == "BertNormalizer":
        return _bert_normalizer(step)
    raise Unsupported(f"the page has no normalizer {kind}")


def _bert_normalizer(step: Step) -> list[Step]:
    steps = []
    if step["clean_text"]:
        steps += [_replace(r"(?![\t\n\r])[\0\ufffd\p{Cc}\p{Cf}\p{Co}]", "")]
        steps += [_replace(WHITE_SPACE, " ")]
    if step["handle_chinese_chars"]:
        steps.append(_replace(_CHINESE, " $& "))
    strips_accents = step["strip_accents"]
    if step["lowercase"] if strips_accents is None else strips_accents:
        steps += [{"type": "form", "form": "NFD"}, _replace(r"\p{Mn}", "")]
    return steps + [{"type": "lower"}] * step["lowercase"]


def _pre_tokenizer(step: Step) -> list[Step]:
    kind = step["type"]
    if kind == "ByteLevel":
        prefix = [_prepend(" ", "always")] if step["add_prefix_space"] else []
        split = [_split(js_pattern(_GPT2))] if step["use_regex"] else []
        return [*prefix, *split, {"type": "bytes"}]
    if kind == "Metaspace":
        sign = step["replacement"]
        steps = [_replace(" ", _as_content(sign))]
        if step["prepend_scheme"] != "never":
            steps.append(_prepend(sign, step["prepend_scheme"]))
        return steps + [_split(js_literal(sign), "MergedWithNext")] * step["split"]
    if kind == "Split":
        return [_split(_source(step["pattern"]), step["behavior"], step["invert"])]
    if kind == "Digits":
        return [_split(r"\p{N}", "Isolated" if step["individual_digits"] else "Contiguous")]
    if kind == "Punctuation":
        return [_split(_PUNCTUATION, step["behavior"])]
    if kind == "Whitespace":
        words = rf"[{RUST_WORD}]+|[^{RUST_WORD}{WHITE_SPACE}]+"
        return [_split(words, "Removed", invert=True)]
    if kind in ("WhitespaceSplit", "BertPreTokenizer"):
        punctuation = [_split(_PUNCTUATION)] if kind == "BertPreTokenizer" else []
        return [_split(WHITE_SPACE, "Removed"), *punctuation]
    if kind == "CharDelimiterSplit":
        return [_split(js_literal(step["delimiter"]), "Removed")]
    if kind == "FixedLength":
        return [_split(f"[^]{{1,{step['length']}}}")]
    raise Unsupported(f"the page has no pre-tokenizer {kind}")


def _source(pattern: dict[str, str]) -> str:
    """Returns the JavaScript source of a pattern, {"String": …} or {"Regex": …}."""
    if "String" not in pattern:
        return js_pattern(pattern["Regex"])
    if not pattern["String"]:
        raise Unsupported("the page has no replacement or split at an empty text")
    return js_literal(pattern["String"])


def _as_content(text: str) -> str:
    """Escapes the sign `$`, which has a meaning in the replacements of JavaScript."""
    return text.replace("$", "$$")


def _replace(pattern: str, content: str) -> Step:
    return {"type": "replace", "pattern": pattern, "content": content}


def _prepend(text: str, scheme: str) -> Step:
    """Returns the step that prepends `text` to a piece that does not begin with `text`."""
    return {"type": "prepend", "text": text, "once": True, "only_first": scheme == "first"}


def _split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> Step:
    return {"type": "split", "pattern": pattern, "behavior": behavior, "invert": invert}
