"""Special ids in config.json and generation_config.json are valid, missing, or rejected."""

import json
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxformer.cli import main
from jaxformer.hub.tokenizers.files import read_special_tokens
from tests.errors import error_of
from tests.hub import foreign

SIZE = 10
FILES = ("config.json", "generation_config.json")
KEYS = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
odd = st.floats(allow_nan=False) | st.text(max_size=3) | st.booleans() | st.just({})
ids = st.integers(-3, 12)
values = st.none() | ids | odd | st.lists(ids | odd | st.none(), max_size=3)


def is_id(value):
    return type(value) is int and value >= 0


@given(name=st.sampled_from(FILES), key=st.sampled_from(KEYS), value=values)
@example(name="config.json", key="eos_token_id", value=SIZE)
@example(name="config.json", key="bos_token_id", value=SIZE)
def test_special_token_id_in_config_file_is_read_or_rejected(tmp_path_factory, name, key, value):
    folder = tmp_path_factory.mktemp("ids")
    (folder / name).write_text(json.dumps({key: value}))
    is_list = isinstance(value, list) and key == "eos_token_id" and all(map(is_id, value))
    if value is None or is_id(value) or is_list or (type(value) is int and value == -1):
        found = read_special_tokens(folder, SIZE)
        expected = value if is_list else [value] if is_id(value) else []
        expected = [token for token in expected if token < SIZE]
        field = {"bos_token_id": found.begin, "pad_token_id": found.pad}.get(key, found.start)
        said = found.stop_tokens if key == "eos_token_id" else () if field is None else (field,)
        assert list(said) == expected
    else:
        said = error_of(read_special_tokens, folder, SIZE)
        assert str(folder / name) in said and key in said and repr(value) in said


@pytest.mark.parametrize("value", [-2, [0, -1], 1.0, "0", True, [[0]]])
def test_command_reports_file_and_key_of_invalid_special_id(value, tmp_path, capsys):
    foreign.write(tmp_path / "theirs", "gpt2")
    foreign.options(tmp_path / "theirs", eos_token_id=value)
    (tmp_path / "theirs" / "generation_config.json").unlink()
    assert main(["generate", str(tmp_path / "theirs"), "--prompt", "the"]) == 2
    said = capsys.readouterr().err
    assert "config.json: eos_token_id" in said and len(said.splitlines()) == 1


def test_byte_order_mark_is_removed_from_every_file_of_a_model_folder(tmp_path):
    """A byte order mark in config.json, generation_config.json or tokenizer files is ignored."""
    from jaxformer.hub.load import opened

    foreign.write(tmp_path / "theirs", "gpt2")
    plain = opened(tmp_path / "theirs")
    for path in (tmp_path / "theirs").glob("*.json"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        marked = opened(tmp_path / "theirs")
    assert marked.config == plain.config
    assert marked.tokenizer.fingerprint == plain.tokenizer.fingerprint
