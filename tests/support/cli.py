"""The command line in tests: in this process through typer's runner, or as a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvstore.cli.app import make_app

ROOT = Path(__file__).resolve().parents[2]
PROCESS_DEADLINE_S = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left: its exit code and what it wrote."""

    code: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode()

    def document(self) -> Any:
        """Standard output as the one JSON document that it must be."""
        return json.loads(self.out)

    @property
    def error_line(self) -> str:
        """Standard error as the one line that it must be."""
        (line,) = self.err.splitlines()
        assert "Traceback" not in line
        assert line.startswith("kvstore: ")
        return line.removeprefix("kvstore: ")


def run(
    *words: str, store: str | Path | None = None, stdin: bytes | None = None, environ: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command in this process. KVSTORE_ variables of the caller's environment do not reach it."""
    variables: dict[str, str | None] = {name: None for name in os.environ if name.startswith("KVSTORE_")}
    variables |= environ or {}
    if store is not None:
        variables["KVSTORE_STORE"] = str(store)
    result = CliRunner(env=variables).invoke(make_app(), list(words), input=stdin, catch_exceptions=False)
    return Outcome(result.exit_code, result.stdout_bytes, result.stderr)


def command(*words: str) -> list[str]:
    """The words of a real process that runs `kvstore`."""
    return [sys.executable, "-c", "from kvstore.cli import main; main()", *words]


def environment(store: str | Path | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    if store is not None:
        kept["KVSTORE_STORE"] = str(store)
    return kept


def run_process(*words: str, store: str | Path | None = None, stdin: bytes | None = None) -> Outcome:
    """Run a command as a real process."""
    done = subprocess.run(
        command(*words),
        cwd=ROOT,
        env=environment(store),
        input=stdin,
        capture_output=True,
        timeout=PROCESS_DEADLINE_S,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr.decode())


def write_blocks(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def write_tokens(path: Path, tokens: Sequence[int]) -> str:
    path.write_text(" ".join(map(str, tokens)))
    return str(path)
