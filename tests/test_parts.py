"""`--part K/N` divides tests and bugs into parts."""

from argparse import ArgumentTypeError

import pytest

from tests.mutation.bugs import BUGS
from tests.parts import part


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_mutation_bug_is_in_exactly_one_part_and_parts_have_similar_sizes(count):
    parts = [part(f"{k + 1}/{count}") for k in range(count)]
    members = [[one.has(bug.name) for one in parts] for bug in BUGS]
    assert {sum(row) for row in members} == {1}
    for column in zip(*members, strict=True):
        assert abs(sum(column) * count / len(BUGS) - 1) < 0.2


@pytest.mark.parametrize("text", ["2", "0/3", "4/3", "1/0", "a/b"])
def test_invalid_value_of_the_pytest_part_option_is_rejected(text):
    with pytest.raises(ArgumentTypeError, match=f"'{text}' must be K/N"):
        part(text)
