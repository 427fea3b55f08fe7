"""Constraints, stop strings and grammars have the same effect in jaxformer and transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
llguidance = pytest.importorskip("llguidance", reason="parity needs llguidance")
pytest.importorskip("trl", reason="the models are those of the tests of tuning, which need trl")

from transformers.generation import logits_process as theirs  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.decoding.constraints import NO_TOKEN, build_rules  # noqa: E402
from jaxformer.models.config.generation import Constraints  # noqa: E402
from tests.parity.test_tuning import their_model  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quick_compilation"),
]
VOCAB, LENGTH, STOP = 11, 6, 2
NEW = 16
IDS = st.integers(0, VOCAB - 1)
SOME = st.lists(IDS, min_size=1, max_size=3, unique=True)
WORDS = st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)
# For each rule: the values of the field, and the processor of transformers for a value.
PROCESSORS = {
    "repetition_penalty": (
        st.sampled_from([0.5, 1.3, 2.0]),
        theirs.RepetitionPenaltyLogitsProcessor,
    ),
    "no_repeat_ngram_size": (st.integers(1, 4), theirs.NoRepeatNGramLogitsProcessor),
    "sequence_bias": (
        WORDS.map(lambda words: tuple((word, 1.5 - len(word)) for word in dict.fromkeys(words))),
        lambda biases: theirs.SequenceBiasLogitsProcessor([[list(w), b] for w, b in biases]),
    ),
    "bad_words_ids": (
        WORDS.map(tuple),
        lambda words: theirs.NoBadWordsLogitsProcessor([list(w) for w in words], STOP),
    ),
    "min_length": (
        st.integers(1, 9),
        lambda least: theirs.MinLengthLogitsProcessor(least, STOP),
    ),
    "min_new_tokens": (
        st.integers(1, 6),
        lambda least: theirs.MinNewTokensLengthLogitsProcessor(LENGTH, least, STOP),
    ),
    "allowed_tokens": (
        SOME.map(tuple),
        lambda ids: theirs.PrefixConstrainedLogitsProcessor(lambda *_: list(ids), 1),
    ),
    "suppress_tokens": (SOME.map(tuple), theirs.SuppressTokensLogitsProcessor),
    "begin_suppress_tokens": (
        SOME.map(tuple),
        lambda ids: theirs.SuppressTokensAtBeginLogitsProcessor(ids, LENGTH),
    ),
    "exponential_decay_length_penalty": (
        st.tuples(st.integers(0, 3), st.sampled_from([0.7, 1.4])),
        lambda rule: theirs.ExponentialDecayLengthPenalty(rule, STOP, LENGTH),
    ),
    "renormalize_logits": (st.just(True), lambda _: theirs.LogitNormalization()),
}


@pytest.mark.parametrize("name", PROCESSORS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31), step=st.integers(0, 4))
def test_constrained_scores_equal_those_of_the_transformers_logits_processor(
    name, data, seed, step
):
    values, processor = PROCESSORS[name]
    value = data.draw(values)
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 4, (3, LENGTH + step))
    scores = random.normal(size=(3, VOCAB)).astype(np.float32)
    expected = processor(value)(torch.tensor(tokens), torch.tensor(scores)).numpy()
    rules = build_rules(
        Constraints(**{name: value}), list(tokens[:, :LENGTH]), LENGTH, 9, np.array([STOP])
    )
    generated = np.full((3, 9), NO_TOKEN)
    generated[:, :step] = tokens[:, LENGTH:]
    with jax.disable_jit():
        found = rules.apply(jnp.asarray(scores), jnp.asarray(generated), jnp.int32(step))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module", params=["Llama", "Gemma3"])
def pair(request, tmp_path_factory):
    """A tiny model of transformers with its tokenizer, and the same model of jaxformer."""
    folder = tmp_path_factory.mktemp("theirs")
    model, tokenizer = their_model(folder, request.param)
    return model.eval(), tokenizer, jf.load(folder)


PROMPTS = ["the tide", "12+3", "a b"]


def their_ids(model, tokenizer, prompt, **options):
    """Returns the new ids of transformers' greedy generation."""
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    with torch.no_grad():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            tokenizer=tokenizer,
            **options,
        )
    return whole[0, ids.shape[1] :].tolist()


def our_ids(checkpoint, prompt, **options):
    """Returns the new ids of jaxformer's greedy generation."""
    model, variables, tokenizer = checkpoint
    out = jf.generate(
        model,
        variables,
        [tokenizer.encode(prompt)],
        max_new_tokens=NEW,
        sampler=jf.Sampler(0.0),
        stop_tokens=tokenizer.stop_tokens,
        **options,
    )
    return out.tokens[0, : out.lengths[0]].tolist()


def test_stop_strings_end_a_text_as_in_transformers(pair):
    """Stop strings are substrings of the text that the model generates without stop strings.

    transformers also searches the names of special tokens, which are suppressed here, and the end
    of the prompt.
    """
    model, tokenizer, checkpoint = pair
    special, ended = tokenizer.get_added_vocab(), 0
    rules = Constraints(suppress_tokens=tuple(special.values()))
    options = {"suppress_tokens": [*special.values()]}
    for prompt in PROMPTS:
        text = tokenizer.decode(their_ids(model, tokenizer, prompt, **options))
        words = {text[start : start + n] for start in range(1, 12) for n in (1, 2, 3)}
        for word in sorted(words - {""}):
            hidden = "\ufffd" in word or any(word in name for name in special)
            if hidden or prompt.endswith(word[0]):
                continue
            expected = their_ids(model, tokenizer, prompt, stop_strings=[word, "never"], **options)
            stop = jf.StopStrings(checkpoint.tokenizer, (word, "never"))
            found = our_ids(checkpoint, prompt, stop_strings=stop, constraints=rules)
            assert found == expected, (prompt, word)
            ended += len(expected) < NEW
    assert ended  # how many is random: weights may repeat a token or write bytes that are no text


class TheirGrammar(theirs.LogitsProcessor):
    """A grammar of llguidance for transformers, with transformers' tokenizer."""

    def __init__(self, tokenizer, source, prompt_length):
        vocabulary = llguidance.hf.from_tokenizer(tokenizer)
        self.matcher = llguidance.LLMatcher(vocabulary, source)
        self.length = prompt_length

    def __call__(self, input_ids, scores):
        new = input_ids[0, self.length :].tolist()
        if new:
            assert self.matcher.consume_token(new[-1]), self.matcher.get_error()
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=scores.shape[-1])
        return torch.where(torch.tensor(allowed, dtype=torch.bool), scores, -torch.inf)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "the tide"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", ["schema", "regex"])
def test_generation_with_a_grammar_equals_transformers_with_llguidance(kind, prompt, pair):
    import llguidance.hf  # noqa: F401

    model, tokenizer, checkpoint = pair
    ours = {
        "schema": lambda: jf.json_schema(checkpoint.tokenizer, SCHEMA),
        "regex": lambda: jf.regular_expression(checkpoint.tokenizer, "(the|12|a)[a-z ]{2,6}!?"),
    }[kind]()
    length = len(tokenizer.encode(prompt, add_special_tokens=False))
    processor = TheirGrammar(tokenizer, ours.source, length)
    expected = their_ids(model, tokenizer, prompt, logits_processor=[processor])
    assert our_ids(checkpoint, prompt, grammar=ours) == expected
