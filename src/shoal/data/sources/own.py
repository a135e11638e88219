"""The user's own map-style dataset: described by its first sample, collated as torch does.

A dataset's item is ``(input, target)`` or ``((input, input, ...), target)``. Whole-number targets of -100 count for nothing. What
a shipped model must know and a sample cannot say is read from attributes of the dataset: ``classes`` (a number or the list of
names) and ``vocab``. A function that returns ``Splits`` of its own sources is taken at its word.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, default_collate

from shoal.core.errors import RequestError, RunError
from shoal.core.functions import call_own
from shoal.data.config import OwnDataConfig, load_build
from shoal.data.order import permute, split_positions
from shoal.data.source import Items, SampleIds, Splits
from shoal.data.spec import IGNORED, DataSpec
from shoal.telemetry.memory import is_out_of_memory
from shoal.telemetry.rngstate import keeping_draws, seeded

_NAMES = ("train", "validation", "test")
_SPLIT_SEED = 0
_WANTED = "return (input, target) or ((input, input, ...), target), each of them a tensor, a numpy array or a number"


class DatasetSource:
    """A map-style dataset as a source.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        uniform_weight: of every sample; None where targets may be left out.
        name: of the split, for messages.
        collate_fn: makes a batch of a list of samples; torch's default rule when left out.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        uniform_weight: int | None,
        name: str = "",
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._dataset = dataset
        self._uniform_weight = uniform_weight
        self._collate_fn = collate_fn
        self._split = f" of the {name} split" if name else ""

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def uniform_weight(self) -> int | None:
        """1 per sample; None for whole-number targets, some of which may be ignored."""
        return self._uniform_weight

    def collate(self, ids: SampleIds) -> Items:
        """The samples with these ids, as one batch.

        Raises:
            RunError: the dataset failed, or its samples cannot be stacked; names them and says what they are.
        """
        numbers = [int(i) for i in ids]
        try:
            samples = self._read(numbers)
        except Exception as error:  # It may raise anything.
            if is_out_of_memory(error):
                raise
            for number in numbers:
                self._read_told([number])  # Which of them it is, only reading each by itself can tell.
            samples = self._read_told(numbers)
        return self.collate_samples(samples, numbers)

    def collate_samples(self, samples: Sequence[Any], numbers: Sequence[int]) -> Items:
        """Samples that are read already as one batch: by ``collate_fn``, or stacked by torch's default rule.

        Args:
            samples: as the dataset gives them.
            numbers: their ids, for messages.

        Raises:
            RunError: they cannot be stacked, or ``collate_fn`` failed; names them and says what they are.
        """
        if self._collate_fn is not None:
            return self._collate_own(self._collate_fn, samples, numbers)
        try:
            inputs, targets = default_collate([_parts(sample) for sample in samples])
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            raise RunError(self._why_not_stacked(numbers, samples, error)) from error
        if not isinstance(targets, Tensor) or not all(isinstance(tensor, Tensor) for tensor in inputs):
            raise RunError(self._why_not_stacked(numbers, samples, None))
        weight = len(samples) if self._uniform_weight is not None else int((targets != IGNORED).sum())
        return Items(inputs=tuple(inputs), targets=targets, weight=weight)

    def _collate_own(
        self, collate_fn: Callable[[list[Any]], Any], samples: Sequence[Any], numbers: Sequence[int]
    ) -> Items:
        shown = ", ".join(self.name_sample(number) for number in numbers[:2]) + (" ..." if len(numbers) > 2 else "")
        what = f"collate_fn on {shown}"
        made = call_own(lambda: collate_fn(list(samples)), what=what, is_excused=is_out_of_memory, refusal=RunError)
        if isinstance(made, Items):
            return made
        problem = find_problem(made)
        if problem is not None:
            raise RunError(f"{what}: {problem.replace('a sample is', 'it returned')}; {_WANTED}, or shoal.data.Items")
        inputs, targets = _parts(made)
        tensor = torch.as_tensor(targets)
        weight = len(samples) if self._uniform_weight is not None else int((tensor != IGNORED).sum())
        return Items(inputs=tuple(torch.as_tensor(part) for part in inputs), targets=tensor, weight=weight)

    def name_sample(self, number: int) -> str:
        """How the user finds a sample: by its index in the dataset, from which the splits were cut."""
        found, is_cut = find_original(self._dataset, number)
        return f"sample {found} of the dataset" if is_cut else f"sample {number}{self._split}"

    def _read_told(self, numbers: Sequence[int]) -> Any:
        shown = ", ".join(self.name_sample(number) for number in numbers[:8]) + (", ..." if len(numbers) > 8 else "")
        what = f"reading {shown}"
        return call_own(lambda: self._read(numbers), what=what, is_excused=is_out_of_memory, refusal=RunError)

    def _read(self, numbers: Sequence[int]) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(list(numbers))
        return [self._dataset[i] for i in numbers]

    def _why_not_stacked(self, numbers: Sequence[int], samples: Sequence[Any], error: Exception | None) -> str:
        """Which sample is no pair of numbers, or which two differ in their form."""
        for number, sample in zip(numbers, samples, strict=False):
            problem = find_problem(sample)
            if problem is not None:
                return f"{self.name_sample(number)}: {problem}; {_WANTED}"
        forms = [describe_sample(sample) for sample in samples]
        for number, form in zip(numbers, forms, strict=False):
            if form != forms[0]:
                return (
                    f"samples of one batch must have one shape, and {self.name_sample(numbers[0])} has {forms[0]}, "
                    f"{self.name_sample(number)} has {form}; pad or cut them to one shape in the dataset (a target of -100 "
                    "counts for nothing)"
                )
        some = ", ".join(self.name_sample(number) for number in numbers[:2])
        return f"{some} and the rest cannot be stacked to a batch: {error}; each has {forms[0]}; {_WANTED}"


