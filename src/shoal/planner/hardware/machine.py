"""A machine as ``shoal calibrate`` measured it: a file that is read once, checked, and asked what things take. No torch.

Numbers that were measured are not edited: the file carries a checksum of itself, and one of another machine or another torch is
refused, because a wrong constant would show as a wrong plan and nowhere else.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from shoal.core.config import Config, validate
from shoal.core.errors import RequestError
from shoal.core.rundir import replace_text

FORMAT = "shoal-machine-1"
_QUIET = 1.0
"""Load of a machine up to which others' work is not spoken of."""
_IMPLAUSIBLE = 20.0
"""How many times as long as elsewhere a product may take: starting a second thread for a tiny one costs some 10 us, not 10 ms."""


class Provenance(Config):
    """Where the numbers of a machine file are from."""

    date: str
    """When they were measured, UTC."""
    cpu: str
    """The processor's name."""
    cores: int = Field(ge=1)
    """Cores that a process of the user may use."""
    torch: str
    """Version of torch."""
    seconds: float = Field(ge=0)
    """How long measuring took."""
    what: str
    """What was measured, in words."""
    load: float = Field(default=0.0, ge=0)
    """Load of the machine when measuring began, in processes; others' work makes numbers worse."""


class MatmulTime(Config):
    """A matrix product of (rows, inner) by (inner, outer) in float32."""

    processes: int = Field(ge=1)
    """Processes that did it at once."""
    threads: int = Field(ge=1)
    """Threads of each."""
    rows: int
    inner: int
    outer: int
    seconds: float = Field(gt=0)


class CopyTime(Config):
    """A copy in memory."""

    processes: int = Field(ge=1)
    num_bytes: int
    seconds: float = Field(gt=0)


_OLD_NAMES = {
    "sum": "all_reduce",
    "largest": "all_reduce_max",
    "scatter_sum": "reduce_scatter",
    "gather": "all_gather",
    "exchange": "all_to_all",
    "shift": "ring_shift",
}
"""Collectives as machine files of earlier versions call them."""

Operation = Annotated[str, AfterValidator(lambda name: _OLD_NAMES.get(name, name))]


class CollectiveTime(Config):
    """One operation of a channel, or a message of a pipeline."""

    operation: Operation
    """As the traffic counter names it: all_reduce, reduce_scatter, all_gather, all_to_all, ring_shift, send."""
    ranks: int = Field(ge=2)
    """Ranks of the channel."""
    processes: int = Field(ge=2)
    """Processes of the run; more than ``ranks`` where several channels worked at once."""
    num_bytes: int = Field(gt=0)
    """As the traffic counter counts them."""
    seconds: float = Field(gt=0)


class CoreSharing(Config):
    """How much longer a process takes when others compute beside it."""

    processes: int = Field(ge=1)
    threads: int = Field(ge=1)
    slow_down: float = Field(gt=0)
    """Of a training step of a small transformer, against one process alone with as many threads."""


class Meeting(Config):
    """What operations take between ranks that compute, beyond what they take one right after another.

    A rank that computes comes late now and then, and the others wait; who sleeps must be woken; and what is sent is not in the
    cache of the rank that reads it. An operation then takes ``seconds`` more, and its bytes ``factor`` times as long.
    """

    operation: Operation
    """``send`` for messages of a pipeline; ``all_reduce`` for all that a whole channel does."""
    ranks: int = Field(ge=2)
    processes: int = Field(ge=2)
    seconds: float = Field(ge=0)
    factor: float = Field(ge=1)


class Fit(Config):
    """What past runs taught: predictions are multiplied by these."""

    compute: float = Field(default=1.0, gt=0)
    communication: float = Field(default=1.0, gt=0)
    fixed_seconds: float = Field(default=0.0, ge=0)
    """Of every step, whatever its size: the loop, events, waking up."""
    runs: list[str] = Field(default_factory=list)
    """The runs that it was fitted to; empty where there was none."""


class Machine(Config):
    """A measured machine."""

    format: str = FORMAT
    provenance: Provenance
    matmuls: list[MatmulTime]
    copies: list[CopyTime]
    sharing: list[CoreSharing]
    collectives: list[CollectiveTime]
    """Of ranks that do nothing else."""
    meetings: list[Meeting] = Field(default_factory=list)
    """What is added where they compute in between; nothing in files of before."""
    rank_bytes: int = Field(ge=0)
    """Resident memory of a rank before it has a model."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory that all processes together could take when measuring began; 0 in files of before."""
    fit: Fit = Fit()

    def slow_down(self, active: float, threads: int = 1) -> float:
        """What a process's time is multiplied by while so many compute; between measured numbers by a straight line."""
        points = {1: 1.0}
        points |= {
            point.processes: point.slow_down
            for point in self.sharing
            if point.threads == threads and point.processes > 1
        }
        if len(points) == 1:
            points |= {point.processes: point.slow_down for point in self.sharing if point.processes > 1}
        return max(1.0, _line(sorted(points.items()), active)) if active > 1 else 1.0

    def collective_seconds(self, operation: str, num_bytes: float, *, ranks: int, processes: int) -> float:
        """What one call takes between ranks that compute, by a straight line between measured sizes.

        A channel of as many ranks in as large a run is looked for first, then one of as many ranks, then the nearest.
        """
        if ranks < 2 or num_bytes <= 0:
            return 0.0
        name = operation if any(time.operation == operation for time in self.collectives) else "all_reduce"
        known = [time for time in self.collectives if time.operation == name]
        if not known:
            return 0.0
        best = min({(time.ranks, time.processes) for time in known}, key=lambda pair: _distance(pair, ranks, processes))
        points = sorted((time.num_bytes, time.seconds) for time in known if (time.ranks, time.processes) == best)
        alone = max(points[0][1] * 0.5, _line(points, num_bytes))
        if operation != "send" and processes > self.provenance.cores:
            # Ranks that outnumber the cores compute while others wait, and what a rank computes was timed with all of them at
            # work: a wait is in it already. Counted again, plans with tp, cp and ZeRO looked 20 to 90% too slow on two cores.
            return alone
        meeting = self._meeting("send" if operation == "send" else "all_reduce", ranks, processes)
        return alone if meeting is None else meeting.seconds + meeting.factor * alone

    def _meeting(self, operation: str, ranks: int, processes: int) -> Meeting | None:
        known = [meeting for meeting in self.meetings if meeting.operation == operation]
        # How crowded the machine is counts more here than how many meet.
        near = sorted(known, key=lambda one: _distance((one.processes, one.ranks), processes, ranks))
        return near[0] if near else None


