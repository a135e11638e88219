"""Frames of messages, packed and unpacked: every length is compared with every other before anything is allocated or copied.

    [header, body, seal]           no payload, one in shared memory, or one that follows in chunks
    [header, body, payload, seal]  a payload of up to 1 MB
    [chunk head, chunk]            the next 1 MB of a longer payload

How many chunks follow is a matter of the header's dtype and shape. A seal, and the end of a chunk's head, is a checksum (xxh3, 64
bits) of the rest of its message. It finds damage, and a buffer that its owner changed too early; against people there are keys.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from shoal.comm.wire.buffers import CHUNK_BYTES
from shoal.comm.wire.header import Header, decode_header, encode_header, payload_bytes
from shoal.comm.wire.verdict import Dropped

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
