"""An exported folder has the tokenizer's settings and the dtype of the imported folder."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import decoders, models, pre_tokenizers

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.run import Origin, RunFolder, keep, read_origin, read_sections
from jaxformer.artifacts.saved import stored_tokenizer
from jaxformer.artifacts.token_bytes import byte_characters
from jaxformer.artifacts.tokenizer_copies import lowercased
from jaxformer.cli import main
from tests.errors import error_of
from tests.hub import foreign
from tests.hub.published_tokenizers import CONFIG, PUBLISHED, TEMPLATE
from tests.properties import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tokenizer.json is used"),
    pytest.mark.usefixtures("quick_compilation"),
]
NAMED = "additional_chat_templates/rag.jinja"


def backend(options: dict) -> tokenizers.Tokenizer:
    """Returns a byte-level tokenizer with all special tokens that the options name."""
    alphabet = {character: n for n, character in enumerate(sorted(byte_characters()))}
    made = tokenizers.Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    entries = [value for key, value in options.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        further = options.get(key) or []
        entries += further.values() if isinstance(further, dict) else further
    names = [x["content"] if isinstance(x, dict) else x for x in entries]
    made.add_special_tokens(sorted({x for x in names if isinstance(x, str)}))
    return made


def write_settings(folder: Path, files: dict) -> None:
    backend(files.get(CONFIG, {})).save(str(folder / "tokenizer.json"))
    (folder / CONFIG).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def settings(folder: Path) -> dict:
    """Returns the content of all settings files of a folder."""
    paths = [*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("*/*.jinja")]
    skipped = ("config.json", "generation_config.json", "tokenizer.json")
    texts = {str(x.relative_to(folder)): x.read_text() for x in paths if x.name not in skipped}
    return {k: json.loads(x) if k.endswith("json") else x for k, x in texts.items()}


def imported(folder: Path, files: dict) -> Path:
    """Writes a small GPT-2 whose tokenizer has these settings files."""
    foreign.write(folder, "gpt2")
    write_settings(folder, files)
    foreign.options(folder, vocab_size=foreign.tokenizer().vocab_size)
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_import_and_export_keep_every_setting_of_a_published_tokenizer(name, tmp_path):
    files = PUBLISHED[name][1]
    folder = imported(tmp_path / "in", files)
    jf.export(tmp_path / "out", *jf.load(folder))
    assert settings(tmp_path / "out") == files
    jf.save(tmp_path / "saved", *jf.load(folder))
    jf.export(tmp_path / "again", *jf.load(tmp_path / "saved"))
    assert settings(tmp_path / "again") == files


def test_chat_template_files_are_exported(tmp_path):
    """The default chat template and named templates are exported."""
    files = {CONFIG: {"eos_token": "<e>"}, TEMPLATE: "{{ é }}", NAMED: "{{ rag }}"}
    jf.export(tmp_path / "out", *jf.load(imported(tmp_path / "in", files)))
    assert settings(tmp_path / "out") == files


def test_truncation_and_padding_settings_are_exported(tmp_path):
    """transformers uses these settings as defaults; jaxformer ignores them."""
    folder = imported(tmp_path / "in", {CONFIG: {"pad_token": "[PAD]"}})
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.enable_truncation(5, direction="left")
    made.enable_padding(direction="left", pad_id=256, pad_token="[PAD]", length=7)
    made.save(str(folder / "tokenizer.json"))
    tokenizer = jf.load(folder).tokenizer
    assert len(tokenizer.encode("a longer text")) == 13
    jf.export(tmp_path / "out", *jf.load(folder))
    before, after = (
        json.loads((tmp_path / x / "tokenizer.json").read_text()) for x in ("in", "out")
    )
    assert before == after
    assert before["padding"]["direction"] == "Left"


@pytest.mark.slow
def test_fine_tuned_run_keeps_tokenizer_settings_and_the_checkpoint_dtype(tmp_path):
    files = {CONFIG: {"eos_token": "<e>", "padding_side": "left"}, TEMPLATE: "{{ x }}"}
    folder = imported(tmp_path / "in", files)
    foreign.tensors(folder, lambda all_: {k: x.astype(jnp.bfloat16) for k, x in all_.items()})
    foreign.options(folder, eos_token_id=256, bos_token_id=256)
    (tmp_path / "text.txt").write_text("the tide came in twice that morning\n" * 60)
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    words = ["train", str(tmp_path / "text.txt"), "--init-from", str(folder), "--out", run]
    assert main([*words, "--steps", "1", "--batch-size", "2", "--lora-rank", "2"]) == 0
    assert main(["export", run, out]) == 0
    assert settings(tmp_path / "out") == files
    assert dtypes(tmp_path / "out") == {"bfloat16"}


def test_run_folder_keeps_tokenizer_settings_and_the_checkpoint_dtype(tmp_path):
    """A run folder and the copy of a base run keep the tokenizer settings and the dtype."""
    files = {CONFIG: {"eos_token": "<e>"}, TEMPLATE: "{{ x }}", NAMED: "{{ rag }}"}
    tokenizer = jf.load(imported(tmp_path / "in", files)).tokenizer
    run = RunFolder(tmp_path / "run")
    (run.checkpoints / "1").mkdir(parents=True)
    tokenizer.save(run.tokenizer)
    origin = Origin(tmp_path / "in", "0", "gpt2", {"begin": 1}, checkpoint_dtype="bfloat16")
    model = {"kind": "decoder", "model": jf.DecoderConfig(vocab_size=300).resolved}
    run.write_config({**model, **origin.sections()})
    keep(run.path, tmp_path / "copy", 1)
    for folder in (run.path, tmp_path / "copy"):
        sections = read_sections(folder)
        assert read_origin(sections, "config.json") == origin
        assert settings_of(stored_tokenizer(folder, sections)) == files


def settings_of(tokenizer) -> dict:
    files = tokenizer.settings_files
    return {name: json.loads(x) if name.endswith("json") else x for name, x in files.items()}


def test_export_removes_references_to_custom_tokenizer_code(tmp_path):
    """An exported folder refers to no missing code, so the generic class opens tokenizer.json."""
    auto = {"AutoTokenizer": ["tokens.MyTokenizer", None]}
    files = {CONFIG: {"eos_token": "<e>", "auto_map": auto, "tokenizer_class": "MyTokenizer"}}
    jf.export(tmp_path / "out", *jf.load(imported(tmp_path / "in", files)))
    generic = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"}
    assert settings(tmp_path / "out") == {CONFIG: generic}


def test_export_of_lowercased_tokenizer_uses_generic_tokenizer_class(tmp_path):
    """Another class would rebuild the tokenizer without the new step."""
    files = {CONFIG: {"eos_token": "<e>", "tokenizer_class": "GPT2Tokenizer"}}
    model, variables, tokenizer = jf.load(imported(tmp_path / "in", files))
    jf.export(tmp_path / "out", model, variables, lowercased(tokenizer))
    assert settings(tmp_path / "out")[CONFIG]["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_exported_encoder_has_mask_token(tmp_path):
    tokenizer = ByteTokenizer.train(foreign.TEXT, 280, mask=True)
    kind = {"norm_position": "post", "embedding_norm": True, "num_kv_heads": 4, "head_dim": 2}
    model = tiny.build(jf.EncoderConfig, vocab_size=tokenizer.vocab_size, **kind)
    jf.export(tmp_path / "out", model, tiny.weights(model, 0), tokenizer)
    options = settings(tmp_path / "out")[CONFIG]
    assert options["mask_token"] == "<|mask|>"
    assert "token_type_ids" not in options["model_input_names"]


def dtypes(folder: Path) -> set[str]:
    return {x.dtype.name for x in load_file(folder / "model.safetensors").values()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_import_and_export_preserve_dtype_and_values_of_weights(dtype, tmp_path):
    """Exports before and after saving in jaxformer's format preserve dtype and values."""
    foreign.write(tmp_path / "in", "qwen2")
    foreign.tensors(tmp_path / "in", lambda all_: {k: x.astype(dtype) for k, x in all_.items()})
    jf.export(tmp_path / "out", *jf.load(tmp_path / "in"))
    jf.save(tmp_path / "saved", *jf.load(tmp_path / "in"))
    jf.export(tmp_path / "again", *jf.load(tmp_path / "saved"))
    before = load_file(tmp_path / "in" / "model.safetensors")
    for out in (tmp_path / "out", tmp_path / "again"):
        after = load_file(out / "model.safetensors")
        assert dtypes(out) == {dtype}
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        assert before.keys() == after.keys()
        for name in before:
            np.testing.assert_array_equal(before[name], after[name])


