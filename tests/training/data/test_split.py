"""Every character is in exactly one part, independent of the order and the machine."""

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.training.data import split as module
from jaxformer.training.data.corpus import Documents
from jaxformer.training.data.documents import Document
from tests.errors import error_of

many_cases = settings(max_examples=5 * settings().max_examples)

# 2 to 40 documents, each of 1 to 30 or of 100 to 5,000 characters. Some are copies.
lengths = st.one_of(st.integers(1, 30), st.integers(100, 5000))
contents = st.builds(
    lambda length, seed: "".join(random.Random(seed).choices("abcé猫 \n", k=length)),
    lengths,
    st.integers(0, 20),
)
collections = st.lists(contents, min_size=2, max_size=40).map(
    lambda texts: [Document(f"{number:03}", text) for number, text in enumerate(texts)]
)
fractions = st.sampled_from([0.01, 0.05, 0.1, 0.5])


def split(documents, *arguments, **options):
    """Returns the parts, loaded into memory."""
    parts = module.split(Documents(documents), *arguments, **options)
    return [[Document(some.name, some.text) for some in part] for part in parts]


def _size(documents):
    return sum(len(document.text.encode()) for document in documents)


@many_cases
@given(collections, fractions, st.sampled_from([0, 100, 500_000]))
def test_every_character_is_either_in_training_or_in_held_out_text(
    documents, fraction, minimum_bytes
):
    try:
        train, held_out = split(documents, fraction, minimum_bytes)
    except ValueError:
        assert _size(documents) < 100
        return
    assert train and held_out
    assert all(document.text for document in train + held_out)
    rejoined = {document.name: "" for document in documents}
    for document in train + held_out:
        rejoined[document.name] += document.text
    assert rejoined == dict(documents)
    names = [document.name for document in documents]
    for part in train, held_out:
        assert [document.name for document in part] == [
            name for name in names if name in {document.name for document in part}
        ]


@many_cases
@given(collections, fractions, st.randoms())
def test_train_and_held_out_split_is_independent_of_order_and_names_of_documents(
    documents, fraction, shuffler
):
    shuffled = [Document("renamed " + document.name, document.text) for document in documents]
    shuffler.shuffle(shuffled)
    try:
        parts = split(documents, fraction)
    except ValueError:
        with pytest.raises(ValueError):
            split(shuffled, fraction)
        return
    for part, other in zip(parts, split(shuffled, fraction), strict=True):
        assert Counter(text for _, text in part) == Counter(text for _, text in other)


@many_cases
@given(collections, fractions)
def test_duplicate_documents_are_not_divided_between_train_and_held_out(documents, fraction):
    try:
        train, held_out = split(documents, fraction)
    except ValueError:
        return
    texts = dict(documents)
    whole = [
        {document.text for document in part if document.text == texts[document.name]}
        for part in (train, held_out)
    ]
    assert not whole[0] & whole[1]
    cut = {name for name, _ in train} & {name for name, _ in held_out}
    assert not {texts[name] for name in cut} & (whole[0] | whole[1])


@given(st.integers(0, 1000), st.sampled_from([0.05, 0.1, 0.5]))
def test_the_held_out_part_has_the_requested_size(seed, fraction):
    sizes = random.Random(seed).choices(range(1, 100), k=500)
    documents = [Document("", f"{number} {'x' * size}") for number, size in enumerate(sizes)]
    total = _size(documents)
    _, held_out = split(documents, fraction, minimum_bytes=0)
    assert fraction * total <= _size(held_out) <= 1.25 * fraction * total
    _, held_out = split(documents, fraction, minimum_bytes=10**9)
    aim = max(fraction, 0.1) * total
    assert aim <= _size(held_out) <= 1.25 * aim


def test_only_part_of_a_large_document_is_held_out():
    small = [Document(f"small {number}", f"{number} " * 50) for number in range(200)]
    book = Document("book", "one line\n" * 10_000)
    _, held_out = split([*small, book], 0.1, 0)
    assert 0.08 < len(dict(held_out)["book"]) / len(book.text) <= 0.1
    assert any(name.startswith("small") for name, _ in held_out)


