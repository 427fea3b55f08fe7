"""Settings files of tokenizers as in published folders: the options and their values.

Chat templates are shortened. The lists of added tokens have a few entries only.
"""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n"
    "{{ m['content'] }}<end_of_turn>\n{% endfor %}"
)
NO_LIMIT = 1000000000000000019884624838656


def flagged(content, **flags):
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **usual, **flags}


def token(content, **flags):
    """Returns a token as tokenizer_config.json stores it."""
    return {"__type": "AddedToken", **flagged(content, **flags)}


def added(*contents, first=0):
    """Returns an entry `added_tokens_decoder` with these special tokens."""
    return {str(first + n): flagged(x, special=True) for n, x in enumerate(contents)}


BERT = {
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
    "pad_token": "[PAD]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
}
ROBERTA = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "mask_token": token("<mask>", lstrip=True),
    "pad_token": "<pad>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
}
LLAMA2 = {
    "bos_token": token("<s>"),
    "eos_token": token("</s>"),
    "unk_token": token("<unk>"),
}
SENTINELS = [f"<extra_id_{n}>" for n in range(3)]
QWEN = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}

CONFIG, MAP, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
# name: (model_type, {file: content})
PUBLISHED = {
    "gpt2": ("gpt2", {CONFIG: {"model_max_length": 1024}}),
    "gpt2 with its tokens": (
        "gpt2",
        {
            CONFIG: {
                "add_bos_token": False,
                "add_prefix_space": False,
                "bos_token": token("<|endoftext|>", normalized=True),
                "eos_token": token("<|endoftext|>", normalized=True),
                "errors": "replace",
                "model_max_length": 1024,
                "pad_token": None,
                "tokenizer_class": "GPT2Tokenizer",
                "unk_token": token("<|endoftext|>", normalized=True),
            }
        },
    ),
    "pythia": (
        "gpt_neox",
        {
            CONFIG: {
                "add_prefix_space": False,
                "bos_token": "<|endoftext|>",
                "eos_token": "<|endoftext|>",
                "name_or_path": "EleutherAI/gpt-neox-20b",
                "special_tokens_map_file": "/admin/home/special_tokens_map.json",
                "tokenizer_class": "GPTNeoXTokenizer",
                "unk_token": "<|endoftext|>",
            },
            MAP: dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
        },
    ),
    "llama 2": (
        "llama",
        {
            CONFIG: LLAMA2
            | {
                "add_bos_token": True,
                "add_eos_token": False,
                "clean_up_tokenization_spaces": False,
                "legacy": False,
                "model_max_length": NO_LIMIT,
                "pad_token": None,
                "padding_side": "right",
                "sp_model_kwargs": {},
                "tokenizer_class": "LlamaTokenizer",
            },
            MAP: {role: flagged(x["content"]) for role, x in LLAMA2.items()},
        },
    ),
    "llama 2 chat": (
        "llama",
        {
            CONFIG: LLAMA2
            | {
                "chat_template": INST,
                "legacy": False,
                "model_max_length": NO_LIMIT,
                "padding_side": "right",
                "tokenizer_class": "LlamaTokenizer",
            }
        },
    ),
    "llama 3.1 instruct": (
        "llama",
        {
            CONFIG: {
                "added_tokens_decoder": added("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
                "bos_token": "<|begin_of_text|>",
                "chat_template": CHATML,
                "clean_up_tokenization_spaces": True,
                "eos_token": "<|eot_id|>",
                "model_input_names": ["input_ids", "attention_mask"],
                "model_max_length": 131072,
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
            MAP: {"bos_token": flagged("<|begin_of_text|>"), "eos_token": flagged("<|eot_id|>")},
        },
    ),
    "tinyllama chat": (
        "llama",
        {
            CONFIG: {
                "bos_token": "<s>",
                "chat_template": CHATML,
                "clean_up_tokenization_spaces": False,
                "eos_token": "</s>",
                "legacy": False,
                "model_max_length": 2048,
                "pad_token": "</s>",
                "padding_side": "right",
                "tokenizer_class": "LlamaTokenizer",
                "unk_token": "<unk>",
                "use_default_system_prompt": False,
            }
        },
    ),
    "mistral instruct": (
        "mistral",
        {
            CONFIG: {
                "add_bos_token": True,
                "add_eos_token": False,
                "add_prefix_space": None,
                "additional_special_tokens": [],
                "bos_token": "<s>",
                "chat_template": INST,
                "clean_up_tokenization_spaces": False,
                "eos_token": "</s>",
                "legacy": False,
                "model_max_length": NO_LIMIT,
                "pad_token": None,
                "sp_model_kwargs": {},
                "spaces_between_special_tokens": False,
                "tokenizer_class": "LlamaTokenizer",
                "unk_token": "<unk>",
                "use_default_system_prompt": False,
            }
        },
    ),
    "mistral with named templates": (
        "mistral",
        {
            CONFIG: {
                "bos_token": "<s>",
                "chat_template": [
                    {"name": "default", "template": INST},
                    {"name": "tool_use", "template": CHATML},
                ],
                "eos_token": "</s>",
                "tokenizer_class": "PreTrainedTokenizerFast",
                "truncation_side": "left",
            }
        },
    ),
    "qwen2.5 instruct": ("qwen2", {CONFIG: QWEN | {"chat_template": CHATML}}),
    "qwen2 base": ("qwen2", {CONFIG: QWEN | {"eos_token": "<|endoftext|>"}}),
    "qwen3": (
        "qwen3",
        {CONFIG: QWEN | {"added_tokens_decoder": added("<|endoftext|>"), "chat_template": CHATML}},
    ),
    "qwen3 padded on the left": (
        "qwen3",
        {CONFIG: QWEN | {"padding_side": "left"}, TEMPLATE: CHATML},
    ),
    "olmo2 instruct": (
        "olmo2",
        {
            CONFIG: {
                "add_prefix_space": False,
                "bos_token": "<|endoftext|>",
                "chat_template": CHATML,
                "clean_up_tokenization_spaces": False,
                "eos_token": "<|endoftext|>",
                "model_max_length": 4096,
                "pad_token": "<|pad|>",
                "padding_side": "right",
                "tokenizer_class": "GPT2Tokenizer",
                "truncation": True,
                "unk_token": "<|endoftext|>",
            }
        },
    ),
    "smollm3": (
        "smollm3",
        {
            CONFIG: {
                "bos_token": None,
                "clean_up_tokenization_spaces": False,
                "eos_token": "<|im_end|>",
                "extra_special_tokens": {},
                "fast": False,
                "model_input_names": ["input_ids", "attention_mask"],
                "model_max_length": 131072,
                "pad_token": "<|im_end|>",
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
            TEMPLATE: CHATML,
        },
    ),
    "phi 3 mini": (
        "phi3",
        {
            CONFIG: {
                "add_bos_token": False,
                "add_eos_token": False,
                "added_tokens_decoder": added("<unk>", "<s>"),
                "bos_token": "<s>",
                "chat_template": CHATML,
                "clean_up_tokenization_spaces": False,
                "eos_token": "<|endoftext|>",
                "legacy": False,
                "model_max_length": 4096,
                "pad_token": "<|endoftext|>",
                "padding_side": "left",
                "sp_model_kwargs": {},
                "tokenizer_class": "LlamaTokenizer",
                "unk_token": "<unk>",
                "use_default_system_prompt": False,
            },
            "added_tokens.json": {"<|endoftext|>": 2, "<|end|>": 3},
        },
    ),
    "gemma": (
        "gemma",
        {
            CONFIG: {
                "add_bos_token": True,
                "add_eos_token": False,
                "bos_token": "<bos>",
                "clean_up_tokenization_spaces": False,
                "eos_token": "<eos>",
                "legacy": None,
                "model_max_length": NO_LIMIT,
                "pad_token": "<pad>",
                "sp_model_kwargs": {},
                "spaces_between_special_tokens": False,
                "tokenizer_class": "GemmaTokenizer",
                "unk_token": "<unk>",
                "use_default_system_prompt": False,
            }
        },
    ),
    "gemma 2 it": (
        "gemma2",
        {
            CONFIG: {
                "add_bos_token": True,
                "add_eos_token": False,
                "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
                "bos_token": "<bos>",
                "chat_template": TURNS,
                "clean_up_tokenization_spaces": False,
                "eos_token": "<eos>",
                "model_max_length": NO_LIMIT,
                "pad_token": "<pad>",
                "tokenizer_class": "GemmaTokenizer",
                "unk_token": "<unk>",
            }
        },
    ),
    "gemma 3 it": (
        "gemma3_text",
        {
            CONFIG: {
                "add_bos_token": True,
                "add_eos_token": False,
                "boi_token": "<start_of_image>",
                "bos_token": "<bos>",
                "chat_template": TURNS,
                "eoi_token": "<end_of_image>",
                "eos_token": "<eos>",
                "extra_special_tokens": {"boi_token": "<start_of_image>"},
                "image_token": "<image_soft_token>",
                "model_max_length": NO_LIMIT,
                "pad_token": "<pad>",
                "processor_class": "Gemma3Processor",
                "tokenizer_class": "GemmaTokenizer",
                "unk_token": "<unk>",
            }
        },
    ),
    "starcoder2": (
        "starcoder2",
        {
            CONFIG: {
                "add_prefix_space": False,
                "additional_special_tokens": ["<|endoftext|>", "<fim_prefix>"],
                "bos_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": True,
                "eos_token": "<|endoftext|>",
                "model_max_length": NO_LIMIT,
                "tokenizer_class": "GPT2Tokenizer",
                "unk_token": "<|endoftext|>",
                "vocab_size": 49152,
            }
        },
    ),
    "bert uncased": ("bert", {CONFIG: {"do_lower_case": True, "model_max_length": 512}}),
    "bert chinese, with its tokens": (
        "bert",
        {
            CONFIG: BERT
            | {
                "do_basic_tokenize": True,
                "do_lower_case": False,
                "never_split": None,
                "strip_accents": None,
                "tokenize_chinese_chars": True,
                "tokenizer_class": "BertTokenizer",
            },
            MAP: BERT,
        },
    ),
    "minilm": (
        "bert",
        {
            CONFIG: BERT
            | {
                "do_lower_case": True,
                "max_length": 128,
                "model_max_length": 512,
                "pad_to_multiple_of": None,
                "pad_token_type_id": 0,
                "padding_side": "right",
                "stride": 0,
                "tokenizer_class": "BertTokenizer",
                "truncation_side": "right",
                "truncation_strategy": "longest_first",
            }
        },
    ),
    "roberta": (
        "roberta",
        {
            CONFIG: ROBERTA
            | {"add_prefix_space": False, "tokenizer_class": "RobertaTokenizer"}
            | {"trim_offsets": True, "errors": "replace", "model_max_length": 512}
        },
    ),
    "xlm-r": (
        "xlm-roberta",
        {CONFIG: ROBERTA | {"model_max_length": 512, "tokenizer_class": "XLMRobertaTokenizer"}},
    ),
    "distilbert": ("distilbert", {CONFIG: {"do_lower_case": True, "model_max_length": 512}}),
    "modernbert": (
        "modernbert",
        {
            CONFIG: BERT
            | {
                "clean_up_tokenization_spaces": True,
                "extra_special_tokens": {},
                "mask_token": token("[MASK]", lstrip=True),
                "model_input_names": ["input_ids", "attention_mask"],
                "model_max_length": 8192,
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        },
    ),
    "flan-t5": (
        "t5",
        {
            CONFIG: {
                "additional_special_tokens": SENTINELS,
                "eos_token": "</s>",
                "extra_ids": 3,
                "model_max_length": 512,
                "pad_token": "<pad>",
                "sp_model_kwargs": {},
                "tokenizer_class": "T5Tokenizer",
                "unk_token": "<unk>",
            },
            MAP: {"additional_special_tokens": SENTINELS, "eos_token": "</s>"},
        },
    ),
    "mt5": (
        "mt5",
        {
            CONFIG: {
                "additional_special_tokens": None,
                "eos_token": "</s>",
                "extra_ids": 0,
                "pad_token": "<pad>",
                "tokenizer_class": "T5Tokenizer",
                "unk_token": "<unk>",
            }
        },
    ),
    "bart": ("bart", {CONFIG: ROBERTA | {"tokenizer_class": "BartTokenizer"}}),
    "marian": (
        "marian",
        {
            CONFIG: {
                "eos_token": "</s>",
                "model_max_length": 512,
                "pad_token": "<pad>",
                "separate_vocabs": False,
                "source_lang": "eng",
                "sp_model_kwargs": {},
                "target_lang": "deu",
                "tokenizer_class": "MarianTokenizer",
                "unk_token": "<unk>",
            }
        },
    ),
    "pegasus": (
        "pegasus",
        {
            CONFIG: {
                "additional_special_tokens": ["<mask_1>", "<unk_2>", "<unk_3>"],
                "eos_token": "</s>",
                "full_tokenizer_file": None,
                "mask_token": "<mask_2>",
                "mask_token_sent": "<mask_1>",
                "model_max_length": 1024,
                "offset": 103,
                "pad_token": "<pad>",
                "tokenizer_class": "PegasusTokenizer",
                "unk_token": "<unk>",
            }
        },
    ),
}
