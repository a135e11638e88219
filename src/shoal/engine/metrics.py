"""Metrics of a held-out split, reduced over replicas without losing a bit: a sample counts once, and the sums are exact.

    class Errors(Metric):
        name, mode = "errors", "min"

        def measure(self, output, targets):
            return torch.tensor([(output.argmax(-1) != targets).sum(), len(targets)])      # counts of this batch

        def finish(self, sums):
            return sums[0] / sums[1]

What ``measure`` returns in one dim is added up over batches: meant for counts, whose sums are exact in float64. In two dims it
has a row per sample, and the rows are added up with one rounding at the end (``math.fsum``), so that fractions too have the same
sum however samples are shared out. A function of all outputs and all targets of the split is a ``GatheredMetric``.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.carry import sum_rounds
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.errors import RequestError, RunError, did_you_mean
from shoal.core.functions import call_own, load_function
from shoal.engine.callback_config import SHIPPED, Mode, is_own, is_shipped, metric_name
from shoal.models.losses import IGNORED, flatten_scores, scores_of

_COUNTS, _ROWS = 1, 2


class Metric:
    """A number of a split that is made of sums over its samples. Override ``measure`` and ``finish``."""

    name: str = "metric"
    """By which it is known in results and in events."""
    mode: Mode = "max"
    """Whether a larger value is better, or a smaller one."""

    def measure(self, output: Any, targets: Any) -> Tensor:
        """The summands of one batch: counts in one dim, or in two dims a row per sample; of the same length each time.

        Args:
            output: of the model, on its device.
            targets: as the loss gets them. A target of -100 is left out of the loss, and should be here.
        """
        raise NotImplementedError

    def finish(self, sums: Sequence[float]) -> float:
        """The metric, from the sums over the whole split."""
        raise NotImplementedError


class GatheredMetric(Metric):
    """A function of all outputs and all targets of a split, in the order of its samples, such as a rank correlation.

    They are gathered on every rank, whole: this is for outputs that are small. The first rank computes, and tells the others.

    Args:
        function: of two tensors whose first dim is the samples; returns a number.
        name: by which the metric is known.
        mode: what is better.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Any], *, name: str, mode: Mode = "max") -> None:
        self.function, self.name, self.mode = function, name, mode


class _Accuracy(Metric):
    """The share of targets whose choice is among the ``k`` with the highest scores."""

    def __init__(self, name: str, k: int) -> None:
        self.name, self.k = name, k

    def measure(self, output: Any, targets: Any) -> Tensor:
        scores, flat, counted = _choices(self.name, output, targets)
        if self.k > scores.shape[-1]:
            raise RunError(f"metric {self.name!r}: the model has {scores.shape[-1]} choices; take a smaller number")
        # Not topk, whose choice among equal scores is open: the number of choices above the target's own, earlier ones first.
        own = scores.gather(1, flat.clamp(min=0).unsqueeze(1))
        places = torch.arange(scores.shape[-1], device=scores.device)
        ahead = (scores > own) | ((scores == own) & (places < flat.unsqueeze(1)))
        hits = (ahead.sum(dim=1) < self.k) & counted
        return torch.stack([hits.sum(), counted.sum()])

    def finish(self, sums: Sequence[float]) -> float:
        return sums[0] / max(1.0, sums[1])


class _Perplexity(Metric):
    """The exponential of the mean cross entropy per target."""

    name, mode = "perplexity", "min"

    def measure(self, output: Any, targets: Any) -> Tensor:
        scores, flat, counted = _choices(self.name, output, targets)
        each = F.cross_entropy(scores.float(), flat, ignore_index=IGNORED, reduction="none").double()
        return torch.stack([_by_sample(each, targets), _by_sample(counted.double(), targets)], dim=1)

    def finish(self, sums: Sequence[float]) -> float:
        mean = sums[0] / max(1.0, sums[1])
        return math.exp(mean) if mean < 700 else math.inf


class _F1(Metric):
    """The mean over classes of the harmonic mean of precision and recall; classes that nobody named are left out."""

    name, mode = "f1", "max"

    def measure(self, output: Any, targets: Any) -> Tensor:
        scores, flat, counted = _choices(self.name, output, targets)
        classes, found = scores.shape[-1], scores.argmax(dim=-1)[counted]
        right = flat[counted]
        hits = torch.bincount(right[found == right], minlength=classes)
        named, there = torch.bincount(found, minlength=classes), torch.bincount(right, minlength=classes)
        return torch.cat([hits, named, there])

    def finish(self, sums: Sequence[float]) -> float:
        hits, named, there = np.array(sums).reshape(3, -1)
        is_there = named + there > 0
        return float(np.mean(2 * hits[is_there] / (named + there)[is_there])) if is_there.any() else 0.0


