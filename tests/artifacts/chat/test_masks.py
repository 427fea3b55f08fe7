"""The mask of a conversation marks what the assistant says, the end of its turn included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.artifacts.chat.spans import derived_spans, marked_text
from jaxformer.artifacts.chat.template import ChatTemplates, make_chat
from tests.artifacts.chat import chats
from tests.errors import error_of

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SAY = [{"role": "user", "content": "the tide"}, {"role": "assistant", "content": "came in"}]


def chat_of(source, messages, tools=None):
    return make_chat(ChatTemplates({"default": source}, TOKENS), messages, tools)


def characters(spans):
    return {place for span in spans for place in range(*span)}


@chats.needs_templates
@pytest.mark.parametrize("name", chats.PAIRS)
def test_answer_spans_found_without_generation_blocks_equal_those_with_generation_blocks(name):
    compared = 0
    for seed in range(60):
        tools = chats.TOOLS if seed % 3 == 0 else None
        messages, prompts = chats.conversation(seed, tools is not None), seed % 2 == 0
        marked = chat_of(chats.published(f"{name}_training"), messages, tools)
        chat = chat_of(chats.published(name), messages, tools)
        try:
            text, spans = marked_text(marked, prompts)
        except ValueError as error:  # Gemma's templates refuse system messages and tools.
            assert "failed: System role" in str(error) or "must alternate" in str(error)
            continue
        plain = chat.render(add_generation_prompt=prompts)
        derived = derived_spans(chat, plain, prompts, chats.SPECIAL)
        # Some of the marked templates write another text than the published ones.
        if text == plain:
            assert characters(derived) == characters(spans)
            compared += 1
    assert compared > 10


@chats.needs_templates
@pytest.mark.parametrize("name", chats.NAMES)
@pytest.mark.parametrize("backend", ["qwen", "gpt2", "sentencepiece with a first space"])
def test_assistant_mask_contains_exactly_the_answers_and_their_end_of_turn_tokens(
    name, backend, tmp_path
):
    tokenizer = chats.make_tokenizer(tmp_path, chats.published(name), backend)
    said = ["Zap! 猫", "it is\n\n12", "no"]
    messages = []
    for number, answer in enumerate(said):
        messages.append({"role": "user", "content": f"question {number}?"})
        messages.append({"role": "assistant", "content": answer})
    chat = tokenizer.apply_chat_template(messages)
    mask = chat.assistant_mask
    assert len(mask) == len(chat.ids) and set(mask) == {True, False}
    words = [tokenizer.token_name(token) for token in chat.ids]
    starts = [i for i, on in enumerate(mask) if on and not mask[i - 1]]
    assert len(starts) == 3
    for start, answer in zip(starts, said, strict=True):
        end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
        assert answer in tokenizer.decode(chat.ids[start:end])
        assert "question" not in tokenizer.decode(chat.ids[start:end])
        ends = {"<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>"}
        assert len(ends & set(words[start:end])) == 1


@chats.needs_templates
@pytest.mark.parametrize("name", ["qwen3", "llama3", "phi3", "gemma3"])
def test_prompt_followed_by_answer_tokens_equals_the_conversation(name, tmp_path):
    """A model that answers as in training continues the prompt with the masked tokens."""
    tokenizer = chats.make_tokenizer(tmp_path, chats.published(name))
    chat = tokenizer.apply_chat_template(SAY)
    prompt = tokenizer.apply_chat_template(SAY[:1], add_generation_prompt=True)
    answer = [x for x, on in zip(chat.ids, chat.assistant_mask, strict=True) if on]
    assert [*prompt.ids, *answer] == chat.ids


@chats.needs_templates
@pytest.mark.parametrize("name", chats.NAMES)
def test_an_answer_ends_with_the_special_token_of_its_turn(name, tmp_path):
    tokenizer = chats.make_tokenizer(tmp_path, chats.published(name), "qwen")
    ends = {"<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>"}
    found = {tokenizer.token_name(token) for token in tokenizer.turn_end_tokens}
    assert set(tokenizer.stop_tokens) <= set(tokenizer.turn_end_tokens)
    assert len(found & ends) == 1 and len(found) <= 2


def test_assistant_mask_includes_an_end_of_turn_token_that_is_also_the_padding_token(tmp_path):
    template = chats.CHATML.replace("<|im_end|>", "<pad>")
    tokenizer = chats.make_tokenizer(tmp_path, template, more=["<pad>"])
    chat = tokenizer.apply_chat_template(SAY)
    ends = [i for i, token in enumerate(chat.ids) if tokenizer.token_name(token) == "<pad>"]
    assert [chat.assistant_mask[i] for i in ends] == [False, True]


MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def test_assistant_mask_is_found_if_the_template_ignores_the_generation_prompt(
    tmp_path,
):
    """There, an answer begins where its text begins."""
    marked = chats.make_tokenizer(tmp_path / "a", MARKED).apply_chat_template(SAY * 2)
    derived = chats.make_tokenizer(tmp_path / "b", UNMARKED).apply_chat_template(SAY * 2)
    assert marked.ids == derived.ids and marked.assistant_mask == derived.assistant_mask


LINES = "{{ m.role }}: {{ m.content }}\n{% endfor %}"
APPENDIX = "{% for m in messages if m.role == 'assistant' %}{{ m.content }};{% endfor %}"
# {reason why the answers cannot be found: (template, number of messages)}.
REFUSED = {
    "answers before questions": ("{% for m in messages | reverse %}" + LINES, 4),
    "no last answer": ("{% for m in messages[:-1] %}" + LINES, 4),
    "an error without an answer": (
        "{% if messages[-1].role == 'user' %}{{ raise_exception('no answer') }}{% endif %}"
        "{% for m in messages %}" + LINES,
        4,
    ),
    "answers at the end": (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}{% endif %}"
        "{% endfor %}" + APPENDIX,
        3,
    ),
    "the number of messages everywhere": (
        "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}",
        4,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_names_the_chat_template_if_answers_cannot_be_located(name, tmp_path):
    source, number = REFUSED[name]
    chat = chats.make_tokenizer(tmp_path, source).apply_chat_template([*SAY, *SAY][:number])
    message = error_of(lambda: chat.assistant_mask)
    assert "the chat template 'default'" in message


def test_assistant_mask_is_found_if_the_template_raises_an_error_for_unknown_questions(tmp_path):
    """The places of texts are found by marks; this template accepts a marked answer only."""
    check = (
        "{% for m in messages if m.role == 'user' and m.content != 'the tide' %}"
        "{{ raise_exception('unknown question') }}{% endfor %}"
    )
    strict = chats.make_tokenizer(tmp_path / "a", check + chats.CHATML).apply_chat_template(SAY * 2)
    plain = chats.make_tokenizer(tmp_path / "b", chats.CHATML).apply_chat_template(SAY * 2)
    assert strict.ids == plain.ids and strict.assistant_mask == plain.assistant_mask


def test_prompt_whose_tokens_depend_on_the_answer_is_refused(tmp_path):
    """GPT-2's pattern makes one token of two line breaks, unless a word follows."""
    source = chats.CHATML.replace("{{ m['role'] }}\n", "{{ m['role'] }}\n\n")
    source = source.replace("assistant\n", "assistant\n\n")
    gpt2 = chats.make_tokenizer(tmp_path / "gpt2", source, "gpt2 with line breaks")
    assert len(gpt2.encode("\n\n")) == 1 and len(gpt2.encode("\n\ncame")) > 2
    message = error_of(lambda: gpt2.apply_chat_template(SAY).assistant_mask)
    assert "'default'" in message and "tokens depend on the answer" in message
    qwen = chats.make_tokenizer(tmp_path / "qwen", source, "qwen")
    assert any(qwen.apply_chat_template(SAY).assistant_mask)


@pytest.mark.slow
@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=3))
def test_answer_spans_of_a_simple_template_contain_the_answers(answers):
    messages = []
    for answer in answers:
        messages += [SAY[0], {"role": "assistant", "content": answer}]
    chat = chat_of(chats.CHATML, messages)
    text = chat.render()
    spans = derived_spans(chat, text, False, chats.SPECIAL)
    assert [text[a:b] for a, b in spans] == [f"{answer}<|im_end|>\n" for answer in answers]
