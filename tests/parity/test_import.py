"""`jaxformer import` for every kind of head: the report shows agreement, and a model is saved."""

import json
import re

import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from jaxformer.cli import main  # noqa: E402
from tests.hub.test_mxfp4 import write  # noqa: E402
from tests.parity import checkpoints  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")
SIZES = {**checkpoints.SIZES, "num_labels": 3}
CLASSES = {
    "BertModel": "BertConfig",
    "BertForMaskedLM": "BertConfig",
    "BertForPreTraining": "BertConfig",
    "BertForSequenceClassification": "BertConfig",
    "RobertaForSequenceClassification": "RobertaConfig",
    "T5ForConditionalGeneration": "T5Config",
    "LlamaForCausalLM": "LlamaConfig",
}


def folder_of(name, tmp_path):
    """Saves a model with random weights. Returns its folder."""
    torch.manual_seed(0)
    sizes = SIZES
    if name.startswith("T5"):
        sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    config = getattr(transformers, CLASSES[name])(**sizes)
    getattr(transformers, name)(config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.mark.parametrize("name", CLASSES)
def test_import_report_shows_agreement_with_transformers(name, tmp_path, capsys):
    folder = folder_of(name, tmp_path)
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    largest = float(re.search(r"logits differ by (\S+) at most", said).group(1))
    assert largest < 1e-4, said
    if "greedy" in said:
        assert "the first 16 of 16 greedy tokens agree" in said
    assert jf.load(tmp_path / "ours").model.config == jf.load(folder).model.config


def test_mxfp4_weights_are_imported_and_compared_with_transformers(tmp_path, capsys):
    write(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert "the first 16 of 16 greedy tokens agree" in capsys.readouterr().out


def test_import_skips_transformers_comparison_if_transformers_removed_the_class(tmp_path, capsys):
    folder = folder_of("T5ForConditionalGeneration", tmp_path)
    content = json.loads((folder / "config.json").read_text())
    content["architectures"] = ["T5WithLMHeadModel"]
    (folder / "config.json").write_text(json.dumps(content))
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert re.search(
        r"not compared with transformers: transformers \S+ does not have the class T5WithLM",
        capsys.readouterr().out,
    )
    assert jf.load(tmp_path / "ours").model.config.vocab_size == 50


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "RobertaForSequenceClassification"]
)
def test_classifier_cannot_be_fine_tuned_on_masked_tokens(name, tmp_path, capsys):
    """A classifier and its imported folder are rejected; BertForPreTraining has both heads."""
    folder = folder_of(name, tmp_path)
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    for source in (folder, tmp_path / "ours"):
        capsys.readouterr()
        assert main(["train", "--init-from", str(source), "--out", str(tmp_path / "run")]) == 2
        said = capsys.readouterr().err
        assert str(source) in said and "is a classifier (num_labels is 3)" in said
    assert not (tmp_path / "run").exists()


def test_masked_language_model_with_classifier_can_be_fine_tuned(tmp_path, capsys):
    folder = folder_of("BertForPreTraining", tmp_path)
    assert main(["train", "--init-from", str(folder), "--out", str(tmp_path / "run")]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_import_skips_transformers_comparison_if_folder_name_is_not_utf8(tmp_path, capsys):
    """transformers cannot open its tensors."""
    folder = folder_of("T5ForConditionalGeneration", tmp_path)
    folder = folder.rename(tmp_path / "caf\udce9")
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert "not compared" in capsys.readouterr().out
    assert jf.load(tmp_path / "ours").model.config == jf.load(folder).model.config
