"""How long each test took, with its set-up and end, and what of a processor it and the processes that it waited for used.

``pytest --times FILE`` writes all of it as JSON; the twenty slowest are printed. ``order.json`` beside this file says how long
the files took of which the session begins with the longest: two workers that each take a file at a time end together then.
``python -m support.session.timing TIMES`` writes it anew for ``make test``, and with ``soak`` behind it for ``make soak``.
"""

import json
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

ORDER = Path(__file__).with_name("order.json")
SHOWN = 20
_LEAST_SECONDS = 2.0
"""Files that take less keep their place."""


def pytest_addoption(parser):
    parser.addoption("--times", metavar="FILE", help="write wall and processor seconds of each test to FILE, as JSON")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config), "times")


def pytest_collection_modifyitems(config, items):
    """Put the longest files first; each file's tests stay together, in their order."""
    known = json.loads(ORDER.read_text())["soak" if config.getoption("markexpr") == "soak" else "test"]
    items.sort(key=lambda item: -known.get(item.location[0], 0.0))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    item.stash[_BEGAN] = _now()
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    made = yield
    if call.when == "teardown":
        wall, used = (now - began for now, began in zip(_now(), item.stash[_BEGAN], strict=True))
        made.get_result().times = [round(wall, 3), round(used, 3)]


_BEGAN = pytest.StashKey[tuple[float, float]]()


def _now():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


class Report:
    """Collects the times of all workers."""

    def __init__(self, config):
        self._path = config.getoption("--times")
        self._times = {}

    def pytest_runtest_logreport(self, report):
        if hasattr(report, "times"):
            self._times[report.nodeid] = report.times

    def pytest_terminal_summary(self, terminalreporter):
        if not self._times:
            return
        if self._path:
            Path(self._path).write_text(json.dumps(self._times, indent=0))
        if len(self._times) > SHOWN:
            terminalreporter.section(f"the {SHOWN} slowest tests: seconds, and seconds of a processor")
            slowest = sorted(self._times.items(), key=lambda one: -one[1][0])[:SHOWN]
            for name, (wall, used) in slowest:
                terminalreporter.line(f"{wall:7.1f} {used:7.1f}  {name}")
            total = [sum(column) for column in zip(*self._times.values(), strict=True)]
            terminalreporter.line(f"{total[0]:7.1f} {total[1]:7.1f}  all {len(self._times)}")


def write_order(times, which="test"):
    """Write one part of ``order.json`` from what ``--times`` wrote."""
    files = defaultdict(float)
    for name, (wall, _) in times.items():
        files[name.partition("::")[0]] += wall
    long = {name: round(files[name]) for name in sorted(files, key=lambda name: -files[name])}
    known = json.loads(ORDER.read_text())
    known[which] = {name: seconds for name, seconds in long.items() if seconds >= _LEAST_SECONDS}
    ORDER.write_text(json.dumps(known, indent=0) + "\n")


if __name__ == "__main__":
    write_order(json.loads(Path(sys.argv[1]).read_text()), *sys.argv[2:])
