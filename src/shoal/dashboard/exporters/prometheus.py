"""Metrics as the text that Prometheus reads.

Written by hand: the client library keeps the state of a process that measures itself, takes ten times as long for 2,000 series,
and brings threads and registries that nobody here needs.
"""

import math
from collections.abc import Iterable, Iterator

from shoal.dashboard.exporters.families import Buckets, Family, Labels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(families: Iterable[Family]) -> str:
    """The answer to a scrape."""
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    metric = family.metric
    yield f"# HELP {metric.name} {_escape_help(metric.help)}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for labels, value in family.values.items():
        yield f"{metric.name}{_labels(labels)} {number(value)}"
    for labels, buckets in family.histograms.items():
        yield from _histogram(metric.name, labels, buckets)


def _histogram(name: str, labels: Labels, buckets: Buckets) -> Iterator[str]:
    below = 0
    for bound, count in zip((*buckets.bounds, math.inf), buckets.counts, strict=True):
        below += count
        yield f"{name}_bucket{_labels((*labels, ('le', number(bound))))} {below}"
    yield f"{name}_sum{_labels(labels)} {number(buckets.total)}"
    yield f"{name}_count{_labels(labels)} {buckets.count}"


def number(value: float) -> str:
    """A value as the format has it, with every digit that it has."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(text: str) -> str:
    """A label's value; names of folders may hold anything, also bytes that are no text."""
    plain = text.encode("utf-8", "replace").decode("utf-8")
    return plain.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
