"""The generation settings of a checkpoint act as in transformers and are exported again."""

import json
import shutil

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from jaxformer.decoding.sampling import truncate  # noqa: E402
from jaxformer.hub.families import FAMILIES  # noqa: E402
from jaxformer.hub.generation import read_generation  # noqa: E402
from tests.parity import checkpoints  # noqa: E402
from tests.slow import mostly_slow  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")
VOCAB, NEW, START, STOP = checkpoints.VOCAB, 12, 3, 2
RULES = {
    "repetition": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad-words": {"bad_words_ids": [[5], [6, 7], [8, 9, 10], [STOP]]},
    "shortest": {"min_length": 6, "min_new_tokens": 4},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": STOP},
    "suppressed": {"suppress_tokens": list(range(8, 60)), "begin_suppress_tokens": [61, 62, 63]},
    "biased": {"sequence_bias": [[[5], 4.0], [[6, 7], -3.0], [[START, 9], 5.0], [[STOP], 1.0]]},
    "encoder": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "decay": {"exponential_decay_length_penalty": [2, 1.5]},
    "renormalized": {"renormalize_logits": True, "bad_words_ids": [[5], [6, 7], [9]]},
}
# If min_new_tokens is set, transformers ignores min_length, which changes only the scores of "all".
RULES["all"] = {
    key: value for rules in RULES.values() for key, value in rules.items() if key != "min_length"
}


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


def sequences_of(ids):
    """Returns the new tokens of each text up to and including the stop token."""
    sequences = [sequence.tolist() for sequence in ids]
    return [
        sequence[: sequence.index(STOP) + 1] if STOP in sequence else sequence
        for sequence in sequences
    ]


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("rules", RULES)
def test_constrained_decoding_equals_transformers(rules, num_beams, folder):
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
            max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    scores = getattr(expected, "sequences_scores", None)
    expected = sequences_of(expected.sequences.numpy()[:, len(prompts[0]) :])
    model, variables, _ = jf.load(path)
    asked = {"max_new_tokens": NEW, "stop_tokens": (STOP,), **source}
    if num_beams == 1:
        found = jf.generate(model, variables, prompts, **asked).tokens
    else:
        found = jf.beam_search(model, variables, prompts, **asked)
        np.testing.assert_allclose(found.scores[:, 0], scores, rtol=1e-4, atol=1e-5)
        found = found.tokens[:, 0]
    assert sequences_of(found) == [(sequence + [0] * NEW)[: len(sequence)] for sequence in expected]


# No option has the default of transformers.
SET = {
    "do_sample": False,
    "num_beams": 3,
    "length_penalty": 2.5,
    "early_stopping": True,
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[5]],
    "min_length": 4,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 9,
    "exponential_decay_length_penalty": [2, 1.5],
    "renormalize_logits": True,
    "suppress_tokens": [8],
    "begin_suppress_tokens": [61],
    "sequence_bias": [[[6], 2.0]],
}


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("left_out", mostly_slow([*SET, "nothing"], "early_stopping"))
def test_missing_generation_option_defaults_as_in_transformers(left_out, file, folder, tmp_path):
    """Texts and scores are those of transformers, whose classes open the same folder."""
    theirs, path = folder
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    ids = {"bos_token_id": 1, "eos_token_id": STOP, "pad_token_id": 0}
    options = {key: value for key, value in SET.items() if key != left_out}
    content = json.loads((tmp_path / "config.json").read_text()) if file == "config.json" else {}
    if file == "config.json":
        content = {key: value for key, value in content.items() if key not in SET}
    content |= ids | {"decoder_start_token_id": START} | options
    (tmp_path / file).write_text(json.dumps(content))
    prompt = np.random.default_rng(1).integers(4, VOCAB, (2, 5))
    inputs, prompts, source = read(theirs, prompt)
    opened = type(theirs).from_pretrained(tmp_path)
    with torch.no_grad():
        expected = opened.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NEW,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    model, variables, _ = jf.load(tmp_path)
    asked = {"max_new_tokens": NEW, "stop_tokens": (STOP,), **source}
    sequences = sequences_of(expected.sequences.numpy()[:, len(prompts[0]) :])
    if model.generation.num_beams == 1:
        tokens = jf.generate(model, variables, prompts, **asked).tokens
    else:
        found = jf.beam_search(model, variables, prompts, **asked)
        scores = expected.sequences_scores
        np.testing.assert_allclose(found.scores[:, 0], scores, rtol=1e-4, atol=1e-5)
        tokens = found.tokens[:, 0]
    assert sequences_of(tokens) == [
        (sequence + [0] * NEW)[: len(sequence)] for sequence in sequences
    ]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_generation_defaults_equal_transformers(file, tmp_path):
    """A file without options gives all defaults of transformers except the length of the text."""
    (tmp_path / file).write_text("{}")
    ours = read_generation(tmp_path, VOCAB, {})
    defaults = transformers.GenerationConfig()._get_default_generation_params()
    for name, value in defaults.items():
        for part in (ours, ours.constraints):
            if name in part.__dataclass_fields__ and name != "max_length":
                assert getattr(part, name) in (value, ()), name
    assert not ours.unsupported
    (tmp_path / file).write_text(json.dumps(defaults))
    assert not read_generation(tmp_path, VOCAB, {}).unsupported


