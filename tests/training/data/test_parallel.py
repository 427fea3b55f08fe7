"""Reading and splitting of parallel text."""

import gzip
import hashlib
import json
from collections import Counter

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.artifacts.tokenizer_copies import lowercased
from jaxformer.models.config import EncoderDecoderConfig
from jaxformer.training.config import PairTraining
from jaxformer.training.data.pairs import read_pairs, split_pairs
from jaxformer.training.data.split import similarity_groups
from jaxformer.training.screen import Screen
from jaxformer.training.tasks.pairs import Pairs


def test_parallel_files_are_read_line_by_line(tmp_path):
    """A plain file and a compressed file are read together, and lines are unchanged."""
    (tmp_path / "a.en").write_text("one\n two, \nthree\n", encoding="utf-8")
    with gzip.open(tmp_path / "a.fr.gz", "wt", encoding="utf-8") as file:
        file.write("un\ndeux\u2028\ntrois")
    assert read_pairs(tmp_path / "a.en", tmp_path / "a.fr.gz") == [
        ("one", "un"),
        (" two, ", "deux\u2028"),
        ("three", "trois"),
    ]


# A line may contain a carriage return and other Unicode line separators.
separators = st.sampled_from("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
pieces = st.one_of(st.text(st.characters(exclude_characters="\n", codec="utf-8")), separators)
lines = st.lists(pieces, min_size=1, max_size=4).map("".join).map(lambda line: f"a{line}z")


@given(lines=st.lists(lines, min_size=1), ends=st.randoms(), packed=st.booleans())
def test_only_line_feeds_end_a_line_of_parallel_text(tmp_path_factory, lines, ends, packed):
    r"""A line ends at "\n" or "\r\n" only, so that line n of both files is the same pair.

    The last line may end without a line feed.
    """
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
def test_parallel_files_with_different_numbers_of_lines_are_rejected(tmp_path, target, message):
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n")
    (tmp_path / "a.fr").write_text(target)
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path / "a.en", tmp_path / "a.fr")


def test_parallel_files_that_are_not_text_are_rejected(tmp_path):
    (tmp_path / "a.en").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    (tmp_path / "not.gz").write_text("plain\n")
    whole = bytearray(gzip.compress(b"one\n"))
    whole[10] = 7  # an invalid block type, for which zlib raises its own exception
    (tmp_path / "torn.gz").write_bytes(whole)
    for name, message in (
        ("a.en", "the file is empty"),
        ("missing", "missing: no such file"),
        ("bytes", "bytes: line 1 is not UTF-8 text"),
        ("not.gz", "not.gz: not a gzipped file"),
        ("torn.gz", "torn.gz: error -3"),
    ):
        with pytest.raises(ValueError, match=message):
            read_pairs(tmp_path / name, tmp_path / "a.en")


def test_damaged_line_of_parallel_text_is_reported(tmp_path):
    """This includes small files, whose checksum is read last."""
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


def test_one_file_may_contain_both_source_and_target_texts(tmp_path):
    """The columns are separated by a tab, or in one of two JSON formats, compressed or not."""
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
        ("a.txt", "one\tun\n", "a.txt: --target is missing; only files with the suffixes"),
        ("a.tsv", "one\tun\ntwo\n", "a.tsv: line 2 has 1 columns"),
        ("a.tsv", "one\tun\tdeux\n", "a.tsv: line 1 has 3 columns"),
        ("a.tsv", "one\t \n", "a.tsv: line 1 is empty"),
        ("a.jsonl", '["one"', "a.jsonl: line 1 is not valid JSON"),
        ("a.jsonl", '["one"]', "a.jsonl: line 1 is neither"),
        ("a.jsonl", '["one", 2]', "a.jsonl: line 1 is neither"),
        ("a.jsonl", '{"source": "one"}', "a.jsonl: line 1 is neither"),
        ("a.jsonl", "[" * 100_000, "a.jsonl: line 1 is not valid JSON"),
    ],
)
def test_parallel_file_without_sources_or_targets_is_rejected(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path / name)


sides = st.text("abcdAÀé ", min_size=1, max_size=2)


def _reader(kind):
    """Returns a tokenizer that ignores certain differences between texts."""
    if kind == "bytes":
        return ByteTokenizer.train((), 257)
    if kind == "bytes in lower case":
        return lowercased(ByteTokenizer.train((), 257))
    backend = tokenizers.Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, "?"))
    backend.normalizer = {
        "words, accents stripped": normalizers.BertNormalizer(strip_accents=True, lowercase=False),
        "words": normalizers.Replace("d", "b"),
    }[kind]
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return Subwords(backend, SpecialTokens((0,)))