def find_original(dataset: Any, number: int) -> tuple[int, bool]:
    """The index of a sample in the dataset that this one was cut from, and whether it was."""
    is_cut = False
    while isinstance(dataset, Subset):
        dataset, number, is_cut = dataset.dataset, int(dataset.indices[number]), True
    return number, is_cut


def build_own(config: OwnDataConfig, seed: int) -> Splits:
    """The splits of the user's own data.

    Args:
        config: names the function that returns it.
        seed: of the global generators while it does: what it makes up of random numbers is the same on every process.

    Raises:
        RequestError: the function cannot be imported, or what it returns is no map-style dataset of (input, target) pairs.
    """
    origin = f"data.build = {config.build!r}"
    with seeded(seed):
        built = call_own(load_build(config), what=origin, is_excused=is_out_of_memory)
    if isinstance(built, Splits):
        return built
    parts = _named_parts(built, origin) if isinstance(built, Mapping) else _cut(built, config, origin)
    described = built["train"] if isinstance(built, Mapping) else built
    return _describe_parts(parts, described, origin)


def from_datasets(train: Any, validation: Any = (), test: Any = ()) -> Splits:
    """The splits of map-style datasets that a script holds in its hands; a split that is left out has no sample.

    Args:
        train: what is trained on.
        validation: what a run is evaluated on.
        test: held out to the end.

    Raises:
        RequestError: one of them is no map-style dataset of (input, target) pairs, or there is nothing to train on.
    """
    parts = {"train": train, "validation": validation, "test": test}
    for name, part in parts.items():
        _require_map_style(part, f"from_datasets({name}=...)")
    return _describe_parts(parts, train, "from_datasets(train=...)")


def _describe_parts(parts: Mapping[str, Any], described: Any, origin: str) -> Splits:
    first = parts["train"]
    if not len(first):
        raise RequestError(f"{origin} returned a training set of 0 samples; the data is empty")
    inputs, target = _first_sample(first, origin, "train")
    # Of the test split training reads nothing, and it may well have no targets.
    with keeping_draws():
        if len(parts["validation"]):
            _first_sample(parts["validation"], origin, "validation")
    spec = _describe(described, inputs, target)
    uniform_weight = 1 if target.is_floating_point() else None
    sources = {name: DatasetSource(part, uniform_weight=uniform_weight, name=name) for name, part in parts.items()}
    return Splits(train=sources["train"], validation=sources["validation"], test=sources["test"], spec=spec)


