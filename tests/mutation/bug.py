"""A bug of the catalogue: one that a Transformer library shipped, or one that a property catches.

A comment beside a shipped bug names the issue.
"""

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.mutation import syntax
from tests.mutation.changes import Replace

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Bug:
    """A change to the package and the tests that must fail with it.

    Attributes:
        name: a description of the bug.
        target: "module below jaxformer:qualified name".
        change: makes the broken target from the sound one.
        tests: node ids below tests/, separated by spaces.
    """

    name: str
    target: str
    change: Callable | Replace
    tests: str

    @property
    def path(self) -> Path:
        """The file that contains the target."""
        module = PROJECT / "jaxformer" / self.target.partition(":")[0].replace(".", "/")
        return module / "__init__.py" if module.is_dir() else module.with_suffix(".py")

    def source(self) -> str:
        """Returns the file's text with the bug. LookupError: the bug no longer fits the code."""
        tree = ast.parse(self.path.read_text())
        try:
            self._put_into(syntax.definition(tree, self.target.partition(":")[2]))
        except LookupError as error:
            raise LookupError(f"{self.name}, {self.target}: {error}") from None
        return ast.unparse(ast.fix_missing_locations(tree))

    def _put_into(self, node) -> None:
        if isinstance(self.change, Replace):
            return syntax.replace(node, self.change.old, self.change.new)
        syntax.check_names(node, getattr(self.change, "names", ()))
        # When the module runs, it looks up the change by the bug's name.
        found = f'__import__("tests.mutation.bugs").mutation.bugs.change_of({self.name!r})'
        change = ast.parse(found, mode="eval").body
        if isinstance(node, ast.FunctionDef):  # innermost, below jit, property or classmethod
            node.decorator_list.append(change)
        elif isinstance(node, ast.ClassDef):
            raise LookupError("it is a class; name one of its methods")
        else:
            node.value = ast.Call(change, [node.value], [])


def environment(bug) -> dict[str, str]:
    """Returns an environment in which a process and its children import the broken file.

    Python runs site/sitecustomize.py first, which replaces the source. Bytecode of all other files
    is stored, because otherwise each of hundreds of processes would compile them again.
    """
    folders = (Path(__file__).parent / "site", PROJECT)
    return {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(PROJECT / ".pytest_cache" / "bytecode"),
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "JAXFORMER_BROKEN_FILE": str(bug.path),
        "JAXFORMER_BROKEN_SOURCE": bug.source(),
    }


# Paths and node ids that several files of the catalogue use.
DEPENDENCY = "properties/test_dependency.py"
INVARIANCE = "properties/test_invariance.py"
ATTENTION = "functional/attention/test_attention.py"
OWN_MASK = "models/test_own_mask.py"
TABLES = "functional/attention/test_attention_tables.py"
LONG_SEQUENCES = "functional/attention/test_blockwise.py"
CHUNKING = "decoding/test_chunking.py"
KERNELS = "functional/linear/test_kernels.py"
GENERATION = "decoding/test_generation.py"
NONFINITE = "decoding/test_nonfinite.py::test_nan_weights_raise_error_that_names_the_weights"
PREPARED = "decoding/test_prepared.py"
INSPECT = "decoding/test_inspect.py"
REWIND = "decoding/test_rewind.py"
REAL_SIZES = "decoding/test_real_sizes.py"
AUTOREGRESSIVE = "decoding/test_autoregressive.py"
DISCIPLINE = "properties/test_discipline.py"
JACOBIAN = f"{DEPENDENCY}::test_nonzero_jacobian_entries_match_masks_composed_over_layers"
PERTURBED = f"{DEPENDENCY}::test_changing_an_input_changes_only_the_outputs_that_depend_on_it"
ONE_DOCUMENT = f"{DEPENDENCY}::test_skipping_masked_key_blocks_does_not_change_dependencies"
OPTIONS = f"{DEPENDENCY}::test_capturing_attention_weights_or_using_dropout_adds_no_dependencies"
FORMULA = f"{ATTENTION}::test_attention_equals_formula_for_every_mask"
STEP = "training/test_step.py"
LOSSES = "functional/losses/test_losses.py"
