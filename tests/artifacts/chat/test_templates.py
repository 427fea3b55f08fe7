"""Templates are found in the settings files; messages are checked before they are rendered."""

import json

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.chat import template
from jaxformer.hub.tokenizers.files import read_tokenizer, write_tokenizer
from tests.artifacts.chat import chats
from tests.errors import error_of

USER = {"role": "user", "content": "the tide"}
ANSWER = {"role": "assistant", "content": "came in"}
SHORT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chats.make_tokenizer(tmp_path_factory.mktemp("tokenizer"), SHORT)


def test_applying_a_chat_template_returns_text_and_token_ids_and_mask(tokenizer):
    chat = tokenizer.apply_chat_template([USER, ANSWER])
    assert chat.text == "user: the tide\nassistant: came in\n"
    assert chat.ids == tokenizer.encode(chat.text)
    assert len(chat.assistant_mask) == len(chat.ids)


MESSAGES = {
    "no messages": ([], "at least one message"),
    "a text": ("hello", "must be a list"),
    "one message": (USER, "must be a list"),
    "a text as message": (["hello"], "message 1 is 'hello'"),
    "no role": ([{"content": "hello"}], "message 1 has no role"),
    "unknown role": ([USER, {"role": "robot", "content": "x"}], "message 2 has the role 'robot'"),
    "no content": ([{"role": "user"}], "message 1 (user) is empty"),
    "empty question": ([{"role": "user", "content": " \n"}], "message 1 (user) is empty"),
    "empty answer": (
        [USER, {"role": "assistant", "content": ""}],
        "message 2 (assistant) is empty",
    ),
    "no answer": ([USER, {"role": "assistant", "content": None}], "message 2 (assistant) is empty"),
    "empty parts": ([{"role": "user", "content": []}], "message 1 (user) is empty"),
    "a number": ([{"role": "user", "content": 3}], "message 1 has the content 3"),
    "an image": ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "type 'image'"),
    "a part without type": ([{"role": "user", "content": ["a"]}], "a part of type 'a'"),
    "an object": ([USER | {"meta": np.zeros(2)}], "type ndarray"),
    "a lone surrogate": ([{"role": "user", "content": "\ud800"}], "cannot be encoded as UTF-8"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_malformed_messages_raise_a_one_line_error(name, tokenizer):
    messages, reason = MESSAGES[name]
    assert reason in error_of(tokenizer.apply_chat_template, messages)


def test_deeply_nested_data_raise_an_error(tokenizer):
    nested = []
    for _ in range(200):
        nested = [nested]
    message = error_of(tokenizer.apply_chat_template, [USER | {"meta": nested}])
    assert "nested more than" in message


def test_tools_must_be_a_list_of_schemas(tokenizer):
    assert "tools is 'add'" in error_of(tokenizer.apply_chat_template, [USER], "add")
    assert "not a dict" in error_of(tokenizer.apply_chat_template, [USER], ["add"])


def test_applying_a_chat_template_does_not_modify_messages_and_tools(tmp_path):
    tokenizer = chats.make_tokenizer(tmp_path, SHORT)
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    before = json.dumps([messages, chats.TOOLS])
    tokenizer.apply_chat_template(messages, chats.TOOLS)
    assert json.dumps([messages, chats.TOOLS]) == before


def test_chat_messages_may_have_any_role_that_the_template_mentions(tmp_path):
    source = (
        "{% for m in messages %}{% if m.role == 'critic' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = chats.make_tokenizer(tmp_path, source)
    assert tokenizer.apply_chat_template([{"role": "critic", "content": "no"}]).text == "no"


def test_chat_template_does_not_see_message_fields_with_the_value_none(tmp_path):
    source = "{% for m in messages %}{{ m.content is defined }}{{ 'name' in m }}{% endfor %}"
    tokenizer = chats.make_tokenizer(tmp_path, source)
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": [CALL]}
    assert tokenizer.apply_chat_template([USER, message]).text == "TrueFalseFalseFalse"


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_template_can_read_the_reasoning_of_a_message_as_thinking_or_reasoning_content(
    field, tmp_path
):
    source = "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning_content }};{% endfor %}"
    tokenizer = chats.make_tokenizer(tmp_path, source)
    assert tokenizer.apply_chat_template([USER, ANSWER | {field: "hm"}]).text == "/;hm/hm;"


def test_variables_are_passed_to_the_chat_template_and_override_special_tokens(tmp_path):
    source = "{{ bos_token }}{{ eos_token }}{{ mood }}{{ documents }}{{ tools }}"
    tokenizer = chats.make_tokenizer(tmp_path, source)
    assert tokenizer.apply_chat_template([USER]).text == "<s></s>NoneNone"
    variables = {"mood": "calm", "bos_token": "B", "documents": [1]}
    assert tokenizer.apply_chat_template([USER], variables=variables).text == "B</s>calm[1]None"


# ---- where templates come from


def test_named_templates_are_chosen_by_name_and_by_tools(tmp_path):
    named = [{"name": n, "template": n.upper()} for n in ("default", "tool_use", "rag")]
    tokenizer = chats.make_tokenizer(tmp_path, named)
    assert tokenizer.apply_chat_template([USER]).text == "DEFAULT"
    assert tokenizer.apply_chat_template([USER], chats.TOOLS).text == "TOOL_USE"
    assert tokenizer.apply_chat_template([USER], template="rag").text == "RAG"
    message = error_of(lambda: tokenizer.apply_chat_template([USER], template="rga"))
    assert "template is 'rga'; the chat templates are default, tool_use, rag" in message


def test_template_files_take_precedence_over_the_settings(tmp_path):
    chats.write_folder(
        tmp_path, [{"name": "default", "template": "a"}, {"name": "b", "template": "c"}]
    )
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "b.jinja").write_text("named file")
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([USER]).text == "file"
    assert tokenizer.apply_chat_template([USER], template="b").text == "named file"


def test_error_for_tokenizer_without_chat_template_says_how_to_add_one(tmp_path):
    assert "chat_template.jinja" in error_of(
        chats.make_tokenizer(tmp_path, None).apply_chat_template, [USER]
    )
    own = ByteTokenizer.train(["the tide"], 300)
    assert "no chat template" in error_of(own.apply_chat_template, [USER])


@pytest.mark.parametrize("value", [3, {"a": "b"}, [], ["a"], [{"name": "default"}]])
def test_malformed_template_setting_raises_an_error(value, tmp_path):
    tokenizer = chats.make_tokenizer(tmp_path, value)
    message = error_of(tokenizer.apply_chat_template, [USER])
    assert "tokenizer_config.json: chat_template is" in message


def test_exported_chat_templates_give_the_same_conversations(tmp_path):
    named = [{"name": n, "template": SHORT + n} for n in ("default", "rag")]
    chats.write_folder(tmp_path / "in", named)
    before = read_tokenizer(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    write_tokenizer(tmp_path / "out", before, jf.DecoderConfig())
    after = read_tokenizer(tmp_path / "out")
    for name in ("default", "rag"):
        pair = [x.apply_chat_template([USER, ANSWER], template=name) for x in (before, after)]
        assert pair[0] == pair[1] and pair[0].assistant_mask == pair[1].assistant_mask


def test_template_has_generation_marks_only_if_it_contains_a_generation_statement():
    marks = template.ChatTemplate("x", "{%- generation -%}a{% endgeneration %}", {})
    assert marks.marks_generation
    assert not template.ChatTemplate("x", "{{ generation }}", {}).marks_generation
