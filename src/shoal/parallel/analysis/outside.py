"""Parameters that are read while their own module is not running, as in ``F.linear(h, self.embedding.weight)``.

ZeRO 3 brings a module's weights when the module is called. A weight that its parent reads would not be there, so such weights
have to stay for the whole forward pass.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def find_outside_reads(model: nn.Module, example: tuple[Tensor, ...], blocks: Collection[str]) -> frozenset[str]:
    """Names of parameters that some function reads while neither their module nor the block around it runs.

    Args:
        model: the plain module, on the CPU.
        example: its inputs for a few samples.
        blocks: paths of modules whose parameters come all at once.
    """
    homes: dict[nn.Parameter, set[str]] = {}
    for path, module in model.named_modules():
        block = next((block for block in blocks if path == block or path.startswith(block + ".")), path)
        for parameter in module.parameters(recurse=False):
            # A tied parameter is at home in each of its modules.
            homes.setdefault(parameter, set()).add(block)
    names = {parameter: name for name, parameter in model.named_parameters()}
    with _running_paths(model) as running, _Reads(homes, running) as reads, torch.no_grad():
        model(*example)
    return frozenset(names[parameter] for parameter in reads.outside if parameter in names)


class _Reads(TorchFunctionMode):
    """Looks at the arguments of every function."""

    def __init__(self, homes: dict[nn.Parameter, set[str]], running: list[str]) -> None:
        super().__init__()
        self.homes = homes
        self.running = running
        self.outside: set[nn.Parameter] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A shape or a type is known without the values.
        if getattr(func, "__name__", "") != "__get__":
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, nn.Parameter) and not self.homes.get(value, set()).intersection(self.running):
                    self.outside.add(value)
        return func(*args, **(kwargs or {}))


@contextmanager
def _running_paths(model: nn.Module) -> Iterator[list[str]]:
    """The paths of the modules whose forward pass is under way, outermost first."""
    running: list[str] = []
    handles: list[Any] = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _module, _args, path=path: running.append(path)))
        handles.append(
            module.register_forward_hook(lambda _module, _args, _output: running.pop() and None, always_call=True)
        )
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()
        for module, was_training in modes:
            module.training = was_training
