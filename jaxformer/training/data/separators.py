"""Splits text at end-of-text tokens that are spelled out, as in TinyStories and OpenWebText.

`_NAMES` lists `<|endoftext|>` and the end-of-text tokens of other tokenizers. A file is split into
documents at such a token in these places:

- The token is alone on a line, or at the start or the end of a file or record.
- The token is within a line of a plain text file (`_PLAIN`), but not in quotes, in brackets or
  inside a sentence. This rule applies only to tokens of the form `<|…|>`, which markup does not
  use.

Source code and markup files (`_CODE`) are never split, because there such a token is content.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from jaxformer.artifacts.byte_tokenizer import END_OF_TEXT
from jaxformer.training.data import documents
from jaxformer.training.data.documents import Document, Source, TextFile

_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<|endofdocument|>", "<|eos|>", "<｜end▁of▁sentence｜>")
_NAMES += ("</s>", "<eos>", "<EOS>", "[EOS]")
_PATTERN = re.compile("|".join(map(re.escape, _NAMES)))
_PLAIN = frozenset(("", *".txt .text .raw .train .valid .val .dev .test .tokens".split()))
_CODE = frozenset(
    """.py .pyi .ipynb .js .jsx .ts .tsx .c .h .cc .cpp .hpp .cs .rs .go .java .kt .scala .swift .rb
    .php .pl .lua .jl .r .m .sh .sql .html .htm .xml .css .md .rst .tex .json5 .yaml .yml .toml .cfg
    .ini .jinja .j2 .diff .patch""".split()
)
# Number of characters on each side of a token that `_place` examines to recognize a separator.
_CONTEXT = 64
_LONGEST = max(map(len, _NAMES))
_QUOTES, _OPENING, _CLOSING = "\"'`“”‘’«»", "([{", ")]}"
# Punctuation that may follow a token inside a sentence.
_MARKS = ".,;:!?"


class SeparatedText:
    """A source whose documents are split at the separators in their text.

    Attributes:
        source: The unsplit source.
        found: The number of occurrences of each separator; empty until all documents have been
            read.
    """

    def __init__(self, source: Source):
        """Creates the source without reading any document."""
        self.source, self.found = source, Counter()
        self._inline = documents.format_suffix(source.path) in _PLAIN

    @property
    def path(self) -> str:
        """Path of the source."""
        return self.source.path

    def documents(self) -> Iterator[Document | TextFile]:
        """Yields the documents between the separators, except blank documents.

        Documents without a separator are yielded unchanged.
        """
        found: Counter[str] = Counter()
        for document in self.source.documents():
            if isinstance(document, Document) and not _PATTERN.search(document.text):
                yield document
                continue
            for text, name in divided(document.pieces(), inline=self._inline):
                found.update([name] if name else ())
                if text.strip():
                    yield Document(document.name, text)
        self.found = found


def with_separators(source: Source) -> Source:
    """Wraps a source so that its documents are split at separators.

    Source code and markup are returned unchanged. Text files without separators are also returned
    unchanged, because `SeparatedText` would load the file as one document. This document could be
    larger than memory.
    """
    if documents.format_suffix(source.path) in _CODE:
        return source
    if isinstance(source, TextFile) and not _has_separators(source):
        return source
    return SeparatedText(source)


def separators_in(source: Source) -> Counter[str]:
    """Returns how often each separator occurs in a source whose documents have been read."""
    return source.found if isinstance(source, SeparatedText) else Counter()


def _has_separators(file: TextFile) -> bool:
    """Returns whether a file contains a separator. If the file cannot be read, returns False."""
    inline = documents.format_suffix(file.path) in _PLAIN
    try:
        if _spells_name(file.path):
            return any(name for _, name in divided(file.pieces(), inline=inline))
    except ValueError:  # A later read raises the same error.
        pass
    return False


def _spells_name(path: str) -> bool:
    """Returns whether a file contains an end-of-text token from `_NAMES`."""
    names, rest = re.compile("|".join(map(re.escape, _NAMES)).encode()), b""
    for data in documents.read_pieces(path):
        if names.search(rest + data):
            return True
        rest = data[-4 * _LONGEST :]
    return False


def divided(parts: Iterable[str], *, inline: bool) -> Iterator[tuple[str, str | None]]:
    """Splits a text at its separators.

    The line break after a separator is removed. If a separator is alone on a line, the whole line
    is removed.

    Args:
        parts: The text, in parts of any size.
        inline: Whether a token within a line may be a separator.

    Yields:
        (the text up to a separator, the separator). The last pair is (the remaining text, None).
    """
    # `begin` is the start of the document, and `at` is the end of the searched text.
    text, begin, at = "", 0, 0
    for _, is_last, part in documents.marked(parts):
        text, begin, at = text[begin:] + part, 0, at - begin
        while match := _PATTERN.search(text, at):
            at = match.start()
            if not is_last and match.end() + _CONTEXT > len(text):
                break  # The text after the token is incomplete.
            at = match.end()
            if (place := _place(text, begin, match, inline)) is not None:
                yield text[begin : place[0]], match[0]
                begin = at = place[1]
        else:
            at = max(at, len(text) - _LONGEST + 1)
    yield text[begin:], None


def _place(text: str, begin: int, match: re.Match[str], inline: bool) -> tuple[int, int] | None:
    """Returns the start and end of a separator, or None if the token is not a separator.

    Args:
        text: The text around the token.
        begin: The index at which the document begins.
        match: The regular expression's match of the token.
        inline: Whether a token within a line may be a separator.
    """
    start, end = match.span()
    left, right = text[max(begin, start - _CONTEXT) : start], text[end : end + _CONTEXT]
    margin, rest = left.rstrip(" \t"), right.lstrip(" \t\r")
    is_begin = start - begin < _CONTEXT and not left.strip()
    is_end = end + _CONTEXT > len(text) and not right.strip()
    begins_line, ends_line = is_begin or margin.endswith("\n"), is_end or rest.startswith("\n")
    if not (begins_line and ends_line) and not is_begin and not is_end:
        within = inline and match[0].startswith("<|")
        if not within or _is_mentioned(left, right):
            return None
    start -= len(left) - len(margin) if begins_line else 0
    end += len(right) - len(rest) + (not is_end) if ends_line else 0
    return start, end


def _is_mentioned(left: str, right: str) -> bool:
    """Returns whether an end-of-text token within a line is part of a sentence or of code.

    A token in quotes or brackets is part of a sentence. A token is also part of a sentence if the
    sentence continues after the token. A token between two quotations is a separator, as in
    `he said."<|endoftext|>"Well`.
    """
    if not left or not right:
        return False
    begins_word = not left[:-1].rstrip(_QUOTES)[-1:].strip(" \t\n=,:;" + _OPENING)
    opens = left[-1] in _OPENING or (left[-1] in _QUOTES and begins_word)
    if opens and right[0] in _QUOTES + _CLOSING:
        return True
    follows_word = left[-1] == " " and left.rstrip()[-1:].isalnum()
    return follows_word and (
        right[0] in _MARKS or (right[0] == " " and right.lstrip()[:1].islower())
    )
