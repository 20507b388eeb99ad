"""The frame of the command line: options, errors as one line with an exit code, JSON, commands of other packages."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import typer
from typer import TyperException

from efs.errors import Locked, NodeFull, StoreNotFound
from efs.findings import Kind
from kvstore.cli import app as app_module
from kvstore.cli.failures import (
    BROKEN_PIPE,
    COULD_NOT_RUN,
    DAMAGE,
    INTERRUPTED,
    NOT_ALL,
    WRONG_REQUEST,
    describe,
    one_line,
)
from kvstore.cli.terminal import Terminal, human_age, human_bytes
from tests.support.cli import ROOT, command, environment, run, run_process
from tests.support.laidstore import LaidStore, lay_store, make_blocks

COMMANDS = (
    "init",
    "status",
    "top",
    "put",
    "get",
    "match",
    "ls",
    "inspect",
    "fsck",
    "repair",
    "scrub",
    "node replace",
    "cluster add-spare",
    "cluster remove-spare",
    "cluster replace-node",
    "config",
    "doctor",
    "bench",
    "replay",
    "demo",
    "tenant add",
    "tenant list",
    "tenant rotate",
    "tenant purge",
    "tenant quota",
)


@pytest.fixture
def store(tmp_path: Path) -> LaidStore:
    return lay_store(str(tmp_path / "store"), make_blocks(seed=1, count=5))


# -- Help -----------------------------------------------------------------------------------------------------------


def test_help_without_a_command_lists_every_command() -> None:
    shown = run()
    assert shown.code == 0
    for name in COMMANDS:
        assert f"  {name.split()[0]} " in shown.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_an_example_and_json(name: str) -> None:
    shown = run(*name.split(), "--help")
    assert shown.code == 0
    assert f"  kvstore {name}" in shown.out
    assert "Example" in shown.out
    assert "--json" in shown.out
    assert "\b" not in shown.out


ROOT_ALONE = "The store: its root."
A_CLUSTER = {"cluster replace-node": "The cluster: cluster.toml or etcd URL.",
             "cluster move-node": "The cluster: etcd://HOST:PORT/NAME.",
             **dict.fromkeys(("put", "get", "match", "repair", "scrub", "gc", "sweep", "tenant purge", "top", "config",
                              "doctor"), "The store: root, cluster.toml or etcd URL.")}


@pytest.mark.parametrize("name", [*A_CLUSTER, "init", "status", "ls", "inspect", "fsck", "node replace", "tenant add",
                                  "tenant list", "tenant rotate", "tenant quota"])
def test_help_says_what_a_command_takes_for_a_store(name: str) -> None:
    shown = " ".join(run(*name.split(), "--help").out.split())
    said = re.findall(r"--store URL (.+?\.) Default: \$KVSTORE_STORE\.", shown)
    assert said == [A_CLUSTER.get(name, ROOT_ALONE)]


@pytest.mark.parametrize("name", ["top", "node serve"])
def test_help_says_which_commands_print_several_documents(name: str) -> None:
    assert "Print JSON documents, one a line, instead of text." in " ".join(run(*name.split(), "--help").out.split())


def test_the_document_names_every_command_option_exit_code_and_finding() -> None:
    document = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"## {name.split()[0]}" in document or name.split()[0] in ("put", "get", "match")
        assert f"kvstore {name}" in document.replace("kvstore put  ", "kvstore put").replace(
            "kvstore get  ", "kvstore get"
        )
        options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", run(*name.split(), "--help").out, re.MULTILINE)
        assert "--json" in options
        assert [option for option in options if option not in document] == [], name
    for kind in Kind:
        assert f"| `{kind.value}` |" in document
    for code in (NOT_ALL, WRONG_REQUEST, DAMAGE, COULD_NOT_RUN, INTERRUPTED, BROKEN_PIPE):
        assert f"| {code} |" in document


def test_short_help_option_works_too() -> None:
    assert run("status", "-h").out == run("status", "--help").out


def test_version_is_printed() -> None:
    assert run("--version").out.startswith("kvstore")


# -- Mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("nosuch",), "nosuch"),
        (("status", "--nope"), "--nope"),
        (("inspect",), "KEY"),
        (("put",), "--blocks"),
        (("tenant",), "command"),
        (("status", "extra"), "extra"),
        (("ls", "--limit", "x"), "--limit"),
        (("fsck", "--max-duration", "abc"), "--max-duration"),
        (("status", "--store", "ftp://host/path"), "ftp"),
        (("status", "--store", "etcd://127.0.0.1:2379/prod"), "etcd"),
        (("status", "--store", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--set", "speed=9", "config"), "speed"),
        (("--set", "capacity", "config"), "capacity"),
        (("--config", "/nowhere.toml", "config"), "/nowhere.toml"),
        (("status",), "KVSTORE_STORE"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_with_exit_code_2(words: tuple[str, ...], named: str) -> None:
    done = run(*words)
    assert done.code == 2
    assert named in done.error_line
    assert done.out == ""


def test_a_mistake_with_json_leaves_standard_output_empty() -> None:
    done = run("status", "--store", "/nowhere/at/all", "--json")
    assert (done.code, done.out) == (2, "")
    assert "/nowhere/at/all" in done.error_line


def test_an_error_of_the_store_carries_its_own_exit_code() -> None:
    assert describe(StoreNotFound("/x"))[1] == 2
    assert describe(Locked("/x", 77)) == ("/x is owned by process 77", 8)
    assert describe(NodeFull(3, "no slots"))[1] == 8


def test_a_missing_file_is_a_mistake_and_a_refusal_of_the_system_is_not() -> None:
    assert describe(FileNotFoundError(errno.ENOENT, "No such file or directory", "/a/b")) == (
        "/a/b: No such file or directory",
        2,
    )
    assert describe(PermissionError(errno.EACCES, "Permission denied", b"/a/b")) == ("/a/b: Permission denied", 8)
    assert describe(OSError(errno.EIO, "Input/output error")) == ("Input/output error", 8)


def test_an_internal_error_is_one_line_and_says_how_to_see_more() -> None:
    line, code = describe(ZeroDivisionError("division\nby zero"))
    assert code == 8
    assert "\n" not in line
    assert "ZeroDivisionError: division by zero" in line
    assert "--traceback" in line


def test_control_characters_never_reach_the_terminal() -> None:
    assert one_line("a\x1b[31mb\n\tc\x00d") == "a [31mb c d"


def test_a_usage_error_says_where_help_is() -> None:
    assert "kvstore status --help" in run("status", "--nope").error_line
    assert describe(TyperException("plain"))[0] == "plain"


def test_an_interrupt_is_exit_code_130() -> None:
    assert describe(KeyboardInterrupt())[1] == 130


def failing(application: typer.Typer) -> None:
    @application.command("fail")
    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    @application.command("interrupt")
    def interrupt() -> None:
        raise KeyboardInterrupt


def test_a_defect_ends_as_one_line_and_with_traceback_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "REGISTER", (*app_module.REGISTER, failing))
    done = run("fail")
    assert done.code == 8
    assert "on purpose" in done.error_line
    shown = run("--traceback", "fail")
    assert shown.code == 8
    assert "Traceback" in shown.err
    assert "raise ZeroDivisionError" in shown.err
    assert run("interrupt").code == 130


# -- Where the store comes from -------------------------------------------------------------------------------------


def test_the_store_is_named_by_option_environment_file_or_before_the_command(store: LaidStore, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f'store = "{store.root}"\n')
    expected = run("status", "--json", "--store", store.root).document()
    assert expected["blocks"] == 5
    for words, variables in (
        (("status", "--json"), {"KVSTORE_STORE": store.root}),
        (("--store", store.root, "status", "--json"), {}),
        (("--store", store.root, "--json", "status"), {"KVSTORE_STORE": "/elsewhere"}),
        (("--config", str(settings), "status", "--json"), {}),
        (("status", "--json"), {"KVSTORE_CONFIG": str(settings)}),
        (("--set", f"store={store.root}", "status", "--json"), {}),
        (("--store", "/elsewhere", "status", "--json", "--store", store.root), {}),
        (("status", "--json", "--store", f"file://{store.root}"), {}),
    ):
        done = run(*words, environ=variables)
        assert (done.code, done.document()["cluster_id"]) == (0, expected["cluster_id"]), words


def test_json_is_exactly_one_document_and_nothing_else(store: LaidStore) -> None:
    for words in (("status",), ("ls",), ("fsck",), ("config",), ("doctor",), ("tenant", "list")):
        done = run(*words, "--json", store=store.root)
        assert done.err == "", words
        assert isinstance(done.document(), dict), words


# -- Commands of other packages -------------------------------------------------------------------------------------


class FakeEntry:
    """An entry point that loads what it was given, or fails."""

    def __init__(self, name: str, loaded: object) -> None:
        self.name = name
        self.value = f"package_{name}:register"
        self._loaded = loaded

    def load(self) -> object:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[FakeEntry]:
    found: list[FakeEntry] = []

    def entry_points(*, group: str) -> list[FakeEntry]:
        assert group == "kvstore.commands"
        return found

    monkeypatch.setattr(app_module, "entry_points", entry_points)
    return found


def test_another_package_adds_a_command(entries: list[FakeEntry]) -> None:
    def register(application: typer.Typer) -> None:
        @application.command("hello")
        def hello() -> int:
            print("hello from elsewhere")
            return 4

    entries.append(FakeEntry("good", register))
    done = run("hello")
    assert (done.code, done.out) == (4, "hello from elsewhere\n")


def test_a_package_that_cannot_be_loaded_costs_a_line_and_no_command(
    entries: list[FakeEntry], store: LaidStore, capsys: pytest.CaptureFixture[str]
) -> None:
    entries.append(FakeEntry("bad", ImportError("no module\nnamed x")))
    done = run("status", store=store.root)
    assert (done.code, done.out[:6]) == (0, "store ")
    (line,) = capsys.readouterr().err.splitlines()
    assert "package_bad:register" in line
    assert "no module named x" in line


# -- Real processes -------------------------------------------------------------------------------------------------


def test_a_real_process_prints_one_line_and_its_exit_code() -> None:
    done = run_process("status", "--store", "/nowhere/at/all")
    assert done.code == 2
    assert "/nowhere/at/all" in done.error_line


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    store = lay_store(str(tmp_path / "store"), make_blocks(seed=2, count=1500))
    with subprocess.Popen(
        command("ls", "--limit", "0"),
        cwd=ROOT,
        env=environment(store.root),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read().decode()
        code = process.wait(30)
    assert errors == ""
    assert code == 141


def test_no_progress_bar_and_no_colour_in_a_pipe(store: LaidStore) -> None:
    done = run_process("fsck", store=store.root)
    assert done.code == 0
    assert done.err == ""
    assert "\x1b" not in done.out
    assert "\r" not in done.out


def test_a_progress_bar_appears_on_a_terminal(store: LaidStore) -> None:
    """The same command with a pseudo-terminal for both outputs."""
    leader, follower = os.openpty()
    try:
        process = subprocess.Popen(
            command("fsck"),
            cwd=ROOT,
            env={**environment(store.root), "TERM": "xterm"},
            stdout=follower,
            stderr=follower,
        )
        os.close(follower)
        shown = bytearray()
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:
                break
            if not part:
                break
            shown += part
        assert process.wait(30) == 0
    finally:
        os.close(leader)
    assert b"check" in shown
    assert b"%" in shown


# -- Small things ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1024**3, "1.0 GiB"), (5000 * 1024**4, "5000.0 TiB")],
)
def test_sizes_for_people(size: int, shown: str) -> None:
    assert human_bytes(size) == shown


@pytest.mark.parametrize(
    ("age", "shown"), [(-1, "0 s"), (59, "59 s"), (90, "1.5 min"), (5400, "1.5 h"), (129_600, "1.5 d")]
)
def test_ages_for_people(age: float, shown: str) -> None:
    assert human_age(age) == shown


def test_square_brackets_in_a_remark_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(False).remark("[red]not red[/red]")
    assert capsys.readouterr().err == "[red]not red[/red]\n"


# -- Standard streams -----------------------------------------------------------------------------------------------


def shell(redirections: str, *words: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command with streams as a shell leaves them."""
    return subprocess.run(["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *command(*words)], cwd=ROOT,
                          env=environment() | variables, capture_output=True, timeout=60, check=False)


def test_without_standard_output_nothing_is_done(tmp_path: Path) -> None:
    done = shell(">&-", "init", str(tmp_path / "store"), "--capacity", "120MiB")
    assert (done.returncode, done.stderr) == (COULD_NOT_RUN, b"kvstore: standard output is closed\n")
    assert list(tmp_path.iterdir()) == []


def test_without_standard_error_errors_are_lost_and_no_file_gets_them(tmp_path: Path) -> None:
    done = shell("2>&-", "match", "--nonsense")
    assert (done.returncode, done.stdout, done.stderr) == (WRONG_REQUEST, b"", b"")
    made = shell("2>&-", "init", str(tmp_path / "store"), "--capacity", "120MiB")
    assert made.returncode == 0
    assert made.stdout.startswith(b"store made at ")
    assert shell("<&- >&- 2>&-", "config").returncode == COULD_NOT_RUN


def test_without_standard_input_it_cannot_be_read() -> None:
    done = shell("<&-", "match", "--tokens", "-", "--block-bytes", "4096", "--store", "nowhere")
    assert (done.returncode, done.stderr) == (WRONG_REQUEST, b"kvstore: -: standard input is closed\n")
    assert shell("<&-", "config").returncode == 0


def test_what_standard_output_cannot_write_is_escaped() -> None:
    shown = shell("", "config", "store", "--store", "é€", PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"\\xe9\\u20ac" in shown.stdout
    listed = shell("", "--json", "config", "store", "--store", "é€", PYTHONIOENCODING="ascii")
    assert json.loads(listed.stdout)["settings"][0]["value"] == "é€"
    raw = shell("", "--json", "config", "store", "--store", "\udcff")
    assert json.loads(raw.stdout)["settings"][0]["value"] == "\udcff"


def test_an_argument_without_utf8_is_one_line_that_names_it(store: LaidStore, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("1 2 3")
    for option in ("--model", "--salt", "--lora", "--weights", "--tenant"):
        done = run("match", "--tokens", str(tmp_path / "t.txt"), "--block-bytes", "4096", option, "\udcff",
                   store=store.root)
        assert (done.code, option[2:] in done.error_line) == (WRONG_REQUEST, True)
        assert "internal error" not in done.error_line
