"""The tenants file: what is in it, who may read it, and how it changes."""

from __future__ import annotations

import fcntl
import os
import stat
import tomllib
from hashlib import blake2b
from pathlib import Path

import pytest

from efs.errors import InvalidArgument, Locked, StoreNotFound
from kvstore.tenants import (
    TENANTS_FILE,
    Tenant,
    add_tenant,
    begin_purge,
    end_purge,
    find_tenant,
    list_tenants,
    rotate_tenant,
    set_quota,
    tenant_tag,
)


class Counting:
    """A source of bytes that a test can foresee: 32 times 1, then 32 times 2, …"""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, count: int) -> bytes:
        self.calls += 1
        return bytes([self.calls]) * count


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


def written(root: str, text: str, mode: int = 0o600) -> Path:
    path = Path(root) / TENANTS_FILE
    path.write_text(text)
    path.chmod(mode)
    return path


def entry(**fields: object) -> str:
    values = {"name": '"acme"', "generation": 0, "secret": f'"{"00" * 32}"', **fields}
    lines = [f"{name} = {value}" for name, value in values.items() if value != "-"]
    return "\n".join(["version = 1", "[[tenant]]", *lines])


def test_a_store_without_the_file_has_no_tenants(root: str) -> None:
    assert list_tenants(root) == []
    with pytest.raises(InvalidArgument, match=r"^no tenant 'acme' in this store$"):
        find_tenant(root, "acme")


def test_added_tenants_are_listed_by_name(root: str) -> None:
    random = Counting()
    second = add_tenant(root, "b", random_bytes=random)
    first = add_tenant(root, "a", random_bytes=random)
    assert list_tenants(root) == [first, second]
    assert find_tenant(root, "b") == Tenant("b", b"\x01" * 32)
    assert second.tag != first.tag


def test_secrets_are_random_by_default(root: str) -> None:
    assert add_tenant(root, "a").secret != add_tenant(root, "b").secret
    assert len(find_tenant(root, "a").secret) == 32


def test_file_belongs_to_its_owner_alone(root: str) -> None:
    before = os.umask(0)
    try:
        add_tenant(root, "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(Path(root) / TENANTS_FILE).st_mode) == 0o600
    assert os.listdir(root) == [TENANTS_FILE]


def test_file_is_what_the_format_says(root: str) -> None:
    random = Counting()
    tag = add_tenant(root, "acme", random_bytes=random).tag
    rotate_tenant(root, "acme", random_bytes=random)
    assert tomllib.loads((Path(root) / TENANTS_FILE).read_text()) == {
        "version": 1,
        "tenant": [{"name": "acme", "generation": 1, "secret": "02" * 32, "retired": [tag.hex()]}],
    }


def test_rotation_leaves_nothing_derivable_but_remembers_the_tag(root: str) -> None:
    random = Counting()
    old = add_tenant(root, "acme", random_bytes=random)
    other = add_tenant(root, "other", random_bytes=random)
    new = rotate_tenant(root, "acme", random_bytes=random)
    assert (new.generation, new.retired) == (1, (old.tag,))
    assert new.secret != old.secret
    assert new.tag != old.tag
    newest = rotate_tenant(root, "acme", random_bytes=random)
    assert newest.retired == (old.tag, new.tag)
    assert list_tenants(root) == [newest, other]


def test_tag_is_that_of_the_documented_fields() -> None:
    secret = bytes(range(32))
    message = b"\x01\x04\0\0\0acme" + b"\x02\x08\0\0\0" + (3).to_bytes(8, "little")
    expected = blake2b(message, digest_size=32, key=secret, person=b"kvstore/tag/1").digest()[:8]
    assert tenant_tag("acme", 3, secret) == Tenant("acme", secret, 3).tag == expected
    assert tenant_tag(None, 0, b"") == bytes(8)


def test_secret_is_shown_nowhere(root: str) -> None:
    tenant = add_tenant(root, "acme", random_bytes=Counting())
    assert "secret" not in repr(tenant)
    path = written(root, entry(secret='"zz01ff"'))
    with pytest.raises(InvalidArgument, match="secret or retired is no hex text") as caught:
        list_tenants(root)
    assert "01ff" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o777])
def test_a_file_that_others_have_rights_to_is_refused(root: str, mode: int) -> None:
    path = written(root, entry(), mode)
    for call in (list_tenants, lambda at: add_tenant(at, "b"), lambda at: find_tenant(at, "acme")):
        with pytest.raises(InvalidArgument, match=rf"^{path} has mode {mode:04o}; it holds secrets, make it 0600$"):
            call(root)


