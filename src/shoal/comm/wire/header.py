"""The header of a message: what is said about its payload, and by whom, before a byte of the payload is touched.

A message is ``[header, body, chunk, ..., seal]``. The header is this struct in msgpack; the body is the struct of the operation
(``operations.py``); chunks are the raw little-endian bytes of a tensor, or absent when the payload lies in shared memory
(``arena.py``) or there is none; the seal is a checksum over everything before it (``message.py``).
"""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.comm.wire.verdict import Dropped

PROTOCOL_VERSION = 1
"""Raised with every change of the header, the frames or the seal. Bodies are versioned with it."""
HEADER_BYTES = 2048
"""A longer header is not looked at."""
PAYLOAD_BYTES = 1 << 34
"""No payload is longer, whatever an operation allows."""
DEADLINE_SECONDS = 7 * 24 * 3600.0
"""Nobody waits longer."""
REFUSED = "!refused"
"""The operation of an answer that says no."""
TAKEN = "!taken"
"""The operation of a note that says that a payload in shared memory is not needed any more."""

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Every dtype that may cross, and the bytes of one element. Names are torch's."""

_Count = Annotated[int, Meta(ge=0, le=2**62)]
_Extent = Annotated[int, Meta(ge=0, le=2**40)]
_Incarnation = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]


class Place(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where a payload lies in memory that both processes see."""

    name: Annotated[str, Meta(max_length=128)]
    """The arena's file name, without a folder."""
    offset: _Count
    num_bytes: _Count


class Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The first frame of every message."""

    version: Annotated[int, Meta(ge=0, le=255)]
    """``PROTOCOL_VERSION`` of the sender."""
    epoch: _Count
    """The sender's epoch when it sent this."""
    sender: _Incarnation
    """The sender's incarnation: another one after every start."""
    sequence: _Count
    """Counts what the sender sent, to anybody; with ``sender`` it names this message."""
    operation: Annotated[str, Meta(max_length=64)]
    """A name of the table of operations, ``!refused`` or ``!taken``."""
    answers: Annotated[int, Meta(ge=-1, le=2**62)]
    """The sequence of the message that this one answers; -1 for a request."""
    key: Annotated[str, Meta(max_length=256)]
    """What the request is about, in the words of its operation."""
    dtype: Annotated[str, Meta(max_length=16)]
    """One of ``ITEM_BYTES``; empty when there is no payload."""
    shape: Annotated[tuple[_Extent, ...], Meta(max_length=8)]
    deadline: Annotated[float, Meta(ge=0.0, le=DEADLINE_SECONDS)]
    """Seconds that the sender will wait for an answer; 0 in an answer."""
    place: Place | None
    """Where the payload is, when it is in shared memory."""
    folder: Annotated[str, Meta(max_length=64)]
    """Which folder of arenas the sender sees; empty when none. Only those who see the same one use arenas between them."""

    @property
    def has_payload(self) -> bool:
        """True when a tensor comes with this message, be it an empty one."""
        return self.dtype != ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header, strict=True)


def encode_header(header: Header) -> bytes:
    """The first frame."""
    return _encoder.encode(header)


def decode_header(frame: bytes | memoryview) -> Header:
    """The header in the first frame, with everything checked that needs no other frame.

    Raises:
        Dropped: ``frames``, ``malformed``, ``version`` or ``payload``.
    """
    if not 0 < len(frame) <= HEADER_BYTES:
        raise Dropped("frames", f"a header of {len(frame)} bytes; the limit is {HEADER_BYTES}")
    try:
        header = _decoder.decode(frame)
    # A name in the header may hold bytes that are no text.
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Dropped("malformed", f"header: {error}") from error
    if header.version != PROTOCOL_VERSION:
        text = f"the sender speaks version {header.version} of the protocol, this process {PROTOCOL_VERSION}; run one release"
        raise Dropped("version", text, header)
    if header.has_payload != bool(header.dtype in ITEM_BYTES):
        raise Dropped("payload", f"dtype {header.dtype!r} is none of {', '.join(ITEM_BYTES)}", header)
    if not header.has_payload and (header.shape or header.place is not None):
        raise Dropped("payload", "a shape or a place without a dtype", header)
    return header


def payload_bytes(header: Header) -> int:
    """The bytes that dtype and shape ask for.

    Raises:
        Dropped: ``oversized``, when no payload may be that long.
    """
    if not header.has_payload:
        return 0
    # Python's integers do not overflow; at most 8 extents of 40 bits each.
    num_bytes = math.prod(header.shape) * ITEM_BYTES[header.dtype]
    if num_bytes > PAYLOAD_BYTES:
        raise Dropped("oversized", f"a payload of {num_bytes} bytes; the limit is {PAYLOAD_BYTES}", header)
    return num_bytes
