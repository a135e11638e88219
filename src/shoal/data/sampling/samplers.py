"""Which samples each step takes, for any number of replicas: the order of an epoch, and where it is cut into global batches.

Every process asks the same question and gets the same answer: an order is drawn by (seed, epoch) and never by who asks. A torch
``Sampler`` is gone through whole on every process, under a seed of the epoch. ``DistributedSampler`` is not used: Shoal deals the
samples of a global batch out itself, exactly once each and for any number of replicas.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from shoal.core.errors import RequestError
from shoal.core.functions import call_own
from shoal.core.seeding import derive_key
from shoal.data.options import LoaderOptions
from shoal.data.order import Ids, Position, permute, uniform
from shoal.data.sampling.window import Windowed, check_blocks, even_blocks
from shoal.telemetry.rngstate import seeded

_AHEAD = 4096


class Sampling(Protocol):
    """The order of the samples of every epoch."""

    def count(self, epoch: int) -> int:
        """Samples of an epoch."""

    def ids(self, epoch: int, taken: slice) -> Ids:
        """The ids of the samples at these positions of an epoch."""


class OnceEach(Sampling, Protocol):
    """An order that has every sample once in an epoch, and is known at any position by itself."""

    def at(self, epoch: int, positions: Ids) -> Ids:
        """The samples at any positions of an epoch, in any order."""


class Shuffled:
    """Another order in each epoch, worked out many positions at a time: for a few ids numpy costs as much as for thousands."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self._seed = seed
        self._num_samples = num_samples
        self._epoch = -1
        self._start = 0
        self._ids: Ids = np.empty(0, dtype=np.int64)

    def count(self, epoch: int) -> int:
        """Every sample once."""
        return self._num_samples

    def ids(self, epoch: int, taken: slice) -> Ids:
        """See ``Sampling``."""
        is_known = epoch == self._epoch and self._start <= taken.start and taken.stop <= self._start + len(self._ids)
        if not is_known:
            stop = min(max(taken.stop, taken.start + _AHEAD), self._num_samples)
            positions = np.arange(taken.start, stop, dtype=np.int64)
            self._epoch, self._start = epoch, taken.start
            self._ids = permute(self._seed, epoch, self._num_samples, positions)
        return self._ids[taken.start - self._start : taken.stop - self._start]

    def at(self, epoch: int, positions: Ids) -> Ids:
        """See ``OnceEach``."""
        return permute(self._seed, epoch, self._num_samples, positions)


@dataclass(frozen=True)
class Sequential:
    """The samples as they lie."""

    num_samples: int

    def count(self, epoch: int) -> int:
        """Every sample once."""
        return self.num_samples

    def ids(self, epoch: int, taken: slice) -> Ids:
        """See ``Sampling``."""
        return np.arange(taken.start, taken.stop, dtype=np.int64)

    def at(self, epoch: int, positions: Ids) -> Ids:
        """See ``OnceEach``."""
        return positions


class Weighted:
    """Samples drawn with weights. Each draw has its own key, so any position of any epoch is known at once.

    Raises:
        RequestError: the weights are none.
    """

    def __init__(
        self, weights: Any, *, seed: int, num_data: int, num_samples: int | None = None, replacement: bool = True
    ) -> None:
        try:
            found = np.asarray(weights, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError) as error:
            raise RequestError(f"weights of samples must be numbers, one for each sample ({error})") from error
        num_samples = num_data if num_samples is None else num_samples
        if len(found) != num_data:
            raise RequestError(
                f"there are {len(found)} weights and {num_data} samples; give one weight for each sample"
            )
        if not np.isfinite(found).all() or (found < 0).any() or not found.any():
            raise RequestError("weights of samples must be finite, not negative and not all 0")
        drawable = int(np.count_nonzero(found))
        if not replacement and num_samples > drawable:
            raise RequestError(
                f"{num_samples} samples are drawn without replacement and {drawable} have a weight above 0; lower num_samples, "
                "or set replacement=True"
            )
        self._weights = found
        self._shares: NDArray[np.float64] = np.cumsum(found) / np.sum(found)
        self._seed, self._num_samples, self._replacement = seed, num_samples, replacement
        self._drawn: tuple[int, Ids] | None = None

    def count(self, epoch: int) -> int:
        """The draws of an epoch."""
        return self._num_samples

    def ids(self, epoch: int, taken: slice) -> Ids:
        """See ``Sampling``."""
        if not self._replacement:
            return self._without_replacement(epoch)[taken]
        drawn = uniform(np.arange(taken.start, taken.stop, dtype=np.int64), "weights", self._seed, epoch)
        # The last share may be a bit below 1; samples of weight 0 have an empty share, which nothing falls into.
        last = int(np.flatnonzero(self._weights)[-1])
        return np.minimum(np.searchsorted(self._shares, drawn, side="right"), last).astype(np.int64)

    def _without_replacement(self, epoch: int) -> Ids:
        """The samples with the smallest of exponentially distributed numbers (Efraimidis and Spirakis, IPL 97, 2006)."""
        if self._drawn is None or self._drawn[0] != epoch:
            some = np.flatnonzero(self._weights).astype(np.int64)
            drawn = uniform(some, "weights", self._seed, epoch)
            order = np.argsort(-np.log1p(-drawn) / self._weights[some], kind="stable")
            self._drawn = epoch, some[order[: self._num_samples]]
        return self._drawn[1]


