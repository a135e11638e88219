"""From samples of the user's own to one batch: stacked leaf by leaf, or by the user's own ``collate_fn``.

A sample is ``(inputs, targets)``, where both may be dicts, tuples and dataclasses with numbers, arrays and tensors in them, or
one dict or dataclass. A ``collate_fn`` gets samples of any kind, and returns a batch of that form.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from shoal.core.errors import RunError
from shoal.data.batchform import (
    BatchForm,
    Branch,
    Constant,
    Leaf,
    ModelInputs,
    Node,
    flatten,
    leaf_paths,
    open_container,
    rebuild,
)
from shoal.data.source import Items, Splits
from shoal.data.spec import IGNORED
from shoal.telemetry.memory import is_out_of_memory
from shoal.telemetry.rngstate import keeping_draws

WANTED = (
    "return (inputs, targets) or one dict, each made of tensors, numpy arrays and numbers, with tuples, dicts and dataclasses "
    "around them as you like"
)
Collate = Callable[[list[Any]], Any]
"""The user's own: samples in, a batch out."""


@dataclass(kw_only=True)
class Collator:
    """Makes batches of samples."""

    uniform_weight: int | None
    """The weight of every sample where it is the same for all; None where whole-number targets are counted."""
    collate_fn: Collate | None = None
    first_label_counts: bool = True
    """Of a dict's ``labels``, whether the first one of a sequence is compared with anything; a causal language model, which
    predicts the next token, leaves it out."""
    weighs_itself: bool = False
    """The ``collate_fn`` has returned ``Items``, whose weights it alone knows."""

    def collate(self, samples: Sequence[Any], name: Callable[[int], str] = lambda place: f"sample {place}") -> Items:
        """The items of some samples.

        Args:
            samples: at least one.
            name: how people call the sample at a place of ``samples``.

        Raises:
            RunError: they cannot be made one batch; names them and says what they are.
        """
        if self.collate_fn is not None:
            return self._collated(samples)
        try:
            if all(is_plain(sample) for sample in samples):
                inputs, targets = default_collate([plain_parts(sample) for sample in samples])
                if isinstance(targets, Tensor) and all(isinstance(tensor, Tensor) for tensor in inputs):
                    return self._weigh(inputs, targets, None, num_samples=len(samples))
            else:
                return self._weigh(*_stack(samples), num_samples=len(samples))
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            raise RunError(_why_not_stacked(samples, name, error)) from error
        raise RunError(_why_not_stacked(samples, name, None))

    def _collated(self, samples: Sequence[Any]) -> Items:
        """A batch of the user's own ``collate_fn``, which may weigh it by returning ``Items``."""
        assert self.collate_fn is not None
        called = getattr(self.collate_fn, "__qualname__", type(self.collate_fn).__name__)
        try:
            batch = self.collate_fn(list(samples))
        except Exception as error:  # It is the user's own, and may raise anything.
            if is_out_of_memory(error):
                raise
            raise RunError(
                f"the collate function {called} failed on {len(samples)} sample(s): {type(error).__name__}: {error}; "
                "--debug shows where"
            ) from error
        if isinstance(batch, Items):
            self.weighs_itself = True
            return batch
        try:
            found = read_batch(batch)
        except (TypeError, ValueError) as error:
            raise RunError(
                f"the collate function {called} returned {say(batch)}: {error}; return (inputs, targets) or one dict of tensors"
            ) from error
        return self._weigh(*found, num_samples=len(samples))

    def _weigh(self, inputs: Sequence[Tensor], targets: Any, form: BatchForm | None, *, num_samples: int) -> Items:
        inputs = tuple(inputs)
        if self.uniform_weight is not None:
            weight = self.uniform_weight * num_samples
        else:
            labels = form.labels(inputs) if form is not None and form.targets is None else targets
            assert isinstance(labels, Tensor), "only whole-number targets are counted, and they are one tensor"
            if form is not None and form.targets is None and not self.first_label_counts and labels.ndim > 1:
                labels = labels[:, 1:]
            weight = int((labels != IGNORED).sum())
        return Items(inputs=inputs, targets=targets, weight=weight, form=form)


