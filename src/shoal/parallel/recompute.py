"""Activations that are not kept: blocks run their forward pass again when the backward pass needs what they computed.

Built on ``torch.utils.checkpoint``, with what it does not know: dropout draws the same bits again by its key, so no generator's
state is kept; and what selective recompute keeps is counted as saved. ``full`` keeps the input of each block. ``selective`` also
keeps the results of matrix products and of attention, which is where the time is, and recomputes norms, activations and dropout,
which is where much of the memory is (Korthikanti et al., arXiv 2205.05198, section 5). Gradients are the same bits either way.
"""

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import Refusal, RequestError
from shoal.costs.saved import measuring
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.randomness.dropout import DropoutKey

Mode = Literal["selective", "full"]
_Kept = dict[Any, deque[list[tuple[Any, int | None]]]]
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _operators(*names: str) -> frozenset[Any]:
    """Operators of aten by name; one that this build of torch has not is left out."""
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


# What is worth keeping: matrix products, convolutions and attention, under every kernel that may be chosen.
_KEPT = _operators(
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "mkldnn_linear",
    "convolution",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def apply_recompute(model: nn.Module, *, analysis: ModuleAnalysis, mode: Mode, dropout: DropoutKey) -> None:
    """Make every block of every stack compute its forward pass again in the backward pass, while it trains.

    Args:
        model: changed in place; each block's ``forward`` is wrapped, outside what other techniques put there.
        analysis: names the blocks.
        mode: ``selective`` or ``full``.
        dropout: of the model, so that a recompute draws the same bits.

    Raises:
        RequestError: no blocks were found.
    """
    blocks = [path for stack in analysis.stacks for path in stack.blocks]
    if not blocks:
        raise RequestError(
            f"recompute={mode} found no blocks in {type(model).__name__}, no modules of one kind that run one after another; "
            'name them in the recipe, such as parallel.blocks=["layers.*"], or leave recompute out'
        )
    for path in blocks:
        block = model.get_submodule(path)
        # On the instance: __call__ finds it there, and hooks stay outside and are not run again. A partial of a bound method and
        # not a closure, so that a copied model runs its own blocks.
        block.__dict__["forward"] = functools.partial(_run_block, block.forward, path, mode, dropout)


def _run_block(
    forward: Callable[..., Any], path: str, mode: Mode, dropout: DropoutKey, /, *args: Any, **kwargs: Any
) -> Any:
    """A block's forward, which keeps little and runs again when the backward pass asks."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    measure = measuring()
    if measure is not None:
        # torch saves positional arguments as it saves activations, and just holds the named ones.
        for leaf in tree_leaves(kwargs):
            measure.keep(leaf)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=functools.partial(_contexts, mode, dropout, path),
        # Dropout does not draw from the generator; a model that does anyway must get its numbers back.
        preserve_rng_state=dropout.may_draw_otherwise,
        **kwargs,
    )


_surroundings: ContextVar[tuple[Callable[[], AbstractContextManager[Any]], ...]] = ContextVar(
    "surroundings", default=()
)


@contextmanager
def surrounding(make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """What a block that runs inside finds around it again when it is recomputed, which may be long after.

    For whatever changes how a forward pass computes or what it reads: without it the second run would not be the first again.
    """
    token = _surroundings.set((*_surroundings.get(), make))
    try:
        yield
    finally:
        _surroundings.reset(token)


def _contexts(mode: Mode, dropout: DropoutKey, path: str) -> _Contexts:
    first, again = dropout.recompute_contexts()
    for make in reversed(_surroundings.get()):
        again = _both(make(), again)
    if mode == "full":
        return first, again
    kept: _Kept = defaultdict(deque)
    return _both(first, _Keeping(kept)), _both(again, _Giving(kept, path))


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first run of a block: keeps the results of some operators.

    Instead of ``create_selective_checkpoint_contexts``, which counts every operator and refuses when a recompute runs one more of
    any kind: under autocast it does, for a weight that an earlier block has cast already is cast again there.
    """

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _KEPT:
            self._kept[func].append([_keep(value) for value in _as_tuple(output)])
        return output


class _Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The second run: gives them back in their order, each once, so that memory goes as the backward pass does."""

    def __init__(self, kept: _Kept, path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._path = path

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KEPT:
            return func(*args, **(kwargs or {}))
        if not self._kept[func]:
            raise Refusal(
                f"recompute=selective: block {self._path!r} called {func} once more than in its forward pass, or its "
                f"backward pass ran twice; its forward must do the same each time, or use recompute=full"
            )
        values = []
        for value, version in self._kept[func].popleft():
            if version is not None and value._version != version:
                raise Refusal(
                    f"recompute=selective: block {self._path!r} changes the result of a matrix product in place, so what was "
                    f"kept of it is lost; set inplace=False on its activations, or use recompute=full"
                )
            values.append(value)
        return values[0] if len(values) == 1 else tuple(values)


def _keep(value: Any) -> tuple[Any, int | None]:
    if not isinstance(value, Tensor):
        return value, None
    measure = measuring()
    if measure is not None:
        measure.keep(value)
    # An alias without history that still counts changes in place: below autograd that counting is off unless asked for.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        alias = value.detach()
    return alias, alias._version


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, tuple | list) else (output,)
