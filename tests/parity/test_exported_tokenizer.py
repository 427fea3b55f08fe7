"""transformers opens the tokenizer of an exported folder as that of the imported folder."""

import json
import shutil

import pytest

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

import jaxformer as jf  # noqa: E402
from jaxformer.hub.tokenizers.files import read_tokenizer, write_tokenizer  # noqa: E402
from tests.hub.published_tokenizers import CONFIG, PUBLISHED  # noqa: E402
from tests.hub.test_exported_tokenizer import write_settings  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CHAT = [{"role": "user", "content": "the tide"}, {"role": "assistant", "content": "came in"}]
NAMES = ("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces")
NAMES += ("model_input_names", "chat_template", "special_tokens_map", "all_special_tokens")
# Their classes rebuild the tokenizer from a vocabulary of another kind than byte-level BPE.
OTHERS = "bert distilbert gemma gemma2 gemma3_text marian mt5 pegasus t5 xlm-roberta".split()


def opened(folder) -> dict:
    """Returns what transformers makes of a folder: settings, ids and a chat, or an error."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        about = {name: getattr(tokenizer, name) for name in NAMES}
        about["ids"] = dict(tokenizer("the tide"))
        if tokenizer.chat_template:
            about["chat"] = tokenizer.apply_chat_template(CHAT, tokenize=False)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error).replace(str(folder), "")}
    return about


@pytest.mark.parametrize("name", PUBLISHED)
def test_exported_tokenizer_settings_equal_originals_in_transformers(name, tmp_path):
    model_type, files = PUBLISHED[name]
    if model_type in OTHERS:
        files = files | {CONFIG: files[CONFIG] | {"tokenizer_class": "PreTrainedTokenizerFast"}}
    before, after = tmp_path / "in", tmp_path / "out"
    before.mkdir(), after.mkdir()
    (before / "config.json").write_text(json.dumps({"model_type": model_type}))
    write_settings(before, files)
    shutil.copy(before / "config.json", after)
    write_tokenizer(after, read_tokenizer(before), jf.DecoderConfig())
    found = opened(before)
    assert found == opened(after)
    assert "error" not in found, found
