"""Every bound of the filesystem, with its reason, and the relations between bounds asserted at import.

Sizes are bytes, times are milliseconds unless the name says otherwise. Settings that a store may choose have
their default here; what is part of the format on disk cannot be chosen.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# -- Format: fixed for format version 1 ---------------------------------------------------------------------------

FORMAT_VERSION: Final = 1
KEY_BYTES: Final = 32
"""2 bytes of placement group and 30 bytes of digest."""
PLACEMENT_GROUPS: Final = 65_536
DIGEST_BYTES: Final = 16
"""A block digest is an xxh3_128."""
DATA_SHARDS: Final = 10
PARITY_SHARDS: Final = 2
STRIPE_SHARDS: Final = DATA_SHARDS + PARITY_SHARDS
MAX_SEGMENTS: Final = 256
"""The header grows by 12 bytes a segment; 256 covers a segment per layer of any current model."""
PAGE_BYTES: Final = 4 * KIB
SLOT_ALIGN_BYTES: Final = 64
"""One cache line: a V4.1 shard of 11,392 bytes fits without padding."""
MAX_SLOTS_PER_EXTENT: Final = 1 << 20
MAX_EXTENTS: Final = 1 << 24
MAX_BLOCK_BYTES: Final = 64 * MIB
"""The largest block: its 6.4 MiB shards still go nine to a default extent."""
DEPTH_UNKNOWN: Final = 0xFFFF_FFFF

# -- Stripe rules --------------------------------------------------------------------------------------------------

FANOUT: Final = 11
"""Nodes asked at once on a read: ten are enough, the eleventh hides one slow node."""
ACK_SHARDS: Final = 11
"""Shards stored before a put is acknowledged: one failure later the block still reads."""
MAX_VERSIONS_PER_KEY: Final = 4
"""Different valid bytes under one key are legal (bounded replay), but rare; a fifth displaces the weakest."""
MATCH_SAMPLE_NODES: Final = 3
"""Nodes that `match` asks of each run; `strict` asks until the answer is certain."""

# -- Space ----------------------------------------------------------------------------------------------------------

EXTENT_BYTES: Final = 64 * MIB
"""Large enough that a table is read in one go, small enough that a new slot size gets space quickly."""
MIN_EXTENT_BYTES: Final = 256 * KIB
"""For tests and tiny stores."""
MIN_EXTENTS_PER_NODE: Final = 4
"""Fewer could not hold two slot sizes and still turn extents over."""
INDEX_BUDGET_SHARE: Final = 0.025
"""LMDB takes 104-145 bytes an entry, 1.3 % of a V4.1 shard; twice that leaves it free pages for deletes."""
MIN_INDEX_BUDGET_BYTES: Final = 1 * MIB
RESERVE_BYTES: Final = 512 * KIB
"""Per node, for node.toml, counters, stamps of small stores, directories and LMDB's lock file."""
STAMP_BYTES_PER_SLOT: Final = 4
WATERMARK_HIGH: Final = 0.92
WATERMARK_LOW: Final = 0.88
WATERMARK_REJECT: Final = 0.97
EVICTION_WINDOW_SHARE: Final = 0.005
"""Records on either side of the eviction border that may be swapped for whole chunks, as a share of a node's records:
nodes of a group then differ in 1 % at most."""
HORIZON_MINUTES: Final = 60
"""The eviction horizon remembers one to two of these: the nodes of a group do not collect in the same minute."""

# -- Memory ---------------------------------------------------------------------------------------------------------

