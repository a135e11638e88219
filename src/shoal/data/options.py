"""What a user may say of loading, under the names of torch's ``DataLoader``. No torch.

Two arguments of torch's have no place here: ``batch_size``, because ``global_batch`` is what all replicas take in a step, and
``generator``, because everything is drawn by a key of the seed, so that every plan draws the same.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from shoal.core.errors import RequestError
from shoal.data.chosen import Chosen


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How samples are ordered, made to batches and loaded; the defaults are those of a recipe.

    Raises:
        RequestError: two of them contradict each other; names both and the fix.
    """

    shuffle: bool | None = None
    """Another order in every epoch, drawn by the seed. True when left out, except with a sampler and for iterable datasets."""
    order: Literal["full", "window", "time"] = "full"
    """How an epoch is shuffled: all samples (full), the samples of ``window`` blocks of the data, window after window, so that
    each block is fetched once (window), or not at all, as the samples lie (time)."""
    window: int | None = None
    """With ``order="window"``: blocks of a window. Five for every sample of a global batch mix well."""
    replay: float = 0.0
    """Share of an epoch's samples that were met before and come again, evenly between the others; these come once each."""
    replay_last: int | None = None
    """With ``replay``: draw from so many samples before; from all that were met when left out."""
    replay_from: Sequence[int | str] | None = None
    """With ``replay``: draw from these samples in the place of the past: numbers of training samples, the first being 0, and
    ranges such as "100:200". One that is named several times is drawn as much more often."""
    drop_last: bool = False
    """Leave out the last batch of an epoch where it is short."""
    sampler: Any = None
    """A torch ``Sampler`` over the whole dataset, or any iterable of its indices: the order of an epoch. Every process goes
    through it under the same seed, and takes its replica's part."""
    batch_sampler: Iterable[Sequence[int]] | None = None
    """Yields the indices of a whole global batch at a time, in the place of ``global_batch``, ``shuffle`` and ``drop_last``."""
    weights: Sequence[float] | None = None
    """How often each sample is drawn beside the others: the samples of an epoch are drawn with these, by the seed."""
    num_samples: int | None = None
    """Samples that an epoch draws with ``weights``; as many as the dataset has when left out."""
    replacement: bool = True
    """With ``weights``: a sample may be drawn several times in an epoch."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; torch's default rule when left out."""
    num_workers: int = 0
    """Loader processes per rank; 0 loads in the rank itself."""
    prefetch_factor: int | None = None
    """Batches loaded ahead (by each loader process, where there are some); two when left out."""
    pin_memory: bool = False
    """Batches in page-locked memory, where there is a GPU to copy them to; without one it changes nothing."""
    persistent_workers: bool = False
    """Taken for the sake of the name: loader processes live as long as the loader, over all epochs."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each loader process with its number, before it reads."""
    timeout: float = 0.0
    """The longest wait for one batch in seconds; 0: five minutes."""
    max_tokens: int | None = None
    """Tokens of a step at most, all replicas together and padding not counted: a step takes the next samples of the order while
    they have no more. ``global_batch`` is then the most samples of a step."""
    lengths: Sequence[int] | None = None
    """With ``max_tokens``: the length of every sample. The dataset's attribute ``lengths`` when left out, else each sample is
    read for the length of its first input."""

    def __post_init__(self) -> None:
        orders = [name for name in ("sampler", "batch_sampler", "weights") if getattr(self, name) is not None]
        if len(orders) > 1:
            raise RequestError(
                f"{orders[0]} and {orders[1]} both say which samples an epoch has; leave one of them out"
            )
        if orders and self.shuffle:
            raise RequestError(
                f"{orders[0]} says the order of samples, and shuffle=True another one; leave one of them out"
            )
        if self.batch_sampler is not None and self.drop_last:
            raise RequestError(
                "batch_sampler says what a batch is, and drop_last leaves short ones out; leave one of them out"
            )
        if self.batch_sampler is not None and self.max_tokens is not None:
            raise RequestError("batch_sampler and max_tokens both say what a batch is; leave one of them out")
        if self.order != "full" and (orders or self.shuffle is False):
            other = orders[0] if orders else "shuffle=False"
            raise RequestError(f"order={self.order!r} and {other} both say the order of samples; leave one of them out")
        if self.replay and orders:
            raise RequestError(
                f"replay is for samples that come once each, and {orders[0]} draws others; leave one of them out"
            )
        if self.replay_last is not None and not self.replay:
            raise RequestError("replay_last is for replay, and replay is 0; leave replay_last out")
        if self.replay_from is not None:
            if not self.replay or self.replay_last is not None:
                other = "replay_last says others" if self.replay else "replay is 0"
                raise RequestError(f"replay_from says what replay draws from, and {other}; leave one of them out")
            try:
                Chosen(self.replay_from)
            except ValueError as error:
                raise RequestError(str(error)) from error
        if not 0 <= self.replay < 1:
            raise RequestError(f"replay is {self.replay:g}, and must be a share of 0 or more and below 1")
        if (self.window is not None) != (self.order == "window"):
            fix = (
                "give window, the blocks that are mixed (five for every sample of a global batch)"
                if self.window is None
                else "leave window out"
            )
            raise RequestError(f"order is {self.order!r} and window is {self.window}; {fix}")
        if self.weights is None and (self.num_samples is not None or not self.replacement):
            raise RequestError(
                "num_samples and replacement are for weights, and there are none; give weights, or a sampler"
            )
        if self.collate_fn is not None and (isinstance(self.collate_fn, type) or not callable(self.collate_fn)):
            shown = self.collate_fn.__name__ if isinstance(self.collate_fn, type) else repr(self.collate_fn)
            fix = f"give one of it: {shown}()" if isinstance(self.collate_fn, type) else "give one of a list of samples"
            raise RequestError(f"collate_fn={shown} is no function; {fix}")
        for name, least in (
            ("num_workers", 0),
            ("prefetch_factor", 0),
            ("timeout", 0),
            ("max_tokens", 1),
            ("num_samples", 1),
            ("window", 1),
            ("replay_last", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Real) or not float(value) >= least):
                raise RequestError(f"{name} is {value!r}, and must be {least} or more")

    @property
    def prefetch(self) -> int:
        """Batches loaded ahead."""
        return 2 if self.prefetch_factor is None else self.prefetch_factor

    @property
    def deadline_s(self) -> float:
        """The longest wait for one batch."""
        return self.timeout or 300.0
