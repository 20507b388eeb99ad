"""`kvstore put`: store the blocks of a file under the keys of a token sequence."""

from __future__ import annotations

import os
import time
from typing import Annotated

import aiofiles
import typer

from efs.limits import STAGING_PIECE_BYTES
from efs.types import PutReport
from kvstore.cli.failures import NOT_ALL, UsageMistake
from kvstore.cli.options import DeadlineOption, JsonOption, StoreOption, config_of, terminal_of, url_of
from kvstore.cli.session import chain_of, part_of, pieces, with_store
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

_HELP = """Store blocks: the bytes of a file under the keys of a token sequence.

The file holds the blocks one after the other, without a header: exactly as many as the tokens make full blocks, or as
--first and --count say. Token files are decimal text, .u32 or .npy; with --text each byte of a file is a token.
Exit code 1 when a block was not acknowledged. Needs ownership: refused, with its pid, while another process owns the
store.

\b
Examples:
  kvstore put --tokens prompt.txt --blocks kv.bin --block-bytes 4096
  kvstore put --text prompt.md --blocks kv.bin --layout v41-flash --model deepseek-v4.1-flash --weights 3f9a
  kvstore put --tokens ids.npy --first 8 --count 4 --blocks four.bin --block-bytes 2MiB --json
"""


def register(app: typer.Typer) -> None:
    app.command("put", help=_HELP, short_help="Store the blocks of a file.")(put)


def put(
    context: typer.Context,
    blocks: Annotated[str, typer.Option("--blocks", metavar="FILE", help="The blocks' bytes, block-major.")],
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
    first: Annotated[int, typer.Option("--first", metavar="N", help="Position of the file's first block.")] = 0,
    count: Annotated[int | None, typer.Option("--count", metavar="N", help="Blocks to store.  [default: all]")] = None,
    deadline_ms: DeadlineOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    config = config_of(context, store, put_deadline_ms=deadline_ms)
    addressing = Addressing(model, weights, layout_of(layout, block_bytes, block_tokens), tenant, lora, salt)
    ids = read_tokens(tokens, text)
    size = os.stat(blocks).st_size

    async def work(opened: KVStore) -> tuple[int, PutReport]:
        chain = part_of(chain_of(opened, addressing, ids), first, count)
        wanted = len(chain) * addressing.layout.block_bytes
        if size != wanted:
            raise UsageMistake(
                f"{blocks}: {size} bytes, {len(chain)} blocks of {addressing.layout.block_bytes} are {wanted}"
            )
        return len(chain), await _put_file(opened, chain, blocks, terminal)

    started = time.monotonic()
    blocks_put, report = with_store(url_of(config), config, work)
    seconds = time.monotonic() - started
    terminal.result(
        {
            "blocks": blocks_put,
            "acked": report.acked,
            "already": report.already,
            "failed": report.failed,
            "at_risk": report.at_risk,
            "why": report.why,
            "bytes": size,
            "seconds": seconds,
        },
        lambda console: console.print(
            f"{blocks_put} blocks, {human_bytes(size)}: {report.acked} stored, {report.already} there already, "
            f"{report.failed} failed, {report.at_risk} at risk" + (f" ({report.why})" if report.why else "")
        ),
    )
    return NOT_ALL if report.failed else 0


async def _put_file(store: KVStore, chain: Chain, path: str, terminal: Terminal) -> PutReport:
    """Put a file of blocks piece by piece, so that its size does not matter to memory."""
    block_bytes = chain.layout.block_bytes
    acked = already = failed = at_risk = 0
    why: str | None = None
    async with aiofiles.open(path, "rb") as file:
        with terminal.progress("put", len(chain)) as advance:
            for start, stop in pieces(len(chain), block_bytes, STAGING_PIECE_BYTES):
                data = await file.read((stop - start) * block_bytes)
                if len(data) != (stop - start) * block_bytes:
                    raise UsageMistake(f"{path}: became shorter while it was read")
                report = await store.put(chain[start:stop], data)
                acked, already = acked + report.acked, already + report.already
                failed, at_risk = failed + report.failed, at_risk + report.at_risk
                why = why or report.why
                advance(stop)
    return PutReport(acked, already, failed, at_risk, why)
