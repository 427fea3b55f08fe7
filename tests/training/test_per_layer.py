"""`per_layer` updates stacked layers as if their arrays were separate."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.models.kinds import build
from jaxformer.models.parameters import layers_by_tree, shape_tree, stacked_tree
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import make_optimizer, per_layer
from jaxformer.training.presets import RUNS

pytestmark = pytest.mark.usefixtures("quick_compilation")

RULES = {
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4, weight_decay_rate=1e-2),
    "lamb": lambda: optax.lamb(0.1, weight_decay=0.1),
    "lars": lambda: optax.lars(0.1, weight_decay=0.1),
    "fromage": lambda: optax.fromage(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "adaptive gradient clipping": lambda: optax.adaptive_grad_clip(0.01),
    "clipping by block": lambda: optax.clip_by_block_rms(0.01),
    "centralized": lambda: optax.centralize(),
    "muon": lambda: optax.contrib.muon(0.1),
    "galore": lambda: optax.contrib.galore(0.1, rank=2),
    "adamw": lambda: optax.adamw(0.1),
}


def drawn(seed, scales=(0.01, 1.0, 30.0)):
    """Returns arrays of two stacks, whose layers differ in scale, and arrays outside of stacks."""
    rng = np.random.default_rng(seed)

    def stack(*scales):
        layers = [{"kernel": rng.normal(size=(6, 8)), "bias": rng.normal(size=8)} for _ in scales]
        pairs = zip(layers, scales, strict=True)
        return jax.tree.map(
            lambda *x: jnp.stack(x).astype(jnp.float32),
            *(jax.tree.map(lambda x, scale=scale: scale * x, layer) for layer, scale in pairs),
        )

    head = jnp.asarray(rng.normal(size=(5, 7)), jnp.float32)
    return {
        "blocks": {"0": {"up": stack(*scales)}, "1": {"up": stack(*scales[1:])}},
        "encoder": {"blocks": {"up": stack(*scales[:2])}, "head": {"kernel": head}},
        "head": {"kernel": 3 * head},
    }


def separated(tree):
    """Returns the tree with a list of layers in place of each stack."""

    def layers(stack):
        number = len(jax.tree.leaves(stack)[0])
        return [jax.tree.map(lambda x, n=n: x[n], stack) for n in range(number)]

    encoder = tree["encoder"]
    return {
        **tree,
        "blocks": {number: layers(stack) for number, stack in tree["blocks"].items()},
        "encoder": {**encoder, "blocks": layers(encoder["blocks"])},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_per_layer_optimizer_updates_stacked_layers_like_separate_arrays(name):
    mapped, alone = per_layer(RULES[name]()), RULES[name]()
    params = drawn(0)
    separate = separated(params)
    state, own_state = mapped.init(params), alone.init(separate)
    update, own_update = jax.jit(mapped.update), jax.jit(alone.update)
    for seed in (1, 2):
        gradients = drawn(seed, (1.0, 1e-3, 10.0))
        updates, state = update(gradients, state, params)
        own, own_state = own_update(separated(gradients), own_state, separate)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-6),
            separated(updates),
            own,
        )
        params, separate = optax.apply_updates(params, updates), optax.apply_updates(separate, own)


@pytest.mark.slow
def test_per_layer_optimizer_passes_extra_arguments_to_each_layer():
    optimizer = per_layer(optax.contrib.reduce_on_plateau(patience=0, cooldown=0, factor=0.5))
    params = drawn(0)
    state = optimizer.init(params)
    for value in (1.0, 2.0, 2.0):
        updates, state = optimizer.update(params, state, params, value=value)
    halves = jax.tree.map(lambda x: 0.5 * x, params)
    jax.tree.map(np.testing.assert_array_equal, updates, halves)


MODELS = {kind: run.model for kind, run in RUNS["tiny"].items()}
MODELS["layers of two kinds"] = replace(MODELS["decoder"], num_experts=(0, 0, 2), num_layers=5)


@pytest.mark.parametrize("kind", MODELS)
def test_per_layer_optimizer_recognizes_every_stacked_layer_array(kind):
    """Arrays in a stack have the layer as first axis. All other arrays belong to a single layer."""
    model = build(MODELS[kind])
    for path, leaf in jax.tree_util.tree_leaves_with_path(shape_tree(model)):
        is_vector = path[-1].key in ("bias", "scale")
        is_stacked = leaf.ndim > (1 if is_vector else 2)
        tree = stacked_tree(path)
        assert (tree is not None) == is_stacked, path
        if is_stacked and "recurrent" not in kind and kind != "convolutional":
            assert leaf.shape[0] == len(layers_by_tree(model.config)[tree]), path


@pytest.mark.slow
def test_adafactor_updates_each_layer_relative_to_its_own_size():
    """The first update of a matrix is its root mean square times the learning rate."""
    params = drawn(0)
    optimizer = make_optimizer(OptimizerConfig(optimizer="adafactor", weight_decay=0.0))
    updates, _ = optimizer.update(drawn(1), optimizer.init(params), params)
    for update, kernel in zip(
        updates["blocks"]["0"]["up"]["kernel"],
        params["blocks"]["0"]["up"]["kernel"],
        strict=True,
    ):
        sizes = (jnp.sqrt((x**2).mean()) for x in (update, kernel))
        np.testing.assert_allclose(*sizes, rtol=0.05)
