"""Work that goes on beside the calls: held, logged when it dies, and started again.

A task that only the event loop knows may be collected in the middle of its work, and its exception is seen by nobody.
`Background` holds its tasks, logs what ended one and starts it anew after a pause, until `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from efs.limits import BACKGROUND_RESTART_MS

_LOG = logging.getLogger(__name__)


class Background:
    """Named endless tasks."""

    def __init__(self, restart_ms: float = BACKGROUND_RESTART_MS) -> None:
        self._restart_ms = restart_ms
        self._tasks: set[asyncio.Task[None]] = set()
        self.restarts = 0

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work()` until `close`; it is called again when it raises, and not when it returns."""
        task = asyncio.create_task(self._keep(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
                return
            except Exception:
                self.restarts += 1
                _LOG.exception("background task %s died and is started again", name)
            await asyncio.sleep(self._restart_ms / 1000)

    async def close(self) -> None:
        """Cancel everything and wait until it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
