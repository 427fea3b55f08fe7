"""A class of the user that overrides the rule of a library class is not taken for that class."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional.attention import masks, own_masks
from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.cudnn import CuDNN
from jaxformer.functional.attention.masks import (
    All,
    Causal,
    DenseMask,
    Mask,
    Near,
    Packed,
    Padding,
    Prefix,
    Window,
)
from jaxformer.functional.attention.own_masks import FunctionMask, TableMask
from jaxformer.functional.attention.scores import DenseBias, Scores
from jaxformer.functional.attention.splash import Splash
from jaxformer.functional.attention.tokamax import Tokamax
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.linear.kernels import dense, quantize
from jaxformer.functional.linear.low_rank import LowRankKernel, concatenate_kernels
from jaxformer.functional.placement import OneDevice
from tests.functional.attention.fused import arrays, context_of

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
LENGTH = 40
SPLASH = Splash(interpret=True)
# Every mask of the library that is a rule, with arguments for its constructor.
TABLE = TableMask.of(np.tri(LENGTH, dtype=bool))
RULES = {
    Causal: (),
    Window: (3,),
    Near: (2,),
    Prefix: (4,),
    Padding: (),
    Packed: (),
    TableMask: (TABLE.size, TABLE.bits),
    FunctionMask: (lambda query, key: key <= query,),
}


def sees(query, key):
    """A rule that sees earlier and later keys, near and far ones, and not all of any kind."""
    query, key = query.position_ids()[..., :, None], key.position_ids()[..., None, :]
    return (query == key) | ((3 * query + 5 * key) % 7 < 2)


def subclass(base):
    """Returns a subclass of a mask whose rule is `sees`."""
    rule = {"__call__": lambda self, query, key: sees(query, key)}
    return dataclass(frozen=True)(type(f"My{base.__name__}", (base,), rule))


def kernels(query):
    """Returns each fused kernel with the arrays in a dtype that it supports."""
    half = query.astype(jnp.bfloat16)
    tokamax = Tokamax(9, compute=lambda query, *_: query)
    return [(SPLASH, query), (CuDNN(True), half), (tokamax, half)]


def test_tests_cover_every_mask_class_of_the_library():
    values = [*vars(masks).values(), *vars(own_masks).values()]
    found = {x for x in values if isinstance(x, type) and issubclass(x, Mask)}
    assert found == {*RULES, Mask, All, DenseMask}


@pytest.mark.slow
@pytest.mark.parametrize("base", list(RULES), ids=lambda base: base.__name__)
def test_mask_subclass_sets_visibility_in_every_attention_implementation(base):
    for rule in (subclass(base)(*RULES[base]), Prefix(20) & subclass(base)(*RULES[base])):
        context = context_of(rule, LENGTH)
        query, key, value = arrays(0, LENGTH)
        visible = np.asarray(rule(TokenInfo(LENGTH), TokenInfo(LENGTH)))
        wanted = attend(query, key, value, replace(context, mask=DenseMask(visible)))
        for name in ("explicit", "blockwise"):
            found = attend(query, key, value, replace(context, implementation=name))
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        for kernel, x in kernels(query):
            reason = kernel.unsupported_reason(x, x[:, :2], x[:, :2], context)
            assert reason is not None or kernel is SPLASH
        fused = replace(context, implementation="fused", placement=OneDevice((SPLASH,)))
        np.testing.assert_allclose(attend(query, key, value, fused), wanted, atol=1e-4)


@pytest.mark.parametrize("base", RULES, ids=lambda base: base.__name__)
def test_subclass_of_library_mask_inherits_no_bounds_on_visible_keys(base):
    """Its key range, reach, prefill and tiles are those of a rule about which nothing is known."""
    rule, plain = subclass(base)(*RULES[base]), subclass(Mask)()
    assert rule.key_range(3, 5, LENGTH) == (0, LENGTH)
    assert (rule.reach, rule.needs_positions) == (None, True)
    assert rule.minimum_prefill == plain.minimum_prefill
    assert rule.rules() == (rule,)


def test_mask_subclass_defines_bounds_on_visible_keys_that_its_subclasses_inherit():
    @dataclass(frozen=True)
    class Dilated(Window):
        def __call__(self, query, key):
            offset = query.position_ids()[..., :, None] - key.position_ids()[..., None, :]
            return (offset >= 0) & (offset < self.size) & (offset % 2 == 0)

        def key_range(self, start, stop, length):
            return max(0, start - self.size + 1), min(stop, length)

        reach = 9

    @dataclass(frozen=True)
    class Named(Dilated):
        name: str = ""

    for kind in (Dilated, Named):
        rule = kind(9)
        assert (rule.reach, rule.key_range(20, 22, LENGTH)) == (9, (12, 22))


def test_mask_inherits_reach_and_needs_positions_from_its_base_classes():
    class Short(Mask):
        reach = 2

    class Counting:
        needs_positions = False

    @dataclass(frozen=True)
    class Both(Counting, Short):
        def __call__(self, query, key):
            return sees(query, key)

    assert (Both().reach, Both().needs_positions) == (2, False)


def test_subclassing_a_mask_conjunction_is_rejected():
    with pytest.raises(TypeError, match="Mine derives from All; derive it from Mask"):

        class Mine(All):
            pass


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_subclass_of_dense_mask_or_bias_works_in_every_attention_implementation(kind):
    query, key, value = arrays(1, LENGTH)
    base, name = {"mask": (DenseMask, "Inverted"), "bias": (DenseBias, "Negative")}[kind]
    change = {"mask": lambda self, *_: ~self.array, "bias": lambda self, *_: -self.array}[kind]
    mine = jax.tree_util.register_dataclass(
        dataclass(frozen=True)(type(name, (base,), {"__call__": change}))
    )
    rng = np.random.default_rng(0)
    if kind == "mask":
        table = rng.random((LENGTH, LENGTH)) < 0.5
        table[7], table[:, 5] = True, False  # inverted, query 7 sees only key 5
        contexts = [context_of(mask, LENGTH) for mask in (mine(table), DenseMask(~table))]
    else:
        table = jnp.asarray(rng.normal(size=(4, LENGTH, LENGTH)), jnp.float32)
        biases = mine(table), DenseBias(-table)
        contexts = [context_of(All(), LENGTH, scores=Scores(bias=bias)) for bias in biases]
    for form in ("explicit", "blockwise"):
        found, wanted = (
            attend(query, key, value, replace(context, implementation=form)) for context in contexts
        )
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_attention_with_a_user_defined_subclass_of_scores_is_computed_blockwise():
    @jax.tree_util.register_static
    @dataclass(frozen=True)
    class Squared(Scores):
        def scaled(self, products):
            return super().scaled(products) ** 2

    query, key, value = arrays(2, LENGTH)
    context = context_of(Causal(), LENGTH, scores=Squared())
    for kernel, x in kernels(query):
        reason = kernel.unsupported_reason(x, x[:, :2], x[:, :2], context)
        assert reason == "the kernel does not support scores of the class Squared"
    found, wanted = (
        attend(query, key, value, replace(context, implementation=name))
        for name in ("auto", "explicit")
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_subclass_of_scores_that_overrides_the_call_method_is_rejected():
    with pytest.raises(TypeError, match="Mine overrides __call__; override tile"):

        class Mine(Scores):
            def __call__(self, products, query, key):
                return products


def test_concatenate_kernels_returns_none_for_kernel_subclasses():
    rng = np.random.default_rng(0)
    array, down, up = (jnp.asarray(rng.normal(size=n)) for n in ((8, 6), (8, 2), (2, 6)))

    def doubled(base):
        return type("Doubled", (base,), {"dense": lambda self: 2 * base.dense(self)})

    int8 = quantize(array)
    mine = [
        doubled(type(int8))(int8.values, int8.scale, int8.offset),
        doubled(LowRankKernel)(array, down, up, 0.5),
    ]
    for kernel, plain in zip(mine, (int8, LowRankKernel(array, down, up, 0.5)), strict=True):
        np.testing.assert_allclose(dense(kernel), 2 * dense(plain))
        assert concatenate_kernels([kernel, plain]) is None
        assert concatenate_kernels([plain, plain]) is not None
