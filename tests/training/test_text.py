"""Preparation of documents as token files of a run."""

import io
import json
import random
from collections import Counter
from operator import sub
from random import Random

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.artifacts.tokenizer_copies import lowercased, opening_texts
from jaxformer.cli import evaluate as cli_evaluate
from jaxformer.models.config import DecoderConfig, EncoderConfig
from jaxformer.training import evaluate as training_evaluate
from jaxformer.training.config import Inputs, MaskedTokensTraining, TextTraining
from jaxformer.training.data.corpus import Documents, read_documents
from jaxformer.training.data.documents import Document
from jaxformer.training.data.split import split
from jaxformer.training.data.windows import EvaluationWindows
from jaxformer.training.screen import Screen
from jaxformer.training.tasks import masked_tokens, next_tokens
from jaxformer.training.tasks import text as text_task
from jaxformer.training.tasks.masked_tokens import MaskedTokens
from jaxformer.training.tasks.next_tokens import NextTokens
from jaxformer.training.tasks.text import TextTask, read_data
from tests.errors import error_of
from tests.slow import mostly_slow

MODEL = DecoderConfig(vocab_size=257, max_length=16, num_layers=1, embed_dim=8, num_heads=1)


@pytest.mark.parametrize(
    ("kilobytes", "held_out", "share"),
    [
        (200, 0.01, 0.01),  # an explicit fraction, for any size
        (200, 0.2, 0.2),
        (200, None, 0.1),  # by default at least 50 kB, but at most a tenth …
        (600, None, 50 / 600),
        (1200, None, 0.05),  # … and 5% if that is more …
        (200, 0.5, 0.5),
    ],
)
def test_validation_fraction_sets_the_held_out_size(
    tmp_path, monkeypatch, kilobytes, held_out, share
):
    """The test divides all sizes by ten, to save time."""
    assert text_task.DEFAULT_SPLIT == (0.05, 500_000, 10_000_000)
    monkeypatch.setattr(text_task, "DEFAULT_SPLIT", (0.05, 50_000, 60_000))
    lines = random.Random(0).choices(["one\n", "two words\n", "three\n"], k=100)
    documents = Documents(
        [Document("a", "".join(lines) * round(kilobytes * 1e3 / len("".join(lines))))]
    )
    folder = RunFolder(tmp_path / "run")
    config = TextTraining(model=MODEL, validation_fraction=held_out)
    TextTask.write(folder, config, (documents, []), Screen())
    data = read_data(folder)
    sizes = data.train.num_bytes, data.held_out.num_bytes
    assert sizes[1] / sum(sizes) == pytest.approx(share, rel=0.002)


def test_tokenizer_is_trained_on_pieces_spread_evenly_over_the_text(monkeypatch):
    """The sample ends between words. With a fraction of 1, the sample is the whole text."""
    monkeypatch.setattr(text_task, "_SAMPLED_TOGETHER", 100)
    words = list(map(str, range(6000)))
    documents = [Document("", " ".join(words[at : at + 2000])) for at in (0, 2000, 4000)]
    size = sum(len(document.text) for document in documents)
    assert sum(map(len, text_task._sample(documents, 1.0))) == size
    sample = list(text_task._sample(documents, 0.25))
    assert 0.24 * size < sum(map(len, sample)) <= 0.25 * size
    places = [int(word) for piece in sample for word in piece.split()]
    assert places == sorted(places) and max(map(sub, places[1:], places)) < 200


def test_training_reports_skipped_files_and_repeated_lines(tmp_path):
    """The screen shows the number. documents.txt lists the reason per file and counts records."""
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
    gathered = TextTask.gather(Inputs((tmp_path / "text",)), config, screen)
    TextTask.write(folder, config, gathered, screen)
    assert "skipped 3 files, partly or completely:\n" in said.getvalue()
    listed = folder.documents.read_text().splitlines()
    image = tmp_path / "text" / "image.png"
    reason = f"{image}: not a text file (it contains NUL bytes)"
    assert f"skipped              {reason}" in listed and reason in said.getvalue()
    assert sum("copy.txt: a copy of" in entry for entry in listed) == 1
    assert sum("a.jsonl: 1 of 21 records" in entry for entry in listed) == 1
    data = read_data(folder)
    assert data.train.num_documents + data.held_out.num_documents >= 40
    sizes = [int(entry.split()[1]) for entry in listed if entry.startswith("train")]
    assert sum(sizes) == data.train.num_bytes
    (repeated,) = (entry for entry in listed if "held-out lines" in entry)
    assert repeated in said.getvalue() and not repeated.startswith("0 of")


WORDS = ["?", "[CLS]", "the", "cat", "a", "dog", "sat", "on", "mat", "[MASK]"]


def _subwords(opening, stop, template=None):
    """Returns a tokenizer of lower-case words with one token for all unknown words."""
    backend = tokenizers.Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, "?"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(["?", "[CLS]", "[MASK]"])
    if template:
        named = [(word, WORDS.index(word)) for word in set(template.split()) - {"$A"}]
        backend.post_processor = processors.TemplateProcessing(template, special_tokens=named)
    return Subwords(backend, SpecialTokens((stop,), opening))


