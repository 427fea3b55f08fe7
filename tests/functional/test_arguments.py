"""Public functions reject invalid arguments by name, before they compute anything."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer import functional
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.inputs import Inputs, Run
from jaxformer.functional.layers.feedforward import init_feed_forward
from jaxformer.functional.layers.recurrent import CELLS, init_recurrent_layer
from jaxformer.functional.tokens import Tokens
from jaxformer.models.builders.transformers import build_stack
from jaxformer.models.parameters import init
from tests.properties import tiny

KEY = jax.random.key(0)
X = jnp.zeros((2, 3, 4), jnp.float32)
HEADS = jnp.zeros((2, 2, 3, 4), jnp.float32)
IDS = jnp.zeros((2, 3), jnp.int32)
CONFIG = jf.DecoderConfig(embed_dim=4, num_heads=2, num_layers=1, vocab_size=5).resolved
STACK = build_stack(CONFIG)
LAYER = STACK.layers[0]
TOKENS = Tokens.from_sequences(Inputs(X), Run(jf.Execution()))
FEED = init_feed_forward(KEY, 4, 6, "swiglu")
BLOCK = jax.tree.map(lambda x: x[0], STACK.init(KEY))
RNN, LSTM = (init_recurrent_layer(KEY, cell, 4, 6) for cell in CELLS.values())
PARAMS = init(jf.Decoder(CONFIG), KEY)["params"]
ONE = jnp.zeros(2, jnp.float32)  # one number for each of two answers
EACH = jnp.zeros((2, 3), jnp.float32)  # one number for each token
WRONG_ONE = [ONE.astype(int), jnp.zeros(3, jnp.float32), "x"]
WRONG_EACH = [IDS, jnp.zeros((2, 4), jnp.float32), "x"]
GOOD = {
    "block": {
        "weights": BLOCK,
        "x": X,
        "layer": LAYER,
        "tokens": TOKENS,
    },
    "chunked_cross_entropy": {
        "hidden": X,
        "kernel": jnp.zeros((4, 5), jnp.float32),
        "targets": IDS,
    },
    "clipped_policy_loss": {"log_probs": EACH, "old_log_probs": EACH, "advantages": ONE},
    "cross_entropy": {"logits": X, "targets": IDS},
    "dpo_loss": {
        "chosen": ONE,
        "rejected": ONE,
        "reference_chosen": ONE,
        "reference_rejected": ONE,
    },
    "group_advantages": {"rewards": EACH},
    "masked_mean": {"values": EACH, "mask": EACH == 0},
    "odds_ratio_loss": {"chosen": ONE - 1, "rejected": ONE - 1},
    "token_entropies": {"logits": X},
    "token_log_probs": {"logits": X, "targets": IDS},
    "dot_product_attention": {"query": HEADS, "key": HEADS, "value": HEADS},
    "feed_forward": {"weights": FEED, "x": X, "activation": "swiglu"},
    "layer_norm": {"x": X, "scale": jnp.ones(4, jnp.float32)},
    "rms_norm": {"x": X, "scale": jnp.ones(4, jnp.float32)},
    "scaled_dot_product_attention": {"query": HEADS, "key": HEADS, "value": HEADS},
    "multi_head_attention": {"weights": BLOCK["attention"], "x": X, "num_heads": 2},
    "self_attention": {"weights": BLOCK["attention"], "x": X},
    "cross_attention": {"weights": BLOCK["attention"], "x": X, "source": X},
    "kv_cache": {"key": X, "value": X, "cache": (X, X)},
    "embed": {"table": jnp.ones((5, 4), jnp.float32), "tokens": IDS},
    "encode_positions": {"x": X},
    "causal_convolution": {"weights": {"kernel": jnp.ones((8, 4), jnp.float32)}, "x": X},
    "rnn": {"weights": RNN, "x": X},
    "rnn_cell": {"weights": RNN, "x": X, "hidden": jnp.ones((2, 3, 6), jnp.float32)},
    "lstm": {"weights": LSTM, "x": X},
    "lstm_cell": {"weights": LSTM, "x": X, "state": (jnp.ones((2, 3, 6), jnp.float32),) * 2},
    "transformer_block": {"weights": BLOCK, "x": X, "num_heads": 2},
    "decoder": {"weights": PARAMS, "tokens": IDS, "num_heads": 2},
    "greedy_decode": {"next_logits": lambda tokens: X, "tokens": IDS, "num_tokens": 0},
    "rotary": {"x": HEADS, "positions": jnp.arange(3)},
    "sinusoidal_positions": {"positions": jnp.arange(3), "dim": 4},
    "Prefix": {"length": 2},
    "TokenInfo": {"length": 3},
    "Window": {"size": 2},
}
WRONG = {
    "clipped_policy_loss": {
        "log_probs": WRONG_EACH,
        "old_log_probs": WRONG_EACH,
        "advantages": WRONG_ONE,
        "clip": [0.0, "small"],
    },
    "dpo_loss": {
        "chosen": WRONG_ONE,
        "rejected": WRONG_ONE,
        "reference_chosen": WRONG_ONE,
        "reference_rejected": WRONG_ONE,
        "beta": [0.0, "small"],
    },
    "group_advantages": {"rewards": [IDS, ONE, "x"], "divides_by_std": ["yes"], "epsilon": ["0"]},
    "masked_mean": {"values": [IDS, "x"], "mask": [EACH, EACH[:1] == 0], "axis": ["first"]},
    "odds_ratio_loss": {"chosen": WRONG_ONE, "rejected": WRONG_ONE},
    "token_entropies": {"logits": [IDS, "x"]},
    "token_log_probs": {"logits": [IDS, "x"], "targets": [EACH, IDS[:1]]},
    "block": {
        "weights": [{}, {**BLOCK, "attention": BLOCK["feedforward"]}, None],
        "x": [X[..., :3], X.astype(int), 1.0],
        "layer": [None, CONFIG, (LAYER[0].sublayer, LAYER[1])],
        "tokens": [None, "causal", TOKENS.new],
        "shared": [None, "relative"],
    },
    "chunked_cross_entropy": {
        "hidden": [X[..., :3], IDS],
        "kernel": [jnp.zeros((4,), jnp.float32), "kernel"],
        "targets": [IDS[:1], X, 9 + IDS],
        "weights": [IDS[:1]],
        "bias": [jnp.zeros(4, jnp.float32)],
        "label_smoothing": [1.5, "0.1"],
        "chunk": [0, 2.5],
    },
    "cross_entropy": {
        "logits": [IDS, 1.0],
        "targets": [IDS[:1], X[..., 0], 4 + IDS, [[0]]],
        "weights": [IDS[:, :2]],
        "label_smoothing": [-0.1, None],
    },
    "dot_product_attention": {
        "query": [HEADS[0, 0, 0], HEADS[:1], HEADS[..., :3], HEADS.astype(int), [[1.0]]],
        "key": [HEADS[..., :3], HEADS[0]],
        "value": [HEADS[:, :, :2], None],
        "mask": [
            jnp.ones((3, 4), bool),
            jnp.full((3, 3), 0.5),
            jnp.ones((5, 3, 3), bool),
            "causal",
        ],
        "query_info": [TokenInfo(4), 3, TokenInfo(3, jnp.arange(2))],
        "key_info": [TokenInfo(2), TokenInfo(3, None, jnp.ones((2, 4), int))],
        "scores": [1.0],
        "implementation": ["flash", None],
    },
    "scaled_dot_product_attention": {
        "query": [HEADS[..., :3], HEADS.astype(int)],
        "key": [HEADS[..., :3], HEADS[0]],
        "value": [HEADS[:, :, :2], None],
        "mask": [jnp.ones((3, 4), bool), "causal"],
        "scale": ["small"],
    },
    "multi_head_attention": {
        "weights": [{}, None, FEED, {**BLOCK["attention"], "output": FEED["down"]}],
        "x": [X[..., :3], X.astype(int)],
        "mask": [jnp.ones((3, 4), bool), "causal"],
        "num_heads": [0, 3, 2.5],
        "source": [X[..., :3], "x"],
        "scale": ["small"],
    },
    "self_attention": {
        "weights": [{}, None, FEED],
        "x": [X[..., :3], X.astype(int)],
        "mask": [jnp.ones((3, 4), bool), "causal"],
        "scale": ["small"],
    },
    "cross_attention": {
        "weights": [{}, None, FEED],
        "x": [X[..., :3], X.astype(int)],
        "source": [X[..., :3], "x"],
        "mask": [jnp.ones((3, 4), bool), "causal"],
        "scale": ["small"],
    },
    "kv_cache": {
        "key": [X[:1], X[..., :3], IDS],
        "value": [X[:, :2], X[..., :3], None],
        "cache": [X, (X,), (X[:1], X[:1])],
    },
    "embed": {"table": [X, IDS, None], "tokens": [X, "one"]},
    "encode_positions": {"x": [IDS, 1.0], "positions": [X, jnp.ones((2, 4)), "learned"]},
    "causal_convolution": {
        "weights": [{}, None, {"kernel": jnp.ones((7, 4))}],
        "x": [X[..., :3], IDS],
        "dilation": [0, 1.5],
    },
    "rnn": {"weights": [{}, None, LSTM, FEED], "x": [X[..., :3], IDS]},
    "lstm": {"weights": [{}, None, RNN, FEED], "x": [X[..., :3], IDS]},
    "rnn_cell": {
        "weights": [{}, None, LSTM],
        "x": [X[..., :3], IDS],
        "hidden": [X, None],
    },
    "lstm_cell": {
        "weights": [{}, None, RNN],
        "x": [X[..., :3], IDS],
        "state": [X, (X, X), None],
    },
    "transformer_block": {
        "weights": [{}, None, FEED],
        "x": [X[..., :3], IDS],
        "mask": [jnp.ones((3, 4), bool), "causal"],
        "num_heads": [0, 3],
        "activation": ["sigmoidal"],
        "norm": ["layer"],
        "norm_position": ["sandwich"],
    },
    "decoder": {
        "weights": [{}, None, BLOCK],
        "tokens": [X, "one"],
        "mask": [jnp.ones((3, 4), bool), "causal"],
        "num_heads": [0, 3],
        "activation": ["sigmoidal"],
    },
    "greedy_decode": {
        "next_logits": [None, X],
        "tokens": [X, IDS[:, :0]],
        "num_tokens": [-1, 2.5],
    },
    "feed_forward": {
        "weights": [{}, None, {"up": FEED["up"]}, {**FEED, "down": FEED["up"]}],
        "x": [X[..., :3], X.astype(int), 2],
        "activation": ["sigmoidal", None],
    },
    "layer_norm": {
        "x": [X[..., :3], X.astype(int), 1.0, [1.0]],
        "scale": [jnp.ones(3, jnp.float32), jnp.ones((2, 4), jnp.float32), "one"],
        "bias": [jnp.ones(1, jnp.float32)],
        "epsilon": ["small", None],
    },
    "rms_norm": {"x": [X[..., :3], None], "scale": [jnp.ones(5, jnp.float32)], "epsilon": ["0"]},
    "rotary": {
        "x": [HEADS[..., :3], HEADS[0, 0, 0], 1],
        "positions": [jnp.arange(4), jnp.zeros(3), jnp.zeros((5, 3), int)],
        "base": [0.0, "ten"],
        "fraction": ["half", 0.0],
        "interleaved": ["yes"],
    },
    "sinusoidal_positions": {
        "positions": [jnp.zeros(3), 3, "three"],
        "dim": [5, 0, 4.0, "4"],
        "base": [-1.0],
        "halves": ["no"],
    },
    "Prefix": {"length": [-1]},
    "TokenInfo": {"length": [-1]},
    "Window": {"size": [0]},
}
WITHOUT_ARGUMENTS = {"Causal", "Mask", "Packed", "Padding"}
CLASSES = {name for name in functional.__all__ if name[0].isupper()}


def test_invalid_arguments_of_every_public_function_are_tested():
    assert set(functional.__all__) == GOOD.keys() | WITHOUT_ARGUMENTS | CLASSES | {
        *("linear", "split_heads", "merge_heads", "softmax", "sigmoid", "activate"),
        *("add_residual", "norm_before", "norm_after", "explicit_attention", "convolution"),
        *("init_linear", "init_feed_forward", "init_recurrent_layer", "init_transformer_block"),
    }
    for name, changes in WRONG.items():
        parameters = inspect.signature(getattr(functional, name)).parameters
        tried = changes.keys() | {"hook", "dropout_key", "cap"}
        assert parameters.keys() <= tried | {"scaling", "positions", "segment_ids"}, name


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name in WRONG for argument in WRONG[name]]
)
def test_public_functions_raise_errors_that_name_invalid_arguments(name, argument):
    """A wrong shape, dtype, word or number raises ValueError, a wrong type may raise TypeError."""
    function = getattr(functional, name)
    for value in WRONG[name][argument]:
        with pytest.raises((ValueError, TypeError)) as caught:
            jax.eval_shape(lambda value=value: function(**{**GOOD[name], argument: value}))
        own = {"x": "x|weights|scale|dim", "hidden": "hidden|kernel", "query": "query|key"}
        own |= {"logits": "logits|targets", "source": "source|weights"}
        assert caught.type in (ValueError, TypeError), value
        assert "\n" not in str(caught.value)
        assert caught.match(rf"\b({own.get(argument, argument)})\b"), value


@pytest.mark.slow
def test_attention_without_a_head_axis_is_single_head_attention():
    """[length, dim] inputs, as in the notes, with and without a mask; a third axis is heads."""
    query, key, value = (np.asarray(tiny.embeddings(seed, 3, 4)) for seed in range(3))
    lower = np.tril(np.ones((3, 3), bool))
    for mask, implementation in ((None, "explicit"), (jnp.asarray(lower), "auto")):
        powers = np.exp(query @ key.T / 2) * (1 if mask is None else lower)
        expected = powers / powers.sum(axis=-1, keepdims=True) @ value
        how = {"mask": mask, "implementation": implementation}
        for heads in ((), (2,)):
            inputs = (jnp.broadcast_to(x, (*heads, 3, 4)) for x in (query, key, value))
            found = functional.dot_product_attention(*inputs, **how)
            tiny.close(found, np.broadcast_to(expected, (*heads, 3, 4)))
