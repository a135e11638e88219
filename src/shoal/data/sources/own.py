"""The user's own map-style dataset: described by its first sample, stacked by torch's rule or the user's ``collate_fn``.

A dataset's item is ``(inputs, targets)``, both of any form, or one dict (``data/batches/collate.py``). Whole-number targets
of -100 count for nothing. What a shipped model must know and a sample cannot say is read from attributes of the dataset:
``classes`` (a number or the list of names) and ``vocab``. A function that returns ``Splits`` of its own sources is taken at
its word.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, Subset

from shoal.core.errors import RequestError, RunError
from shoal.core.functions import call_own, load_function
from shoal.data.batches.collate import WANTED, Collate, Collator, counted_weight, describe_sample, find_problem
from shoal.data.batches.packing import PackedSource
from shoal.data.batches.padding import PadCollate
from shoal.data.batchform import is_same_form, leaf_paths
from shoal.data.config import OwnDataConfig, load_build, load_collate
from shoal.data.options import LoaderOptions
from shoal.data.order import permute, split_positions
from shoal.data.source import Items, SampleIds, Source, Splits
from shoal.data.sources.heldout import hold_out_first
from shoal.data.sources.iterable import IterableSource, first_samples, is_iterable_only
from shoal.data.spec import DataSpec
from shoal.telemetry.memory import is_out_of_memory
from shoal.telemetry.rngstate import keeping_draws, seeded

_NAMES = ("train", "validation", "test")
_SPLIT_SEED = 0


class DatasetSource:
    """A map-style dataset as a source."""

    def __init__(
        self,
        dataset: Any,
        *,
        uniform_weight: int | None,
        name: str = "",
        collate_fn: Collate | None = None,
        options: LoaderOptions | None = None,
    ) -> None:
        self._dataset = dataset
        self._collator = Collator(uniform_weight=uniform_weight, collate_fn=collate_fn)
        self._split = f" of the {name} split" if name else ""
        self.options = options or LoaderOptions()
        """How it wants to be loaded."""

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def uniform_weight(self) -> int | None:
        """1 per sample; None for whole-number targets, some of which may be ignored."""
        return self._collator.uniform_weight

    @property
    def lengths(self) -> Sequence[int] | None:
        """The length of every sample, where the dataset says it."""
        return getattr(self._dataset, "lengths", None)

    @property
    def collator(self) -> Collator:
        """Makes batches of its samples; what is found out of the model's loss is set there."""
        return self._collator

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
        return self._collator.collate(samples, lambda place: self.name_sample(numbers[place]))

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
        RequestError: the function cannot be imported, or what it returns is no map-style dataset that can be trained on.
    """
    origin = f"data.build = {config.build!r}"
    with seeded(seed):
        built = call_own(load_build(config), what=origin, is_excused=is_out_of_memory)
    if isinstance(built, Splits):
        return built
    collate_fn = PadCollate() if config.pad else load_collate(config)
    if config.hold_out is not None:
        built = _hold_out(built, config.hold_out, origin, seed)
    streams = {
        name: built[name]
        for name in (_NAMES[1:] if isinstance(built, Mapping) else ())
        if is_iterable_only(built.get(name, ()))
    }
    found = _splits_of({**built, **dict.fromkeys(streams, ())} if streams else built, config, origin, collate_fn, seed)
    held_out: dict[str, Source] = {
        name: stream_splits(stream, LoaderOptions(collate_fn=collate_fn), seed=seed).train
        for name, stream in streams.items()
    }
    return replace(
        found, validation=held_out.get("validation", found.validation), test=held_out.get("test", found.test)
    )


def _hold_out(built: Any, count: int, origin: str, seed: int) -> dict[str, Any]:
    """What was built with the first samples of its stream as the validation split."""
    named = dict(built) if isinstance(built, Mapping) else {"train": built}
    if not is_iterable_only(named.get("train", ())):
        raise RequestError(
            f"data.hold_out {count} is for an iterable dataset, and {origin} returned a map-style one; use data.validation"
        )
    if "validation" in named:
        raise RequestError(
            f"data.hold_out {count}, and {origin} returned a validation split too; leave one of the two out"
        )
    held_out, train = hold_out_first(named["train"], count, seed=seed)
    return {**named, "train": train, "validation": held_out}


def _splits_of(built: Any, config: OwnDataConfig, origin: str, collate_fn: Collate | None, seed: int) -> Splits:
    """The splits of what the user's function returned, but for held-out streams."""
    options = LoaderOptions(
        drop_last=config.drop_last,
        shuffle=None if config.shuffle else False,
        collate_fn=collate_fn,
    )
    named: Mapping[str, Any] = built if isinstance(built, Mapping) else {"train": built}
    if is_iterable_only(named.get("train", ())):
        if config.pack is not None or config.sampler is not None or config.order != "full" or config.replay:
            raise RequestError(
                f"{origin} returned an iterable dataset, which data.pack, data.sampler, data.order and data.replay cannot index; "
                "leave them out"
            )
        held_out = _named_parts({**named, "train": ()}, origin)
        streamed = stream_splits(named["train"], replace(options, shuffle=None), seed=seed)
        sources = {
            name: DatasetSource(
                held_out[name], uniform_weight=streamed.train.uniform_weight, name=name, collate_fn=collate_fn
            )
            for name in _NAMES[1:]
        }
        return replace(streamed, validation=sources["validation"], test=sources["test"])
    parts = _named_parts(built, origin) if isinstance(built, Mapping) else _cut(built, config, origin)
    described = named["train"]
    if config.pack is not None:
        return _pack_parts(parts, described, config.pack, options)
    found = _describe_parts(parts, described, origin, collate_fn)
    assert isinstance(found.train, DatasetSource)
    found.train.options = _with_sampler(options, config, parts["train"])
    return found


