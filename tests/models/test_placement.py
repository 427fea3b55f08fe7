"""Where parameters live: the table knows them all, and what cannot be is refused by name."""

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxformer.cli.runtime import shared_by
from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.models.build import build, init, shape_tree
from jaxformer.models.config import PRESETS, DecoderConfig, EncoderDecoderConfig
from jaxformer.models.placement import (
    AXES,
    TABLES,
    Rule,
    make_mesh,
    partition_of,
    shardings,
)
from jaxformer.training.config import PairTraining, TextTraining
from jaxformer.training.presets import RUNS

CONFIGS = {
    f"{name} {kind}": run.model for name, kinds in RUNS.items() for kind, run in kinds.items()
}
CONFIGS |= PRESETS
TINY = {"vocab_size": 16, "max_length": 8, "num_layers": 1, "embed_dim": 8, "num_heads": 2}
ONE, BOTH = make_mesh({}), ("fsdp", "tensor")


class Sizes:
    """What `partition_of` asks of a mesh."""

    def __init__(self, **shape):
        self.shape = dict.fromkeys(AXES, 1) | shape


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_of_a_kind_knows_every_parameter(name):
    """Each matrix of a layer is cut by fsdp: none is whole on every device by an oversight."""
    config = CONFIGS[name]
    tree = shape_tree(build(config))
    for path, where in jax.tree_util.tree_leaves_with_path(shardings(tree, config, ONE)):
        names = [key.key for key in path]
        if names[-1] in ("kernel", "tokens", "positions"):
            assert "fsdp" in where.spec, names
        else:
            assert "fsdp" not in where.spec, names


@pytest.mark.parametrize("name", [name for name in CONFIGS if "gpt" in name or "llama" in name])
def test_what_a_layer_exchanges_over_tensor_is_its_two_sums(name):
    """Maps into heads and features are cut by their outputs, those out of them by their inputs."""
    config = CONFIGS[name]
    specs = jax.tree.map(lambda x: tuple(x.spec), shardings(shape_tree(build(config)), config, ONE))
    block = specs["blocks"]
    for part, names in (("attention", ("query", "key", "value")), ("feedforward", ("up", "gate"))):
        for map_name in names:
            if map_name in block[part]:
                assert block[part][map_name]["kernel"] == (None, "fsdp", "tensor")
    assert block["attention"]["output"]["kernel"] == (None, "tensor", "fsdp")
    assert block["feedforward"]["down"]["kernel"] == (None, "tensor", "fsdp")


@given(
    shape=st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=2, max_size=3),
    fsdp=st.integers(1, 4),
    tensor=st.integers(1, 4),
)
def test_a_size_that_does_not_divide_is_refused(shape, fsdp, tensor):
    rules, mesh = (Rule("*/kernel", ("fsdp", "tensor")),), Sizes(fsdp=fsdp, tensor=tensor)
    *_, rows, columns = shape
    if rows % fsdp or columns % tensor:
        size, axis, over = (rows, "fsdp", fsdp) if rows % fsdp else (columns, "tensor", tensor)
        with pytest.raises(
            ValueError, match=rf"a/kernel .*: {size} does not divide by {axis}={over}"
        ):
            partition_of("a/kernel", tuple(shape), rules, mesh)
    else:
        spec = partition_of("a/kernel", tuple(shape), rules, mesh)
        assert tuple(spec) == (*[None] * (len(shape) - 2), "fsdp", "tensor")


