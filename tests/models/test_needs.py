"""The conditions under which a field has an effect are those of the code.

A field with an unmet condition changes neither the shapes of the weights nor the traced program of
the forward pass in training. A field whose conditions hold changes one of them.
"""

from dataclasses import fields, replace
from typing import Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.models.config import KINDS, Execution, RotaryScaling
from jaxformer.models.config.check import type_hints
from jaxformer.models.config.needs import Needs
from jaxformer.models.parameters import shape_tree
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import Schedule, make_optimizer
from tests.slow import mostly_slow

SIZES = {"vocab_size": 11, "embed_dim": 8, "num_layers": 2, "max_length": 6, "dropout": 0.1}
HEADS = {"num_heads": 2, "relative_buckets": 6, "relative_distance": 4}
# Fields that do not change these programs, because they only limit the length of the data.
LIMITS = {"max_length", "max_source_length"}
OTHER = {
    "rotary_base": 500.0,
    "rotary_scaling": RotaryScaling("linear", 2.0),
    "num_heads": 4,
    "num_kv_heads": 1,
    "embed_dim": 16,
    "relative_buckets": 5,
    "kernel_size": 5,
    "rotary_fraction": 0.5,
    "norm_epsilon": 1e-3,
    "dropout": 0.3,
    "prefix": 3,
    "window": 2,
    "num_encoder_heads": 4,
    "hidden_dim": 12,
    "source_vocab_size": 9,
    **dict.fromkeys(("query_key_value_bias", "attention_output_bias", "feedforward_bias"), False),
    "norm_bias": False,
    "layer_types": "short_convolution",
    "convolution_kernel_size": 2,
    "delta_key_heads": 1,
    "num_experts": 3,
    "experts_per_token": 1,
    "shared_expert_dim": 7,
}


def settings_of(kind):
    """Returns a small config and variations of it, which change what other fields need."""
    base = {**SIZES, **(HEADS if hasattr(KINDS[kind], "num_heads") else {})}
    own = {"tie_embeddings": False} | ({"share_embeddings": False} if "-" in kind else {})
    config = KINDS[kind](**base, **own)
    names = {field.name for field in fields(config)}
    variations = [{}]
    if "positions" in names:
        variations += [{"positions": x} for x in ("rotary", "relative", "alibi", "none")]
        biases = {x: True for x in OTHER if x.endswith("_bias") and x != "norm_bias"}
        variations += [{"norm_position": "post"}, {"norm_position": "post_sublayer"}]
        variations += [{"norm": "rms"}, {"norm": "rms", **biases}, {**biases, "norm_bias": True}]
        experts = {"num_experts": 2, "expert_dim": 6}
        variations += [{"num_experts": 2}, experts, {**experts, "num_experts": (0, 2)}]
        variations += [{**experts, "shared_expert_dim": 5}]
        if "layer_types" in names:
            variations += [{"layer_types": ("attention", "short_convolution")}]
            variations += [{"layer_types": ("attention", "gated_delta"), "norm": "none"}]
        if "transform" in names:
            variations += [{**variations[-5], "transform": False, "pooler": False}]
        variations += [{"first_attention_norm": False, "norm_position": "sandwich"}]
    if "norm" in names:
        variations += [{"norm": "none"}]
    if "dilation_growth" in names:
        variations += [{"kernel_size": 1}, {"num_layers": 1}]
    return [replace(config, **values) for values in variations]


def other(config, name):
    """Returns another value of a field."""
    value, hint = getattr(config, name), type_hints(type(config))[name]
    if name in OTHER:
        return OTHER[name]
    if bool in (get_args(hint) or (hint,)):
        return not value
    if get_origin(hint) is Literal:
        return next(x for x in get_args(hint) if x != value)
    return 1.5 if float in (get_args(hint) or (hint,)) else (value or 6) + 1


