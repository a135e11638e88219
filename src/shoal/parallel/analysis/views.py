"""What views do to the features that a trace follows: reshaping into heads and back, moving dims, cutting fused layers apart."""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.parallel.analysis.flow import BlockedError, Follower, Label
from shoal.parallel.analysis.rules import labelled, rule


@rule("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten")
def follow_view(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Features become heads, or heads become features again; a share must stay one stretch of one dim."""
    x, label = labelled(follower, args)
    if kwargs.get("dtype") is not None or x.dtype != result.dtype:
        raise BlockedError("it reads the bytes as another type")
    if any(isinstance(other, Tensor) and follower.label(other) is None for other in args[1:]):
        raise BlockedError("it takes the shape of a tensor that every rank holds whole")
    moved = view_label(label, tuple(x.shape), tuple(result.shape))
    follower.put(result, moved)
    sizes = _written_sizes(x, args, kwargs, result)
    if sizes is not None:
        follower.write_sizes(result, moved, sizes)


def view_label(label: Label, before: tuple[int, ...], after: tuple[int, ...]) -> Label:
    """The label of a view.

    Raises:
        BlockedError: the split dim would be inside another one.
    """
    for old, new in _match_dims(before, after):
        if label.dim not in old:
            continue
        outer = math.prod(before[dim] for dim in old if dim < label.dim)
        if outer != 1:
            raise BlockedError("its features are folded into another dim")
        # Dims of size 1 do not divide anything; the first one that does holds the share.
        place = next((dim for dim in new if after[dim] != 1), new[0] if new else -1)
        if place < 0:
            raise BlockedError("its features have no dim of their own")
        size = after[place]
        units = size if size < before[label.dim] and len(new) > 1 else label.units
        inner = tuple(dim for dim in new if dim > place and after[dim] != 1)
        return replace(label, dims=(place, *inner), units=min(units, label.units))
    raise AssertionError("every dim of a view is matched")


def _match_dims(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims with equal products, in order."""
    runs: list[tuple[list[int], list[int]]] = []
    old = new = 0
    while old < len(before) or new < len(after):
        left, right = [], []
        if old < len(before):
            left, old = [old], old + 1
        if new < len(after):
            right, new = [new], new + 1
        while math.prod(before[dim] for dim in left) != math.prod(after[dim] for dim in right):
            if math.prod(before[dim] for dim in left) < math.prod(after[dim] for dim in right):
                left.append(old)
                old += 1
            else:
                right.append(new)
                new += 1
        runs.append((left, right))
    return runs


def _written_sizes(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[int, ...] | None:
    """The sizes as the code wrote them, one per dim of the result; None where it wrote none."""
    given: Any = kwargs.get("shape", kwargs.get("size", kwargs.get("sizes")))
    if given is None:
        given = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if len(args) > 2 and isinstance(args[2], tuple | list):  # unflatten(dim, sizes)
        dim = args[1] % x.ndim
        return (*x.shape[:dim], *args[2], *x.shape[dim + 1 :])
    if len(given) != result.ndim or not all(isinstance(size, int) for size in given):
        return None  # flatten(start, end) and view_as(other) write no sizes.
    return tuple(given) if math.prod(given) < 0 or math.prod(given) == result.numel() else None


@rule("transpose", "transpose_", "swapaxes", "swapdims")
def follow_transpose(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Two dims change places."""
    x, label = labelled(follower, args)
    first, second = (args[1:] + tuple(kwargs.values()))[:2]
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    follower.put(result, _reorder(label, order))


@rule("permute")
def follow_permute(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Dims change places."""
    x, label = labelled(follower, args)
    given = kwargs.get("dims") or (args[1] if isinstance(args[1], tuple | list) else args[1:])
    follower.put(result, _reorder(label, [dim % x.ndim for dim in given]))


@rule("T", "mT", "t")
def follow_turn(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """The last two dims change places (all dims, for ``T`` on a matrix)."""
    x, label = labelled(follower, args)
    order = list(range(x.ndim))
    order[-2], order[-1] = order[-1], order[-2]
    follower.put(result, _reorder(label, order))


def _reorder(label: Label, order: list[int]) -> Label:
    return replace(label, dims=tuple(order.index(dim) for dim in label.dims))


@rule("unsqueeze")
def follow_unsqueeze(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """A dim of size 1 appears."""
    _, label = labelled(follower, args)
    place = (kwargs["dim"] if "dim" in kwargs else args[1]) % result.ndim
    follower.put(result, replace(label, dims=tuple(dim + (dim >= place) for dim in label.dims)))


@rule("expand", "expand_as", "broadcast_to")
def follow_expand(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Dims of size 1 are repeated; the features' own dim is not one of them."""
    x, label = labelled(follower, args)
    offset = result.ndim - x.ndim
    moved = replace(label, dims=tuple(dim + offset for dim in label.dims))
    if any(isinstance(other, Tensor) and follower.label(other) is None for other in args[1:]):
        raise BlockedError("it takes the shape of a tensor that every rank holds whole")
    if result.shape[moved.dim] != x.shape[label.dim]:
        raise BlockedError("one feature is spread over all of them")
    follower.put(result, moved)
    sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if len(sizes) == result.ndim and all(isinstance(size, int) for size in sizes):
        # -1 keeps a dim as it is; in a SizeUse it is what is left over, so only the split dim may say it.
        kept = tuple(result.shape[dim] if size == -1 and dim != moved.dim else size for dim, size in enumerate(sizes))
        follower.write_sizes(result, moved, kept)


@rule("repeat_interleave")
def follow_repeat(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Every head is repeated where it stands, as grouped-query attention does."""
    _, label = labelled(follower, args)
    repeats = kwargs["repeats"] if "repeats" in kwargs else args[1]
    if not isinstance(repeats, int) or result.ndim <= label.dim:
        raise BlockedError("it repeats its features unevenly")
    follower.put(result, label)


@rule("chunk", "tensor_split")
def follow_chunk(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """A dim is cut into a number of pieces."""
    _cut(follower, args, kwargs, result)


@rule("split", "split_with_sizes")
def follow_split(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """A dim is cut into pieces of a written width, which a rank must have its share of too."""
    dim = _cut(follower, args, kwargs, result)
    given = args[1] if len(args) > 1 else next(value for name, value in kwargs.items() if name != "dim")
    for place, piece in enumerate(result):
        label = follower.label(piece)
        assert label is not None
        if label.dim == dim:
            width = given if isinstance(given, int) else given[place]
            sizes = (*piece.shape[:dim], width, *piece.shape[dim + 1 :])
            follower.write_sizes(piece, label, sizes)


def _cut(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Label the pieces of a dim: the equal parts of a fused layer, or of a dim that is nothing to the features."""
    x, label = labelled(follower, args)
    dim = int(kwargs["dim"] if "dim" in kwargs else args[2] if len(args) > 2 else 0) % x.ndim
    if dim == label.dim:
        widths = {piece.shape[dim] for piece in result}
        if len(widths) != 1:
            raise BlockedError(f"it cuts its features into unequal parts of {', '.join(map(str, sorted(widths)))}")
        if label.parts != 1 or label.units != x.shape[dim]:
            raise BlockedError("it cuts features that were cut or gathered into heads before")
        label = replace(label, units=widths.pop(), parts=len(result))
    for piece in result:
        follower.put(piece, label)
    return dim


@rule("unbind", "select")
def follow_unbind(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """One dim is taken apart: the parts of a fused layer, or a dim that is nothing to the features."""
    x, label = labelled(follower, args)
    dim = (kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else 0) % x.ndim
    made = take_apart(label, tuple(x.shape), dim)
    for piece in [result] if isinstance(result, Tensor) else result:
        follower.put(piece, made)


def take_apart(label: Label, shape: tuple[int, ...], dim: int) -> Label:
    """The label of one slice along a dim of a tensor of this shape.

    Raises:
        BlockedError: the slice is one feature or head.
    """
    dims = label.dims
    if dim == label.dim:
        if len(dims) < 2 or label.parts != 1:
            raise BlockedError("it takes one feature or head by its number")
        # (3, heads, width): what looked like 3 heads are the parts of a fused layer, and the heads are the next dim.
        for use in label.written:
            use.is_parts = len(use.dims) > 1
        label = replace(label, parts=shape[dim], units=shape[dims[1]], written=())
        dims = dims[1:]
    kept = tuple(place - (place > dim) for place in dims if place != dim)
    return replace(label, dims=kept)


@rule("__getitem__")
def follow_index(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Slices and new dims; a number along the parts of a fused layer."""
    x, label = labelled(follower, args)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(not (item is None or item is Ellipsis or isinstance(item, int | slice)) for item in index):
        raise BlockedError("it picks features by a tensor of indices")
    taken = sum(item is not None and item is not Ellipsis for item in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    place = index.index(Ellipsis)
    index = (*index[:place], *(slice(None),) * (x.ndim - taken), *index[place + 1 :])
    shape = list(x.shape)
    current = 0  # The dim of what has been made of x so far.
    for item in index:
        if item is None:
            label = replace(label, dims=tuple(dim + (dim >= current) for dim in label.dims))
            shape.insert(current, 1)
        elif isinstance(item, slice):
            if current == label.dim and item.indices(shape[current]) != (0, shape[current], 1):
                raise BlockedError("it takes a part of its features by number")
        else:
            label = take_apart(label, tuple(shape), current)
            shape.pop(current)
            continue
        current += 1
    follower.put(result, label)


@rule("cat", "concat", "concatenate")
def follow_cat(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Tensors side by side along a dim that is nothing to the features."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = (kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else 0) % result.ndim
    full = [tensor for tensor in tensors if tensor.numel()]  # An empty cache is joined to its first keys.
    labels = [label for label in map(follower.label, full) if label is not None]
    if len(labels) < len(full) or any(label.dim != labels[0].dim for label in labels):
        raise BlockedError("features meet a tensor that every rank holds whole")
    if labels[0].dim == dim:
        raise BlockedError("it puts features of several layers side by side")
    follower.put(result, follower.join(labels))


@rule("stack")
def follow_stack(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Tensors along a new dim."""
    tensors = args[0] if args else kwargs["tensors"]
    place = (kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else 0) % result.ndim
    labels = [label for label in map(follower.label, tensors) if label is not None]
    if len(labels) < len(tensors) or any(label.dim != labels[0].dim for label in labels):
        raise BlockedError("features meet a tensor that every rank holds whole")
    joined = follower.join(labels)
    follower.put(result, replace(joined, dims=tuple(dim + (dim >= place) for dim in joined.dims)))