def test_export_stores_weights_in_the_requested_dtype(tmp_path):
    """The dtype is chosen by an argument of `export` or `load`, or by the flag of the command."""
    foreign.write(tmp_path / "in", "gpt2")
    foreign.tensors(tmp_path / "in", lambda all_: {k: x.astype("float16") for k, x in all_.items()})
    jf.export(tmp_path / "a", *jf.load(tmp_path / "in"), dtype="bfloat16")
    jf.export(tmp_path / "b", *jf.load(tmp_path / "in", dtype="float32"))
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "c"), "--dtype", "float32"]) == 0
    assert [dtypes(tmp_path / x) for x in "abc"] == [{"bfloat16"}, {"float32"}, {"float32"}]
    said = error_of(lambda: jf.export(tmp_path / "d", *jf.load(tmp_path / "in"), dtype="int8"))
    assert "dtype is 'int8'" in said


def test_weights_of_mixed_dtypes_are_exported_as_float32(tmp_path):
    foreign.write(tmp_path / "in", "gpt2")

    def change(arrays):
        return {k: x.astype("float32" if "ln" in k else "float16") for k, x in arrays.items()}

    foreign.tensors(tmp_path / "in", change)
    jf.export(tmp_path / "out", *jf.load(tmp_path / "in"))
    assert dtypes(tmp_path / "out") == {"float32"}


def test_float16_export_rejects_values_beyond_its_range(tmp_path):
    model = tiny.build(**foreign.GPT2)
    variables = tiny.weights(model, 0)
    variables["params"]["final_norm"]["scale"] = np.full(16, 1e6, np.float32)
    said = error_of(lambda: jf.export(tmp_path / "x", model, variables, dtype="float16"))
    assert "transformer.ln_f.weight has values beyond the range of float16" in said
