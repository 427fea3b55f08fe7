"""`jaxformer chat` answers each line as the next message of the conversation."""

import io
import sys

import pytest

import jaxformer as jf
from jaxformer.cli import chat as chat_module
from jaxformer.cli import main
from jaxformer.cli.sampling import TextGenerator
from tests.cli.test_errors import refused

pytestmark = pytest.mark.slow
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
GREEDY = ("--temperature", "0", "--max-new-tokens", "4")


@pytest.fixture(scope="module")
def talker(trained, tmp_path_factory):
    """A model with a chat template."""
    folder = tmp_path_factory.mktemp("talker") / "model"
    jf.save(folder, *jf.load(trained))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def asked():
    """The prompts that the model received since the last command."""
    return []


@pytest.fixture
def say(talker, asked, monkeypatch, capsys):
    """Returns a function that sends lines to the model and returns (output, errors)."""
    generate = TextGenerator.generate

    def record(self, prompts, *arguments, **options):
        asked.append(self.tokenizer.decode(prompts[0]))
        return generate(self, prompts, *arguments, **options)

    def run(lines, *words):
        asked.clear()
        monkeypatch.setattr(TextGenerator, "generate", record)
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        capsys.readouterr()
        assert main(["chat", str(talker), *GREEDY, *words]) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


def test_chat_prompt_contains_all_previous_messages_until_the_conversation_is_cleared(say, asked):
    (first, *_), (whole, *_) = say("a\n"), say("a\nb\n\n/clear\nc\n")
    answer = first.removesuffix("\n")
    assert whole.startswith(first) and len(whole) > len(first)
    assert asked == ["u:a|", f"u:a|a:{answer}|u:b|", "u:c|"]


def test_chat_passes_the_system_message_and_joined_continuation_lines_to_the_template(say, asked):
    say("a\\\nb\n/exit\nc\n", "--system", "hi")
    assert asked == ["s:hi|u:a\nb|"]


def test_oldest_messages_are_forgotten_if_there_is_no_room(say, asked):
    _, err = say("aaaaaaaa\nbbbbbbbb\ncccccccc\n", "--system", "s")
    assert "max_length reached: forgot the" in err
    assert all(prompt.startswith("s:s|") for prompt in asked)
    assert "aaaaaaaa" not in asked[-1] and asked[-1].endswith("u:cccccccc|")
    _, err = say("k\nl\nm\nn\no\np\n")
    assert "max_length reached: forgot the" in err
    for before, prompt in zip("klmno", asked[1:], strict=True):
        assert f"u:{before}|" in prompt


def test_chat_message_that_leaves_no_room_for_an_answer_is_rejected(talker, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x = 1 " * 50 + "\n"))
    refused(capsys, ["chat", talker], "leaves no room for an answer")


def test_keyboard_interrupt_stops_a_chat_answer_but_keeps_the_text_written_so_far(say, monkeypatch):
    def interrupted(self, prompt, on_tokens):
        if "u:b" not in self.generator.tokenizer.decode(prompt):
            on_tokens([self.generator.tokenizer.encode("half")])
            raise KeyboardInterrupt
        on_tokens([self.generator.tokenizer.encode("whole")])

    monkeypatch.setattr(chat_module.Chat, "_generate", interrupted)
    out, _ = say("a\nb\n")
    assert out == "half\nwhole\n"


def test_empty_answer_is_not_kept_in_the_conversation(say, asked, monkeypatch):
    """Templates refuse empty messages, so the next question would fail."""
    monkeypatch.setattr(chat_module.Chat, "_generate", lambda *_: None)
    assert say("a\nb\n")[0] == "\n\n"


def test_model_without_a_chat_template_is_refused(trained, capsys):
    refused(capsys, ["chat", trained], "has no chat template")


def test_chat_answers_follow_a_regex_or_json_schema(say, tmp_path):
    pytest.importorskip("llguidance", reason="grammars need llguidance, which is not installed")
    out, _ = say("a\nb\n", "--regex", "[xy]=3")
    assert all(line in ("x=3", "y=3") for line in out.splitlines())
    (tmp_path / "schema.json").write_text('{"enum": [7]}')
    assert say("a\n", "--json-schema", "schema.json")[0] == "7\n"


def test_invalid_chat_flags_are_rejected_before_the_model_is_loaded(tmp_path, capsys):
    refused(capsys, ["chat", "no-model", "--json-schema", "s.json"], "s.json: no such file")
    refused(capsys, ["chat", "no-model", "--stop", ""], "--stop is ''")
    refused(capsys, ["chat", "no-model", "--repetition-penalty", "0"], "repetition_penalty is 0")
    (tmp_path / "s.json").write_text("{}")
    words = ["chat", "no-model", "--json-schema", "s.json", "--regex", "a"]
    refused(capsys, words, "--regex has no effect", "--json-schema")
