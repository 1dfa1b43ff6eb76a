"""What every section of the configuration shares: type and range checks that report all problems at once."""

import dataclasses
import json
import math
import sys
import types
from fractions import Fraction
from typing import Any, List, Literal, Optional, Union, get_args, get_origin, get_type_hints

from megatron_fbt.errors import ConfigError


def describe_type(hint: Any) -> str:
    """Name a field's type for a reader, e.g. `integer`, `list of number`, `one of rms, none`, `integer or null`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "null"
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(arg) for arg in args)
    if origin is list:
        return f"list of {describe_type(args[0])}"
    if origin is dict:
        return f"{{{describe_type(args[0])}: {describe_type(args[1])}}}"
    if dataclasses.is_dataclass(hint):
        fields = (f"{name}: {describe_type(kind)}" for name, kind in get_type_hints(hint).items())
        return "{" + ", ".join(fields) + "}"
    names = {int: "integer", float: "number", bool: "true or false", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def show(value: Any) -> str:
    """Write a value as a user would in YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a field; true and false are no numbers, an integer is also a number."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin in (Union, types.UnionType):
        return any(has_type(value, arg) for arg in args)
    if origin is list:
        return isinstance(value, list) and all(has_type(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            has_type(key, args[0]) and has_type(item, args[1]) for key, item in value.items()
        )
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def raise_problems(problems: List[str]) -> None:
    """Raise one ConfigError that lists every problem; return if there is none."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} errors in the configuration:\n" + "\n".join(f"  {p}" for p in problems))


def step_at_fraction(fraction: float, train_steps: int) -> int:
    """ceil(fraction * train_steps), exact for the fraction as it is written."""
    return math.ceil(Fraction(repr(float(fraction))) * train_steps)


class Rules:
    """Collects what is wrong with the fields of one section; a field with a wrong type takes part in no other rule."""

    def __init__(self, name: str, section: Any):
        """Check the types of all fields.

        Args:
            name: dotted name of the section, as the command line spells it.
            section: the dataclass instance.
        """
        self.name = name
        self.section = section
        self.problems: List[str] = []
        self._unusable: set = set()
        hints = get_type_hints(type(section))
        for field in dataclasses.fields(section):
            if not has_type(self.value(field.name), hints[field.name]):
                self.add(field.name, "wrong type", f"give {describe_type(hints[field.name])}")
                self._unusable.add(field.name)

    def value(self, field: str) -> Any:
        """Value of a field of the section."""
        return getattr(self.section, field)

    def usable(self, *fields: str) -> bool:
        """Whether these fields have the right types and passed their rules so far."""
        return not self._unusable.intersection(fields)

    def add(self, field: str, why: str, remedy: str) -> None:
        """Record one problem."""
        self.problems.append(f"{self.name}.{field} = {show(self.value(field))}: {why}; {remedy}")
        self._unusable.add(field)

    def require(self, holds: bool, field: str, why: str, remedy: str) -> None:
        """Record a problem with `field` unless `holds`."""
        if not holds:
            self.add(field, why, remedy)

    def integers(self, *fields: str, low: int = 1, high: Optional[int] = None) -> None:
        """Refuse integers outside low..high; null passes where the type allows it."""
        for field in fields:
            value = self.value(field)
            if value is None or not self.usable(field):
                continue
            if value < low or (high is not None and value > high):
                limits = f"of at least {low}" if high is None else f"from {low} to {high}"
                self.add(field, "out of range", f"give an integer {limits}")

    def numbers(
        self, *fields: str, low: float = 0.0, above: bool = False, high: float = math.inf, below: bool = False
    ) -> None:
        """Refuse NaN, infinities and numbers outside low..high.

        Args:
            *fields: names of the fields.
            low: smallest number allowed; with `above` it is itself refused.
            above: whether the number must lie above `low`.
            high: largest number allowed; with `below` it is itself refused.
            below: whether the number must lie below `high`.
        """
        limits = f"{'above' if above else 'of at least'} {low:g}"
        if high != math.inf:
            limits += f" and {'below' if below else 'at most'} {high:g}"
        for field in fields:
            value = self.value(field)
            if value is None or not self.usable(field):
                continue
            inside = value > low if above else value >= low
            inside = inside and (value < high if below else value <= high)
            if not (inside and abs(value) <= sys.float_info.max):
                self.add(field, "out of range", f"give a finite number {limits}")


@dataclasses.dataclass
class Section:
    """Base of the configuration's sections; a dataclass, so that a section is one all the way up."""

    def problems(self) -> List[str]:
        """Everything that is wrong with this section by itself, one line each; each section has its own rules."""
        return []

    def validate(self) -> None:
        """Check the section by itself.

        Raises:
            ConfigError: naming each wrong field with its value and a remedy.
        """
        raise_problems(self.problems())
