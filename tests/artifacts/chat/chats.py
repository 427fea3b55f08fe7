"""Chat templates, tokenizers and random conversations for tests."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import ByteLevel

from jaxformer.hub.tokenizers.files import read_tokenizer

PUBLISHED = Path(__file__).parents[4] / "shared" / "data" / "chat-templates"
needs_templates = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="the published chat templates are not here"
)
# Templates with a variant that marks what the assistant says.
PAIRS = "gemma gemma3 llama3 phi3 phi3_5 qwen2_5 qwen3 qwen3_instruct_2507".split()
NAMES = [*PAIRS, "llama3_1", "llama3_2"]
SPECIAL = "<s> </s> <|im_start|> <|im_end|> <|endoftext|> <start_of_turn> <end_of_turn>".split()
SPECIAL += "<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|> <|end|>".split()
SPECIAL += "<|user|> <|assistant|> <|system|>".split()
NOT_SPECIAL = "<think> </think> <tool_call>".split()
WORDS = "the tide came in <b> and {x} \n\n é 猫 12 ' \" & don't <th ".split(" ")
TOOL = {
    "name": "add",
    "description": "Adds numbers; a <b> is 'one'.",
    "parameters": {
        "type": "object",
        "properties": {"b": {"type": "number"}, "a": {"type": "number", "description": "é"}},
        "required": ["b"],
    },
    "return": {"type": "number"},
}
TOOLS = [{"type": "function", "function": TOOL}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
_LLAMA_3 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CORPUS = ["the tide came in and <b> {x} é 猫 don't user assistant system model"] * 20


def published(name):
    return (PUBLISHED / f"{name}.jinja").read_text()


def text_of(random_numbers, most):
    """Returns a random text that is not empty."""
    words = [random_numbers.choice(WORDS) for _ in range(random_numbers.randint(1, most))]
    return " ".join([*words, random_numbers.choice(["ab", "x.", "one\n"])])


def conversation(seed, with_tools=False):
    """Returns a random conversation, maybe with calls of tools and with reasoning."""
    numbers = random.Random(seed)
    messages = []
    if numbers.random() < 0.5:
        messages.append({"role": "system", "content": text_of(numbers, 6)})
    for _ in range(numbers.randint(1, 4)):
        messages.append({"role": "user", "content": text_of(numbers, 6)})
        if with_tools and numbers.random() < 0.5:
            call = {"name": "add", "arguments": {"b": numbers.choice([1, "x"]), "a": 2}}
            content = numbers.choice(["", text_of(numbers, 3)])
            calls = [{"type": "function", "function": call}]
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages.append({"role": "tool", "name": "add", "content": text_of(numbers, 3)})
        answer = {"role": "assistant", "content": text_of(numbers, 6)}
        if numbers.random() < 0.2:
            answer["reasoning_content"] = text_of(numbers, 4)
        messages.append(answer)
    if numbers.random() < 0.2:
        messages.append({"role": "user", "content": text_of(numbers, 3)})
    return messages


# ---- tokenizers


def byte_level(pattern, trim_offsets, corpus=_CORPUS):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    steps = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, split])
    backend.post_processor = ByteLevel(trim_offsets=trim_offsets)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(corpus, _trainer(400, alphabet))
    return backend


def sentencepiece(is_prepended):
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if is_prepended else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(_CORPUS, _trainer(600, [], ["<unk>", "<pad>", *all_bytes]))
    content = json.loads(backend.to_str())
    content["added_tokens"] = [
        entry for entry in content["added_tokens"] if entry["content"] not in all_bytes
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _trainer(vocab_size, alphabet, special=("<unk>", "<pad>")):
    return trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )


BACKENDS = {
    "gpt2": lambda: byte_level(None, True),
    "gpt2 with line breaks": lambda: byte_level(None, True, ["the tide\n\n"] * 20),
    "llama 3": lambda: byte_level(_LLAMA_3, True),
    "qwen": lambda: byte_level(_LLAMA_3, False),
    "sentencepiece": lambda: sentencepiece(False),
    "sentencepiece with a first space": lambda: sentencepiece(True),
}


def write_folder(folder, template, backend="qwen", more=(), **flags):
    """Writes the files of a tokenizer with a chat template, as transformers does."""
    made = BACKENDS[backend]()
    special = [AddedToken(x, special=True, normalized=False, **flags) for x in (*SPECIAL, *more)]
    made.add_special_tokens(special)
    made.add_tokens([AddedToken(x, normalized=False) for x in NOT_SPECIAL])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    options = {**named, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    (folder / "config.json").write_text("{}")
    return folder


def make_tokenizer(folder, template, backend="qwen", **options):
    return read_tokenizer(write_folder(folder, template, backend, **options))
