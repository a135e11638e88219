"""A backward pass in two parts: the gradient of a stage's input now, the gradients of its matrices later.

The part that others wait for goes first (Qi et al., 2023, arXiv 2401.10241). Linear layers are where it pays: their backward
pass is two matrix products, and only one of them is for the input. So while a forward pass runs under
``defer_weight_gradients``, each linear layer notes what its second product needs, and ``DeferredGradients.run`` makes it. The
products are those that autograd makes, of the same shapes, so the bits are the same. Everything else (norms, embeddings,
biases, convolutions) gets its gradient in the first part.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from shoal.parallel.recompute import surrounding


class DeferredGradients:
    """The weights' part of one stage's backward pass of one microbatch."""

    def __init__(self) -> None:
        self._products: dict[Tensor, list[tuple[Tensor, Tensor]]] = {}

    def note(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        """Put off ``grad.T @ x``."""
        self._products.setdefault(weight, []).append((grad, x))

    # Without it the gradients would hold on to the activations that they were made of.
    @torch.no_grad()
    def run(self) -> None:
        """Add what was put off to the gradients as autograd does.

        It adds the uses of one weight to each other, in the order in which it came to them and in the type of the pass, and
        their sum to what earlier microbatches left.
        """
        for weight, uses in self._products.items():
            total: Tensor | None = None
            for grad, x in uses:
                product = grad.t().mm(x)
                total = product if total is None else total + product
            assert total is not None
            total = total if total.dtype == weight.dtype else total.to(weight.dtype)
            if weight.grad is None:
                weight.grad = total
            else:
                weight.grad.add_(total)
            # As autograd does: who shards gradients takes them from there.
            hooks: Any = weight._post_accumulate_grad_hooks
            for hook in list((hooks or {}).values()):
                hook(weight)
        self._products.clear()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cast: Tensor, bias: Tensor | None, later: DeferredGradients
    ) -> Tensor:
        ctx.save_for_backward(x, cast)
        ctx.weight, ctx.later, ctx.has_bias = weight, later, bias is not None
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, cast, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, cast = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        # Without its history, which would hold on to the stage's input and that input's gradient.
        ctx.later.note(ctx.weight, grad, x.detach().reshape(-1, x.shape[-1]))
        grad_x = grad.mm(cast).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_bias = grad.sum(0) if ctx.has_bias else None
        return grad_x, None, None, grad_bias, None


class defer_weight_gradients(TorchFunctionMode):
    """Linear layers under it leave their weights' gradient to ``later``."""

    def __init__(self, later: DeferredGradients) -> None:
        super().__init__()
        self.later = later
        self._again: AbstractContextManager[None] | None = None
        self._casts: dict[Tensor, Tensor] = {}
        """Under autocast, as it does: one per parameter and pass, at which the gradients of all uses meet."""

    def __enter__(self) -> "defer_weight_gradients":
        # A block that is recomputed in the backward pass must do what it did here: autograd matches what the two runs save.
        self._again = surrounding(lambda: defer_weight_gradients(self.later))
        self._again.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        assert self._again is not None
        self._again.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Only a parameter of ours can be given its gradient later.
        if not (weight.is_leaf and weight.requires_grad):
            return F.linear(input, weight, bias)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input, cast = input.to(dtype), self._cast(weight, dtype).detach()
            bias = None if bias is None else self._cast(bias, dtype)
        else:
            cast = weight.detach()
        result: Tensor = _Linear.apply(input, weight, cast, bias, self.later)  # type: ignore[no-untyped-call]
        return result

    def _cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if not parameter.is_leaf:
            return parameter.to(dtype)
        if parameter not in self._casts:
            self._casts[parameter] = parameter.to(dtype)
        return self._casts[parameter]
