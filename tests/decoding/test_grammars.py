"""Grammars allow exactly the tokens with which a text of the grammar can continue."""

import json
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.decoding.grammars import json_schema, lark_grammar, regular_expression
from tests.artifacts.test_stream import KINDS

pytest.importorskip("llguidance", reason="grammars need llguidance, which is not installed")
pytestmark = pytest.mark.usefixtures("quick_compilation")
SMALL = ByteTokenizer.train(["aab abc aé ba cab\n"] * 3, 264)
(STOP,) = SMALL.stop_tokens
WORDS = st.lists(st.text("abcé ", min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.mark.parametrize("name", ["ours", "byte-fallback BPE"])
@settings(max_examples=30)
@given(words=WORDS, choices=st.lists(st.integers(0, 10**6), max_size=8))
def test_grammar_allows_only_tokens_that_continue_a_text_and_can_generate_every_text(
    name, words, choices
):
    """The test checks the allowed tokens after each prefix of a random path of tokens.

    If several tokens can continue a text, such as é and its first byte, the grammar may omit one.
    """
    tokenizer = SMALL if name == "ours" else KINDS[name]
    stop, size = tokenizer.stop_tokens[0], tokenizer.vocab_size + 2
    matcher = regular_expression(tokenizer, "|".join(map(re.escape, words))).start(size, [stop])
    texts, begun = [word.encode() for word in words], b""
    table = [*tokenizer.vocabulary_bytes, b"", b""]
    for choice in choices:
        allowed = set(np.flatnonzero(matcher.allowed()).tolist())
        assert (stop in allowed) == (begun in texts)
        after = [begun + table[token] for token in allowed - {stop}]
        assert all(any(text.startswith(x) for text in texts) for x in after)
        longer = [text for text in texts if text.startswith(begun) and text != begun]
        assert all(any(text.startswith(x) and x != begun for x in after) for text in longer)
        if not (going := sorted(allowed - {stop})):
            break
        token = going[choice % len(going)]
        matcher.push(token)
        begun += table[token]


def decoder(tokenizer):
    """Returns a model with random weights, and its variables."""
    config = jf.DecoderConfig(
        vocab_size=tokenizer.vocab_size + 4, max_length=64, num_layers=1, embed_dim=8, num_heads=2
    )
    model = jf.Decoder(config)
    return model, model.init(jax.random.key(0), np.zeros((1, 1), int))


def generated(grammar, seed=0, number=3, tokenizer=SMALL, **options):
    """Returns texts that a model with random weights generates with a grammar."""
    model, variables = decoder(tokenizer)
    out = jf.generate(
        model,
        variables,
        [[1], [2, 3], [4]][:number],
        max_new_tokens=60,
        sampler=jf.Sampler(),
        key=jax.random.key(seed),
        stop_tokens=tokenizer.stop_tokens,
        grammar=grammar,
        **options,
    )
    return [tokenizer.decode(ids[:n]) for ids, n in zip(out.tokens, out.lengths, strict=True)]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "éb"]},
        "age": {"type": "integer", "minimum": 3, "maximum": 42},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 1])
def test_generated_json_fits_its_schema_in_every_batch(batch_size):
    for seed in range(3):
        texts = generated(json_schema(SMALL, SCHEMA), seed, batch_size=batch_size)
        for text in texts:
            value = json.loads(text)
            assert set(value) == {"name", "age"}
            assert value["name"] in ("a", "éb") and 3 <= value["age"] <= 42
        assert len(set(texts)) > 1


@pytest.mark.slow
def test_generated_texts_follow_a_lark_grammar():
    for text in generated(lark_grammar(SMALL, 'start: "a" "b"+ "c"'), number=1):
        assert re.fullmatch("ab+c", text) or (len(text) > 50 and re.match("ab+", text))


class EvenTokens:
    """A user's own grammar: even and odd ids alternate, and the text ends after five ids."""

    def start(self, vocab_size, stop_tokens):
        return Alternating(vocab_size, stop_tokens)


