"""Tuned models give the same answers in transformers and in llama.cpp after they are exported."""

import json

import pytest

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
pytest.importorskip("trl", reason="the models are those of the tests of tuning, which need trl")

import jaxformer as jf  # noqa: E402
from jaxformer.cli import main  # noqa: E402
from tests.parity.test_tuning import MODELS, their_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
QUESTIONS = {"1+1": "the tide", "2+3": "5 and x", "the tide": "12", "a b": "user {x}"}
WAYS = {"all weights": (), "LoRA": ("--lora-rank", "4"), "DPO": ()}
NEW = 12


def message(question):
    return [{"role": "user", "content": question}]


def make_record(question, answer, way):
    said = [{"role": "assistant", "content": answer}]
    if way != "DPO":
        return {"messages": [*message(question), *said]}
    other = [{"role": "assistant", "content": "no"}]
    return {"prompt": message(question), "chosen": said, "rejected": other}


@pytest.fixture(scope="module", params=[(name, way) for name in MODELS for way in WAYS])
def tuned(request, tmp_path_factory):
    """The folder of a tuned run."""
    name, way = request.param
    folder = tmp_path_factory.mktemp(f"{name} {way}".replace(" ", "-"))
    their_model(folder / "base", name)
    records = [make_record(q + " " * n, a, way) for q, a in QUESTIONS.items() for n in range(8)]
    source = folder / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["train", source, "--init-from", folder / "base", *WAYS[way], "--out", folder / "run"]
    words += "--steps 40 --learning-rate 1e-2 --evaluate-every 40 --sample-tokens 0".split()
    assert main(list(map(str, [*words, "--batch-size", 8, "--warmup-steps", 0]))) == 0
    return folder


def our_answers(run):
    """Returns {question: (ids of the prompt, ids of the answer)}."""
    model, variables, tokenizer = jf.load(run)
    found = {}
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(message(question), add_generation_prompt=True).ids
        out = jf.generate(
            model,
            variables,
            [prompt],
            max_new_tokens=NEW,
            sampler=jf.Sampler(0.0),
            stop_tokens=tokenizer.turn_end_tokens,
        )
        found[question] = prompt, out.tokens[0, : out.lengths[0]].tolist()
    return found


def test_exported_tuned_model_generates_the_same_answers_in_transformers(tuned):
    out = tuned / "theirs"
    assert main(["export", str(tuned / "run"), str(out)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    expected = our_answers(tuned / "run")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for question, (prompt, answer) in expected.items():
        ids = tokenizer.apply_chat_template(
            message(question), add_generation_prompt=True, return_dict=False
        )
        assert ids == prompt
        inputs = torch.tensor([ids])
        with torch.no_grad():
            whole = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=[end, tokenizer.eos_token_id],
            )
        assert whole[0, len(ids) :].tolist() == answer
    if "all" in tuned.name:  # With LoRA, few weights train and learn less.
        answers = {tokenizer.decode(x, skip_special_tokens=True) for _, x in expected.values()}
        assert answers & set(QUESTIONS.values())


def test_exported_tuned_model_generates_the_same_answers_in_llama_cpp(tuned):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    out = tuned / "model.gguf"
    assert main(["export", str(tuned / "run"), str(out), "--format", "gguf"]) == 0
    theirs = llama_cpp.Llama(str(out), n_ctx=64, verbose=False)
    tokenizer = jf.load(tuned / "run").tokenizer
    for question, (prompt, answer) in our_answers(tuned / "run").items():
        chat = tokenizer.apply_chat_template(message(question), add_generation_prompt=True)
        assert theirs.tokenize(chat.text.encode(), add_bos=False, special=True) == prompt
        stream = theirs.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
        found = [token for token, _ in zip(stream, range(len(answer)), strict=False)]
        assert found == answer
