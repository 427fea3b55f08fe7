"""The updates of the optimizers, and the learning rate schedule."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.models.config import DecoderConfig
from jaxformer.models.kinds import Decoder
from jaxformer.models.parameters import init
from jaxformer.models.sharding.parameters import make_mesh
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import Schedule, clip_by_norm, is_matrix, make_optimizer
from jaxformer.training.step import init_state, make_step, state_shardings
from tests.slow import mostly_slow
from tests.training.test_step import arranged, random_batch

pytestmark = pytest.mark.usefixtures("quick_compilation")

OPTIMIZERS = ("adamw", "lion", "adafactor", "muon")
SCHEDULES = ("cosine", "linear", "warmup-stable-decay")
CONFIG = DecoderConfig(vocab_size=29, max_length=8, num_layers=2, embed_dim=16, num_heads=2)


@pytest.fixture(scope="module")
def params():
    return init(Decoder(CONFIG), jax.random.key(0))["params"]


@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, "adamw", slow=OPTIMIZERS))
def test_weight_decay_applies_to_matrices_only(name, params):
    """Stacked biases and scales have two axes, so a rule by rank would take them for matrices."""
    for path, decays in jax.tree_util.tree_leaves_with_path(is_matrix(params)):
        assert decays == (path[-1].key in ("kernel", "tokens", "positions")), path
    optimizer = make_optimizer(OptimizerConfig(optimizer=name))
    gradients = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    for (path, update), x in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True
    ):
        decayed = -0.1 * x if path[-1].key not in ("bias", "scale") else jnp.zeros_like(x)
        np.testing.assert_allclose(update, decayed, rtol=1e-5, err_msg=str(path))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_sharded_like_its_parameters(name):
    """A kernel's moments have the kernel's sharding, also in Muon's separate state."""
    mesh, optimizer = make_mesh({}), make_optimizer(OptimizerConfig(optimizer=name))
    shapes = jax.eval_shape(lambda: init_state(Decoder(CONFIG), optimizer, 0))
    where = state_shardings(Decoder(CONFIG), mesh, shapes)
    assert jax.tree.structure(where) == jax.tree.structure(shapes)
    kernel = "['blocks']['attention']['query']['kernel']"
    states = zip(
        jax.tree_util.tree_leaves_with_path(where.optimizer),
        jax.tree.leaves(shapes.optimizer),
        strict=True,
    )
    moments = {
        tuple(sharding.spec)
        for (path, sharding), x in states
        if jax.tree_util.keystr(path).endswith(kernel) and x.shape == (2, 16, 16)
    }
    assert moments == {(None, "fsdp", "tensor")}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_reduces_the_loss_at_its_default_learning_rate(name):
    """Each optimizer overfits a single batch, Lion more slowly."""
    config, model = OptimizerConfig(optimizer=name, warmup_steps=10), Decoder(CONFIG)
    optimizer, batch = make_optimizer(config), arranged(random_batch(0, [8, 5]), 1)
    state, step, losses = init_state(model, optimizer, 0), make_step(model, optimizer), []
    for rate in Schedule(config, 400).rates():
        state, measured = step(state, batch, np.float32(rate))
        losses.append(float(measured.loss))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_muon_updates_of_each_kernel_are_nearly_orthogonal():
    """The update of each kernel, alone or in a stack, has similar singular values.

    Every singular value is at least half the largest. The entries of a bias change by equal
    amounts, as in Adam.
    """
    shapes = {"kernel": (16, 24), "bias": (2, 24), "stack": {"kernel": (3, 16, 24)}}
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: type(x) is tuple)
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.ndim), x.shape), params)
    muon = make_optimizer(OptimizerConfig(optimizer="muon"))
    step, _ = muon.update(gradients, muon.init(params), params)
    for kernel in (step["kernel"], *step["stack"]["kernel"]):
        values = jnp.linalg.svd(kernel, compute_uv=False)
        assert values[-1] > 0.5 * values[0]
    sizes = jnp.abs(step["bias"])
    np.testing.assert_allclose(sizes, sizes.max(), rtol=1e-3)


@given(seed=st.integers(0, 99), size=st.sampled_from([0.0, 1e-3, 0.9, 1.1, 1e3]))
def test_gradients_are_clipped_as_optax_clips_them(seed, size):
    """Gradients below the limit are unchanged; other gradients are scaled to the limit."""
    rng = np.random.default_rng(seed)
    gradients = {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)}
    gradients = jax.tree.map(jnp.float32, gradients)
    scale = size * 2.5 / optax.tree.norm(gradients)
    gradients = jax.tree.map(lambda g: g * scale, gradients)
    ours, theirs = clip_by_norm(2.5), optax.clip_by_global_norm(2.5)
    found, expected = (clip.update(gradients, clip.init(gradients))[0] for clip in (ours, theirs))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
    norm = optax.tree.norm(found)
    np.testing.assert_allclose(norm, min(size * 2.5, 2.5), rtol=1e-5)
    assert jax.tree.structure(ours.init(gradients)) == jax.tree.structure(theirs.init(gradients))


