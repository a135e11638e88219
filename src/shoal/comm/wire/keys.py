"""Keys: who may talk to whom beyond this machine, and the encryption between them (CURVE, built into ZeroMQ).

A key file holds a public and a secret key. Everybody may know the public one; it is what an allow-list is made of. Who connects
must know the public key of who listens (it stands behind the address) and must be on its list; a stranger's handshake ends before
a byte of any message of ours. Runs whose processes all have the same key file need nothing else: the list is that one key.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from shoal.comm.wire.sockets import AsyncSocket
from shoal.core.errors import RequestError

_HEX = re.compile(r"[0-9a-f]{64}")
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
PUBLIC_SUFFIX = ".pub"


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The key pair of this process, and the list of those whom it lets in."""

    public: bytes
    """32 bytes."""
    secret: bytes
    """32 bytes."""
    allowed: Path | None = None
    """A file of public keys, one in each line, or a folder of ``*.pub`` files, read anew for every connection; None for this
    process's own key only."""

    def __repr__(self) -> str:
        return f"Keys(public={self.public_hex})"

    @property
    def public_hex(self) -> str:
        """The public key as 64 hexadecimal digits."""
        return self.public.hex()

    def is_allowed(self, public: bytes) -> bool:
        """True when the owner of this public key is let in."""
        if self.allowed is None:
            return public == self.public
        return public in read_public_keys(self.allowed)

    def secure_listener(self, socket: "zmq.Socket[bytes]") -> None:
        """Set up a socket that will listen."""
        # Without these two, ZeroMQ lets everybody in who knows the listener's public key when nobody guards it.
        socket.setsockopt(zmq.ZAP_DOMAIN, b"shoal")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_server = True
        socket.curve_publickey = z85.encode(self.public)
        socket.curve_secretkey = z85.encode(self.secret)

    def secure_caller(self, socket: "zmq.Socket[bytes]", listener_key: str | None) -> None:
        """Set up a socket that will connect to the owner of ``listener_key`` (hexadecimal; this process's own when None)."""
        socket.curve_publickey = z85.encode(self.public)
        socket.curve_secretkey = z85.encode(self.secret)
        socket.curve_serverkey = z85.encode(self.public if listener_key is None else bytes.fromhex(listener_key))


class Authenticator:
    """Asks the list at every handshake of a context, by ZeroMQ's protocol for that (ZAP, RFC 27); without it nobody gets in."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys) -> None:
        self._keys = keys
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ZAP_ADDRESS)
        self._async_socket = AsyncSocket(socket, self._receive)

    def stop(self) -> None:
        """End with the context."""
        self._async_socket.close()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        # The library asks, not the stranger: the number of frames and their meaning are certain.
        version, number, _domain, _host, _identity, mechanism, *credentials = (frame.bytes for frame in frames)
        is_allowed = mechanism == b"CURVE" and len(credentials) == 1 and self._is_allowed(credentials[0])
        status, text = (b"200", b"OK") if is_allowed else (b"400", b"unknown key")
        self._async_socket.try_send([version, number, status, text, b"", b""])

    def _is_allowed(self, public: bytes) -> bool:
        try:
            return self._keys.is_allowed(public)
        except RequestError:
            # A list that cannot be read, or is being written at this moment, lets nobody in.
            return False


def make_keys(path: Path) -> Keys:
    """Make a key pair: ``path`` with both keys, for its owner's eyes only, and ``path.pub`` with the public one.

    Raises:
        RequestError: one of the files exists, or cannot be written.
    """
    public, secret = (z85.decode(key) for key in zmq.curve_keypair())
    keys = Keys(public=public, secret=secret)
    public_path = public_file(path)
    if public_path.exists():
        raise RequestError(f"{public_path} exists; a key is never overwritten: choose another name")
    _write_new(
        path, f"# a secret key of Shoal; keep it to yourself\npublic {public.hex()}\nsecret {secret.hex()}\n", 0o600
    )
    _write_new(public_path, f"{public.hex()}\n", 0o644)
    return keys


def public_file(path: Path) -> Path:
    """Where the public half of the key in ``path`` is."""
    return path.with_name(path.name + PUBLIC_SUFFIX)


def load_keys(path: Path, *, allowed: Path | None = None) -> Keys:
    """The key pair in ``path``.

    Raises:
        RequestError: no such file, it is none, others than its owner can read it, or the allow-list cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, encoding="ascii") as file:
            mode = os.fstat(descriptor).st_mode
            text = file.read(4096) if stat.S_ISREG(mode) else ""
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the key {path}: {error}; make one with `shoal keys new {path}`") from error
    if mode & 0o077:
        raise RequestError(f"the key {path} has mode {mode & 0o777:04o}: others can read it; run `chmod 600 {path}`")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    fields = {line[0]: line[1] for line in lines if len(line) == 2 and _HEX.fullmatch(line[1])}
    if set(fields) != {"public", "secret"}:
        raise RequestError(f"{path} is no key file; make one with `shoal keys new FILE`")
    keys = Keys(public=bytes.fromhex(fields["public"]), secret=bytes.fromhex(fields["secret"]), allowed=allowed)
    if zmq.curve_public(z85.encode(keys.secret)) != z85.encode(keys.public):
        raise RequestError(
            f"the public key in {path} does not belong to the secret one; make another with `shoal keys new`"
        )
    if allowed is not None:
        read_public_keys(allowed)
    return keys


def read_public_keys(path: Path) -> frozenset[bytes]:
    """The public keys in a file (one in each line, ``#`` begins a comment), or in the ``*.pub`` files of a folder.

    Raises:
        RequestError: it cannot be read, or a line is no key.
    """
    files = sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
    found = set()
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read the public keys in {file}: {error}") from error
        for number, line in enumerate(lines, 1):
            word = line.partition("#")[0].strip()
            if word and not _HEX.fullmatch(word):
                raise RequestError(f"{file}, line {number}: a public key has 64 hexadecimal digits, not {word[:70]!r}")
            if word:
                found.add(bytes.fromhex(word))
    return frozenset(found)


def _write_new(path: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError as error:
        raise RequestError(f"{path} exists; a key is never overwritten: choose another name") from error
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error}") from error
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
