"""Bugs of recurrent states and convolutions."""

from tests.mutation.bug import AUTOREGRESSIVE, Bug
from tests.mutation.changes import Replace, having, takes, then

JACOBIAN = f"{AUTOREGRESSIVE}::test_jacobian_is_nonzero_exactly_where_output_may_depend_on_input"


BUGS = (
    Bug(
        "the state continues into the next document",
        "functional.layers.recurrent:Recurrent.context",
        then(lambda context: (context[0]._replace(begins=None), context[1])),
        f"{JACOBIAN}[rnn]",
    ),
    Bug(
        "padding moves the state",
        "functional.layers.recurrent:recurrent_layer.step",
        Replace(
            "tuple(jnp.where(valid[:, None], *part) for part in parts)",
            "new",
        ),
        f"{AUTOREGRESSIVE}::test_packed_document_has_the_logits_of_a_separate_document[rnn]",
    ),
    Bug(
        "a causal kernel reaches one position ahead",
        "functional.layers.convolution:causal_offsets",
        then(lambda offsets: tuple(x + 1 for x in offsets)),
        f"{AUTOREGRESSIVE}::test_changed_input_leaves_independent_outputs_bitwise_equal",
    ),
    Bug(
        "every layer has the first layer's dilation",
        "functional.layers.convolution:causal_offsets",
        takes(dilation=lambda _: 1),
        JACOBIAN,
    ),
    Bug(
        "a kernel reaches into the previous document",
        "functional.layers.convolution:convolution",
        Replace("positions >= -offset", "positions >= 0"),
        f"{JACOBIAN}[cnn]",
    ),
    Bug(
        "the cached inputs include padding",
        "functional.layers.convolution:Convolution.__call__",
        Replace(
            "order.newest(x, first, after_each=at.keeps_states)",
            "x[:, -first:]",
        ),
        f"{AUTOREGRESSIVE}::test_logits_of_cached_chunks_equal_single_pass[cnn]",
    ),
    Bug(
        "a centred convolution may generate",
        "models.autoregressive:unsupported_reason",
        takes(model=having(layers=None)),
        f"{AUTOREGRESSIVE}::test_centred_convolution_is_not_causal",
    ),
)
