"""Tuning on answers and on preferences gives the losses of trl, also with LoRA."""

import copy
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
trl = pytest.importorskip("trl", reason="parity needs trl")
peft = pytest.importorskip("peft", reason="parity needs peft")
datasets = pytest.importorskip("datasets", reason="parity needs datasets")

import jaxformer as jf  # noqa: E402
from jaxformer.models.config.lora import LoraConfig  # noqa: E402
from jaxformer.training.config import OptimizerConfig  # noqa: E402
from jaxformer.training.data.examples import (  # noqa: E402
    encode_completion,
    encode_conversation,
    encode_text,
)
from jaxformer.training.data.packing import Examples, PackedBatches  # noqa: E402
from jaxformer.training.data.preferences import PreferenceBatches, answer_batch  # noqa: E402
from jaxformer.training.objectives import CrossEntropy  # noqa: E402
from jaxformer.training.optimizer import make_optimizer  # noqa: E402
from jaxformer.training.preference import DirectPreference, answer_log_probs  # noqa: E402
from jaxformer.training.step import init_state, make_step  # noqa: E402
from tests.artifacts.chat import chats  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "Gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"sliding_window": 16, "query_pre_attn_scalar": 8},
    ),
}
ANSWER = "{{ m['content'] }}<|im_end|>\n"
MARKED = chats.CHATML.replace(
    ANSWER,
    "{% if m['role'] == 'assistant' %}{% generation %}" + ANSWER + "{% endgeneration %}"
    "{% else %}" + ANSWER + "{% endif %}",
)
FORMS = ("text", "completion", "chat completion", "messages")
STEPS, RATE, RANK = 10, 1e-2, 4


def records(form):
    numbers, found = random.Random(0), []
    for _ in range(8):
        a, b = numbers.randrange(90), numbers.randrange(90)
        question, answer = f"{a}+{b} " + "the tide " * numbers.randrange(4), str(a + b)
        user, assistant = (
            {"role": r, "content": x} for r, x in (("user", question), ("assistant", answer))
        )
        more = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "the tide"}]
        found.append(
            {
                "text": {"text": question + answer},
                "completion": {"prompt": question, "completion": answer},
                "chat completion": {"prompt": [user], "completion": [assistant]},
                "messages": {"messages": [user, assistant, *more]},
            }[form]
        )
    return found


def their_model(folder, name):
    """Writes a tiny model with its tokenizer, and returns both."""
    chats.write_folder(folder, MARKED, "qwen")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    config_class, model_class, more = MODELS[name]
    ids = {f"{x}_token_id": getattr(tokenizer, f"{x}_token_id") for x in ("bos", "eos", "pad")}
    config = getattr(transformers, config_class)(vocab_size=len(tokenizer), **SIZE, **ids, **more)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).float()
    model.save_pretrained(folder)
    return model, tokenizer


def settings(out):
    """Returns arguments of trl for the optimizer of jaxformer's tests."""
    return dict(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=64,
        save_strategy="no",
        disable_tqdm=True,
    )


def trainer(model, tokenizer, form, out, is_lora):
    """Returns a trainer of trl."""
    arguments = trl.SFTConfig(assistant_only_loss=form == "messages", **settings(out))
    adapter = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"])
    return trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(records(form)),
        processing_class=tokenizer,
        peft_config=adapter if is_lora else None,
    )


def encoded(tokenizer, form):
    for record in records(form):
        if form == "messages":
            yield encode_conversation(tokenizer, record["messages"])
        elif form == "text":
            yield encode_text(tokenizer, record["text"])
        else:
            yield encode_completion(tokenizer, record["prompt"], record["completion"])


def copy_adapter(params, model):
    """Gives the first LoRA matrices of jaxformer to a model of peft; the second ones are zero."""
    for name, theirs in model.named_parameters():
        if "lora_A" in name:
            words = name.split(".")
            layer = int(words[words.index("layers") + 1])
            which = {"q_proj": "query", "v_proj": "value"}[words[words.index("self_attn") + 1]]
            kernel = params["blocks"]["attention"][which]["kernel"]
            theirs.data = torch.tensor(np.array(kernel.down[layer]).T.copy())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_lora", [False, True])
