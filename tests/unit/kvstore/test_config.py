"""Settings: where a value comes from, how sizes are written, and one line for every mistake (fault 56)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from efs.limits import GET_DEADLINE_MS
from kvstore.config import Config, SettingError, parse_size


def sources(config: Config) -> dict[str, tuple[Any, str]]:
    return {setting.name: (setting.value, setting.source) for setting in config.settings()}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GB", 10_000_000_000),
        ("10GiB", 10_737_418_240),
        ("1", 1),
        ("1B", 1),
        ("1kB", 1_000),
        ("1KB", 1_000),
        ("1KiB", 1_024),
        ("2 MiB", 2_097_152),
        ("1.5MB", 1_500_000),
        ("0.5KiB", 512),
        ("1tib", 1_099_511_627_776),
        ("1PB", 10**15),
        (" 7MB ", 7_000_000),
        (4_096, 4_096),
    ],
)
def test_a_size_is_what_it_says(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e3", "capacity is '1e3', must be a size such as 10GB or 10GiB"),
        ("abc", "capacity is 'abc', must be a size such as 10GB or 10GiB"),
        ("-1", "capacity is '-1', must be a size such as 10GB or 10GiB"),
        ("", "capacity is '', must be a size such as 10GB or 10GiB"),
        ("GB", "capacity is 'GB', must be a size such as 10GB or 10GiB"),
        ("1,5GB", "capacity is '1,5GB', must be a size such as 10GB or 10GiB"),
        ("١GB", "capacity is '١GB', must be a size such as 10GB or 10GiB"),
        ("10GB\n", r"capacity is '10GB\n', must be a size such as 10GB or 10GiB"),
        ("0", "capacity is '0', must be 1 to 9223372036854775807 bytes"),
        ("0GB", "capacity is '0GB', must be 1 to 9223372036854775807 bytes"),
        ("10000PB", "capacity is '10000PB', must be 1 to 9223372036854775807 bytes"),
        ("10G", "capacity is '10G': unknown unit 'G' (did you mean GB or GiB?)"),
        ("10furlongs", "capacity is '10furlongs': unknown unit 'furlongs'"),
        ("1.5", "capacity is '1.5', which is no whole number of bytes"),
        ("0.1KiB", "capacity is '0.1KiB', which is no whole number of bytes"),
        (0, "capacity is 0, must be 1 to 9223372036854775807 bytes"),
        (-1, "capacity is -1, must be 1 to 9223372036854775807 bytes"),
        (1e3, "capacity is 1000.0, must be a size such as 10GB or 10GiB"),
        (True, "capacity is True, must be a size such as 10GB or 10GiB"),
    ],
)
def test_what_is_no_size_is_refused_in_one_line(text: Any, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_size(text, "capacity")
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


def test_defaults_are_their_own_source() -> None:
    config = Config.load(environ={})
    assert config == Config()
    assert config.get_deadline_ms == GET_DEADLINE_MS
    assert {source for _, source in sources(config).values()} == {"default"}


def test_the_stronger_source_wins_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    lines = ['store = "/from/file"', 'capacity = "10GiB"', "put_deadline_ms = 1", "get_deadline_ms = 1.5"]
    file.write_text("\n".join([*lines, "mapped = true"]))
    environ = {"KVSTORE_STORE": "/from/environment", "KVSTORE_PUT_DEADLINE_MS": "2", "HOME": "/"}
    config = Config.load(str(file), environ=environ, arguments={"put_deadline_ms": 3, "capacity": None})
    assert sources(config) == {
        "store": ("/from/environment", "environment KVSTORE_STORE"),
        "get_deadline_ms": (1.5, f"file {file}"),
        "match_deadline_ms": (1_000, "default"),
        "put_deadline_ms": (3, "argument"),
        "mapped": (True, f"file {file}"),
        "scrub": (False, "default"),
        "bypass": (False, "default"),
        "capacity": (10_737_418_240, f"file {file}"),
        "durability": ("process", "default"),
        "extent_bytes": (None, "default"),
    }


def test_a_variable_names_the_file_and_the_argument_is_stronger(tmp_path: Path) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text('durability = "power"')
    other.write_text("")
    assert Config.load(environ={"KVSTORE_CONFIG": str(one)}).durability == "power"
    assert Config.load(str(other), environ={"KVSTORE_CONFIG": str(one)}).durability == "process"


def test_every_setting_is_in_the_documentation() -> None:
    import kvstore.config

    for setting in Config().settings():
        assert f"\n    {setting.name} " in str(kvstore.config.__doc__)
        assert setting.meaning


def test_an_empty_variable_and_those_of_kubernetes_are_passed_over() -> None:
    environ = {"KVSTORE_STORE": "", "KVSTORE_PORT": "tcp://10.0.0.1:80", "KVSTORE_SERVICE_HOST": "10.0.0.1",
               "KVSTORE_SERVICE_PORT_HTTP": "80", "KVSTORE_PORT_80_TCP_ADDR": "10.0.0.1"}
    assert Config.load(environ=environ) == Config()


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("OFF", False), ("1", True), ("false", False)])
def test_yes_and_no_have_several_words(text: str, value: bool) -> None:
    assert Config.load(environ={"KVSTORE_MAPPED": text}).mapped is value


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({"KVSTORE_CAPACTY": "1GB"}, {}, "environment KVSTORE_CAPACTY: unknown setting 'capacty'"),
        ({"KVSTORE_CAPACITY": "1G"}, {}, "environment KVSTORE_CAPACITY: capacity is '1G': unknown unit 'G'"),
        ({"KVSTORE_MAPPED": "maybe"}, {}, "environment KVSTORE_MAPPED: mapped is 'maybe', must be true or false"),
        ({"KVSTORE_DURABILITY": "none"}, {}, "durability is 'none', must be process or power"),
        ({"KVSTORE_GET_DEADLINE_MS": "1e3"}, {}, "get_deadline_ms is '1e3', must be a number of milliseconds"),
        ({"KVSTORE_GET_DEADLINE_MS": "inf"}, {}, "must be a number of milliseconds"),
        ({"KVSTORE_GET_DEADLINE_MS": "0"}, {}, "must be above 0 and at most 60000 ms"),
        ({}, {"get_deadline_ms": 60_001}, "argument: get_deadline_ms is 60001, must be above 0 and at most 60000"),
        ({}, {"get_deadline_ms": float("nan")}, "argument: get_deadline_ms is nan, must be above 0"),
        ({}, {"get_deadline_ms": True}, "argument: get_deadline_ms is True, must be a number"),
        ({}, {"store": ""}, "argument: store is '', must be a non-empty text"),
        ({}, {"colour": "red"}, "argument: unknown setting 'colour'"),
        ({}, {"sources": ()}, "argument: unknown setting 'sources'"),
    ],
)
def test_a_mistake_names_setting_and_source(environ: dict[str, str], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        Config.load(environ=environ, arguments=arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("store = ", "Invalid value"),
        ("colour = 1", "unknown setting 'colour'"),
        ("[section]\na = 1", "unknown setting 'section'"),
        ("store = 5", "store is 5, must be a non-empty text"),
        ("capacity = 1e3", "capacity is 1000.0, must be a size"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "kvstore.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingError) as caught:
        Config.load(str(file), environ={})
    assert str(caught.value).startswith(f"file {file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_given_to_the_constructor_are_checked() -> None:
    assert Config(put_deadline_ms=5, capacity=parse_size("1MB")).capacity == 1_000_000
    with pytest.raises(SettingError, match="put_deadline_ms is 0"):
        Config(put_deadline_ms=0)
    with pytest.raises(SettingError, match="durability is 'never'"):
        Config(durability="never")


@pytest.mark.parametrize(("text", "reason"), [("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
                                              ("get_deadline_ms = " + "9" * 5000, "too many digits")])
def test_a_file_with_values_without_bounds_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(SettingError, match=rf"settings\.toml: .*{reason}$"):
        Config.load(str(path), environ={})


@pytest.mark.parametrize("value", ["9" * 5000, "0." + "1" * 5000, 10**5000, "x" * 5000], ids=range(4))
def test_a_long_size_is_refused_in_a_short_line(value: str | int) -> None:
    with pytest.raises(SettingError, match=r"^capacity is ") as caught:
        parse_size(value, "capacity")
    assert len(str(caught.value)) < 300


def test_a_long_number_of_milliseconds_is_refused_in_a_short_line() -> None:
    with pytest.raises(SettingError, match=r"^get_deadline_ms is a number of 16610 bits"):
        Config(get_deadline_ms=10**5000)