@pytest.mark.parametrize(
    "rule, message",
    [
        (Rule("b/*", ("fsdp", None)), "a/kernel .* matches no rule of the table"),
        (Rule("a/*", ("fsdp", "fsdp")), r"the rule 'a/\*' uses an axis twice"),
        (Rule("a/*", ("fsdp", None, None)), r"has fewer axes than its rule 'a/\*'"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        partition_of("a/kernel", (4, 4), (rule,), Sizes())


def test_the_first_rule_is_used():
    rules = (Rule("a/kernel", (None, "tensor")), Rule("*", ("fsdp",)))
    assert tuple(partition_of("a/kernel", (4, 4), rules, Sizes())) == (None, "tensor")
    assert tuple(partition_of("a/bias", (4, 4), rules, Sizes())) == (None, "fsdp")


@pytest.mark.parametrize("name", [name for name in CONFIGS if "gpt" in name or "llama" in name])
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_head_and_a_word_are_whole(name, tensor):
    """What `tensor` does not divide is cut as over fsdp; every matrix is still cut by both axes."""
    config = CONFIGS[name].resolved
    mesh = AbstractMesh((1, 1, tensor), AXES, axis_types=(AxisType.Auto,) * 3)
    placed = shardings(shape_tree(build(config)), config, mesh)
    attention = [x["kernel"].spec for x in placed["blocks"]["attention"].values()]
    by_heads = not (config.num_heads % tensor or config.num_kv_heads % tensor)
    assert [("fsdp", "tensor") in spec for spec in attention] == [not by_heads] * 4
    table = placed["embedding"]["tokens"].spec
    assert tuple(table) == (("tensor", "fsdp") if config.vocab_size % tensor == 0 else (None, BOTH))


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"fsdp": 3}, r"mesh is data=1,fsdp=3,tensor=1, 3 devices; there are 1 \(cpu\)"),
        ({"model": 1}, "mesh has an axis 'model'; there are data, fsdp, tensor"),
        ({"data": 0}, "mesh has data=0; it must be at least 1"),
    ],
)
def test_a_mesh_that_cannot_be_made_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(sizes, jax.devices()[:1])


def test_explicit_axes_are_refused_with_what_to_pass():
    """JAX's own default: there each array says itself how it is cut."""
    config = replace(CONFIGS["tiny decoder"], positions="rotary")
    model = build(config)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    variables = model.init(jax.random.key(0), jax.numpy.ones((1, 4), int))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="make it with axis_types="):
        model.apply(variables, jax.numpy.ones((1, 4), int))


def test_every_kind_has_a_table():
    assert set(TABLES) == {type(config) for config in CONFIGS.values()}


@pytest.mark.parametrize(
    "axes, types, named",
    [
        (("data",), (AxisType.Auto,), "data"),
        (AXES, (AxisType.Explicit,) * 3, "Explicit"),
        (("x", "y", "z"), (AxisType.Auto,) * 3, "x"),
    ],
)
def test_another_mesh_is_refused_and_it_is_said_which_there_is(axes, types, named):
    config = PRESETS["gpt2-124m"]
    mesh = AbstractMesh((1,) * len(axes), axes, axis_types=types)
    with pytest.raises(ValueError, match=rf"mesh has the axes .*{named}.*make_mesh"):
        shardings(shape_tree(build(config)), config, mesh)


@pytest.mark.parametrize("where", ["tokens", "variables", "in context"])
def test_explicit_axes_are_refused_wherever_they_are(where):
    """JAX's default of `make_mesh`, by which an array says itself how it is cut."""
    model = build(DecoderConfig(**TINY))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    at = NamedSharding(mesh, PartitionSpec())
    tokens = jnp.ones((2, 4), jnp.int32)
    variables = init(model, jax.random.key(0))
    if where == "tokens":
        tokens = jax.device_put(tokens, at)
    if where == "variables":
        variables = jax.device_put(variables, at)
    with jax.set_mesh(mesh) if where == "in context" else nullcontext():
        with pytest.raises(ValueError, match=r"explicit axes \(data\).*axis_types="):
            jax.jit(model.apply)(variables, tokens)
        if where != "tokens":
            with pytest.raises(ValueError, match=r"explicit axes \(data\).*axis_types="):
                generate(model, variables, [[1]], max_new_tokens=2, sampler=Sampler(0.0))


@pytest.mark.parametrize(
    ("rows", "devices", "shared"), [(16, 3, 2), (16, 8, 8), (7, 8, 7), (5, 4, 1)]
)
def test_a_batch_is_shared_by_as_many_devices_as_it_divides_by(rows, devices, shared, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert shared_by(TextTraining(DecoderConfig(**TINY), batch_size=rows)) == shared
    assert (
        shared_by(PairTraining(EncoderDecoderConfig(**TINY))) == devices
    )  # filled up with padding
