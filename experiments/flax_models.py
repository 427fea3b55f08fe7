"""Program that saves tiny Flax models of transformers 4, with their outputs, for flax_classes.py.

The program needs transformers below 5, flax and an older JAX, which cannot be installed together
with jaxformer. The program therefore does not import jaxformer. This command makes the environment
of the program:

    python3 -m venv flax && flax/bin/pip install "transformers==4.49.*" flax "jax<0.5" "numpy<2.2"
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import transformers

LENGTH = 12
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 40, "max_position_embeddings": 64, **IDS}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS}
# The model in docs/static/flax-gpt2/ has these options.
PAGE = {"n_embd": 8, "n_head": 2, "n_positions": 32}
ROBERTA = SIZES | {"pad_token_id": 1, "bos_token_id": 0}
DISTIL = {"vocab_size": 97, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
DISTIL |= {"max_position_embeddings": 64}
T5 = {"vocab_size": 97, "d_model": 24, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 40}
T5 |= {"pad_token_id": 0, "decoder_start_token_id": 0}
BART = {"vocab_size": 97, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, **IDS}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "decoder_start_token_id": 3}
BART |= {"encoder_ffn_dim": 40, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
BART |= {"forced_eos_token_id": None}
SHARDS = {"max_shard_size": "20KB"}

# Each value is (model class without "Flax", config class, options, options of save_pretrained).
CASES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, {}),
    "gpt2 of a page": ("GPT2LMHeadModel", "GPT2Config", GPT2 | PAGE, {}),
    "gpt2 untied": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"tie_word_embeddings": False}, {}),
    "gpt2 in shards": ("GPT2LMHeadModel", "GPT2Config", GPT2, SHARDS),
    "gpt2 as safetensors": ("GPT2LMHeadModel", "GPT2Config", GPT2, {"safe_serialization": True}),
    "gpt2 in bfloat16": ("GPT2LMHeadModel", "GPT2Config", GPT2, {}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED, {}),
    "mistral with a window": (
        *("MistralForCausalLM", "MistralConfig"),
        *(GROUPED | {"sliding_window": 4}, {}),
    ),
    "gemma": (
        *("GemmaForCausalLM", "GemmaConfig"),
        *(GROUPED | {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}, {}),
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES, {}),
    "bert for pre-training": ("BertForPreTraining", "BertConfig", SIZES, {}),
    "bert classifier": ("BertForSequenceClassification", "BertConfig", SIZES, {}),
    "bert alone": ("BertModel", "BertConfig", SIZES, {}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ROBERTA, {}),
    "roberta classifier": ("RobertaForSequenceClassification", "RobertaConfig", ROBERTA, {}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", ROBERTA, {}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL, {}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, {}),
    "t5 1.1": (
        *("T5ForConditionalGeneration", "T5Config"),
        *(T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, {}),
    ),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5, {}),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART, {}),
    "marian": ("MarianMTModel", "MarianConfig", BART | {"decoder_vocab_size": 97}, {}),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", BART, {}),
}


def random_params(model) -> dict:
    """Adds noise to all parameters, because zero biases would hide errors in their names."""
    leaves, tree = jax.tree_util.tree_flatten(model.params)
    keys = jax.random.split(jax.random.PRNGKey(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree_util.tree_unflatten(tree, noisy)


def write(folder: Path, name: str, config: str, options: dict, saving: dict, dtype: str) -> None:
    """Saves a model, and random tokens with the model's outputs in outputs.npz."""
    settings = getattr(transformers, config)(**options)
    model = getattr(transformers, f"Flax{name}")(settings, seed=0)
    params = random_params(model)
    if dtype == "bfloat16":
        params = model.to_bf16(params)
    model.save_pretrained(folder, params=params, **saving)
    params = jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.float32), params)
    rng = np.random.default_rng(0)
    arrays = {"tokens": rng.integers(4, 97, (2, LENGTH))}
    inputs = {"input_ids": arrays["tokens"]}
    if settings.is_encoder_decoder:
        arrays["source"] = rng.integers(4, 97, (2, LENGTH - 3))
        inputs = {"input_ids": arrays["source"], "decoder_input_ids": arrays["tokens"]}
    found = model(**inputs, params=params)
    for field in ("logits", "prediction_logits", "last_hidden_state", "pooler_output"):
        if (value := getattr(found, field, None)) is not None:
            arrays["logits" if field == "prediction_logits" else field] = np.asarray(value)
    if name.endswith(("CausalLM", "LMHeadModel")):
        short = arrays["tokens"][:, :4]
        out = model.generate(short, params=params, max_new_tokens=6, do_sample=False)
        arrays["greedy"] = np.asarray(out.sequences)[:, 4:]
    np.savez(folder / "outputs.npz", **arrays)


def main() -> None:
    """Saves the models of `CASES` in the folder `sys.argv[1]`, and prints versions as JSON."""
    for case, (name, config, options, saving) in CASES.items():
        dtype = "bfloat16" if case.endswith("bfloat16") else "float32"
        write(Path(sys.argv[1]) / case, name, config, options, saving, dtype)
    names = ("transformers", "jax", "flax")
    assert flax.__version__ == version("flax")
    print(json.dumps({name: version(name) for name in names}))


if __name__ == "__main__":
    main()
