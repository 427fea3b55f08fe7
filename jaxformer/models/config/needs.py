"""Conditions under which a field has an effect.

A dataclass of settings declares them as `needs`: the conditions of a field, all of which must hold.
The command line refuses a flag whose conditions do not hold, because nothing would read it.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxformer.models.config.check import entries

Values = Mapping[str, Any]  # of fields, by name


class Need(NamedTuple):
    """A condition on the values of fields.

    Attributes:
        fields: the names of the fields that decide.
        holds: returns whether the condition holds for these values of fields.
        text: the flags that fulfil the condition.
    """

    fields: tuple[str, ...]
    holds: Callable[[Values], bool]
    text: str


Needs = Mapping[str, tuple[Need, ...]]


def is_one_of(field: str, *accepted: Any) -> Need:
    """Returns the need that the field, or an entry of its pattern, has one of these values."""
    text = f"{flag_of(field)} {' or '.join(map(str, accepted))}"
    if accepted in ((None,), (False,)):
        text = f"no {flag_of(field)}"
    elif accepted == (True,):
        text = flag_of(field)
    return Need((field,), lambda given: any(x in accepted for x in entries(given.get(field))), text)


def is_given(field: str) -> Need:
    """Returns the need that the field is not None."""
    return Need((field,), lambda given: given.get(field) is not None, flag_of(field))


def is_above(field: str, bound: int) -> Need:
    """Returns the need that the field, or an entry of its pattern, exceeds a bound.

    The need also holds for None, a value that is not known yet.
    """

    def holds(given: Values) -> bool:
        return any(x is None or x > bound for x in entries(given.get(field)))

    return Need((field,), holds, f"{flag_of(field)} above {bound}")


def any_of(*needs: Need) -> Need:
    """Returns the need that at least one of several needs holds."""
    text = ", or ".join(need.text for need in needs)
    return Need(_fields(needs), lambda given: any(need.holds(given) for need in needs), text)


def all_of(*needs: Need) -> Need:
    """Returns the need that all of several needs hold."""
    text = " and ".join(need.text for need in needs)
    return Need(_fields(needs), lambda given: all(need.holds(given) for need in needs), text)


def _fields(needs: tuple[Need, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for need in needs for name in need.fields))


def flag_of(field: str) -> str:
    """Returns the flag of a field."""
    return f"--{field.replace('_', '-')}"


def check_read(needs: Needs, values: Mapping[str, Any], given: Collection[str]) -> None:
    """Checks that something reads each field that the user set.

    Args:
        needs: The conditions of each field.
        values: The values of all fields by name.
        given: The names of the fields that the user set.

    Raises:
        ValueError: A condition of such a field does not hold.
    """
    for name in given:
        for need in needs.get(name, ()):
            if not need.holds(values):
                known = [x for x in need.fields if values.get(x) is not None]
                found = f" ({flag_of(known[0])} is {values[known[0]]})" if len(known) == 1 else ""
                raise ValueError(f"{flag_of(name)} has no effect here; it needs {need.text}{found}")