class _Difference(Metric):
    """The mean of absolute or squared differences of a regression; of squared ones the root."""

    mode = "min"

    def __init__(self, name: str) -> None:
        self.name = name

    def measure(self, output: Any, targets: Any) -> Tensor:
        scores = scores_of(output)
        if not isinstance(targets, Tensor) or scores.shape != targets.shape:
            raise RunError(
                f"metric {self.name!r}: the model puts out {tuple(scores.shape)} and the targets are {_form(targets)}"
            )
        off = (scores.double() - targets.double()).reshape(len(targets), -1)
        each = off.abs() if self.name == "mae" else off.square()
        return torch.stack([each.sum(dim=1), torch.full_like(each[:, 0], each.shape[1])], dim=1)

    def finish(self, sums: Sequence[float]) -> float:
        mean = sums[0] / max(1.0, sums[1])
        return mean if self.name == "mae" else math.sqrt(mean)


def as_metrics(given: Iterable[object]) -> list[Metric]:
    """Metrics as a script gives them: objects, and names of those that a recipe has in ``eval.metrics``.

    Raises:
        RequestError: one is neither; says what it is, and which names there are.
    """
    made: list[Metric] = []
    for one in [given] if isinstance(given, str | Metric) else given:
        if isinstance(one, str):
            if not (is_shipped(one) or is_own(one)):
                raise RequestError(f"there is no metric {one!r}; {did_you_mean(one, [*SHIPPED, 'top5'])}")
            made.append(_build(one))
        elif isinstance(one, Metric):
            made.append(one)
        else:
            raise RequestError(
                f"a metric is a name or an object such as shoal.GatheredMetric(function, name=...), and this is {one!r}"
            )
    return made


def build_metrics(names: Sequence[str]) -> list[Metric]:
    """The metrics that a recipe names in ``eval.metrics``.

    Raises:
        RequestError: one cannot be imported.
    """
    return [_build(text) for text in names]


def _build(text: str) -> Metric:
    if is_own(text):
        found = load_function(text, key="eval.metrics")
        if isinstance(found, type) and issubclass(found, Metric):
            metric: Metric = call_own(found, what=f"eval.metrics: {text}")
            return metric
        return found if isinstance(found, Metric) else GatheredMetric(found, name=metric_name(text))
    assert is_shipped(text), "the recipe was checked"
    if text == "accuracy" or text.startswith("top"):
        return _Accuracy(text, 1 if text == "accuracy" else int(text.removeprefix("top")))
    return {"perplexity": _Perplexity, "f1": _F1}[text]() if text in ("perplexity", "f1") else _Difference(text)


def try_metric(metric: Metric, output: Any, targets: Any, *, num_samples: int) -> float:
    """What a metric makes of one batch, as if it were the whole split.

    Raises:
        RunError: it fails, or returns what is no metric.
    """
    what = f"metric {metric.name!r}"
    if isinstance(metric, GatheredMetric):
        given = _gatherable(metric.name, output), _gatherable(metric.name, targets)
        found: float = call_own(lambda: float(metric.function(*given)), what=what, refusal=RunError)
        return found
    summands = call_own(lambda: metric.measure(output, targets), what=what, refusal=RunError)
    _require_summands(metric, summands)
    if summands.ndim == _ROWS and summands.shape[0] != num_samples:
        raise RunError(f"{what}: {summands.shape[0]} rows for a batch of {num_samples} samples; give one for each")
    sums = (summands.double().sum(dim=0) if summands.ndim == _ROWS else summands.double()).tolist()
    value: float = call_own(lambda: float(metric.finish(sums)), what=what, refusal=RunError)
    return value


def _require_summands(metric: Metric, found: object) -> None:
    if not isinstance(found, Tensor) or found.ndim not in (_COUNTS, _ROWS):
        raise RunError(f"metric {metric.name!r}: measure returned {_form(found)}; return a tensor of one dim or of two")


