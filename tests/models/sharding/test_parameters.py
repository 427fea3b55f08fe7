"""Placement tables cover every parameter, and impossible placements raise a clear error."""

from dataclasses import replace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from jaxformer.artifacts.tensors import flat
from jaxformer.models.config import KINDS, PRESETS, DecoderConfig, EncoderDecoderConfig
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.kinds import build
from jaxformer.models.lora import adapt, adapter_shapes
from jaxformer.models.parameters import shape_tree
from jaxformer.models.sharding.parameters import (
    AXES,
    Rule,
    find_partition,
    make_abstract_mesh,
    make_mesh,
    parameter_shapes,
    shardings,
)
from jaxformer.models.trainable import partition
from jaxformer.training.config import PairTraining, TextTraining
from jaxformer.training.mesh import num_devices_for
from jaxformer.training.presets import RUNS
from tests.models.own_layer import Memory
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIGS = {
    f"{name} {kind}": run.model for name, kinds in RUNS.items() for kind, run in kinds.items()
}
CONFIGS |= PRESETS
TINY = {"vocab_size": 16, "max_length": 8, "num_layers": 1, "embed_dim": 8, "num_heads": 2}
ONE, BOTH = make_mesh({}), ("fsdp", "tensor")


class Sizes:
    """Stand-in for a mesh: the axis sizes, which is all that `find_partition` reads."""

    def __init__(self, **shape):
        self.shape = dict.fromkeys(AXES, 1) | shape


@pytest.mark.parametrize("name", CONFIGS)
def test_partition_rules_cover_every_parameter(name):
    """Every matrix is sharded over fsdp, so no matrix is replicated by mistake."""
    config = CONFIGS[name]
    tree = shape_tree(build(config))
    for path, where in jax.tree_util.tree_leaves_with_path(shardings(tree, build(config), ONE)):
        names = [key.key for key in path]
        if names[-1] in ("kernel", "tokens", "positions"):
            assert "fsdp" in where.spec, names
        else:
            assert "fsdp" not in where.spec, names


@pytest.mark.parametrize("name", [name for name in CONFIGS if "gpt" in name or "llama" in name])
def test_tensor_parallel_sharding_needs_two_all_reduces_per_layer(name):
    """Projections into heads and features shard their outputs, those back shard their inputs.

    Each layer then all-reduces twice, after attention and after the feed-forward layer.
    """
    config = CONFIGS[name]
    model = build(config)
    specs = jax.tree.map(lambda x: tuple(x.spec), shardings(shape_tree(model), model, ONE))
    block = specs["blocks"]
    for part, names in (("attention", ("query", "key", "value")), ("feedforward", ("up", "gate"))):
        for map_name in names:
            if map_name in block[part]:
                assert block[part][map_name]["kernel"] == (None, "fsdp", "tensor")
    assert block["attention"]["output"]["kernel"] == (None, "tensor", "fsdp")
    assert block["feedforward"]["down"]["kernel"] == (None, "tensor", "fsdp")


def test_lora_updates_are_sharded_like_their_kernels():
    """A like the inputs of W, B like its outputs: in training and where an adapter is loaded."""
    model, lora = (
        build(PRESETS["gpt2-124m"]),
        LoraConfig(lora_rank=2, lora_target_modules="query,output"),
    )
    shapes = parameter_shapes(model, ONE)
    made = jax.eval_shape(lambda x: adapt(jax.random.key(0), x, lora), shapes)
    trained, _ = partition(shardings(made, model, ONE))
    loaded = jax.tree.map(lambda x: x.sharding, adapter_shapes(shapes, lora))
    for tree in (trained, loaded):
        attention = jax.tree.map(lambda x: tuple(x.spec), tree)["blocks"]["attention"]
        query, output = (attention[name]["kernel"] for name in ("query", "output"))
        assert query.down == (None, "fsdp", None) and query.up == (None, None, "tensor")
        assert output.down == (None, "tensor", None) and output.up == (None, None, "fsdp")
        assert attention["key"]["kernel"] is None


EXPERTS = DecoderConfig(
    **{**TINY, "num_layers": 3},
    activation="swiglu",
    num_experts=(0, 4, 4),
    expert_dim=4,
    shared_expert_dim=6,
)


class Divided(Memory):
    """A memory whose state tensor parallelism divides."""

    def weight_axes(self):
        return {"input/kernel": ("dim", "hidden"), "input/bias": ("hidden",)}


