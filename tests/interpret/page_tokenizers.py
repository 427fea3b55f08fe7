"""Tokenizers of every kind that a page encodes with, and texts that are hard to encode."""

import json
import random
import tempfile
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.artifacts.tokenizer_copies import parsing_special
from tests.artifacts.small_tokenizers import (
    byte_level_bpe,
    byte_tokens,
    character_bpe,
    trained_unigram,
)
from tests.artifacts.test_patterns import PUBLISHED

SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>"]
# Texts of the classes that tokenizers treat differently. All characters are in Unicode 12, because
# the `tokenizers` library and browsers know different versions of Unicode.
PIECES = {
    "words": "the tide came in don't DON'T We'LL I'm x1 23.45 1024 naïve def f(x): return".split(),
    "accents": [
        "é",
        "e\u0301",
        "Å",
        "Å",
        "ÉCOLE",
        "straße",
        "İ",
        "ǆ",
        "o\u0323\u0302",
        "ñ",
        "ſ",
        "'ſ",
    ],
    "scripts": [
        "猫と犬",
        "漢字かな",
        "한국어",
        "한",
        "привет",
        "ΣΑΣ",
        "שלום",
        "مرحبا",
        "हिन्दी",
        "ไทย",
    ],
    "emoji": ["🙂", "👩‍👩‍👧", "👍🏽", "🇩🇪", "❤️", "𝔘𝔫𝔦", "𐍈", "\U0001f9d1\u200d\U0001f52c"],
    "forms": ["ﬁ", "Ⅷ", "½", "①", "ﷺ", "㍿", "ｆｕｌｌ", "x²", "K", "\u0345", "\u0308"],
    "spaces": [
        " ",
        "  ",
        "    ",
        " " * 9,
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u0085",
    ],
    "controls": [
        "\0",
        "\x07",
        "\x1b[31m",
        "\x7f",
        "\u200b",
        "\ufeff",
        "\ufffd",
        "\u00ad",
        "\ue000",
    ],
    "signs": [
        "!",
        "...",
        "--",
        "$&",
        "$$",
        "_",
        "▁",
        "Ġ",
        "#'\"",
        "\\n",
        "(a)[b]{c}",
        "<0x41>",
        "##ing",
        "€",
        "</w>",
    ],
    "special": [
        *SPECIAL,
        "<tool>",
        "<tool>!",
        "qab",
        "<|mask|>",
        "<strip>",
        "word",
        "<unk",
        "|endoftext|>",
        "[MASK]",
    ],
}


def random_text(numbers: random.Random) -> str:
    """Returns a text of up to 40 pieces, mostly from a few classes."""
    classes = numbers.sample([*PIECES], numbers.randint(1, 4))
    parts = []
    for _ in range(numbers.randint(1, 40)):
        kind = numbers.choice(classes)
        parts.append(
            numbers.choice(PIECES[kind]) + " " * (kind == "words" and numbers.random() < 0.8)
        )
    return "".join(parts)


@cache
def hard_texts(number: int, seed: int = 0) -> tuple[str, ...]:
    """Returns `number` texts. Two of them have 10,000 characters."""
    numbers = random.Random(seed)
    single = [piece for pieces in PIECES.values() for piece in pieces]
    long = ["".join(random_text(numbers) for _ in range(200))[:10_000], "a" * 5_000 + " " * 5_000]
    texts = [*single, *long, *(random_text(numbers) for _ in range(number))]
    return tuple(texts[:number])


def corpus() -> list[str]:
    """Returns texts with repeated words, from which each kind of tokenizer learns merges."""
    numbers = random.Random(1)
    words = [*PIECES["words"], *PIECES["accents"], *PIECES["scripts"], *PIECES["emoji"]]
    return [" ".join(numbers.choices(words, k=30)) + "\n\n" + "ab" * 20 for _ in range(60)]


def add_tokens(backend: tokenizers.Tokenizer) -> Subwords:
    """Adds special tokens and tokens with every option, and a template."""
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(
        [
            AddedToken("<tool>", normalized=False),
            AddedToken("<tool>!", normalized=False),
            AddedToken("<strip>", lstrip=True, rstrip=True),
            AddedToken("word", single_word=True),
            AddedToken("ÉCOLE", normalized=True),
        ]
    )
    begin = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", begin)])
    return Subwords(backend, SpecialTokens((backend.token_to_id("</s>"),), begin))


def of_pattern(name: str, ignore_merges: bool = False) -> Subwords:
    """Returns byte-level BPE with the pattern of a published tokenizer."""
    splits = [pre_tokenizers.Split(Regex(x), "isolated") for x in PUBLISHED[name]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=name == "bloom", use_regex=False)
    backend = byte_level_bpe([*splits, bytes_], corpus(), 700, SPECIAL, ignore_merges)
    if name == "qwen":
        backend.normalizer = normalizers.NFC()
    return add_tokens(backend)