READERS = ("bytes", "bytes in lower case", "words, accents stripped", "words")


@pytest.mark.parametrize("reader", READERS)
def test_held_out_sources_differ_in_tokens_from_training_sources(reader):
    """Held-out and training sources never differ only in case, accents or white space."""
    tokenizer = _reader(reader)

    @given(st.lists(sides, min_size=2, max_size=30), st.floats(0.01, 0.5))
    def check(sources, fraction):
        try:
            train, held_out = split_pairs([(s, s) for s in sources], fraction, tokenizer)
        except ValueError as error:
            assert "at least 2 are needed" in str(error)
            return
        views = [lambda text: tuple(tokenizer.encode(text)), lambda text: text.lower().split()]
        for view in views:
            assert not any(view(held) == view(known) for held, _ in held_out for known, _ in train)

    check()


@given(st.lists(st.text("ab", max_size=3), min_size=2))
def test_source_is_held_out_independently_of_other_sources(sources):
    """If no sources are similar, the split depends only on the digest of each source."""
    digests = {hashlib.blake2b(s.encode(), digest_size=16).digest(): s for s in sources}
    assume(len(digests) > 1)
    _, held_out = split_pairs([(s, s) for s in sources], 1e-9, _reader("bytes"))
    assert {source for source, _ in held_out} == {digests[min(digests)]}


@given(st.lists(st.tuples(sides, sides), min_size=2), st.none() | st.floats(0.01, 0.5))
def test_all_pairs_of_a_source_are_in_the_same_split(pairs, fraction):
    """Every pair is in one part, in order, and all pairs of a source are in the same part.

    The number of held-out pairs is close to the requested fraction.
    """
    sources = set(similarity_groups([source for source, _ in pairs]))
    if len(sources) < 2:
        with pytest.raises(ValueError, match="at least 2 are needed"):
            split_pairs(pairs, fraction)
        return
    train, held_out = split_pairs(pairs, fraction)
    held = {source for source, _ in held_out}
    assert train and held_out and not held & {source for source, _ in train}
    assert [pair for pair in pairs if pair[0] in held] == held_out
    assert [pair for pair in pairs if pair[0] not in held] == train
    labels = similarity_groups([source for source, _ in pairs])
    most = max(map(labels.count, labels))
    assert len(held_out) <= max(1, (fraction or 0.05) * len(pairs)) + most


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.TSV", "a.tsv.GZ", "a.jsonl.zst"])
def test_parallel_files_may_have_byte_order_mark_and_upper_case_suffix(name, tmp_path):
    columns = ("one", "eins")
    line = "\t".join(columns) if ".tsv" in name.lower() else json.dumps(columns)
    data = f"\ufeff{line}\r\n{line}\n".encode()
    if name.endswith(".GZ"):
        data = gzip.compress(data)
    elif name.endswith(".zst"):
        data = pytest.importorskip("pyarrow").compress(data, "zstd", asbytes=True)
    (tmp_path / name).write_bytes(data)
    assert read_pairs(tmp_path / name) == [columns, columns]


def test_sources_equal_after_lowercasing_are_in_the_same_split(tmp_path):
    """No side of a pair loses tokens in the token files."""
    spell = (str.lower, str.capitalize, str.upper)
    pairs = [(change(f"sentence {n} ΟΔΟΣ"), f"satz {n}") for n in range(60) for change in spell]
    sizes = {"vocab_size": 280, "max_length": 64, "num_layers": 1, "embed_dim": 8, "num_heads": 1}
    model = EncoderDecoderConfig(**sizes)
    config, folder = (
        PairTraining(model=model, validation_fraction=0.2, lowercase=True),
        RunFolder(tmp_path),
    )
    Pairs.write(folder, config, pairs, Screen(quiet=True))
    task = Pairs.read(folder, config)
    learnt, held_out = (
        [tuple(task.tokenizer.decode(side.tolist()) for side in pair) for pair in part]
        for part in (task.train, task.held_out)
    )
    assert len(held_out) == 36 and not {s for s, _ in learnt} & {s for s, _ in held_out}
    assert {x.casefold() for x, _ in learnt + held_out} == {x.casefold() for x, _ in pairs}
    assert Counter(target for _, target in learnt + held_out) == Counter(t for _, t in pairs)
