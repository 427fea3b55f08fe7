"""Marks the cases of a test that run only with `-m slow`."""

import pytest


def mostly_slow(cases, *quick):
    """Returns pytest parameters for all cases; those that are not `quick` are marked slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]