class MetricSums:
    """What one rank has measured of a split, and the metrics of the whole out of all ranks' parts.

    Args:
        metrics: by different names.
        num_samples: of the split.
        mesh: the ranks.
        device: where what ranks tell each other must lie.
        counts_here: False on a rank whose outputs another rank has too, and counts.
    """

    def __init__(
        self, metrics: Sequence[Metric], *, num_samples: int, mesh: Mesh, device: torch.device, counts_here: bool
    ) -> None:
        self._metrics, self._count, self._mesh, self._counts_here = metrics, num_samples, mesh, counts_here
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, list[tuple[np.ndarray, Tensor]]] = {}

    def add(self, ids: np.ndarray, output: Any, targets: Any) -> None:
        """Measure a batch; ``ids`` are the places of its samples in the split."""
        for metric in self._metrics:
            if isinstance(metric, GatheredMetric):
                self._add_rows(f"{metric.name} outputs", ids, _gatherable(metric.name, output))
                self._add_rows(f"{metric.name} targets", ids, _gatherable(metric.name, targets))
                continue
            found = metric.measure(output, targets)
            _require_summands(metric, found)
            if found.ndim == _ROWS:
                self._add_rows(metric.name, ids, found.detach().double().cpu())
            else:
                summands = found.detach().double().cpu()
                before = self._sums.get(metric.name)
                self._sums[metric.name] = summands if before is None else before + summands

    def _add_rows(self, key: str, ids: np.ndarray, rows: Tensor) -> None:
        if rows.shape[0] != len(ids):
            raise RunError(f"metric {key!r}: {rows.shape[0]} rows for a batch of {len(ids)} samples; give one for each")
        self._rows.setdefault(key, []).append((ids, rows))

    def finish(self) -> dict[str, float]:
        """The metrics of the whole split, the same bits on every rank. All ranks call it together."""
        return {metric.name: self._finish(metric) for metric in self._metrics}

    def _finish(self, metric: Metric) -> float:
        if isinstance(metric, GatheredMetric):
            outputs, targets = self._table(f"{metric.name} outputs"), self._table(f"{metric.name} targets")
            return self._compute_once(metric, outputs, targets)
        kinds = torch.tensor([int(metric.name in self._sums), int(metric.name in self._rows)])
        has_sums, has_rows = (bool(one) for one in self._largest(kinds))
        if has_sums and has_rows:
            raise RunError(f"metric {metric.name!r}: measure returned one dim for some batches and two for others")
        if has_rows:
            table = self._table(metric.name)
            sums = [math.fsum(column) for column in table.T.tolist()]
        else:
            sums = self._total(metric.name)
        found: float = call_own(lambda: metric.finish(sums), what=f"metric {metric.name!r}", refusal=RunError)
        return float(found)

    def _total(self, name: str) -> list[float]:
        own = self._sums.get(name)
        (length,) = self._largest(torch.tensor([0 if own is None else len(own)]))
        sums = own.clone() if own is not None and self._counts_here else torch.zeros(length, dtype=torch.float64)
        total: list[float] = self._mesh.everyone.all_reduce_(sums.to(self._device)).tolist()
        return total

    def _largest(self, numbers: Tensor) -> list[int]:
        found: list[int] = self._mesh.everyone.all_reduce_max_(numbers.to(self._device)).tolist()
        return found

    def _table(self, key: str) -> Tensor:
        """A row for each sample of the split, in their order, on every rank. Of each row one rank has what is not zero."""
        own = self._rows.get(key, [])
        form = torch.zeros(_MOST_DIMS + 2, dtype=torch.int64)
        if own:
            rows = own[0][1]
            if any(other.shape[1:] != rows.shape[1:] or other.dtype != rows.dtype for _, other in own):
                raise RunError(f"metric {key!r}: batches give rows of different shapes, and cannot be put together")
            form[0], form[1] = 1 + _DTYPES.index(rows.dtype), rows.ndim - 1
            form[2 : 1 + rows.ndim] = torch.tensor(rows.shape[1:])
        told = self._largest(form)
        dtype, shape = _DTYPES[max(0, told[0] - 1)], told[2 : 2 + told[1]]
        table = torch.zeros((self._count, *shape), dtype=dtype)
        if self._counts_here:
            for ids, rows in own:
                table[torch.from_numpy(ids)] = rows
        is_whole = self._mesh.degree(Axis.CONTEXT) == 1
        # Bytes, where one rank has each row: zeros of the others change none of them.
        flat = table.reshape(-1).to(self._device)
        if flat.numel():
            self._mesh.everyone.all_reduce_(flat.view(torch.uint8) if is_whole else flat)
        return flat.cpu().reshape(table.shape)

    def _compute_once(self, metric: GatheredMetric, outputs: Tensor, targets: Tensor) -> float:
        value = torch.zeros(1, dtype=torch.float64)
        if self._mesh.everyone.rank == 0:
            found = call_own(
                lambda: float(metric.function(outputs, targets)), what=f"metric {metric.name!r}", refusal=RunError
            )
            value[0] = found
        return float(self._mesh.everyone.broadcast_(value.to(self._device)))


