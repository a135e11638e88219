"""One forward pass of any module, recorded: the calls of modules, the operations that ran on tensors, and what autograd saved.

There is one tracer for everything that has to know what a module does; its readers are pure functions over the record:

    parallel/analysis                    functions as the user's code calls them: which layers can be split
    costs/observe.py                     operations as torch runs them, on fake tensors: what each layer computes and saves
    parallel/tensor/traffic_forecast.py  calls of modules, and what is saved between them: what crosses between ranks
    pipeline/units.py, unit_costs.py     calls of modules: where a model can be cut into stages, and what each unit costs

torch.fx is not used: it cannot trace through the data-dependent Python of the models that people have, while a forward pass
always runs. Nothing in a record is a tensor: a ``TensorInfo`` says which tensor it was, so a record keeps no memory alive.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.comm.global_batch import ALONE, gathering
from shoal.costs.operations import Attention, Product, products_of
from shoal.telemetry.rngstate import keeping_draws


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """Which tensor it was, and what could be known of it without its values. Equal where it was the same tensor object."""

    number: int
    storage: int
    """The number of its storage: views of one storage share it. Storages are numbered in the order in which they were met."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage_bytes: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorInfo) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel() * self.itemsize

    def with_storage(self, storage: int) -> "TensorInfo":
        """The same in another storage."""
        return TensorInfo(self.number, storage, self.shape, self.dtype, self.requires_grad, self.storage_bytes)

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Whether its elements are."""
        return self.dtype.is_floating_point


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module is called."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    time: float
    """What the tracer's clock showed; 0 without one."""


@dataclass(frozen=True, slots=True)
class ModuleReturn:
    """A module gives its output back."""

    path: str
    output: Any


@dataclass(frozen=True, slots=True)
class Call:
    """A function or an operation ran; or all of an opaque module's forward method."""

    name: str
    func: Any
    """None for the forward method of an opaque module."""
    path: str
    """The innermost module that was running."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    products: tuple[Product | Attention, ...] = ()
    """Matrix products of an operation."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Autograd keeps a tensor for the backward pass."""

    tensor: TensorInfo


Event = ModuleCall | ModuleReturn | Call | Saved


class Level(Enum):
    """What is recorded besides the calls of modules."""

    MODULES = "modules"
    FUNCTIONS = "functions"
    """torch's functions and the methods of tensors, as the module's own code calls them."""
    OPERATIONS = "operations"
    """What torch runs for them, below autograd."""


@dataclass
class Record:
    """What one forward pass did."""

    events: list[Any] = field(default_factory=list)
    """In the order of execution; ``Event``, and what others put between them (``repeats.py``)."""
    running: list[str] = field(default_factory=lambda: [""])
    """Paths of the modules that are running, outermost first: after a failure, those in which it happened."""
    last: str = ""
    """The operation that began last: after a failure, the one that failed."""
    parameters: dict[str, TensorInfo] = field(default_factory=dict)
    buffers: dict[str, TensorInfo] = field(default_factory=dict)
    inputs: tuple[Any, ...] = ()
    output: Any = None
    start: float = 0.0
    """What the tracer's clock showed before the pass,"""
    end: float = 0.0
    """and after it."""


def tensors_in(value: Any) -> list[TensorInfo]:
    """The tensors in a recorded value, in order."""
    if isinstance(value, TensorInfo):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


