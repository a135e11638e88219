"""Metrics in the forms of Prometheus and OpenTelemetry: what leaves is what went in, and their own programs read it."""

import math
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from shoal.core.errors import RequestError
from shoal.dashboard.exporters.families import METRICS, STEP_BOUNDS, Snapshot, count_in_buckets
from shoal.dashboard.exporters.otlp import Collector, check_collector, open_name
from shoal.dashboard.exporters.prometheus import number, render
from support.dashboard.promtool import check_metrics

HOSTILE = 'a"b\\c\nd<script>\udcff'
LINE = re.compile(r'^(\w+)(\{(?:\w+="(?:[^"\\\n]|\\.)*",?)*\})? (\S+)$')


def everything() -> Snapshot:
    """Every metric of the table, once with an ordinary run and once with one whose name is an attack."""
    found = Snapshot()
    for run in ("run", HOSTILE):
        found.begins[run] = 1000.0
        for place, metric in enumerate(METRICS.values()):
            if metric.kind == "histogram":
                found.add_histogram(metric.name, run, count_in_buckets(np.array([0.01, 0.02, 7.0, 1e9]), STEP_BOUNDS))
            else:
                found.add(metric.name, run, place + 0.5, **{label: f"{label} {HOSTILE}" for label in metric.labels})
    return found


def parse(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = LINE.match(line)
            assert match, line
            key = match[1] + (match[2] or "")
            assert key not in found, f"{key} is there twice"
            found[key] = float(match[3])
    return found


def test_every_metric_is_rendered_and_what_is_hostile_stays_in_its_label():
    text = render(everything().families)
    values = parse(text)
    assert values['shoal_steps_total{run="run"}'] == list(METRICS).index("shoal_steps_total") + 0.5
    assert 'shoal_steps_total{run="a\\"b\\\\c\\nd<script>?"}' in values
    helps, types = re.findall(r"^# HELP (\w+) \S", text, re.M), re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M)
    assert helps == list(METRICS) and types == [(metric.name, metric.kind) for metric in METRICS.values()]


def test_a_histogram_adds_up():
    values = parse(render(everything().families))
    buckets = [value for key, value in values.items() if key.startswith('shoal_step_duration_seconds_bucket{run="run"')]
    assert buckets == sorted(buckets) and buckets[-1] == 4 == values['shoal_step_duration_seconds_count{run="run"}']
    assert values['shoal_step_duration_seconds_bucket{run="run",le="0.01"}'] == 1, "a bound belongs to its bucket"
    assert values['shoal_step_duration_seconds_bucket{run="run",le="+Inf"}'] == 4
    assert values['shoal_step_duration_seconds_sum{run="run"}'] == 0.01 + 0.02 + 7.0 + 1e9


def test_buckets_leave_out_what_is_no_number():
    found = count_in_buckets(np.array([math.nan, 1.0, math.inf]), (0.5, 1.0))
    assert found.counts == (0, 1, 0) and found.total == 1.0
    assert count_in_buckets(np.array([math.nan]), (1.0,)) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.0, "3"),
        (0.1, "0.1"),
        (math.nan, "NaN"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (1e300, "1e+300"),
        (2.0**60, "1.152921504606847e+18"),
    ],
)
def test_numbers_keep_every_digit(value, text):
    assert number(value) == text
    assert math.isnan(value) or float(text.replace("Inf", "inf")) == value


def test_promtool_has_nothing_to_say():
    check_metrics(render(everything().families))


def test_promtool_sees_a_wrong_unit():
    """The check above can fail."""
    with pytest.raises(AssertionError, match=r"milliseconds|base unit"):
        check_metrics(
            "# HELP shoal_x_milliseconds A time.\n# TYPE shoal_x_milliseconds gauge\nshoal_x_milliseconds 1\n"
        )


def test_names_have_their_units_and_no_step_is_a_label():
    for metric in METRICS.values():
        assert metric.kind != "counter" or metric.name.endswith("_total")
        assert metric.kind == "counter" or not metric.name.endswith("_total")
        assert ("_seconds" in metric.name) == (metric.unit == "s") and ("_bytes" in metric.name) == (
            metric.unit == "By"
        )
        assert "step" not in metric.labels


def test_open_names_are_different():
    assert open_name(METRICS["shoal_wait_seconds_total"]) == "shoal.wait.seconds"
    assert len({open_name(metric) for metric in METRICS.values()}) == len(METRICS)


class Receiver:
    """A collector: it decodes what is posted to it."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        received, outer = self.received, self = [], self
        outer.received, outer.status, outer.paths = received, 200, []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.paths.append(self.path)
                if outer.status == 200:
                    received.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(outer.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs shoal[otel]")
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_a_collector_gets_every_value(receiver):
    heard = []
    collector = Collector(check_collector(receiver.url), warn=heard.append)
    collector.offer(everything())
    collector.close(within=30)
    assert (collector.sent, collector.failed, collector.dropped, heard) == (1, 0, 0, [])
    assert receiver.paths == ["/v1/metrics"]
    (of_resource,) = receiver.received[0].resource_metrics
    assert {one.key: one.value.string_value for one in of_resource.resource.attributes} == {"service.name": "shoal"}
    metrics = {metric.name: metric for metric in of_resource.scope_metrics[0].metrics}
    assert list(metrics) == [open_name(metric) for metric in METRICS.values()]
    steps = metrics["shoal.steps"]
    assert steps.sum.is_monotonic and steps.sum.aggregation_temporality == 2
    point, hostile = steps.sum.data_points
    assert point.as_double == list(METRICS).index("shoal_steps_total") + 0.5
    assert point.start_time_unix_nano == 1000 * 10**9 < point.time_unix_nano
    assert hostile.attributes[0].value.string_value == HOSTILE.replace("\udcff", "?")
    (histogram, _) = metrics["shoal.step.duration.seconds"].histogram.data_points
    assert histogram.count == 4 == sum(histogram.bucket_counts) and histogram.max == 1e9
    assert tuple(histogram.explicit_bounds) == STEP_BOUNDS
    assert metrics["shoal.memory.bytes"].unit == "By"


def test_a_collector_that_refuses_is_named_once_and_again_when_it_takes_metrics(receiver):
    heard, told = [], threading.Condition()

    def warn(line: str) -> None:
        with told:
            heard.append(line)
            told.notify_all()

    receiver.status = 400
    collector = Collector(check_collector(receiver.url), warn=warn)
    collector.offer(everything())
    with told:
        assert told.wait_for(lambda: heard, timeout=30)
    receiver.status = 200
    collector.offer(everything())
    collector.close(within=30)
    assert [("does not take metrics" in line, "takes metrics again" in line) for line in heard] == [
        (True, False),
        (False, True),
    ]
    assert "400" in heard[0] and collector.failed == 1 and collector.sent == 1


def test_a_collector_that_says_nothing_costs_snapshots_and_not_the_caller():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs shoal[otel]")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/metrics"
        collector = Collector(url, warn=lambda _: None, timeout=1.0)
        snapshot = Snapshot()
        for _ in range(100):
            collector.offer(snapshot)
        assert 100 - 8 - 2 <= collector.dropped <= 100 - 8
        collector.close(within=0.5)
        assert not collector._thread.is_alive() or not collector._thread.join(30)


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://host/", "http://", "file:///etc/passwd"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(RequestError, match="not the address of a collector"):
        check_collector(url)


def test_the_path_of_an_address_is_kept():
    assert check_collector("https://host/own/path") == "https://host/own/path"
    assert check_collector("http://host:4318/") == "http://host:4318/v1/metrics"
