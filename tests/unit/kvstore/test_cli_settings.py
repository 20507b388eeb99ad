"""config, doctor, tenant: settings with their sources, the machine, whose blocks."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from efs.nodedir import OwnerLock
from efs.osio import SystemIo
from kvstore import machine
from kvstore.machine import Mount, examine, mount_of
from kvstore.tenants import TENANTS_FILE, find_tenant
from tests.support.cli import run
from tests.support.laidstore import lay_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    lay_store(str(tmp_path / "store"), [])
    return tmp_path / "store"


# -- config ---------------------------------------------------------------------------------------------------------


def test_settings_come_with_value_and_source(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('get_deadline_ms = 111\nput_deadline_ms = 222\ncapacity = "10GB"\n')
    done = run(
        "--config",
        str(file),
        "--set",
        "put_deadline_ms=333",
        "config",
        "--json",
        environ={"KVSTORE_MAPPED": "yes", "KVSTORE_GET_DEADLINE_MS": "444"},
    )
    seen = {setting["name"]: (setting["value"], setting["source"]) for setting in done.document()["settings"]}
    assert seen["put_deadline_ms"] == (333, "argument")
    assert seen["get_deadline_ms"] == (444, "environment KVSTORE_GET_DEADLINE_MS")
    assert seen["mapped"] == (True, "environment KVSTORE_MAPPED")
    assert seen["capacity"] == (10**10, f"file {file}")
    assert seen["match_deadline_ms"] == (1000, "default")
    assert "store" not in done.document()


def test_one_setting_is_shown_alone() -> None:
    done = run("config", "get_deadline_ms", "--json").document()
    assert [setting["name"] for setting in done["settings"]] == ["get_deadline_ms"]
    assert "5000" in run("config", "get_deadline_ms").out


def test_an_unknown_setting_is_named() -> None:
    done = run("config", "speed")
    assert done.code == 2
    assert "'speed'" in done.error_line
    assert "get_deadline_ms" in done.error_line


def test_the_settings_of_the_store_follow(root: Path) -> None:
    shown = {setting["name"]: setting for setting in run("config", "--json", store=root).document()["store"]}
    assert shown["durability"]["value"] == "process"
    assert shown["capacity_bytes"]["source"] == f"file {root / 'store.toml'}"
    assert "store: durability" in run("config", store=root).out


def test_config_without_a_store_on_disk_shows_what_there_is(tmp_path: Path) -> None:
    done = run("config", "--json", store=tmp_path / "not-yet")
    assert done.code == 0
    assert "store" not in done.document()


@pytest.mark.parametrize("url", ["etcd://127.0.0.1:2379/prod", "/nowhere/cluster.toml"])
def test_settings_and_the_machine_are_shown_where_the_store_is_a_cluster(url: str) -> None:
    done = run("config", "--json", store=url)
    assert (done.code, "store" in done.document()) == (0, False)
    found = run("doctor", "--json", store=url)
    assert found.document()["directory"] == os.getcwd()


# -- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_finds_what_the_store_needs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run("doctor", "--directory", str(tmp_path), "--json")
    seen = {check["name"]: check for check in done.document()["checks"]}
    assert {
        "file system",
        "fallocate",
        "RWF_NOWAIT",
        "erasure code",
        "/dev/shm",
        "open files",
        "locked memory",
        "LMDB",
        "clock source",
    } <= seen.keys()
    assert all(
        check["status"] in ("ok", "warn", "fail") and check["value"] and check["meaning"] for check in seen.values()
    )
    assert done.code == (0 if done.document()["ok"] else 8)
    assert seen["erasure code"]["value"].startswith(("isal", "pyeclib"))
    assert list(tmp_path.iterdir()) == []
    assert "RWF_NOWAIT" in run("doctor", "--directory", str(tmp_path)).out


def test_doctor_names_a_directory_that_is_not_there() -> None:
    done = run("doctor", "--directory", "/nowhere/at/all")
    assert done.code == 2
    assert "/nowhere/at/all" in done.error_line


def test_doctor_examines_the_stores_own_place(root: Path) -> None:
    assert run("doctor", "--json", store=root).document()["directory"] == str(root)


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /mnt/with\\040space rw,nosuid - nfs4 server:/x rw
31 22 0:31 / /mnt rw - tmpfs tmpfs rw
32 31 0:32 / /mnt/disk ro,noatime shared:1 - xfs /dev/vdb rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/lib", Mount("/", "ext4", "rw,relatime")),
        ("/mnt/with space/store", Mount("/mnt/with space", "nfs4", "rw,nosuid")),
        ("/mnt/disk", Mount("/mnt/disk", "xfs", "ro,noatime")),
        ("/mnt/diskette", Mount("/mnt", "tmpfs", "rw")),
    ],
)
def test_the_mount_of_a_path_is_the_longest_that_holds_it(path: str, expected: Mount) -> None:
    assert mount_of(Path(path), MOUNTS) == expected


@pytest.mark.parametrize(
    ("kind", "options", "status"),
    [
        ("ext4", "rw", "ok"),
        ("ext4", "ro", "fail"),
        ("nfs4", "rw", "fail"),
        ("fuse.sshfs", "rw", "fail"),
        ("tmpfs", "rw", "warn"),
        ("overlay", "rw", "warn"),
    ],
)
def test_a_file_system_is_judged_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: str, status: str
) -> None:
    monkeypatch.setattr(machine, "mount_of", lambda path, text: Mount("/x", kind, options))
    (found,) = [check for check in examine(tmp_path) if check.name == "file system"]
    assert found.status == status
    assert found.value.startswith(kind)


def test_a_failing_check_is_exit_code_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "mount_of", lambda path, text: Mount("/x", "nfs", "rw"))
    done = run("doctor", "--directory", str(tmp_path), "--json")
    assert (done.code, done.document()["ok"]) == (8, False)


def test_a_directory_that_cannot_be_written_is_a_failing_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**where: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    (found,) = [check for check in examine(tmp_path) if check.name == "write access"]
    assert (found.status, found.value) == ("fail", "Permission denied")


# -- tenant ---------------------------------------------------------------------------------------------------------


def test_tenants_are_added_and_listed_and_their_secret_is_never_shown(root: Path) -> None:
    added = run("tenant", "add", "acme", "--json", store=root)
    secret = find_tenant(str(root), "acme").secret.hex()
    listed = run("tenant", "list", "--json", store=root)
    text = run("tenant", "list", store=root)
    (shown,) = listed.document()["tenants"]
    assert shown == {**added.document(), "stored_bytes": 0, "payload_bytes": 0, "purge_pending": []}
    assert listed.document()["exact"] is True
    assert added.document()["generation"] == 0
    assert "acme" in text.out
    for done in (added, listed, text):
        assert secret not in done.out + done.err
    assert stat.S_IMODE(os.stat(root / TENANTS_FILE).st_mode) == 0o600


def test_a_store_without_tenants_lists_none(root: Path) -> None:
    assert run("tenant", "list", store=root).out == "no tenants\n"
    assert run("tenant", "list", "--json", store=root).document() == {"tenants": [], "exact": True}


def test_rotating_needs_a_confirmation_and_keeps_the_old_tag(root: Path) -> None:
    before = run("tenant", "add", "acme", "--json", store=root).document()
    refused = run("tenant", "rotate", "acme", store=root)
    assert refused.code == 2
    assert "--yes" in refused.error_line
    assert find_tenant(str(root), "acme").generation == 0
    after = run("tenant", "rotate", "acme", "--yes", "--json", store=root).document()
    assert (after["generation"], after["retired"]) == (1, [before["tag"]])
    assert after["tag"] != before["tag"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("add", "acme"), "acme"),
        (("add", "no spaces"), "no spaces"),
        (("add", ""), "''"),
        (("rotate", "nobody", "--yes"), "nobody"),
        (("purge", "nobody", "--yes"), "nobody"),
        (("purge", "acme"), "--yes"),
        (("quota", "nobody", "1GiB"), "nobody"),
        (("quota", "acme", "1G"), "1G"),
        (("quota", "acme", "0"), "0"),
        (("quota", "acme", "-1"), "-1"),
        (("quota", "acme", "all"), "all"),
    ],
)
def test_a_wrong_tenant_is_named(root: Path, words: tuple[str, ...], named: str) -> None:
    run("tenant", "add", "acme", store=root)
    done = run("tenant", *words, store=root)
    assert done.code == 2
    assert named in done.error_line


def test_tenants_of_no_store_are_refused(tmp_path: Path) -> None:
    for words in (("list",), ("add", "acme"), ("rotate", "acme", "--yes"), ("purge", "acme", "--yes"),
                  ("quota", "acme", "none")):
        done = run("tenant", *words, store=tmp_path)
        assert done.code == 2
        assert str(tmp_path) in done.error_line
    assert list(tmp_path.iterdir()) == []


def test_changing_tenants_beside_an_owner_is_refused_with_its_pid(root: Path) -> None:
    run("tenant", "add", "acme", store=root)
    lock = OwnerLock.take(SystemIo(), str(root))
    try:
        for words in (("add", "more"), ("rotate", "acme", "--yes"), ("purge", "acme", "--yes"),
                      ("quota", "acme", "1GiB")):
            done = run("tenant", *words, store=root)
            assert done.code == 8
            assert f"process {os.getpid()}" in done.error_line
        assert run("tenant", "list", store=root).code == 0
    finally:
        lock.release()
    assert find_tenant(str(root), "acme").generation == 0
