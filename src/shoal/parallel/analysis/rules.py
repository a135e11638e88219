"""What each operation does to the features that a trace follows: one small function per family of operations.

A rule labels the results or raises ``BlockedError``. Names are those of torch's functions and of the tensor methods of the same
name. An operation without a rule blocks.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.costs.tracer import TensorInfo, tensors_in
from shoal.parallel.analysis.flow import ATTENTION, DROPOUTS, RULES, BlockedError, Follower, Label, Rule
from shoal.parallel.analysis.groups import AttentionUse

_ELEMENTWISE_NAMES = """
abs add add_ sub sub_ rsub mul mul_ multiply div div_ divide true_divide neg pow exp log log1p sqrt rsqrt reciprocal square sin
cos erf tanh tanh_ sigmoid sigmoid_ relu relu_ relu6 gelu silu mish softplus softsign elu elu_ selu celu leaky_relu leaky_relu_
hardtanh hardswish hardsigmoid logsigmoid threshold clamp clamp_ clip clamp_min clamp_max maximum minimum where masked_fill
masked_fill_ lerp addcmul addcdiv nan_to_num to type type_as float double half bfloat16 contiguous clone detach requires_grad_
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __div__
__rdiv__ __neg__ __pow__ __rpow__ __gt__ __lt__ __ge__ __le__ __eq__ __ne__ gt lt ge le eq ne logical_not logical_and logical_or
__and__ __or__ __invert__ zeros_like ones_like empty_like full_like
"""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule under the names of its operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@rule(*_ELEMENTWISE_NAMES.split())
def follow_elementwise(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Every element of the result comes from the elements at its own place."""
    labels = []
    for tensor in tensors_in((args, kwargs)):
        label = follower.label(tensor)
        if label is not None:
            offset = result.ndim - tensor.ndim
            labels.append(replace(label, dims=tuple(dim + offset for dim in label.dims)))
    dim = labels[0].dim
    if any(label.dim != dim for label in labels):
        raise BlockedError("features meet in different dims")
    for tensor in tensors_in((args, kwargs)):
        check_companion(follower, tensor, dim - result.ndim, result.shape[dim])
    follower.put(result, follower.join(labels))


def check_companion(follower: Follower, tensor: TensorInfo, dim: int, size: int) -> None:
    """Refuse a tensor that meets split features and that a rank has no share of.

    Args:
        follower: knows which tensors have a label.
        tensor: the companion, aligned with the features at its last dim.
        dim: the features' dim, counted from the end.
        size: their whole number.
    """
    own = tensor.shape[dim] if tensor.ndim >= -dim else 1
    if follower.label(tensor) is not None:
        if own != size:
            raise BlockedError("one feature is spread over all of them")
        return
    if own != 1:
        raise BlockedError("features meet a tensor that every rank holds whole")
    # Each rank would have only its own heads' part of this tensor's gradient.
    if tensor.requires_grad:
        raise BlockedError("a weight that is shared by all features or heads acts on them")


