"""Bugs of recurrent states and convolutions."""

from tests.mutation.bug import AUTOREGRESSIVE, Bug
from tests.mutation.changes import Replace

JACOBIAN = f"{AUTOREGRESSIVE}::test_jacobian_is_the_composed_rule"

BUGS = (
    Bug(
        "the state continues into the next document",
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
        "a causal kernel reaches one position ahead",
        "functional.convolution:kernel_offsets",
        Replace("-(kernel_size - 1)", "-(kernel_size - 2)"),
        f"{AUTOREGRESSIVE}::test_another_input_changes_nothing_beyond_the_rule",
    ),
    Bug(
        "every layer has the first layer's dilation",
        "functional.convolution:layer_offsets",
        Replace("config.dilation_growth**layer", "1"),
        JACOBIAN,
    ),
    Bug(
        "a kernel reaches into the previous document",
        "functional.convolution:convolution",
        Replace("same & (here != 0)", "here != 0"),
        JACOBIAN,
    ),
    Bug(
        "the cached inputs include padding",
        "functional.convolution:_newest",
        lambda newest: lambda x, reach, documents: x[:, x.shape[1] - reach :],
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "a centred convolution may generate",
        "models.language_model:LanguageModel.unsupported_reason",
        Replace("not self.config.causal", "False"),
        f"{AUTOREGRESSIVE}::test_a_centred_convolution_sees_what_is_to_come",
    ),
)
