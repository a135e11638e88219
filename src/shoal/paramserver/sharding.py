"""Which part of the model each shard holds: the trained parameters in one row, cut into slices of even bytes. No torch.

    order    | embed.weight ............... | fc.bias | fc.weight ..... |      by name, hot ones first, without padding
    shards   | 0 ................. | 1 ................ | 2 ........... |      cut where a row begins, nearest to the even share

A cut lies at the start of a tensor, or of a row that is a multiple of ``CUT_MULTIPLE`` elements into it: there an optimizer
kernel gives the bits that it gives for the whole tensor (docs/design/0004), and a checkpoint can name the part as a box.
"""

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import NamedTuple

from shoal.core.errors import RequestError, did_you_mean, nearest
from shoal.core.placement import Shape
from shoal.paramserver.config import ParamServerConfig

CUT_MULTIPLE = 16
"""The same as ``optim.flat.CUT_MULTIPLE``, which is not read here because it comes with torch."""
ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
NORM_OPTIMIZERS = frozenset({"lars", "lamb"})
"""Optimizers that need the norm of a whole tensor, and so a shard that holds it all."""


class TensorSpec(NamedTuple):
    """What a trained parameter is."""

    shape: Shape
    dtype: str

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A slice of one parameter that a shard holds."""

    name: str
    start: int
    """Its first element in the flattened parameter; where a row begins."""
    stop: int
    offset: int
    """Its first element in the shard's buffer."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def key(self) -> str:
        """A name for the piece, unique in the model."""
        return f"{self.name}[{self.start}:{self.stop}]"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one shard holds, in the order of its buffer."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements of its buffer."""
        return sum(piece.numel for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """Every shard of a model."""

    dtype: str
    shards: tuple[Shard, ...]
    model: str
    """Digest of the model that it is for."""

    def num_bytes(self, number: int) -> int:
        """Bytes of a shard's buffer."""
        return self.shards[number].numel * ITEM_BYTES[self.dtype]

    @property
    def cut_names(self) -> tuple[str, ...]:
        """Parameters that lie on more than one shard."""
        names = [piece.name for shard in self.shards for piece in shard.pieces]
        return tuple(sorted({name for name in names if names.count(name) > 1}))


Model = Mapping[str, TensorSpec]
"""The trained parameters, by name."""


def digest_model(model: Model) -> str:
    """A hash of names, shapes and dtypes: two that have the same can train together."""
    text = json.dumps(
        [[name, list(spec.shape), spec.dtype] for name, spec in sorted(model.items())], separators=(",", ":")
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def model_dtype(model: Model) -> str:
    """The one dtype of all trained parameters.

    Raises:
        RequestError: there are several, one that a shard cannot hold, or no parameter at all.
    """
    if not any(spec.numel for spec in model.values()):
        raise RequestError("the model has no trained parameter to put on a parameter server; set requires_grad on one")
    by_dtype = {spec.dtype: name for name, spec in sorted(model.items(), reverse=True)}
    if len(by_dtype) > 1:
        found = ", ".join(f"{name!r} in {dtype}" for dtype, name in sorted(by_dtype.items()))
        raise RequestError(
            f"parameter servers hold one dtype, and this model has {len(by_dtype)}: {found}; convert the model to one"
        )
    dtype = next(iter(by_dtype))
    if dtype not in ITEM_BYTES:
        raise RequestError(
            f"parameter servers hold {', '.join(sorted(ITEM_BYTES))}, and {by_dtype[dtype]!r} is {dtype}"
        )
    return dtype


def cut_model(
    model: Model,
    num_shards: int,
    *,
    hot: frozenset[str] = frozenset(),
    optimizer: str = "",
    whole_tensors: bool = False,
) -> ShardMap:
    """The model as ``num_shards`` slices, each within one cuttable row of its even share.

    Args:
        model: the trained parameters.
        num_shards: at least 1.
        hot: parameters that belong on shard 0, which then holds others only up to the even share.
        optimizer: its name; for one that needs norms of whole tensors none is cut, and shards are as even as that allows.
        whole_tensors: cut none in any case (Adasum's dot products need them whole).

    Raises:
        RequestError: there are several dtypes, fewer places to cut than shards, or a hot name that is none.
    """
    dtype = model_dtype(model)
    for name in sorted(hot - model.keys()):
        raise RequestError(f"hot parameter {name!r} is not in the model; {did_you_mean(name, model)}")
    row = _Row(model, hot, cut_inside=not (whole_tensors or optimizer in NORM_OPTIMIZERS))
    num_hot = sum(model[name].numel for name in hot)
    cuts = [0, *_cuts(row, num_shards, num_hot), row.size]
    if any(stop <= start for start, stop in pairwise(cuts)) or cuts[1] < num_hot:
        raise RequestError(_too_many(row, num_shards, num_hot, optimizer))
    shards = tuple(Shard(number=number, pieces=row.pieces(*ends)) for number, ends in enumerate(pairwise(cuts)))
    return ShardMap(dtype=dtype, shards=shards, model=digest_model(model))


def check_cover(shard_map: ShardMap, model: Model) -> None:
    """Refuse a map that does not hold every element of the model exactly once.

    Raises:
        RequestError: names what is missing, foreign, held twice or out of place.
    """
    held: dict[str, list[Piece]] = {}
    for number, shard in enumerate(shard_map.shards):
        if shard.number != number:
            raise RequestError(f"the shard map has shard {shard.number} in place {number}")
        offset = 0
        for piece in shard.pieces:
            if piece.offset != offset or piece.numel < 1:
                raise RequestError(
                    f"the shard map puts {piece.key} at element {piece.offset} of shard {shard.number}, "
                    f"and the next free one is {offset}"
                )
            offset += piece.numel
            held.setdefault(piece.name, []).append(piece)
    wanted = {name: spec.numel for name, spec in model.items() if spec.numel}
    missing, foreign = sorted(wanted.keys() - held.keys()), sorted(held.keys() - wanted.keys())
    if missing or foreign:
        raise RequestError(
            f"the shard map does not fit the model: {len(missing)} parameters are on no shard ({_some(missing)}), and "
            f"{len(foreign)} are not in the model ({_some(foreign)}); cut the map from this model"
        )
    for name, pieces in sorted(held.items()):
        ends = [
            0,
            *(place for piece in sorted(pieces, key=_start) for place in (piece.start, piece.stop)),
            wanted[name],
        ]
        wrong = [(stop, start) for stop, start in zip(ends[::2], ends[1::2], strict=True) if stop != start]
        if wrong:
            stop, start = wrong[0]
            text = (
                f"elements {stop} to {start} are on no shard"
                if start > stop
                else f"elements from {start} to {stop} are held twice"
            )
            raise RequestError(
                f"the shard map does not cover {name!r} of {wanted[name]} elements: {text}; cut the map from this model"
            )
    if shard_map.model != digest_model(model):
        raise RequestError(
            f"the shard map is for model {shard_map.model}, and this one is {digest_model(model)}: shapes or dtypes differ; "
            "cut the map from this model"
        )


class _Row:
    """All parameters one after the other, and where the row may be cut."""

    def __init__(self, model: Model, hot: frozenset[str], *, cut_inside: bool) -> None:
        self.names = sorted((name for name in model if model[name].numel), key=lambda name: (name not in hot, name))
        *self.offsets, self.size = [0, *accumulate(model[name].numel for name in self.names)]
        self._strides = [_stride(model[name].shape) if cut_inside else model[name].numel for name in self.names]

    def at_or_below(self, place: int) -> int:
        """The last legal cut that is not behind ``place``."""
        if place >= self.size:
            return self.size
        index = bisect_right(self.offsets, place) - 1
        return self.offsets[index] + (place - self.offsets[index]) // self._strides[index] * self._strides[index]

    def above(self, place: int) -> int:
        """The first legal cut behind ``place``."""
        if place >= self.size:
            return self.size + 1
        index = bisect_right(self.offsets, place) - 1
        end = self.offsets[index + 1] if index + 1 < len(self.offsets) else self.size
        return min(self.at_or_below(place) + self._strides[index], end)

    def nearest(self, place: float) -> int:
        """The legal cut nearest to ``place``."""
        below = self.at_or_below(math.floor(place))
        return min(below, self.above(math.floor(place)), key=lambda cut: (abs(cut - place), cut))

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """What lies between two cuts."""
        first, last = bisect_right(self.offsets, start) - 1, bisect_left(self.offsets, stop)
        found = []
        for index in range(first, last):
            offset = self.offsets[index]
            end = self.offsets[index + 1] if index + 1 < len(self.offsets) else self.size
            low, high = max(start, offset), min(stop, end)
            found.append(Piece(name=self.names[index], start=low - offset, stop=high - offset, offset=low - start))
        return tuple(found)


def _stride(shape: Shape) -> int:
    """Elements between two legal cuts inside a tensor: whole rows, and a multiple of ``CUT_MULTIPLE``."""
    return math.lcm(math.prod(shape[1:]), CUT_MULTIPLE)


def _cuts(row: _Row, num_shards: int, num_hot: int) -> list[int]:
    """The inner cuts; where there are too few places they collide."""
    if num_hot > row.size / num_shards and num_shards > 1:
        # The hot ones alone are more than an even share: shard 0 holds just these.
        rest = row.size - num_hot
        cuts = [row.nearest(num_hot + rest * number / (num_shards - 1)) for number in range(num_shards - 1)]
    else:
        cuts = [row.nearest(row.size * number / num_shards) for number in range(1, num_shards)]
        cuts[:1] = [max(cut, num_hot) for cut in cuts[:1]]
    # An uncuttable row may be nearest to several: each shard still gets something as long as there are places.
    for index in range(1, len(cuts)):
        cuts[index] = max(cuts[index], row.above(cuts[index - 1]))
    for index in reversed(range(len(cuts))):
        end = cuts[index + 1] if index + 1 < len(cuts) else row.size
        cuts[index] = min(cuts[index], row.at_or_below(end - 1))
    return cuts


def _too_many(row: _Row, num_shards: int, num_hot: int, optimizer: str) -> str:
    places, place = (1, num_hot) if num_hot else (0, 0)
    while place < row.size:
        places, place = places + 1, row.above(place)
    why = f", because {optimizer} needs whole tensors" if optimizer in NORM_OPTIMIZERS else ""
    spared = " with the hot parameters together" if num_hot else ""
    return f"{num_shards} shards are asked for, and the model can be cut into {places}{spared}{why}; set ps={places} or less"


def _start(piece: Piece) -> int:
    return piece.start


def _some(names: list[str]) -> str:
    return ("such as " if len(names) > 1 else "") + repr(names[0]) if names else "none"


# Which parameters are hot, those that the recipe names by name or pattern, and how the model is cut over the servers then.
#
# What is measured decides nothing here: servers and workers must cut alike before the first gradient is known.

MEASURED = "measured"
"""As ``paramserver.hot``: found out from gradients."""


def match_hot(patterns: Iterable[str], names: Collection[str]) -> frozenset[str]:
    """The parameters that the patterns name.

    Raises:
        RequestError: a pattern matches none.
    """
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise RequestError(f"paramserver.hot {pattern!r} is no parameter of this model; {_meant(pattern, names)}")
        found |= matched
    return frozenset(found)


def _meant(pattern: str, names: Collection[str]) -> str:
    if nearest(pattern, [MEASURED, *names]) == MEASURED:
        return f"did you mean {MEASURED!r}?"
    close = nearest(pattern, names)
    first = next(iter(sorted(names)), "")
    return (
        f"did you mean {close!r}?"
        if close
        else f"it has {len(names)}, such as {first!r}; a pattern has *, or give {MEASURED!r}"
    )


def cut_for(model: Model, num_shards: int, *, config: ParamServerConfig, optimizer: str) -> ShardMap:
    """The shards of a run; servers and workers must cut alike.

    Args:
        model: the trained parameters.
        num_shards: servers.
        config: what is hot, and how gradients are joined.
        optimizer: its name.

    Raises:
        RequestError: the model cannot be cut so.
    """
    hot = match_hot(() if config.hot == MEASURED else config.hot, model)
    # Adasum's dot products are of whole tensors.
    return cut_model(model, num_shards, hot=hot, optimizer=optimizer, whole_tensors=config.aggregate == "adasum")