def test_a_link_is_not_followed(root: str, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text(entry())
    target.chmod(0o600)
    (tmp_path / TENANTS_FILE).symlink_to(target)
    with pytest.raises(InvalidArgument, match=rf"^{tmp_path / TENANTS_FILE}: ") as caught:
        list_tenants(root)
    assert isinstance(caught.value.__cause__, OSError)
    assert "\n" not in str(caught.value)


def test_what_is_no_regular_file_is_refused(root: str) -> None:
    os.mkdir(Path(root) / TENANTS_FILE, 0o700)
    with pytest.raises(InvalidArgument, match=TENANTS_FILE):
        list_tenants(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "version is None, this program reads 1"),
        ("version = 2", "version is 2, this program reads 1"),
        ("version = 1\nother = 3", "unknown entry 'other'"),
        ("version = ", "Invalid value"),
        ("\x00", "tenants.toml: "),
        (entry(extra=1), "tenant acme: unknown entry 'extra'"),
        (entry(secret="-"), "tenant acme: secret is missing"),
        (entry(generation="-"), "tenant acme: generation is missing"),
        (entry(generation='"0"'), "tenant acme: generation is no integer"),
        (entry(generation="true"), "tenant acme: generation is no integer"),
        (entry(generation=-1), "generation is -1"),
        (entry(quota_bytes='"1GiB"'), "quota_bytes is no integer"),
        (entry(quota_bytes="true"), "quota_bytes is no integer"),
        (entry(quota_bytes=-1), "quota_bytes is -1"),
        (entry(purging=1), "purging neither true nor false"),
        (entry(secret='"00ff"'), "secret has 2 bytes, must have 32"),
        (entry(secret=5), "no hex text"),
        (entry(name='"../x"'), "tenant name '../x' must be"),
        (entry(name=7), "tenant name 7 must be"),
        (entry(retired='["00"]'), "a retired tag does not have 8 bytes"),
        (entry() + entry().removeprefix("version = 1"), "tenant acme stands twice"),
        ("version = 1\ntenant = 5", "must stand in tables"),
        ("version = 1\ntenant = [5]", "must stand in tables"),
    ],
)
def test_a_malformed_file_is_refused_in_one_line(root: str, text: str, message: str) -> None:
    path = written(root, text)
    with pytest.raises(InvalidArgument, match=message) as caught:
        list_tenants(root)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_too_large_is_refused(root: str) -> None:
    path = written(root, "")
    os.truncate(path, 1 << 30)
    with pytest.raises(InvalidArgument, match="1073741824 bytes, at most"):
        list_tenants(root)


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a b", "a/b", "ä", "x" * 65, 'a"b', "a\n"])
def test_a_name_that_cannot_be_is_refused(root: str, name: str) -> None:
    with pytest.raises(InvalidArgument, match="must be 1 to 64 of"):
        add_tenant(root, name)
    assert os.listdir(root) == []


def test_a_name_that_exists_is_refused_and_keeps_its_secret(root: str) -> None:
    tenant = add_tenant(root, "acme")
    with pytest.raises(InvalidArgument, match=r"^tenant acme exists already$"):
        add_tenant(root, "acme")
    assert list_tenants(root) == [tenant]


def test_rotating_an_unknown_tenant_changes_nothing(root: str) -> None:
    tenant = add_tenant(root, "acme")
    with pytest.raises(InvalidArgument, match="no tenant 'other'"):
        rotate_tenant(root, "other")
    assert list_tenants(root) == [tenant]


def test_two_changes_at_once_are_refused_not_lost(root: str) -> None:
    add_tenant(root, "acme")
    holder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(Locked, match=TENANTS_FILE):
            add_tenant(root, "b")
        assert len(list_tenants(root)) == 1
    finally:
        os.close(holder)
    add_tenant(root, "b")
    assert len(list_tenants(root)) == 2


def test_what_a_crash_left_behind_does_not_lend_its_mode(root: str) -> None:
    leftover = Path(root) / (TENANTS_FILE + ".new")
    leftover.write_text("half")
    leftover.chmod(0o644)
    add_tenant(root, "acme")
    assert stat.S_IMODE(os.stat(Path(root) / TENANTS_FILE).st_mode) == 0o600
    assert not leftover.exists()


def test_a_root_that_is_not_there_is_named(root: str) -> None:
    with pytest.raises(StoreNotFound, match=f"no store at {root}/absent: No such file"):
        add_tenant(root + "/absent", "acme")


def test_quota_and_a_purge_that_goes_on_are_kept_in_the_file(root: str) -> None:
    added = add_tenant(root, "acme")
    set_quota(root, "acme", 10 * 1024**3)
    begun = begin_purge(root, "acme")
    assert (begun.generation, begun.retired, begun.purging, begun.quota_bytes) == (1, (added.tag,), True, 10 * 1024**3)
    assert begun.secret != added.secret
    assert begin_purge(root, "acme") == find_tenant(root, "acme") == begun, "it has begun already"
    ended = end_purge(root, "acme")
    assert (ended.generation, ended.purging) == (1, False)
    assert begin_purge(root, "acme").retired == (added.tag, ended.tag), "the next one"
    assert set_quota(root, "acme", None).quota_bytes is None
    assert "quota_bytes" not in (Path(root) / TENANTS_FILE).read_text()


def test_a_file_that_could_not_be_read_again_is_not_written(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_tenant(root, "acme")
    before = (Path(root) / TENANTS_FILE).read_bytes()
    monkeypatch.setattr("kvstore.tenants.MAX_FILE_BYTES", len(before) + 10)
    with pytest.raises(InvalidArgument, match="at most"):
        add_tenant(root, "other")
    assert (Path(root) / TENANTS_FILE).read_bytes() == before


def test_a_fifo_is_refused_without_waiting_for_a_writer(root: str) -> None:
    os.mkfifo(Path(root) / TENANTS_FILE, 0o600)
    with pytest.raises(InvalidArgument, match=r"tenants\.toml is not a regular file$"):
        list_tenants(root)


@pytest.mark.parametrize(("text", "reason"), [("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
                                              ("a = " + "9" * 5000, "too many digits")])
def test_values_without_bounds_are_refused(root: str, text: str, reason: str) -> None:
    written(root, text)
    with pytest.raises(InvalidArgument, match=rf"tenants\.toml: .*{reason}$"):
        list_tenants(root)