READERS = {
    "bytes": lambda: ByteTokenizer.train((), 258, mask=True),
    "bytes in lower case": lambda: lowercased(ByteTokenizer.train((), 258, mask=True)),
    "words": lambda: _subwords(1, 0),
    "words that open and end texts": lambda: _subwords(2, 4),
    "words in a template": lambda: _subwords(None, 0, "[CLS] the $A"),
}
PHRASES = ["The cat", "the  cat", "thé cat", "a dog", "A Dog", "sat on the mat", "x", "y", "\u0301"]


CASES = [(kind, reader) for kind in ("decoder", "encoder") for reader in READERS]
QUICK = [("decoder", "words that open and end texts"), ("encoder", "words")]


@pytest.mark.parametrize("kind, reader", mostly_slow(CASES, *QUICK))
def test_evaluate_scores_the_same_held_out_targets_as_training(tmp_path, monkeypatch, kind, reader):
    """`evaluate` scores the same targets in the same windows as training.

    Scored documents and training documents differ in their tokens.
    """
    tokenizer, random = opening_texts(READERS[reader]()), Random(0)
    monkeypatch.setattr(text_task, "base_tokenizer", lambda folder: tokenizer)
    monkeypatch.setattr(text_task, "run_tokenizer", lambda folder: tokenizer)
    texts = [" ".join(random.choices(PHRASES, k=random.choice([1, 3, 9]))) for _ in range(200)]
    lines = (json.dumps({"text": text}) + "\n" for text in [*PHRASES, *texts])
    (tmp_path / "a.jsonl").write_text("".join(lines))
    documents, _ = read_documents([tmp_path / "a.jsonl"])
    of_kind = {
        "decoder": (DecoderConfig, TextTraining),
        "encoder": (EncoderConfig, MaskedTokensTraining),
    }
    model_kind, training = of_kind[kind]
    sizes = {"max_length": 8, "num_layers": 1, "embed_dim": 8, "num_heads": 1}
    model = model_kind(vocab_size=tokenizer.vocab_size, **sizes)
    config, folder = training(model=model, validation_fraction=0.2), RunFolder(tmp_path / "run")
    folder.path.mkdir()
    TextTask.write(folder, config, (documents, []), Screen())
    data = read_data(folder)
    opening = len(tokenizer.opening)
    held_out = [document[opening:].tolist() for document in data.held_out_documents]
    ending = len(text_task._ending(tokenizer)) if kind == "decoder" else 0
    known = {tuple(x[opening : len(x) - ending].tolist()) for x in data.train.split()}
    assert len(held_out) > 5 and not known & set(map(tuple, held_out))

    wanted, found = [], []
    score = training_evaluate.Evaluation(1.0, 1.0, 1.0, 1, 1)
    hidden_score = training_evaluate.MaskedTokensScore(1.0, 1.0, 1)
    monkeypatch.setattr(
        training_evaluate, "score_masked_tokens", lambda *x: found.extend(x[2]) or hidden_score
    )
    monkeypatch.setattr(
        masked_tokens, "score_masked_tokens", lambda *x: wanted.extend(x[2]) or hidden_score
    )
    monkeypatch.setattr(cli_evaluate.EvaluateArguments, "trained", config)
    for module, batches in ((training_evaluate, found), (next_tokens, wanted)):

        def scored(model, variables, documents, num_bytes, *, batches=batches, **options):
            windows = EvaluationWindows(documents, 8, 4)
            batches.extend(training_evaluate.spread(windows, len(windows), 16))
            return score

        monkeypatch.setattr(module, "evaluate_documents", scored)
    task = {"decoder": NextTokens, "encoder": MaskedTokens}[kind](config, data)
    task.score(None, None, whole=True)
    texts = list(split(documents, 0.2)[1])
    arguments = cli_evaluate.EvaluateArguments("run", files=(tmp_path,))
    loaded = cli_evaluate.Loaded(jf.build(model), None, tokenizer, arguments, Screen(quiet=True))
    scorer = {"decoder": cli_evaluate._text, "encoder": cli_evaluate._hidden}[kind]
    scorer(loaded, texts)
    assert len(wanted) == len(found) > 1
    jax.tree.map(np.testing.assert_array_equal, wanted, found)
    targets = Counter(int(x) for b in wanted for x in b.targets[b.weights > 0])
    if kind == "encoder":
        assert targets.keys() <= set(tokenizer.text_ids)
    else:
        content = Counter(token for ids in held_out for token in ids)
        rest = Counter(tokenizer.opening[1:] * len(held_out))
        assert targets == content + rest
        assert targets.total() == task.num_targets


def test_held_out_text_without_tokens_is_rejected(tmp_path, monkeypatch):
    """The tokenizer strips accents, so a text of accents has bytes but no tokens."""
    tokenizer = READERS["words in a template"]()
    monkeypatch.setattr(text_task, "base_tokenizer", lambda folder: tokenizer)
    documents = Documents([Document("a", "the cat " * 50 + "\u0301" * 900)])
    folder = RunFolder(tmp_path)
    message = "the held-out text has no tokens; give more text"
    assert (
        error_of(TextTask.write, folder, TextTraining(model=MODEL), (documents, []), Screen())
        == message
    )
