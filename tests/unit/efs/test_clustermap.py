"""The documents of a cluster in etcd: what is written is read again, and nothing else is taken for a map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.clustermap import (
    ClusterMap,
    EtcdUrl,
    MapPlace,
    MapSpare,
    ServerNote,
    changed_places,
    decode_map,
    decode_note,
    encode_map,
    encode_note,
    may_follow,
    parse_etcd_url,
)
from efs.errors import CorruptRecord, FormatUnsupported, InvalidArgument
from efs.limits import ETCD_DOCUMENT_BYTES, MAX_CLUSTER_SPARES
from efs.types import NO_PLACE

PLACES = tuple(MapPlace(f"{index:032x}", f"tcp:10.0.0.{index}:7400", 1) for index in range(12))
MAP = ClusterMap(3, "c" * 32, "process", "/var/lib/kv", 1 << 30, 1 << 26, PLACES, "here", "/etc/token", None)


SPARES = (MapSpare("a" * 32, "tcp:10.0.0.20:7400"), MapSpare("b" * 32, "unix:/run/kv/s"))
SPARED = replace(MAP, spares=SPARES)


def altered(**changes: Any) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(encode_map(MAP)), **changes})


def test_a_map_is_read_as_it_was_written() -> None:
    assert decode_map(encode_map(MAP), "x") == MAP
    config = MAP.config()
    assert config.node_ids[11] == PLACES[11].node_id
    assert str(config.endpoints[11]) == PLACES[11].address
    assert (config.upkeep_host, config.token_file, config.operator_token_file) == ("here", "/etc/token", None)


def test_a_replaced_node_is_the_next_incarnation_in_the_next_version() -> None:
    changed = MAP.with_node(7, "tcp:10.0.0.9:1", "f" * 32)
    assert (changed.version, changed.places[7]) == (4, MapPlace("f" * 32, "tcp:10.0.0.9:1", 2))
    moved = changed.with_address(7, "unix:/x")
    assert (moved.version, moved.places[7]) == (5, MapPlace("f" * 32, "unix:/x", 2))
    assert changed_places(MAP.config(), moved.config()) == [7]
    with pytest.raises(InvalidArgument, match="no node has index 12"):
        MAP.with_address(12, "unix:/x")
    with pytest.raises(InvalidArgument, match="named twice"):
        MAP.with_node(7, "unix:/x", PLACES[6].node_id)


def test_a_map_without_spares_is_as_it_was_before_there_were_any() -> None:
    assert "spares" not in msgspec.json.decode(encode_map(MAP))
    assert decode_map(encode_map(MAP), "x").spares == ()


def test_spares_are_read_as_they_were_written() -> None:
    assert decode_map(encode_map(SPARED), "x") == SPARED
    assert [(spare.node_id, str(spare.endpoint)) for spare in SPARED.config().spares] == [
        (spare.node_id, spare.address) for spare in SPARES]
    one = MAP.with_spare(SPARES[0].node_id, SPARES[0].address)
    assert (one.version, one.spares, one.places) == (4, SPARES[:1], PLACES)
    left = SPARED.without_spare(SPARES[0].node_id)
    assert (left.version, left.spares, left.places) == (4, SPARES[1:], PLACES)
    assert changed_places(MAP.config(), SPARED.config()) == []


def test_a_spare_that_gets_a_place_leaves_the_list_in_the_same_version() -> None:
    changed = SPARED.with_drain(7, True).with_spare_placed(7, SPARES[1].node_id)
    assert (changed.version, changed.spares) == (5, SPARES[:1])
    assert changed.places[7] == MapPlace(SPARES[1].node_id, SPARES[1].address, 2)
    assert changed.config().incarnations == (*(1,) * 7, 2, *(1,) * 4)
    assert changed_places(SPARED.config(), changed.config()) == [7]
    for number, node_id, why in ((12, SPARES[0].node_id, "no node has index 12"), (7, "d" * 32, "no spare d"),
                                 (7, PLACES[3].node_id, "no spare 0")):
        with pytest.raises(InvalidArgument, match=why):
            SPARED.with_spare_placed(number, node_id)
    for node_id in (SPARES[0].node_id, PLACES[3].node_id):
        with pytest.raises(InvalidArgument, match="named twice"):
            SPARED.with_spare(node_id, "unix:/x")


def test_a_map_has_room_for_as_many_spares_as_there_may_be() -> None:
    host = ".".join(["h" * 62] * 4)
    most = tuple(MapSpare(f"{100 + number:032x}", f"tcp:{host}:65535") for number in range(MAX_CLUSTER_SPARES))
    assert decode_map(encode_map(replace(MAP, spares=most)), "x").spares == most
    with pytest.raises(InvalidArgument, match=f"at most {MAX_CLUSTER_SPARES}"):
        replace(MAP, spares=most).with_spare("d" * 32, "unix:/x")


def test_only_a_later_map_of_the_same_cluster_is_followed() -> None:
    assert may_follow(MAP.config(), MAP.config()) is None
    assert may_follow(MAP.config(), replace(MAP, version=9).config()) is None
    assert may_follow(MAP.config(), replace(MAP, version=2).config()) == "its version is 2, and 3 was seen already"
    assert "cluster" in str(may_follow(MAP.config(), replace(MAP, version=4, cluster_id="d" * 32).config()))
    assert "durability" in str(may_follow(MAP.config(), replace(MAP, version=4, durability="power").config()))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", ""),
        (b"{}", "format_version"),
        (b"\xff", ""),
        (b"[" * 60_000, ""),
        (b" " * (ETCD_DOCUMENT_BYTES + 1), "at most"),
        (altered(version=0), "below 1"),
        (altered(version=1 << 70), ""),
        (altered(colour="red"), "colour"),
        (altered(durability="none"), "none"),
        (altered(cluster_id="C" * 32), "hex digits"),
        (altered(root="relative"), "absolute"),
        (altered(token_file="relative"), "absolute"),
        (altered(groups=[]), "0 groups"),
        (altered(groups=[{"places": []}]), "0 places"),
        (altered(groups=[{"places": msgspec.to_builtins(PLACES)}] * 2), "named twice"),
        (altered(groups=[{"places": msgspec.to_builtins(PLACES)}, {"places": msgspec.to_builtins(PLACES[:6])}]),
         "2 groups of 12, 6 places"),
        (altered(groups=[{"places": msgspec.to_builtins(PLACES), "added_at": -1}]), "added before"),
        (altered(retention_seconds=-1), "retention_seconds is -1"),
        (altered(groups=[{"places": msgspec.to_builtins([replace(PLACES[0], address="unix:x"), *PLACES[1:]])}]), "abs"),
        (altered(groups=[{"places": msgspec.to_builtins([replace(PLACES[0], incarnation=0), *PLACES[1:]])}]), "below"),
        (altered(groups=[{"places": msgspec.to_builtins([PLACES[1], *PLACES[1:]])}]), "named twice"),
        (altered(spares=[{"node_id": PLACES[1].node_id, "address": "unix:/x"}]), "is a node too"),
        (altered(spares=[{"node_id": "a" * 32, "address": "unix:/x"}] * 2), "named twice"),
        (altered(spares=[{"node_id": "a" * 31, "address": "unix:/x"}]), "hex digits"),
        (altered(spares=[{"node_id": "a" * 32, "address": "unix:x"}]), "abs"),
        (altered(spares=[{"node_id": "a" * 32}]), "address"),
        (altered(spares="many"), "spares"),
        (altered(spares=[{"node_id": f"{100 + number:032x}", "address": "unix:/x"}
                         for number in range(MAX_CLUSTER_SPARES + 1)]), "at most"),
    ],
)
def test_what_is_no_map_is_refused_in_one_line(data: bytes, why: str) -> None:
    with pytest.raises(CorruptRecord) as caught:
        decode_map(data, "etcd://h:1/prod")
    assert str(caught.value).startswith("etcd://h:1/prod: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_map_of_another_format_version_is_named_as_such() -> None:
    with pytest.raises(FormatUnsupported, match="format version 2, this program reads 1"):
        decode_map(altered(format_version=2, colour="red"), "x")


@given(st.binary(max_size=200), st.integers(0, 2000), st.integers(0, 40))
def test_a_mutated_map_is_a_map_or_refused(some: bytes, at: int, gone: int) -> None:
    data = encode_map(SPARED)
    at %= len(data)
    try:
        found = decode_map(data[:at] + some + data[at + gone :], "x")
    except (CorruptRecord, FormatUnsupported):
        return
    assert decode_map(encode_map(found), "x") == found


@given(st.binary(max_size=100))
def test_garbage_is_no_servers_note(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_note(data, "x")


def test_a_servers_note_is_read_as_it_was_written() -> None:
    for index, state in ((3, "read-only"), (NO_PLACE, "spare")):
        note = ServerNote("a" * 32, index, ("unix:/x", "tcp:h:1"), state)
        assert decode_note(encode_note(note), "x") == note


def test_a_url_names_an_etcd_and_a_cluster() -> None:
    url = parse_etcd_url("etcd://127.0.0.1:2379/prod")
    assert url == EtcdUrl("127.0.0.1", 2379, "prod")
    assert (url.map_key, url.server_key("ab")) == (b"/prod/map", b"/prod/servers/ab")
    assert str(parse_etcd_url("etcd://[::1]:2379/a.b-c")) == "etcd://[::1]:2379/a.b-c"


@pytest.mark.parametrize("text", [
    "etcd://", "etcd://h:1", "etcd://h:1/", "etcd://h/prod", "etcd://h:0/prod", "etcd://h:65536/prod", "etcd://h:1/a/b",
    "etcd://u@h:1/prod", "etcd://h:1/prod?x", "etcd://h:1/..", "etcd://h:1/a\n", "etcd:///prod", "etcd://h:x/prod",
])
def test_a_url_that_names_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="must be etcd://HOST:PORT/NAME"):
        parse_etcd_url(text)
