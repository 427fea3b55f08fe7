"""A bug of the catalogue, as a small patch of this package: one that a Transformer library really
shipped (a comment says where it was seen), or one that a property is there to catch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """`old` stands exactly once in `file` and is replaced by `new`; then each of `tests` (node ids
    below tests/, separated by blanks) must go red."""

    name: str
    file: str
    old: str
    new: str
    tests: str


# Where the tests are.
DEPENDENCY = "properties/test_dependency.py"
INVARIANCE = "properties/test_invariance.py"
ATTENTION = "functional/test_attention.py"
OWN_MASK = "models/test_own_mask.py"
TABLES = "functional/test_attention_tables.py"
LONG_ROWS = "functional/test_blockwise.py"
CHUNKING = "decoding/test_chunking.py"
KERNELS = "functional/test_kernels.py"
GENERATION = "decoding/test_generation.py"
NONFINITE = "decoding/test_nonfinite.py::test_nan_weights_are_named_and_give_no_tokens"
PREPARED = "decoding/test_prepared.py"
REAL_SIZES = "decoding/test_real_sizes.py"
AUTOREGRESSIVE = "decoding/test_autoregressive.py"
DISCIPLINE = "properties/test_discipline.py"
JACOBIAN = f"{DEPENDENCY}::test_jacobian_is_the_composed_rule"
PERTURBED = f"{DEPENDENCY}::test_another_input_changes_the_composed_rule"
ONE_DOCUMENT = f"{DEPENDENCY}::test_a_row_of_one_document_skips_blocks_and_keeps_the_rule"
OPTIONS = f"{DEPENDENCY}::test_options_keep_the_mask"
FORMULA = f"{ATTENTION}::test_every_rule_is_its_formula"
STEP = "training/test_step.py"
LOSSES = "functional/test_losses.py"

# Where the bugs go.
MASKS = "functional/masks.py"
CACHE = "functional/cache.py"
ATTENTION_FILE = "functional/attention.py"
EMBEDDING = "functional/embedding.py"
BLOCKWISE = "functional/blockwise.py"
DECODER = "functional/decoder.py"
TRANSFORMER = "functional/transformer.py"
BLOCKS = "functional/blocks.py"
POSITIONS = "functional/positions.py"
LOSSES_FILE = "functional/losses.py"
