"""The reference work over bare sockets: what a fetch from twelve processes cannot be faster than on this machine.

Twelve processes send what twelve nodes would be asked for, eleven tenths of the work, from a mapped file to loopback
connections; this process receives it into the landing. No table is looked up, nothing is verified, and no code of a
store runs.
"""

from __future__ import annotations

import mmap
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from efs.endpoint import Endpoint, listen, tune
from efs.limits import DATA_SHARDS, FANOUT, MIB, STRIPE_SHARDS
from efs.osio import SystemIo
from kvstore.benchwork import BenchFailed, Plan, Times, Work, copy_ms

_AT_ONCE_BYTES: Final = 1 * MIB
_START_S: Final = 60.0


def timed_bare_sockets(plan: Plan, work: Work) -> Times:
    """Send and receive it as often as the plan says."""
    path = plan.directory / "bare"
    each = len(work.expected) * FANOUT // DATA_SHARDS // STRIPE_SHARDS
    path.write_bytes(work.expected.tobytes())
    listener = listen(SystemIo(), Endpoint(host="127.0.0.1"))
    senders = [_start(listener.getsockname()[1], str(path), each) for _ in range(STRIPE_SHARDS)]
    connections: list[socket.socket] = []
    try:
        listener.settimeout(_START_S)
        for _ in senders:
            connection, _ = listener.accept()
            connections.append(connection)
            tune(connection)
        times = Times()
        for _ in range(plan.runs + 1):
            times.memcpy.append(copy_ms(work))
            times.work.append(_receive(connections, work.landing.data, each))
        del times.memcpy[0], times.work[0]
        return times
    except OSError as error:
        raise BenchFailed(f"bare sockets: {error.strerror or error}") from error
    finally:
        for opened in (*connections, listener):
            opened.close()
        for sender in senders:
            sender.kill()
            sender.wait()
        path.unlink()


def _start(port: int, path: str, size: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "from kvstore.benchwire import send; send()", str(port), path,
                             str(size)], stderr=subprocess.DEVNULL)


def _receive(connections: Sequence[socket.socket], landing: memoryview, size: int) -> float:
    """Ask every sender, and return the ms until the last byte is there."""
    left = dict.fromkeys(connections, size)
    with selectors.DefaultSelector() as selector:
        for number, connection in enumerate(connections):
            selector.register(connection, selectors.EVENT_READ, (connection, number * size % (len(landing) - size)))
        started = time.perf_counter()
        for connection in connections:
            connection.send(b"x")
        while left:
            for key, _ in selector.select():
                connection, start = key.data
                at = start + size - left[connection]
                count = connection.recv_into(landing[at : min(at + _AT_ONCE_BYTES, start + size)])
                if not count:
                    raise BenchFailed("bare sockets: a sender has ended")
                left[connection] -= count
                if not left[connection]:
                    selector.unregister(connection)
                    del left[connection]
        return (time.perf_counter() - started) * 1000


def send() -> None:
    """A sender: `size` bytes from the beginning of the file, each time that a byte comes, until there are no more."""
    port, path, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        while connection.recv(1):
            with memoryview(mapped) as data:
                connection.sendall(data[:size])
