"""The generation settings of a checkpoint act as in transformers and are exported again."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from tests.parity import checkpoints  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")
VOCAB, NEW, START, STOP = checkpoints.VOCAB, 12, 3, 2
RULES = {
    "repetition": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad-words": {"bad_words_ids": [[5], [6, 7], [8, 9, 10], [STOP]]},
    "shortest": {"min_length": 6, "min_new_tokens": 4},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": STOP},
    "suppressed": {"suppress_tokens": list(range(8, 60)), "begin_suppress_tokens": [61, 62, 63]},
}
RULES["all"] = {key: value for rules in RULES.values() for key, value in rules.items()}


@pytest.fixture(params=["llama", "marian"], scope="module")
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs") / "model"
    theirs, _ = checkpoints.saved(request.param, 0, folder)
    return theirs, folder


def write(folder, **options):
    ids = {"bos_token_id": 1, "eos_token_id": STOP, "pad_token_id": 0}
    ids["decoder_start_token_id"] = START
    (folder / "generation_config.json").write_text(json.dumps(ids | options))


def read(theirs, prompt):
    """Returns (inputs for transformers, our prompts, our source) for the same text."""
    if theirs.config.is_encoder_decoder:
        return torch.tensor(prompt), [[START]] * len(prompt), {"source": prompt.tolist()}
    return torch.tensor(prompt), prompt.tolist(), {}


def rows_of(ids):
    """Returns the new tokens of each text up to and including the stop token."""
    rows = [row.tolist() for row in ids]
    return [row[: row.index(STOP) + 1] if STOP in row else row for row in rows]


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("rules", RULES)
def test_constraints_are_those_of_transformers(rules, num_beams, folder):
    """Greedy and beam search with the settings of the folder."""
    theirs, path = folder
    options = {"num_beams": num_beams, "do_sample": False, "early_stopping": True}
    write(path, **RULES[rules], **options)
    config = transformers.GenerationConfig.from_pretrained(path)
    prompt = np.random.default_rng(1).integers(4, VOCAB, (2, 5))
    inputs, prompts, source = read(theirs, prompt)
    with torch.no_grad():
        expected = theirs.generate(
            inputs, generation_config=config, attention_mask=torch.ones_like(inputs),
            max_new_tokens=NEW,
        )  # fmt: skip
    expected = rows_of(expected.numpy()[:, len(prompts[0]) :])
    model, variables, _ = jf.load(path)
    asked = {"max_new_tokens": NEW, "stop_tokens": (STOP,), **source}
    if num_beams == 1:
        found = jf.generate(model, variables, prompts, **asked).tokens
    else:
        found = jf.beam_search(model, variables, prompts, **asked).tokens[:, 0]
    assert rows_of(found) == [(row + [0] * NEW)[: len(row)] for row in expected]


def test_settings_are_written_back(folder, tmp_path):
    """`save`, `load` and `export` keep all settings, also without a tokenizer."""
    _, path = folder
    options = RULES["all"] | {"do_sample": True, "temperature": 0.5, "top_k": 7, "typical_p": 0.9}
    write(path, **options)
    before = json.loads((path / "generation_config.json").read_text())
    model, variables, _ = jf.load(path)
    jf.save(tmp_path / "ours", model, variables)
    jf.export(tmp_path / "again", *jf.load(tmp_path / "ours"))
    after = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert {key: after.get(key) for key in before} == before
    with pytest.raises(ValueError, match=r"typical_p=0.9, which is not implemented"):
        jf.generate(model, variables, [[3]], max_new_tokens=2)
