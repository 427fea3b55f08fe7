"""Every family agrees with transformers in logits, gradients, and greedy and beam search.

Exported again, it has the same tensors, and transformers opens it.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
from safetensors.numpy import load_file  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.artifacts.tensors import flat  # noqa: E402
from jaxformer.hub.families import FAMILIES  # noqa: E402
from jaxformer.hub.table import entries  # noqa: E402
from jaxformer.models.config.encoder import ReadsSource  # noqa: E402
from tests.parity import checkpoints  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTH, VOCAB, TARGET = checkpoints.LENGTH, checkpoints.VOCAB, 48
# Sequences of 512 tokens: with padding at the end, with padding at the start, and without.
REAL = [slice(0, 400), slice(212, LENGTH), slice(0, LENGTH)]
SEGMENTS = np.stack([np.isin(np.arange(LENGTH), np.arange(LENGTH)[x]) for x in REAL]).astype(int)


# With biases, the convolutions of these classes read values at padding that are not 0.
UNPADDED = ("lfm2",)
# These classes derive padding, and so positions, from the padding id.
BY_ID = ("roberta", "xlm-roberta")
# The first case of each family always runs, the others with -m slow.
CASES = [
    pytest.param(case, marks=() if case[1] == 0 else pytest.mark.slow, id=f"{case[0]}-{case[1]}")
    for case in checkpoints.CASES
]


@pytest.fixture(params=CASES, scope="module")
def pair(request, tmp_path_factory):
    """Returns (family name, transformers model, folder, our checkpoint)."""
    name, case = request.param
    folder = tmp_path_factory.mktemp("theirs") / "model"
    theirs, _ = checkpoints.saved(name, case, folder)
    return name, theirs, folder, jf.load(folder)


def ids(seed, *shape):
    return np.random.default_rng(seed).integers(4, VOCAB, shape)


def their_sequence_logits(theirs, tokens, **read):
    """Yields the logits of each sequence.

    If the class takes position ids or derives them from padding, the sequence is padded as ours.
    Otherwise the class reads only the real tokens.
    """
    takes = inspect.signature(theirs.forward).parameters
    for sequence, real in zip(tokens, REAL, strict=True):
        mask = np.zeros(LENGTH, int)
        mask[real] = 1
        kind = theirs.config.model_type
        if "position_ids" in takes and kind not in (*BY_ID, *UNPADDED):
            positions = np.maximum(mask.cumsum() - 1, 0)
            own = dict(position_ids=torch.tensor(positions[None]))
            own |= {"attention_mask": torch.tensor(mask[None])}
            yield theirs(input_ids=torch.tensor(sequence[None]), **own).logits[0, real]
        elif kind in BY_ID:
            own = {"attention_mask": torch.tensor(mask[None])}
            yield theirs(input_ids=torch.tensor(sequence[None]), **own).logits[0, real]
        else:
            yield theirs(input_ids=torch.tensor(sequence[None, real])).logits[0]


def their_logits(theirs, tokens, target):
    """Returns the logits of all real tokens as one array [tokens, vocab]."""
    if target is None:
        return torch.cat(list(their_sequence_logits(theirs, tokens)))
    found = []
    for sequence, real, words in zip(tokens, REAL, target, strict=True):
        inputs = {"input_ids": torch.tensor(sequence[None, real])}
        found.append(theirs(**inputs, decoder_input_ids=torch.tensor(words[None])).logits[0])
    return torch.cat(found)


def our_logits(model, variables, tokens, target):
    if target is None:
        return model.apply(variables, tokens, segment_ids=jnp.asarray(SEGMENTS))[SEGMENTS != 0]
    read = {"source": jnp.asarray(tokens), "source_segment_ids": jnp.asarray(SEGMENTS)}
    return model.apply(variables, target, **read).reshape(-1, VOCAB)


def texts(model):
    reads = isinstance(model.config, ReadsSource)
    tokens = ids(0, 3, LENGTH)
    if model.config.position_offset == 2 and not reads:  # RoBERTa counts ids other than 1
        tokens = np.where(SEGMENTS != 0, tokens, 1)
    return tokens, ids(1, 3, TARGET) if reads else None


def test_imported_model_logits_and_gradients_equal_transformers(pair):
    """Logits of 512 tokens agree within 1e-4, with padding at both ends.

    Gradients agree within 1e-4 of the largest entry of each tensor, or of a hundredth of the
    largest entry of all tensors.
    """
    name, theirs, _, (model, variables, _) = pair
    tokens, target = texts(model)
    expected = their_logits(theirs, tokens, target)
    cotangent = np.random.default_rng(2).normal(size=expected.shape).astype(np.float32)
    (expected * torch.tensor(cotangent)).sum().backward()

    @jax.jit
    def both(variables):
        logits, pull_back = jax.vjp(lambda v: our_logits(model, v, tokens, target), variables)
        return logits, pull_back(jnp.asarray(cotangent))[0]

    logits, gradients = both(variables)
    np.testing.assert_allclose(logits, expected.detach(), rtol=0, atol=1e-4)
    ours, parameters = flat(gradients["params"]), dict(theirs.named_parameters())
    shapes = {path: leaf.shape for path, leaf in ours.items()}
    largest = max(np.abs(x).max() for x in ours.values())
    compared = 0
    for entry in entries(FAMILIES[name].rows(model.config), model.config, shapes):
        if entry.theirs in parameters:
            there = parameters[entry.theirs].grad.numpy()
            off = np.abs(entry.to_theirs(ours) - there).max()
            # The gradient of a key bias is 0: it adds the same to all scores of a query.
            size = max(np.abs(there).max(), 1e-2 * largest)
            assert off <= 1e-4 * size, f"{entry.theirs} is off by {off}"
            compared += 1
    assert compared > len(shapes) // 2


def test_greedy_and_beam_search_tokens_equal_those_of_transformers(pair):
    """64 greedy tokens, with the cache and without; for encoder-decoders also a beam of four."""
    _, theirs, _, (model, variables, _) = pair
    if model.config.bidirectional:
        pytest.skip("an encoder generates nothing")
    reads, prompt = isinstance(model.config, ReadsSource), ids(3, 2, 9)
    start = theirs.config.decoder_start_token_id if reads else None
    how = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    how |= {"eos_token_id": None, "attention_mask": torch.ones(2, 9, dtype=int)}
    how |= {"bad_words_ids": None, "forced_eos_token_id": None}
    expected = [
        theirs.generate(torch.tensor(prompt), use_cache=cached, **how).numpy()[
            :, 1 if reads else 9 :
        ]
        for cached in (True, False)
    ]
    np.testing.assert_array_equal(*expected)
    read = {"source": prompt.tolist()} if reads else {}
    prompts = [[start]] * 2 if reads else prompt.tolist()
    greedy = jf.Sampler(temperature=0.0)
    out = jf.generate(model, variables, prompts, max_new_tokens=64, sampler=greedy, **read)
    np.testing.assert_array_equal(out.tokens, expected[0])
    sequences = np.concatenate([prompts, out.tokens], axis=1)
    whole = {"source": prompt} if reads else {}
    logits = jax.jit(model.apply)(variables, sequences, **whole)
    first = len(prompts[0]) - 1
    np.testing.assert_array_equal(np.asarray(logits).argmax(-1)[:, first:-1], expected[0])
    if not reads:
        return
    how |= {"num_beams": 4, "max_new_tokens": 12, "min_new_tokens": 12, "length_penalty": 1.0}
    beams = theirs.generate(torch.tensor(prompt), **how).numpy()[:, 1:]
    settings = {"beam_width": 4, "max_new_tokens": 12, "length_penalty": 1.0}
    found = jf.beam_search(model, variables, prompts, **settings, **read)
    np.testing.assert_array_equal(found.tokens[:, 0], beams)


def test_bfloat16_rounding_error_is_comparable_to_that_of_torch(pair):
    """In bfloat16, jaxformer's mean error against float64 is at most twice that of torch."""
    _, theirs, folder, (_, _, _) = pair
    model, variables, _ = jf.load(folder, dtype="bfloat16")
    tokens, target = texts(model)
    some = tokens[2:], None if target is None else target[2:]
    # The other implementation of experts has no float64.
    how = {"experts_implementation": "eager"} if model.config.num_experts else {}
    with torch.no_grad():
        exact, half = (
            _whole(type(theirs).from_pretrained(folder, dtype=dtype, **how).eval(), *some)
            for dtype in (torch.float64, torch.bfloat16)
        )
    read = {} if target is None else {"source": some[0]}
    ours = jax.jit(model.apply)(variables, some[0] if target is None else some[1], **read)
    off, allowed = (np.abs(np.float64(x) - exact).mean() for x in (ours, half))
    assert off <= 2 * allowed


