"""Options of a file, read through a closed schema: every one must be asked for, or be known to be
harmless."""

import math
from typing import Any

_REQUIRED = object()


class Options:
    """The options of one file; each `take` marks one as read. Errors name the file and the key.

    tensors: the names of those that stand beside it.
    """

    def __init__(self, options: dict, file, tensors=()):
        self.options, self.file, self.tensors = options, file, tensors
        self.taken = set()

    def __contains__(self, key) -> bool:
        return self.options.get(key) is not None

    def error(self, key, accepted) -> ValueError:
        return ValueError(f"{self.file}: {key} is {self.options.get(key)!r}; {accepted}")

    def take(self, key, default: Any = _REQUIRED):
        """The option as it is; None, or no option at all, is the default."""
        self.taken.add(key)
        value = self.options.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.file}: {key} is missing")
        return default

    def whole(self, key, default=_REQUIRED, least: int = 0):
        """A whole number of at least so much; nothing absurd, which would only fail later."""
        value = self.take(key, default)
        if value is default:
            return value
        if type(value) is not int or not least <= value <= 2**31:
            raise self.error(key, f"it must be a whole number in {least} … 2³¹")
        return value

    def number(self, key, default=_REQUIRED):
        value = self.take(key, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(key, "it must be a number")
        return float(value)

    def flag(self, key, default: bool) -> bool:
        value = self.take(key, default)
        if type(value) is not bool:
            raise self.error(key, "it must be true or false")
        return value

    def choice(self, key, choices: dict, default=_REQUIRED):
        """What the option's value stands for."""
        value = self.take(key, default)
        if type(value) not in (str, bool) or value not in choices:
            raise self.error(key, f"implemented are {', '.join(map(repr, choices))}")
        return choices[value]

    def mapping(self, key) -> dict:
        """An object; none is empty."""
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "it must be an object")
        return value

    def list_of(self, key, length: int, kind: type, default=_REQUIRED) -> list:
        """A list with an entry for each layer, at least."""
        value = self.take(key, default)
        if value is default:
            return value
        is_list = isinstance(value, list) and all(type(entry) is kind for entry in value)
        if not is_list or len(value) < length:
            raise self.error(key, f"it must be a list of {kind.__name__} of length {length}")
        return value[:length]

    def require(self, demanded: dict):
        """These options, where they are there, have the only value that is implemented."""
        for key, accepted in demanded.items():
            if self.take(key, accepted) != accepted:
                raise self.error(key, f"only {accepted!r} is implemented")

    def nothing_left(self, harmless):
        """Refuse options that nobody asked for, unless they are empty or harmless."""
        for key, value in self.options.items():
            if key in self.taken or key in harmless or value in (None, False, [], {}):
                continue
            raise self.error(key, "this option is not known here, and might change the mathematics")
