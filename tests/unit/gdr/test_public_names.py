"""What `import gdr` offers, and that naming the package's command costs no torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gdr

ROOT = Path(__file__).resolve().parents[3]


def test_the_public_names_are_these_and_all_can_be_had() -> None:
    assert gdr.__all__ == [
        "Aborted", "DeviceError", "Engine", "EngineClosed", "EngineConfig", "EngineError", "InvalidEngineArgument",
        "PagesExhausted", "Phase", "RequestTooLarge", "Sequence", "run_all",
    ]
    for name in gdr.__all__:
        assert getattr(gdr, name).__module__.startswith("gdr.")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gdr.nonsense


def test_the_command_is_registered_without_importing_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    target = project["project"]["entry-points"]["kvstore.commands"]["engine"]
    assert target == "gdr.cli:register"
    check = (
        "import sys, typer; from gdr.cli import register; app = typer.Typer(); register(app); "
        "assert app.registered_groups[0].name == 'engine'; "
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT, timeout=60)


def test_the_command_names_what_is_missing_where_torch_is_not_installed() -> None:
    check = (
        "import sys, types; sys.modules['torch'] = None\n"
        "from gdr.cli import demo\n"
        "from kvstore.demo.source import MissingExtra\n"
        "try:\n    demo(None)\n"
        "except MissingExtra as missing:\n    assert 'torch' in str(missing) and missing.exit_code == 2\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT, timeout=60)
