"""`kvstore get`: fetch the leading blocks of a token sequence into a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, BinaryIO

import numpy as np
import typer

from efs.limits import STAGING_PIECE_BYTES
from efs.types import GetReport
from kvstore.cli.failures import NOT_ALL, UsageMistake
from kvstore.cli.options import DeadlineOption, JsonOption, StoreOption, config_of, terminal_of, url_of
from kvstore.cli.outfile import PRIVATE, output_file
from kvstore.cli.session import chain_of, part_of, pieces, with_store
from kvstore.cli.sigterm import ended_by_sigterm
from kvstore.cli.terminal import Terminal, human_bytes
from kvstore.cli.tokens import (
    Addressing,
    BlockBytesOption,
    BlockTokensOption,
    LayoutOption,
    LoraOption,
    ModelOption,
    SaltOption,
    TenantOption,
    TextOption,
    TokensOption,
    WeightsOption,
    layout_of,
    read_tokens,
)
from kvstore.keys import Chain
from kvstore.store import KVStore

_HELP = """Fetch blocks: the leading verified blocks of a token sequence into a file.

The file gets the blocks one after the other, block-major, without a header, up to the first one that is not in the
store whole; it appears under its name when it is complete. Exit code 1 when that is fewer than asked: the file then
holds the leading ones. A new file has mode 0600, one that is replaced keeps its mode and its owner; a link is followed;
a device or a FIFO is written to as it is. `--output -` writes to standard output. Needs ownership: refused, with its
pid, while another process owns the store.

\b
Examples:
  kvstore get --tokens prompt.txt --output kv.bin --block-bytes 4096
  kvstore get --text prompt.md --output kv.bin --layout v41-flash --model deepseek-v4.1-flash --weights 3f9a
  kvstore get --tokens ids.npy --first 8 --count 4 --output - --block-bytes 2MiB | sha256sum
"""

def register(app: typer.Typer) -> None:
    app.command("get", help=_HELP, short_help="Fetch blocks into a file.")(get)


def get(
    context: typer.Context,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where the blocks go; - is standard output.")
    ],
    tokens: TokensOption = None,
    text: TextOption = None,
    layout: LayoutOption = None,
    block_bytes: BlockBytesOption = None,
    block_tokens: BlockTokensOption = None,
    model: ModelOption = "opaque",
    weights: WeightsOption = "none",
    tenant: TenantOption = None,
    lora: LoraOption = None,
    salt: SaltOption = None,
    first: Annotated[int, typer.Option("--first", metavar="N", help="Position of the first block to fetch.")] = 0,
    count: Annotated[int | None, typer.Option("--count", metavar="N", help="Blocks to fetch.  [default: all]")] = None,
    deadline_ms: DeadlineOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    if output == "-" and terminal.as_json:
        raise UsageMistake("--output - and --json both want standard output")
    config = config_of(context, store, get_deadline_ms=deadline_ms)
    addressing = Addressing(model, weights, layout_of(layout, block_bytes, block_tokens), tenant, lora, salt)
    ids = read_tokens(tokens, text)

    with ended_by_sigterm(), _opened(output) as file:

        async def work(opened: KVStore) -> tuple[int, GetReport]:
            chain = part_of(chain_of(opened, addressing, ids), first, count)
            return len(chain), await _get_pieces(opened, chain, file, output, terminal)

        asked, report = with_store(url_of(config), config, work)
    line = (
        f"{report.blocks} of {asked} blocks, {human_bytes(report.bytes)}: {report.rebuilt} rebuilt, "
        f"{report.corrupt} shards corrupt, {report.missing} missing"
    )
    if output == "-":
        terminal.remark(line)
    else:
        counts = {name: value for name, value in asdict(report).items() if name != "ok"}
        terminal.result({"asked": asked, "output": output, **counts}, lambda console: console.print(line))
    return 0 if report.blocks == asked else NOT_ALL


@contextmanager
def _opened(output: str) -> Iterator[BinaryIO]:
    """Where the blocks go; - is standard output."""
    if output == "-":
        yield sys.stdout.buffer
    else:
        with output_file(output, PRIVATE) as file:
            yield file


def _write(file: BinaryIO, data: bytes, output: str) -> None:
    """Write now; an OSError names the output."""
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        error.filename = error.filename or ("standard output" if output == "-" else output)
        raise


async def _get_pieces(store: KVStore, chain: Chain, file: BinaryIO, output: str, terminal: Terminal) -> GetReport:
    """Fetch piece by piece up to the first block that is not ok; the report is the sum over the pieces."""
    layout = chain.layout
    started = time.monotonic()
    reports: list[GetReport] = []
    with terminal.progress("get", len(chain)) as advance:
        for start, stop in pieces(len(chain), layout.block_bytes, STAGING_PIECE_BYTES):
            landing = np.empty((stop - start) * layout.block_bytes, np.uint8)
            report = await store.get_into(chain[start:stop], landing)
            reports.append(report)
            _write(file, layout.from_segments(landing)[: report.blocks * layout.block_bytes].tobytes(), output)
            advance(stop)
            if report.blocks < stop - start:
                break
    return _sum(reports, layout.block_bytes, time.monotonic() - started)


def _sum(reports: list[GetReport], block_bytes: int, seconds: float) -> GetReport:
    blocks = sum(report.blocks for report in reports)
    return GetReport(
        blocks=blocks,
        ok=[True] * blocks,
        rebuilt=sum(r.rebuilt for r in reports),
        hedged=sum(r.hedged for r in reports),
        corrupt=sum(r.corrupt for r in reports),
        missing=sum(r.missing for r in reports),
        raced=sum(r.raced for r in reports),
        bytes=blocks * block_bytes,
        seconds=seconds,
    )
