"""Flags of a command line, made from the fields of dataclasses.

A parameter of a script's main function whose type is a dataclass stands for one flag a field. The
flag has the field's name, type and default; its help text is the "help" of the field's metadata.
`flags_of` chooses among the fields and changes their flags:

    def main(sampling: Annotated[SamplingParams, flags_of(SamplingParams, "seed", n=Flag(2))]): ...

A tuple, or a Sequence of numbers, is written with commas between its items. A list, or a Sequence
of strings (which may contain commas), is written by repeating the flag, and a Mapping as JSON.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from jaxspec.config import ConfigError

T = TypeVar("T")
Given = Mapping[str, Any]  # values by field name, as **keywords of whatever takes those fields
Hint = Any  # a type as typing spells it: a class, a union, a generic alias


def flag(
    default: T,
    help: str,
    *names: str,
    among: Sequence[str] | None = None,
    least: int | None = None,
) -> T:
    """Return a dataclass field for a script's own options.

    names: in place of the field's own. among: the only names that a tuple of strings may hold.
    least: the smallest value of an integer, or of each integer of a tuple.
    """
    metadata = {"help": help, "names": names, "among": among, "least": least}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Flag:
    """Changes to a field's flag: its default, help text and names; what is left out stays."""

    default: object = ...
    help: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlagGroup:
    """The flags of some fields of a dataclass.

    builds: whether main gets an instance, or a mapping with the fields that have a value.
    """

    owner: type
    field_names: tuple[str, ...]
    changes: Mapping[str, Flag]
    builds: bool

    def flags(self) -> Iterator[FieldFlag]:
        """The flags in the order of the fields."""
        hints = get_type_hints(self.owner)
        for each in fields(self.owner):
            if each.name not in self.field_names:
                continue
            change, about = self.changes.get(each.name, Flag()), each.metadata
            default = each.default if each.default is not MISSING else None
            text = change.help or about["help"]
            if change.default is not ...:
                default = change.default
            elif not self.builds:
                if default is not None and not change.help:
                    text = f"{text} [default: {default}]"
                default = None  # not given
            yield FieldFlag(
                each.name,
                change.names or tuple(about.get("names", ())),
                hints[each.name],
                default,
                text,
                about.get("among"),
                about.get("least"),
            )

    def read(self, values: Given) -> object:
        """Return what main gets for the values of these flags; ConfigError for a wrong one."""
        found = {
            each.field: each.read(values[each.field])
            for each in self.flags()
            if values[each.field] is not None
        }
        return self.owner(**found) if self.builds else found


def flags_of(
    owner: type, *names: str, leaving_out: Sequence[str] | None = None, **changes: Flag
) -> FlagGroup:
    """Mark a parameter as an instance of `owner`, with flags for its named or changed fields.

    leaving_out: makes flags for every field but these.
    """
    if leaving_out is not None:
        names = tuple(f.name for f in fields(owner) if f.name not in leaving_out)
    return FlagGroup(owner, _unique(*names, *changes), changes, builds=True)


def given_of(owner: type, *names: str, **changes: Flag) -> FlagGroup:
    """Mark a parameter as Given: the named or changed fields of `owner` that have a value.

    A field has one if its flag is on the command line, or if its change sets a default.
    """
    return FlagGroup(owner, _unique(*names, *changes), changes, builds=False)