HOT_KEYS_PER_NODE: Final = 262_144
"""Keys whose location stays in memory: 30 GB of V4.1 blocks, about 35 MB of memory a node."""
TABLE_CACHE_BYTES: Final = 32 * MIB
"""Extent tables kept in memory, a node: 28 extents of V4.1 shards, 1.8 GB a node, 21 GB a store."""
STAGING_PIECE_BYTES: Final = 64 * MIB
"""Most private staging that one put holds for one piece of its blocks."""
PUT_PIECE_BYTES: Final = 48 * MIB
"""Payload encoded at a time, so that hashing, encoding and writing overlap. Each piece costs every node a batch, about
1 ms of the loop's thread whatever is in it, so smaller ones cost more than they overlap (measured); two of these take
120 MiB of staging."""
PUT_BUDGET_BYTES: Final = 256 * MIB
"""Caller bytes admitted to writing at once; further puts wait for their turn within their deadline."""
PUT_SLICE_BYTES: Final = 2 * MIB
"""Caller bytes that a put hashes, copies and encodes before it lets the event loop serve others: about 1 ms."""
PUT_CHUNK_BYTES: Final = 2 * MIB
"""Caller bytes hashed, copied and encoded in one go. Measured: smaller chunks cost more in calls than they save."""
PUT_LANE_PIECES: Final = 2
"""Pieces that one put has under way to one node: one being written, one waiting."""
WRITE_STAGING_BYTES: Final = 128 * MIB
"""Staging of all puts together: one piece of the largest block (12 × 7 MiB) or two ordinary pieces."""
WRITE_STAGING_KEPT_BYTES: Final = 120 * MIB
"""Staging kept for the next put, two ordinary pieces: memory that was touched before is written six times faster."""
ABANDONED_BYTES_PER_NODE: Final = 16 * MIB
"""Staging that writes to a hung node may still hold after their puts returned; beyond it the node gets no writes."""
UNIT_BLOCKS: Final = 64
"""Blocks that a fetch reads, verifies and rebuilds together; a whole run of V4.1 blocks."""
VERIFY_CHUNK_BYTES: Final = 512 * KIB
"""Bytes of a segment that are copied and then hashed while source and copy are still in a core's cache of 2 MiB."""
SCRATCH_BYTES: Final = 16 * MIB
"""Private memory for parity shards that a reader keeps between fetches: two parity shards of 757 blocks."""
IOV_MAX: Final = 1024
"""Buffers in one preadv or pwritev call on Linux."""
MAX_KEYS_PER_CALL: Final = 65_536

# -- Time -----------------------------------------------------------------------------------------------------------

GET_DEADLINE_MS: Final = 5_000
MATCH_DEADLINE_MS: Final = 1_000
PUT_DEADLINE_MS: Final = 10_000
MAX_DEADLINE_MS: Final = 60_000
INITIAL_LAG_GRACE_MS: Final = 50.0
"""Wait for a lagging data shard before a lag estimate exists."""
MIN_LAG_GRACE_MS: Final = 5.0
"""Less than this is no news: servers that share cores wait for their turns, a few milliseconds each. A fetch pays it
once, before it knows a node to be slow; rebuilding for nothing costs it more (measured)."""
MAX_LAG_GRACE_MS: Final = 250.0
PUT_LAG_GRACE_MS: Final = 50.0
"""How long a put at eleven stored waits for the twelfth."""
HUNG_MS: Final = 2_000.0
"""A node whose oldest operation is this old is suspect: not asked until it answers. Lag graces hide it long before; an
overloaded machine whose threads wait for a core must not lose three nodes to this."""
STUCK_AT_CLOSE_MS: Final = 500.0
"""A running operation of this age is not waited for when a store closes: the process must end within a second."""
PROBE_BACKOFF_MS: Final = 250.0
"""A suspect node is tried again after this, doubling up to MAX_PROBE_BACKOFF_MS."""
MAX_PROBE_BACKOFF_MS: Final = 8_000.0
HOLLOW_GRACE_MS: Final = 2 * MAX_DEADLINE_MS
"""A sweep never takes a stripe younger than this for hollow: its put may still be running."""
SWEEP_EVERY_MS: Final = 3_600_000.0
"""Pause between two sweeps of a store by its owner. What waits for a sweep is cold: it also leaves by eviction."""
SWEEP_CALL_MS: Final = 5_000
"""For one call of a sweep to a node."""
CLOSE_MS: Final = 5_000.0
"""Most that closing a store waits for its nodes; one that hangs is left to its daemon threads."""
INFO_DEADLINE_MS: Final = 1_000
"""For asking a node what it is and how full."""
STAMP_SECONDS: Final = 1
"""Resolution of access times: far below the time in which the smallest real store turns over (decision 0007)."""
PAY_EVERY_MS: Final = 1_000.0
"""A node to which nothing comes tells its disk after this what it is owed: long for a put, short for who runs fsck."""
STAMP_FLUSH_MS: Final = 60_000.0
"""Changed stamps reach their file after this: under steady traffic every extent in use is written that often, 23 KiB
each for V4.1 shards."""

# -- Rates and queues ----------------------------------------------------------------------------------------------

