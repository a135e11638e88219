"""Whether a part of a model treats each position by itself, asked of the model: one position is set to NaN, and whatever depends
on it is NaN afterwards; then all others are, and it must not be. No list of operations can be as sure, or as short.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.costs.blocks import replace_stream
from shoal.costs.tracer import preserved_state
from shoal.data.batchform import call_model
from shoal.parallel.analysis.trace import scores_first


def is_stack_pointwise(model: nn.Module, example: tuple[Tensor, ...], *, first: str, last: str, dim: int) -> bool:
    """True when, attention aside, no block from ``first`` to ``last`` mixes positions along ``dim`` of its stream.

    False where that cannot be asked, because the tensors have no values.
    """
    if any(is_fake(tensor) for tensor in example):
        return False

    def run(change: Callable[[Tensor], Tensor], is_silent: bool = False) -> Tensor | None:
        return _run_stack(model, example, first=first, last=last, change=change, is_silent=is_silent)

    for spares in (False, True):
        found = run(functools.partial(_poison, dim=dim, spares=spares))
        if found is None or not _is_only(found, dim, spares):
            return False
    try:
        whole = run(lambda stream: stream, is_silent=True)
        later = run(lambda stream: _later_half(stream, dim), is_silent=True)
    # The user's code may raise anything when it meets a length that it did not expect; on a rank it would raise too.
    except Exception:
        return True
    # Blocks that count positions from 0 themselves would do so on every rank.
    return whole is not None and later is not None and _is_close(later, _later_half(whole, dim))


def _run_stack(
    model: nn.Module,
    example: tuple[Tensor, ...],
    *,
    first: str,
    last: str,
    change: Callable[[Tensor], Tensor],
    is_silent: bool,
) -> Tensor | None:
    """The output of the block ``last`` when the stream that enters ``first`` is changed and attention is local, or silent."""
    found: list[Tensor] = []

    def capture(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found.extend([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)][:1])
        raise _EnoughError

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return replace_stream(args, kwargs, change)

    with _probing(model) as stack:
        stack.enter_context(_LocalAttention(is_silent))
        stack.enter_context(_removing(model.get_submodule(first).register_forward_pre_hook(enter, with_kwargs=True)))
        stack.enter_context(_removing(model.get_submodule(last).register_forward_hook(capture)))
        try:
            call_model(model, example)
        except _EnoughError:
            pass
    return found[0] if found else None


def is_tail_pointwise(model: nn.Module, example: tuple[Tensor, ...], *, last: str, dim: int) -> bool:
    """True when what follows the block ``last`` gives one score vector per position, in dim 1, made of that position alone,
    and takes any number of positions. GPT-2 views its stream by the length of its input, and so does not.
    """
    if any(is_fake(tensor) for tensor in example):
        return False
    whole = _run_tail(model, example, last, lambda stream: stream)
    for spares in (False, True):
        poisoned = _run_tail(model, example, last, functools.partial(_poison, dim=dim, spares=spares))
        if poisoned is None or poisoned.ndim != 3 or not _is_only(poisoned, 1, spares):
            return False
    if whole is None:
        return False
    # The later half, so that a tail that counts positions from 0 is seen.
    later = _run_tail(model, example, last, lambda stream: _later_half(stream, dim))
    return later is not None and _is_close(later, _later_half(whole, 1))


def _run_tail(
    model: nn.Module, example: tuple[Tensor, ...], last: str, change: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The scores, with the output of the block ``last`` changed; None where the model cannot work with that."""

    def change_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _replace_first(output, change)

    with _probing(model) as stack:
        stack.enter_context(_removing(model.get_submodule(last).register_forward_hook(change_output)))
        try:
            return next(scores_first(call_model(model, example)), None)
        except Exception:  # The user's code may raise anything when it meets a length that it did not expect.
            return None


class _EnoughError(Exception):
    """The block of interest has run."""


class _LocalAttention(TorchFunctionMode):
    """While active, attention gives each position something of its own query, key and value only; zeros where it is silent."""

    def __init__(self, is_silent: bool) -> None:
        super().__init__()
        self.attend = _attend_silently if is_silent else _attend_locally

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or the local stand-in."""
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            # It calls torch's function by its global name, and no mode is active inside a mode's own call.
            kept = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = self.attend
            try:
                return func(*args, **(kwargs or {}))
            finally:
                F.scaled_dot_product_attention = kept
        return func(*args, **(kwargs or {}))


def _attend_locally(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    mixed = query.mean(dim=-1, keepdim=True)
    for tensor in (key, value):
        if tensor.shape[-2] == query.shape[-2]:  # Else they are of another sequence, which is not poisoned.
            repeats = query.shape[-3] // tensor.shape[-3]
            mixed = mixed + tensor.mean(dim=-1, keepdim=True).repeat_interleave(repeats, dim=-3)
    return mixed.expand(*mixed.shape[:-1], value.shape[-1]).contiguous()


def _attend_silently(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_zeros((*query.shape[:-1], value.shape[-1]))


@contextmanager
def _probing(model: nn.Module) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.enter_context(preserved_state(model, training=False))
        stack.enter_context(torch.no_grad())
        yield stack


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _poison(stream: Tensor, dim: int, spares: bool) -> Tensor:
    """NaN at the position in the middle; or, where that one is spared, at all others, so that none of them goes unseen."""
    chosen = stream if spares else torch.full_like(stream, torch.nan)
    others = torch.full_like(stream, torch.nan) if spares else stream
    middle = stream.shape[dim] // 2
    poisoned = others.clone()
    poisoned.select(dim, middle).copy_(chosen.select(dim, middle))
    return poisoned


def _is_only(tensor: Tensor, dim: int, spares: bool) -> bool:
    """True when exactly the poisoned positions are NaN."""
    expected = torch.full((tensor.shape[dim],), spares)
    expected[tensor.shape[dim] // 2] = not spares
    rows = tensor.isnan().movedim(dim, 0).flatten(1)
    return bool(torch.equal(rows.any(dim=1), expected) and torch.equal(rows.all(dim=1), expected))


def _later_half(tensor: Tensor, dim: int) -> Tensor:
    half = tensor.shape[dim] // 2
    return tensor.narrow(dim, half, tensor.shape[dim] - half)


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def _replace_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple):
        return (_replace_first(output[0], change), *output[1:])
    return output
