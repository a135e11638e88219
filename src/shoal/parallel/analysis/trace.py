"""One forward pass of any module, watched: which layers ran in which order, on what, and where their outputs went.

The pass is a training pass with gradients on, because that is what will run (torch's encoder layers compute something else in
evaluation), but nothing of it stays: random state, buffers and attributes are put back.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.costs.tracer import preserved_state
from shoal.parallel.analysis import rules as rules  # They register their rules.
from shoal.parallel.analysis import views as views
from shoal.parallel.analysis.flow import Follower, tensors_in
from shoal.parallel.analysis.traced_int import TracedAttributes

PUT_OUT = "it is what the model puts out"


@dataclass
class Call:
    """One call of a module: the stream that it read and the one that it put out, its first tensors."""

    path: str
    read: Tensor | None
    put_out: Tensor | None = None


@dataclass
class Attended:
    """One call of ``nn.MultiheadAttention``."""

    path: str
    is_self: bool


@dataclass
class Trace:
    """What one forward pass showed."""

    follower: Follower
    inputs: tuple[Tensor, ...]
    calls: list[Call] = field(default_factory=list)
    """Calls of modules that have children, in the order in which they began."""
    linear_outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    embedded: dict[str, list[Tensor]] = field(default_factory=dict)
    """Embeddings and the indices that they were given."""
    torch_attentions: list[Attended] = field(default_factory=list)
    learned_masks: set[str] = field(default_factory=set)
    """Those whose mask has a gradient: every head adds to it, and a rank would have only its own heads' part."""
    outputs: list[Tensor] = field(default_factory=list)
    """The tensors that the model put out; its scores first, where it names them."""
    has_scores: bool = False
    """It put out scores alone, or an object that names them: what a loss of split scores can find."""


def trace_forward(model: nn.Module, example: tuple[Tensor, ...]) -> Trace:
    """Watch one forward pass on an example. Whatever the model raises comes through."""
    paths = {id(module): path for path, module in model.named_modules()}
    owners = {
        id(parameter): paths[id(module)]
        for module in model.modules()
        if is_linear(module) or isinstance(module, nn.Embedding | nn.MultiheadAttention)
        for parameter in module.parameters()
    }
    trace = Trace(Follower(owners=owners), example)
    with ExitStack() as stack:
        stack.enter_context(preserved_state(model, training=True))
        stack.enter_context(_watched(model, paths, trace))
        stack.enter_context(TracedAttributes(model, trace.follower.values))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(trace.follower)
        output = model(*example)
    trace.outputs = list(scores_first(output))
    trace.has_scores = isinstance(getattr(output, "logits", output), Tensor)
    for tensor in trace.outputs:
        trace.follower.block([tensor], PUT_OUT)
    return trace


def is_linear(module: nn.Module) -> bool:
    """True for a layer whose matrix can be cut: ``nn.Linear`` itself, or the transposed one that GPT-2 is made of.

    A subclass may compute anything, so it is none.
    """
    if type(module) is nn.Linear:
        return True
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nf")
        and getattr(module, "weight", torch.empty(0)).ndim == 2
    )


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of such a layer."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)


def scores_first(output: Any) -> Iterator[Tensor]:
    """The tensors of a model's output, the one that it names ``logits`` first."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        yield logits
    for tensor in tensors_in(output):
        if tensor is not logits:
            yield tensor


@contextmanager
def _watched(model: nn.Module, paths: dict[int, str], trace: Trace) -> Iterator[None]:
    with ExitStack() as stack:
        for module in model.modules():
            path = paths[id(module)]
            stack.enter_context(_stacked(module, path, trace))
            if is_linear(module):
                stack.enter_context(_as_piece(module, trace, _on_linear(path, trace)))
            elif type(module) is nn.Embedding:
                stack.enter_context(_as_piece(module, trace, _on_embedding(path, trace)))
            elif type(module) is nn.MultiheadAttention:
                stack.enter_context(_as_piece(module, trace, _on_attention(path, trace)))
        yield


@contextmanager
def _stacked(module: nn.Module, path: str, trace: Trace) -> Iterator[None]:
    """Keep the follower's list of running modules, and the calls of those that are made of others."""
    has_children = next(module.children(), None) is not None

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.follower.modules.append(path)
        if has_children:
            trace.calls.append(Call(path, stream_of(args, kwargs)))

    def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        trace.follower.modules.pop()
        if has_children:
            call = next(call for call in reversed(trace.calls) if call.path == path)
            call.put_out = next(tensors_in(output), None)

    before = module.register_forward_pre_hook(enter, with_kwargs=True)
    after = module.register_forward_hook(leave, with_kwargs=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def stream_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that a block works on: its first positional one, else ``hidden_states``, else its first."""
    return (
        next(tensors_in(args), None)
        if any(True for _ in tensors_in(args))
        else next(tensors_in([kwargs.get("hidden_states"), kwargs]), None)
    )


Watcher = Callable[[tuple[Any, ...], dict[str, Any], Any], None]


@contextmanager
def _as_piece(module: nn.Module, trace: Trace, watch: Watcher) -> Iterator[None]:
    """Inside, a module is one operation to the follower, and ``watch`` sees its calls."""
    own = vars(module).get("forward")
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with trace.follower.pause():
            output = inner(*args, **kwargs)
        watch(args, kwargs, output)
        return output

    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _on_linear(path: str, trace: Trace) -> Watcher:
    def watch(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = next(tensors_in((args, kwargs)))
        trace.follower.call_linear(path, x, output)
        trace.linear_outputs.setdefault(path, []).append(output)

    return watch


def _on_embedding(path: str, trace: Trace) -> Watcher:
    def watch(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        trace.embedded.setdefault(path, []).append(next(tensors_in((args, kwargs))))

    return watch


def _on_attention(path: str, trace: Trace) -> Watcher:
    def watch(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensors = list(tensors_in((args, kwargs)))
        trace.follower.block(tensors, f"{path} reads all of its features")
        trace.torch_attentions.append(Attended(path, is_self=tensors[0] is tensors[1]))
        if any(tensor.requires_grad for tensor in tensors[3:]):
            trace.learned_masks.add(path)

    return watch