def test_first_losses_of_fine_tuning_equal_those_of_the_trl_library(name, form, is_lora, tmp_path):
    model, tokenizer = their_model(tmp_path / "model", name)
    theirs = trainer(model, tokenizer, form, tmp_path / "out", is_lora)
    ours, variables, own_tokenizer = jf.load(tmp_path / "model")
    examples = list(encoded(own_tokenizer, form))
    assert [list(x.ids) for x in examples] == [list(x) for x in theirs.train_dataset["input_ids"]]

    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.0))
    lora = {"lora_rank": RANK, "lora_alpha": float(RANK), "lora_target_modules": "query,value"}
    config = LoraConfig(**lora) if is_lora else LoraConfig()
    params = jax.tree.map(jnp.array, variables["params"])
    state = init_state(ours, optimizer, 0, params, lora=config)
    if is_lora:
        copy_adapter(state.params, theirs.model)
    theirs.train()
    expected = [line["loss"] for line in theirs.state.log_history if "loss" in line]
    # Several records share a sequence here, and each has its own in trl.
    batches = PackedBatches(Examples.join(examples), 63, 8, packs=True)
    step, losses = make_step(ours, optimizer, CrossEntropy()), []
    for _ in range(STEPS):
        state, measured = step(state, next(batches), np.float32(RATE))
        losses.append(float(measured.loss))
    np.testing.assert_allclose(losses, expected, atol=1e-4)


def preferences(is_chat):
    for record in records("completion"):
        prompt, chosen = record["prompt"], record["completion"]
        rejected = str(int(chosen) + 7)
        if is_chat:
            prompt = [{"role": "user", "content": prompt}]
            chosen, rejected = ([{"role": "assistant", "content": x}] for x in (chosen, rejected))
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_lora", [False, True])
def test_first_losses_of_preference_training_equal_those_of_the_trl_library(
    name, is_chat, is_lora, tmp_path
):
    model, tokenizer = their_model(tmp_path / "model", name)
    adapter = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"])
    theirs = trl.DPOTrainer(
        model=model,
        ref_model=None if is_lora else copy.deepcopy(model),
        args=trl.DPOConfig(beta=0.1, **settings(tmp_path / "out")),
        train_dataset=datasets.Dataset.from_list(list(preferences(is_chat))),
        processing_class=tokenizer,
        peft_config=adapter if is_lora else None,
    )
    ours, variables, own_tokenizer = jf.load(tmp_path / "model")
    found = [
        encode_completion(own_tokenizer, record["prompt"], record[answer])
        for record in preferences(is_chat)
        for answer in ("chosen", "rejected")
    ]
    examples = Examples.join(found)
    whole = answer_batch(examples, range(len(found)), len(found), 63)
    score = jax.jit(lambda params, batch: answer_log_probs(ours, params, batch))
    reference = np.array(score(variables["params"], whole))

    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.0))
    lora = {"lora_rank": RANK, "lora_alpha": float(RANK), "lora_target_modules": "query,value"}
    params = jax.tree.map(jnp.array, variables["params"])
    config = LoraConfig(**lora) if is_lora else LoraConfig()
    state = init_state(ours, optimizer, 0, params, lora=config)
    if is_lora:
        copy_adapter(state.params, theirs.model)
    theirs.train()
    lines = [line for line in theirs.state.log_history if "loss" in line]
    batches = PreferenceBatches(examples, reference, 63, 8)
    step, losses, margins = make_step(ours, optimizer, DirectPreference(0.1)), [], []
    for _ in range(STEPS):
        state, measured = step(state, next(batches), np.float32(RATE))
        losses.append(float(measured.figures["loss"]))
        margins.append(float(measured.figures["preference_margin"]))
    np.testing.assert_allclose(losses, [line["loss"] for line in lines], atol=1e-4)
    expected = [line["rewards/margins"] for line in lines]
    np.testing.assert_allclose(margins, expected, atol=1e-3)