def counted_weight(items: Items, collator: Collator) -> int | None:
    """The weight of every sample, from the first one: 1, or None where whole-number targets or labels are counted.

    Args:
        items: of the first sample.
        collator: that made them; where the user's own function weighs batches, nobody knows before they are made.
    """
    if collator.weighs_itself:
        return None
    if items.form is None or items.form.targets is not None:
        counted: Any = items.targets
    else:
        counted = items.form.labels(items.inputs)
    is_counted = isinstance(counted, Tensor) and not counted.is_floating_point()
    return None if is_counted else 1


def read_batch(batch: Any) -> tuple[tuple[Tensor, ...], Any, BatchForm | None]:
    """Flat inputs, targets and form of a batch that is whole already.

    Raises:
        TypeError: something in it is no part of a batch.
        ValueError: it has no tensor.
    """
    pair = _as_pair(batch)
    inputs: list[Tensor] = []
    node = flatten(batch if pair is None else pair[0], inputs)
    if not inputs:
        raise ValueError("its inputs have no tensor")
    if pair is None:
        return tuple(inputs), (), BatchForm(node, None)
    found: list[Tensor] = []
    target_node = flatten(pair[1], found)
    if not found:
        raise ValueError("its targets have no tensor")
    return tuple(inputs), *_with_form(node, target_node, found)


def _with_form(node: Node, target_node: Node, targets: list[Tensor]) -> tuple[Any, BatchForm | None]:
    """Targets and the form of a pair; no form where it is the plain one."""
    if not isinstance(target_node, Leaf):
        return tuple(targets), BatchForm(node, target_node)
    if isinstance(node, Leaf):
        return targets[0], None
    is_row = isinstance(node, Branch) and issubclass(node.kind, tuple | list)
    if is_row and all(isinstance(child, Leaf) for child in node.children):  # type: ignore[union-attr]
        return targets[0], None
    return targets[0], BatchForm(node, target_node)


def _stack(samples: Sequence[Any]) -> tuple[tuple[Tensor, ...], Any, BatchForm | None]:
    """Samples of any form, each tensor of which is stacked with its like."""
    nodes, rows = [], []
    for sample in samples:
        leaves: list[Any] = []
        nodes.append(_flatten_sample(sample, leaves))
        rows.append(leaves)
    merged = _merge(nodes)
    stacked = [default_collate([row[place] for row in rows]) for place in range(len(rows[0]))]
    for tensor in stacked:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"values of a {type(tensor).__name__} cannot be stacked")
    return read_batch(rebuild(merged, stacked))


def _flatten_sample(value: Any, leaves: list[Any]) -> Node:
    """As ``flatten``, but numbers are leaves as well: those of all samples make one tensor."""
    if is_numbers(value):
        leaves.append(value)
        return Leaf(len(leaves) - 1)
    if isinstance(value, str | bytes | type(None)):
        return Constant(value)
    found = open_container(value)
    if found is not None:
        kind, keys, children = found
        return Branch(kind, keys, tuple(_flatten_sample(child, leaves) for child in children))
    raise TypeError(f"a {type(value).__name__} is no part of a sample")


def _merge(nodes: Sequence[Node]) -> Node:
    """The one structure of several samples; texts become a list with one of each sample.

    Raises:
        ValueError: their structures differ.
    """
    first = nodes[0]
    if any(type(node) is not type(first) for node in nodes):
        raise ValueError("their forms differ")
    if isinstance(first, Constant):
        if first.value is None and all(node == first for node in nodes):
            return first
        return Branch(list, (), tuple(nodes))
    if isinstance(first, Branch):
        same = all(
            isinstance(node, Branch)
            and (node.kind, set(node.keys), len(node.children)) == (first.kind, set(first.keys), len(first.children))
            and (first.kind is dict or node.keys == first.keys)
            for node in nodes
        )
        if not same:
            raise ValueError("their forms differ")
        if any(node.keys != first.keys for node in nodes):  # type: ignore[union-attr]
            raise ValueError("their keys come in different orders")
        children = [_merge([node.children[place] for node in nodes]) for place in range(len(first.children))]  # type: ignore[union-attr]
        return Branch(first.kind, first.keys, tuple(children))
    return first


