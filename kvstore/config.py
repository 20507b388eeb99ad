"""Settings of a client: what they are, where each value came from, and how sizes are written.

A value comes from, strongest first: an argument of the call or command line; the environment variable KVSTORE_<NAME>,
where an empty one counts as not set; the TOML file that the argument `path` or KVSTORE_CONFIG names; the default. An
unknown name, in a file, among the arguments, or as a variable that begins with KVSTORE_, is an error (Kubernetes' own
variables for a service of the name kvstore are passed over), as is a value of the wrong kind; every error is one line
that names setting and source.

    name                kind      default        meaning
    store               text      none           URL or path of the store
    get_deadline_ms     number    5000           default deadline of get_into
    match_deadline_ms   number    1000           default deadline of match
    put_deadline_ms     number    10000          default deadline of put
    mapped              yes/no    no             read slabs through memory maps (a failing disk then ends the process)
    scrub               yes/no    no             read and check the whole store in the background, round after round
    bypass              yes/no    no             connectors of engines leave the store alone: the engine runs as without
    capacity            size      none           raw bytes of a new store over all its nodes (`kvstore init`)
    durability          word      process        what an acknowledgement promises: process or power (`kvstore init`)
    extent_bytes        size      none           bytes of an extent of a new store; none: chosen from the capacity

Sizes: digits, optionally a fraction, and a unit: B, kB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB
(powers of 1024), in any case, with or without a space; no unit means bytes. So "10GB" is 10,000,000,000 and "10GiB"
is 10,737,418,240. A size is a whole number of bytes, at least 1: "0", "-1", "abc", "1e3", "10G" (GB or GiB?), "1.5"
and "" are refused. In a TOML file an integer is bytes. Numbers of milliseconds are above 0 and at most 60,000; "1e3",
"inf" and "nan" are refused. Yes/no: true, false, yes, no, on, off, 1, 0.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Final

from efs.errors import InvalidArgument
from efs.limits import GET_DEADLINE_MS, MATCH_DEADLINE_MS, MAX_DEADLINE_MS, PUT_DEADLINE_MS

PREFIX: Final = "KVSTORE_"
PATH_VARIABLE: Final = "KVSTORE_CONFIG"
DURABILITIES: Final = ("process", "power")
UNITS: Final = {
    "": 1, "b": 1,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4, "pb": 1000**5,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4, "pib": 1024**5,
}
SIZE_PATTERN: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", re.ASCII)
NUMBER_PATTERN: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?", re.ASCII)
MAX_SIZE: Final = 2**63 - 1
MOST_DIGITS: Final = 100
"""Of a size; a longer number is out of range, or no whole number of bytes, and is not computed."""
SHOWN_CHARACTERS: Final = 120
"""Of a wrong value in an error."""
INJECTED: Final = re.compile(r"KVSTORE_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_.*)?)")
"""Set by Kubernetes in every container beside a service that is called kvstore; nobody's mistake."""
YES: Final = ("true", "yes", "on", "1")
NO: Final = ("false", "no", "off", "0")

Value = str | int | float | bool | None


class SettingError(InvalidArgument):
    """A setting is unknown or its value is wrong; the message names the setting and where it came from."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in effect: `source` is "default", "argument", "environment NAME" or "file PATH"."""

    name: str
    value: Value
    source: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Config:
    """Effective settings; see the module docstring. `Config()` is the defaults.

    `sources` holds (name, source) of each setting that is not a default. Values given to the constructor are checked
    too.
    """

    store: str | None = None
    get_deadline_ms: float = GET_DEADLINE_MS
    match_deadline_ms: float = MATCH_DEADLINE_MS
    put_deadline_ms: float = PUT_DEADLINE_MS
    mapped: bool = False
    scrub: bool = False
    bypass: bool = False
    capacity: int | None = None
    durability: str = "process"
    extent_bytes: int | None = None
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, (parse, _) in KINDS.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
                object.__setattr__(self, name, parse(value, name))

    @classmethod
    def load(cls, path: str | None = None, *, environ: Mapping[str, str] | None = None,
             arguments: Mapping[str, object] | None = None) -> Config:
        """The effective settings. environ: os.environ when None. arguments: by setting name; a value of None is not
        given."""
        variables = os.environ if environ is None else environ
        path = path or variables.get(PATH_VARIABLE) or None
        values: dict[str, Value] = {}
        sources: dict[str, str] = {}
        in_file = _read_file(path) if path is not None else {}
        given = {name: value for name, value in (arguments or {}).items() if value is not None}
        in_environment = _from_environment(variables)
        for kind, layer in ((f"file {path}", in_file), ("environment", in_environment), ("argument", given)):
            for name, value in layer.items():
                source = f"environment {PREFIX}{name.upper()}" if kind == "environment" else kind
                if name not in KINDS:
                    raise SettingError(f"{source}: unknown setting {name!r}")
                try:
                    values[name] = KINDS[name][0](value, name)
                except SettingError as error:
                    raise SettingError(f"{source}: {error}") from None
                sources[name] = source
        return replace(cls(**values), sources=tuple(sources.items()))  # type: ignore[arg-type]

    def settings(self) -> list[Setting]:
        """All settings in the order of the module docstring, each with its source."""
        defaults = {field.name: field.default for field in fields(Config)}
        known = dict(self.sources)
        rows = []
        for name, (_, meaning) in KINDS.items():
            value = getattr(self, name)
            source = known.get(name, "default" if value == defaults[name] else "argument")
            rows.append(Setting(name, value, source, meaning))
        return rows


