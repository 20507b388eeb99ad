"""`kvstore node serve`: serve node directories to clients on this machine or others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Annotated

import typer
import uvloop

from efs.clock import SystemClock
from efs.cluster import DURABILITIES, Durability, read_store_config
from efs.clustermap import EtcdUrl, parse_etcd_url
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import EfsError, InvalidArgument
from efs.handshake import Tokens, read_token
from efs.nodedir import read_config
from efs.osio import Io, SystemIo
from efs.serving import serve_nodes
from efs.session import Served, ServedNode
from efs.sparedir import is_spare
from kvstore.cli.failures import UsageMistake
from kvstore.cli.logs import set_up_logs
from kvstore.cli.options import (
    DurabilityOption,
    JsonLinesOption,
    config_of,
    terminal_of,
)
from kvstore.cli.terminal import Terminal

HELP = """Serve one or several node directories, until SIGTERM or SIGINT.

Each --listen is unix:PATH or tcp:HOST:PORT (port 0: any). An address that other machines can reach needs --token-file,
a file of mode 0600 with a secret of at least 16 bytes; clients then have to know it. With --operator-token-file too,
only who knows that one may list or drop what is held, have it evicted, purge a tenant, or give a spare its place:
clients find it by operator_token_file of cluster.toml or the map, as `kvstore cluster init --operator-token-file`
writes it. Owns the directories; a second owner is refused with the pid of the first. Prints a line for each node once
all of them are served. On SIGTERM requests under way are answered, nodes are closed cleanly, and the exit code is 0.

Slabs are read through memory maps, so a disk that fails to read ends the process; --no-mapped reads them with calls.
--durability must be what the cluster was made with: clients refuse a server that promises something else, and in the
directory where `init` has made it a node is not served with another.

--register says in etcd that these nodes are served, for `kvstore cluster status`. The server runs the same while etcd
is away, and clients do not ask for it.

A directory that `kvstore cluster add-spare` made is served as a spare: it waits for `kvstore cluster replace-node` to
give it a place, and is that node from then on.

With --metrics a second, small HTTP server answers /metrics (Prometheus) and /healthz (200, or 503 and one line why
not: hung, read-only, without its index, draining). It asks for no token and shows numbers only, never data: name an
address that other machines reach only if these may see them.

Exit codes: 0 ended when told to; 2 wrong request; 8 could not run.

\b
Examples:
  kvstore node serve /var/lib/kv/nodes/03 --listen unix:/run/kv/03
  kvstore node serve /mnt/a/kv /mnt/b/kv --listen tcp:10.0.0.7:7411 --token-file /etc/kvstore/token
  kvstore node serve /mnt/a/kv --listen unix:/run/kv/03 --metrics tcp:127.0.0.1:9411 --log-format json --log-level info
"""
SHORT_HELP = "Serve node directories to clients."


def serve(
    context: typer.Context,
    paths: Annotated[list[str], typer.Argument(metavar="DIR...", help="Node directories.")],
    listen: Annotated[list[str], typer.Option("--listen", metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT.")],
    token_file: Annotated[
        str | None, typer.Option("--token-file", metavar="FILE", help="Secret that clients must know.")
    ] = None,
    operator_token_file: Annotated[
        str | None, typer.Option("--operator-token-file", metavar="FILE", help="Secret that operators must know.")
    ] = None,
    durability: DurabilityOption = None,
    register: Annotated[
        str | None, typer.Option("--register", metavar="URL", help="Hold a lease there: etcd://HOST:PORT/NAME.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="ADDRESS", help="tcp:HOST:PORT of /metrics and /healthz.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", metavar="FORMAT", help="text or json.  [default: text]")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.  [default: warning]"),
    ] = None,
    mapped: Annotated[bool, typer.Option("--mapped/--no-mapped", help="Read slabs through memory maps.")] = True,
    as_json: JsonLinesOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    config = config_of(context, durability=durability)
    chosen = next(known for known in DURABILITIES if known == config.durability)
    if operator_token_file is not None and token_file is None:
        raise UsageMistake("--operator-token-file needs --token-file")
    io = SystemIo()
    tokens = Tokens(None if token_file is None else read_token(io, token_file),
                    None if operator_token_file is None else read_token(io, operator_token_file))
    for path in paths:
        _require_promise(io, os.path.abspath(path), chosen)
    endpoints = [parse_endpoint(text, os.getcwd()) for text in listen]
    url = None if register is None else parse_etcd_url(register)
    page = None if metrics is None else parse_endpoint(metrics)
    if page is not None and page.path is not None:
        raise UsageMistake(f"--metrics {metrics}: must be tcp:HOST:PORT")
    if log_format is not None or log_level is not None:
        path = os.path.abspath(paths[0])
        only = read_config(io, path).place.node_index if len(paths) == 1 and not is_spare(path) else None
        set_up_logs(log_format or "text", log_level or "warning", only)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve([os.path.abspath(path) for path in paths], endpoints, tokens, chosen, mapped, url, page,
                          terminal))


def _require_promise(io: Io, path: str, durability: Durability) -> None:
    """InvalidArgument where the store's own settings are at hand, in the directory in which `init` puts nodes, and
    promise something else."""
    root = os.path.dirname(os.path.dirname(path))
    try:
        store = read_store_config(io, root)
    except EfsError:
        return
    if path in store.node_paths and store.durability != durability:
        raise InvalidArgument(f"{path}: {root} was made with durability {store.durability}, not {durability}: serve it "
                              f"with --durability {store.durability}")


async def _serve(paths: Sequence[str], endpoints: Sequence[Endpoint], tokens: Tokens, durability: Durability,
                 mapped: bool, register: EtcdUrl | None, page: Endpoint | None, terminal: Terminal) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def ready(served: Sequence[Served], addresses: Sequence[Endpoint], metrics: Endpoint | None) -> None:
        where = ", ".join(map(str, addresses)) + (f", metrics at {metrics}" if metrics is not None else "")
        for path, one in zip(paths, served, strict=True):
            node = one.node_index if isinstance(one, ServedNode) else None
            what = "a spare" if node is None else f"node {node}"
            text = f"{what} ({one.node_id}) of {path} is served at {where} by process {os.getpid()}"
            terminal.announce({"node": node, "node_id": one.node_id, "path": path, "pid": os.getpid(),
                               "addresses": [str(address) for address in addresses],
                               "metrics": None if metrics is None else str(metrics)}, text)

    await serve_nodes(paths, endpoints, io=SystemIo(), clock=SystemClock(), tokens=tokens, durability=durability,
                      mapped=mapped, ready=ready, stop=stop, register=register, metrics=page)