def program(config, execution=Execution()):  # noqa: B008 (frozen)
    """Returns the shapes of the weights and the program of the forward pass with its constants."""
    model = jf.build(config, execution)
    tokens = jnp.arange(12).reshape(2, 6) % 5
    source = {}
    if config.reads_source:
        frames = jnp.ones((2, 5, config.source_features or 0))
        source["source"] = tokens[:, :5] if config.source_features is None else frames

    def run(weights, key):
        return model.apply({"params": weights}, tokens, **source, rngs={"dropout": key})

    weights = shape_tree(model)
    jaxpr = jax.make_jaxpr(run)(weights, jax.random.key(0))
    shapes = [(path, x.shape) for path, x in jax.tree.leaves_with_path(weights)]
    return str(shapes), str(jaxpr), [np.asarray(x).tobytes() for x in jaxpr.consts]


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "recurrent", slow=["convolutional"]))
def test_config_field_changes_the_program_exactly_if_its_stated_conditions_hold(kind):
    configs = settings_of(kind)
    programs = [program(config) for config in configs]
    needs: Needs = configs[0].needs
    for name in (field.name for field in fields(configs[0]) if field.name not in LIMITS):
        holding = []
        for config, unchanged in zip(configs, programs, strict=True):
            holds = all(need.holds(vars(config)) for need in needs.get(name, ()))
            if holds and holding:
                continue
            changed = program(replace(config, **{name: other(config, name)}))
            assert (changed != unchanged) == holds, (name, config)
            holding += [config] * holds
        assert holding, name


OPTIMIZERS = get_args(type_hints(OptimizerConfig)["optimizer"])
SCHEDULES = get_args(type_hints(OptimizerConfig)["schedule"])


def recipe(config):
    """Returns the program of an update, and the learning rates of a run."""
    optimizer = make_optimizer(config)
    params = {"a": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}

    def update(gradients, params):
        return optimizer.update(gradients, optimizer.init(params), params)

    return str(jax.make_jaxpr(update)(params, params)), list(Schedule(config, steps=20).rates())


@pytest.mark.parametrize("name", ["decay_fraction", "beta1", "beta2", "clip_norm", "weight_decay"])
def test_optimizer_setting_changes_the_update_exactly_if_its_conditions_hold(name):
    for optimizer in OPTIMIZERS:
        for schedule in SCHEDULES:
            config = OptimizerConfig(optimizer=optimizer, schedule=schedule, warmup_steps=2)
            changed = replace(config, **{name: 0.5})
            needs = OptimizerConfig.needs.get(name, ())
            holds = all(need.holds(vars(config)) for need in needs)
            assert (recipe(changed) != recipe(config)) == holds, config


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "recurrent"))
def test_scanned_and_unrolled_layers_give_different_programs(kind):
    config = settings_of(kind)[0]
    programs = [program(config, Execution(layers=x)) for x in ("scan", "unrolled")]
    assert programs[0] != programs[1]


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "recurrent-encoder-decoder"))
def test_attention_option_changes_the_program_exactly_if_its_stated_conditions_hold(kind):
    config, (need,) = settings_of(kind)[0], Execution.needs["attention_implementation"]
    configs = [config, replace(config, attends=False)] if hasattr(config, "attends") else [config]
    for config in configs:
        programs = [program(config, Execution(attention=x)) for x in ("explicit", "blockwise")]
        holds = need.holds({**vars(config), "model": kind})
        assert (programs[0] != programs[1]) == holds, config


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(type_hints(RotaryScaling)["kind"]))
def test_rotary_scaling_field_changes_the_program_exactly_if_its_conditions_hold(kind):
    scaling = RotaryScaling(kind, 2.0, 1000)
    config = replace(settings_of("decoder")[1], embed_dim=128, rotary_scaling=scaling)
    unchanged = program(config)
    for name in (field.name for field in fields(RotaryScaling) if field.name != "kind"):
        value = {"whole_pairs": False, "attention_factor": 3.0, "original_length": 64}.get(
            name, 2.5
        )
        changed = replace(scaling, **{name: value})
        holds = all(x.holds({"kind": kind}) for x in RotaryScaling.needs.get(name, ()))
        assert (program(replace(config, rotary_scaling=changed)) != unchanged) == holds, name
