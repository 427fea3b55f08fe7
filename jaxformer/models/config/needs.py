"""Conditions under which a config field or flag has an effect.

A dataclass of settings declares the conditions of its fields in `needs`. All conditions of a field
must hold. The command line rejects a flag whose conditions do not hold, because the flag would be
ignored.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxformer.models.config.check import entries

# {config field: value}.
Values = Mapping[str, Any]


class Spelling(NamedTuple):
    """Annotation of a field whose flag is not spelled --field VALUE.

    Attributes:
        name: name of the flag; the name of the field if empty.
        short: second name of the flag, such as -o.
        placeholder: placeholder of the value in the help.
        is_positional: whether the value is a positional argument.
        is_repeated: whether each occurrence of the flag adds a value to a tuple.
        has_negation: whether a bool has a flag --no-….
    """

    name: str = ""
    short: str = ""
    placeholder: str = ""
    is_positional: bool = False
    is_repeated: bool = False
    has_negation: bool = True


class Need(NamedTuple):
    """A condition on the values of fields.

    Attributes:
        fields: the names of the fields in the condition.
        holds: function of the fields' values that returns whether the condition holds.
        text: the condition in terms of command-line flags, for messages.
    """

    fields: tuple[str, ...]
    holds: Callable[[Values], bool]
    text: str


Needs = Mapping[str, tuple[Need, ...]]


def is_one_of(field: str, *accepted: Any) -> Need:
    """Returns the condition that the field has one of the `accepted` values.

    If the field has one value per layer, the condition holds if any layer's value is accepted.
    """
    text = f"{spell_flag(field)} {' or '.join(map(str, accepted))}"
    if accepted in ((None,), (False,)):
        text = f"no {spell_flag(field)}"
    elif accepted == (True,):
        text = spell_flag(field)
    return Need((field,), lambda given: any(x in accepted for x in entries(given.get(field))), text)


def is_given(field: str) -> Need:
    """Returns the condition that the field is not None."""
    return Need((field,), lambda given: given.get(field) is not None, spell_flag(field))


def is_above(field: str, bound: int) -> Need:
    """Returns the condition that the field exceeds a bound.

    If the field has one value per layer, the condition holds if any layer's value exceeds the
    bound. The condition also holds for None, which is later replaced by a default.
    """

    def holds(given: Values) -> bool:
        return any(x is None or x > bound for x in entries(given.get(field)))

    return Need((field,), holds, f"{spell_flag(field)} above {bound}")


def any_of(*needs: Need) -> Need:
    """Returns the condition that at least one of several conditions holds."""
    text = ", or ".join(need.text for need in needs)
    return Need(_fields(needs), lambda given: any(need.holds(given) for need in needs), text)


def all_of(*needs: Need) -> Need:
    """Returns the condition that all of several conditions hold."""
    text = " and ".join(need.text for need in needs)
    return Need(_fields(needs), lambda given: all(need.holds(given) for need in needs), text)


def _fields(needs: tuple[Need, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for need in needs for name in need.fields))


def spell_flag(field: str) -> str:
    """Returns the command-line flag of a field."""
    return f"--{field.replace('_', '-')}"


def check_read(needs: Needs, values: Mapping[str, Any], given: Collection[str]) -> None:
    """Checks that each field that the user set has an effect.

    Args:
        needs: The conditions of each field.
        values: The values of all fields by name.
        given: The names of the fields that the user set.

    Raises:
        ValueError: A field that the user set has no effect, because a condition does not hold.
    """
    for name in given:
        for need in needs.get(name, ()):
            if not need.holds(values):
                known = [x for x in need.fields if values.get(x) is not None]
                found = (
                    f" ({spell_flag(known[0])} is {values[known[0]]})" if len(known) == 1 else ""
                )
                raise ValueError(
                    f"{spell_flag(name)} has no effect here; it needs {need.text}{found}"
                )
