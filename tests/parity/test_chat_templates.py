"""Chat templates give the text, the ids and the masks of transformers."""

import pytest

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

from jaxformer.hub.tokenizers.files import read_tokenizer  # noqa: E402
from tests.artifacts.chat import chats  # noqa: E402

pytestmark = [chats.needs_templates, pytest.mark.filterwarnings("ignore")]
MARKED = [f"{name}_training" for name in chats.PAIRS]
# Errors that the templates themselves raise.
OWN_ERRORS = ("System role not supported", "Conversation roles must alternate")


def opened(folder, name, backend):
    flags = {"rstrip": True} if name.startswith("phi3") else {}
    chats.write_folder(folder, chats.published(name), backend, **flags)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder), read_tokenizer(folder)


def conversations(number):
    for seed in range(number):
        tools = chats.TOOLS if seed % 3 == 0 else None
        yield chats.conversation(seed, tools is not None), tools, seed % 2 == 0


@pytest.mark.parametrize("name", [*chats.NAMES, *MARKED])
@pytest.mark.parametrize("backend", chats.BACKENDS)
def test_text_and_ids_of_conversations_equal_transformers(name, backend, tmp_path):
    theirs, ours = opened(tmp_path, name, backend)
    compared = 0
    for messages, tools, prompts in conversations(200 if backend == "qwen" else 20):
        options = {"tools": tools, "add_generation_prompt": prompts}
        try:
            text = theirs.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            assert any(reason in str(error) for reason in OWN_ERRORS)
            with pytest.raises(ValueError, match=str(error)[:20]):
                ours.apply_chat_template(messages, **options)
            continue
        chat = ours.apply_chat_template(messages, **options)
        assert chat.text == text
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        assert chat.ids == list(ids)
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("name", [*chats.PAIRS, *MARKED])
@pytest.mark.parametrize("backend", chats.BACKENDS)
def test_assistant_masks_equal_those_of_transformers_with_generation_blocks(
    name, backend, tmp_path
):
    """Where the marked template writes the text of the published one, the masks are equal."""
    theirs, ours = opened(tmp_path, name, backend)
    if backend == "gpt2 with line breaks" and name == "llama3":
        pytest.skip("there, the tokens of the prompt depend on the answer")
    marked, compared = chats.published(name if name in MARKED else f"{name}_training"), 0
    for messages, tools, prompts in conversations(200 if backend == "qwen" else 20):
        options = {"tools": tools, "add_generation_prompt": prompts}
        try:
            expected = theirs.apply_chat_template(
                messages, chat_template=marked, return_assistant_tokens_mask=True, **options
            )
        except Exception as error:
            assert any(reason in str(error) for reason in OWN_ERRORS)
            continue
        chat = ours.apply_chat_template(messages, **options)
        if chat.ids == list(expected["input_ids"]):
            assert chat.assistant_mask == list(map(bool, expected["assistant_masks"]))
            compared += 1
    assert compared > 2
