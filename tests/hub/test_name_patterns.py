"""Untrusted regular expressions give the same results as `re`, in polynomial time."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.hub.name_patterns import check_pattern, fully_matches
from tests.errors import error_of

ATOMS = ["a", "b", "0", r"\.", ".", "[ab]", "[^a]", r"[\d_]", r"\d", r"\w", r"\W", "^", "$", r"\b"]
REPEATS = ["?", "*", "+", "{2}", "{1,2}", "{0,3}?", "*?", "+?", "??"]


def larger(part):
    """Returns larger expressions made of `part`: sequences, choices, groups and repeats."""
    group = st.builds("(?:{})".format, part)
    named = st.builds("({})".format, part)
    return st.one_of(
        st.builds("{}{}".format, part, part),
        st.builds("{}|{}".format, part, part),
        st.builds("{}{}".format, st.one_of(group, named), st.sampled_from(REPEATS)),
    )


PATTERNS = st.recursive(st.sampled_from(ATOMS), larger, max_leaves=6)


@given(PATTERNS, st.lists(st.text("ab0._-", max_size=6), min_size=20, max_size=20))
def test_adapter_name_pattern_matches_the_same_names_as_python_re(pattern, names):
    expected = [re.fullmatch(pattern, name) is not None for name in names]
    assert [fully_matches(pattern, name) for name in names] == expected


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*b", "(.|.)" * 40 + "b", "((a?){1000}){1000}b", "(?:" * 40 + "a" + ")*" * 40],
)
def test_adapter_name_patterns_match_in_polynomial_time(pattern):
    """Patterns on which `re` takes exponential time finish quickly, even for long names."""
    started = time.monotonic()
    fully_matches(pattern, "a" * 60 + "c")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a", "it is not a regular expression"),
        ("a{2,1}", "it is not a regular expression"),
        ("(?=a)a", "it uses the operator assert"),
        (r"(a)\1", "it uses the operator groupref"),
        ("(?i)a", "inline flags such as (?i) are not supported"),
        ("(?i:a)", "it uses the operator subpattern"),
        ("(" * 60 + ")" * 60, "nested more than 50 deep"),
        ("(" * 1500 + ")" * 1500, "it is longer than 2000 characters"),
    ],
)
def test_unsupported_adapter_name_pattern_is_rejected(pattern, words):
    assert words in error_of(check_pattern, pattern)
