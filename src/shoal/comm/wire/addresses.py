"""Addresses: what may be listened on and connected to, and with or without keys.

``inproc://name``, ``ipc:///path/to.sock`` and ``tcp://host:port``; behind a tcp address may stand ``#`` and the public key of who
listens there, as 64 hexadecimal digits. Traffic that leaves this machine needs keys: without them only loopback is allowed.
"""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import RequestError

_IPC_BYTES = 107
"""The kernel's limit for the path of a socket."""
_TCP = re.compile(r"tcp://(?P<host>[^:/#\s]+):(?P<port>\d{1,5})(#(?P<key>[0-9a-f]{64}))?")
_INPROC = re.compile(r"inproc://[A-Za-z0-9_./-]{1,200}")


@dataclass(frozen=True, kw_only=True)
class Address:
    """An address that was checked."""

    kind: str
    """``inproc``, ``ipc`` or ``tcp``."""
    endpoint: str
    """What ZeroMQ is told."""
    key: str | None = None
    """The public key of who listens there, in hexadecimal digits."""

    @property
    def is_local(self) -> bool:
        """True when both ends are processes of this machine that may share memory."""
        return self.kind == "ipc" or (self.kind == "tcp" and is_loopback(self.host))

    @property
    def host(self) -> str:
        """Of a tcp address."""
        assert self.kind == "tcp"
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0]

    @property
    def path(self) -> Path:
        """The file of an ipc socket."""
        assert self.kind == "ipc"
        return Path(self.endpoint.removeprefix("ipc://"))


def parse_address(text: str, *, has_keys: bool) -> Address:
    """The address that ``text`` says.

    Raises:
        RequestError: it is none, or it leaves this machine and there are no keys.
    """
    if text.startswith("ipc://"):
        return _parse_ipc(text)
    if _INPROC.fullmatch(text):
        return Address(kind="inproc", endpoint=text)
    match = _TCP.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise RequestError(f"{text!r} is no address; write tcp://127.0.0.1:PORT, ipc:///path/to.sock or inproc://name")
    if not has_keys and not is_loopback(match["host"]):
        raise RequestError(
            f"{text} leaves this machine and there are no keys: anybody could read the weights and change them; make keys with "
            "`shoal keys new FILE`, or use tcp://127.0.0.1"
        )
    host = "127.0.0.1" if match["host"] == "localhost" else match["host"]
    return Address(kind="tcp", endpoint=f"tcp://{host}:{match['port']}", key=match["key"])


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and every address of 127.0.0.0/8. Other names are not looked up: the answer could change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def _parse_ipc(text: str) -> Address:
    path = text.removeprefix("ipc://")
    if not path.startswith("/"):
        raise RequestError(f"{text!r} names no absolute path; write ipc:///path/to.sock")
    if len(path.encode()) > _IPC_BYTES:
        raise RequestError(
            f"{path} has {len(path.encode())} bytes and a socket's path may have {_IPC_BYTES}; use a shorter folder"
        )
    return Address(kind="ipc", endpoint=text)