class Alternating:
    def __init__(self, vocab_size, stop_tokens):
        self.ids, self.parity, self.stop_tokens = np.arange(vocab_size), 0, stop_tokens
        self.length = 0

    def allowed(self):
        if self.length == 5:
            return np.isin(self.ids, self.stop_tokens)
        return (self.ids % 2 == self.parity) & ~np.isin(self.ids, self.stop_tokens)

    def push(self, token):
        assert token % 2 == self.parity
        self.parity, self.length = 1 - self.parity, self.length + 1


class Nothing(EvenTokens, Alternating):
    """A grammar that allows no token."""

    def __init__(self):
        pass

    def start(self, vocab_size, stop_tokens):
        return self

    def allowed(self):
        return np.zeros(SMALL.vocab_size + 4, bool)


@pytest.mark.slow
def test_generate_follows_a_grammar_that_a_user_wrote():
    model, variables = decoder(SMALL)
    call = {"max_new_tokens": 9, "sampler": jf.Sampler(0.0), "stop_tokens": [STOP]}
    out = jf.generate(model, variables, [[1], [2, 3]], grammar=EvenTokens(), **call)
    assert (out.lengths == 6).all()
    assert (out.tokens[:, :5] % 2 == [0, 1, 0, 1, 0]).all() and (out.tokens[:, 5] == STOP).all()
    with pytest.raises(ValueError, match="grammar allows no next token"):
        jf.generate(model, variables, [[1]], grammar=Nothing(), **call)
    call["stop_tokens"] = ()
    with pytest.raises(ValueError, match="grammar needs stop_tokens"):
        jf.generate(model, variables, [[1]], grammar=EvenTokens(), **call)


@pytest.mark.slow
def test_constraint_that_excludes_every_token_allowed_by_the_grammar_is_ignored():
    """The text is complete after two letters, but min_new_tokens excludes the stop token."""
    texts = generated(
        regular_expression(SMALL, "ab"), number=1, constraints=jf.Constraints(min_new_tokens=9)
    )
    assert texts == ["ab"]


@pytest.mark.slow
def test_generate_rejects_grammar_and_stop_strings_of_wrong_type():
    model, variables = decoder(SMALL)
    call = {"max_new_tokens": 9, "sampler": jf.Sampler(0.0), "stop_tokens": [STOP]}
    with pytest.raises(ValueError, match="grammar is "):
        jf.generate(model, variables, [[1]], grammar={"type": "object"}, **call)
    with pytest.raises(ValueError, match="stop_strings is"):
        jf.generate(model, variables, [[1]], stop_strings=["a"], **call)


def test_grammar_does_not_allow_a_stop_token_within_a_text():
    """A stop token with bytes ends the text, so it cannot be a part of it."""
    words = SMALL.vocabulary_bytes
    stop = words.index(b"ab")
    matcher = regular_expression(SMALL, "ab").start(SMALL.vocab_size, [stop])
    for letter in (b"a", b"b"):
        assert np.flatnonzero(matcher.allowed()).tolist() == [words.index(letter)]
        matcher.push(words.index(letter))
    assert np.flatnonzero(matcher.allowed()).tolist() == [stop]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: json_schema(SMALL, {"type": "strin"}), "the JSON schema is invalid: .*strin"),
        (lambda: json_schema(SMALL, {"enum": []}), "the JSON schema is invalid: Unsatisfiable"),
        (lambda: json_schema(SMALL, {"minimum": 3, "maximum": 2, "type": "integer"}), "Unsatisf"),
        (lambda: json_schema(SMALL, "object"), "schema is 'object'"),
        (lambda: regular_expression(SMALL, "(a"), "the regular expression is invalid"),
        (lambda: lark_grammar(SMALL, "start: x"), "the grammar is invalid"),
    ],
)
def test_invalid_grammar_raises_an_error_before_generation(make, said):
    with pytest.raises(ValueError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)
