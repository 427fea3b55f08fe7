"""Bugs of recurrent states and convolutions."""

from dataclasses import replace

import jax.numpy as jnp

from tests.mutation.bug import AUTOREGRESSIVE, Bug
from tests.mutation.changes import Replace, having, inside, takes

JACOBIAN = f"{AUTOREGRESSIVE}::test_jacobian_is_the_composed_rule"


def reaches_further(kernel_offsets):
    def broken(kernel_size, dilation, causal):
        return tuple(x + dilation * causal for x in kernel_offsets(kernel_size, dilation, causal))

    return broken


def as_if_causal(model):
    return having(config=having(causal=True)(model.config))(model)


BUGS = (
    Bug(
        "the state continues into the next document",
        "functional.recurrent:read",
        inside("Times", lambda times: lambda begins, *others: times(None, *others)),
        f"{JACOBIAN}[rnn]",
    ),
    Bug(
        "padding moves the state",
        "functional.recurrent:recurrent_layer.step",
        Replace(
            "tuple(jnp.where(valid[:, None], *parts) for parts in zip(new, state, strict=True))",
            "new",
        ),
        f"{AUTOREGRESSIVE}::test_a_document_gives_what_it_gives_alone[rnn]",
    ),
    Bug(
        "a causal kernel reaches one position ahead",
        "functional.convolution:kernel_offsets",
        reaches_further,
        f"{AUTOREGRESSIVE}::test_another_input_changes_nothing_beyond_the_rule",
    ),
    Bug(
        "every layer has the first layer's dilation",
        "functional.convolution:layer_offsets",
        takes(config=lambda config: replace(config, dilation_growth=1)),
        JACOBIAN,
    ),
    Bug(
        "a kernel reaches into the previous document",
        "functional.convolution_rows:convolution",
        takes(documents=lambda x: None if x is None else jnp.minimum(x, 1)),
        f"{JACOBIAN}[cnn]",
    ),
    Bug(
        "the cached inputs include padding",
        "functional.convolution_rows:_newest",
        lambda newest: lambda x, reach, documents: x[:, x.shape[1] - reach :],
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass[cnn]",
    ),
    Bug(
        "a centred convolution may generate",
        "models.autoregressive:unsupported_reason",
        takes(model=as_if_causal),
        f"{AUTOREGRESSIVE}::test_a_centred_convolution_sees_what_is_to_come",
    ),
)
