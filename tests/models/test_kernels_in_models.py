"""Models with int8 or low-rank kernels.

Each one equals the model of the arrays that its kernels represent, in one pass, in chunks, in
generation and in scoring.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxformer as jf
from jaxformer.functional.linear.affine import quantize_all, target_kernels
from jaxformer.functional.linear.kernels import Int8Table, dense, is_kernel, quantize
from jaxformer.functional.linear.low_rank import init_low_rank
from jaxformer.functional.losses.chunked import chunked_cross_entropy
from tests.properties import tiny
from tests.properties.chunks import chunked
from tests.properties.models import MODELS
from tests.slow import mostly_rare, mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
few = settings(max_examples=max(5, settings().max_examples // 4))


def adapted(params, frozen=lambda kernel: kernel):
    """Wraps every matrix in a low-rank kernel of rank 2 whose update is not 0."""

    def adapt(kernel):
        made = init_low_rank(jax.random.key(0), frozen(kernel), 2)
        return replace(made, up=made.up + 0.1)

    return target_kernels(adapt, params)


def as_arrays(tree):
    """Replaces all kernels and tables by the arrays that they represent."""

    def array(x):
        return dense(x.T).T if isinstance(x, Int8Table) else dense(x)

    return jax.tree.map(array, tree, is_leaf=lambda x: is_kernel(x) or isinstance(x, Int8Table))


KERNELS = {
    "int8": quantize_all,
    "low rank": adapted,
    "low rank on int8": lambda params: adapted(params, quantize),
}
# Each kind of kernel with the decoder, and the combined kind with every other model.
CASES = [("decoder", kernels) for kernels in KERNELS]
CASES += [(name, "low rank on int8") for name in MODELS if name != "decoder"]


@pytest.mark.slow
@pytest.mark.parametrize("name, kernels", mostly_slow(CASES, ("lstm", "low rank on int8")))
@few
@given(seed=tiny.seeds)
def test_quantized_and_lora_kernels_give_the_results_of_dense_arrays(name, kernels, seed):
    """Compares one pass, chunks, generation and scores."""
    model = tiny.build(**MODELS[name])
    variables = {"params": KERNELS[kernels](tiny.weights(model, seed)["params"])}
    arrays = as_arrays(variables)
    tokens, source = tiny.tokens(seed, 2, 8), tiny.sources(model, seed, 2)
    read = tiny.read(model, source)
    wanted = tiny.apply(model)(arrays, tokens, **read)
    tiny.close(tiny.apply(model)(variables, tokens, **read), wanted, 2e-5)
    tiny.close(chunked(model, variables, tokens, [5, 1, 1, 1], source=source)[0], wanted, 2e-5)
    scores = (jf.score(model, x, tokens, source=source) for x in (variables, arrays))
    tiny.close(*scores, 2e-5)
    how = {"max_new_tokens": 4, "sampler": jf.Sampler(temperature=0.0), "source": source}
    found, expected = (jf.generate(model, x, tokens, **how) for x in (variables, arrays))
    same = (found.tokens == expected.tokens).all(axis=1)  # rounding may break ties differently
    tiny.close(found.log_probs[same], expected.log_probs[same], 2e-5)
    assert same.any()


@pytest.mark.slow
@pytest.mark.parametrize("kernels", mostly_rare(list(KERNELS)[1:], list(KERNELS)[-1]))
def test_lora_update_has_a_gradient_and_frozen_kernels_have_none(kernels):
    """The chunked loss gives A and B a gradient, and the frozen kernels, head included, none."""
    model = tiny.build(tie_embeddings=False)
    params = KERNELS[kernels](tiny.weights(model, 0)["params"])
    tokens, targets = tiny.tokens(0, 2, 8), jnp.asarray(tiny.tokens(1, 2, 8))
    leaves, treedef = jax.tree.flatten(params)
    floats = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32]

    def loss(learnt):
        some = dict(zip(floats, learnt, strict=True))
        own = treedef.unflatten([some.get(i, leaf) for i, leaf in enumerate(leaves)])
        hidden = model.apply({"params": own}, tokens, method="hidden_states")
        head = model.apply({"params": own}, method="head")
        return chunked_cross_entropy(hidden, head["kernel"], targets, chunk=3)

    gradients = jax.grad(loss)([leaves[i] for i in floats])
    named = jax.tree_util.tree_leaves_with_path(params)
    for i, gradient in zip(floats, gradients, strict=True):
        path = jax.tree_util.keystr(named[i][0])
        if ".frozen" in path:
            assert not np.asarray(gradient).any(), path
        elif ".down" in path or ".up" in path:
            assert np.asarray(gradient).any(), path


def test_model_error_names_parameters_that_are_missing_extra_or_misshapen():
    """A wrong shape, a missing parameter, an extra one, and a quantized table of a wrong shape."""
    model = tiny.build(num_layers=1)
    params, tokens = tiny.weights(model, 0)["params"], tiny.tokens(0, 1, 4)
    norm = params["final_norm"]
    wrong = {
        r"parameter final_norm/scale is \(3,\); for this config it must be \(8,\)": {
            "final_norm": {**norm, "scale": jnp.ones(3)}
        },
        r"parameter final_norm/bias is absent; .* \(8,\)": {"final_norm": {"scale": norm["scale"]}},
        r"parameter final_norm/shift is \(8,\); .* absent": {
            "final_norm": {**norm, "shift": jnp.ones(8)}
        },
        r"parameter embedding/tokens is \(5, 8\); .* \(13, 8\)": {
            "embedding": quantize_all({"embedding": {"tokens": jnp.ones((5, 8))}})["embedding"]
            | {"positions": params["embedding"]["positions"]}
        },
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            model.apply({"params": {**params, **change}}, tokens)