def test_a_single_document_is_split_at_a_line_break():
    lines = [f"line {number} of the book\n" for number in range(1000)]
    (train,), (held_out,) = split([Document("book", "".join(lines))], fraction=0.1, minimum_bytes=0)
    assert train.text + held_out.text == "".join(lines)
    assert train.text.endswith("\n")
    assert 0.099 < len(held_out.text) / len("".join(lines)) <= 0.1


def test_held_out_fraction_of_a_single_long_line_is_exact():
    (train,), (held_out,) = split([Document("line", "x" * 1000)], fraction=0.1, minimum_bytes=0)
    assert (len(train.text), len(held_out.text)) == (900, 100)


def test_minimum_held_out_size_never_exceeds_a_tenth_of_the_text():
    book = [Document("book", "x" * 1_000_000)]
    sizes = [_size(split(book, 0.02, minimum)[1]) for minimum in (0, 50_000, 500_000)]
    assert sizes == [20_000, 50_000, 100_000]


def test_held_out_size_of_a_large_text_stays_near_the_given_maximum():
    """The ends of large documents, or whole small documents, are held out."""
    book = [Document("book", "x" * 1_000_000)]
    assert [_size(split(book, 0.1, 0, most)[1]) for most in (50_000, 10**9)] == [50_000, 100_000]
    small = [Document("", f"{number} {'x' * 90}") for number in range(2000)]
    assert 5000 <= _size(split(small, 0.1, 50_000, 5000)[1]) <= 1.25 * 5000


@many_cases
@given(st.integers(0, 1000), st.integers(30, 400), st.sampled_from([0.01, 0.03, 0.2]))
def test_held_out_size_is_close_to_an_explicit_fraction(seed, number, fraction):
    """Of any text, whole documents are held out up to 1.25 times the fraction, or each one's
    end."""
    sizes = random.Random(seed).choices(range(2, 2000), k=number)
    documents = [Document("", f"{number} {'x' * size}") for number, size in enumerate(sizes)]
    aim = fraction * _size(documents)
    assert aim - number <= _size(split(documents, fraction)[1]) <= 1.25 * aim + number


@pytest.mark.parametrize("fraction", [0, -0.1, 0.51, float("nan")])
def test_split_rejects_fraction_out_of_range(fraction):
    message = f"fraction is {fraction}; it must be in (0, 0.5]"
    assert error_of(split, [Document("a", "text")], fraction) == message


@pytest.mark.parametrize("documents", [[], [Document("a", "x")]])
def test_too_little_text_to_split_is_rejected(documents):
    message = (
        f"documents have {len(documents)} bytes, too few for a training and a held-out part; "
        "give more text"
    )
    assert error_of(split, documents) == message


def _by_hand(documents, fraction, minimum):
    """Implements the split in plain Python, on texts in memory.

    Scores of the default run stay comparable only if the split follows this rule.
    """
    total = _size(documents)
    aim = max(fraction * total, min(minimum, total / 10))
    sizes, texts = {}, {}
    for document in documents:
        digest = hashlib.blake2b(document.text.encode(), digest_size=16).digest()
        sizes[digest] = sizes.get(digest, 0) + document.num_bytes
        texts[digest] = document.text
    cut = {digest for digest, size in sizes.items() if size > aim / 4}
    missing, taken = aim - aim / total * sum(sizes[digest] for digest in cut), set()
    for digest in sorted(sizes.keys() - cut):
        if missing > 0:
            taken.add(texts[digest])
            missing -= sizes[digest]
    train, held_out = [], []
    for name, text in documents:
        position = 0 if text in taken else len(text)
        if text in {texts[digest] for digest in cut}:
            position = max(1, min(round((1 - aim / total) * len(text)), len(text) - 1))
            near = position + (len(text) - position) // 4
            found = text.find("\n", position - 1, near)
            position = position if found < 0 else found + 1
        train += [(name, text[:position])] * (position > 0)
        held_out += [(name, text[position:])] * (position < len(text))
    return [train, held_out]


@many_cases
@given(collections, fractions, st.sampled_from([0, 100, 500_000]))
def test_train_and_held_out_split_equals_a_plain_python_version(documents, fraction, minimum):
    try:
        parts = split(documents, fraction, minimum)
    except ValueError:
        return
    assert parts == _by_hand(documents, fraction, minimum)