def _unique(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class FieldFlag:
    """One field's flag. default: None where it has none, or where that is to be told apart."""

    field: str
    names: tuple[str, ...]
    hint: Hint
    default: object
    help: str
    among: Sequence[str] | None
    least: int | None

    def parameter(self, name: str) -> inspect.Parameter:
        """The parameter of this name that typer makes the flag from."""
        kind, _ = self._reading()
        default = self.default
        if kind is str and isinstance(default, Sequence) and not isinstance(default, str):
            default = ",".join(map(str, default)) or None
        elif isinstance(default, Mapping | Sequence) and not default:
            default = None
        least = self.least if kind is int else None
        option = typer.Option(*self._names(), help=self.help, show_default=True, min=least)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind | None if default is None else kind, option],
        )

    def read(self, value: object) -> object:
        """The field's value of what typer has read."""
        _, parse = self._reading()
        return value if parse is None else parse(str(value))

    def _names(self) -> tuple[str, ...]:
        name = f"--{self.field.replace('_', '-')}"
        if self.names:
            return self.names
        switch = self._reading()[0] is bool and self.default is not False
        return (f"{name}/--no-{name[2:]}" if switch else name,)

    def _reading(self) -> tuple[Hint, Callable[[str], object] | None]:
        """The type that typer reads, and what makes the field's value of it (None: it is that)."""
        union = get_origin(self.hint) in (Union, UnionType)
        members = [m for m in (get_args(self.hint) if union else (self.hint,)) if m is not NoneType]
        kind = members[-1]  # the sequence of `str | Sequence[str]`
        origin, items = get_origin(kind), get_args(kind)
        name = (self.names or (f"--{self.field.replace('_', '-')}",))[0]
        if origin is Literal:
            return str, None
        if origin is list or (origin is Sequence and items[0] is str):
            return list[items[0]], None
        if origin in (tuple, Sequence):
            if items[0] is str:
                return str, partial(split_names, name, known=self.among)
            if items[0] is bool:
                return str, partial(split_switches, name)
            return str, partial(split_numbers, name, kind=items[0], least=self.least)
        if origin is Mapping:
            return str, partial(parse_numbers_by_id, name)
        return kind, None


def split_names(flag: str, text: str, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """Split at the commas; ConfigError for a name that is not among the known ones."""
    names = tuple(name.strip() for name in text.split(","))
    if known is not None and (unknown := [name for name in names if name not in known]):
        raise ConfigError(f"{flag}: expected among {', '.join(known)}, got {', '.join(unknown)}")
    return names


def split_switches(flag: str, text: str) -> tuple[bool, ...]:
    """Split at the commas into true and false; ConfigError for anything else."""
    values = {"true": True, "false": False}
    parts = [part.strip().lower() for part in text.split(",")]
    if not values.keys() >= set(parts):
        raise ConfigError(f"{flag}: expected true or false, commas between them, got {text!r}")
    return tuple(values[part] for part in parts)


def split_numbers(
    flag: str, text: str, kind: type[int] | type[float], least: int | None = None
) -> tuple[float, ...]:
    """Split at the commas into numbers of this kind; ConfigError for anything else."""
    wanted = "integers" if kind is int else "numbers"
    wanted += "" if least is None else f" of at least {least}"
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or (least is not None and min(numbers) < least):
        raise ConfigError(f"{flag}: expected {wanted} with commas between them, got {text!r}")
    return numbers


def parse_numbers_by_id(flag: str, text: str) -> dict[int, float]:
    """Read a JSON object whose keys are integers; ConfigError for anything else."""
    try:
        return {int(key): value for key, value in json.loads(text).items()}
    except (AttributeError, ValueError, RecursionError) as e:
        raise ConfigError(
            f"{flag}: expected a JSON object of numbers by token id, got {text!r}"
        ) from e


def expand(main: Callable[..., None]) -> Callable[..., None]:
    """Return `main` with a keyword parameter for each flag in place of its groups of flags."""
    groups: dict[str, FlagGroup] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(main, eval_str=True).parameters.items():
        group = _group(parameter.annotation)
        if group is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            groups[name] = group
            parameters += [each.parameter(f"{name}__{each.field}") for each in group.flags()]

    def run(**values: Any) -> None:
        for name, group in groups.items():
            own = {f: values.pop(f"{name}__{f}") for f in group.field_names}
            values[name] = group.read(own)
        main(**values)

    run.__name__, run.__doc__ = main.__name__, main.__doc__
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _group(annotation: Hint) -> FlagGroup | None:
    """The group of flags that a parameter of main stands for, if any."""
    marks = [mark for mark in get_args(annotation)[1:] if isinstance(mark, FlagGroup)]
    if get_origin(annotation) is Annotated and marks:
        return marks[0]
    is_owner = isinstance(annotation, type) and is_dataclass(annotation)
    return flags_of(annotation, leaving_out=()) if is_owner else None
