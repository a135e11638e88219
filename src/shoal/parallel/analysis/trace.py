"""The record of one forward pass of any module, read: which layers ran in which order, on what, and where their outputs went.

The pass is a training pass with gradients on, because that is what will run (torch's encoder layers compute something else in
evaluation), but nothing of it stays: random state, buffers and attributes are put back.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.costs.tracer import (
    Call,
    Level,
    ModuleCall,
    ModuleReturn,
    Record,
    TensorInfo,
    Tracer,
    preserved_state,
    tensors_in,
)
from shoal.data.batchform import arguments_of
from shoal.parallel.analysis import rules as rules  # It registers its rules.
from shoal.parallel.analysis.flow import Follower
from shoal.parallel.analysis.traced_int import Dimension, TracedAttributes, TracedInt, trace_source

IS_OUTPUT = "it is the model's output"


@dataclass
class BlockCall:
    """One call of a module that is made of others: the stream that it read and its output, first tensors both."""

    path: str
    read: TensorInfo | None
    output: TensorInfo | None = None


@dataclass
class Trace:
    """What one forward pass showed."""

    follower: Follower
    owners: dict[nn.Parameter, str]
    """Parameters of layers that may be split, and the paths of those layers."""
    example: tuple[Tensor, ...]
    inputs: tuple[TensorInfo, ...]
    calls: list[BlockCall] = field(default_factory=list)
    """Calls of modules that have children, in the order in which they began."""
    linear_outputs: dict[str, list[TensorInfo]] = field(default_factory=dict)
    embedded: dict[str, list[TensorInfo]] = field(default_factory=dict)
    """Embeddings and the indices that they were given."""
    torch_attentions: list[str] = field(default_factory=list)
    """Calls of ``nn.MultiheadAttention``."""
    learned_masks: set[str] = field(default_factory=set)
    """Those whose mask has a gradient: every head adds to it, and a rank would have only its own heads' part."""
    outputs: list[TensorInfo] = field(default_factory=list)
    """The tensors of the model's output; its scores first, where it names them."""
    has_scores: bool = False
    """It gave scores alone, or an object that names them: what a loss of split scores can find."""


def trace_forward(model: nn.Module, example: tuple[Tensor, ...]) -> Trace:
    """Record one forward pass on an example and follow its features. Whatever the model raises comes through."""
    values: list[TracedInt] = []

    def on_size(tensor: TensorInfo, dim: int) -> int:
        return trace_source(tensor.shape[dim], Dimension(tensor.number, dim), values)

    tracer = Tracer(model, level=Level.FUNCTIONS, opaque=_is_known, on_size=on_size)
    with preserved_state(model, training=True), TracedAttributes(model, values), torch.enable_grad():
        output = tracer.run(*arguments_of(model, example))
    owners = {
        parameter: path
        for path, module in model.named_modules()
        if is_linear(module) or isinstance(module, nn.Embedding | nn.MultiheadAttention)
        for parameter in module.parameters()
    }
    follower = Follower(owners={tracer.info(parameter): path for parameter, path in owners.items()}, values=values)
    trace = Trace(follower, owners, example, tracer.record.inputs)
    _read(tracer.record, model, trace)
    trace.outputs = [tracer.info(tensor) for tensor in scores_first(output)]
    trace.has_scores = isinstance(getattr(output, "logits", output), Tensor)
    for tensor in trace.outputs:
        trace.follower.block([tensor], IS_OUTPUT)
    return trace


def find_outside_reads(model: nn.Module, example: tuple[Tensor, ...], blocks: Collection[str]) -> frozenset[str]:
    """Names of parameters that some function reads while neither their module nor the block around it runs.

    ZeRO 3 brings a module's weights when the module is called. A weight that its parent reads, as in
    ``F.linear(h, self.embedding.weight)``, would not be there, so such weights have to stay for the whole forward pass.

    Args:
        model: the plain module, on the CPU.
        example: its inputs for a few samples.
        blocks: paths of modules whose parameters come all at once.
    """
    tracer = Tracer(model, level=Level.FUNCTIONS)
    with preserved_state(model, training=False), torch.no_grad():
        tracer.run(*arguments_of(model, example))
    homes: dict[TensorInfo, set[str]] = {}
    for path, module in model.named_modules():
        block = next((block for block in blocks if path == block or path.startswith(block + ".")), path)
        for parameter in module.parameters(recurse=False):
            # A tied parameter is at home in each of its modules.
            homes.setdefault(tracer.info(parameter), set()).add(block)
    outside: set[TensorInfo] = set()
    for running, call in _calls_in(tracer.record):
        # A shape or a type is known without the values.
        if getattr(call.func, "__name__", "") != "__get__":
            read = (tensor for tensor in tensors_in((call.args, call.kwargs)) if tensor in homes)
            outside.update(tensor for tensor in read if not homes[tensor].intersection(running))
    return frozenset(name for name, parameter in tracer.record.parameters.items() if parameter in outside)


def _calls_in(record: Record) -> Iterator[tuple[list[str], Call]]:
    """The calls of a record, each with the modules that were running, outermost first."""
    running = [""]
    for event in record.events:
        if isinstance(event, ModuleCall):
            running.append(event.path)
        elif isinstance(event, ModuleReturn):
            while running.pop() != event.path:
                pass
        elif isinstance(event, Call):
            yield running, event


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
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor is not logits:
            yield tensor


def _is_known(module: nn.Module) -> bool:
    """A module whose inside need not be looked at."""
    return is_linear(module) or type(module) in (nn.Embedding, nn.MultiheadAttention)


def _read(record: Record, model: nn.Module, trace: Trace) -> None:
    modules = dict(model.named_modules())
    parents = {path for path, module in modules.items() if next(module.children(), None) is not None}
    for event in record.events:
        if isinstance(event, ModuleCall) and event.path in parents:
            tensors = tensors_in([event.args, event.kwargs.get("hidden_states"), event.kwargs])
            trace.calls.append(BlockCall(event.path, tensors[0] if tensors else None))
        elif isinstance(event, ModuleReturn) and event.path in parents:
            call = next(call for call in reversed(trace.calls) if call.path == event.path)
            call.output = next(iter(tensors_in(event.output)), None)
        elif isinstance(event, Call) and event.func is None:
            _read_known(event, modules[event.path], trace)
        elif isinstance(event, Call):
            trace.follower.follow(event)


def _read_known(call: Call, module: nn.Module, trace: Trace) -> None:
    """A module that is one operation to the follower."""
    tensors, path = tensors_in((call.args, call.kwargs)), call.path
    if is_linear(module):
        trace.follower.call_linear(path, tensors[0], call.output)
        trace.linear_outputs.setdefault(path, []).append(call.output)
    elif isinstance(module, nn.Embedding):
        trace.embedded.setdefault(path, []).append(tensors[0])
    else:
        trace.follower.block(tensors, f"{path} reads all of its features")
        trace.torch_attentions.append(path)
        if any(tensor.requires_grad for tensor in tensors[3:]):
            trace.learned_masks.add(path)