class Tracer:
    """Records forward passes of one module."""

    def __init__(
        self,
        model: nn.Module,
        *,
        level: Level = Level.MODULES,
        paths: Collection[str] | None = None,
        first: bool = False,
        saved: bool = False,
        keeps_graph: bool = False,
        opaque: Callable[[nn.Module], bool] | None = None,
        on_size: Callable[[TensorInfo, int], int] | None = None,
        execute: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any] | None = None,
        clock: Callable[[Any], float] | None = None,
    ) -> None:
        """Set up a tracer.

        Args:
            model: any module.
            level: what to record besides the calls of modules.
            paths: the modules whose calls are recorded; None for all but the model itself.
            first: calls are recorded before a module's other hooks run, so that those count with it.
            saved: record what autograd saves. It is not kept then, so no backward pass can follow,
            keeps_graph: unless this is set, for a module that computes gradients inside its forward pass.
            opaque: modules whose forward method is one ``Call``: nothing inside is recorded.
            on_size: what the module's code gets where it asks for the size of a tensor along a dim, with level FUNCTIONS.
            execute: runs an operation, with level OPERATIONS; torch does when left out.
            clock: read at every call of a module, with the values that it is called with.
        """
        self.model = model
        self.record = Record()
        self._level, self._first, self._saves, self._keeps_graph = level, first, saved, keeps_graph
        self._paths = None if paths is None else frozenset(paths)
        self._opaque, self._on_size, self._execute, self._clock = opaque, on_size, execute, clock
        self._num_paused = 0
        self._numbers: Any = WeakTensorKeyDictionary()
        self._num_tensors = 0
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}
        """Numbers by address. The weak reference keeps the address from being given out again, and no memory."""

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        then: Callable[[Any], object] | None = None,
    ) -> Any:
        """Call the module and record it, with what ``then`` does to its output; the output.

        Whatever the module raises comes through, and ``record`` is as far as it came.
        """
        kwargs = kwargs or {}
        self.record = Record(inputs=self.plain((*args, *kwargs.values())))
        self.record.parameters = {name: self.info(parameter) for name, parameter in self.model.named_parameters()}
        self.record.buffers = {name: self.info(buffer) for name, buffer in self.model.named_buffers()}
        with self._recording():
            self.record.start = self._now((args, kwargs))
            output = self.model(*args, **kwargs)
            if then is not None:
                then(output)
            # Before the output is let go: freeing what the pass saved takes time, too.
            self.record.end = self._now((args, kwargs))
        self.record.output = self.plain(output)
        return output

    @contextmanager
    def _recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                if path if self._paths is None else path in self._paths:
                    stack.enter_context(self._hooked(path, module))
                if self._opaque is not None and self._opaque(module):
                    stack.enter_context(self._as_one_call(path, module))
            if self._saves:
                stack.enter_context(saved_tensors_hooks(self._save, lambda value: value))
            if self._level is Level.FUNCTIONS:
                stack.enter_context(_Functions(self))
            elif self._level is Level.OPERATIONS:
                stack.enter_context(_Operations(self))
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded."""
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1

    def info(self, tensor: Tensor) -> TensorInfo:
        """The values that stand for a tensor."""
        number = self._numbers.get(tensor)
        if number is None:
            number = self._num_tensors = self._num_tensors + 1
            self._numbers[tensor] = number
        return TensorInfo(
            number=number,
            storage=self.storage_of(tensor),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            storage_bytes=tensor.untyped_storage().nbytes(),
        )

    def storage_of(self, tensor: Tensor) -> int:
        """The number of a tensor's storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = len(self._storages), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return self._storages[storage._cdata][0]

    @property
    def num_storages(self) -> int:
        """Storages that were met so far."""
        return len(self._storages)

    def plain(self, value: Any) -> Any:
        """A value with its tensors as ``TensorInfo`` and its containers as tuples, lists and dicts."""
        if isinstance(value, Tensor):
            return self.info(value)
        if isinstance(value, tuple):
            return tuple(self.plain(item) for item in value)
        if isinstance(value, list):
            return [self.plain(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self.plain(item) for key, item in value.items()}
        if type(value) in SUPPORTED_NODES:
            return tuple(self.plain(item) for item in tree_leaves(value))
        return value

    def _now(self, values: Any) -> float:
        return 0.0 if self._clock is None else self._clock(values)

    @contextmanager
    def _hooked(self, path: str, module: nn.Module) -> Iterator[None]:
        enter = module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True, prepend=self._first)
        leave = module.register_forward_hook(partial(self._leave, path))
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _enter(self, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.record.running.append(path)
        if not self._num_paused:
            with torch._C.DisableTorchFunction():
                event = ModuleCall(path, self.plain(args), self.plain(kwargs), self._now((args, kwargs)))
            self.record.events.append(event)

    def _leave(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        # A module that raised and whose caller went on without it is still there.
        while self.record.running.pop() != path:
            pass
        if not self._num_paused:
            with torch._C.DisableTorchFunction():
                self.record.events.append(ModuleReturn(path, self.plain(output)))

    @contextmanager
    def _as_one_call(self, path: str, module: nn.Module) -> Iterator[None]:
        own, inner = vars(module).get("forward"), module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                output = inner(*args, **kwargs)
            if not self._num_paused:
                with torch._C.DisableTorchFunction():
                    values = self.plain(args), self.plain(kwargs), self.plain(output)
                self.record.events.append(Call("forward", None, path, *values))
            return output

        module.forward = forward
        try:
            yield
        finally:
            if own is None:
                del module.forward
            else:
                module.forward = own

    def _save(self, tensor: Tensor) -> Tensor | None:
        if not self._num_paused:
            with torch._C.DisableTorchFunction():
                self.record.events.append(Saved(self.info(tensor)))
        if not self._keeps_graph:
            return None
        # Detached, because a node that keeps its own output in Python would never be freed.
        with self.paused():
            return tensor.detach()

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function and record it."""
        output = func(*args, **kwargs)
        if self._num_paused:
            return output
        name = _name(func)
        if self._on_size is not None and name in ("shape", "size") and args and isinstance(args[0], Tensor):
            output = self._sizes(self._on_size, args, kwargs, output)
        path = self.record.running[-1]
        self.record.events.append(Call(name, func, path, self.plain(args), self.plain(kwargs), self.plain(output)))
        return output

    def _sizes(
        self, on_size: Callable[[TensorInfo, int], int], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        tensor = self.info(args[0])
        if isinstance(output, int):
            asked = kwargs["dim"] if "dim" in kwargs else args[1]
            return on_size(tensor, asked % tensor.ndim)
        return torch.Size([on_size(tensor, dim) for dim in range(tensor.ndim)])

    def call_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record it."""
        if func.namespace == "prim":
            return func(*args, **kwargs)
        self.record.last = str(func)
        output = func(*args, **kwargs) if self._execute is None else self._execute(func, args, kwargs)
        if not self._num_paused:
            path, products = self.record.running[-1], products_of(func, args, kwargs, output)
            values = self.plain(args), self.plain(kwargs), self.plain(output)
            self.record.events.append(Call(self.record.last, func, path, *values, products))
        return output


class _Functions(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._tracer.call_function(func, args, kwargs or {})


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._tracer.call_operation(func, tuple(args), dict(kwargs or {}))


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # A property, such as x.shape: named by the descriptor that it belongs to.
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


@contextmanager
def preserved_state(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the model is in training or evaluation mode; afterwards its modes, buffers and the random states are as before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    is_fast = torch.backends.mha.get_fastpath_enabled()
    # Whoever looks at a model looks at it alone: nothing of it waits for other processes.
    with keeping_draws(), gathering(ALONE):
        try:
            # torch's fused encoder layer, taken in evaluation, hides everything inside it.
            torch.backends.mha.set_fastpath_enabled(False)
            model.train(training)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fast)
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
