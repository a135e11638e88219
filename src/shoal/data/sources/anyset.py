"""Any dataset that a script holds in its hands, map-style or iterable, as splits."""

from typing import Any

from shoal.core.errors import RequestError
from shoal.data.collate import Collator, counted_weight
from shoal.data.options import LoaderOptions
from shoal.data.source import Source, Splits
from shoal.data.sources.iterable import IterableSource, first_samples, is_iterable_only
from shoal.data.sources.own import DatasetSource, describe, from_datasets


def splits_of(dataset: Any, options: LoaderOptions, *, seed: int = 0) -> Splits:
    """A dataset as the training split, described by its first sample.

    Args:
        dataset: map-style or iterable; a source or splits are taken as they are.
        options: how it is loaded.
        seed: of the run.

    Raises:
        RequestError: it is no dataset, or the options do not fit it.
    """
    if isinstance(dataset, Splits):
        return dataset
    if is_iterable_only(dataset) and not hasattr(dataset, "collate"):
        return stream_splits(dataset, options, seed=seed)
    if hasattr(dataset, "collate") and hasattr(dataset, "uniform_weight"):
        source: Source = dataset
        nothing = DatasetSource((), uniform_weight=None)
        spec = describe(dataset, source.collate([0]))
        return Splits(train=source, validation=nothing, test=nothing, spec=spec)
    found = from_datasets(train=dataset, collate_fn=options.collate_fn)
    assert isinstance(found.train, DatasetSource)
    found.train.options = options
    return found


def stream_splits(dataset: Any, options: LoaderOptions, *, seed: int) -> Splits:
    """An iterable dataset as the training split.

    Raises:
        RequestError: it is empty, or the options ask for what only a map-style dataset can do.
    """
    name = type(dataset).__name__
    asked = [key for key in ("sampler", "batch_sampler", "weights", "max_tokens") if getattr(options, key) is not None]
    if options.shuffle:
        asked.append("shuffle")
    if asked:
        raise RequestError(
            f"{name} is iterable, so its samples come in its own order, and {asked[0]} asks for another; leave {asked[0]} out "
            "and do it inside the dataset, or give a map-style dataset (__len__ and __getitem__)"
        )
    first = first_samples(dataset, 1, seed=seed)
    if not first:
        raise RequestError(f"{name} yields no sample; the training data is empty")
    collator = Collator(uniform_weight=1, collate_fn=options.collate_fn)
    items = collator.collate(first)
    source = IterableSource(
        dataset,
        collator=Collator(uniform_weight=counted_weight(items), collate_fn=options.collate_fn),
        options=options,
        seed=seed,
    )
    nothing = DatasetSource((), uniform_weight=None)
    return Splits(train=source, validation=nothing, test=nothing, spec=describe(dataset, items))
