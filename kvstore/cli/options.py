"""The options that every command has, and how a command comes by its settings and its store.

Before the command's name: `--store`, `--json`, `--config FILE`, `--set NAME=VALUE`, `--traceback`. After it:
`--store` and `--json` again; what stands nearer to the command wins. Settings that are named nowhere come from the
environment, the configuration file and the defaults (`kvstore.config`), so KVSTORE_STORE names the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from efs.errors import InvalidArgument
from kvstore.cli.failures import UsageMistake
from kvstore.cli.terminal import Terminal
from kvstore.config import Config

StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="The store: root, cluster.toml or etcd URL. Default: $KVSTORE_STORE."),
]
RootOption = Annotated[
    str | None, typer.Option("--store", metavar="URL", help="The store: its root. Default: $KVSTORE_STORE.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="The cluster: cluster.toml or etcd URL. Default: $KVSTORE_STORE."),
]
MapOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="The cluster: etcd://HOST:PORT/NAME. Default: $KVSTORE_STORE."),
]
CapacityOption = Annotated[
    str | None, typer.Option("--capacity", metavar="SIZE", help="Raw bytes over all twelve nodes, such as 100GiB.")
]
DurabilityOption = Annotated[
    str | None, typer.Option("--durability", metavar="MODE", help="process or power.  [default: process]")
]
ExtentBytesOption = Annotated[
    str | None, typer.Option("--extent-bytes", metavar="SIZE", help="Bytes of an extent.  [default: by the capacity]")
]
MaxDurationOption = Annotated[
    float | None, typer.Option("--max-duration", metavar="S", help="Stop after this many seconds; --resume goes on.")
]
ResumeOption = Annotated[
    str | None,
    typer.Option("--resume", metavar="KEY", help="Go on behind this key, printed by a run that stopped."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON documents, one a line, instead of text.")]
DeadlineOption = Annotated[
    str | None,
    typer.Option("--deadline-ms", metavar="MS", help="Deadline of each call to the store, in ms, at most 60000."),
]


@dataclass(frozen=True, slots=True)
class RootOptions:
    """What stood before the command's name."""

    store: str | None = None
    as_json: bool = False
    config_path: str | None = None
    settings: tuple[tuple[str, str], ...] = ()
    traceback: bool = False


def root_options(context: typer.Context) -> RootOptions:
    found = context.find_root().obj
    return found if isinstance(found, RootOptions) else RootOptions()


def parse_assignment(text: str) -> tuple[str, str]:
    """NAME and VALUE of a `--set NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageMistake(f"--set {text}: must be NAME=VALUE")
    return name, value


def terminal_of(context: typer.Context, as_json: bool) -> Terminal:
    return Terminal(as_json or root_options(context).as_json)


def config_of(context: typer.Context, store: str | None = None, **arguments: object) -> Config:
    """The settings in effect; `arguments` are the command's own options by setting name, None where not given."""
    root = root_options(context)
    named: dict[str, object] = dict(root.settings)
    named.update({name: value for name, value in arguments.items() if value is not None})
    url = store if store is not None else root.store
    if url is not None:
        named["store"] = url
    return Config.load(root.config_path, arguments=named)


def url_of(config: Config) -> str:
    """The store's URL; UsageMistake when none is given."""
    if not config.store:
        raise UsageMistake("no store given: use --store URL or set KVSTORE_STORE")
    return config.store


def require_duration(seconds: float | None) -> None:
    """InvalidArgument for a --max-duration that is not above 0."""
    if seconds is not None and not seconds > 0:
        raise InvalidArgument(f"max duration is {seconds} s, must be above 0")
