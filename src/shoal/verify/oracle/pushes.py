"""What servers decode of compressed pushes, in one process: the codecs of ``codecs.py``, slice by slice, and what workers keep.

    p = pushed + e(worker, slice)        sent = Q(p)        e(worker, slice) = p - sent

Every push of the log was kept, in the order in which its worker pushed, so what a worker keeps follows from the log alone: a push
that came to nothing changed nothing. A worker under another name has nothing kept. No code of ``compression/`` or
``paramserver/``.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.core.compressrule import CompressRule
from shoal.verify.oracle.codecs import Floats, block_codec, key_of, largest_places, only, places_above, random_ranges
from shoal.verify.reference.case import UpdateLog
from shoal.verify.reference.model import ReferenceModel

_WITH_MEMORY = ("int4", "topk", "randk", "threshold", "sign")


class DecodedPushes:
    """The codec of a log's pushes, and what each worker has not sent yet."""

    def __init__(self, parts: ReferenceModel, log: UpdateLog) -> None:
        assert log.compress is not None
        self._rule, self._settings = CompressRule.parse(log.compress), log.compression
        self._seed, self._shares, self._pieces = parts.case.seed, log.tree.replicas, log.pieces
        residual = self._settings["residual"]
        self._remembers = self._rule.kind in _WITH_MEMORY if residual is None else bool(residual)
        least = max(1, self._settings["min_elements"])
        self._names = {name for name, value in parts.named if value.ndim >= 2 and math.prod(value.shape) >= least}
        self._kept: dict[tuple[str, str, int], Floats] = {}

    def decoded(self, pushed: Mapping[str, Tensor], *, worker: str, units: Sequence[int]) -> dict[str, Tensor]:
        """What servers add up in the place of what a worker pushed."""
        if min(units) // self._shares < self._rule.start:
            return dict(pushed)
        found = {name: tensor.clone() for name, tensor in pushed.items()}
        for name, start, stop, _ in self._pieces:
            if name not in self._names or start == stop:
                continue
            given: Floats = pushed[name].detach().reshape(-1)[start:stop].numpy().copy()
            place = (worker, name, start)
            if place in self._kept:
                given = given + self._kept[place]
            sent = self._sent(given, key_of(self._seed, min(units), f"{name}@{start}"), start)
            if self._remembers:
                self._kept[place] = given - sent
            found[name].view(-1)[start:stop] = torch.from_numpy(sent)
        return found

    def _sent(self, given: Floats, key: int, start: int) -> Floats:
        kind, number = self._rule.kind, self._rule.number
        if kind == "topk":
            return only(given, largest_places(given, number))
        if kind == "threshold":
            return only(given, places_above(given, number))
        if kind == "randk":
            places, widths = random_ranges(given.size, number, key)
            found = only(given, places)
            if not self._remembers:
                found[places] *= widths.astype(np.float32)
            return found
        at_random = self._settings["round"] == "keyed"
        return block_codec(self._rule, block=self._settings["block"], at_random=at_random)(given, key, start)
