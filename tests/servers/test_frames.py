"""Frames: what is sent is received in any pieces, and whatever else comes is refused before anything is allocated."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Sequence

import pytest

from efs.checksum import xxh3_64
from efs.errors import WireError
from efs.limits import WIRE_AHEAD_BYTES, WIRE_BODY_BYTES, WIRE_METADATA_BYTES
from efs.wire import HEADER_BYTES, MAX_FRAME_BYTES, FrameParser, Header, Kind, decode_header, encode_frame

MUTATIONS = int(os.environ.get("WIRE_MUTATIONS", "1000000"))
"""How many mutated streams the fuzz parses, at least one mutated frame in each."""


class Collector:
    """A `FrameSink` that keeps everything, with bodies in a buffer of which it shows some bytes at a time."""

    def __init__(self, shown: int = 1 << 30) -> None:
        self.frames: list[tuple[Header, bytes, bytes]] = []
        self.body = bytearray()
        self.allocated = 0
        self._shown = shown

    def expect(self, header: Header) -> None:
        self.allocated += header.metadata_bytes

    def begin_body(self, header: Header, metadata: bytes) -> None:
        self.body = bytearray(header.body_bytes)
        self.allocated += header.body_bytes

    def body_views(self, offset: int, size: int) -> Sequence[memoryview]:
        size = min(size, self._shown)
        half = (size + 1) // 2
        view = memoryview(self.body)[offset : offset + size]
        return [part for part in (view[:half], view[half:]) if len(part)]

    def body_came(self, offset: int) -> None:
        pass

    def complete(self, header: Header, metadata: bytes) -> None:
        self.frames.append((header, metadata, bytes(self.body)))
        self.body = bytearray()


def stream_of(source: random.Random, frames: int) -> tuple[bytes, list[tuple[Kind, int, bytes, bytes]]]:
    """Frames of all kinds, and their bytes."""
    parts, sent = [], []
    for number in range(1, frames + 1):
        kind = source.choice(list(Kind))
        metadata = source.randbytes(source.choice([0, 1, 30, 500]))
        body = source.randbytes(source.choice([0, 1, 700])) if kind in (Kind.PUT, Kind.PIECE) else b""
        anonymous = kind in (Kind.HELLO, Kind.PROOF, Kind.TOUCH, Kind.CHALLENGE, Kind.WELCOME)
        request = 16 <= kind < 31 and kind is not Kind.TOUCH
        request_id = 0 if anonymous else number
        parts.append(encode_frame(kind, request_id, metadata, body_bytes=len(body), deadline_ms=900 if request else 0))
        parts.append(body)
        sent.append((kind, request_id, metadata, body))
    return b"".join(parts), sent


@pytest.mark.parametrize("shown", [1, 7, 1 << 30])
@pytest.mark.parametrize("step", [1, 47, 48, 49, 1_000, 1 << 20])
def test_frames_arrive_whole_in_pieces_of_any_size(step: int, shown: int) -> None:
    data, sent = stream_of(random.Random(step), 60)
    sink = Collector(shown)
    parser = FrameParser(sink)
    for at in range(0, len(data), step):
        parser.feed(data[at : at + step])
    assert [(h.kind, h.request_id, metadata, body) for h, metadata, body in sink.frames] == sent
    assert parser.frames == len(sent)
    assert not parser.within


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({0: 0x45 ^ 1}, "bad magic"),
        ({4: 2}, "protocol version 2"),
        ({40: 0xFF, 41: 0xFF}, "wrong checksum"),
        ({16: 0xFF}, "wrong checksum"),
    ],
)
def test_a_changed_header_is_refused(change: dict[int, int], why: str) -> None:
    raw = bytearray(encode_frame(Kind.INFO, 1, deadline_ms=5))
    for at, value in change.items():
        raw[at] = value
    with pytest.raises(WireError, match=why):
        decode_header(raw)


def forged(**fields: int) -> bytes:
    """A header with a right checksum that says what it must not."""
    values = {"kind": Kind.PUT, "zero": 0, "request_id": 1, "metadata": 0, "body": 0, "deadline_ms": 5, "nought": 0}
    values |= fields
    head = struct.pack("<4sBBHQIIIIQ", b"EFSW", 1, values["kind"], values["zero"], values["request_id"],
                       values["metadata"], values["body"], values["deadline_ms"], values["nought"], xxh3_64(b""))
    return head + struct.pack("<Q", xxh3_64(head))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"metadata": WIRE_METADATA_BYTES + 1}, "bytes of metadata"),
        ({"metadata": 0xFFFF_FFFF}, "bytes of metadata"),
        ({"body": WIRE_BODY_BYTES + 1}, "with a body"),
        ({"body": 0xFFFF_FFFF}, "with a body"),
        ({"kind": Kind.LOOK_UP, "body": 1}, "LOOK_UP with a body"),
        ({"kind": 99}, "unknown kind 99"),
        ({"kind": 0}, "unknown kind 0"),
        ({"zero": 1}, "where zeros must be"),
        ({"nought": 1}, "where zeros must be"),
        ({"deadline_ms": 0}, "deadline of 0 ms"),
        ({"deadline_ms": 60_001}, "deadline of 60001 ms"),
        ({"kind": Kind.ANSWER}, "ANSWER with a deadline"),
        ({"request_id": 0}, "request id 0"),
        ({"kind": Kind.TOUCH, "deadline_ms": 0}, "TOUCH with request id 1"),
    ],
)
def test_a_header_that_says_what_it_must_not_is_refused_before_anything_is_allocated(
    fields: dict[str, int], why: str
) -> None:
    sink = Collector()
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=why):
            FrameParser(sink).feed(forged(**fields) + bytes(1_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sink.allocated == 0
    assert peak < 1 << 20


def test_metadata_that_do_not_fit_their_checksum_are_refused() -> None:
    raw = bytearray(encode_frame(Kind.LOOK_UP, 1, bytes(64), deadline_ms=5))
    raw[HEADER_BYTES + 10] ^= 1
    with pytest.raises(WireError, match="metadata of a LOOK_UP with a wrong checksum"):
        FrameParser(Collector()).feed(bytes(raw))


def test_a_frame_that_no_receiver_would_take_is_not_made() -> None:
    with pytest.raises(WireError, match="deadline of 0 ms"):
        encode_frame(Kind.INFO, 1)
    with pytest.raises(WireError, match="bytes of metadata"):
        encode_frame(Kind.LOOK_UP, 1, bytes(WIRE_METADATA_BYTES + 1), deadline_ms=5)


def mutate(source: random.Random, data: bytes) -> bytes:
    """One or a few of: flipped bits, overwritten, inserted and removed bytes, a cut, a repeat. One draw for each: there
    are a million of these, and drawing is most of what they cost."""
    raw = bytearray(data)
    draw = source.getrandbits(96)
    for _ in range(1 + draw % 3):
        draw >>= 2
        at, how, size, bits = (draw & 0xFFFF) % len(raw), draw >> 16 & 7, 1 + (draw >> 19) % 60, draw >> 24
        draw >>= 28
        if how in (0, 1, 6):
            raw[at] ^= 1 << (bits & 7)
        elif how == 2:
            raw[at : at + 4] = (bits & 0xFFFF_FFFF).to_bytes(4, "little")
        elif how == 3:
            raw[at:at] = (bits & 0xFFFF_FFFF).to_bytes(4, "big") * (1 + size % 3)
        elif how == 4:
            del raw[at : at + size]
        elif how == 5:
            raw[at:at] = raw[:size]
        else:
            raw = raw[: at + 1]
        if not raw:
            return b"\0"
    return bytes(raw)


def test_mutated_frames_are_refused_or_are_the_frames_that_were_sent() -> None:
    """Whatever comes out of a mutated stream before it is refused was sent; bodies are not compared, which have no
    checksum of their own. Most streams are one frame: a parser stops at the first one that is wrong."""
    seed = 20_240_611
    print(f"seed {seed}")
    source = random.Random(seed)
    streams = [stream_of(source, 1 if number % 8 else 3) for number in range(128)]
    named = [{(kind, request_id, metadata) for kind, request_id, metadata, _ in sent} for _, sent in streams]
    ahead = memoryview(bytearray(WIRE_AHEAD_BYTES))
    refused = short = passed = most = 0
    for parsed in range(MUTATIONS):
        number = parsed % len(streams)
        sink = Collector()
        parser = FrameParser(sink, ahead)
        try:
            parser.feed(mutate(source, streams[number][0]))
            short += parser.within
        except WireError:
            refused += 1
        for header, metadata, _ in sink.frames:
            assert (header.kind, header.request_id, metadata) in named[number]
            passed += 1
        most = max(most, sink.allocated)
    print(f"{MUTATIONS} parsed, {refused} refused, {short} cut short, {passed} frames passed")
    assert MUTATIONS > 1_000
    assert refused > MUTATIONS / 2
    assert short > 0
    assert passed > 0
    assert most <= MAX_FRAME_BYTES
