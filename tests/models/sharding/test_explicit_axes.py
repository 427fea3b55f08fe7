"""Models on a mesh with explicit axes, the default of `jax.make_mesh`."""

import os
import subprocess
import sys
from contextlib import nullcontext
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxformer as jf
from jaxformer.models.sharding.activations import BATCH_AXES
from jaxformer.models.sharding.parameters import AXES, shardings
from jaxformer.training.batch import Batch
from jaxformer.training.evaluate import evaluate
from jaxformer.training.objectives import CrossEntropy
from jaxformer.training.step import init_state, make_step
from jaxformer.training.tasks.own_batches import OwnBatches
from tests.properties import tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")

CASES = {**MODELS, "encoder": {"kind": jf.EncoderConfig}}
BATCH, LENGTH = 8, 12
# What has explicit axes: the mesh in context, the tokens and the variables.
WHERE = {
    "context": (True, False, False),
    "tokens": (False, True, False),
    "variables": (False, False, True),
    "all": (True, True, True),
}


@cache
def mesh():
    sizes = (2, 2, 1, 2) if jax.device_count() == 8 else (1, 1, 1, 1)
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def inputs_of(model):
    source = {}
    if model.config.reads_source:
        source["source"] = jnp.asarray(tiny.source(model, 3, BATCH, 5))
    return jnp.asarray(tiny.tokens(0, BATCH, LENGTH), jnp.int32), source


def placed(model, variables, tokens, where):
    """Returns the context of the mesh, the variables and the tokens, with explicit axes there."""
    in_context, has_tokens, has_variables = WHERE[where]
    if has_tokens:
        tokens = jax.device_put(tokens, NamedSharding(mesh(), PartitionSpec(BATCH_AXES)))
    if has_variables:
        params = variables["params"]
        variables = {"params": jax.device_put(params, shardings(params, model, mesh()))}
    return jax.set_mesh(mesh()) if in_context else nullcontext(), variables, tokens


@pytest.mark.slow
@pytest.mark.parametrize("where", mostly_slow(list(WHERE), "tokens", "all", slow=WHERE))
@pytest.mark.parametrize("name", mostly_slow(list(CASES), "decoder"))
def test_loss_and_gradient_on_explicit_axes_equal_those_without_a_mesh(name, where):
    model = tiny.build(**CASES[name])
    variables = tiny.weights(model, 0)
    tokens, source = inputs_of(model)

    def loss(variables, tokens, source):
        return jnp.sin(model.apply(variables, tokens, **source)).mean()

    run = jax.jit(jax.value_and_grad(loss))
    wanted = run(variables, tokens, source)
    context, variables, tokens = placed(model, variables, tokens, where)
    with context:
        found = run(variables, tokens, source)
        logits = model.apply(variables, tokens, **source)
    tiny.all_close(found, wanted, 1e-4)
    if WHERE[where][1]:
        spec = jax.typeof(logits).sharding.spec
        assert logits.shape[0] == BATCH and spec[0] == BATCH_AXES


@pytest.mark.slow
@pytest.mark.parametrize("where", ["context", "variables"])
def test_decoding_on_explicit_axes_equals_decoding_without_a_mesh(where):
    model = tiny.build(num_layers=1)
    variables = tiny.weights(model, 0)
    tokens, _ = inputs_of(model)
    prompts = tokens[:, :3].tolist()

    def decode(variables, tokens):
        greedy = jf.generate(
            model, variables, prompts, max_new_tokens=4, sampler=jf.Sampler(temperature=0.0)
        )
        beams = jf.beam_search(model, variables, prompts, max_new_tokens=3, beam_width=2)
        seen = jf.inspect(model, variables, tokens, capture=("block.output",))
        cache = jf.init_cache(model, variables, BATCH, 8)
        logits, _ = jf.extend(model, jf.pack_weights(model, variables), tokens[:, :4], cache)
        scores = jf.score(model, variables, tokens)
        return [greedy.tokens, beams.tokens, seen.captured["block.output"], logits, scores]

    wanted = decode(variables, tokens)
    context, variables, tokens = placed(model, variables, tokens, where)
    with context:
        found = decode(variables, tokens)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_training_on_explicit_axes_equals_training_without_a_mesh():
    model, optimizer = tiny.build(), optax.sgd(0.1)
    sequences = np.stack([tiny.tokens(seed, BATCH, LENGTH + 1) for seed in (0, 1)]).astype(np.int32)

    def losses(place):
        state = init_state(model, optimizer, 0)
        state = state._replace(params=place(state.params))
        step, found = make_step(model, optimizer), []
        for _ in range(3):
            state, measured = step(state, Batch(sequences[..., :-1], sequences[..., 1:]))
            found.append(float(measured.loss))
        return found

    wanted = losses(lambda params: params)
    with jax.set_mesh(mesh()):
        found = losses(lambda params: jax.device_put(params, shardings(params, model, mesh())))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
def test_losses_on_explicit_axes_equal_those_without_a_mesh():
    """Of `jaxformer train`, of its verbs, and of a user's objective."""
    model = tiny.build(num_layers=1)
    variables = tiny.weights(model, 0)
    sequences = jnp.asarray(tiny.tokens(0, BATCH, LENGTH + 1), jnp.int32)

    def scores(variables, sequences):
        batch = Batch(sequences[:, :-1], sequences[:, 1:])
        task = OwnBatches(CrossEntropy(label_smoothing=0.1), None, [batch])
        own = task.score(model, variables, whole=True)
        return [own.loss, *evaluate(model, variables, [batch], correct=True)]

    wanted = scores(variables, sequences)
    for where in WHERE:
        context, placed_variables, placed_sequences = placed(model, variables, sequences, where)
        with context:
            np.testing.assert_allclose(
                scores(placed_variables, placed_sequences), wanted, rtol=1e-5
            )


@pytest.mark.rare
def test_results_on_explicit_axes_of_eight_devices_equal_those_without_a_mesh():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "16"}
    words = [
        "-m",
        "pytest",
        "-n0",
        "-q",
        "-k",
        "decoder or decoding or training or losses",
        __file__,
    ]
    done = subprocess.run(
        [sys.executable, *words, "-m", ""], env={**os.environ, **flags}, timeout=600
    )
    assert done.returncode == 0
