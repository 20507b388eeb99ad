"""`kvstore inspect KEY`: every shard of a block, on every node: where it lies, which version it is, and whether it is
sound."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from efs.checksum import xxh3_64
from efs.errors import CorruptRecord
from efs.extent import extent_of, slot_of
from efs.index import IndexEntry
from efs.limits import DEPTH_UNKNOWN, KEY_BYTES, STRIPE_SHARDS
from efs.nodeview import NodeView, Slot
from efs.placement import placement_group, rotation_of, shard_of_node
from efs.shard import Entry
from efs.storeview import StoreView
from kvstore.cli.failures import DAMAGE
from kvstore.cli.keys import entries_under
from kvstore.cli.options import JsonOption, RootOption, config_of, terminal_of, url_of
from kvstore.cli.terminal import Json, human_age, human_bytes, table
from kvstore.store import store_root

_HELP = """Show every shard of a block: node, slot, version, checksums, age.

KEY is 64 hex digits, or as many of the first as make it the only one (at least 4); `kvstore ls` and `kvstore match
--keys` print keys. Reads the twelve payloads and checks them. Works beside a running owner. An unknown KEY is refused
with exit code 2; exit code 4 when a shard is damaged.

\b
Examples:
  kvstore inspect 3fa9c0de
  kvstore inspect 3fa9c0de --json
"""


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One node's shard of one version; None for what is not known. `state` is sound, absent, away, or what is wrong."""

    node: int
    shard: int
    state: str
    digest: str | None = None
    extent: int | None = None
    slot: int | None = None
    generation: int | None = None
    payload_hash: str | None = None
    arrival_ms: int | None = None
    stamp: int | None = None
    boot_epoch: int | None = None


def register(app: typer.Typer) -> None:
    app.command("inspect", help=_HELP, short_help="Show every shard of a block.")(inspect)


def inspect(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The block's key, or the beginning of it.")],
    store: RootOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    with StoreView.open(store_root(url_of(config_of(context, store)))) as view:
        full, entries = entries_under(view, key)
        rows, entry = _look(view, full, entries)
    document: dict[str, Json] = {
        "key": full.hex(),
        "placement_group": placement_group(full),
        "rotation": rotation_of(placement_group(full)),
        **_block(entry),
        "shards": [asdict(row) for row in rows],
    }
    terminal.result(document, lambda console: _show(console, document, rows))
    return DAMAGE if any(row.state not in ("sound", "absent", "away") for row in rows) else 0


def _block(entry: Entry | None) -> dict[str, Json]:
    """What the header says of the block, from any sound shard."""
    if entry is None:
        return {"block_bytes": None, "segments": None, "depth": None, "tenant_tag": None}
    header = entry.header
    segments: list[Json] = [
        {"bytes": size, "xxh3_64": f"{value:016x}"}
        for size, value in zip(header.shape.segment_bytes, header.segment_hashes, strict=True)
    ]
    return {
        "block_bytes": header.shape.block_bytes,
        "segments": segments,
        "depth": None if header.depth == DEPTH_UNKNOWN else header.depth,
        "tenant_tag": header.tenant_tag.hex(),
    }


def _look(view: StoreView, key: bytes, entries: dict[int, list[IndexEntry]]) -> tuple[list[ShardRow], Entry | None]:
    """Rows by version, then node; and one sound entry."""
    nodes = {node.node_index: node for node in view.views}
    digests = sorted({entry.index_key[KEY_BYTES:] for held in entries.values() for entry in held})
    rows: list[ShardRow] = []
    sample: Entry | None = None
    for digest in digests:
        for index in range(STRIPE_SHARDS):
            shard = shard_of_node(index, rotation_of(placement_group(key)))
            held = [entry for entry in entries.get(index, ()) if entry.index_key[KEY_BYTES:] == digest]
            if index not in nodes or not held:
                rows.append(ShardRow(index, shard, "absent" if index in nodes else "away", digest.hex()))
                continue
            row, entry = _look_at(nodes[index], held[0], shard)
            rows.append(row)
            if row.state == "sound":
                sample = sample or entry
    return rows, sample


def _look_at(node: NodeView, found: IndexEntry, shard: int) -> tuple[ShardRow, Entry | None]:
    key, digest = found.index_key[:KEY_BYTES], found.index_key[KEY_BYTES:]

    def row(state: str, entry: Entry | None = None) -> ShardRow:
        place = (digest.hex(), extent_of(found.location), slot_of(found.location), found.generation)
        if entry is None:
            return ShardRow(node.node_index, shard, state, *place)
        geometry = node.geometry(extent_of(found.location))
        stamps = None if geometry is None else node.stamps(extent_of(found.location), geometry)
        return ShardRow(
            node.node_index,
            shard,
            state,
            *place,
            f"{entry.header.payload_hash:016x}",
            entry.arrival_ms,
            None if stamps is None else int(stamps[slot_of(found.location)]),
            entry.boot_epoch,
        )

    try:
        entry = node.entry(found.location)
    except CorruptRecord as error:
        return row(f"bad entry: {error}"), None
    except OSError as error:
        return row(f"read error: {error.strerror}"), None
    if entry is None:
        return row("slot is free"), None
    header = entry.header
    if (header.key, header.digest, entry.generation) != (key, digest, found.generation):
        return row("slot holds another record"), None
    if header.shard != shard:
        return row(f"holds shard {header.shard}, must hold {shard}", entry), None
    return row(_payload_state(node, found.location, header.payload_hash), entry), entry


def _payload_state(node: NodeView, location: int, payload_hash: int) -> str:
    try:
        records = node.records(np.array([location], np.int64))
        payload = node.payloads(records).get(0) if records["status"][0] == Slot.LIVE else None
    except OSError as error:
        return f"read error: {error.strerror}"
    if payload is None:
        return "slot was reused"
    return "sound" if xxh3_64(payload.tobytes()) == payload_hash else "bad checksum"


def _show(console: Console, document: dict[str, Json], rows: list[ShardRow]) -> None:
    console.print(f"key        {document['key']}")
    console.print(f"placement  group {document['placement_group']}, rotation {document['rotation']}")
    size = document["block_bytes"]
    if isinstance(size, int):
        segments = document["segments"]
        count = len(segments) if isinstance(segments, list) else 0
        depth = "unknown" if document["depth"] is None else document["depth"]
        console.print(
            f"block      {human_bytes(size)} ({size} bytes), {count} segments, depth {depth}, "
            f"tenant tag {document['tenant_tag']}"
        )
    now = time.time()
    for digest in dict.fromkeys(row.digest for row in rows):
        sound = sum(row.state == "sound" for row in rows if row.digest == digest)
        console.print(f"version    {digest}: {sound} of {STRIPE_SHARDS} shards sound")
        shown = table(
            "node",
            "shard",
            "state",
            "extent",
            "slot",
            "generation",
            "payload xxh3_64",
            "arrived",
            "used",
            right=("node", "shard", "extent", "slot"),
        )
        for row in rows:
            if row.digest == digest:
                arrived = "" if row.arrival_ms is None else human_age(now - row.arrival_ms / 1000) + " ago"
                used = "" if not row.stamp else human_age(now - row.stamp * 60) + " ago"
                shown.add_row(
                    str(row.node),
                    str(row.shard),
                    row.state,
                    _known(row.extent),
                    _known(row.slot),
                    "" if row.generation is None else f"{row.generation:#x}",
                    row.payload_hash or "",
                    arrived,
                    used,
                    style=None if row.state == "sound" else "red",
                )
        console.print(shown)


def _known(value: int | None) -> str:
    return "" if value is None else str(value)
