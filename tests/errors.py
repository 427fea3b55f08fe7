"""Access to error messages."""

import pytest


def error_of(call, *arguments):
    """Asserts that the call raises a ValueError with a one-line message, and returns the
    message."""
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
