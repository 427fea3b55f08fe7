"""Prompts and scored texts begin with the ids that transformers' tokenizer puts before a text."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.cli import main  # noqa: E402
from jaxformer.interpret.encoded_text import encode_text  # noqa: E402

TEXT = "the tide came in twice, and the clocks had stopped"
WORDS = ["<pad>", "<|endoftext|>", "<|im_end|>"]


@pytest.fixture(scope="module", params=[False, True], ids=["no template", "template"])
def opened(request, tmp_path_factory):
    """Returns a folder, the model and the tokenizer of transformers."""
    folder = tmp_path_factory.mktemp("opened")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.Qwen2Config(vocab_size=97, **sizes, **ids)
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=97, special_tokens=WORDS, show_progress=False)
    backend.train_from_iterator([TEXT] * 20, trainer)
    if request.param:
        special = [("<|endoftext|>", 1)]
        backend.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, special)
    backend.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder, model, transformers.AutoTokenizer.from_pretrained(folder)


def test_generate_prints_the_continuation_that_transformers_gives(opened, capsys):
    folder, model, tokenizer = opened
    ids = tokenizer("the tide")["input_ids"]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    found = model.generate(torch.tensor([ids]), **options)[0]
    words = ["generate", str(folder), "--prompt", "the tide", "--max-new-tokens", "12"]
    assert main([*words, "--temperature", "0"]) == 0
    expected = tokenizer.decode(found, skip_special_tokens=True)
    assert capsys.readouterr().out.rstrip("\n") == expected


def test_evaluate_scores_the_token_ids_of_transformers(opened, tmp_path, capsys):
    """With --score-first-token, the first token is scored after the beginning-of-text token."""
    folder, model, tokenizer = opened
    (tmp_path / "text.txt").write_text(TEXT)
    ids = tokenizer(TEXT)["input_ids"]
    sequences = {(): ids, ("--score-first-token",): ids if ids[0] == 1 else [1, *ids]}
    for flags, sequence in sequences.items():
        tokens = torch.tensor([sequence])
        with torch.no_grad():
            loss = float(model(tokens, labels=tokens).loss)
        assert main(["evaluate", str(folder), str(tmp_path / "text.txt"), "--json", *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        scored = tokenizer.decode(sequence[1:]).encode()
        assert found["bytes"] == len(scored) and found["tokens"] == len(sequence) - 1


def test_explain_encodes_text_to_the_token_ids_of_transformers(opened):
    folder, _, tokenizer = opened
    model, variables, own = jf.load(folder)
    found = encode_text(model, variables, TEXT, own, None)
    assert found.tokens == tokenizer(TEXT)["input_ids"]
