"""Parallel text: what is read, and what is refused."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.training.data.parallel import read_pairs, split_pairs


def test_files_are_read_line_by_line(tmp_path):
    """Plain and gzip, side by side; a line keeps what is in it."""
    (tmp_path / "a.en").write_text("one\n two, \nthree\n", encoding="utf-8")
    with gzip.open(tmp_path / "a.fr.gz", "wt", encoding="utf-8") as file:
        file.write("un\ndeux\u2028\ntrois")
    assert read_pairs(tmp_path / "a.en", tmp_path / "a.fr.gz") == [
        ("one", "un"),
        (" two, ", "deux\u2028"),
        ("three", "trois"),
    ]


# Whatever Unicode calls the end of a line, and a carriage return, may stand within one.
separators = st.sampled_from("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
pieces = st.one_of(st.text(st.characters(exclude_characters="\n", codec="utf-8")), separators)
lines = st.lists(pieces, min_size=1, max_size=4).map("".join).map(lambda line: f"a{line}z")


@given(lines=st.lists(lines, min_size=1), ends=st.randoms(), packed=st.booleans())
def test_a_line_ends_at_a_line_feed_alone(tmp_path_factory, lines, ends, packed):
    """Or at a carriage return and a line feed; the last one may have no end. So line n of one side
    stands beside line n of the other."""
    path = tmp_path_factory.mktemp("lines") / ("a.gz" if packed else "a")
    text = "".join(line + ends.choice(["\n", "\r\n"]) for line in lines)
    text = text[:-1] if ends.random() < 0.5 and not text.endswith("\r\n") else text
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert read_pairs(path, path) == [(line, line) for line in lines]


@pytest.mark.parametrize(
    "target, message",
    [
        ("un\ndeux\n", "a.en has 3 lines and .*a.fr has 2"),
        ("un\n \ntrois\n", "a.fr: line 2 is empty"),
        ("un\ndeux\n\n", "a.fr: line 3 is empty"),
    ],
)
def test_texts_that_are_not_parallel_are_refused(tmp_path, target, message):
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n")
    (tmp_path / "a.fr").write_text(target)
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path / "a.en", tmp_path / "a.fr")


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.en").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    (tmp_path / "not.gz").write_text("plain\n")
    whole = bytearray(gzip.compress(b"one\n"))
    whole[10] = 7  # a kind of block that there is not: zlib's own kind of error
    (tmp_path / "torn.gz").write_bytes(whole)
    for name, message in (
        ("a.en", "there are no lines"),
        ("missing", "missing: no such file"),
        ("bytes", "bytes: line 1 is not UTF-8 text"),
        ("not.gz", "not.gz: not a gzipped file"),
        ("torn.gz", "torn.gz: error -3"),
    ):
        with pytest.raises(ValueError, match=message):
            read_pairs(tmp_path / name, tmp_path / "a.en")


def test_a_damaged_line_is_named(tmp_path):
    """However small the file: its digest is the last thing that is read."""
    lines = "".join(f"{n * 7919 % 10007}\n" for n in range(300))
    whole = gzip.compress(lines.encode())
    for name, content, message in (
        ("cut.gz", whole[:-300], r"cut.gz: damaged at line \d\d+: "),
        ("digest.gz", whole[:-8] + bytes(8), "digest.gz: damaged at line 301: "),
        ("bytes", b"one\ntwo\n\xff\n", "bytes: line 3 is not UTF-8 text"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_pairs(tmp_path / name, tmp_path / name)


def test_one_file_holds_both_sides(tmp_path):
    """A tab between them, or JSON of two kinds, packed or not."""
    pairs = [("one", "un"), (" two, ", "deux")]
    objects = [{"target": target, "source": source, "id": 3} for source, target in pairs]
    texts = {
        "a.tsv": "".join(f"{source}\t{target}\n" for source, target in pairs),
        "a.jsonl": "".join(json.dumps(pair) + "\n" for pair in pairs),
        "b.jsonl": "".join(json.dumps(entry) + "\r\n" for entry in objects),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        assert read_pairs(tmp_path / name) == read_pairs(tmp_path / f"{name}.gz") == pairs


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.txt", "one\tun\n", "a.txt: --target is missing; one file holds both sides only as"),
        ("a.tsv", "one\tun\ntwo\n", "a.tsv: line 2 has 1 columns"),
        ("a.tsv", "one\tun\tdeux\n", "a.tsv: line 1 has 3 columns"),
        ("a.tsv", "one\t \n", "a.tsv: line 1 is empty"),
        ("a.jsonl", '["one"', "a.jsonl: line 1 is no JSON"),
        ("a.jsonl", '["one"]', "a.jsonl: line 1 is neither"),
        ("a.jsonl", '["one", 2]', "a.jsonl: line 1 is neither"),
        ("a.jsonl", '{"source": "one"}', "a.jsonl: line 1 is neither"),
        ("a.jsonl", "[" * 100_000, "a.jsonl: line 1 is no JSON"),
    ],
)
def test_what_does_not_hold_both_sides_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path / name)


sides = st.text("abcd", min_size=1, max_size=2)


@given(st.lists(st.tuples(sides, sides), min_size=2), st.none() | st.floats(0.01, 0.5))
def test_what_is_held_out_has_no_source_that_is_learnt(pairs, fraction):
    """Every pair is on one side, in its order; about as many are held out as were asked for, those
    of a source together."""
    sources = {source for source, _ in pairs}
    if len(sources) < 2:
        with pytest.raises(ValueError, match="too few to hold some out"):
            split_pairs(pairs, fraction)
        return
    train, held_out = split_pairs(pairs, fraction)
    held = {source for source, _ in held_out}
    assert train and held_out and not held & {source for source, _ in train}
    assert [pair for pair in pairs if pair[0] in held] == held_out
    assert [pair for pair in pairs if pair[0] not in held] == train
    most = max(sum(other == source for other, _ in pairs) for source in held)
    assert len(held_out) <= max(1, (fraction or 0.05) * len(pairs)) + most