_MOST_DIMS = 6
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def _gatherable(name: str, value: Any) -> Tensor:
    found = value if isinstance(value, Tensor) else scores_of(value)
    if found.ndim > _MOST_DIMS or found.dtype not in _DTYPES:
        raise RunError(f"metric {name!r} cannot gather {_form(found)}")
    return found.detach().cpu()


def _choices(name: str, output: Any, targets: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (N, choices), targets (N,) and which of them count."""
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        raise RunError(f"metric {name!r} needs targets that are whole numbers, and these are {_form(targets)}")
    try:
        scores, flat = flatten_scores(scores_of(output), targets)
    except RequestError as error:
        raise RunError(f"metric {name!r}: {error}") from error
    return scores, flat, flat != IGNORED


def _by_sample(each: Tensor, targets: Tensor) -> Tensor:
    """Values of all targets added up by sample: the first dim of the targets."""
    return each.reshape(len(targets), -1).sum(dim=1)


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


_MOST_BYTES = 4096
"""Of the names of a step's metrics."""


class StepMetrics:
    """What the user's own step gives beside its loss: a mean over the items of each microbatch, summed up over the global batch.

    Each microbatch is weighted by its items, in float64: the same number under every plan that cuts the batch otherwise.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self._rounds: list[tuple[dict[str, float], float]] = []
        """Sums and weights of the rounds that are over, where replicas are absent."""
        self._names: tuple[str, ...] | None = None
        """What all replicas give; None before the first step."""

    def begin_step(self) -> None:
        """Forget the step before."""
        self._sums, self._weight, self._rounds = {}, 0.0, []

    def end_round(self) -> None:
        """What comes now is another replica's."""
        self._rounds.append((self._sums, self._weight))
        self._sums, self._weight = {}, 0.0

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Note what a microbatch gave.

        Raises:
            RunError: it gave other metrics than the one before.
        """
        if self._weight and set(values) != set(self._sums):
            raise RunError(_differ(tuple(sorted(self._sums)), tuple(sorted(values))))
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * weight
        self._weight += weight

    def reduce(self, mesh: Mesh, device: torch.device) -> dict[str, float]:
        """The means over the global batch. All ranks call it together.

        Raises:
            RunError: replicas gave different metrics.
        """
        rounds = self._rounds or [(self._sums, self._weight)]
        own = next((tuple(sorted(sums)) for sums, weight in rounds if weight > 0), ())
        if self._names is None:
            self._names = _agree(own, mesh, device)
        if not self._names:
            if own:
                raise RunError(_differ(self._names, own))
            return {}
        told = []
        for sums, weight in rounds:
            # A replica without samples in this step has nothing to add.
            is_other = weight > 0 and tuple(sorted(sums)) != self._names
            numbers = [sums.get(name, 0.0) for name in self._names] + [weight, float(is_other)]
            told.append(torch.tensor(numbers, dtype=torch.float64, device=device))
        *means, count, others = sum_rounds(told, mesh.channel(Axis.DATA)).tolist()
        if others:
            raise RunError(_differ(self._names, own))
        return {name: value / max(count, 1.0) for name, value in zip(self._names, means, strict=True)}


def _sum(numbers: Tensor, mesh: Mesh) -> Tensor:
    return mesh.channel(Axis.DATA).all_reduce_(numbers) if mesh.has(Axis.DATA) else numbers


def _agree(own: tuple[str, ...], mesh: Mesh, device: torch.device) -> tuple[str, ...]:
    """The names that the replicas with samples give; those of a replica without any may be missing."""
    if not mesh.has(Axis.DATA):
        return own
    text = "\n".join(own).encode()
    if len(text) > _MOST_BYTES:
        raise RunError(f"the names of the step's metrics are {len(text)} bytes long; {_MOST_BYTES} is the most")
    degree, place = mesh.degree(Axis.DATA), mesh.coordinate(Axis.DATA)
    board = torch.zeros((degree, _MOST_BYTES), dtype=torch.float64, device=device)
    board[place, : len(text)] = torch.tensor(list(text), dtype=torch.float64, device=device)
    rows = _sum(board, mesh).to(torch.uint8).cpu()
    said = [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]
    return tuple(next((row for row in said if row), "").split("\n")) if any(said) else ()


def _differ(names: tuple[str, ...], own: tuple[str, ...]) -> str:
    return (
        f"the step gave the metrics {', '.join(own) or 'none'} for a microbatch and {', '.join(names) or 'none'} for another; "
        "return the same keys every time"
    )
