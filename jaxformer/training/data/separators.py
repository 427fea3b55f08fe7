"""Documents that a written end-of-text token separates, as in dumps of TinyStories or OpenWebText.

A file counts as several documents if it spells out `<|endoftext|>`, or the end of text of another
tokenizer (`_NAMES`), in one of these places:

- alone on a line, or at the beginning or the end of a file or record;
- in a plain text file (`_PLAIN`) also within a line, unless quotes or brackets enclose it, or a
  sentence goes on around it. This only applies to names that no markup uses (`<|…|>`).

Files of code and markup (`_CODE`) are never divided: there the token is a part of the text.
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
_CONTEXT = 64  # characters around a name that decide whether it is a separator
_LONGEST = max(map(len, _NAMES))
_QUOTES, _OPENING, _CLOSING = "\"'`“”‘’«»", "([{", ")]}"
_MARKS = ".,;:!?"  # punctuation after a name that a sentence mentions


class SeparatedText:
    """A source whose documents are divided at the separators that are written in them.

    Attributes:
        source: The undivided source.
        found: The separators of the last complete reading, with the number of each.
    """

    def __init__(self, source: Source):
        """Wraps a source without reading it."""
        self.source, self.found = source, Counter()
        self._inline = documents.suffix_of(source.path) in _PLAIN

    @property
    def path(self) -> str:
        """Path of the source."""
        return self.source.path

    def documents(self) -> Iterator[Document | TextFile]:
        """Yields the documents between the separators, in memory, except blank ones.

        Documents of the source that have no separator are yielded unchanged.
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
    """Returns the source, divided at its written separators if it may have any.

    A file of text without separators is returned unchanged, because it may be larger than memory.
    """
    if documents.suffix_of(source.path) in _CODE:
        return source
    if isinstance(source, TextFile) and not _has_separators(source):
        return source
    return SeparatedText(source)


def separators_in(source: Source) -> Counter[str]:
    """Returns the separators that divided a source when it was last read, with their numbers."""
    return source.found if isinstance(source, SeparatedText) else Counter()


def _has_separators(file: TextFile) -> bool:
    """Returns whether a separator divides the file; False if the file cannot be read."""
    inline = documents.suffix_of(file.path) in _PLAIN
    try:
        if _spells_name(file.path):
            return any(name for _, name in divided(file.pieces(), inline=inline))
    except ValueError:  # the file is read again, and the error is reported then
        pass
    return False


def _spells_name(path: str) -> bool:
    """Returns whether the bytes of a file hold any of the names."""
    names, rest = re.compile("|".join(map(re.escape, _NAMES)).encode()), b""
    for data in documents.read_pieces(path):
        if names.search(rest + data):
            return True
        rest = data[-4 * _LONGEST :]
    return False


def divided(parts: Iterable[str], *, inline: bool) -> Iterator[tuple[str, str | None]]:
    """Divides a text at its separators.

    The line break after a separator is removed, too. Of a separator that is alone on a line, the
    whole line is removed.

    Args:
        parts: The text, in parts of any size.
        inline: Whether names within a line count, too.

    Yields:
        (the text up to a separator, the name of the separator). The last name is None.
    """
    text, begin, at = "", 0, 0  # the document begins at `begin`; it is searched up to `at`
    for _, is_last, part in documents.marked(parts):
        text, begin, at = text[begin:] + part, 0, at - begin
        while match := _PATTERN.search(text, at):
            at = match.start()
            if not is_last and match.end() + _CONTEXT > len(text):
                break  # the next part decides
            at = match.end()
            if (place := _place(text, begin, match, inline)) is not None:
                yield text[begin : place[0]], match[0]
                begin = at = place[1]
        else:
            at = max(at, len(text) - _LONGEST + 1)
    yield text[begin:], None


def _place(text: str, begin: int, match: re.Match[str], inline: bool) -> tuple[int, int] | None:
    """Returns the first and last position of a separator; None if the name is a part of the text.

    Args:
        text: The text around it.
        begin: The position where its document begins.
        match: The name.
        inline: Whether names within a line count, too.
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
    """Returns whether a name within a line is a word of a sentence or of code.

    It is if quotes or brackets enclose it, or if it stands inside a sentence. A quote that ends a
    sentence before the name does not enclose it: `he said."<|endoftext|>"Well`.
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
