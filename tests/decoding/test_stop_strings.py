"""Stop strings end a text where they first occur, whatever the tokens."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.decoding.stop_strings import StopStrings
from tests.artifacts.test_stream import KINDS

SMALL = ByteTokenizer.train(["aab abc aé ba\n"] * 3, 264)
TEXTS = st.text("abcé \n", min_size=1, max_size=4) | st.text("ab", min_size=2, max_size=5)
STOPS = st.lists(TEXTS, min_size=1, max_size=3).map(tuple)


def state_after(stop, ids, vocab_size):
    """Returns the number of tokens after which the text ends, or None."""
    table, state = stop.table(vocab_size), 0
    for number, token in enumerate(ids, 1):
        state = table[state, token]
        if state == len(table) - 1:
            return number
    return None


@pytest.mark.parametrize("name", ["ours", "byte-fallback BPE", "Unigram with byte fallback"])
@given(
    stops=STOPS, ids=st.lists(st.integers(0, 10**6), max_size=4), text=st.text("ab é", max_size=12)
)
@example(stops=("aab",), ids=[], text="aaab")
def test_text_ends_with_the_first_token_that_completes_a_stop_string(name, stops, ids, text):
    """The reference searches the bytes of all tokens after each token."""
    tokenizer = SMALL if name == "ours" else KINDS[name]
    size = tokenizer.vocab_size + 3  # The model has ids without a token.
    ids = [*(token % size for token in ids), *tokenizer.encode(text)]
    words = [*tokenizer.vocabulary_bytes, b"", b"", b""]
    expected = None
    for number in range(1, len(ids) + 1):
        begun = b"".join(words[token] for token in ids[:number])
        if expected is None and any(stop.encode() in begun for stop in stops):
            expected = number
    assert state_after(StopStrings(tokenizer, stops), ids, size) == expected


class Characters:
    """A stream whose ids are characters, and which returns them at once."""

    def push(self, ids):
        return "".join(map(chr, ids))

    def flush(self):
        return ""


@given(stops=STOPS, parts=st.lists(st.text("ab", max_size=3), max_size=9))
def test_streamed_text_ends_before_the_first_stop_string(stops, parts):
    """The streamed text does not depend on how the text is divided, and shows no stop string."""
    stop, whole = StopStrings(SMALL, stops), "".join(parts)
    stream, shown = stop.stream(Characters()), ""
    for part in parts:
        shown += stream.push(map(ord, part))
        assert stop.cut(whole).startswith(shown)
    assert shown + stream.flush() == stop.cut(whole)
    ends = [whole.find(text) + len(text) for text in stops if text in whole]
    assert stop.cut(whole) == (whole if not ends else whole[: min(ends)])[: len(stop.cut(whole))]
    assert not any(text in stop.cut(whole) for text in stops)


@given(stops=STOPS, whole=st.text("ab", max_size=12))
def test_streamed_text_is_held_back_only_where_a_stop_string_may_begin(stops, whole):
    stream = StopStrings(SMALL, stops).stream(Characters())
    shown = stream.push(map(ord, whole))
    held = whole[len(shown) :]
    assert stream.stopped or not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ((), "texts is empty"),
        (iter(()), "texts is empty"),
        ("ab", "texts is 'ab'"),
        (5, "texts is 5"),
        (("a", ""), "entry ''"),
        ((3,), "entry 3"),
        (("a" * 5000,), "5,000 bytes"),
    ],
)
def test_invalid_stop_strings_raise_an_error_that_names_them(texts, said):
    with pytest.raises(ValueError, match=said):
        StopStrings(SMALL, texts)


def test_stop_strings_are_rejected_for_tokenizer_without_defined_token_bytes():
    with pytest.raises(ValueError, match="WordPiece"):
        StopStrings(KINDS["WordPiece"], ("a",))


def test_stop_strings_are_part_of_the_public_api():
    assert jf.StopStrings is StopStrings
