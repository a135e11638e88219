"""How the flat tensors of a batch make the call of a model: dicts, tuples, dataclasses and keyword arguments.

Tensors travel flat, so that everything which moves, casts, slices, shares or counts them needs to know nothing of their form. A
``BatchForm`` says how they are put together again, once for the model, once for the loss and once for a step of the user's own:

    (inputs, targets)             model(inputs), model(*inputs) or model(**inputs); loss(output, targets)
    {"input_ids": ..., ...}       model(**batch); its output's ``loss``, or loss(output, batch)

A batch without a form is the plain one: ``model(*inputs)``, ``loss(output, targets)``.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Targets = Tensor | tuple[Tensor, ...]
"""What is compared with a model's output: one tensor, or the tensors of a structure; none where the model is given its labels."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Leaf:
    """A tensor, by its place among the flat ones."""

    place: int


@dataclass(frozen=True)
class Constant:
    """A value that is no tensor and stays as it is: a number, a text, None."""

    value: Any


@dataclass(frozen=True)
class Branch:
    """A container of further values."""

    kind: type
    """dict, list, tuple, or the class of a named tuple or a dataclass."""
    keys: tuple[Any, ...]
    """Keys of a dict, names of fields; empty for what is counted."""
    children: tuple["Node", ...]


Node = Leaf | Constant | Branch


def flatten(value: Any, tensors: list[Tensor]) -> Node:
    """The structure of a value, whose tensors are added to ``tensors``; arrays become tensors.

    Raises:
        TypeError: it holds something that is neither a container nor a number, a text or a tensor.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return Leaf(len(tensors) - 1)
    if isinstance(value, _PLAIN):
        return Constant(value)
    found = open_container(value)
    if found is None:
        raise TypeError(f"a {type(value).__name__} is no part of a batch")
    kind, keys, children = found
    return Branch(kind, keys, tuple(flatten(child, tensors) for child in children))


def open_container(value: Any) -> tuple[type, tuple[Any, ...], tuple[Any, ...]] | None:
    """Kind, keys and children of a container; None for what is none."""
    if isinstance(value, Mapping):  # Also those that are more than a dict, such as a tokenizer's encoding.
        return dict, tuple(value), tuple(value[key] for key in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value), tuple(value._fields), tuple(value)
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list), (), tuple(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value) if field.init)
        return type(value), names, tuple(getattr(value, name) for name in names)
    return None


def rebuild(node: Node, tensors: Sequence[Any]) -> Any:
    """The value that ``flatten`` took apart, with these tensors."""
    if isinstance(node, Leaf):
        return tensors[node.place]
    if isinstance(node, Constant):
        return node.value
    children = [rebuild(child, tensors) for child in node.children]
    if node.kind is dict:
        return dict(zip(node.keys, children, strict=True))
    if node.kind in (list, tuple):
        return node.kind(children)
    return node.kind(**dict(zip(node.keys, children, strict=True)))


def num_leaves(node: Node) -> int:
    """How many tensors a structure holds."""
    if isinstance(node, Branch):
        return sum(num_leaves(child) for child in node.children)
    return int(isinstance(node, Leaf))


@dataclass(frozen=True)
class BatchForm:
    """How flat tensors make the call of a model and what its loss gets; values that can be compared, hashed and sent."""

    inputs: Node
    """Of the flat inputs; of the whole batch where there are no targets beside it."""
    targets: Node | None
    """Of the flat targets; ``Leaf(0)`` where they are one tensor. None: the batch is one dict (or one object), and what the loss
    is made of is among the inputs."""

    def arguments(self, model: nn.Module, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``model`` is called with: ``args`` and ``kwargs``.

        A tuple or list is spread over the arguments. A dict is given by keywords where the forward pass takes its keys, else
        whole as the one argument; of a batch without targets only what the forward pass takes, because the rest is for the loss.
        """
        value = rebuild(self.inputs, inputs)
        if isinstance(value, tuple | list):
            return tuple(value), {}
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            return (value,), {}
        names, takes_any = _parameters_of(model)
        if takes_any:
            return (), value
        taken = [key for key in value if key in names]
        if not taken:
            return (value,), {}
        # Of a pair nobody else reads the inputs: a key that the forward pass does not take is refused by python, by its name.
        return (), {key: value[key] for key in taken} if self.targets is None else value

    def unread(self, model: nn.Module) -> tuple[str, ...]:
        """Keys of a batch without targets that the model's forward pass does not take."""
        if self.targets is not None or not isinstance(self.inputs, Branch) or self.inputs.kind is not dict:
            return ()
        names, takes_any = _parameters_of(model)
        unread = tuple(str(key) for key in self.inputs.keys if key not in names)
        return () if takes_any or len(unread) == len(self.inputs.keys) else unread

    def call(self, model: Callable[..., Any], inputs: Sequence[Any], *, like: nn.Module | None = None) -> Any:
        """The model's output on flat inputs; ``like`` is the module whose forward pass ``model`` is, where it is no module."""
        args, kwargs = self.arguments(like if like is not None else model, inputs)  # type: ignore[arg-type]
        return model(*args, **kwargs)

    def targets_of(self, inputs: Sequence[Any], targets: Targets) -> Any:
        """What the loss gets beside the output: one tensor, the structure of several, or the whole batch where it is one dict."""
        if self.targets is None:
            return rebuild(self.inputs, inputs)
        return targets if isinstance(targets, Tensor) else rebuild(self.targets, targets)

    def batch_of(self, inputs: Sequence[Any], targets: Targets) -> Any:
        """The batch as the dataset's items are: ``(inputs, targets)`` or one dict."""
        value = rebuild(self.inputs, inputs)
        return value if self.targets is None else (value, self.targets_of(inputs, targets))

    def labels(self, inputs: Sequence[Any]) -> Tensor | None:
        """The ``labels`` of a batch that is one dict; None where it has none."""
        if self.targets is not None or not isinstance(self.inputs, Branch) or "labels" not in self.inputs.keys:
            return None
        found = rebuild(self.inputs.children[self.inputs.keys.index("labels")], inputs)
        return found if isinstance(found, Tensor) else None


