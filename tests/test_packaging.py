"""The unit files: accepted by systemd where there is one, and starting a command that exists."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.support.cli import ROOT, run

UNIT: Final = ROOT / "packaging" / "systemd" / "kvstore-node@.service"


def settings(name: str) -> list[str]:
    return [line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.startswith(f"{name}=")]


def test_the_unit_starts_a_command_with_options_that_it_has() -> None:
    (line,) = settings("ExecStart")
    words = line.split()
    assert words[:4] == ["/usr/bin/env", "kvstore", "node", "serve"]
    known = run("node", "serve", "--help").out
    options = [word for word in words if word.startswith("--")]
    assert {"--listen", "--metrics", "--log-format"} <= set(options)
    assert [option for option in options if option not in known] == []
    given = {text.partition("=")[0] for text in settings("Environment")}
    assert {word.strip("${}") for word in words if word.startswith("$")} <= given


def test_the_unit_lets_the_server_drain_and_keeps_the_directory_of_sockets() -> None:
    assert settings("KillSignal") == ["SIGTERM"]
    assert int(settings("TimeoutStopSec")[0]) >= 20
    assert settings("RuntimeDirectoryPreserve") == ["yes"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # Named as an instance, so that specifiers are expanded too.
    copy = tmp_path / UNIT.name.replace("@", "@03")
    shutil.copy(UNIT, copy)
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60,
                          check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "kvstore" in line]) == (0, [])