@pytest.mark.parametrize(
    "memory, kernel, bias",
    [(Memory(), ("fsdp", None), (None,)), (Divided(), ("fsdp", "tensor"), ("tensor",))],
)
def test_user_defined_sublayer_chooses_its_parameter_sharding(memory, kernel, bias):
    model = build(DecoderConfig(**{**TINY, "num_layers": 2}))
    layers = model.architecture.stack.layers
    mixed = ((replace(layers[0][0], sublayer=memory), layers[0][1]), *layers[1:])
    model = replace(model, layers=mixed)
    mesh = make_abstract_mesh({"fsdp": 2, "tensor": 2})
    placed = shardings(shape_tree(model), model, mesh)["blocks"]["0"]["memory"]["input"]
    specs = {name: tuple(where.spec) for name, where in placed.items()}
    assert specs == {"kernel": (None, *kernel), "bias": (None, *bias)}


def test_expert_parameters_are_sharded_over_the_expert_axis():
    """Layers without experts and shared experts, whose parameters have the same names, are not."""
    config = EXPERTS.resolved
    mesh = make_abstract_mesh({"fsdp": 2, "expert": 4, "tensor": 2})
    dense, mixture = (
        jax.tree.map(lambda x: tuple(x.spec), tree["feedforward"])
        for tree in shardings(shape_tree(build(config)), build(config), mesh)["blocks"].values()
    )
    assert mixture["up"]["kernel"] == (None, "expert", "fsdp", "tensor")
    assert mixture["down"]["kernel"] == (None, "expert", "tensor", "fsdp")
    assert dense["up"]["kernel"] == mixture["shared"]["up"]["kernel"] == (None, "fsdp", "tensor")
    assert mixture["router"]["kernel"] == (None, "fsdp", None)
    if "bias" in mixture["up"]:
        assert mixture["up"]["bias"] == (None, "expert", "tensor")
        assert mixture["down"]["bias"] == (None, "expert", None)


@pytest.mark.parametrize(
    "experts, message",
    [
        ((0, 4, 6), r"6 is not divisible by expert=4"),
        (6, r"blocks/feedforward/.* 6 is not divisible by expert=4"),
        (0, r"mesh has expert=4, but must have expert=1 for a model without"),
    ],
)
def test_indivisible_expert_count_is_rejected(experts, message):
    config = replace(EXPERTS, num_experts=experts).resolved
    with pytest.raises(ValueError, match=message):
        shardings(shape_tree(build(config)), build(config), make_abstract_mesh({"expert": 4}))


@given(
    shape=st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=2, max_size=3),
    fsdp=st.integers(1, 4),
    tensor=st.integers(1, 4),
)
def test_sharding_rejects_parameter_sizes_not_divisible_by_the_mesh(shape, fsdp, tensor):
    rules, mesh = (Rule("*/kernel", ("fsdp", "tensor")),), Sizes(fsdp=fsdp, tensor=tensor)
    *_, rows, columns = shape
    if rows % fsdp or columns % tensor:
        size, axis, over = (rows, "fsdp", fsdp) if rows % fsdp else (columns, "tensor", tensor)
        with pytest.raises(
            ValueError, match=rf"a/kernel .*: {size} is not divisible by {axis}={over}"
        ):
            find_partition("a/kernel", tuple(shape), rules, mesh)
    else:
        spec = find_partition("a/kernel", tuple(shape), rules, mesh)
        assert tuple(spec) == (*[None] * (len(shape) - 2), "fsdp", "tensor")


@pytest.mark.parametrize(
    "rule, message",
    [
        (Rule("b/*", ("fsdp", None)), "a/kernel .* matches no sharding rule of the table"),
        (Rule("a/*", ("fsdp", "fsdp")), r"the sharding rule 'a/\*' uses an axis twice"),
        (Rule("a/*", ("fsdp", None, None)), r"has fewer axes than its sharding rule 'a/\*'"),
    ],
)
def test_invalid_partition_rule_is_rejected(rule, message):
    with pytest.raises(ValueError, match=message):
        find_partition("a/kernel", (4, 4), (rule,), Sizes())


def test_first_matching_partition_rule_is_used():
    rules = (Rule("a/kernel", (None, "tensor")), Rule("*", ("fsdp",)))
    assert tuple(find_partition("a/kernel", (4, 4), rules, Sizes())) == (None, "tensor")
    assert tuple(find_partition("a/bias", (4, 4), rules, Sizes())) == (None, "fsdp")


