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
from torch.overrides import TorchFunctionMode

from shoal.parallel.find_flow import tensors_in
from shoal.parallel.find_trace import scores_first, undisturbed


def is_stack_pointwise(model: nn.Module, example: tuple[Tensor, ...], *, first: str, last: str, dim: int) -> bool:
    """True when, attention aside, no block from ``first`` to ``last`` mixes positions along ``dim`` of its stream."""
    return all(
        _is_stack_apart(model, example, first=first, last=last, dim=dim, spares=spares) for spares in (False, True)
    )


def _is_stack_apart(
    model: nn.Module, example: tuple[Tensor, ...], *, first: str, last: str, dim: int, spares: bool
) -> bool:
    """True when the poison stays where it is put: at one position, or, where it ``spares`` that one, at all others."""
    found: list[Tensor] = []

    def capture(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found.extend(list(tensors_in(output))[:1])
        raise _EnoughError

    def poison(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _poison_stream(args, kwargs, dim, spares)

    with _probing(model) as stack:
        stack.enter_context(_LocalAttention())
        stack.enter_context(_removing(model.get_submodule(first).register_forward_pre_hook(poison, with_kwargs=True)))
        stack.enter_context(_removing(model.get_submodule(last).register_forward_hook(capture)))
        try:
            model(*example)
        except _EnoughError:
            pass
    return bool(found) and _is_only(found[0], dim, spares)


def is_tail_pointwise(model: nn.Module, example: tuple[Tensor, ...], *, last: str, dim: int) -> bool:
    """True when what follows the block ``last`` puts out one score vector per position, in dim 1, made of that position alone,
    and takes any number of positions. GPT-2 views its stream by the length of its input, and so does not.
    """
    whole = _run_tail(model, example, last, lambda stream: stream)
    for spares in (False, True):
        poisoned = _run_tail(model, example, last, functools.partial(_poison, dim=dim, spares=spares))
        if poisoned is None or poisoned.ndim != 3 or not _is_only(poisoned, 1, spares):
            return False
    if whole is None:
        return False
    half = whole.shape[1] // 2
    # The later half, so that a tail that counts positions from 0 is seen.
    later = _run_tail(model, example, last, lambda stream: stream.narrow(dim, half, stream.shape[dim] - half))
    expected = whole[:, half:]
    return later is not None and later.shape == expected.shape and torch.allclose(later, expected, rtol=1e-3, atol=1e-4)


def _run_tail(
    model: nn.Module, example: tuple[Tensor, ...], last: str, change: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The scores, with what the block ``last`` puts out changed; None where the model cannot work with that."""

    def replace_stream(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _replace_first(output, change)

    with _probing(model) as stack:
        stack.enter_context(_removing(model.get_submodule(last).register_forward_hook(replace_stream)))
        try:
            return next(scores_first(model(*example)), None)
        except Exception:  # The user's code may raise anything when it meets a length that it did not expect.
            return None


class _EnoughError(Exception):
    """The block of interest has run."""


class _LocalAttention(TorchFunctionMode):
    """While active, attention gives each position something of its own query, key and value only."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or the local stand-in."""
        if func is F.scaled_dot_product_attention:
            return _attend_locally(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            # It calls torch's function by its global name, and no mode is active inside a mode's own call.
            kept = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _attend_locally
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


@contextmanager
def _probing(model: nn.Module) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model, training=False))
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


def _poison_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, spares: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for place, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:place], _poison(value, dim, spares), *args[place + 1 :]), kwargs
    name = (
        "hidden_states"
        if "hidden_states" in kwargs
        else next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    )
    return args, {**kwargs, name: _poison(kwargs[name], dim, spares)}


def _replace_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple):
        return (_replace_first(output[0], change), *output[1:])
    return output
