"""`kvstore match`: how many leading blocks of a token sequence are in the store."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.options import DeadlineOption, JsonOption, StoreOption, config_of, terminal_of, url_of
from kvstore.cli.session import chain_of, with_store
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

_HELP = """Count the leading blocks of a token sequence that the store has, by metadata alone.

The answer is a promise that a fetch may correct; --strict asks nodes until it is certain. Only full blocks count.
With --keys the keys of the matched blocks follow, one a line, for `kvstore inspect`; --json has them always.
Needs ownership: refused, with its pid, while another process owns the store.

\b
Examples:
  kvstore match --tokens prompt.txt --block-bytes 4096
  kvstore match --text prompt.md --layout v41-flash --model deepseek-v4.1-flash --weights 3f9a --strict
  kvstore match --tokens prompt.txt --block-bytes 4096 --keys
"""


def register(app: typer.Typer) -> None:
    app.command("match", help=_HELP, short_help="Count the leading blocks that are there.")(match)


def match(
    context: typer.Context,
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
    strict: Annotated[bool, typer.Option("--strict", help="Ask until the answer is certain.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="Print the keys of the matched blocks too.")] = False,
    deadline_ms: DeadlineOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    config = config_of(context, store, match_deadline_ms=deadline_ms)
    addressing = Addressing(model, weights, layout_of(layout, block_bytes, block_tokens), tenant, lora, salt)
    ids = read_tokens(tokens, text)

    async def work(opened: KVStore) -> tuple[Chain, int]:
        chain = chain_of(opened, addressing, ids)
        return chain, await opened.match(chain, strict=strict)

    chain, blocks = with_store(url_of(config), config, work)
    matched = [key.hex() for key in chain[:blocks]]
    held = blocks * addressing.layout.block_tokens
    lines = [f"{blocks} of {len(chain)} full blocks, {held} of {len(ids)} tokens", *(matched if keys else ())]
    terminal.result(
        {
            "tokens": len(ids),
            "full_blocks": len(chain),
            "blocks": blocks,
            "matched_tokens": held,
            "strict": strict,
            "keys": list(matched),
        },
        lambda console: console.print("\n".join(lines)),
    )
