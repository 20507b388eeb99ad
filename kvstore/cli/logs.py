"""Log records of a long-running command on standard error, as text or as one JSON object a line.

A JSON line has `time` (UTC, ISO 8601 with milliseconds), `level`, `logger`, `node` (the index of the node that it is
about, null when it is about none in particular), `message`, and `error` when an exception hangs on it: its type and
text, never a traceback. A line is one record, whatever the message contains.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Final

from kvstore.cli.failures import OneLine, UsageMistake

FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")


class JsonLines(logging.Formatter):
    """node: what records are about that do not say so themselves, for a process that serves one node."""

    def __init__(self, node: int | None) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": moment.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name,
            "node": getattr(record, "node", self._node), "message": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        return json.dumps(line, ensure_ascii=False)


def set_up_logs(log_format: str, level: str, node: int | None) -> None:
    """Send the records of this process to standard error. UsageMistake names what is not known."""
    if log_format not in FORMATS:
        raise UsageMistake(f"--log-format {log_format}: must be {' or '.join(FORMATS)}")
    if level not in LEVELS:
        raise UsageMistake(f"--log-level {level}: must be one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(node) if log_format == "json" else OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
