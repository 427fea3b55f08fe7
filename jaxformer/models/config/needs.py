"""Conditions under which a field has an effect.

A dataclass of settings declares them as `needs`: the conditions of a field, all of which must hold.
The command line refuses a flag whose conditions do not hold, because nothing would read it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.models.config.check import entries


class Need(ABC):
    """A condition on the values of fields. Its text says which flags fulfil it."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """The names of the fields that decide."""

    @abstractmethod
    def holds(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the condition holds for these values of fields by name."""

    @abstractmethod
    def __str__(self) -> str:
        """Returns the flags that fulfil the condition."""


Needs = Mapping[str, tuple[Need, ...]]


@dataclass(frozen=True)
class _OfField(Need):
    """A condition on one field."""

    field: str

    @property
    def fields(self) -> tuple[str, ...]:
        """See `Need`."""
        return (self.field,)


@dataclass(frozen=True, init=False)
class Is(_OfField):
    """The field, or an entry of its pattern, has one of these values."""

    values: tuple

    def __init__(self, field: str, *values: Any):
        """Stores the field's name and the accepted values."""
        object.__setattr__(self, "field", field)
        object.__setattr__(self, "values", values)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """See `Need`."""
        return any(value in self.values for value in entries(values.get(self.field)))

    def __str__(self) -> str:
        """See `Need`."""
        if self.values in ((None,), (False,)):
            return f"no {flag_of(self.field)}"
        if self.values == (True,):
            return flag_of(self.field)
        return f"{flag_of(self.field)} {' or '.join(map(str, self.values))}"


@dataclass(frozen=True)
class Has(_OfField):
    """The field is this value, or a pattern with it as an entry."""

    value: Any

    def holds(self, values: Mapping[str, Any]) -> bool:
        """See `Need`."""
        found = values.get(self.field)
        return self.value in (found if isinstance(found, tuple) else (found,))

    def __str__(self) -> str:
        """See `Need`."""
        return f"{self.value} in {flag_of(self.field)}"


@dataclass(frozen=True)
class Given(_OfField):
    """The field is not None."""

    def holds(self, values: Mapping[str, Any]) -> bool:
        """See `Need`."""
        return values.get(self.field) is not None

    def __str__(self) -> str:
        """See `Need`."""
        return flag_of(self.field)


@dataclass(frozen=True)
class Above(_OfField):
    """The field, or an entry of its pattern, exceeds a bound, or is None and so not known yet."""

    bound: int

    def holds(self, values: Mapping[str, Any]) -> bool:
        """See `Need`."""
        return any(x is None or x > self.bound for x in entries(values.get(self.field)))

    def __str__(self) -> str:
        """See `Need`."""
        return f"{flag_of(self.field)} above {self.bound}"


class _OfNeeds(Need):
    """A condition on several conditions."""

    def __init__(self, *needs: Need):
        """Stores the conditions."""
        self.needs = needs

    @property
    def fields(self) -> tuple[str, ...]:
        """See `Need`."""
        return tuple(dict.fromkeys(name for need in self.needs for name in need.fields))


class AnyOf(_OfNeeds):
    """At least one of the conditions holds."""

    def holds(self, values: Mapping[str, Any]) -> bool:
        """See `Need`."""
        return any(need.holds(values) for need in self.needs)

    def __str__(self) -> str:
        """See `Need`."""
        return ", or ".join(map(str, self.needs))


class AllOf(_OfNeeds):
    """All conditions hold."""

    def holds(self, values: Mapping[str, Any]) -> bool:
        """See `Need`."""
        return all(need.holds(values) for need in self.needs)

    def __str__(self) -> str:
        """See `Need`."""
        return " and ".join(map(str, self.needs))


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
                raise ValueError(f"{flag_of(name)} has no effect here; it needs {need}{found}")