def _distance(pair: tuple[int, int], ranks: int, processes: int) -> tuple[float, float]:
    return abs(math.log(pair[0] / ranks)), abs(math.log(pair[1] / processes))


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Between two points on their line; outside on that of the two nearest; one point is its own line through nothing."""
    if len(points) == 1:
        return points[0][1]
    pairs = list(pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def measurement_warnings(machine: Machine, path: Path | str) -> tuple[str, ...]:
    """What there is to say against the numbers of a machine file: others' work beside them, and times that cannot be."""
    found, origin = [], machine.provenance
    if origin.load > _QUIET:
        found.append(
            f"{path} was measured on a busy machine (load {origin.load:.1f}): its times are too long, and not all by as much; "
            f"run `shoal calibrate {path}` when it is idle"
        )
    for time in machine.matmuls:
        alike = [other for other in machine.matmuls if _shape(other) == _shape(time)]
        best = min(alike, key=lambda other: other.seconds)
        # So many at once wait for each other, and no longer than for all of them.
        share = max(1.0, time.processes * time.threads / origin.cores)
        if time.seconds > _IMPLAUSIBLE * share * best.seconds:
            found.append(
                f"{path} says {time.seconds * 1e6:.4g} us for a product of {time.rows} x {time.inner} x {time.outer} in "
                f"{time.processes} process(es) of {time.threads} thread(s), and {best.seconds * 1e6:.4g} us in {best.processes} "
                f"of {best.threads}: something else ran then; run `shoal calibrate {path}` again"
            )
            break
    return tuple(found)


def _shape(time: MatmulTime) -> tuple[int, int, int]:
    return time.rows, time.inner, time.outer


def default_path() -> Path:
    """Where ``shoal calibrate`` writes when it is not told: in ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal" / "machine.json"


def cpu_name() -> str:
    """The processor's name as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, "") or platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torch_version() -> str:
    """The version of torch that is installed, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


def write_machine(path: Path, machine: Machine) -> None:
    """Write a machine file, whole or not at all.

    Raises:
        RequestError: it cannot be written there.
    """
    values = machine.model_dump(mode="json")
    page = {**values, "sha256": _checksum(values)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(page, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise RequestError(f"cannot write the machine file {path}: {error}") from error


def read_machine(path: Path, *, is_here: bool = True) -> Machine:
    """A machine file, checked.

    Args:
        path: the file.
        is_here: refuse one that was measured on another machine, with other cores or with another torch.

    Raises:
        RequestError: it is missing, no machine file, edited by hand, or of another machine; says which and the fix.
    """
    try:
        page = json.loads(path.read_text())
    except FileNotFoundError:
        raise RequestError(f"no such file: {path}; `shoal calibrate {path}` makes it") from None
    except IsADirectoryError:
        raise RequestError(
            f"{path} is a folder; name a machine file, such as {path / 'machine.json'}, which "
            f"`shoal calibrate {path / 'machine.json'}` makes"
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path} is no machine file: it cannot be read as JSON: {error}; name one that `shoal calibrate FILE` "
            f"wrote, or make one"
        ) from error
    if not isinstance(page, dict) or page.get("format") != FORMAT:
        found = page.get("format") if isinstance(page, dict) else type(page).__name__
        raise RequestError(
            f"{path} is no machine file of this version: its format is {found!r}, not {FORMAT!r}; make one with `shoal calibrate`"
        )
    told = page.pop("sha256", None)
    machine = validate(Machine, page, origin=str(path))
    if told != _checksum(page):
        raise RequestError(
            f"{path} was changed after it was measured: its checksum does not fit its numbers; "
            "measure again with `shoal calibrate`, or refit with --from-runs"
        )
    if is_here:
        _refuse_foreign(machine, path)
    return machine


def _refuse_foreign(machine: Machine, path: Path) -> None:
    origin = machine.provenance
    here: dict[str, tuple[Any, Any]] = {
        "processor": (origin.cpu, cpu_name()),
        "cores": (origin.cores, num_cores()),
        "torch": (origin.torch, torch_version()),
    }
    other = [f"{name} {theirs} there and {ours} here" for name, (theirs, ours) in here.items() if theirs != ours]
    if other:
        raise RequestError(f"{path} was measured on another machine: {', '.join(other)}; run `shoal calibrate` here")


def _checksum(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
