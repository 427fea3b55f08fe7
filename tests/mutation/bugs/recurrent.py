"""Recurrent states and convolutions: what they carry over, and how far they reach."""

from tests.mutation.bug import AUTOREGRESSIVE, Bug
from tests.mutation.changes import Replace, gives

JACOBIAN = f"{AUTOREGRESSIVE}::test_jacobian_is_the_composed_rule"

BUGS = (
    Bug(
        "the state goes on into the next document",
        "functional.recurrent:read",
        Replace("valid & (positions == 0)", "None"),
        JACOBIAN,
    ),
    Bug(
        "padding moves the state",
        "functional.recurrent:recurrent_layer.step",
        Replace(
            "tuple(jnp.where(valid[:, None], *parts) for parts in zip(new, state, strict=True))",
            "new",
        ),
        f"{AUTOREGRESSIVE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "a kernel reaches one ahead",
        "functional.convolution:kernel_offsets",
        Replace("-(kernel_size - 1)", "-(kernel_size - 2)"),
        f"{AUTOREGRESSIVE}::test_another_input_changes_nothing_beyond_the_rule",
    ),
    Bug(
        "every layer has the first one's dilation",
        "functional.convolution:layer_offsets",
        Replace("config.dilation_growth**layer", "1"),
        JACOBIAN,
    ),
    Bug(
        "a kernel reaches into the document before",
        "functional.convolution:convolution",
        Replace("same & (here != 0)", "here != 0"),
        JACOBIAN,
    ),
    Bug(
        "the last inputs kept are those of padding",
        "functional.convolution:Row.newest",
        lambda newest: lambda self, x, reach: x[:, x.shape[1] - reach :],
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "a centred convolution may generate",
        "models.convolutional:Convolutional.unsupported_reason",
        gives(None),
        f"{AUTOREGRESSIVE}::test_a_centred_convolution_sees_what_is_to_come",
    ),
)