def _with_sampler(options: LoaderOptions, config: OwnDataConfig, train: Any) -> LoaderOptions:
    """The options with what the recipe's ``data.sampler`` returns for a training set."""
    if config.sampler is None:
        return options
    function = load_function(config.sampler, key="data.sampler")
    given = call_own(lambda: function(train), what=f"data.sampler = {config.sampler!r}", is_excused=is_out_of_memory)
    if isinstance(given, Sampler):
        return replace(options, sampler=given)
    weights = np.asarray(given)
    if weights.ndim != 1 or weights.dtype.kind not in "iuf":
        raise RequestError(
            f"data.sampler = {config.sampler!r} returned a {type(given).__name__}; return a torch Sampler, or one weight for "
            "each sample"
        )
    return replace(options, weights=weights.tolist())


def _pack_parts(parts: Mapping[str, Any], described: Any, sequence: int, options: LoaderOptions) -> Splits:
    """Splits of documents, each packed by itself."""
    if not len(parts["train"]):
        raise RequestError("the training set has 0 documents; the data is empty")
    packed = {
        name: PackedSource(part, sequence) if len(part) else DatasetSource((), uniform_weight=None)
        for name, part in parts.items()
    }
    train = packed["train"]
    assert isinstance(train, PackedSource)
    train.options = options
    spec = describe(described, train.collate([0]))
    return Splits(train=train, validation=packed["validation"], test=packed["test"], spec=spec)


def stream_splits(dataset: Any, options: LoaderOptions, *, seed: int) -> Splits:
    """An iterable dataset as the training split, described by its first sample.

    Args:
        dataset: iterable.
        options: how it is loaded.
        seed: of the run.

    Raises:
        RequestError: it is empty, or the options ask for what only a map-style dataset can do.
    """
    name = type(dataset).__name__
    asked = [key for key in ("sampler", "batch_sampler", "weights", "max_tokens") if getattr(options, key) is not None]
    if options.shuffle:
        asked.append("shuffle")
    if options.order != "full" or options.replay:
        asked.append("order" if options.order != "full" else "replay")
    if asked:
        raise RequestError(
            f"{name} is iterable, so its samples come in its own order, and {asked[0]} asks for another; leave {asked[0]} out "
            "and do it inside the dataset, or give a map-style dataset (__len__ and __getitem__)"
        )
    if isinstance(dataset, Iterator) and type(dataset).__module__ in ("builtins", "itertools"):
        raise RequestError(
            f"the dataset is a {name}, which can be gone through once, and looking at its first sample takes it out; give an "
            "object whose __iter__ begins anew, such as a torch IterableDataset"
        )
    first = first_samples(dataset, 1, seed=seed)
    if not first:
        raise RequestError(f"{name} yields no sample; the training data is empty")
    collator = Collator(uniform_weight=1, collate_fn=options.collate_fn)
    try:
        items = collator.collate(first)
    except RunError as error:
        raise RequestError(f"the first sample of {name}: {error}") from error
    collator.uniform_weight = counted_weight(items, collator)
    source = IterableSource(dataset, collator=collator, options=options, seed=seed)
    nothing = DatasetSource((), uniform_weight=None)
    return Splits(train=source, validation=nothing, test=nothing, spec=describe(dataset, items))


