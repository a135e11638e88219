"""The Grafana file asks only for what the endpoint has, with labels that it has, in queries that Prometheus can read."""

import json
import re
from pathlib import Path

import pytest

import shoal.dashboard.exporters
from shoal.dashboard.exporters.families import METRICS
from support.dashboard.promtool import check_rules

FILE = Path(shoal.dashboard.exporters.__file__).parent / "grafana.json"
SERIES = re.compile(r"\b(shoal_\w+?)(?:_bucket|_sum|_count)?\s*\{([^}]*)\}")


def queries() -> list[str]:
    return [target["expr"] for panel in json.loads(FILE.read_text())["panels"] for target in panel["targets"]]


def problems(expression: str) -> list[str]:
    """Names and labels that the endpoint does not have."""
    found, known = [], set()
    for name, selector in SERIES.findall(expression):
        if name not in METRICS:
            found.append(f"no metric {name}")
            continue
        known |= {"run", *METRICS[name].labels, *(["le"] if METRICS[name].kind == "histogram" else [])}
        found += [
            f"no label {label}" for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector) if label not in known
        ]
        is_rated = re.search(rf"(rate|increase)\({name}", expression) is not None
        found += [f"{name} is no counter"] * (is_rated != (METRICS[name].kind != "gauge"))
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        found += [f"no label {label}" for label in re.split(r",\s*", labels) if label not in known]
    return found + ["no metric"] * (len(SERIES.findall(expression)) != len(re.findall(r"\bshoal_", expression)))


def test_every_query_names_what_there_is():
    assert len(queries()) > 20
    assert {query: found for query in queries() if (found := problems(query))} == {}


@pytest.mark.parametrize(
    "wrong",
    [
        'shoal_los{run="a"}',
        "shoal_train_loss",
        'shoal_train_loss{rank="0"}',
        'sum by (step) (rate(shoal_steps_total{run="a"}[5m]))',
        'rate(shoal_train_loss{run="a"}[5m])',
        'shoal_steps_total{run="a"}',
    ],
)
def test_a_wrong_query_is_seen(wrong):
    assert problems(wrong)


def test_nearly_every_metric_is_shown():
    shown = {name for query in queries() for name, _ in SERIES.findall(query)}
    assert set(METRICS) - shown == {
        "shoal_run_running",
        "shoal_steps_total",
        "shoal_samples_total",
        "shoal_comm_calls_total",
        "shoal_checkpoint_bytes",
    }


def test_prometheus_can_read_every_query():
    plain = [query.replace("$__rate_interval", "5m").replace("$run", ".*") for query in queries()]
    check_rules(plain)
    with pytest.raises(AssertionError, match="parse error"):
        check_rules(["sum by (run shoal_train_loss"])


def test_panels_do_not_lie_on_each_other():
    places = [panel["gridPos"] for panel in json.loads(FILE.read_text())["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