HEDGE_BUDGET_SHARE: Final = 0.10
"""Speculative reads beyond the eleventh, as a share of reads."""
NODE_QUEUE_OPERATIONS: Final = 256
"""Operations waiting for one node's thread; one more is refused."""
MEND_QUEUE: Final = 1_024
"""Reports of damaged shards that wait for mending; further ones are left to the scrub."""
MENDS_PER_SECOND: Final = 100
"""Damaged shards mended at most: 1 MB/s of V4.1 shards a node, nothing that a read would notice."""
SWEEP_PAGE_RECORDS: Final = 256
"""Records of one page of a node's listing in a sweep: 1 ms of the event loop for twelve of them."""
SWEEP_PAGES_PER_SECOND: Final = 20
"""Pages of a background sweep: 5,000 records a second, 2 % of a core."""
SWEEP_KEYS_AT_ONCE: Final = 256
"""Suspected keys that a sweep looks up together."""
REPAIR_CALL_MS: Final = 10_000
"""For one call of a repair to a node."""
REPAIR_BATCH_BLOCKS: Final = 64
"""Blocks that repair rebuilds together; a whole run of V4.1 blocks."""
REPAIR_BATCH_BYTES: Final = 16 * MIB
"""Bytes of those blocks, at least one; repair holds 1.3 times as much."""
REPAIR_STEPS_PER_SECOND: Final = 10
"""Batches and pages of a background repair: 73 MB/s of V4.1 blocks where everything is missing."""
REPAIR_GRACE_MS: Final = MAX_DEADLINE_MS
"""A background repair leaves versions alone of which a shard is younger: their put may still be running."""
SCRUB_PAGE_RECORDS: Final = 256
"""Records of one page of a node's listing in a scrub."""
SCRUB_STEP_BYTES: Final = 1 * MIB
"""Payload that a scrub checks before it lets others go first: 5 to 10 ms of a disk."""
SCRUB_STEP_RECORDS: Final = 64
"""Records of one step: they wait in the queue of one node's thread together, a quarter of what it takes."""
SCRUB_STEPS_PER_SECOND: Final = 16
"""Steps of a background scrub: 16 MiB/s, a terabyte in 18 hours."""
SCRUB_EVERY_MS: Final = 86_400_000.0
"""Pause between two rounds of a background scrub."""
SYNC_PASSES: Final = 3
"""Repairs of a node that joins; each finds what was put while the one before it ran."""
SYNC_RETRY_MS: Final = 30_000.0
"""Pause before a node is tried again that could not be brought up to date."""
UPKEEP_SAVE_MS: Final = 5_000.0
"""How far a scrub or a sync has come is written down this often: what a kill makes it do twice."""
YIELD_MS: Final = 10.0
"""Background work looks this often whether the calls that it yields to have ended."""
YIELD_AT_MOST_MS: Final = 1_000.0
"""Background work yields this long at a time, so that a store which never rests is looked after too."""
BACKGROUND_RESTART_MS: Final = 1_000.0
"""Pause before a background task that died is started again."""
MAX_READ_ATTEMPTS: Final = 2
"""Attempts at one shard in one call."""
BURY_RECORDS: Final = 16 * 1024
"""Records of purged tenants that a node drops in one call: some 32 transactions, far below a call's deadline."""
PURGE_CALL_MS: Final = 30_000
"""For one call of a purge to a node."""
MAX_TOMBSTONES: Final = 65_536
"""Tenant tags that a store remembers as purged, 1 MiB: three for each of the 20,000 tenants that it can have."""
DELETE_BATCH: Final = 512
"""Index entries deleted in one transaction: copy-on-write needs free pages for each page touched."""

# -- Wire -----------------------------------------------------------------------------------------------------------