class Sampled:
    """What a sampler of the user's own yields, gone through under a seed of the epoch.

    Args:
        sampler: an iterable of indices, or of lists of them where each list is a global batch.
        seed: of the run.
        num_data: samples of the dataset.
        is_batches: it yields lists.
    """

    def __init__(self, sampler: Iterable[Any], *, seed: int, num_data: int, is_batches: bool = False) -> None:
        self._sampler = sampler
        self._seed, self._num_data, self.is_batches = seed, num_data, is_batches
        self._epoch = -1
        self._ids: Ids = np.empty(0, dtype=np.int64)
        self._stops: Ids = np.empty(0, dtype=np.int64)

    def count(self, epoch: int) -> int:
        """What the sampler yields in this epoch."""
        return len(self._read(epoch))

    def ids(self, epoch: int, taken: slice) -> Ids:
        """See ``Sampling``."""
        return self._read(epoch)[taken]

    def num_batches(self, epoch: int) -> int:
        """Batches of an epoch; of a sampler of batches."""
        self._read(epoch)
        return len(self._stops)

    def stop_after(self, epoch: int, offset: int) -> int:
        """Where the batch ends that begins at this offset; of a sampler of batches."""
        self._read(epoch)
        return int(self._stops[np.searchsorted(self._stops, offset, side="right")])

    def _read(self, epoch: int) -> Ids:
        if epoch == self._epoch:
            return self._ids
        key = derive_key("sampler", self._seed, epoch)
        named = f"the sampler {type(self._sampler).__name__}"
        inner: Any
        for inner in (self._sampler, getattr(self._sampler, "sampler", None)):
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)
            generator = getattr(inner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(key)
        with nullcontext() if draws_alone(self._sampler) else seeded(key):
            found: list[Any] = call_own(lambda: list(self._sampler), what=named)
        try:
            batches = [list(batch) for batch in found] if self.is_batches else [found]
            self._ids = np.asarray([int(one) for batch in batches for one in batch], dtype=np.int64)
        except (TypeError, ValueError) as error:
            wanted = "lists of indices" if self.is_batches else "indices of samples"
            raise RequestError(
                f"{named} yields {type(found[0]).__name__}, and must yield {wanted}; sampler= is for one that yields indices, "
                "batch_sampler= for one that yields lists of them"
            ) from error
        self._stops = np.cumsum([len(batch) for batch in batches if len(batch)], dtype=np.int64)
        if not len(self._ids):
            raise RequestError(f"{named} yields nothing in epoch {epoch}; the training data would be empty")
        if self._ids.min() < 0 or self._ids.max() >= self._num_data:
            raise RequestError(
                f"{named} yields indices from {self._ids.min()} to {self._ids.max()} and the dataset has {self._num_data} samples"
            )
        self._epoch = epoch
        return self._ids


def draws_alone(sampler: Any) -> bool:
    """True for a sampler that leaves the global generators alone: a thread may go through it beside a model that draws."""
    return isinstance(sampler, Sequence) or isinstance(getattr(sampler, "generator", None), torch.Generator)


def build_sampling(options: LoaderOptions, *, num_samples: int, seed: int, blocks: Ids | None = None) -> Sampling:
    """The order that options ask for.

    Args:
        options: of the loader.
        num_samples: of the dataset.
        seed: of the run.
        blocks: the first sample of each block of the dataset, and ``num_samples``; even ones when left out.

    Raises:
        RequestError: a sampler that deals samples out to processes itself, or weights that are none.
    """
    sampler = options.sampler
    if options.weights is not None:
        return Weighted(
            options.weights,
            seed=seed,
            num_data=num_samples,
            num_samples=options.num_samples,
            replacement=options.replacement,
        )
    if options.batch_sampler is not None:
        return Sampled(options.batch_sampler, seed=seed, num_data=num_samples, is_batches=True)
    if sampler is None and options.window is not None and num_samples:
        starts = even_blocks(num_samples) if blocks is None else check_blocks(blocks, num_samples)
        return Windowed(seed, starts, options.window)
    if sampler is None and options.order == "time":
        return Sequential(num_samples)
    if sampler is None:
        return Sequential(num_samples) if options.shuffle is False else Shuffled(seed, num_samples)
    if isinstance(sampler, DistributedSampler):
        raise RequestError(
            "the sampler is a DistributedSampler, which keeps a part of the dataset for each process, and Shoal deals samples "
            "out itself; leave it out (shuffle=True does the same), or give the sampler of the whole dataset"
        )
    if isinstance(sampler, WeightedRandomSampler):
        weights, count = sampler.weights, sampler.num_samples
        return Weighted(
            weights, seed=seed, num_data=num_samples, num_samples=count, replacement=bool(sampler.replacement)
        )
    if type(sampler) is SequentialSampler and len(sampler) == num_samples:
        return Sequential(num_samples)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == num_samples:
        return Shuffled(seed, num_samples)
    return Sampled(sampler, seed=seed, num_data=num_samples)


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """Global batches: ``take`` gives the samples of the next step, and where the data is after it."""

    sampling: Sampling
    global_batch: int
    """Samples of a step; the most of one where ``max_tokens`` cuts it."""
    drop_last: bool = False
    max_tokens: int | None = None
    """Tokens of a step at most, all replicas together and without padding: so that every plan takes the same steps."""
    length_of: Callable[[int], int] | None = None
    """The length of a sample."""

    def take(self, position: Position) -> tuple[Ids, Position, Position]:
        """The samples of the next step, the position that they begin at, and the one after them.

        Raises:
            RequestError: no batch is long enough to be kept.
        """
        for _ in range(3):
            count = self.sampling.count(position.epoch)
            stop = self._stop(position, count)
            if position.offset < count and not self._is_left_out(stop - position.offset):
                ids = self.sampling.ids(position.epoch, slice(position.offset, stop))
                after = Position(epoch=position.epoch, offset=stop, version=position.version)
                return ids, position, self._settle(after, count)
            position = Position(epoch=position.epoch + 1, version=position.version)
        raise RequestError(
            f"drop_last leaves out every batch: an epoch has {count} samples and a batch takes {self.global_batch}; set "
            f"global_batch to {max(1, count)} or less, or drop_last=False"
        )

    def steps_per_epoch(self, epoch: int = 0) -> int | None:
        """Steps of an epoch; None where the samples' lengths decide."""
        if self.max_tokens is not None:
            return None
        count = self.sampling.count(epoch)
        if isinstance(self.sampling, Sampled) and self.sampling.is_batches:
            return self.sampling.num_batches(epoch)
        return count // self.global_batch if self.drop_last else math.ceil(count / self.global_batch)

    def _settle(self, after: Position, count: int) -> Position:
        """The beginning of the next epoch, where nothing of this one is left to take."""
        left = count - after.offset
        is_over = left <= 0 or self._is_left_out(left)
        return Position(epoch=after.epoch + 1, version=after.version) if is_over else after

    def _is_left_out(self, num_samples: int) -> bool:
        return self.drop_last and self.max_tokens is None and num_samples < self.global_batch

    def _stop(self, position: Position, count: int) -> int:
        if isinstance(self.sampling, Sampled) and self.sampling.is_batches:
            return self.sampling.stop_after(position.epoch, position.offset) if position.offset < count else count
        stop = min(position.offset + self.global_batch, count)
        if self.max_tokens is None or self.length_of is None:
            return stop
        ids = self.sampling.ids(position.epoch, slice(position.offset, max(position.offset, stop)))
        return position.offset + count_fitting((self.length_of(int(one)) for one in ids), self.max_tokens)


def count_fitting(lengths: Iterable[int], max_tokens: int) -> int:
    """How many of the next samples go into one step: those that together have at most so many tokens; at least one."""
    total = count = 0
    for length in lengths:
        total += length
        if count and total > max_tokens:
            break
        count += 1
    return count
