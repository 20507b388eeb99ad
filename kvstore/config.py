"""Settings of a client: what they are, where each value came from, and how sizes are written.

A value comes from, strongest first: an argument of the call or command line; the environment variable KVSTORE_<NAME>; the
TOML file that the argument `path` or KVSTORE_CONFIG names; the default. An unknown name, in a file, among the arguments, or as
a variable that begins with KVSTORE_, is an error, as is a value of the wrong kind; every error is one line that names setting
and source.

    name                kind      default        meaning
    store               text      none           URL or path of the store
    get_deadline_ms     number    5000           default deadline of get_into
    match_deadline_ms   number    1000           default deadline of match
    put_deadline_ms     number    10000          default deadline of put
    mapped              yes/no    no             read slabs through memory maps (a failing disk then ends the process)
    capacity            size      none           raw bytes of a new store over all its nodes (`kvstore init`)
    durability          word      process        what an acknowledgement promises: process or power (`kvstore init`)
    extent_bytes        size      none           bytes of an extent of a new store; none: chosen from the capacity

Sizes: digits, optionally a fraction, and a unit: B, kB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (powers
of 1024), in any case, with or without a space; no unit means bytes. So "10GB" is 10,000,000,000 and "10GiB" is
10,737,418,240. A size is a whole number of bytes, at least 1: "0", "-1", "abc", "1e3", "10G" (GB or GiB?), "1.5" and ""
are refused. In a TOML file an integer is bytes. Numbers of milliseconds are above 0 and at most 60,000; "1e3", "inf" and
"nan" are refused. Yes/no: true, false, yes, no, on, off, 1, 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from efs.errors import InvalidArgument
from efs.limits import GET_DEADLINE_MS, MATCH_DEADLINE_MS, PUT_DEADLINE_MS


class SettingError(InvalidArgument):
    """A setting is unknown or its value is wrong; the message names the setting and where it came from."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in effect: `source` is "default", "argument", "environment NAME" or "file PATH"."""

    name: str
    value: str | int | float | bool | None
    source: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Config:
    """Effective settings; see the module docstring. `Config()` is the defaults."""

    store: str | None = None
    get_deadline_ms: float = GET_DEADLINE_MS
    match_deadline_ms: float = MATCH_DEADLINE_MS
    put_deadline_ms: float = PUT_DEADLINE_MS
    mapped: bool = False
    capacity: int | None = None
    durability: str = "process"
    extent_bytes: int | None = None
    sources: tuple[tuple[str, str], ...] = ()

    @classmethod
    def load(cls, path: str | None = None, *, environ: Mapping[str, str] | None = None,
             arguments: Mapping[str, object] | None = None) -> Config:
        """The effective settings. environ: os.environ when None. arguments: by setting name; a value of None is not given."""
        raise NotImplementedError

    def settings(self) -> list[Setting]:
        """All settings in the order of the module docstring, each with its source."""
        raise NotImplementedError


def parse_size(text: str | int, setting: str = "size") -> int:
    """Bytes of a written size; SettingError names `setting`."""
    raise NotImplementedError