WIRE_METADATA_BYTES: Final = 8 * MIB
"""Metadata of one frame: the table of WIRE_KEYS keys with four versions each takes 5 MiB."""
WIRE_BODY_BYTES: Final = 8 * MIB
"""Payload in one frame: a shard of the largest block, and more than one node's part of a piece of a put."""
WIRE_HANDSHAKE_BYTES: Final = 4 * KIB
"""Metadata of a frame of somebody who has not shown yet who it is."""
WIRE_KEYS: Final = 32_768
"""Keys of one look-up on the wire; larger ones are sent in parts."""
WIRE_LISTED: Final = 16_384
"""Records of one page of a listing on the wire."""
WIRE_PIECE_BYTES: Final = 4 * MIB
"""Slots that a server sends in one frame: what a cancelled read still sends at most, half a millisecond of loopback.
The reference fetch (8.6 MB of each node) is three frames."""
WIRE_AHEAD_BYTES: Final = 64 * KIB
"""Bytes that are received behind the end of what is expected, and copied: a frame then costs one call, not three."""
WIRE_BURST_BYTES: Final = 2 * MIB
"""Bytes received from one connection before the loop serves others."""
WIRE_SEND_QUEUE_BYTES: Final = 2 * MIB
"""Unsent bytes of a connection beyond which a server reads no more slots for it."""
WIRE_UNREAD_BYTES: Final = 16 * MIB
"""Unsent bytes of a connection beyond which a server takes no more requests from it: what reads and large answers put
into the queue, and some more, so that a client that reads is still heard when it gives a read up."""
WIRE_READS_AT_ONCE: Final = 2
"""Pieces of slots that a server has in memory for one connection beside what is queued: one comes from the disk while
the other is handed over."""
WIRE_UNSENT_BYTES: Final = 64 * MIB
"""Unsent bytes beyond which a client asks a node for nothing more: several pieces of puts."""
WIRE_RECEIVE_BYTES: Final = 128 * MIB
"""Requests that a server holds in memory, all connections together; one that does not fit is refused."""
WIRE_SMALL_BYTES: Final = 256 * KIB
"""Metadata of a request up to which it may take what is left of that; larger ones and bodies leave WIRE_SMALL_SHARE of
it free: a look-up of 8,192 keys does not stand behind puts."""
WIRE_SMALL_SHARE: Final = 0.25
WIRE_KEPT_BYTES: Final = 16 * MIB
"""Memory of bodies that a server keeps for the next ones: two of a piece of a put. Fresh pages cost more than receiving
into them does."""
WIRE_LARGE_ANSWERS: Final = 8
"""Tables, headers, lists and bytes by tenant that a server makes for one connection at a time, of up to
WIRE_METADATA_BYTES each; those of more requests wait until the client has taken these."""
WIRE_IN_FLIGHT: Final = 256
"""Requests of one connection that are not answered yet: what the queue of a node's thread takes."""
WIRE_CONNECTIONS: Final = 1_024
"""Connections of a server; each client has two to every node."""
WIRE_CONNECTIONS_PER_PEER: Final = 512
"""Connections from one address (TCP) or user (Unix sockets): nobody alone keeps everybody else out."""
WIRE_BACKLOG: Final = 128
WIRE_KEEPALIVE_SECONDS: Final = 60
"""Silence of a TCP connection after which the system asks whether the other machine is still there."""
WIRE_HANDSHAKE_MS: Final = 2_000.0
"""A connection whose handshake takes longer is closed."""
WIRE_FRAME_MS: Final = 10_000.0
"""A connection in which one frame takes longer to arrive is closed."""
WIRE_LOST_MS: Final = 10_000.0
"""A connection that owes an answer for so long is given up by the client and made anew."""
WIRE_WATCH_MS: Final = 500.0
"""How often connections are looked at for what takes too long."""
STATUS_CONNECTIONS: Final = 32
"""Connections to a server's status page at a time: a few monitoring systems, and a person."""
STATUS_HEADER_BYTES: Final = 8 * KIB
"""Head of a request for the status page."""
STATUS_MS: Final = 5_000.0
"""Life of such a connection, from being accepted to having taken its answer."""
TOKEN_MIN_BYTES: Final = 16
TOKEN_MAX_BYTES: Final = 4 * KIB
NONCE_BYTES: Final = 32

# -- Groups of a cluster --------------------------------------------------------------------------------------------

