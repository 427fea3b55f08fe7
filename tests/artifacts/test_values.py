"""User-defined classes and functions are stored by name and passed in again when loading."""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.artifacts.values import described, difference, from_json, to_json
from jaxformer.functional import Attention
from jaxformer.functional.attention import masks
from jaxformer.functional.layers.norms import NORMS
from jaxformer.models.config import KINDS
from tests.errors import error_of
from tests.properties import tiny


def snake(x):
    return x + x**2


@dataclass(frozen=True)
class Leaf:
    """A value with fields of every type that a file can store."""

    number: float = 0.5
    word: str = ""
    inner: object = None

    def __call__(self, x):
        return self.number * x


@dataclass(frozen=True)
class Near:
    """A class with the name of a jaxformer mask."""

    distance: int = 1


def local_class():
    @dataclass(frozen=True)
    class Local:
        number: float = 0.5

    return Local()


OWN = (Leaf, Near, snake, jax.nn.gelu)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(
    plain | st.sampled_from([snake, jax.nn.gelu, Near(3)]),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.builds(Leaf, st.floats(allow_nan=False), st.text(max_size=5), inner)
    ),
    max_leaves=8,
)


def stored(value):
    return json.loads(json.dumps(to_json(value, "value")))


@given(value=values)
def test_config_value_stored_as_json_is_read_unchanged(value):
    content = stored(value)
    read = from_json(content, OWN, "value")
    assert read == value and repr(read) == repr(value)
    assert difference("value", content, stored(read)) is None


@given(value=values, other=values)
def test_comparison_of_stored_values_gives_path_and_both_values(value, other):
    """The first difference is reported with its path and both values."""
    found = difference("value", stored(value), stored(other))
    assert (found is None) == (stored(value) == stored(other))
    if found is not None:
        where, then, now = found
        assert where.startswith("value") and then != now


def test_comparison_of_stored_layers_gives_differing_field_and_values():
    then, now = stored((Leaf(inner=Leaf(1.0)), snake)), stored((Leaf(inner=Leaf(2.0)), snake))
    assert difference("layers", then, now) == ("layers[0].inner.number", "1.0", "2.0")
    module = Leaf.__module__
    assert difference("mask", stored(Near(2)), None) == (
        "mask",
        f"{module}:Near(distance=2)",
        "None",
    )
    moved = json.loads(json.dumps(then).replace(module, "elsewhere"))
    assert moved != then and difference("layers", then, moved) is None
    assert described(stored((Near(), snake))) == f"({module}:Near(distance=1), {module}:snake)"


@pytest.mark.parametrize(
    "value, reason",
    [
        (lambda x: x, "<lambda> of"),
        (jax.jit(lambda x: x), "<lambda> of"),
        (local_class(), "local_class.<locals>.Local of"),
        (Leaf().__call__, "Leaf.__call__ of"),
        (partial(snake), "which cannot be stored as JSON"),
        (Leaf, "which cannot be stored as JSON"),
        (np.ones(2), "which cannot be stored as JSON"),
        (object(), "which cannot be stored as JSON"),
    ],
)
def test_stored_function_without_name_is_rejected_with_field_name(value, reason):
    said = error_of(to_json, (1, Leaf(inner=value)), "layers")
    assert said.startswith("layers[1].inner is ") and reason in said


def test_reading_stored_values_imports_no_modules():
    for content in ({"class": "antigravity:Leaf"}, {"function": "antigravity:snake"}):
        said = error_of(from_json, content, (), "FILE: mask")
        ((kind, name),) = content.items()
        assert said.startswith(
            f"FILE: mask is the {kind} {name}, which is not part of jaxformer; pass the"
        )
        assert f"layers=[{name.partition(':')[2]}]), or import it with trust_code=True" in said
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "content",
    [
        {"function": f"{Leaf.__module__}:Leaf"},
        {"class": f"{snake.__module__}:snake"},
        {"class": 5},
        {"class": ["Leaf"]},
        {},
    ],
)
def test_stored_value_cannot_name_arbitrary_python_objects(content):
    assert "which is not part of jaxformer" in error_of(from_json, content, OWN, "value")


def test_user_class_with_the_name_of_a_library_class_is_loaded():
    assert from_json(stored(Near(2)), OWN, "value") == Near(2)
    assert from_json(stored(masks.Near(2)), OWN, "value") == masks.Near(2)


@pytest.mark.parametrize(
    "content",
    [
        {"class": "Window", "size": "x"},
        {"class": "Window", "size": 0},
        {"class": "Window"},
        to_json(Attention(2, 2, 4), "") | {"mask": 5},
    ],
)
def test_error_for_invalid_stored_value_names_its_path(content):
    with pytest.raises(ValueError, match=r"^FILE: layers\[0\]"):
        from_json([content], (), "FILE: layers")


def test_stored_classes_of_equal_name_are_distinguished_by_module():
    other = dataclass(frozen=True)(type("Leaf", (), {"__module__": "b", "__annotations__": {}}))
    third = dataclass(frozen=True)(type("Leaf", (), {"__module__": "c", "__annotations__": {}}))
    assert from_json({"class": "b:Leaf"}, (Leaf, other, third), "value") == other()
    assert from_json({"class": "moved:Leaf"}, (other, other), "value") == other()
    said = error_of(from_json, {"class": "moved:Leaf"}, (other, third), "value")
    assert said == (
        "value is the class moved:Leaf, but layers has 2 of this name, none of them in this module"
    )
    for wrong in (Leaf(), 3, object):
        said = error_of(from_json, 1, (Leaf, wrong), "value")
        assert said.startswith("layers has ") and said.endswith("must be dataclasses or functions")


CONFIGS = [
    *(tiny.build(kind).config for kind in KINDS.values()),
    *(tiny.build(norm=norm).config for norm in NORMS),
    *(tiny.build(positions=x).config for x in ("alibi", "relative", "rotary")),
    tiny.build(positions="rotary", rotary_scaling=jf.RotaryScaling("yarn", 2.0)).config,
    tiny.build(num_experts=4, shared_expert_dim=4).config,
    tiny.build(layer_types=("short_convolution", "gated_delta"), num_layers=2).config,
    tiny.build(prefix=2).config,
    replace(tiny.build().config, parallel_block="separate_norms"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda x: type(x).__name__)
def test_stored_library_layers_load_without_a_layers_argument(config):
    layers = jf.build(config).architecture.stack.layers
    assert from_json(stored(layers), (), "layers") == layers
