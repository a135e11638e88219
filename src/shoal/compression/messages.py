"""Payloads of codecs side by side in one flat tensor of bytes, and back."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.compression.codec import Codec, Encoded, Payload, nbytes, unpack
from shoal.compression.layout import Piece, aligned


def pack_all(payloads: Sequence[Encoded], device: torch.device) -> Tensor:
    """All payloads in one message, each at an aligned place."""
    parts: list[Tensor] = []
    for encoded in payloads:
        parts += [tensor.contiguous().view(torch.uint8) for tensor in encoded.payload]
        filling = aligned(encoded.nbytes) - encoded.nbytes
        if filling:
            parts.append(torch.zeros(filling, dtype=torch.uint8, device=device))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def slots(codec: Codec, message: Tensor, pieces: Sequence[Piece]) -> Iterator[Payload]:
    """Where the payload of each piece goes in the message. What fills up to the next one is set to zero."""
    start = 0
    for piece in pieces:
        stop = start + nbytes(codec, piece.numel, piece.offset)
        end = start + aligned(stop - start)
        if stop < end:
            message[stop:end] = 0
        yield unpack(codec, message[start:stop], piece.numel, offset=piece.offset).payload
        start = end


def unpack_all(
    codec: Codec, message: Tensor, pieces: Sequence[Piece], keys: Sequence[int]
) -> Iterator[tuple[Piece, Encoded]]:
    """The payload of each piece, as views of the message."""
    start = 0
    for piece, key in zip(pieces, keys, strict=True):
        size = nbytes(codec, piece.numel, piece.offset)
        yield piece, unpack(codec, message[start : start + size], piece.numel, key=key, offset=piece.offset)
        start += aligned(size)
