"""Who is who on a connection: the first four frames, before which nothing else is taken. Pure.

    client → HELLO      which node is wanted (cluster id, node id, index; NO_PLACE for a spare), the role, a nonce of
                        32 bytes
    server → CHALLENGE  its own nonce, and its proof
    client → PROOF      the client's proof
    server → WELCOME    the node as it is, and what its acknowledgements promise

or ERROR with request id 0 and the reason, and the end. Metadata are MessagePack arrays of at most WIRE_HANDSHAKE_BYTES.

*Tokens.* A token is a secret of 16 to 4,096 bytes in a file that only its owner can read. A proof is HMAC-SHA256, keyed
with the token, over who speaks ("server" or "client") and everything that HELLO and CHALLENGE said: so it shows
that both know the token, holds for this connection alone, and cannot be sent back to the one it came from. The token
itself is never sent. Without a token on a side its proof is empty, and not asked for; a client that has one refuses a
server that has none. What is sent after the handshake is neither encrypted nor signed: on a network that others can
read or write, put a tunnel around it.

*Roles.* `data` may do what fetches, puts and their repairs need: LOOK_UP, GET, HEADERS, READ, PUT, TOUCH, VERIFY (a
node checks its own record, and drops it only if it finds it bad), INFO, TENANT_BYTES. `operator` may also list what is
held, remove it and have it evicted: LIST, DROP, COLLECT, BURY, which is what sweeps, scrubs, whole repairs and purges
need; and give a spare its place: TAKE_PLACE. A server may have a second token for operators; then the first one makes
nobody an operator. Without tokens (loopback and Unix sockets only) everybody who reaches it may choose.
"""

from __future__ import annotations

import hmac
import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from efs.errors import HandshakeFailed, InvalidArgument, OpenFailed, WireError
from efs.limits import NONCE_BYTES, TOKEN_MAX_BYTES, TOKEN_MIN_BYTES, WIRE_HANDSHAKE_BYTES
from efs.osio import Io, read_file
from efs.sharedslab import SlabPlace
from efs.wire import Kind


class Role(StrEnum):
    """What a client may do; see the module docstring."""

    DATA = "data"
    OPERATOR = "operator"


OPERATOR_KINDS: Final = frozenset({Kind.LIST, Kind.DROP, Kind.COLLECT, Kind.BURY, Kind.TAKE_PLACE})


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a client says first."""

    cluster_id: str
    node_id: str
    node_index: int
    role: str
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    """What the server answers."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """What the client shows."""

    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """What the server says of the node. durability: "process" or "power". slab: what a client of the same machine may
    read by itself (`efs/sharedslab.py`); None on a connection that other machines can have."""

    node_index: int
    durability: str
    slab: SlabPlace | None = None


Message = Hello | Challenge | Proof | Welcome
T = TypeVar("T", Hello, Challenge, Proof, Welcome)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The secrets of one side; None where it has none. operator: None where `data` is for everybody."""

    data: bytes | None = None
    operator: bytes | None = None

    def of(self, role: Role) -> bytes | None:
        if role is Role.OPERATOR and self.operator is not None:
            return self.operator
        return self.data


def encode_message(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_hello(metadata: bytes) -> Hello:
    hello = _decode(metadata, Hello)
    if len(hello.nonce) != NONCE_BYTES or hello.role not in tuple(Role):
        raise WireError("a HELLO without a nonce or with an unknown role")
    return hello


def decode_challenge(metadata: bytes) -> Challenge:
    challenge = _decode(metadata, Challenge)
    if len(challenge.nonce) != NONCE_BYTES:
        raise WireError("a CHALLENGE without a nonce")
    return challenge


def decode_proof(metadata: bytes) -> Proof:
    return _decode(metadata, Proof)


def decode_welcome(metadata: bytes) -> Welcome:
    return _decode(metadata, Welcome)


def server_proof(token: bytes | None, hello: Hello, nonce: bytes) -> bytes:
    return _proof(token, "server", hello, nonce)


def client_proof(token: bytes | None, hello: Hello, nonce: bytes) -> bytes:
    return _proof(token, "client", hello, nonce)


def require_proof(found: bytes, expected: bytes, who: str, role: Role, hint: str = "") -> None:
    """HandshakeFailed unless the proofs are the same, in a time that tells nothing."""
    if not hmac.compare_digest(found, expected):
        why = "does not know the token" if found else "shows no proof of the token"
        raise HandshakeFailed(f"{who} {why} for the role {role}{hint}")


def read_token(io: Io, path: str) -> bytes:
    """The token in a file, without white space at its ends. InvalidArgument for one that is too short or too long or
    that others than its owner may read; OpenFailed names the path."""
    try:
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise InvalidArgument(f"{path} may be read by others than its owner: chmod 600 it")
        token = read_file(io, path, 2 * TOKEN_MAX_BYTES).strip()
    except OSError as error:
        raise OpenFailed(path, error) from error
    if not TOKEN_MIN_BYTES <= len(token) <= TOKEN_MAX_BYTES:
        raise InvalidArgument(
            f"{path} holds a token of {len(token)} bytes, must be {TOKEN_MIN_BYTES} to {TOKEN_MAX_BYTES}"
        )
    return token


def _decode(metadata: bytes, kind: type[T]) -> T:
    if len(metadata) > WIRE_HANDSHAKE_BYTES:
        raise WireError(f"{len(metadata)} bytes of a handshake, at most {WIRE_HANDSHAKE_BYTES}")
    try:
        return msgspec.msgpack.decode(metadata, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"no {kind.__name__.upper()}: {error}") from error


def _proof(token: bytes | None, who: str, hello: Hello, nonce: bytes) -> bytes:
    if token is None:
        return b""
    said = msgspec.msgpack.encode((who, hello, nonce))
    return hmac.digest(token, b"kvstore/handshake/1" + said, "sha256")
