"""One connection: bytes from a non-blocking socket into the places that a `FrameParser` names, and queued bytes out.

Receiving is one `recvmsg_into` a step, straight into the destination, on the loop's thread: what its receiver names as
the place of a byte is asked immediately before the byte is put there (`efs/wire.py`). Sending is one `sendmsg` over
what is queued, which may be memory that is mapped from a file: nothing is copied on the way to the kernel. Asyncio's
streams would copy each byte several times (four times slower, measured).

A stream ends once, for whatever reason: the peer closes, the system fails, a frame is not what it must be, or its
owner says `close`. `lost(why)` is then called, and the socket is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from efs.clock import Clock
from efs.errors import EfsError, WireError
from efs.limits import WIRE_BURST_BYTES
from efs.wire import FrameParser, FrameSink

_BUFFERS_AT_ONCE: Final = 64
"""Of one sendmsg."""

Buffer = bytes | bytearray | memoryview


class Stream:
    """Belongs to the loop's thread."""

    def __init__(self, connection: socket.socket, sink: FrameSink, clock: Clock, lost: Callable[[str], None],
                 ahead: memoryview | None = None, most_unread: int | None = None) -> None:
        """ahead: as of `FrameParser`. most_unread: nothing is received while more bytes than that are queued; only for
        the side whose peer receives always."""
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._parser = FrameParser(sink, ahead)
        self._lost = lost
        self._queue: deque[memoryview] = deque()
        self._writing = False
        self._less = asyncio.Event()
        self._most_unread = most_unread
        self._reading = True
        self.closed = False
        self.queued_bytes = 0
        self.received_at = self.frame_began = self.sent_at = clock.monotonic()
        self._loop.add_reader(connection.fileno(), self._readable)

    @property
    def frame_ms(self) -> float:
        """How long the frame that is coming in has been coming; 0 between frames, and while none is received."""
        waits = self._parser.within and self._reading
        return (self._clock.monotonic() - self.frame_began) * 1000 if waits else 0.0

    @property
    def stuck_ms(self) -> float:
        """How long nothing of what is queued could be sent; 0 with nothing queued."""
        return (self._clock.monotonic() - self.sent_at) * 1000 if self._queue else 0.0

    # -- out

    def send(self, *parts: Buffer) -> None:
        """Send, now or as soon as the peer takes it. The parts must not change before that. Nothing after the end."""
        if self.closed:
            return
        if not self._queue:
            self.sent_at = self._clock.monotonic()
        for part in parts:
            view = memoryview(part)
            if len(view):
                self._queue.append(view)
                self.queued_bytes += len(view)
        if not self._writing:
            self._flush()
        self._listen()

    async def room(self, most_bytes: int) -> None:
        """Wait until at most so many bytes are queued. WireError when the connection ends."""
        while self.queued_bytes > most_bytes and not self.closed:
            self._less.clear()
            await self._less.wait()
        if self.closed:
            raise WireError("the connection has ended")

    def _flush(self) -> None:
        queue = self._queue
        try:
            while queue:
                parts = [queue[at] for at in range(min(len(queue), _BUFFERS_AT_ONCE))]
                self._sent(self._socket.sendmsg(parts))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if bool(queue) != self._writing:
            self._writing = bool(queue)
            if queue:
                self._loop.add_writer(self._socket.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._socket.fileno())
        self._less.set()
        self._listen()

    def _listen(self) -> None:
        """Receive, or not, as what is queued says."""
        reading = self._most_unread is None or self.queued_bytes <= self._most_unread
        if reading == self._reading or self.closed:
            return
        self._reading = reading
        if reading:
            self.frame_began = self._clock.monotonic()
            self._loop.add_reader(self._socket.fileno(), self._readable)
        else:
            self._loop.remove_reader(self._socket.fileno())

    def _sent(self, count: int) -> None:
        self.queued_bytes -= count
        self.sent_at = self._clock.monotonic()
        queue = self._queue
        while count:
            if count < len(queue[0]):
                queue[0] = queue[0][count:]
                return
            count -= len(queue.popleft())

    # -- in

    def _readable(self) -> None:
        burst = 0
        try:
            while burst < WIRE_BURST_BYTES and self._reading and not self.closed:
                views = self._parser.views()
                wanted = sum(map(len, views))
                count = self._socket.recvmsg_into(views)[0]
                if count == 0:
                    self.close("the other side closed the connection")
                    return
                self.received_at = self._clock.monotonic()
                if not self._parser.within:
                    self.frame_began = self.received_at
                frames = self._parser.frames
                self._parser.advance(count)
                if self._parser.frames != frames:
                    self.frame_began = self.received_at
                burst += count
                if count < wanted:
                    return
        except (BlockingIOError, InterruptedError):
            pass
        except EfsError as error:
            self.close(str(error))
        except OSError as error:
            self.close(error.strerror or str(error))
        except BaseException:
            self.close("a frame could not be dealt with")
            raise

    # -- the end

    def close(self, why: str) -> None:
        """End it. What is queued is not sent any more. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._parser.stop()
        descriptor = self._socket.fileno()
        self._loop.remove_reader(descriptor)
        if self._writing:
            self._loop.remove_writer(descriptor)
        self._socket.close()
        self._queue.clear()
        self.queued_bytes = 0
        self._less.set()
        self._lost(why)