@pytest.mark.parametrize("name", ["bart", "marian", "pegasus", "t5", "gpt2", "llama", "gemma2"])
def test_generation_defaults_without_config_file_equal_transformers(name, tmp_path):
    """Such as the forced end of BART, Marian and PEGASUS."""
    (tmp_path / "config.json").write_text("{}")
    ours = read_generation(tmp_path, 60_000, FAMILIES[name].generation)
    theirs = transformers.GenerationConfig.from_model_config(
        transformers.AutoConfig.for_model(name)
    )
    for field in SET.keys() - {"sequence_bias", "exponential_decay_length_penalty"}:
        part = ours if hasattr(ours, field) else ours.constraints
        value = getattr(theirs, field)
        if value is not None:
            assert getattr(part, field) in (value, (value,)), field
        elif field.startswith("forced"):
            assert not getattr(part, field), field


WARPERS = {
    "typical_p": lambda x: transformers.TypicalLogitsWarper(x),
    "epsilon_cutoff": lambda x: transformers.EpsilonLogitsWarper(x),
    "eta_cutoff": lambda x: transformers.EtaLogitsWarper(x),
}


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("value", [0.05, 0.3, 0.9])
def test_sampling_excludes_the_same_tokens_as_transformers(name, value):
    logits = np.random.default_rng(0).normal(size=(50, VOCAB)).astype(np.float32) * 3
    expected = WARPERS[name](value)(None, torch.tensor(logits)).numpy()
    found = jax.jit(truncate)(jf.Sampler(**{name: value}).arrays(), logits)
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))


def test_saved_and_exported_models_keep_their_generation_settings(folder, tmp_path):
    """`save`, `load` and `export` keep all settings, also without a tokenizer."""
    _, path = folder
    options = (
        RULES["all"]
        | RULES["shortest"]
        | {"do_sample": True, "temperature": 0.5, "top_k": 7, "typical_p": 0.9}
    )
    options["stop_strings"] = ["end"]
    write(path, **options)
    before = json.loads((path / "generation_config.json").read_text())
    model, variables, _ = jf.load(path)
    jf.save(tmp_path / "ours", model, variables)
    jf.export(tmp_path / "again", *jf.load(tmp_path / "ours"))
    after = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert {key: after.get(key) for key in before} == before
    flag = "--ignore-generation-config stop_strings"
    with pytest.raises(ValueError, match=rf'stop_strings=\["end"\], which is not .* {flag}'):
        jf.generate(model, variables, [[3]], max_new_tokens=2)