@pytest.mark.slow
def test_explicit_learning_rates_give_the_updates_of_an_optax_schedule():
    """Steps with explicit learning rates equal optax's AdamW with a built-in schedule."""
    config, model = OptimizerConfig(warmup_steps=2, weight_decay=0.3), Decoder(CONFIG)
    schedule = Schedule(config, 6)
    inside = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            lambda count: jnp.asarray([schedule.rate(i) for i in range(6)])[count],
            config.beta1,
            config.beta2,
            weight_decay=config.weight_decay,
            mask=is_matrix,
        ),
    )
    states = []
    for optimizer, rates in ((make_optimizer(config), schedule.rates()), (inside, [1.0] * 6)):
        state, step = init_state(model, optimizer, 0), make_step(model, optimizer)
        for number, rate in enumerate(rates):
            state, _ = step(state, arranged(random_batch(number, [8, 5]), 1), np.float32(rate))
        states.append(state)
    for one, other in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", SCHEDULES)
@given(warmup=st.integers(0, 30), steps=st.integers(1, 120))
def test_learning_rate_warms_up_and_decays_to_the_final_fraction(kind, warmup, steps):
    """If the run is too short, the warm-up takes all steps except one."""
    config = OptimizerConfig(
        learning_rate=2.0, warmup_steps=warmup, final_fraction=0.25, schedule=kind
    )
    schedule = Schedule(config, steps)
    rates = [schedule.rate(step) for step in range(steps + 1)]
    warmup = min(warmup, steps - 1)
    assert rates[-1] == pytest.approx(0.5)
    falling = rates[warmup:]
    assert falling == sorted(falling, reverse=True) and 0 <= min(rates) <= max(rates) <= 2.0
    assert falling[0] == pytest.approx(2.0)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert list(schedule.rates()) == rates[:-1]
    assert schedule.done(0) == 0.0 and schedule.done(steps) == pytest.approx(1.0)


@given(warmup=st.integers(0, 999), fraction=st.floats(0, 1, exclude_min=True))
def test_decay_fraction_is_relative_to_all_steps_of_the_run(warmup, fraction):
    """`decay_fraction` is a fraction of all steps, including the warm-up.

    If the fraction exceeds the rest of the run, the decay starts at the end of the warm-up.
    """
    config = OptimizerConfig(
        schedule="warmup-stable-decay",
        decay_fraction=fraction,
        warmup_steps=warmup,
        learning_rate=1.0,
        final_fraction=0.0,
    )
    rates = list(Schedule(config, 1000).rates())
    begin = max(float(warmup), 1000 * (1 - fraction))
    points = [0, warmup, begin, 1000], [0 if warmup else 1, 1, 1, 0]
    np.testing.assert_allclose(rates, np.interp(range(1000), *points), atol=1e-9)
    by_time = Schedule(replace(config, warmup_steps=0), None, 1.0)
    for left in (0.0, 0.5 * fraction, fraction, 1.0):
        expected = min(1.0, left / fraction)
        assert by_time.rate(5, 60 * (1 - left)) == pytest.approx(expected, abs=1e-9 / fraction)


@pytest.mark.parametrize("kind", SCHEDULES)
@given(
    warmup=st.integers(1, 60),
    steps=st.sampled_from([None, 80, 200]),
    longest=st.sampled_from([1e-3, 1.0, 5.0, 70.0]),
    resumed=st.integers(0, 100),
    seed=st.integers(0, 99),
)
def test_learning_rate_changes_smoothly_however_long_updates_take(
    kind, warmup, steps, longest, resumed, seed
):
    """The rate rises by at most one step of the warm-up, even if a resumed run gets a later end.

    The rate falls at most in proportion to the fraction of the run that the last update took.
    """
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=warmup, schedule=kind)
    schedule, seconds, last, share = Schedule(config, steps, 1.0), 0.0, None, 0.0
    length = config.decay_fraction if kind == "warmup-stable-decay" else 1.0
    length = min(length, 1 - warmup / steps) if steps else length
    durations = np.random.default_rng(seed).uniform(0, longest, 200)
    for step, duration in enumerate(durations):
        if step == resumed:
            schedule = replace(schedule, minutes=2.0)
        if schedule.done(step, seconds) >= 1:
            break
        rate = schedule.rate(step, seconds, last)
        if last is None:
            assert rate == 0.0
        else:
            assert rate <= last + 2.0 / warmup * (1 + 1e-9)
            assert rate >= last - 2.0 * math.pi / 2 * share / length - 1e-9
        seconds, last = seconds + duration, rate
        share = max(1 / steps if steps else 0.0, duration / 60)


@given(steps=st.integers(2, 200), warmup=st.integers(0, 50))
def test_the_cosine_schedule_equals_optax(steps, warmup):
    config = OptimizerConfig(warmup_steps=warmup)
    warmup = min(warmup, steps - 1)
    theirs = optax.warmup_cosine_decay_schedule(
        0.0 if warmup else config.peak, config.peak, warmup, steps, 6e-5
    )
    ours = [Schedule(config, steps).rate(step) for step in range(steps + 1)]
    np.testing.assert_allclose(ours, [float(theirs(step)) for step in range(steps + 1)], rtol=1e-4)
