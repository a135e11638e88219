"""Messages as frames: every length is compared with every other before anything is allocated or copied.

    [header, body, seal]           no payload, one in shared memory, or one that follows in chunks
    [header, body, payload, seal]  a payload of up to 1 MB
    [chunk head, chunk]            the next 1 MB of a longer payload

The header is a struct in msgpack that describes the payload and names the sender; the body is the struct of the operation
(``operations.py``); a payload is the raw little-endian bytes of a tensor, unless it lies in shared memory (``arena.py``). The
header's dtype and shape say how many chunks follow. The seal, and the end of a chunk's head, is a checksum (xxh3, 64 bits) of the
rest of its message. It finds damage, and a buffer that its owner changed too early; against people there are keys.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from shoal.comm.wire.buffers import CHUNK_BYTES
from shoal.comm.wire.errors import Dropped

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
_InstanceId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]


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
    sender: _InstanceId
    """The sender's instance: another one after every start."""
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


SEAL_BYTES = 8
BODY_BYTES = 1 << 20
"""No body is longer; what is longer is a payload."""
Frame = bytes | memoryview

_CHUNK_MARK = 0xC1
"""The one byte that no msgpack begins with."""
_CHUNK_NAME = struct.Struct("<BQQ")
CHUNK_HEAD_BYTES = _CHUNK_NAME.size + SEAL_BYTES


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A message that is whole: its lengths fit together and its seal is right. Its body is not yet decoded."""

    header: Header
    body: memoryview
    inline: memoryview | None
    """The payload, if it is in this message."""
    num_bytes: int
    """Of the payload, wherever it is."""

    @property
    def is_stream(self) -> bool:
        """True when the payload follows in chunks."""
        return self.header.place is None and self.num_bytes > CHUNK_BYTES


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of the payload of message ``sequence`` of the same sender."""

    sequence: int
    index: int
    data: memoryview


def pack(header: Header, body: bytes, payload: memoryview | None) -> list[Frame]:
    """The frames of a message; the payload is in it when it is short enough and has no place."""
    is_inline = payload is not None and header.place is None and 0 < payload.nbytes <= CHUNK_BYTES
    frames: list[Frame] = [encode_header(header), body]
    if is_inline and payload is not None:
        frames.append(payload)
    return [*frames, _checksum(frames)]


def pack_chunk(sequence: int, index: int, data: memoryview) -> list[Frame]:
    """The frames of a chunk; ``data`` is referred to, not copied."""
    name = _CHUNK_NAME.pack(_CHUNK_MARK, sequence, index)
    return [name + _checksum([name, data]), data]


def is_chunk(frames: Sequence[memoryview]) -> bool:
    """True when this is a chunk, or says so; else it is a message."""
    return bool(frames) and frames[0].nbytes > 0 and frames[0][0] == _CHUNK_MARK


def unpack_chunk(frames: Sequence[memoryview]) -> Chunk:
    """The chunk in ``frames``.

    Raises:
        Dropped: ``frames`` or ``corrupt``.
    """
    if len(frames) != 2 or frames[0].nbytes != CHUNK_HEAD_BYTES or not 0 < frames[1].nbytes <= CHUNK_BYTES:
        raise Dropped("frames", f"a chunk of {[frame.nbytes for frame in frames[:8]]} bytes")
    name, seal = frames[0][: _CHUNK_NAME.size], frames[0][_CHUNK_NAME.size :]
    if _checksum([name, frames[1]]) != seal:
        raise Dropped("corrupt", "the checksum of a chunk differs")
    _, sequence, index = _CHUNK_NAME.unpack(name)
    return Chunk(sequence=sequence, index=index, data=frames[1])


def unpack(frames: Sequence[memoryview]) -> Envelope:
    """The message in ``frames``.

    Raises:
        Dropped: ``frames``, ``malformed``, ``version``, ``payload``, ``oversized``, ``place`` or ``corrupt``.
    """
    if not 3 <= len(frames) <= 4 or frames[-1].nbytes != SEAL_BYTES:
        raise Dropped("frames", f"{len(frames)} frames, or a seal that is not of {SEAL_BYTES} bytes")
    header = decode_header(frames[0])
    if frames[1].nbytes > BODY_BYTES:
        raise Dropped("oversized", f"a body of {frames[1].nbytes} bytes; the limit is {BODY_BYTES}", header)
    num_bytes = payload_bytes(header)
    if header.place is not None and header.place.num_bytes != num_bytes:
        text = (
            f"a place of {header.place.num_bytes} bytes for a {header.dtype} of shape {header.shape}: {num_bytes} bytes"
        )
        raise Dropped("place", text, header)
    inline = frames[2] if len(frames) == 4 else None
    expected = num_bytes if header.place is None and num_bytes <= CHUNK_BYTES else 0
    found = 0 if inline is None else inline.nbytes
    if found != expected or (inline is not None and not found):
        text = (
            f"{found} bytes of payload in the message; {header.dtype or 'no dtype'} {header.shape} asks for {expected}"
        )
        raise Dropped("payload", text, header)
    # No header goes with this one: a damaged one may name another sender.
    if _checksum(frames[:-1]) != frames[-1]:
        raise Dropped("corrupt", "the checksum of a message differs")
    return Envelope(header=header, body=frames[1], inline=inline, num_bytes=num_bytes)


def _checksum(frames: Sequence[Frame]) -> bytes:
    digest = xxhash.xxh3_64()
    for frame in frames:
        # The length too: bytes that move from one frame to the next change the message.
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()
