"""From what two batches of different size were seen to do, to what one sample does: what does not grow with the batch is no
sample's, such as reading weights and tables of positions.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shoal.core.errors import RequestError
from shoal.costs.layers import Op, OpKind, SavedBytes
from shoal.costs.links import Done, Seen

Batches = tuple[int, int]


def check_alike(one: Done, two: Done, *, batches: Batches, name: str) -> None:
    """Make sure that both batches did the same.

    Raises:
        RequestError: the forward pass takes another way for another number of samples.
    """
    kinds = [[(op.kind, op.cut, op.width, op.is_causal) for op in done.ops] for done in (one, two)]
    if one.lengths() != two.lengths() or kinds[0] != kinds[1]:
        raise RequestError(
            f"{name!r} computes something else for {batches[1]} samples than for {batches[0]} ({len(two.ops)} operations after "
            f"{len(one.ops)}), so nothing can be said of one; make its forward pass the same for every batch"
        )


def ops_of_sample(one: Done, two: Done, batches: Batches) -> tuple[Op, ...]:
    """The operations of one sample, equal ones once, in the order in which they first ran."""
    found = [op for pair in zip(one.ops, two.ops, strict=True) for op in _op_of_sample(*pair, batches)]
    counts = Counter[Op]()
    for op in found:
        counts[replace(op, count=1)] += op.count
    return tuple(replace(op, count=count) for op, count in counts.items())


def kept_of_sample(one: Done, two: Done, batches: Batches, *, received: float) -> SavedBytes:
    """What one sample keeps."""
    places = {"whole": 0.0, "split": 0.0, "scores": 0.0}
    for before, after in zip(one.saved, two.saved, strict=True):
        places[before.place] += growth(before.num_bytes, after.num_bytes, batches)
    return SavedBytes(**places, boundary=received)


def growth(before: float, after: float, batches: Batches) -> float:
    """What a sample adds."""
    return (after - before) / (batches[1] - batches[0])


def total_growth(before: Iterable[float], after: Iterable[float], batches: Batches) -> float:
    """What a sample adds to a sum."""
    return growth(sum(before), sum(after), batches)


def _op_of_sample(before: Seen, after: Seen, batches: Batches) -> Iterator[Op]:
    if before.kind is OpKind.MEMORY:
        size = growth(before.sizes[0], after.sizes[0], batches)
        if size:
            yield Op(kind=OpKind.MEMORY, num_bytes=size, cut=before.cut)
        return
    sizes = _sizes_of_sample(before.sizes, after.sizes, batches)
    if sizes is None:
        return
    if before.kind is OpKind.MATMUL:
        count, rows, inner, outer = sizes
        whole = int(count) if count == int(count) else 1
        yield Op(
            kind=OpKind.MATMUL,
            rows=rows * count / whole,
            inner=inner,
            outer=outer,
            cut=before.cut,
            experts=before.experts,
            count=whole,
        )
        return
    samples, heads, rows, outer = sizes
    yield Op(
        kind=OpKind.ATTENTION,
        rows=rows * samples,
        inner=before.width,
        outer=outer,
        heads=heads,
        cut=before.cut,
        causal=before.is_causal,
    )


def _sizes_of_sample(before: Sequence[int], after: Sequence[int], batches: Batches) -> list[float] | None:
    """The sizes of a product on one sample; None where it does not grow with the batch.

    Where the batch is in more than one size, or not the only thing in it, rows are such that the products are as many.
    """
    added = growth(math.prod(before), math.prod(after), batches)
    if added == 0:
        return None
    sizes: list[float] = list(before)
    grown = [place for place, (one, two) in enumerate(zip(before, after, strict=True)) if one != two]
    if len(grown) == 1 and before[grown[0]] * batches[1] == after[grown[0]] * batches[0]:
        sizes[grown[0]] /= batches[0]
        return sizes
    # Rows come second in a product and third in an attention.
    rows = 1 if len(grown) and grown[0] != 2 else 2
    rest = math.prod(size for place, size in enumerate(before) if place != rows)
    sizes[rows] = added / rest
    return sizes
