"""How many bytes went through the TCP connections of this machine, by the kernel's own count.

/proc counts no bytes of a socket, so a rank that downloads looks idle there. The kernel tells the
bytes of each connection to anybody who asks (sock_diag(7), Linux 4.2 and newer).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2
_INFO = 2  # INET_DIAG_INFO: struct tcp_info
_ESTABLISHED = 1 << 1
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_INODE, _ATTRIBUTES = 68, 72  # in struct inet_diag_msg
_BYTES = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_BYTES_AT = 120
_SECONDS = 1.0


Bytes = Mapping[int, tuple[int, int]]


def connections(pids: Iterable[int], moved: Bytes) -> Bytes:
    """The connections of these processes, of those in ``moved``."""
    return {one: moved[one] for pid in pids for one in sockets_of(pid) if one in moved}


def bytes_by_socket() -> Bytes:
    """Inode of each connection -> bytes sent, bytes received; empty if the kernel does not tell."""
    found: dict[int, tuple[int, int]] = {}
    with (
        suppress(OSError, AttributeError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as wire,
    ):
        wire.settimeout(_SECONDS)
        for family in (socket.AF_INET, socket.AF_INET6):
            kind = family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED
            asked = struct.pack("=BBBxI", *kind) + bytes(48)  # of any address
            wire.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _DUMP, 1, 0) + asked)
            found.update(_connections(wire))
    return found


def _connections(wire: socket.socket) -> Iterator[tuple[int, tuple[int, int]]]:
    while True:
        data = wire.recv(1 << 17)
        while data:
            length, kind, *_ = _HEADER.unpack_from(data)
            if kind in (_DONE, _ERROR):
                return
            message = data[_HEADER.size : length]
            moved = _moved(message[_ATTRIBUTES:])
            if moved is not None:
                yield struct.unpack_from("=I", message, _INODE)[0], moved
            data = data[_aligned(length) :]


def _moved(attributes: bytes) -> tuple[int, int] | None:
    """Bytes sent and received, from the attributes of one connection."""
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == _INFO and length - 4 >= _BYTES_AT + _BYTES.size:
            sent, received = _BYTES.unpack_from(attributes, 4 + _BYTES_AT)
            return sent, received
        attributes = attributes[_aligned(max(length, 4)) :]
    return None


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def sockets_of(pid: int) -> Iterator[int]:
    """Inodes of the sockets that ``pid`` has open; none if that may not be read."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - called often, strings suffice
            with suppress(OSError):
                target = os.readlink(f"{folder}/{name}")  # noqa: PTH115
                if target.startswith("socket:["):
                    yield int(target[8:-1])