def from_datasets(
    train: Any, validation: Any = (), test: Any = (), *, collate_fn: Callable[[list[Any]], Any] | None = None
) -> Splits:
    """The splits of map-style datasets that a script holds in its hands; a split that is left out has no sample.

    Args:
        train: items are ``(inputs, targets)`` or one dict.
        validation: held out.
        test: held out.
        collate_fn: makes a batch of a list of samples; torch's rule when left out.

    Raises:
        RequestError: one of them is no map-style dataset of such items, or there is nothing to train on.
    """
    parts = {"train": train, "validation": validation, "test": test}
    for name, part in parts.items():
        _require_map_style(part, f"from_datasets({name}=...)", is_given=True)
    return _describe_parts(parts, train, "from_datasets(train=...)", collate_fn)


def from_dataset(dataset: Any, *, collate_fn: Collate | None = None) -> Splits:
    """The splits of one map-style dataset that a loader or an evaluation was given.

    Raises:
        RequestError: it is no such dataset, or has no sample.
    """
    _require_map_style(dataset, "the dataset", is_given=True)
    if not len(dataset):
        raise RequestError(f"the dataset, a {type(dataset).__name__}, has 0 samples; give it some")
    return _describe_parts({"train": dataset, "validation": (), "test": ()}, dataset, "the dataset", collate_fn)


def _describe_parts(parts: Mapping[str, Any], described: Any, origin: str, collate_fn: Collate | None = None) -> Splits:
    first = parts["train"]
    if not len(first):
        raise RequestError(f"{origin} returned a training set of 0 samples; the data is empty")

    def source_of(name: str, uniform_weight: int | None) -> DatasetSource:
        return DatasetSource(parts[name], uniform_weight=uniform_weight, name=name, collate_fn=collate_fn)

    looked = source_of("train", 1)
    items = _first_items(looked, first, origin, "train")
    # Of the test split training reads nothing, and it may well have no targets.
    with keeping_draws():
        if len(parts["validation"]):
            held_out = _first_items(source_of("validation", 1), parts["validation"], origin, "validation")
            if not is_same_form(held_out.form, items.form) or len(held_out.inputs) != len(items.inputs):
                raise RequestError(
                    f"{origin}: the first sample of the validation split has another form than that of the train split: "
                    f"{describe_sample(parts['validation'][0])}, and {describe_sample(first[0])}; give both one form"
                )
    uniform_weight = counted_weight(items, looked.collator)
    sources = {name: source_of(name, uniform_weight) for name in parts}
    spec = describe(described, items)
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


def _require_map_style(dataset: Any, origin: str, *, is_given: bool = False) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        came, fix = ("is", "give") if is_given else ("returned", "return")
        parts = "" if is_given else ", or a dict of them with the keys train, validation and test"
        raise RequestError(
            f"{origin} {came} a {type(dataset).__name__}, which is no map-style dataset; {fix} an object with __len__ and "
            f"__getitem__{parts}"
        )
    # Whatever is wrong with it (a negative number, a text) python itself says best.
    call_own(lambda: len(dataset), what=f"{origin}: the length of its {type(dataset).__name__}")


def _first_items(source: DatasetSource, dataset: Any, origin: str, name: str) -> Items:
    """The first sample of a split as a batch of one."""
    original, is_cut = find_original(dataset, 0)
    where = f"{origin}: the first sample of the {name} split" + (
        f" (sample {original} of the dataset)" if is_cut else ""
    )
    sample = call_own(lambda: dataset[0], what=where, is_excused=is_out_of_memory)
    problem = find_problem(sample) if source.collator.collate_fn is None else None
    if problem is not None:
        raise RequestError(f"{where}: {problem}; {WANTED}")
    try:
        return source.collator.collate([sample])
    except RunError as error:
        raise RequestError(f"{where}: {error}") from error


def describe(dataset: Any, items: Items) -> DataSpec:
    """The shapes of a first sample, without the dim of the batch."""
    first = _leading(items)
    is_tokens = not first.is_floating_point() and first.ndim == 1
    named = getattr(dataset, "classes", None)
    classes = len(named) if isinstance(named, Sequence) else named
    target = items.targets[0] if isinstance(items.targets, Tensor) and items.targets.ndim else None
    return DataSpec(
        kind="own",
        vocab=getattr(dataset, "vocab", None),
        sequence=len(first) if is_tokens else None,
        features=None if is_tokens else tuple(first.shape),
        classes=classes,
        outputs=target.numel() if target is not None and target.is_floating_point() else None,
        tokens_per_sample=len(first) if is_tokens else 1,
        has_one_target=isinstance(items.targets, Tensor),
    )


def _leading(items: Items) -> Tensor:
    """The first input of a sample: the tokens of a dict that has ``input_ids``, else what comes first."""
    place = 0
    if items.form is not None:
        place = next((place for path, place in leaf_paths(items.form.inputs) if path == "input_ids"), 0)
    tensor = items.inputs[place]
    return tensor[0] if tensor.ndim else tensor
