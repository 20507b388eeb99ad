"""Log records as JSON lines: one record a line whatever is in it, and no traceback."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any

from kvstore.cli.logs import JsonLines


def line(message: str, *values: object, node: int | None = None, error: BaseException | None = None,
         of_process: int | None = None) -> dict[str, Any]:
    log = logging.getLogger("efs.somewhere")
    raised = (type(error), error, error.__traceback__) if error is not None else None
    record = log.makeRecord(log.name, logging.WARNING, __file__, 1, message, values, raised,
                            extra={} if node is None else {"node": node})
    text = JsonLines(of_process).format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_record_has_its_fields_and_nothing_else() -> None:
    found = line("%s hangs", "node 3", node=3)
    moment = found.pop("time")
    assert found == {"level": "warning", "logger": "efs.somewhere", "node": 3, "message": "node 3 hangs"}
    assert moment.endswith("Z")
    assert datetime.fromisoformat(moment).tzinfo is not None


def test_the_only_node_of_a_process_is_meant_where_a_record_does_not_say() -> None:
    assert line("x")["node"] is None
    assert line("x", of_process=4)["node"] == 4
    assert line("x", node=3, of_process=4)["node"] == 3


def test_lines_and_errors_stay_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        found = line("a\nb \N{SNOWMAN}", error=error)
    assert found["message"] == "a\nb \N{SNOWMAN}"
    assert found["error"] == "ValueError: two\nlines"
