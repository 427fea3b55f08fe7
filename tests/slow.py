"""Chooses the cases of a test that are marked slow or rare.

Rare cases vary what the quick and slow cases test, so `.ci/run` leaves them out.
"""

import pytest


def mostly_slow(cases, *quick, slow=()):
    """Returns pytest parameters for all cases; those that are not `quick` are slow or rare.

    Of the others, those in `slow` and the last one are slow, and the rest are rare.
    """
    cases = list(cases)  # they may be an iterator
    others = [case for case in cases if case not in quick]
    slow = [*slow, *others[-1:]]
    marks = [
        () if case in quick else pytest.mark.slow if case in slow else pytest.mark.rare
        for case in cases
    ]
    return [_parameter(case, mark) for case, mark in zip(cases, marks, strict=True)]


def mostly_rare(cases, *slow):
    """Returns pytest parameters for all cases of a slow test; all but `slow` are rare."""
    return [_parameter(case, () if case in slow else pytest.mark.rare) for case in cases]


def _parameter(case, marks):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
