"""What each operation does to the features that a trace follows: one small function per family of operations.

A rule labels the results or raises ``BlockedError``. Names are those of torch's functions and of the tensor methods of the same
name. An operation without a rule blocks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.parallel.analysis.flow import ATTENTION, DROPOUTS, RULES, BlockedError, Follower, Label, Rule, tensors_in
from shoal.parallel.analysis.groups import Seen

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


def check_companion(follower: Follower, tensor: Tensor, dim: int, size: int) -> None:
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
    follower.groups[label.group].add_dropout(follower.modules[-1], label.dim - result.ndim)


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
        if tensor is not x and tensor.requires_grad:
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
    seen = Seen(follower.modules[-1], heads, kv_heads, dropout)
    follower.groups[joined.group].attentions.append(seen)


def labelled(follower: Follower, args: tuple[Any, ...]) -> tuple[Tensor, Label]:
    """The first argument of an operation and its label.

    Raises:
        BlockedError: it has none, and another argument has.
    """
    x = args[0]
    label = follower.label(x) if isinstance(x, Tensor) else None
    if label is None:
        raise BlockedError("features are not its first argument")
    return x, label
