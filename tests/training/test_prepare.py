"""From documents to the files of tokens that a run reads."""

import random

import pytest

from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config import DecoderConfig
from jaxformer.training import prepare
from jaxformer.training.config import TextTraining
from jaxformer.training.corpus import Documents
from jaxformer.training.documents import Document
from jaxformer.training.prepare import read_data, write_data
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
        (1500, None, 60 / 1500),  # … up to a limit
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
