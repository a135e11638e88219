"""Metrics for an OpenTelemetry collector, sent over HTTP by a thread of its own (extra ``shoal[otel]``).

The values are those of the Prometheus endpoint. They are handed to the exporter of OpenTelemetry's SDK as finished points: its
instruments would count again in this process what runs have counted already. A collector that is slow or away costs points, never
memory or time of whoever reads the runs: a few snapshots wait, the oldest gives way, and what was dropped is counted.
"""

import importlib
import importlib.util
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from shoal.core.errors import RequestError
from shoal.dashboard.exporters.families import Family, Metric, Snapshot

_PATH = "/v1/metrics"
_WAITING = 8
"""Snapshots that wait at most."""
_LOGGERS = ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.exporter.http", "urllib3")
_NANO = 1e9


def check_collector(url: str) -> str:
    """The address that metrics are sent to.

    Raises:
        RequestError: it is none, or the extra is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError(
            f"--otlp {url!r} is not the address of a collector; give such as http://127.0.0.1:4318, to which {_PATH} is added"
        )
    for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            is_there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise RequestError(
                f"--otlp needs the package of {name}, which is not installed; run `pip install 'shoal[otel]'`"
            )
    return url if parts.path not in ("", "/") else url.rstrip("/") + _PATH


def open_name(metric: Metric) -> str:
    """The name with dots; a collector that writes for Prometheus adds ``_total`` again, and no unit that is there already."""
    return metric.name.removesuffix("_total").replace("_", ".")


class Collector:
    """Sends snapshots in the order in which they were offered, until it is closed.

    Args:
        url: from ``check_collector``.
        warn: is told when sending begins to fail, and when it works again.
        timeout: seconds that one request may take, with all its repetitions.
    """

    def __init__(self, url: str, *, warn: Callable[[str], None], timeout: float = 10.0) -> None:
        self.sent = 0
        self.failed = 0
        self.dropped = 0
        """Snapshots that gave way to newer ones."""
        self.reason = ""
        """Why the last one was not taken; empty where it was."""
        self._url, self._warn, self._timeout = url, warn, timeout
        self._waiting: deque[tuple[float, Snapshot]] = deque()
        self._woken, self._closing = threading.Event(), threading.Event()
        self._words = _LastWords()
        self._exporter: Any = None
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """Queue a snapshot; returns at once."""
        if len(self._waiting) >= _WAITING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append((time.time(), snapshot))
        self._woken.set()

    def close(self, *, within: float = 5.0) -> None:
        """Send what waits, for so many seconds at most, and stop."""
        self._closing.set()
        self._woken.set()
        self._thread.join(timeout=within)
        if self._thread.is_alive() and self._exporter is not None:
            # Ends a wait for the next repetition.
            self._exporter.shutdown()
            self._thread.join(timeout=self._timeout)

    def _run(self) -> None:
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            logger.addHandler(self._words)
            logger.propagate = False
        http = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        self._exporter = http.OTLPMetricExporter(endpoint=self._url, timeout=self._timeout)
        while True:
            self._woken.wait()
            self._woken.clear()
            while self._waiting:
                self._send(*self._waiting.popleft())
            if self._closing.is_set():
                break
        self._exporter.shutdown()

    def _send(self, at: float, snapshot: Snapshot) -> None:
        self._words.text = ""
        # What a collector or the library does must not end the thread.
        try:
            result = self._exporter.export(metrics_data(snapshot, at), timeout_millis=self._timeout * 1000)
            is_sent, reason = result.name == "SUCCESS", self._words.text
        except Exception as error:
            is_sent, reason = False, f"{type(error).__name__}: {error}"
        self.reason = "" if is_sent else reason.strip()[:200] or "no reason given"
        self.sent += is_sent
        self.failed += not is_sent
        if is_sent == self._is_failing:
            self._is_failing = not is_sent
            self._warn(
                f"{self._url} takes metrics again"
                if is_sent
                else f"{self._url} does not take metrics ({self.reason}); trying on"
            )


class _LastWords(logging.Handler):
    """Keeps what the library says instead of printing it: of an outage, one line is enough."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.text = record.getMessage()


def metrics_data(snapshot: Snapshot, at: float) -> Any:
    """A snapshot as the SDK's value for exporters."""
    sdk = importlib.import_module("opentelemetry.sdk.metrics.export")
    resource = importlib.import_module("opentelemetry.sdk.resources").Resource({"service.name": "shoal"})
    scope = importlib.import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope("shoal.dashboard")
    now = int(at * _NANO)
    begins = {run: min(now, int(begin * _NANO)) for run, begin in snapshot.begins.items()}
    metrics = [
        sdk.Metric(
            name=open_name(family.metric),
            description=family.metric.help,
            unit=family.metric.unit,
            data=_data(family, sdk, begins, now),
        )
        for family in snapshot.families
    ]
    inside = sdk.ScopeMetrics(scope=scope, metrics=metrics, schema_url="")
    return sdk.MetricsData(
        resource_metrics=[sdk.ResourceMetrics(resource=resource, scope_metrics=[inside], schema_url="")]
    )


def _data(family: Family, sdk: Any, begins: dict[str, int], now: int) -> Any:
    cumulative = sdk.AggregationTemporality.CUMULATIVE
    if family.metric.kind == "histogram":
        points = [
            sdk.HistogramDataPoint(
                attributes=_attributes(labels),
                start_time_unix_nano=begins.get(labels[0][1], now),
                time_unix_nano=now,
                count=buckets.count,
                sum=buckets.total,
                bucket_counts=buckets.counts,
                explicit_bounds=buckets.bounds,
                min=buckets.smallest,
                max=buckets.largest,
            )
            for labels, buckets in family.histograms.items()
        ]
        return sdk.Histogram(data_points=points, aggregation_temporality=cumulative)
    numbers = [
        sdk.NumberDataPoint(
            attributes=_attributes(labels),
            start_time_unix_nano=begins.get(labels[0][1], now),
            time_unix_nano=now,
            value=value,
        )
        for labels, value in family.values.items()
    ]
    if family.metric.kind == "counter":
        return sdk.Sum(data_points=numbers, aggregation_temporality=cumulative, is_monotonic=True)
    return sdk.Gauge(data_points=numbers)


def _attributes(labels: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {name: value.encode("utf-8", "replace").decode("utf-8") for name, value in labels}
