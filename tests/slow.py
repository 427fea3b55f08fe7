"""Marks the cases of a parametrized test as slow or rare.

Rare cases are variations of the quick and slow cases, so `.ci/run` omits them.
"""

import pytest


def mostly_slow(cases, *quick, slow=()):
    """Returns pytest parameters for all cases. Cases outside `quick` are marked slow or rare.

    The cases in `slow` and the last case are slow, and the remaining cases are rare.
    """
    cases = list(cases)  # an iterator is consumed only once
    others = [case for case in cases if case not in quick]
    slow = [*slow, *others[-1:]]
    marks = [
        () if case in quick else pytest.mark.slow if case in slow else pytest.mark.rare
        for case in cases
    ]
    return [_parameter(case, mark) for case, mark in zip(cases, marks, strict=True)]


def mostly_rare(cases, *slow):
    """Returns pytest parameters for all cases of a slow test. Cases outside `slow` are rare."""
    return [_parameter(case, () if case in slow else pytest.mark.rare) for case in cases]


def _parameter(case, marks):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
