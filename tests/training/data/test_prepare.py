"""From documents to the files of tokens that a run reads."""

import io
import json
import random
from operator import sub

import pytest

from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config import DecoderConfig
from jaxformer.training.config import Inputs, TextTraining
from jaxformer.training.data import prepare
from jaxformer.training.data.corpus import Documents
from jaxformer.training.data.documents import Document
from jaxformer.training.data.prepare import gather, read_data, write_data
from jaxformer.training.screen import Screen

MODEL = DecoderConfig(vocab_size=257, max_length=16, num_layers=1, embed_dim=8, num_heads=1)


@pytest.mark.parametrize(
    ("kilobytes", "held_out", "share"),
    [
        (200, 0.01, 0.01),  # what is asked for, whatever the size
        (200, 0.2, 0.2),
        (200, None, 0.1),  # otherwise at least so many bytes, but a tenth at most …
        (600, None, 50 / 600),
        (1200, None, 0.05),  # … and 5% where that is more …
        (200, 0.5, 0.5),
    ],
)
def test_the_flag_says_how_much_is_held_out(tmp_path, monkeypatch, kilobytes, held_out, share):
    """At a tenth of the sizes in use, and so of the time."""
    assert prepare.DEFAULT_SPLIT == (0.05, 500_000, 10_000_000)
    monkeypatch.setattr(prepare, "DEFAULT_SPLIT", (0.05, 50_000, 60_000))
    lines = random.Random(0).choices(["one\n", "two words\n", "three\n"], k=100)
    documents = Documents(
        [Document("a", "".join(lines) * round(kilobytes * 1e3 / len("".join(lines))))]
    )
    folder = RunFolder(tmp_path / "run")
    write_data(folder, TextTraining(model=MODEL, held_out=held_out), documents, [], Screen())
    data = read_data(folder)
    sizes = data.train.num_bytes, data.held_out.num_bytes
    assert sizes[1] / sum(sizes) == pytest.approx(share, rel=0.002)


def test_a_tokenizer_learns_from_a_share_taken_from_all_over_the_text(monkeypatch):
    """Between words, and from all of it where the text is small."""
    monkeypatch.setattr(prepare, "_SAMPLED_TOGETHER", 100)
    words = list(map(str, range(6000)))
    documents = [Document("", " ".join(words[at : at + 2000])) for at in (0, 2000, 4000)]
    size = sum(len(document.text) for document in documents)
    assert sum(map(len, prepare._sample(documents, 1.0))) == size
    sample = list(prepare._sample(documents, 0.25))
    assert 0.24 * size < sum(map(len, sample)) <= 0.25 * size
    places = [int(word) for piece in sample for word in piece.split()]
    assert places == sorted(places) and max(map(sub, places[1:], places)) < 200


def test_what_is_left_out_and_repeated_is_said_and_listed(tmp_path):
    """On the screen how much; in documents.txt, file by file, why, with records counted."""
    folder, line = RunFolder(tmp_path / "run"), "one long line that stands in many a document " * 2
    texts = [f"{line}\ndocument {number}\n" + "word " * 50 for number in range(40)]
    (tmp_path / "text").mkdir()
    records = "".join(json.dumps({"text": text}) + "\n" for text in [*texts[:20], texts[0]])
    (tmp_path / "text" / "a.jsonl").write_text(records)
    for number, text in enumerate(texts[20:]):
        (tmp_path / "text" / f"{number:02}.txt").write_text(text)
    (tmp_path / "text" / "copy.txt").write_text(texts[30])
    (tmp_path / "text" / "image.png").write_bytes(b"\x89PNG\0")
    config, said = TextTraining(model=MODEL), io.StringIO()
    screen = Screen(file=said)
    documents, skipped = gather(Inputs((tmp_path / "text",)), config, screen)
    write_data(folder, config, documents, skipped, screen)
    assert "left out, in part or whole: 3 files\n" in said.getvalue()
    listed = folder.documents.read_text().splitlines()
    image = tmp_path / "text" / "image.png"
    reason = f"{image}: not a text file (it has NUL bytes)"
    assert f"skipped              {reason}" in listed and reason in said.getvalue()
    assert sum("copy.txt: a copy of" in entry for entry in listed) == 1
    assert sum("a.jsonl: 1 of 21 records" in entry for entry in listed) == 1
    data = read_data(folder)
    assert data.train.num_documents + data.held_out.num_documents >= 40
    sizes = [int(entry.split()[1]) for entry in listed if entry.startswith("train")]
    assert sum(sizes) == data.train.num_bytes
    (repeated,) = (entry for entry in listed if "held-out lines" in entry)
    assert repeated in said.getvalue() and not repeated.startswith("0 of")
