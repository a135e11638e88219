"""Lists of blocks as the structure of a module shows them, the modules around them, and what a block is called with.

What runs may differ from what lies side by side: a forward pass decides where one was seen (``parallel/analysis/analyse.py``).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NUMBERED = re.compile(r"(.*?)_?\d+")


def find_blocks(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Lists of blocks of one kind, none inside a block of another list, in the order of modules."""
    rows: list[tuple[str, ...]] = []
    for path, module in model.named_modules():
        if not any(is_under(path, block) for row in rows for block in row):
            rows += sibling_blocks(path, module)
    return tuple(rows)


def is_under(path: str, parent: str) -> bool:
    """True for a module inside another, or the same."""
    return path == parent or path.startswith(parent + ".") or parent == ""


def sibling_blocks(path: str, module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Children of one class, side by side, each made of others and with weights."""
    is_container = isinstance(module, _CONTAINERS)

    def kind(child: tuple[str, nn.Module]) -> object:
        name, block = child
        is_block = next(block.children(), None) is not None and next(block.parameters(), None) is not None
        if not is_block:
            return None
        if is_container:
            return type(block)
        numbered = _NUMBERED.fullmatch(name)
        # A container that is not in a list is a part of its parent with a row of its own inside, not a block.
        return (numbered[1], type(block)) if numbered and not isinstance(block, _CONTAINERS) else None

    # One block alone is a row only where a list says that there could be more.
    fewest = 1 if isinstance(module, nn.ModuleList) and len(module) == 1 else 2
    for key, children in groupby(module.named_children(), key=kind):
        names = [f"{path}.{name}" if path else name for name, _ in children]
        if key is not None and len(names) >= fewest:
            yield tuple(names)


def stream_key(args: Sequence[Any], kwargs: Mapping[str, Any], kind: type = Tensor) -> int | str | None:
    """Where a block is given the tensor that it works on: the first positional one, else ``hidden_states``, else the first.

    None where it is given no tensor. In the record of a call, tensors are of another ``kind``.
    """
    for place, value in enumerate(args):
        if isinstance(value, kind):
            return place
    names = [name for name, value in kwargs.items() if isinstance(value, kind)]
    return "hidden_states" if "hidden_states" in names else next(iter(names), None)


def replace_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with another stream."""
    key = stream_key(args, kwargs)
    if isinstance(key, int):
        return (*args[:key], change(args[key]), *args[key + 1 :]), kwargs
    assert key is not None, "a block is given a tensor"
    return args, {**kwargs, key: change(kwargs[key])}


def opened_modules(model: nn.Module, blocks: Iterable[str]) -> set[str]:
    """Modules whose inside is looked at: the model, what has blocks in it, and sequences on the way down from there."""
    parts = [block.split(".") for block in blocks]
    found = {""} | {".".join(path[:length]) for path in parts for length in range(len(path))}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if (
            isinstance(module, nn.Sequential | nn.ModuleList)
            and parent in found
            and path not in {*map(".".join, parts)}
        ):
            found.add(path)
    return found
