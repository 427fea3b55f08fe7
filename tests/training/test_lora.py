"""LoRA adapters: initial values, merging, gradients, checkpoints and selection of kernels."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.artifacts.tensors import flat
from jaxformer.models.config import RecurrentConfig
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.lora import adapt, adapted_maps, merged
from jaxformer.models.parameters import shape_tree
from jaxformer.models.trainable import combine, partition, trainable_value_and_grad
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.objectives import summed_loss
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import init_state, make_step
from tests.errors import error_of
from tests.properties import tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

LORA = LoraConfig(lora_rank=2, lora_alpha=6.0)
MODEL = tiny.build(num_layers=1)
each_kind = pytest.mark.parametrize("name", mostly_slow(list(MODELS), "decoder"))
by_operation = pytest.mark.parametrize("name", mostly_slow(list(MODELS), "lstm"))


def drawn(model, lora=LORA, seed=0):
    """Returns random parameters, and the same parameters with LoRA updates whose B is not 0."""
    base = tiny.weights(model, seed)["params"]
    adapter, frozen = partition(adapt(jax.random.key(seed), base, lora))
    rng = np.random.default_rng(seed)
    adapter = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), adapter)
    return base, combine(adapter, frozen)


def logits_of(model, params, seed=0):
    tokens, source = tiny.tokens(seed, 2, 8), tiny.sources(model, seed, 2)
    return tiny.apply(model)({"params": params}, tokens, **tiny.read(model, source))


@pytest.mark.slow
@by_operation
def test_an_initial_lora_update_does_not_change_the_logits(name):
    """The initial B is 0, so the logits equal the base model's exactly, for any adapted kernels.

    The operations run one by one, because XLA may round norms differently in two compiled programs.
    """
    model = tiny.build(**MODELS[name])
    base = tiny.weights(model, 0)["params"]
    wide = [path for path in flat_maps(base) if flat(base)[f"{path}/kernel"].shape[-1] > 1]
    every = {path.rpartition("/")[2] for path in wide}  # a gate has 1 output, below the rank
    for maps in (None, ",".join(sorted(every))):
        lora = replace(LORA, lora_target_modules=maps)
        adapted = adapt(jax.random.key(0), base, lora)
        with jax.disable_jit():
            found, wanted = (logits_of(model, params) for params in (adapted, base))
        np.testing.assert_array_equal(found, wanted)


def flat_maps(params):
    return [path.removesuffix("/kernel") for path in flat(params) if path.endswith("/kernel")]


@each_kind
def test_merging_lora_weights_does_not_change_the_logits(name):
    """Merging the updates into the weights does not change the logits."""
    model = tiny.build(**MODELS[name])
    base, adapted = drawn(model)
    tiny.close(
        logits_of(model, merged(base, partition(adapted)[0])), logits_of(model, adapted), 2e-5
    )


@pytest.mark.slow
def test_lora_gradients_are_projections_of_the_dense_gradient():
    """For L(W + s A B): dA = s dW Bᵀ and dB = s Aᵀ dW, in float64. Other gradients do not exist."""
    base, adapted = drawn(MODEL)
    batch = Batch(*(jnp.asarray(tiny.tokens(seed, 2, 8)) for seed in (0, 1)))
    adapter, _ = partition(adapted)
    loss = partial(summed_loss, MODEL)
    dense = jax.jit(jax.grad(loss))(merged(base, adapter), batch)
    _, own = jax.jit(trainable_value_and_grad(loss))(adapted, batch)
    own, adapter = flat(own), flat(adapter)
    assert {path for path, x in own.items() if x is not None} == {
        f"{path}/kernel" for path in adapted_maps(base, LORA)
    }
    for path, gradient in flat(dense).items():
        if own[path] is None:
            continue
        gradient = np.asarray(gradient, np.float64)
        down, up = (np.asarray(x, np.float64) for x in (adapter[path].down, adapter[path].up))
        for found, wanted in (
            (own[path].down, LORA.scale * gradient @ up.swapaxes(-1, -2)),
            (own[path].up, LORA.scale * down.swapaxes(-1, -2) @ gradient),
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * abs(wanted).max())


def test_only_the_adapter_is_trained_and_saved():
    """Training leaves the base weights bit-identical, and evaluation uses the adapter.

    A checkpoint holds only the adapter and its optimizer state.
    """
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=0))
    base = tiny.weights(MODEL, 0)["params"]
    state = init_state(MODEL, optimizer, 0, base, lora=LORA)
    before = jax.tree.map(np.array, partition(state.params))
    step = make_step(MODEL, optimizer)
    batch = Batch(*(jnp.asarray(tiny.tokens(seed, 1, 2, 8)) for seed in (0, 1)))
    losses = []
    for _ in range(20):
        state, measured = step(state, batch, np.float32(0.1))
        losses.append(float(measured.loss))
    assert losses[-1] < 0.9 * losses[0]
    one = Batch(batch.inputs[0], batch.targets[0])
    scored = jax.jit(partial(summed_loss, MODEL))(state.weights(), one)
    learnt, frozen = partition(state.params)
    jax.tree.map(np.testing.assert_array_equal, frozen, before[1])
    assert not any(
        np.array_equal(*x) for x in zip(*map(jax.tree.leaves, (learnt, before[0])), strict=True)
    )
    size = sum(x.size for x in jax.tree.leaves(learnt))
    assert size == sum(LORA.lora_rank * sum(base_shape[-2:]) for base_shape in adapted_shapes(base))
    saved = sum(x.size for x in jax.tree.leaves(state.parts()))
    assert saved < 3 * size + 10  # the adapter, its two moments, a key and two counters
    again = init_state(MODEL, optimizer, 1, tiny.weights(MODEL, 0)["params"], lora=LORA)
    restored = again.restored(20, *state.parts())
    for one, other in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
        np.testing.assert_array_equal(
            *(jax.random.key_data(x) if x.dtype.name.startswith("key") else x for x in (one, other))
        )
    loss = step(state, batch, np.float32(0))[1].loss
    np.testing.assert_allclose(scored / batch.targets.size, loss, rtol=1e-5)


def adapted_shapes(base):
    shapes = {path: x.shape for path, x in flat(base).items()}
    return [shapes[f"{path}/kernel"] for path in adapted_maps(base, LORA)]


@pytest.mark.parametrize(
    "maps, found",
    [
        (None, ["encoder/blocks/attention", "blocks/attention", "blocks/cross_attention"]),
        ("cross_attention/query,cross_attention/value", ["blocks/cross_attention"]),
        ("encoder/blocks/attention/query", ["encoder/blocks/attention"]),
    ],
)
def test_lora_target_modules_select_kernels_by_the_end_of_their_path(maps, found):
    shapes = shape_tree(tiny.build(**MODELS["encoder-decoder"]))
    paths = adapted_maps(shapes, replace(LORA, lora_target_modules=maps))
    assert {path.rpartition("/")[0] for path in paths} == set(found)
    names = {path.rpartition("/")[2] for path in paths}
    assert names == ({"query"} if maps and "value" not in maps else {"query", "value"})


def test_an_unknown_lora_target_is_rejected_with_a_list_of_targets():
    shapes = shape_tree(tiny.build(kind=RecurrentConfig))
    said = error_of(adapted_maps, shapes, replace(LORA, lora_target_modules="input,query"))
    assert (
        said
        == "lora_target_modules has 'query', but the linear layers of this model are input, state"
    )
    assert adapted_maps(shapes, LORA)[:2] == ["blocks/recurrent/input", "blocks/recurrent/state"]
    shapes = shape_tree(MODEL)
    said = error_of(adapted_maps, shapes, replace(LORA, lora_rank=9))
    assert said == "lora_rank is 9; for blocks/attention/query it must be at most 8"
