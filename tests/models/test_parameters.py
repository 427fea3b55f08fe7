"""Every parameter that a model creates is used by some output and gets a gradient."""

from typing import Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.models.config import KINDS, PRESETS
from jaxformer.models.config.check import type_hints
from jaxformer.models.kinds import build
from jaxformer.models.parameters import shape_tree
from jaxformer.training.presets import RUNS
from tests.properties import tiny
from tests.slow import mostly_rare, mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
FULL = {f"{name} {kind}": run.model for name, kinds in RUNS.items() for kind, run in kinds.items()}
FULL |= PRESETS

# Values to try for options whose type annotation does not list them.
VALUES = {
    "num_layers": (1, 2),
    "num_kv_heads": (1, 4),
    "head_dim": (4, 6),
    "window": (None, 2, (2, None)),
    "rotary_base": (1e4, (50.0, None)),
    "rotary_fraction": (1.0, 0.5),
    "attention_softcap": (None, 2.0),
    "logits_softcap": (None, 2.0),
    "output_scale": (None, 0.5),
    "prefix": (0, 2),
    "position_offset": (0, 2),
    "num_token_types": (0, 2),
    "num_labels": (0, 3),
    "source_vocab_size": (None, 7),
    "source_features": (None, 3),
    "num_encoder_layers": (1, 2),
    "num_encoder_heads": (2, 4),
    "encoder_mlp_dim": (None, 5),
    "hidden_dim": (8, 6),
    "kernel_size": (1, 3),
    "dilation_growth": (1, 2),
    "query_key_value_bias": (None, False, True),
    "attention_output_bias": (None, False, True),
    "feedforward_bias": (None, False, True),
    "norm_bias": (None, False, True),
}


def options_of(kind) -> dict[str, tuple]:
    """Returns the options of a config class, each with the values to try."""
    options = {}
    for name in kind.__dataclass_fields__:
        hint = type_hints(kind)[name]
        if get_origin(hint) is Literal and name != "dtype":
            options[name] = get_args(hint)
        elif hint is bool:
            options[name] = (False, True)
        elif name in VALUES:
            options[name] = VALUES[name]
    return options


def make_config(kind, **options):
    """Returns a tiny config with these options, or None if they exclude each other."""
    sizes = {name: size for name, size in tiny.SIZES.items() if name in kind.__dataclass_fields__}
    try:
        return kind(**{**sizes, **options}).resolved
    except ValueError:
        return None


@st.composite
def configs(draw, kind):
    chosen = {name: draw(st.sampled_from(x)) for name, x in options_of(kind).items()}
    return make_config(kind, **chosen)


def every_output(model, params, tokens):
    """Returns everything that the model computes from its parameters."""
    variables, config = {"params": params}, model.config
    inputs = {}
    if config.reads_source:
        features = config.source_features
        words = None if features else tokens % config.source_vocab_size
        inputs["source"] = jnp.ones((*tokens.shape, features)) if features else words
    if hasattr(config, "num_token_types") and config.num_token_types:
        inputs["token_type_ids"] = tokens % config.num_token_types
    outputs = [model.apply(variables, tokens, **inputs)]
    if getattr(config, "pooler", False):
        outputs.append(model.apply(variables, tokens, **inputs, method="pooled"))
    if getattr(config, "num_labels", 0):
        outputs.append(model.apply(variables, tokens, **inputs, method="classify"))
    return outputs


def unread_parameters(config) -> list[str]:
    """Returns the paths of the parameters on which no output depends."""
    model = build(config)
    shapes = shape_tree(model)
    tokens = jax.ShapeDtypeStruct((1, 5), np.int32)
    outputs = jax.jit(lambda *inputs: every_output(model, *inputs))
    are_read = jax.export.export(outputs)(shapes, tokens).module_kept_var_idx
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for number, (path, _) in enumerate(leaves)
        if number not in are_read
    ]


@pytest.mark.parametrize("kind", mostly_slow(KINDS, slow=["encoder-decoder"]))
@given(data=st.data())
@settings(max_examples=3)
def test_every_parameter_affects_the_output(kind, data):
    """Tries random options of every kind."""
    config = data.draw(configs(KINDS[kind]).filter(lambda config: config is not None))
    assert not unread_parameters(config)


@pytest.mark.parametrize("norm", mostly_slow(["head", "all"], "all"))
def test_cross_attention_has_no_query_key_norm_parameters(norm):
    config = make_config(KINDS["encoder-decoder"], query_key_norm=norm, num_layers=1)
    assert not unread_parameters(config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_used_for_random_pairs_of_config_options(kind):
    """30 random configs: a pair of values of two seven-valued options meets in 1 of 49."""
    rng, options = np.random.default_rng(0), options_of(KINDS[kind])
    for _ in range(30):
        chosen = {name: values[rng.integers(len(values))] for name, values in options.items()}
        config = make_config(KINDS[kind], **chosen)
        assert config is None or not unread_parameters(config), config


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_rare(FULL, "gpt2-124m", "llama-1.1b"))
def test_every_parameter_of_a_preset_is_read_by_the_forward_pass(name):
    assert not unread_parameters(FULL[name].resolved)


def without_gradient(config) -> set[str]:
    """Returns the parameters whose gradient is 0 in every entry, up to rounding."""
    model = build(config)
    tokens = tiny.tokens(0, 2, 6)
    params = tiny.weights(model, 0)["params"]

    def loss(params):
        outputs = every_output(model, params, tokens)
        return sum((jax.nn.log_softmax(x)[..., 0]).sum() for x in outputs)

    leaves = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params))
    largest = max(abs(x).max() for _, x in leaves)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in leaves
        if abs(x).max() < 1e-6 * largest
    }


def without_effect(path: str, config) -> bool:
    """Returns whether the parameter is a key bias without effect.

    A key bias adds one constant to all scores of a query, and the softmax ignores constants. It
    has an effect if rotation or a norm changes the keys afterwards, or a cap the scores.
    """
    changed = config.attention_softcap is not None
    if "cross_attention" not in path:
        changed |= config.positions == "rotary" or config.query_key_norm != "none"
    return path.endswith("attention/key/bias") and not changed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_gradient(kind):
    """Every value of every option occurs in one of the configs."""
    options = options_of(KINDS[kind])
    for turn in range(max(map(len, options.values()))):
        chosen = {name: values[turn % len(values)] for name, values in options.items()}
        config = make_config(KINDS[kind], **chosen)
        if config is not None:
            dead = without_gradient(config)
            assert not {path for path in dead if not without_effect(path, config)}, config