def parse_size(text: str | int, setting: str = "size") -> int:
    """Bytes of a written size; SettingError names `setting`."""
    return _size(text, setting)


def _size(value: object, name: str) -> int:
    if type(value) is int:
        size = Fraction(value)
    elif isinstance(value, str):
        match = SIZE_PATTERN.fullmatch(value.strip(" "))
        if match is None:
            raise SettingError(f"{name} is {shown(value)}, must be a size such as 10GB or 10GiB")
        number, unit = match.groups()
        if unit.lower() not in UNITS:
            hint = f" (did you mean {unit}B or {unit}iB?)" if f"{unit}b".lower() in UNITS else ""
            raise SettingError(f"{name} is {shown(value)}: unknown unit {unit!r}{hint}")
        if len(number) > MOST_DIGITS:
            raise SettingError(f"{name} is {shown(value)}, a number of more than {MOST_DIGITS} digits")
        size = Fraction(number) * UNITS[unit.lower()]
    else:
        raise SettingError(f"{name} is {shown(value)}, must be a size such as 10GB or 10GiB")
    if size.denominator != 1:
        raise SettingError(f"{name} is {shown(value)}, which is no whole number of bytes")
    if not 1 <= size <= MAX_SIZE:
        raise SettingError(f"{name} is {shown(value)}, must be 1 to {MAX_SIZE} bytes")
    return int(size)


def _milliseconds(value: object, name: str) -> float:
    if isinstance(value, str) and NUMBER_PATTERN.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingError(f"{name} is {shown(value)}, must be a number of milliseconds")
    if not 0 < value <= MAX_DEADLINE_MS:
        raise SettingError(f"{name} is {shown(value)}, must be above 0 and at most {MAX_DEADLINE_MS} ms")
    return value


def _yes_no(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in YES + NO:
        return value.lower() in YES
    raise SettingError(f"{name} is {shown(value)}, must be true or false")


def _text(value: object, name: str) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value:
        raise SettingError(f"{name} is {shown(value)}, must be a non-empty text")
    return value


def _durability(value: object, name: str) -> str:
    if value not in DURABILITIES:
        raise SettingError(f"{name} is {shown(value)}, must be {' or '.join(DURABILITIES)}")
    return str(value)


def shown(value: object) -> str:
    """A wrong value as an error shows it: cut short where it is long."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


KINDS: Final[Mapping[str, tuple[Callable[[object, str], Value], str]]] = {
    "store": (_text, "URL or path of the store"),
    "get_deadline_ms": (_milliseconds, "default deadline of get_into"),
    "match_deadline_ms": (_milliseconds, "default deadline of match"),
    "put_deadline_ms": (_milliseconds, "default deadline of put"),
    "mapped": (_yes_no, "read slabs through memory maps (a failing disk then ends the process)"),
    "scrub": (_yes_no, "read and check the whole store in the background, round after round"),
    "bypass": (_yes_no, "connectors of engines leave the store alone: the engine runs as without"),
    "capacity": (_size, "raw bytes of a new store over all its nodes"),
    "durability": (_durability, "what an acknowledgement promises: process or power"),
    "extent_bytes": (_size, "bytes of an extent of a new store; none: chosen from the capacity"),
}
MAY_BE_NONE: Final = frozenset({"store", "capacity", "extent_bytes"})


def _read_file(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingError(f"file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SettingError(f"file {path}: {toml_reason(error)}") from error


def toml_reason(error: ValueError | RecursionError) -> str:
    """Why tomllib could not read a text, in one line."""
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    if not isinstance(error, (tomllib.TOMLDecodeError, UnicodeDecodeError)):
        return "a number has too many digits"
    return str(error).splitlines()[0]


def _from_environment(variables: Mapping[str, str]) -> dict[str, object]:
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in sorted(variables.items())
        if name.startswith(PREFIX) and name != PATH_VARIABLE and value and not INJECTED.fullmatch(name)
    }
