"""A device whose streams run when the test says so: late, in any legal order, with refusals. Memory is host memory.

The model is CUDA's. An operation is enqueued by its call and runs later; a copy reads its source when it runs. Streams
are independent; only a wait for an event orders them, and a wait refers to the *latest record of the event at the time
of the call*: a wait for an event that was not recorded yet is a no-op. `unrecorded_event` and `record_into` exist here
alone, so that tests can break the rules that the product's seam makes unbreakable.

What runs next is chosen by `order`: a sequence of stream names (the first that can run, runs; streams not named come
last), or a random.Random. `hold` keeps a stream from running. Nothing runs by itself: `run_all`, `synchronize` and a
wait by the immediate compute stream run what is needed, in the calling thread; when that is blocked by a held stream,
they wait for the release, bounded. With steps_a_question the device also does that many operations whenever an event
is asked whether it is done, so that whoever polls sees progress.

`compute_stream()` is *immediate* by default: torch operations of a test's model run at once, as on a CPU, and a
wait on it runs the awaited operations first. deferred_compute=True makes it a stream like the others, for tests that
enqueue their own compute with `compute`.

`refuse(kind, numbers)` makes the numbered calls of a kind ("copy_in", "scatter", "gather", "copy_out", "rows") raise
DeviceError at the call, counted from 0; `refuse_share` does so at random.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from gdr.device import Event, Rows, gather_by_copies, of_type, scatter_by_copies
from gdr.errors import DeviceError

DEADLINE_S = 20.0


class Operation:
    """Something enqueued: an action, or a wait for another operation."""

    __slots__ = ("action", "awaited", "done", "kind")

    def __init__(self, kind: str, action: Callable[[], None] | None = None, awaited: Operation | None = None) -> None:
        self.kind = kind
        self.action = action
        self.awaited = awaited
        self.done = False


class FakeEvent:
    """An event as CUDA has it: it may be recorded never, once, or again."""

    __slots__ = ("__weakref__", "device", "latest")

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.latest: Operation | None = None

    def done(self) -> bool:
        self.device.asked()
        return self.latest is None or self.latest.done

    def synchronize(self) -> None:
        if self.latest is not None:
            self.device.run_until(self.latest)


class FakeStream:
    """A queue of operations."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.queue: deque[Operation] = deque()

    def record(self, *, timed: bool = False) -> Event:
        event = self.device.unrecorded_event()
        self.device.record_into(event, self)
        return event

    def wait(self, event: Event) -> None:
        self.device.wait_on(self, of_type(event, FakeEvent))

    def synchronize(self) -> None:
        with self.device.lock:
            last = self.queue[-1] if self.queue else None
        if last is not None:
            self.device.run_until(last)

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext()


class ImmediateStream(FakeStream):
    """The stream of a host that computes by itself: what it waits for is run before it goes on."""

    def record(self, *, timed: bool = False) -> Event:
        event = self.device.unrecorded_event()
        event.latest = Operation("record")
        event.latest.done = True
        return event

    def wait(self, event: Event) -> None:
        of_type(event, FakeEvent).synchronize()


