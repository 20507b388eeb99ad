"""The demonstration: a real language model resumes a conversation from blocks of a real store, in separate processes.

Use by a command line (all of it; this package prints nothing, and only its worker processes import torch):

    report = run(workdir=None, keep=False, store=None, turns=3, remark=terminal.remark)
    terminal.result(report.document(), lambda console: console.print(report.table()))
    return report.exit_code

`source` finds the model's file · `model` converts and loads it · `conversation` makes the text · `worker` is one
process of the demonstration · `damage` breaks a store · `steps` says what must come out · `conduct` runs the steps ·
`report` shows them.
"""

from __future__ import annotations

from kvstore.demo.conduct import DemoFailed, run
from kvstore.demo.report import DemoReport
from kvstore.demo.source import MissingExtra

__all__ = ["DemoFailed", "DemoReport", "MissingExtra", "run"]
