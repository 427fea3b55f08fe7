"""Recurrent states and convolutions: what they carry over, and how far they reach."""

from tests.mutation.quoted import AUTOREGRESSIVE, Bug

RECURRENT, CONVOLUTION = "functional/recurrent.py", "functional/convolution.py"
JACOBIAN = f"{AUTOREGRESSIVE}::test_jacobian_is_the_composed_rule"

BUGS = (
    Bug(
        "the state goes on into the next document",
        RECURRENT,
        "        begins = valid & (positions == 0)\n",
        "        begins = None\n",
        JACOBIAN,
    ),
    Bug(
        "padding moves the state",
        RECURRENT,
        "        state = tuple(jnp.where(valid[:, None], *parts) for parts in zip(new, state, strict=True))",
        "        state = new",
        f"{AUTOREGRESSIVE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "a kernel reaches one ahead",
        CONVOLUTION,
        "    first = -(kernel_size - 1) if causal",
        "    first = -(kernel_size - 2) if causal",
        f"{AUTOREGRESSIVE}::test_another_input_changes_nothing_beyond_the_rule",
    ),
    Bug(
        "every layer has the first one's dilation",
        CONVOLUTION,
        "config.dilation_growth**layer",
        "1",
        JACOBIAN,
    ),
    Bug(
        "a kernel reaches into the document before",
        CONVOLUTION,
        "jnp.where((same & (here != 0))[..., None], tap, 0)",
        "jnp.where((here != 0)[..., None], tap, 0)",
        JACOBIAN,
    ),
    Bug(
        "the last inputs kept are those of padding",
        CONVOLUTION,
        "        return _take(x, count + jnp.arange(reach))",
        "        return x[:, x.shape[1] - reach :]",
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "a centred convolution may generate",
        "models/convolutional.py",
        "        return None if self.config.causal else",
        "        return None if self.config.num_layers else",
        f"{AUTOREGRESSIVE}::test_a_centred_convolution_sees_what_is_to_come",
    ),
)