def _whole(theirs, tokens, target):
    inputs = {"input_ids": torch.tensor(tokens)}
    if target is not None:
        inputs["decoder_input_ids"] = torch.tensor(target)
    return theirs(**inputs).logits.double().numpy()


def test_exporting_an_imported_checkpoint_gives_equal_tensors(pair, tmp_path):
    """All tensors are bitwise equal, and transformers reports none as missing or unexpected."""
    name, theirs, folder, (model, variables, tokenizer) = pair
    cls = jf.export(tmp_path / "out", model, variables, tokenizer, model_type=name)
    before, after = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    for tensor in before:
        np.testing.assert_array_equal(before[tensor], after[tensor])
    again, loading = getattr(transformers, cls).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    tokens, target = texts(model)
    with torch.no_grad():
        read = (tokens[2:], None if target is None else target[2:])
        some, other = (_whole(x.eval(), *read) for x in (theirs, again))
    np.testing.assert_allclose(some, other, rtol=0, atol=1e-5)


TRAINED = {
    "gpt": (
        jf.DecoderConfig(vocab_size=VOCAB, max_length=64, num_layers=2, embed_dim=24, num_heads=4),
        "GPT2LMHeadModel",
    ),
    "encoder": (
        jf.EncoderConfig(
            vocab_size=VOCAB,
            max_length=64,
            num_layers=2,
            embed_dim=24,
            num_heads=4,
            norm_position="post",
            embedding_norm=True,
        ),
        "BertForPreTraining",
    ),
    "translation": (
        jf.EncoderDecoderConfig(
            vocab_size=VOCAB,
            max_length=64,
            num_layers=2,
            embed_dim=24,
            num_heads=4,
            norm_position="post",
            positions="sinusoidal_halves",
            scale_embeddings=True,
            activation="silu",
        ),
        "MarianMTModel",
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_trained_model_has_equal_logits_in_transformers(name, tmp_path):
    """After a few steps of AdamW and an export, logits agree within 1e-4."""
    config, expected_class = TRAINED[name]
    model = jf.build(config)
    tokens, read = jnp.asarray(ids(0, 4, 30)), {}
    if name == "translation":
        read = {"source": jnp.asarray(ids(1, 4, 20))}
    variables = model.init(jax.random.key(0), tokens, **read)
    optimizer = optax.adamw(1e-2)
    state = optimizer.init(variables)

    @jax.jit
    def step(variables, state):
        def loss(variables):
            logits = model.apply(variables, tokens, **read)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, ::-1]).mean()

        updates, state_after = optimizer.update(jax.grad(loss)(variables), state, variables)
        return optax.apply_updates(variables, updates), state_after

    for _ in range(5):
        variables, state = step(variables, state)
    assert jf.export(tmp_path / "out", model, variables) == expected_class
    theirs, loading = getattr(transformers, expected_class).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    inputs = {"input_ids": torch.tensor(np.asarray(read.get("source", tokens)))}
    if read:
        inputs["decoder_input_ids"] = torch.tensor(np.asarray(tokens))
    with torch.no_grad():
        outputs = theirs.eval()(**inputs)
    logits = outputs.prediction_logits if name == "encoder" else outputs.logits
    ours = model.apply(variables, tokens, **read)
    np.testing.assert_allclose(ours, logits, rtol=0, atol=1e-4)
