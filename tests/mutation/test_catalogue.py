"""The bugs of the catalogue still fit the code; `python -m tests.mutation` sees them killed."""

import ast

import pytest

from jaxformer.verify import PROPERTIES
from tests.mutation.bugs import BUGS
from tests.mutation.certified import TOLD
from tests.mutation.copies import patched


def test_names_are_unique():
    names = {bug.name for bug in BUGS}
    assert len(names) == len(BUGS)
    assert TOLD.keys() <= names and set(TOLD.values()) <= PROPERTIES.keys()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_fits_the_code_and_is_python(bug):
    ast.parse(patched(bug))