def is_same_form(one: BatchForm | None, other: BatchForm | None) -> bool:
    """True where two batches make the same calls; texts and other values that are no tensors differ from batch to batch."""
    if one is None or other is None:
        return one is other
    return _shape_of(one.inputs) == _shape_of(other.inputs) and _shape_of(one.targets) == _shape_of(other.targets)


def _shape_of(node: Node | None) -> object:
    if isinstance(node, Constant):
        return type(node.value)
    if isinstance(node, Branch):
        return node.kind, node.keys, tuple(_shape_of(child) for child in node.children)
    return node


class ModelInputs(tuple[Tensor, ...]):
    """Flat inputs with their form: a tuple of tensors for whoever moves or counts them, and a call for whoever runs the model."""

    form: BatchForm | None

    def __new__(cls, tensors: Sequence[Tensor], form: BatchForm | None = None) -> "ModelInputs":
        """The tensors with a form; None is the plain one."""
        made = super().__new__(cls, tensors)
        made.form = form
        return made

    def map(self, change: Callable[[Tensor], Tensor]) -> "ModelInputs":
        """Every tensor changed, the form kept."""
        return ModelInputs([change(tensor) for tensor in self], self.form)

    def without_labels(self) -> "ModelInputs":
        """The inputs of a batch that is one dict as they are when nobody knows its ``labels``; of another they are the same."""
        if self.form is None or self.form.labels(self) is None:
            return self
        value = rebuild(self.form.inputs, self)
        tensors: list[Tensor] = []
        node = flatten({key: one for key, one in value.items() if key != "labels"}, tensors)
        return ModelInputs(tensors, BatchForm(node, None))

    def names(self, model: nn.Module) -> list[str]:
        """What each tensor is called: by its key in the batch, else by the argument that it is of the model's forward pass."""
        if self.form is not None:
            found = {place: path for path, place in leaf_paths(self.form.inputs)}
        else:
            found = dict(enumerate(inspect.signature(model.forward).parameters))
        return [found.get(place) or f"input_{place}" for place in range(len(self))]


def arguments_of(model: nn.Module, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: by the form of ``ModelInputs``, else every input in its place."""
    form = inputs.form if isinstance(inputs, ModelInputs) else None
    return (tuple(inputs), {}) if form is None else form.arguments(model, inputs)


def call_model(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """A model's output on flat inputs: by the form of ``ModelInputs``, else ``model(*inputs)``."""
    args, kwargs = arguments_of(model, inputs)
    return model(*args, **kwargs)


def targets_of(form: BatchForm | None, inputs: Sequence[Any], targets: Targets) -> Any:
    """What the loss gets beside the output; see ``BatchForm``."""
    return targets if form is None else form.targets_of(inputs, targets)


def batch_of(form: BatchForm | None, inputs: Sequence[Any], targets: Targets) -> Any:
    """The batch as the dataset's items are; of a plain one ``(input, targets)`` or ``((input, input, ...), targets)``."""
    if form is not None:
        return form.batch_of(inputs, targets)
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets


def flat_targets(targets: Targets) -> tuple[Tensor, ...]:
    """The tensors of targets, one or several."""
    return (targets,) if isinstance(targets, Tensor) else targets


def map_targets(targets: Targets, change: Callable[[Tensor], Tensor]) -> Targets:
    """Every tensor of targets changed."""
    return change(targets) if isinstance(targets, Tensor) else tuple(change(tensor) for tensor in targets)


_SIGNATURES: "weakref.WeakKeyDictionary[type, tuple[frozenset[str], bool]]" = weakref.WeakKeyDictionary()


def _parameters_of(model: nn.Module) -> tuple[frozenset[str], bool]:
    """The arguments that a module's forward pass takes by name, and whether it takes any.

    Of its class: techniques that put another function in the place of an instance's must not change what it is given.
    """
    kind = type(model)
    if kind not in _SIGNATURES:
        _SIGNATURES[kind] = _read_signature(kind.forward)
    return _SIGNATURES[kind]


def _read_signature(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    try:
        _, *parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named), takes_any


def leaf_paths(node: Node, path: str = "") -> Iterator[tuple[str, int]]:
    """How people call each tensor of a structure (``labels``, ``sparse.0``), and its place."""
    if isinstance(node, Leaf):
        yield path, node.place
    elif isinstance(node, Branch):
        for place, child in enumerate(node.children):
            key = str(node.keys[place]) if node.keys else str(place)
            yield from leaf_paths(child, f"{path}.{key}" if path else key)
