"""Documents of many lengths packed into sequences of one length, so that little of a batch is padding.

A packed sequence is three rows: tokens, the document that each position belongs to (-1 where there is none), and targets, the
next token of the same document. The last token of a document has no target, so no loss crosses from one document to the next,
and a model that lets a position see only earlier positions of its own document computes what it would of each by itself.

    tokens      a b c d | x y | p q r _        documents   0 0 0 0 1 1 2 2 2 -1
    targets     b c d e | y z | q r s .        (a document's last token, e, z or s, is only a target)

How documents are packed is a function of their lengths and a seed, so every process of every plan packs alike.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import RequestError, RunError
from shoal.core.functions import call_own
from shoal.data.options import LoaderOptions
from shoal.data.order import permute
from shoal.data.source import Items, SampleIds
from shoal.data.spec import IGNORED
from shoal.telemetry.memory import is_out_of_memory

NO_DOCUMENT = -1
"""The document of a position that is padding."""


@dataclass(frozen=True)
class Piece:
    """A part of a document: its tokens from ``start`` to ``stop`` are read, and each one's next is its target."""

    document: int
    start: int
    stop: int


def pack(lengths: Sequence[int], sequence: int, *, seed: int = 0) -> list[tuple[Piece, ...]]:
    """Documents in sequences: each piece where it leaves the least room (best fit), in an order that the seed draws.

    Documents that are longer than a sequence are cut, and each part is a document of its own; no token is lost. One of a single
    token has nothing to predict, and is left out.

    Args:
        lengths: tokens of each document.
        sequence: tokens of a packed sequence.
        seed: of the order.
    """
    packed: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (positions left, which sequence), sorted
    for document in permute(seed, 0, len(lengths), np.arange(len(lengths), dtype=np.int64)).tolist():
        last = int(lengths[document]) - 1
        for start in range(0, last, sequence):
            piece = Piece(document, start, min(start + sequence, last))
            size = piece.stop - piece.start
            place = bisect_left(room, (size, -1))
            if place == len(room):
                left, number = sequence, len(packed)
                packed.append([])
            else:
                left, number = room.pop(place)
            packed[number].append(piece)
            if left > size:
                insort(room, (left - size, number))
    return [tuple(pieces) for pieces in packed]


class PackedSource:
    """Documents as packed sequences; a model is called with ``(tokens, documents)``, both of the shape (B, sequence).

    Args:
        documents: map-style; each is a sequence of whole numbers, at least two.
        sequence: positions of a packed sequence.
        seed: of how they are packed.
        padding_value: the token where there is none.
        lengths: tokens of each document; the dataset's attribute ``lengths`` when left out, else each is read once.

    Raises:
        RequestError: there is no document, or none with something to predict.
    """

    def __init__(
        self,
        documents: Any,
        sequence: int,
        *,
        seed: int = 0,
        padding_value: int = 0,
        lengths: Sequence[int] | None = None,
    ) -> None:
        if sequence < 1:
            raise RequestError(f"sequences of {sequence} tokens are asked for, and must have 1 or more")
        self._documents = documents
        self._sequence = sequence
        self._padding_value = padding_value
        told = lengths if lengths is not None else getattr(documents, "lengths", None)
        found = list(told) if told is not None else [len(self._read(one)) for one in range(len(documents))]
        if len(found) != len(documents):
            raise RequestError(f"there are {len(found)} lengths and {len(documents)} documents; give one for each")
        self._lengths = [int(length) for length in found]
        self.sequences = pack(self._lengths, sequence, seed=seed)
        """The pieces of each packed sequence, in their order."""
        if not self.sequences:
            raise RequestError(
                "no document has two tokens or more, so there is nothing to predict; the training data is empty"
            )
        self.vocab: int | None = getattr(documents, "vocab", None)
        self.options = LoaderOptions()
        """How it wants to be loaded."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def uniform_weight(self) -> int | None:
        """None: sequences have as many targets as they have room filled."""
        return None

    @property
    def fill(self) -> float:
        """The share of positions that are no padding."""
        filled = sum(piece.stop - piece.start for pieces in self.sequences for piece in pieces)
        return filled / (len(self.sequences) * self._sequence)

    def collate(self, ids: SampleIds) -> Items:
        """Packed sequences: tokens and documents as inputs, and targets."""
        shape = len(ids), self._sequence
        tokens = torch.full(shape, self._padding_value, dtype=torch.int64)
        documents = torch.full(shape, NO_DOCUMENT, dtype=torch.int64)
        targets = torch.full(shape, IGNORED, dtype=torch.int64)
        for row, number in enumerate(ids):
            start = 0
            for place, piece in enumerate(self.sequences[int(number)]):
                read = self._read(piece.document)
                if len(read) != self._lengths[piece.document]:
                    raise RunError(
                        f"document {piece.document} has {len(read)} tokens, and lengths say {self._lengths[piece.document]}; "
                        "correct lengths, or leave it out"
                    )
                stop = start + piece.stop - piece.start
                tokens[row, start:stop] = read[piece.start : piece.stop]
                targets[row, start:stop] = read[piece.start + 1 : piece.stop + 1]
                documents[row, start:stop] = place
                start = stop
        return Items(inputs=(tokens, documents), targets=targets, weight=int((targets != IGNORED).sum()))

    def _read(self, number: int) -> Tensor:
        found = call_own(
            lambda: torch.as_tensor(self._documents[number]),
            what=f"reading document {number}",
            is_excused=is_out_of_memory,
        )
        if not isinstance(found, Tensor) or found.ndim != 1 or found.is_floating_point():
            form = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise RequestError(f"document {number} is {form}; give a sequence of whole numbers")
        return found


def cumulative_lengths(documents_BL: Tensor) -> Tensor:
    """Where each document begins in the batch laid end to end, and where the last one ends: ``cu_seqlens`` of attention kernels.

    Padding at the end of a sequence counts as a document of its own.
    """
    num_rows, length = documents_BL.shape
    is_first = torch.ones_like(documents_BL, dtype=torch.bool)
    is_first[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    starts = is_first.reshape(-1).nonzero().reshape(-1)
    return torch.cat((starts, starts.new_tensor([num_rows * length]))).to(torch.int32)
