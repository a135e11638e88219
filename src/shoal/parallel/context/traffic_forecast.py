"""What context parallelism should move between ranks, worked out from the shapes of attentions alone.

The numbers come from the algorithm on paper (``ring.py``, ``alltoall.py``) and not from what a channel was asked to do, so that a
hop too many or too few is a difference from the traffic counter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.core.axes import Axis
from shoal.parallel.context.alltoall import num_copies

_AXIS = Axis.CONTEXT.value


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One attention over the ranks' positions in one forward pass, as one rank sees it."""

    batch: int
    num_heads: int
    num_kv_heads: int
    local_length: int
    """Positions of this rank."""
    width: int
    """Of a query's or key's head."""
    value_width: int
    itemsize: int
    """Bytes of an element."""
    trains: bool = True
    """A backward pass follows."""

    @property
    def block_elements(self) -> int:
        """Elements of one rank's keys and values."""
        return self.batch * self.num_kv_heads * self.local_length * (self.width + self.value_width)


@dataclass(frozen=True, kw_only=True)
class GatherShape:
    """One gathering of a stack's output."""

    num_bytes: int
    """Of the whole sequence."""
    trains: bool = True


@dataclass
class ObservedShapes:
    """The attentions and gathers of forward passes that ran while traffic was counted; recomputed ones are not entered again."""

    attentions: list[AttentionShape] = field(default_factory=list)
    gathers: list[GatherShape] = field(default_factory=list)

    def forget(self) -> None:
        """Begin anew."""
        self.attentions.clear()
        self.gathers.clear()


def forecast_traffic(
    *,
    kind: str,
    degree: int,
    attentions: Sequence[AttentionShape],
    gathers: Sequence[GatherShape] = (),
    recomputes: bool = False,
) -> TrafficCounts:
    """What one rank's forward and backward passes should move along ``cp``; the sum of gradients is not in it.

    Args:
        kind: ``ring`` or ``alltoall``.
        degree: ranks along ``cp``.
        attentions: every attention to the stream itself, once per forward pass.
        gathers: every gathering at the end of a stack.
        recomputes: blocks run their forward pass again before their backward pass.
    """
    if degree == 1:
        return {}
    of_one = _ring_traffic if kind == "ring" else _alltoall_traffic
    all_counts = [of_one(shape, degree, recomputes) for shape in attentions if shape.batch]
    for gather in gathers:
        if gather.num_bytes:
            traffic = Traffic(calls=1, num_bytes=gather.num_bytes)
            all_counts.append({(_AXIS, "all_gather"): traffic})
            all_counts.append({(_AXIS, "reduce_scatter"): traffic} if gather.trains else {})
    return add_traffic(*all_counts)


def _ring_traffic(shape: AttentionShape, degree: int, recomputes: bool) -> TrafficCounts:
    """Keys and values make degree - 1 hops per pass; their gradients, in float32 at least, make degree: the last one home."""
    num_passes = 1 if not shape.trains else 3 if recomputes else 2
    block = (degree - 1) * num_passes
    gradient = degree if shape.trains else 0
    num_bytes = shape.block_elements * (block * shape.itemsize + gradient * max(4, shape.itemsize))
    return {(_AXIS, "ring_shift"): Traffic(calls=block + gradient, num_bytes=num_bytes)}


def _alltoall_traffic(shape: AttentionShape, degree: int, recomputes: bool) -> TrafficCounts:
    """A trade before attention and one after it; their backward passes are the same trades the other way."""
    num_passes = 1 if not shape.trains else 3 if recomputes else 2
    copies = num_copies(shape.num_heads, shape.num_kv_heads, degree)
    queries = shape.batch * shape.num_heads * shape.local_length * shape.width
    outputs = shape.batch * shape.num_heads * shape.local_length * shape.value_width
    num_bytes = (queries + copies * shape.block_elements + outputs) * shape.itemsize
    return {(_AXIS, "all_to_all"): Traffic(calls=2 * num_passes, num_bytes=num_passes * num_bytes)}
