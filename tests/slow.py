"""Which cases run at every change, and which with `-m slow` alone."""

import pytest


def mostly_slow(cases, *quick):
    """pytest parameters of all the cases; those that are not `quick` are marked slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]
