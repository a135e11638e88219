"""What of a block's arguments is cut along the sequence, and what stays whole.

Blocks are given more than their stream: rotary tables, position ids, masks, the memory of an encoder. Queries are this rank's
positions and masks speak of all keys, so::

    tables (.., S, E), position ids (.., S), a second stream (B, S, D)     cut to this rank's positions
    masks (.., S, S), (.., 1, S), (B, S)                                   whole; attention takes its rows itself
    anything without a dim of S, such as a memory of another length       whole

A memory that happens to be as long as the stream is cut too; attention to it then goes around the ring, which is the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import Refusal
from shoal.parallel.context.positions import Positions

_CACHES = frozenset({"past_key_values", "past_key_value", "layer_past"})


def sequence_dim_of(name: str, tensor: Tensor, *, whole: int, stream: Tensor, stream_dim: int) -> int | None:
    """The dim along which an argument is cut; None when it stays whole."""
    if tensor.ndim == 0 or "mask" in name or tensor.dtype == torch.bool:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.ndim - 1 if tensor.shape[-1] == whole else None
    is_table = any(word in name for word in ("position", "rotary", "rope", "freq", "cos", "sin"))
    is_like_stream = tensor.ndim == stream.ndim and tensor.shape[-1] == stream.shape[-1]
    if is_like_stream and tensor.shape[stream_dim] == whole:
        return stream_dim % tensor.ndim
    if tensor.shape[-1] == whole and not is_table:
        # Additive masks have their keys last.
        return None
    if tensor.ndim >= 2 and tensor.shape[-2] == whole:
        return tensor.ndim - 2
    if tensor.ndim == stream.ndim and tensor.shape[stream_dim] == whole:
        return stream_dim % tensor.ndim
    return None


def cut_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    names: Sequence[str],
    path: str,
    stream: Tensor,
    cuts_stream: bool,
    sequence_dim: int,
    whole: int,
    where: Positions,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block as this rank needs them.

    Args:
        args: by place.
        kwargs: by name.
        names: of the parameters of the block's forward.
        path: of the block, for messages.
        stream: which of the arguments is the stream.
        cuts_stream: the stream is still whole.
        sequence_dim: of the stream.
        whole: length of the whole sequence.
        where: this rank's positions.

    Raises:
        Refusal: an argument cannot be told from this rank's part of the stream, or a cache of keys is not empty.
    """
    local = where.local_length(whole)

    def cut(name: str, value: Any) -> Any:
        if value is stream:
            return where.cut(value, sequence_dim) if cuts_stream else value
        if name in _CACHES:
            return _without_cache(value, path)
        if isinstance(value, Tensor):
            dim = sequence_dim_of(name, value, whole=whole, stream=stream, stream_dim=sequence_dim)
            if dim is not None:
                return where.cut(value, dim)
            _check_apart(name, value, path=path, stream=stream, sequence_dim=sequence_dim, local=local, whole=whole)
            return value
        if type(value) in (tuple, list):
            return type(value)(cut(name, item) for item in value)
        if type(value) is dict:
            return {key: cut(str(key), item) for key, item in value.items()}
        return value

    # More arguments than names belong to *args.
    labels = [*names[: len(args)], *[""] * (len(args) - len(names))]
    placed = tuple(cut(name, value) for name, value in zip(labels, args, strict=True))
    return placed, {name: cut(name, value) for name, value in kwargs.items()}


def _without_cache(cache: Any, path: str) -> None:
    """Training and evaluation have no use for a cache of keys, and one would hold this rank's keys as if they were all."""
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    if isinstance(cache, (Tensor, tuple, list)) or length:
        raise Refusal(f"cp: block {path!r} was given keys of earlier positions; run whole sequences, or use cp=1")


def _check_apart(
    name: str, value: Tensor, *, path: str, stream: Tensor, sequence_dim: int, local: int, whole: int
) -> None:
    """Refuse another sequence that is as long as this rank's part: attention could not tell its keys from the stream's."""
    is_sequence = value.is_floating_point() and value.ndim == stream.ndim and "mask" not in name
    if is_sequence and local != whole and value.shape[sequence_dim] == local and value.shape[-1] == stream.shape[-1]:
        raise Refusal(
            f"cp: block {path!r} was given {name!r} of {local} positions, as many as this rank holds of the stream's {whole}: "
            f"the two cannot be told apart; pad it to {local + 1} positions or to {whole}, or use another cp"
        )