@rule(*DROPOUTS)
def follow_dropout(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Elementwise, and a rank draws only its share of the mask."""
    follow_elementwise(follower, args, kwargs, result)
    label = follower.label(result)
    assert label is not None
    follower.groups[label.group].add_dropout(follower.path, label.dim - result.ndim)


@rule("softmax", "log_softmax", "cumsum", "normalize")
def follow_along(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Mixes along one dim and leaves the others alone."""
    x, label = labelled(follower, args)
    dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
    if not isinstance(dim, int) or dim % x.ndim == label.dim:
        raise BlockedError("it mixes its features")
    follower.put(result, label)


@rule("layer_norm", "rms_norm")
def follow_norm(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Normalises over the last dims: within a head, or over everything."""
    x, label = labelled(follower, args)
    shape = kwargs["normalized_shape"] if "normalized_shape" in kwargs else args[1]
    if label.dim >= x.ndim - len(shape):
        raise BlockedError("it normalises over its features")
    for tensor in tensors_in((args, kwargs)):
        if tensor != x and tensor.requires_grad:
            raise BlockedError("a weight that is shared by all heads acts on them")
    follower.put(result, label)


@rule("matmul", "__matmul__", "__rmatmul__", "bmm")
def follow_matmul(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """A product per head: the split dim is one that both operands are stacked along."""
    operands = [args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))]
    labels = [label for label in map(follower.label, operands) if label is not None]
    places = {label.dim - tensor.ndim for tensor in operands if (label := follower.label(tensor)) is not None}
    place = places.pop()
    if places or place > -3:
        raise BlockedError("it sums over its features")
    size = result.shape[place]
    for tensor in operands:
        check_companion(follower, tensor, place, size)
    joined = follower.join(labels)
    follower.put(result, replace(joined, dims=(result.ndim + place,)))
    if len(labels) == 2:
        counts = sorted((label.units for label in labels), reverse=True)
        _attend(follower, joined, labels, counts[0], counts[1])


@rule("einsum")
def follow_einsum(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """A product per head, written in letters."""
    equation = args[0]
    operands = list(tensors_in(args[1:]))
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise BlockedError("its letters cannot be read")
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    letters, labels = set(), []
    for term, tensor in zip(terms, operands, strict=True):
        label = follower.label(tensor)
        if label is not None:
            letters.add(term[label.dim])
            labels.append(label)
    letter = letters.pop()
    if letters or letter not in right:
        raise BlockedError("it sums over its features")
    for term, tensor in zip(terms, operands, strict=True):
        if follower.label(tensor) is None and (letter in term or tensor.requires_grad):
            raise BlockedError("features meet a tensor that every rank holds whole")
    joined = follower.join(labels)
    follower.put(result, replace(joined, dims=(right.index(letter),)))
    if len(labels) > 1:
        _attend(follower, joined, labels, max(label.units for label in labels), min(label.units for label in labels))


@rule(ATTENTION)
def follow_attention(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Attention, head by head."""
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | kwargs
    three = [named[name] for name in ("query", "key", "value")]
    labels = [label for label in map(follower.label, three) if label is not None]
    if len(labels) < 3:
        raise BlockedError("only some of query, key and value come from layers that can be split")
    if any(label.dim != tensor.ndim - 3 for label, tensor in zip(labels, three, strict=True)):
        raise BlockedError("its heads are not in the dim before the sequence")
    mask = named.get("attn_mask")
    if mask is not None:
        check_companion(follower, mask, -3, three[0].shape[-3])
    query, key, value = labels
    if key.units != value.units or query.units % key.units:
        raise BlockedError(
            f"{query.units} query heads, {key.units} key heads and {value.units} value heads do not group"
        )
    joined = follower.join(labels)
    follower.put(result, replace(joined, dims=(result.ndim - 3,), units=query.units))
    dropout = float(named.get("dropout_p") or 0.0)
    _attend(follower, joined, labels, query.units, key.units, dropout=dropout)


def _attend(
    follower: Follower, joined: Label, labels: list[Label], heads: int, kv_heads: int, dropout: float = 0.0
) -> None:
    for label in labels:
        follower.consume(label)
    seen = AttentionUse(follower.path, heads, kv_heads, dropout)
    follower.groups[joined.group].attentions.append(seen)


def labelled(follower: Follower, args: tuple[Any, ...]) -> tuple[TensorInfo, Label]:
    """The first argument of an operation and its label.

    Raises:
        BlockedError: it has none, and another argument has.
    """
    x = args[0]
    label = follower.label(x) if isinstance(x, TensorInfo) else None
    if label is None:
        raise BlockedError("features are not its first argument")
    return x, label


# Views: reshaping into heads and back, moving dims, cutting fused layers apart.


@rule("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten")
def follow_view(follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Features become heads, or heads become features again; a share must stay one slice of one dim."""
    x, label = labelled(follower, args)
    if kwargs.get("dtype") is not None or x.dtype != result.dtype:
        raise BlockedError("it reads the bytes as another type")
    if any(isinstance(other, TensorInfo) and follower.label(other) is None for other in args[1:]):
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


def _written_sizes(
    x: TensorInfo, args: tuple[Any, ...], kwargs: dict[str, Any], result: TensorInfo
) -> tuple[int, ...] | None:
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
    if any(isinstance(other, TensorInfo) and follower.label(other) is None for other in args[1:]):
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
    for piece in [result] if isinstance(result, TensorInfo) else result:
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
