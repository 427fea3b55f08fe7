"""Small tokenizers with the steps of published tokenizers, for tests of pages and GGUF files."""

import io
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxformer.hub.tokenizers.sentencepiece import t5_tokenizer


def byte_level_bpe(steps, texts, vocab_size, special, ignore_merges=False) -> tokenizers.Tokenizer:
    """Returns byte-level BPE that learned `vocab_size` tokens from texts.

    `steps` are the pre-tokenizers, and `special` are the special tokens.
    """
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    content = json.loads(made.to_str())
    content["model"]["ignore_merges"] = ignore_merges
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def character_bpe(kind, tokens, merges, **options) -> tokenizers.Tokenizer:
    """Returns BPE over characters with the steps of Llama or Gemma, or with Metaspace.

    Args:
        kind: "llama", "gemma" or the `prepend_scheme` of Metaspace, "first" or "always".
        tokens: the tokens in the order of their ids; the unknown token is "<unk>".
        merges: the pairs of tokens that are merged.
        **options: fields of the model.
    """
    ids = {text: number for number, text in enumerate(dict.fromkeys(tokens))}
    made = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", **options))
    replace = normalizers.Replace(" ", "▁")
    if kind == "llama":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    elif kind == "gemma":
        made.normalizer = replace
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        splits = kind == "always"
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind, split=splits)
    return made


def byte_tokens() -> list[str]:
    """Returns the tokens <0x00> to <0xFF>, with which an unknown character is spelled."""
    return [f"<0x{number:02X}>" for number in range(256)]


def trained_unigram(path: Path, texts, **options):
    """Trains a unigram model of sentencepiece with the special ids of T5.

    Args:
        path: the file spiece.model to write.
        texts: the training texts.
        **options: options of sentencepiece's trainer.

    Returns:
        The encoder of sentencepiece, and the tokenizer that the package reads from the file.
    """
    spm = pytest.importorskip("sentencepiece", reason="only sentencepiece trains its models")
    data = io.BytesIO()
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    options = {"hard_vocab_limit": False, "minloglevel": 2, **ids, **options}
    spm.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=data, **options)
    path.write_bytes(data.getvalue())
    return spm.SentencePieceProcessor(model_proto=data.getvalue()), t5_tokenizer(path, 0)
