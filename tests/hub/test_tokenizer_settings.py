"""Options in a vocabulary's settings files are applied or refused, or a warning names them."""

import json
import warnings
from fnmatch import fnmatch

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from jaxformer.hub.load import _FILES, _TOKENIZERS
from jaxformer.hub.tokenizers.files import read_tokenizer
from jaxformer.hub.tokenizers.older_vocabularies import VOCABULARIES
from tests.errors import error_of
from tests.hub import foreign
from tests.hub.test_sentencepiece import model as sentencepiece_model

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] mus ##ste Müs müs MUS 漢 字 漢字 tide".split()
IDS = {word: number for number, word in enumerate(WORDS)}


def bert(folder, settings=(), **options):
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    for name, content in {"tokenizer_config.json": options, **dict(settings)}.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def gpt2(folder, **options):
    model = json.loads(foreign.tokenizer().to_json())["model"]
    merges = (x if isinstance(x, str) else " ".join(x) for x in model["merges"])
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(merges))
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def t5(folder, **options):
    (folder / "spiece.model").write_bytes(sentencepiece_model())
    (folder / "config.json").write_text('{"model_type": "t5"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


BERT_IDS = [
    ({}, "Müsste", "mus ##ste"),
    ({"do_lower_case": False}, "Müsste", "Müs ##ste"),
    ({"do_lower_case": False, "strip_accents": True}, "MÜS", "MUS"),
    ({"strip_accents": False}, "Müsste", "müs ##ste"),
    ({}, "漢字", "漢 字"),
    ({"tokenize_chinese_chars": False}, "漢字", "漢字"),
]


@pytest.mark.parametrize(("options", "text", "tokens"), BERT_IDS)
def test_bert_normalizer_options_determine_the_token_ids(options, text, tokens, tmp_path):
    ids = [IDS[token] for token in tokens.split()]
    assert read_tokenizer(bert(tmp_path, **options)).encode(text) == ids


ADDED = [
    {"tokenizer_config.json": {"added_tokens_decoder": {"14": {"content": "tidewater"}}}},
    {"added_tokens.json": {"tidewater": 14}},
    {"added_tokens.json": {"tidewater": 14}, "special_tokens_map.json": {"sep_token": "[MASK]"}},
]


@pytest.mark.parametrize("files", ADDED)
def test_added_tokens_are_read_from_every_tokenizer_settings_file(files, tmp_path):
    tokenizer = read_tokenizer(bert(tmp_path, files.items()))
    assert tokenizer.encode("a tidewater") == [IDS["[UNK]"], 14]
    end = files.get("special_tokens_map.json", {}).get("sep_token", "[SEP]")
    assert tokenizer.encode_source("tide") == [IDS["[CLS]"], IDS["tide"], IDS[end]]


def test_gpt2_tokenizer_options_add_prefix_space_and_bos_token(tmp_path):
    ours = foreign.tokenizer()
    options = {"add_prefix_space": True, "add_bos_token": True}
    tokenizer = read_tokenizer(gpt2(tmp_path, **options))
    assert tokenizer.encode_source("the tide") == [0, *ours.encode(" the tide")]


def test_t5_extra_ids_option_sets_the_number_of_extra_tokens(tmp_path):
    sizes = {n: read_tokenizer(t5(tmp_path, extra_ids=n)).vocab_size for n in (0, 7)}
    assert sizes[7] - sizes[0] == 7


REFUSED = [
    (bert, {"tokenizer_class": "BertJapaneseTokenizer"}, "tokenizer_class"),
    (bert, {"do_basic_tokenize": False}, "do_basic_tokenize"),
    (bert, {"never_split": ["tide"]}, "never_split"),
    (bert, {"word_tokenizer_type": "mecab"}, "word_tokenizer_type"),
    (bert, {"do_lower_case": "no"}, "do_lower_case"),
    (bert, {"strip_accents": 0}, "strip_accents"),
    (bert, {"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "auto_map"),
    (bert, {"cls_token": 3}, "cls_token"),
    (bert, {"unk_token": "<unk>"}, "<unk>"),
    (bert, {"added_tokens_decoder": {"20": {"content": "tidewater"}}}, "tidewater"),
    (bert, {"added_tokens_decoder": {"x": {"content": "tidewater"}}}, "added_tokens_decoder"),
    (bert, {"added_tokens_decoder": {"14": {"content": 1}}}, "added_tokens_decoder"),
    (bert, {"added_tokens_decoder": ["tidewater"]}, "added_tokens_decoder"),
    (bert, {"additional_special_tokens": "<x>"}, "additional_special_tokens"),
    (gpt2, {"tokenizer_class": "RobertaTokenizer"}, "tokenizer_class"),
    (gpt2, {"add_prefix_space": "yes"}, "add_prefix_space"),
    (gpt2, {"do_lower_case": True}, "do_lower_case"),
    (t5, {"tokenizer_class": "AlbertTokenizer"}, "tokenizer_class"),
    (t5, {"sp_model_kwargs": {"enable_sampling": True}}, "sp_model_kwargs"),
    (t5, {"add_prefix_space": False}, "add_prefix_space"),
    (t5, {"extra_ids": -1}, "extra_ids"),
    (t5, {"eos_token": "<end>"}, "eos_token"),
]


@pytest.mark.parametrize(("make", "options", "named"), REFUSED)
def test_unsupported_tokenizer_option_that_changes_ids_is_rejected(make, options, named, tmp_path):
    said = error_of(read_tokenizer, make(tmp_path, **options))
    assert named in said and str(tmp_path) in said


def test_tokenizer_options_without_effect_on_ids_are_ignored(tmp_path):
    options = {"model_max_length": 512, "padding_side": "left", "chat_template": "{{ x }}"}
    options |= {"name_or_path": "somebody/bert", "do_lower_case": None, "never_split": None}
    tokenizer = read_tokenizer(bert(tmp_path, tokenizer_class="BertTokenizerFast", **options))
    assert tokenizer.encode("Tide") == [IDS["tide"]]


def lowercasing(folder, ids=None, **options):
    """Writes a tokenizer.json that lowercases and has an added token, and its settings files."""
    backend = tokenizers.Tokenizer(models.WordPiece(IDS, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_tokens([AddedToken("tidewater", single_word=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(ids or {}))
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def entry(number, **flags):
    return {"added_tokens_decoder": {str(number): {"content": "tidewater", **flags}}}


CONTRADICTIONS = [
    ({"do_lower_case": False}, "do_lower_case False"),
    ({"strip_accents": False}, "strip_accents False"),
    ({"tokenize_chinese_chars": False}, "tokenize_chinese_chars False"),
    (entry(99, single_word=True), "id 99"),
    (entry(14), "single_word is False"),
    ({"eos_token": "[MASK]", "ids": {"eos_token_id": [3, 2]}}, "eos_token_id is 3 and 2"),
    ({"eos_token": "<end>"}, "eos_token '<end>'"),
    ({"bos_token": "[CLS]", "add_bos_token": True}, "add_bos_token True"),
]


@pytest.mark.parametrize(("options", "said"), CONTRADICTIONS)
def test_contradictory_tokenizer_settings_files_give_a_warning(options, said, tmp_path):
    with pytest.warns(UserWarning) as caught:
        read_tokenizer(lowercasing(tmp_path, **options))
    (warning,) = caught
    assert said in str(warning.message) and "tokenizer.json is used" in str(warning.message)


def test_consistent_tokenizer_settings_files_give_no_warning(tmp_path):
    options = {"do_lower_case": True, "strip_accents": None, **entry(14, single_word=True)}
    options |= {"eos_token": "[SEP]", "ids": {"eos_token_id": 3}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_tokenizer(lowercasing(tmp_path, **options))


def test_download_includes_every_file_that_load_reads():
    patterns = (*_FILES, *_TOKENIZERS)
    for name in (
        *VOCABULARIES,
        *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        "tokenizer.json",
        "config.json",
        "generation_config.json",
    ):
        assert any(fnmatch(name, pattern) for pattern in patterns), name


def test_added_tokens_that_are_equal_after_normalization_are_rejected(tmp_path):
    """The library would match either of them at random."""
    settings = {"added_tokens.json": {"TideWater": 14, "tidewater": 15}}
    assert "'TideWater'" in error_of(read_tokenizer, bert(tmp_path, settings.items()))
