"""What is asked of the store of a run on several hosts, what it answers, and how messages follow one another on a stream.

A rank asks the agent of its host over a unix socket; the agent passes the question on to the coordinator over the remote shell
that the coordinator has opened, so no port is open for any of it. A message is its length in four bytes and a msgpack struct,
whose types and lengths are checked before anything is made of it.
"""

import struct
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.core.errors import RunError

MAX_BYTES = 4 << 20
"""No message is longer."""
_LENGTH = struct.Struct("<I")

Operation = Literal["set", "get", "add", "compare_set", "check", "wait", "delete", "count"]
Key = Annotated[str, Meta(max_length=1024)]


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask"):
    """A rank asks the store."""

    number: int
    """By which the answer is known."""
    operation: Operation
    keys: Annotated[tuple[Key, ...], Meta(max_length=4096)] = ()
    value: bytes = b""
    expected: bytes = b""
    """Of ``compare_set``."""
    amount: int = 0
    """Of ``add``."""
    seconds: float = 0.0
    """How long to wait for keys that are not there yet."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="answer"):
    """What the store says."""

    number: int
    value: bytes = b""
    amount: int = 0
    """The count, the sum, or 1 for yes."""
    error: str = ""
    """Why there is no answer; empty when there is one."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of one message on a stream."""
    body = _encoder.encode(message)
    if len(body) > MAX_BYTES:
        raise RunError(f"a message of {len(body)} bytes; the limit is {MAX_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Messages:
    """Bytes in, whole messages out.

    Args:
        kinds: a struct or a union of structs, each with a tag.
    """

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds, strict=True)
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that these bytes complete.

        Raises:
            RunError: what came is no message.
        """
        self._held += data
        found = []
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            if length > MAX_BYTES:
                raise RunError(f"a message of {length} bytes was announced; the limit is {MAX_BYTES}")
            end = _LENGTH.size + length
            if len(self._held) < end:
                break
            body = bytes(self._held[_LENGTH.size : end])
            del self._held[:end]
            try:
                found.append(self._decoder.decode(body))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RunError(f"a message that is none: {error}") from error
        return found
