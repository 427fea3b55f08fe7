"""What an error says."""

import pytest


def error_of(call, *arguments):
    """The message, one line, of the ValueError that the call raises."""
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
