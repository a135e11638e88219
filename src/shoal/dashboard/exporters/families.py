"""The metrics that leave the machine: names, units, labels and help texts in one table, and their values as plain data.

Prometheus and OpenTelemetry show the same values in two forms, and the Grafana file may ask for nothing that is not in this
table. Names keep the conventions of Prometheus: base units at their end, ``_total`` for counters. A step is never a label,
because every value of a label is a series of its own that the other side keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Labels = tuple[tuple[str, str], ...]
"""Names and values, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A name with its meaning."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str = ""
    """As OpenTelemetry says it (UCUM)."""
    labels: tuple[str, ...] = ()
    """Besides ``run``."""


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """A histogram: how many values were at most each bound, and the rest."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Of each bucket alone, and of what is above the last bound at the end."""
    total: float
    """The sum of all values."""
    smallest: float
    largest: float

    @property
    def count(self) -> int:
        """Of all values."""
        return sum(self.counts)


@dataclass
class Family:
    """A metric with the values of all runs."""

    metric: Metric
    values: dict[Labels, float] = field(default_factory=dict)
    histograms: dict[Labels, Buckets] = field(default_factory=dict)


def _metric(
    name: str, kind: Literal["counter", "gauge", "histogram"], help_text: str, unit: str = "", *labels: str
) -> tuple[str, Metric]:
    return name, Metric(name=name, kind=kind, help=help_text, unit=unit, labels=labels)


METRICS: Mapping[str, Metric] = dict(
    (
        _metric(
            "shoal_run_info",
            "gauge",
            "What runs; the value is always 1.",
            "",
            "plan",
            "kind",
            "status",
            "world_size",
        ),
        _metric("shoal_run_running", "gauge", "1 while the run goes on, 0 when it has ended or says nothing."),
        _metric("shoal_step", "gauge", "Steps done, as the run itself counts them."),
        _metric("shoal_planned_steps", "gauge", "Steps that the recipe asks for."),
        _metric("shoal_steps_total", "counter", "Steps that were worked off, those that were done again included."),
        _metric("shoal_skipped_steps_total", "counter", "Steps without an update."),
        _metric("shoal_samples_total", "counter", "Samples of these steps."),
        _metric("shoal_tokens_total", "counter", "Tokens of these steps."),
        _metric("shoal_train_loss", "gauge", "Loss of the last step."),
        _metric("shoal_validation_loss", "gauge", "Loss of the last evaluation.", "", "split"),
        _metric("shoal_learning_rate", "gauge", "Learning rate of the last step."),
        _metric("shoal_gradient_norm", "gauge", "Norm of the gradient of the last step, before clipping."),
        _metric("shoal_step_duration_seconds", "histogram", "How long steps took on the first rank.", "s"),
        _metric(
            "shoal_predicted_step_seconds", "gauge", "How long a step was to take, by the forecast of the plan.", "s"
        ),
        _metric(
            "shoal_busy_seconds_total", "counter", "Time in each phase of steps, waits included.", "s", "rank", "phase"
        ),
        _metric("shoal_wait_seconds_total", "counter", "Time in steps that was spent waiting.", "s", "rank", "axis"),
        _metric("shoal_comm_calls_total", "counter", "Collectives and messages.", "{call}", "rank", "axis", "op"),
        _metric("shoal_comm_bytes_total", "counter", "Bytes of collectives and messages.", "By", "rank", "axis", "op"),
        _metric("shoal_comm_seconds_total", "counter", "Time in collectives and messages.", "s", "rank", "axis", "op"),
        _metric("shoal_memory_bytes", "gauge", "Memory as it was last measured.", "By", "rank", "part"),
        _metric("shoal_rank_up", "gauge", "1 while a rank shows that it lives.", "", "rank", "host"),
        _metric("shoal_restarts_total", "counter", "Generations after the first."),
        _metric("shoal_events_total", "counter", "Events of each kind.", "{event}", "event"),
        _metric("shoal_broken_lines_total", "counter", "Lines of event files that could not be read."),
        _metric("shoal_checkpoint_age_seconds", "gauge", "Since the newest checkpoint was written.", "s"),
        _metric("shoal_checkpoint_bytes", "gauge", "Size of the newest checkpoint.", "By"),
        _metric("shoal_staleness_updates", "histogram", "Updates between a gradient's weights and its own update."),
        _metric("shoal_view_epoch", "gauge", "Epoch of the newest view of an elastic run or a parameter-server run."),
    )
)


class Snapshot:
    """The values of all runs at one moment, in the order of the table."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self.begins: dict[str, float] = {}
        """When each run began, from which its counters count."""

    def add(self, name: str, run: str, value: float | None, **labels: str) -> None:
        """A value; None, where there is none, is left out, and of several with the same labels the first counts."""
        if value is not None:
            # Twice the same labels, and Prometheus throws the whole answer away.
            self._family(name).values.setdefault(self._labels(name, run, labels), float(value))

    def add_histogram(self, name: str, run: str, buckets: Buckets) -> None:
        """A histogram."""
        self._family(name).histograms.setdefault(self._labels(name, run, {}), buckets)

    @property
    def families(self) -> list[Family]:
        """Those that have a value."""
        return [self._families[name] for name in METRICS if name in self._families]

    def value(self, name: str, **labels: str) -> float | None:
        """The one value with these labels, whatever its other ones; None where there is none."""
        family = self._families.get(name)
        found = [
            value for have, value in (family.values.items() if family else ()) if labels.items() <= dict(have).items()
        ]
        return found[0] if found else None

    def _family(self, name: str) -> Family:
        return self._families.setdefault(name, Family(METRICS[name]))

    @staticmethod
    def _labels(name: str, run: str, labels: Mapping[str, str]) -> Labels:
        assert set(labels) == set(METRICS[name].labels), f"{name} has the labels {METRICS[name].labels}"
        return (("run", run), *((label, labels[label]) for label in METRICS[name].labels))


STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
STALENESS_BOUNDS = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 89.0)


def count_in_buckets(values: npt.NDArray[np.float64], bounds: tuple[float, ...]) -> Buckets | None:
    """A histogram of values; None where there are none. What is no number is in no bucket and not in the sum."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    places = np.searchsorted(np.asarray(bounds), known, side="left")
    counts = np.bincount(places, minlength=len(bounds) + 1)
    return Buckets(
        bounds=bounds,
        counts=tuple(int(count) for count in counts),
        total=float(known.sum()),
        smallest=float(known.min()),
        largest=float(known.max()),
    )