MAX_CLUSTER_GROUPS: Final = 64
"""768 nodes: a client has two connections to each, and a process 1,024 descriptors to begin with; more need raised
limits of everything."""
MAX_CLUSTER_SPARES: Final = 64
"""One for each of the most groups."""
TAKE_PLACE_MS: Final = 8_000.0
"""For a spare to open its directory as a node: an empty one, but on a disk that others use."""
GROUP_RETENTION_SECONDS: Final = 7 * 86_400
"""After a group was added, for so long look-ups go to earlier owners too. What is used at all is used within a week;
misses of moved keys cost a second look-up meanwhile."""
MAX_GROUP_RETENTION_SECONDS: Final = 365 * 86_400
LOCATE_MS: Final = 500.0
"""For asking present owners whether they have keys that earlier ones may have, before a fetch: a group whose servers
have just stopped must leave the rest of the call its time."""
LOCATE_SHARE: Final = 0.25
"""Of what is left of a fetch's deadline, where that is less."""
DROP_WAIT_SHARE: Final = 0.5
"""Of what is left of a drop's deadline, for a batch being moved that has some of its blocks, and then for look-ups: a
move or a node that hangs must leave the drop its time."""
MOVE_QUEUE_BLOCKS: Final = 16_384
"""Blocks that wait to be moved to their present owner: 1.9 GB of V4.1 blocks and half a minute of work, but only keys
in memory, 2 MB. What does not fit is offered again when it is read again."""
MOVE_BATCH_BLOCKS: Final = 64
"""Blocks that are moved together; a whole run of V4.1 blocks."""
MOVE_BATCH_BYTES: Final = 8 * MIB
"""Bytes of those blocks, at least one: what is in flight at a time. A move holds twice that, and takes a thirtieth of
what puts may admit."""
MOVE_BATCHES_PER_SECOND: Final = 10
"""73 MB/s of V4.1 blocks where no calls are running, as repair; 7 MB/s where they never end."""
MOVE_REST_MS: Final = 60_000.0
"""A block that could not be moved is left alone for so long: each further try would fetch it once more."""

# -- etcd -----------------------------------------------------------------------------------------------------------

ETCD_DOCUMENT_BYTES: Final = 512 * KIB
"""A map or a server's note: MAX_CLUSTER_GROUPS times twelve places and MAX_CLUSTER_SPARES of 600 bytes, and long paths;
etcd takes 1.5 MiB."""
ETCD_CALL_MS: Final = 3_000.0
"""For one call to etcd: an election of its members takes one second."""
ETCD_REREAD_MS: Final = 15_000.0
"""The map is read again this often, whatever the watch says: a watch that died without a word is made anew then."""
ETCD_RETRY_MS: Final = 500.0
"""etcd is tried again after this, doubling up to MAX_ETCD_RETRY_MS."""
MAX_ETCD_RETRY_MS: Final = 8_000.0
ETCD_LEASE_SECONDS: Final = 10
"""How long a server that says nothing counts as being there."""
ETCD_BEAT_MS: Final = 3_000.0
"""How often a server renews its lease."""
OTHERS_TOLERATED: Final = PARITY_SHARDS
"""Places in which a client that opens a cluster by its map may find another node: as many as reads go without."""

assert ETCD_BEAT_MS + ETCD_CALL_MS < ETCD_LEASE_SECONDS * 1000
assert TAKE_PLACE_MS < WIRE_LOST_MS
assert DATA_SHARDS < FANOUT < STRIPE_SHARDS
assert DATA_SHARDS < ACK_SHARDS < STRIPE_SHARDS
assert MAX_BLOCK_BYTES // DATA_SHARDS * 2 < EXTENT_BYTES
assert WATERMARK_LOW < WATERMARK_HIGH < WATERMARK_REJECT < 1.0
assert 2 * EVICTION_WINDOW_SHARE < WATERMARK_HIGH - WATERMARK_LOW
assert MIN_LAG_GRACE_MS <= INITIAL_LAG_GRACE_MS <= MAX_LAG_GRACE_MS < GET_DEADLINE_MS
assert HOLLOW_GRACE_MS >= 2 * MAX_DEADLINE_MS
assert max(GET_DEADLINE_MS, MATCH_DEADLINE_MS, PUT_DEADLINE_MS) <= MAX_DEADLINE_MS
assert PUT_PIECE_BYTES * STRIPE_SHARDS // DATA_SHARDS <= STAGING_PIECE_BYTES <= PUT_BUDGET_BYTES
assert MAX_BLOCK_BYTES * STRIPE_SHARDS // DATA_SHARDS <= WRITE_STAGING_BYTES
assert MOVE_BATCH_BYTES <= PUT_PIECE_BYTES
assert MOVE_BATCH_BLOCKS <= MOVE_QUEUE_BLOCKS
assert PAGE_BYTES % SLOT_ALIGN_BYTES == 0
assert MAX_BLOCK_BYTES // DATA_SHARDS + SLOT_ALIGN_BYTES <= WIRE_BODY_BYTES
assert WIRE_KEYS * (34 + 38 * (MAX_VERSIONS_PER_KEY - 1)) + PAGE_BYTES <= WIRE_METADATA_BYTES
assert 2 * (WIRE_METADATA_BYTES + WIRE_BODY_BYTES) <= WIRE_RECEIVE_BYTES
