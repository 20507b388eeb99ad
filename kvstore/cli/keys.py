"""Keys as people write them: 64 hex digits, or their beginning."""

from __future__ import annotations

from efs.index import IndexEntry
from efs.limits import KEY_BYTES
from efs.storeview import StoreView
from kvstore.cli.failures import UsageMistake

SHORTEST_PREFIX = 4
PAGE = 64
"""Index entries of a node that are looked at: sixteen keys at least."""
_DIGITS = frozenset("0123456789abcdef")


def parse_prefix(text: str) -> str:
    """A key or the beginning of one, in lower case; UsageMistake when it is neither."""
    lower = text.lower()
    if not SHORTEST_PREFIX <= len(lower) <= 2 * KEY_BYTES or set(lower) - _DIGITS:
        raise UsageMistake(
            f"{text!r} is not a key: must be {2 * KEY_BYTES} hex digits, or at least the first {SHORTEST_PREFIX}"
        )
    return lower


def entries_under(view: StoreView, text: str) -> tuple[bytes, dict[int, list[IndexEntry]]]:
    """The one key in the store that begins so, and its index entries by node; UsageMistake when there is none or
    more."""
    prefix = parse_prefix(text)
    start = bytes.fromhex(prefix + "0" * (len(prefix) % 2))
    pages = view.next_entries(_before(start), PAGE).values()
    found = {
        entry.index_key[:KEY_BYTES] for page in pages for entry in page if entry.index_key.hex().startswith(prefix)
    }
    if not found:
        raise UsageMistake(f"no block with key {text} in {view.root}")
    if len(found) > 1:
        raise UsageMistake(f"{len(found)} keys begin with {text}, such as {min(found).hex()} and {max(found).hex()}")
    key = found.pop()
    return key, view.entries_of([key])


def _before(start: bytes) -> bytes | None:
    """An index key that sorts just before everything that begins with `start`; None when nothing does."""
    number = int.from_bytes(start, "big")
    return None if number == 0 else (number - 1).to_bytes(len(start), "big") + b"\xff" * 48