def _as_pair(value: Any) -> tuple[Any, Any] | None:
    """Inputs and targets of a sample or a batch; None where it is one dict or one object.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, Mapping) or (is_dataclass(value) and not isinstance(value, type)) or hasattr(value, "_fields"):
        return None
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise TypeError(f"it is {say(value)}")


def is_plain(sample: Any) -> bool:
    """True for ``(input, target)`` and ``((input, input, ...), target)`` of numbers: what needs no form."""
    if not isinstance(sample, tuple | list) or len(sample) != 2 or hasattr(sample, "_fields"):
        return False
    inputs, target = plain_parts(sample)
    return is_numbers(target) and bool(inputs) and all(is_numbers(part) for part in inputs)


def plain_parts(sample: Any) -> tuple[tuple[Any, ...], Any]:
    """The inputs and the target of a plain sample."""
    inputs, target = sample
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), target


def find_problem(sample: Any) -> str | None:
    """Why a sample is none that can be trained on; None when nothing is wrong with it."""
    try:
        pair = _as_pair(sample)
    except TypeError:
        return f"a sample is {say(sample)}"
    if pair is None:
        return _find_bad(sample, "") or (None if _has_numbers(sample) else "it has no number in it")
    inputs, target = pair
    if isinstance(inputs, tuple | list) and not inputs:
        return "its input is an empty tuple"
    many = isinstance(inputs, tuple | list) and len(inputs) > 1
    row = inputs if isinstance(inputs, tuple | list) else (inputs,)
    for place, part in enumerate(row):
        found = _find_bad(part, f"input {place}" if many else "input")
        if found is not None:
            return found
    if not _has_numbers(inputs):
        return f"its input is {say(inputs)}"
    found = _find_bad(target, "target")
    return found if found is not None or _has_numbers(target) else f"its target is {say(target)}"


def _find_bad(value: Any, path: str) -> str | None:
    """The first value in a structure that cannot be in a batch, with how it is reached."""
    if is_numbers(value) or (value is None and ("." in path or "'" in path)):
        return None
    container = open_container(value)
    if container is None or not container[2]:
        is_text_inside = isinstance(value, str | bytes) and ("." in path or "'" in path)
        return None if is_text_inside else f"its {path} is {say(value)}"
    _, keys, children = container
    names = [str(key) for key in keys] or [str(place) for place in range(len(children))]
    found = (
        _find_bad(child, f"{path}.{name}" if path else f"value of {name!r}")
        for name, child in zip(names, children, strict=True)
    )
    return next((problem for problem in found if problem is not None), None)


def _has_numbers(value: Any) -> bool:
    leaves: list[Any] = []
    try:
        _flatten_sample(value, leaves)
    except TypeError:
        return False
    return bool(leaves)


def describe_sample(sample: Any) -> str:
    """``input (3,) float32 and target () int64``, of a sample without a problem."""
    pair = _as_pair(sample)
    if pair is None:
        return _shown(sample)
    inputs, target = pair
    row = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return f"input{'s' if len(row) > 1 else ''} {', '.join(map(_shown, row))} and target {_shown(target)}"


def _shown(value: Any) -> str:
    if is_numbers(value):
        tensor = torch.as_tensor(value)
        return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(item)}' for key, item in value.items())}}}"
    container = open_container(value)
    if container is not None:
        _, keys, children = container
        names = [f"{key}=" for key in keys] or [""] * len(children)
        inside = ", ".join(name + _shown(child) for name, child in zip(names, children, strict=True))
        return f"{type(value).__name__ if keys else ''}({inside})"
    return "a text" if isinstance(value, str | bytes) else str(value)


def is_numbers(part: Any) -> bool:
    """True for what torch stacks to one tensor."""
    if isinstance(part, np.ndarray | np.generic):
        return part.dtype.kind in "biufc"
    return isinstance(part, Tensor | bool | int | float | complex)


def say(value: Any) -> str:
    """What a value is, as far as it helps to find it."""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(repr(key) for key in list(value)[:8]) or 'none'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(type(item).__name__ for item in value[:8])}"
    return f"a {type(value).__name__}"


def _why_not_stacked(samples: Sequence[Any], name: Callable[[int], str], error: Exception | None) -> str:
    """Which sample is none that can be trained on, or which two differ in their form."""
    for place, sample in enumerate(samples):
        problem = find_problem(sample)
        if problem is not None:
            return f"{name(place)}: {problem}; {WANTED}"
    forms = [describe_sample(sample) for sample in samples]
    for place, form in enumerate(forms):
        if form != forms[0]:
            return (
                f"samples of one batch must have one shape, and {name(0)} has {forms[0]}, "
                f"{name(place)} has {form}; pad or cut them to one shape in the dataset (a target of -100 "
                "counts for nothing), or give a collate function (data.collate, collate_fn)"
            )
    some = ", ".join(name(place) for place in range(min(2, len(samples))))
    return f"{some} and the rest cannot be stacked to a batch: {error}; each has {forms[0]}; {WANTED}"


_TRIED = 8
"""Samples that are looked at for one whose loss can be asked."""


def settle_labels(model: nn.Module, data: Splits, score: Callable[[ModelInputs], Any]) -> None:
    """Tell the data's collators whether a loss counts the first label of a sequence: that one is changed, and nothing else.

    A causal language model compares what it puts out at a position with the label of the next, so nothing is compared with the
    first label; an encoder-decoder compares every one. Lengths differ, so one label too many per sample is another mean.

    Args:
        model: as one process builds it; its modes and the generators are left as they were.
        data: samples that are dicts with ``labels``; others are left alone.
        score: the loss of the model on some inputs.
    """
    source = data.train
    collator = getattr(source, "collator", None)
    if collator is None or collator.uniform_weight is not None:
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        with keeping_draws(), torch.no_grad():
            model.eval()
            counts = _first_counts(source, score)
    finally:
        for module, was_training in modes:
            module.training = was_training
    for split in (data.train, data.validation, data.test):
        own = getattr(split, "collator", None)
        if own is not None:
            own.first_label_counts = counts


def _first_counts(source: Any, score: Callable[[ModelInputs], Any]) -> bool:
    for number in range(min(_TRIED, len(source))):
        items: Items = source.collate([number])
        labels = None if items.form is None else items.form.labels(items.inputs)
        if items.form is None or labels is None or labels.ndim != 2 or labels.shape[1] < 2:
            return True
        rest = labels[0, 1:]
        if not bool((rest != IGNORED).any()):
            continue
        other = _another(labels, rest)
        changed = labels.clone()
        changed[0, 0] = other
        place = next(place for path, place in leaf_paths(items.form.inputs) if path == "labels")
        inputs = items.model_inputs
        swapped = ModelInputs([changed if at == place else tensor for at, tensor in enumerate(inputs)], items.form)
        try:
            before, after = (float(score(given)) for given in (inputs, swapped))
        except Exception:  # What does not run here says so where it trains.
            return True
        return before != after
    return True


def _another(labels: Tensor, rest: Tensor) -> int:
    """A label that is not the first one, and that the model surely knows."""
    first = int(labels[0, 0])
    known = [int(value) for value in rest[rest != IGNORED].tolist()]
    return next((value for value in known if value != first), max(0, first - 1) if first > 0 else first + 1)
