"""What a ``tokenizer.json`` does to a text, read off its parts: whether anything of it is lost, and
whether it may be cut into pieces.

A part that is not known to keep every text counts as one that does not.
"""

from collections.abc import Iterator

NUM_BYTES = 256

# These divide a text and keep all of it, unless they are told to remove what they divide at.
# UnicodeScripts does not: tokenizers 0.23 loses the space that a text begins with.
_DIVIDES = {"ByteLevel", "Digits", "FixedLength", "Punctuation", "Split"}

# What is easily lost: spaces, case, composed and compatible characters, controls, long sequences.
HARD_TEXTS = (
    "".join(map(chr, range(NUM_BYTES))),
    " a  b\t\n\r\n\u00a0\u2028\u3000 c ",
    "É e\u0301 \u212b ﬁ Ⅷ İ ß ﷺ \ufeff\u200b\u200d\ufffd\U0010ffff",
    "x1 23.45_'ll 'S DON'T#猫と犬👩‍👩‍👧\0",
)


def byte_characters() -> list[str]:
    """The visible character by which GPT-2's vocabulary writes each byte, 0 to 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    stand_ins = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(NUM_BYTES)]


def lossy_part(parts: dict, token_bytes: list[bytes]) -> str | None:
    """What in the parts of a tokenizer.json may change a text, in words; None if nothing does.

    token_bytes: what each id stands for. The post-processor is not looked at: it treats all texts
    alike, so that trying one text tells.
    """
    model, vocabulary = parts["model"], parts["model"]["vocab"]
    if parts["normalizer"] is not None:
        return f"its normalizer ({parts['normalizer']['type']}) may change a text"
    steps = list(_steps(parts["pre_tokenizer"]))
    for step in steps:
        removes = step.get("behavior") == "Removed" or step.get("add_prefix_space")
        if step["type"] not in _DIVIDES or removes:
            return f"its pre-tokenizer ({step['type']}) may add or drop characters"
    if [step["type"] for step in steps].count("ByteLevel") != 1:
        return "its pre-tokenizer does not take a text as its bytes (ByteLevel), once"
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"its {name} ({model[name]!r}) is added to words"
    for byte, character in enumerate(byte_characters()):
        if character not in vocabulary or token_bytes[vocabulary[character]] != bytes([byte]):
            return f"no token stands for the byte {byte}"
    for token in _plain(parts["added_tokens"]):
        content = token["content"]
        if token["lstrip"] or token["rstrip"]:
            return f"its added token {content!r} takes in the spaces beside it"
        if content in vocabulary and not content.isascii():
            return f"its added token {content!r} is a token of other bytes as well"
    return None


def divides_at_spaces(parts: dict) -> bool:
    """Whether a word begins at each space that follows a non-space, whatever stands before it.

    So it is with GPT-2's words, in none of which a space follows a non-space, and with digits
    divided beforehand. Of other patterns, and of tokens that are found before the words are, that
    is not known.
    """
    steps = list(_steps(parts["pre_tokenizer"]))
    kinds = [step["type"] for step in steps]
    is_gpt2 = kinds in (["ByteLevel"], ["Digits", "ByteLevel"]) and steps[-1]["use_regex"]
    return is_gpt2 and not any(_plain(parts["added_tokens"]))


def _steps(part: dict | None) -> Iterator[dict]:
    """The pre-tokenizers, one after another, of which one is made."""
    if part is not None and part["type"] == "Sequence":
        for inner in part["pretokenizers"]:
            yield from _steps(inner)
    elif part is not None:
        yield part


def _plain(added_tokens: list[dict]) -> Iterator[dict]:
    """Those that are found in texts: the special ones are not."""
    return (token for token in added_tokens if not token["special"])
