"""How far what a run reads now is from what it read first: the population stability index of inputs, the shift of the loss.

The first window of samples is cut at its own deciles; the shares of the recent window in these bins are compared with those of
the first: PSI = sum((q - p) log(q / p)), the symmetric divergence of two histograms. Two windows of n samples of the same data
have about 2 (bins - 1) / n of it by chance.
"""

import json
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BINS = 10
_MOST_COLUMNS = 64
"""Inputs with more numbers than this count as one: their mean."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The first window: where its bins are cut, and what share of it is in each."""

    names: tuple[str, ...]
    edges: NDArray[np.float64]  # (columns, bins - 1)
    shares: NDArray[np.float64]  # (columns, bins)

    def as_text(self) -> str:
        """As JSON."""
        return json.dumps({"names": self.names, "edges": self.edges.tolist(), "shares": self.shares.tolist()})

    @classmethod
    def from_text(cls, text: str) -> "Reference":
        """What ``as_text`` wrote.

        Raises:
            ValueError: it is something else.
        """
        tree = json.loads(text)
        try:
            names = tuple(map(str, tree["names"]))
            edges, shares = np.array(tree["edges"], dtype=np.float64), np.array(tree["shares"], dtype=np.float64)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is no first window: {error}") from error
        if edges.shape != (len(names), _BINS - 1) or shares.shape != (len(names), _BINS):
            raise ValueError(f"it has {edges.shape} edges and {shares.shape} shares of {len(names)} inputs")
        return cls(names=names, edges=edges, shares=shares)


def columns_of(name: str, values: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
    """An input of some samples as columns of numbers.

    Whole numbers, such as token ids, are one column of all of them; few real numbers a column each; of many their mean.
    """
    if not len(values) or values.dtype.kind not in "iufb":
        return {}
    flat = values.reshape(len(values), -1).astype(np.float64)
    if values.dtype.kind in "iub" and flat.shape[1] > 1:
        return {name: flat.reshape(-1)}
    if flat.shape[1] == 1:
        return {name: flat[:, 0]}
    if flat.shape[1] > _MOST_COLUMNS:
        return {f"{name} (mean)": flat.mean(axis=1)}
    return {f"{name}[{place}]": flat[:, place] for place in range(flat.shape[1])}


def take_reference(columns: dict[str, NDArray[np.float64]]) -> Reference:
    """Cut a window at its deciles."""
    at = np.arange(1, _BINS) / _BINS
    names = tuple(columns)
    edges = np.stack([np.quantile(columns[name][np.isfinite(columns[name])], at) for name in names])
    shares = np.stack([_shares(columns[name], own) for name, own in zip(names, edges, strict=True)])
    return Reference(names=names, edges=edges, shares=shares)


def _shares(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    # A value on an edge is above it; so values that are often the same have a bin of their own.
    counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1)
    # Half a sample more in each bin, so that an empty one has a logarithm.
    smooth = counts + 0.5
    return np.asarray(smooth / smooth.sum(), dtype=np.float64)


def stability(reference: Reference, columns: dict[str, NDArray[np.float64]]) -> tuple[float, str]:
    """The largest population stability index of an input, and which it is."""
    worst, where = 0.0, ""
    for name, edges, before in zip(reference.names, reference.edges, reference.shares, strict=True):
        if name not in columns:
            continue
        now = _shares(columns[name], edges)
        found = float(((now - before) * np.log(now / before)).sum())
        if found > worst or not where:
            worst, where = found, name
    return worst, where


class LossWindow:
    """The mean and the spread of recent losses, against those at some earlier moment."""

    def __init__(self, length: int = 64) -> None:
        self._recent: deque[float] = deque(maxlen=length)
        self._marked: tuple[float, float] | None = None

    def add(self, loss: float) -> None:
        """The loss of one more step."""
        if math.isfinite(loss):
            self._recent.append(loss)

    def mark(self) -> None:
        """Compare with the losses of now from here on."""
        if self._recent:
            self._marked = (float(np.mean(self._recent)), float(np.std(self._recent)))

    def shift(self) -> float:
        """The mean of recent losses less the marked one, in standard deviations of the marked ones; 0 before a mark."""
        if self._marked is None or not self._recent:
            return 0.0
        mean, spread = self._marked
        return (float(np.mean(self._recent)) - mean) / max(spread, 1e-12 + 1e-6 * abs(mean))
