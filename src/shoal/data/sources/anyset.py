"""Any dataset that a script holds in its hands, map-style or iterable, as splits."""

from typing import Any

from shoal.data.options import LoaderOptions
from shoal.data.source import Source, Splits
from shoal.data.sources.iterable import is_iterable_only
from shoal.data.sources.own import DatasetSource, describe, from_dataset, stream_splits


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
    found = from_dataset(dataset, collate_fn=options.collate_fn)
    assert isinstance(found.train, DatasetSource)
    found.train.options = options
    return found
