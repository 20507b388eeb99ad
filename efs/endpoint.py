"""Addresses of node servers, and sockets to and at them.

    unix:PATH         a Unix socket; an absolute path, or one relative to whoever names it
    tcp:HOST:PORT     TCP; HOST is a name, an IPv4 address, or an IPv6 address in brackets

A socket file is made for its owner only (0600). One that a killed server left behind is replaced; one behind which
somebody answers is not. All sockets are non-blocking. TCP sockets send at once (TCP_NODELAY); a listening one asks
for `cubic`, because the congestion control that some systems choose halves what loopback can do (measured). A machine
that went away without a word is found out by the system (keep-alive), so that its connections do not stay for ever.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from efs.errors import InvalidArgument, Locked, OpenFailed
from efs.limits import MIB, WIRE_BACKLOG, WIRE_KEEPALIVE_SECONDS
from efs.osio import Io

_TCP: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/\0]+):([0-9]{1,5})")
MOST_PORT: Final = 65_535
_MOST_PATH_BYTES: Final = 107
_SOCKET_BUFFER_BYTES: Final = 1 * MIB
_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens: a path, or a host and a port. InvalidArgument names a host that nobody can look up."""

    path: str | None = None
    host: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        try:
            # What every look-up of a name begins with.
            self.host.encode("idna")
        except UnicodeError as error:
            raise InvalidArgument(f"the host {self.host!r} is no name: each of its parts has 1 to 63 characters that "
                                  "a name may have") from error

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse_endpoint(text: str, base: str = "") -> Endpoint:
    """An address as it is written; relative socket paths are joined to `base`. InvalidArgument names what is wrong."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest and "\0" not in rest:
        path = os.path.join(base, rest)
        if len(os.fsencode(path)) > _MOST_PATH_BYTES:
            raise InvalidArgument(f"the socket path {path} is longer than {_MOST_PATH_BYTES} bytes")
        return Endpoint(path=path)
    match = _TCP.fullmatch(rest) if scheme == "tcp" else None
    if match is None:
        raise InvalidArgument(f"the address {text!r} must be unix:PATH or tcp:HOST:PORT")
    if int(match[2]) > MOST_PORT:
        raise InvalidArgument(f"the address {text!r} has the port {match[2]}, the last one is {MOST_PORT}")
    return Endpoint(host=match[1].strip("[]"), port=int(match[2]))


def is_local(endpoint: Endpoint) -> bool:
    """Whether only this machine can reach it. A name counts as what it resolves to now, all of it."""
    if endpoint.path is not None:
        return True
    return all(ipaddress.ip_address(address[0]).is_loopback for _, address in _resolve(endpoint))


def _resolve(endpoint: Endpoint) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OpenFailed(endpoint, error) from error
    return [(family, (str(address[0]), int(address[1]))) for family, _, _, _, address in found]


def listen(io: Io, endpoint: Endpoint) -> socket.socket:
    """A listening socket. OpenFailed names the address; Locked when a server answers behind the socket path."""
    try:
        if endpoint.path is not None:
            return _listen_at_path(io, endpoint.path)
        family, address = _resolve(endpoint)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
            listener.bind(address)
            return _started(listener)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise OpenFailed(endpoint, error) from error


def _listen_at_path(io: Io, path: str) -> socket.socket:
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "the path is there and is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            refused = probe.connect_ex(path)
        if refused != errno.ECONNREFUSED:
            raise Locked(path, None)
        io.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
        return _started(listener)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)


def _started(listener: socket.socket) -> socket.socket:
    listener.listen(WIRE_BACKLOG)
    listener.setblocking(False)
    return listener


def bound(endpoint: Endpoint, listener: socket.socket) -> Endpoint:
    """The address with the port that the system chose where 0 was asked for."""
    return endpoint if endpoint.path is not None else Endpoint(host=endpoint.host, port=listener.getsockname()[1])


def tune(connection: socket.socket) -> None:
    """Settings of a connection on both sides."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, WIRE_KEEPALIVE_SECONDS)


def peer_of(connection: socket.socket) -> str:
    """Who is on the other side, as far as limits are concerned: a user of this machine, or an address."""
    try:
        if connection.family == socket.AF_UNIX:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return f"user {_CREDENTIALS.unpack(raw)[1]}"
        return str(connection.getpeername()[0])
    except OSError:
        return "gone"


async def connect(endpoint: Endpoint) -> socket.socket:
    """A connection to a server. OSError."""
    loop = asyncio.get_running_loop()
    if endpoint.path is not None:
        return await _connected(socket.AF_UNIX, endpoint.path)
    found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    problem: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    for family, _, _, _, address in found:
        try:
            return await _connected(family, address)
        except OSError as error:
            problem = error
    raise problem


async def _connected(family: int, address: object) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(connection)
        await asyncio.get_running_loop().sock_connect(connection, address)  # type: ignore[arg-type]
        # A Unix socket whose server has no room for another connection looks as if it were connecting, and never does.
        connection.getpeername()
        return connection
    except BaseException:
        connection.close()
        raise
