"""Every bound of the engine's side, with its reason. Sizes are bytes, times are milliseconds.

What an engine may choose has its default here.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# -- Memory ---------------------------------------------------------------------------------------------------------

HOST_REGIONS: Final = 2
"""Fetches that may be under way or being copied at once; one more request waits, then recomputes."""
HOST_POOL_BYTES: Final = 512 * MIB
"""Default of the host pool: two regions of 256 MiB, 88 blocks of a small model or 2,356 of V4.1 each."""
PRETOUCH_BYTES: Final = 16 * MIB
"""Pages populated by one call in the background: some 10 ms, so that closing never waits long."""
STAGING_BYTES: Final = 16 * MIB
"""Each of the two staging buffers on the device. At 50 GB/s a copy of 16 MiB takes 0.3 ms, a hundred times its start-up
cost."""
WRITE_BACK_BLOCKS: Final = 8
"""Blocks gathered and put at a time: bounds the second host pool."""
WRITE_BACK_QUEUE: Final = 64
"""Write-backs that may wait; one more is dropped and counted, since the store can do without it."""
PAGE_POOL_BYTES: Final = 256 * MIB
"""Default of the page pool on the device."""
SHORTEST_WAIT_MS: Final = 0.05
"""Waits for a segment below this are not worth a span: looking at an open gate takes a tenth of it."""
MAX_EVENT_SPANS: Final = 200_000
"""Spans that a timeline keeps; more are counted, not kept."""

# -- Time -----------------------------------------------------------------------------------------------------------

HOST_POOL_WAIT_MS: Final = 250.0
"""How long a request waits for a host region before it recomputes: a fetch of 100 MB takes a tenth of this."""
FENCE_POLL_MS: Final = 0.5
"""How often a waiter looks whether copies out of a returned region have ended; devices do not notify."""
SWAP_IN_WAIT_MS: Final = 30_000.0
"""How long a pass waits for one segment. Beyond the store's own deadlines only a hung device takes this long."""
CLOSE_WAIT_MS: Final = 2_000.0
"""How long closing waits for each thread before it abandons it; the threads are daemons."""
CLOSE_FLUSH_MS: Final = 10_000.0
"""How long closing waits for write-backs: a put's own default deadline."""
FLUSH_WAIT_MS: Final = 60_000.0
"""How long `flush` waits for write-backs."""

assert HOST_POOL_BYTES // HOST_REGIONS >= STAGING_BYTES