@pytest.mark.parametrize("name", [name for name in CONFIGS if "gpt" in name or "llama" in name])
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_sharding_never_splits_a_head_or_a_token_embedding(name, tensor):
    """If `tensor` does not divide the heads or words, one axis is sharded over fsdp and tensor."""
    config = CONFIGS[name].resolved
    mesh = make_abstract_mesh({"tensor": tensor})
    placed = shardings(shape_tree(build(config)), build(config), mesh)
    attention = [x["kernel"].spec for x in placed["blocks"]["attention"].values()]
    by_heads = not (config.num_heads % tensor or config.num_kv_heads % tensor)
    assert [("fsdp", "tensor") in spec for spec in attention] == [not by_heads] * 4
    table = placed["embedding"]["tokens"].spec
    assert tuple(table) == (("tensor", "fsdp") if config.vocab_size % tensor == 0 else (None, BOTH))


PATHS = {  # parameters sharded by heads or by words, and the axis that is sharded
    "embedding/tokens": ("words", -2),
    "blocks/attention/query/kernel": ("heads", -1),
    "blocks/attention/output/kernel": ("heads", -2),
    "blocks/cross_attention/key/kernel": ("heads", -1),
    "relative_bias/table": ("heads", -1),
}


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "encoder-decoder"))
@given(data=st.data())
@settings(max_examples=10)
def test_tensor_axis_shards_heads_and_vocabulary_if_it_divides_them(kind, data):
    """`tensor` shards the heads or words of a stack exactly if it divides their number.

    The other stack has no influence, and no number is rejected.
    """
    tensor = data.draw(st.sampled_from([2, 4]))
    drawn = {
        "vocab_size": data.draw(st.integers(15, 17)),
        "source_vocab_size": data.draw(st.integers(15, 17)),
        "num_kv_heads": data.draw(st.sampled_from([1, 2, 3, 4])),
        "num_encoder_heads": data.draw(st.sampled_from([2, 3, 4, None])),
        "embed_dim": 24,
        "head_dim": 8,
        "mlp_dim": 16,
        "hidden_dim": 24,
        "num_layers": 1,
        "positions": "relative",
        "share_embeddings": False,
    }
    drawn["num_heads"] = 2 * drawn["num_kv_heads"]
    fields = KINDS[kind].__dataclass_fields__
    config = KINDS[kind](**{x: y for x, y in drawn.items() if x in fields}).resolved
    mesh = make_abstract_mesh({"fsdp": 2, "tensor": tensor})
    placed = shardings(shape_tree(build(config)), build(config), mesh)
    for stack in ("", "encoder/"):
        is_pair = isinstance(config, EncoderDecoderConfig)
        own = config.encoder if stack and is_pair else config
        words = config.source_vocab_size if stack and hasattr(config, "source_vocab_size") else 16
        numbers = {"words": [words if stack else config.vocab_size], "heads": own.heads}
        for path, (name, axis) in PATHS.items():
            where = flat(placed).get(stack + path)
            if where is not None:
                divides = bool(numbers[name]) and not any(n % tensor for n in numbers[name])
                assert (where.spec[axis] == "tensor") == divides, stack + path


@pytest.mark.parametrize(
    "sizes, message",
    [
        (
            {"fsdp": 3},
            r"mesh is data=1,fsdp=3,expert=1,tensor=1, which needs 3 devices; there are 1 \(cpu\)",
        ),
        ({"model": 1}, "mesh has an unknown axis .model.; the axes are data, fsdp, expert, tensor"),
        ({"data": 0}, "mesh has data=0; it must be at least 1"),
    ],
)
def test_mesh_that_does_not_fit_the_devices_is_rejected(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(sizes, jax.devices()[:1])


def test_every_model_has_partition_rules():
    assert set(KINDS.values()) == {type(config) for config in CONFIGS.values()}


@pytest.mark.parametrize("axes", [("data",), ("x", "y", "z")])
def test_shardings_reject_mesh_with_unknown_axes(axes):
    config = PRESETS["gpt2-124m"]
    mesh = AbstractMesh((1,) * len(axes), axes)
    with pytest.raises(ValueError, match=rf"mesh has the axes .*{axes[0]}.*make_mesh"):
        shardings(shape_tree(build(config)), build(config), mesh)


@pytest.mark.parametrize(
    ("batch_size", "devices", "shared"), [(16, 3, 2), (16, 8, 8), (7, 8, 7), (5, 4, 1)]
)
def test_number_of_training_devices_divides_the_batch_size(
    batch_size, devices, shared, monkeypatch
):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert num_devices_for(TextTraining(DecoderConfig(**TINY), batch_size=batch_size)) == shared
    assert (
        num_devices_for(PairTraining(EncoderDecoderConfig(**TINY))) == devices
    )  # padding fills up the batch