def clip() -> Subwords:
    """Returns lower-case byte-level BPE whose tokens mark the end of a word."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    split = pre_tokenizers.Split(Regex(PUBLISHED["clip"][0]), "removed", invert=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.BPEDecoder("</w>")
    options = {"special_tokens": SPECIAL, "end_of_word_suffix": "</w>", "show_progress": False}
    backend.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=600, **options))
    return add_tokens(backend)


def sentencepiece(kind: str) -> Subwords:
    """Returns BPE over characters, like a tokenizer that was converted from SentencePiece.

    With the kind "always", the tokenizer has no byte tokens.
    """
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    options = {"limit_alphabet": 60, "show_progress": False}
    learner.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=400, **options))
    learned = json.loads(learner.to_str())["model"]
    has_bytes = kind != "always"
    bytes_ = byte_tokens() if has_bytes else []
    known = [*SPECIAL, *bytes_, *learned["vocab"], "▁▁", "▁▁▁▁", *"</s>", "</", "</s"]
    merges = [*map(tuple, learned["merges"]), ("▁", "▁"), ("▁▁", "▁▁")]
    # These merges build the special token "</s>" from plain text.
    merges += [("<", "/"), ("</", "s"), ("</s", ">")]
    backend = character_bpe(kind, known, merges, byte_fallback=has_bytes, fuse_unk=kind != "llama")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", left=kind != "gemma")])
    return add_tokens(backend)


def t5(rule: str = "nmt_nfkc") -> Subwords:
    """Returns a Unigram model of sentencepiece with a normalization rule, such as T5's."""
    lines = [line for text in corpus() for line in text.split("\n\n")]
    with tempfile.TemporaryDirectory() as folder:
        options = {"vocab_size": 300, "normalization_rule_name": rule}
        _, backend = trained_unigram(Path(folder) / "spiece.model", lines, **options)
    return add_tokens(backend)


def merged_special() -> ByteTokenizer:
    """Returns a tokenizer whose merges build its end-of-text token from plain text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], **options)
    backend.train_from_iterator(["a</s>b</s>c 1</s>"] * 9, trainer)
    return ByteTokenizer(backend)


def small_unigram() -> Subwords:
    """Returns a Unigram model in which an unknown character costs more than two tokens."""
    vocab = [("<unk>", 0.0), ("qa", -30.0), ("a", -2.0), ("b", -6.0), ("ab", -1.0)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, 0))
    backend.decoder = decoders.Fuse()
    return add_tokens(backend)


def unigram(byte_fallback: bool) -> Subwords:
    """Returns a Unigram model, after Unicode normalization."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=not byte_fallback)
    options = {"special_tokens": SPECIAL, "unk_token": "<unk>", "show_progress": False}
    backend.train_from_iterator(corpus(), trainers.UnigramTrainer(vocab_size=300, **options))
    if byte_fallback:
        vocab = json.loads(backend.to_str())["model"]["vocab"]
        vocab += [(f"<0x{n:02X}>", -20.0) for n in range(256)]
        backend.model = models.Unigram([tuple(x) for x in vocab], 0, byte_fallback=True)
    else:
        steps = [normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()]
        backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Metaspace()
    return add_tokens(backend)


def word_piece(model: str) -> Subwords:
    """Returns a tokenizer of whole words ("words") or of their parts, as BERT's."""
    options = {"special_tokens": SPECIAL, "show_progress": False}
    if model == "words":
        backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
        steps = [normalizers.NFKD(), normalizers.StripAccents()]
        backend.normalizer = normalizers.Sequence(steps)
        steps = [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.train_from_iterator(corpus(), trainers.WordLevelTrainer(vocab_size=99, **options))
        return add_tokens(backend)
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(corpus(), trainers.WordPieceTrainer(vocab_size=300, **options))
    return add_tokens(backend)


def pieces_of_three() -> Subwords:
    """Returns byte-level BPE with the remaining pre-tokenizers."""
    backend = tokenizers.Tokenizer(models.BPE())
    steps = [
        pre_tokenizers.Punctuation("merged_with_next"),
        pre_tokenizers.CharDelimiterSplit("x"),
        pre_tokenizers.Split(Regex(r"[a-f]++(?>[g-k]*)"), "contiguous"),
        pre_tokenizers.FixedLength(3),
        pre_tokenizers.ByteLevel(use_regex=False),
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=500, **options))
    return add_tokens(backend)


KINDS = {
    "merges": lambda: ByteTokenizer.train(corpus(), 600),
    "bytes": lambda: ByteTokenizer.train([], 257),
    "digits and mask": lambda: ByteTokenizer.train(corpus(), 500, split_digits=True, mask=True),
    "special tokens": lambda: parsing_special(ByteTokenizer.train(corpus(), 500, mask=True)),
    "special in text": lambda: parsing_special(of_pattern("gpt2")),
    "gpt2": lambda: of_pattern("gpt2"),
    "llama3": lambda: of_pattern("llama3", ignore_merges=True),
    "qwen": lambda: of_pattern("qwen"),
    "o200k": lambda: of_pattern("o200k"),
    "deepseek v3": lambda: of_pattern("deepseek v3"),
    "bloom": lambda: of_pattern("bloom"),
    "clip": clip,
    "llama": lambda: sentencepiece("llama"),
    "gemma": lambda: sentencepiece("gemma"),
    "mistral": lambda: sentencepiece("first"),
    "no bytes": lambda: sentencepiece("always"),
    "unigram": lambda: unigram(byte_fallback=False),
    "unigram bytes": lambda: unigram(byte_fallback=True),
    "small unigram": small_unigram,
    "t5": t5,
    "merged special": merged_special,
    "bert": lambda: word_piece("bert"),
    "words": lambda: word_piece("words"),
    "pieces of three": pieces_of_three,
}