class FakeDevice:
    """See the module's docstring."""

    name = "fake"
    torch_device = torch.device("cpu")

    def __init__(self, *, order: Sequence[str] | random.Random = (), staged: bool = True,
                 deferred_compute: bool = False, steps_a_question: int = 0) -> None:
        self.staged = staged
        self.lock = threading.Condition(threading.RLock())
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self.registered: dict[int, int] = {}
        self._steps_a_question = steps_a_question
        self._order = order
        self._held: set[str] = set()
        self._refuse: dict[str, Collection[int]] = {}
        self._share: tuple[random.Random, float, Collection[str]] | None = None
        self._events: weakref.WeakSet[FakeEvent] = weakref.WeakSet()
        self._streams: list[FakeStream] = []
        self._compute = FakeStream(self, "compute") if deferred_compute else ImmediateStream(self, "compute")
        self._streams.append(self._compute)

    # -- the seam ----------------------------------------------------------------------------------------------------

    def compute_stream(self) -> FakeStream:
        return self._compute

    def new_stream(self, name: str) -> FakeStream:
        stream = FakeStream(self, name)
        with self.lock:
            self._streams.append(stream)
        return stream

    def allocate(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.full(tuple(shape), 0xA5, dtype=torch.uint8)

    def integers(self, numbers: Sequence[int], stream: object) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64)

    def rows(self, numbers: Sequence[int], stream: object) -> Rows:
        self._count("rows")
        return Rows(tuple(numbers))

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: object) -> None:
        self._put("copy_in", stream, lambda: target.copy_(source))

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, stream: object) -> None:
        self._put("copy_out", stream, lambda: target.copy_(source))

    def scatter(self, pages: torch.Tensor, rows: Rows, source: torch.Tensor, stream: object) -> None:
        self._put("scatter", stream, lambda: scatter_by_copies(pages, rows, source))

    def gather(self, target: torch.Tensor, pages: torch.Tensor, rows: Rows, stream: object) -> None:
        self._put("gather", stream, lambda: gather_by_copies(target, pages, rows))

    def register(self, address: int, size: int) -> None:
        self._count("register")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        self._count("unregister")
        del self.registered[address]

    def elapsed_ms(self, start: Event, stop: Event) -> float:
        return 0.0

    # -- for tests ---------------------------------------------------------------------------------------------------

    def compute(self, action: Callable[[], object]) -> None:
        """Enqueue a kernel on the compute stream."""
        self._put("compute", self._compute, action)

    def refuse(self, kind: str, numbers: Collection[int]) -> None:
        self._refuse[kind] = frozenset(numbers)

    def refuse_share(self, rng: random.Random, share: float, kinds: Collection[str]) -> None:
        self._share = (rng, share, frozenset(kinds))

    def hold(self, name: str) -> None:
        with self.lock:
            self._held.add(name)

    def release(self, name: str) -> None:
        with self.lock:
            self._held.discard(name)
            self.lock.notify_all()

    def unrecorded_event(self) -> FakeEvent:
        event = FakeEvent(self)
        with self.lock:
            self._events.add(event)
        return event

    def record_into(self, event: FakeEvent, stream: FakeStream) -> None:
        """Record an event again or for the first time, as cudaEventRecord does."""
        with self.lock:
            event.latest = self._enqueue(stream, Operation("record"))

    def wait_on(self, stream: FakeStream, event: FakeEvent) -> None:
        """cudaStreamWaitEvent: for the latest record there is now; nothing when there is none."""
        with self.lock:
            if event.latest is not None and not event.latest.done:
                self._enqueue(stream, Operation("wait", awaited=event.latest))

    def live_events(self) -> int:
        with self.lock:
            return len(self._events)

    def pending(self) -> int:
        """Operations enqueued and not run."""
        with self.lock:
            return sum(len(stream.queue) for stream in self._streams)

    def run_all(self) -> None:
        """Run everything that can run; streams that are held, or wait for held ones, stay as they are."""
        with self.lock:
            while self._step():
                pass

    def asked(self) -> None:
        """Somebody looked whether an event is done: time passes."""
        with self.lock:
            for _ in range(self._steps_a_question):
                self._step()

    def run_until(self, operation: Operation) -> None:
        """Run what must and what may run until `operation` has."""
        until = time.monotonic() + DEADLINE_S
        with self.lock:
            while not operation.done:
                if not self._step():
                    left = until - time.monotonic()
                    if left <= 0 or not self._held:
                        raise AssertionError(f"{operation.kind} can never run: the streams wait for each other")
                    self.lock.wait(left)

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _count(self, kind: str) -> None:
        with self.lock:
            number = self.calls[kind]
            self.calls[kind] += 1
            refused = number in self._refuse.get(kind, ())
            if self._share is not None:
                rng, share, kinds = self._share
                refused = refused or (kind in kinds and rng.random() < share)
            if refused:
                self.refused[kind] += 1
                raise DeviceError(f"fake: {kind} number {number} refused")

    def _put(self, kind: str, stream: object, action: Callable[[], object]) -> None:
        self._count(kind)
        target = of_type(stream, FakeStream)
        if isinstance(target, ImmediateStream):
            action()
            return
        with self.lock:
            self._enqueue(target, Operation(kind, action))  # type: ignore[arg-type]

    def _enqueue(self, stream: FakeStream, operation: Operation) -> Operation:
        stream.queue.append(operation)
        self.lock.notify_all()
        return operation

    def _step(self) -> bool:
        ready = [stream for stream in self._streams if self._can_run(stream)]
        if not ready:
            return False
        stream = self._choose(ready)
        operation = stream.queue.popleft()
        if operation.action is not None:
            operation.action()
        operation.done = True
        operation.action = operation.awaited = None
        self.ran[operation.kind] += 1
        return True

    def _can_run(self, stream: FakeStream) -> bool:
        if not stream.queue or stream.name in self._held:
            return False
        awaited = stream.queue[0].awaited
        return awaited is None or awaited.done

    def _choose(self, ready: list[FakeStream]) -> FakeStream:
        if isinstance(self._order, random.Random):
            return self._order.choice(ready)
        names = list(self._order)
        return min(ready, key=lambda stream: names.index(stream.name) if stream.name in names else len(names))