def _named_parts(built: Mapping[str, Any], origin: str) -> dict[str, Any]:
    unknown = [name for name in built if name not in _NAMES]
    if unknown or "train" not in built:
        found = ", ".join(repr(name) for name in built) or "nothing"
        raise RequestError(
            f"{origin} returned a dict of {found}; its keys are 'train', and if you like 'validation' and 'test'"
        )
    parts = {name: built.get(name, ()) for name in _NAMES}
    for part in parts.values():
        _require_map_style(part, origin)
    return parts


def _cut(dataset: Any, config: OwnDataConfig, origin: str) -> dict[str, Any]:
    _require_map_style(dataset, origin)
    ranges = split_positions(len(dataset), config.validation, config.test)
    # Datasets are often sorted, by class or by time, so that a tail is unlike the rest. The cut is the same under every
    # train.seed.
    order = permute(_SPLIT_SEED, 0, len(dataset), np.arange(len(dataset), dtype=np.int64))
    return {
        name: Subset(dataset, order[part.start : part.stop].tolist()) for name, part in zip(_NAMES, ranges, strict=True)
    }


def _require_map_style(dataset: Any, origin: str) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise RequestError(
            f"{origin} returned a {type(dataset).__name__}, which is no map-style dataset; return an object with "
            f"__len__ and __getitem__, or a dict of them with the keys train, validation and test"
        )
    # Whatever is wrong with it (a negative number, a text) python itself says best.
    call_own(lambda: len(dataset), what=f"{origin}: the length of its {type(dataset).__name__}")


def _parts(sample: Any) -> tuple[tuple[Any, ...], Any]:
    inputs, target = sample
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), target


def _first_sample(dataset: Any, origin: str, name: str) -> tuple[Sequence[Any], Tensor]:
    original, is_cut = find_original(dataset, 0)
    where = f"{origin}: the first sample of the {name} split" + (
        f" (sample {original} of the dataset)" if is_cut else ""
    )
    sample = call_own(lambda: dataset[0], what=where, is_excused=is_out_of_memory)
    problem = find_problem(sample)
    if problem is not None:
        raise RequestError(f"{where}: {problem}; {_WANTED}")
    inputs, target = _parts(sample)
    return inputs, torch.as_tensor(target)


def find_problem(sample: Any) -> str | None:
    """Why a sample is none that can be trained on; None when nothing is wrong with it."""
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        return f"a sample is {_say(sample)}"
    inputs, target = _parts(sample)
    if not inputs:
        return "its input is an empty tuple"
    for place, part in enumerate(inputs):
        if not _is_numbers(part):
            return f"its input {place} is {_say(part)}" if len(inputs) > 1 else f"its input is {_say(part)}"
    return None if _is_numbers(target) else f"its target is {_say(target)}"


def describe_sample(sample: Any) -> str:
    """``input (3,) float32 and target () int64``, of a sample without a problem."""
    inputs, target = _parts(sample)
    shown = ", ".join(_form(part) for part in inputs)
    return f"input{'s' if len(inputs) > 1 else ''} {shown} and target {_form(target)}"


def _form(part: Any) -> str:
    tensor = torch.as_tensor(part)
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _is_numbers(part: Any) -> bool:
    """True for what torch stacks to one tensor."""
    if isinstance(part, np.ndarray | np.generic):
        return part.dtype.kind in "biufc"
    return isinstance(part, Tensor | bool | int | float | complex)


def _say(value: Any) -> str:
    """What a value is, as far as it helps to find it."""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(repr(key) for key in list(value)[:8]) or 'none'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(type(item).__name__ for item in value[:8])}"
    return f"a {type(value).__name__}"


def _describe(dataset: Any, inputs: Sequence[Any], target: Tensor) -> DataSpec:
    first = torch.as_tensor(inputs[0])
    is_tokens = not first.is_floating_point() and first.ndim == 1
    named = getattr(dataset, "classes", None)
    classes = len(named) if isinstance(named, Sequence) else named
    return DataSpec(
        kind="own",
        vocab=getattr(dataset, "vocab", None),
        sequence=len(first) if is_tokens else None,
        features=None if is_tokens else tuple(first.shape),
        classes=classes,
        outputs=target.numel() if target.is_floating_point() else None,
        tokens_per_sample=len(first) if is_tokens else 1,
    )
