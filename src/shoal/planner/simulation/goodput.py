"""How much of a long run's time is progress when devices fail: played event by event, and in closed form.

Failures of all devices together are a Poisson process of mean distance ``M`` (a device's mean time between failures over the
number of devices). A segment is ``tau`` seconds of work and a checkpoint that stalls training for ``C``; a failure costs what
was done since the last checkpoint and a restart of ``R``, which can fail itself. With these, the expected time of a segment
is

    E = M exp(R / M) (exp((tau + C) / M) - 1)              Daly, FGCS 22(3), 2006, doi 10.1016/j.future.2004.11.016

and goodput is ``tau / E``. Its best ``tau`` is to first order sqrt(2 C M) (Young, CACM 17(9), 1974, doi
10.1145/361147.361115).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import RequestError
from shoal.core.seeding import derive_key

LEAST_GOODPUT = 1e-3
"""Below it a run is not played: it would be restarts without end."""
MOST_FAILURES = 1_000_000
"""Of a run that is played: some ten seconds."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """What fails, and what it costs, in seconds."""

    device_mtbf: float
    """Mean time between failures of one device."""
    num_devices: int
    restart: float
    """From a failure until training goes on: noticing it, new processes, loading a checkpoint."""
    checkpoint: float
    """How long training stands still for a checkpoint."""

    def __post_init__(self) -> None:
        times = {"mean time between failures": self.device_mtbf, "restart": self.restart, "checkpoint": self.checkpoint}
        for name, seconds in times.items():
            if not 0 <= seconds < math.inf:
                raise RequestError(f"the {name} is {seconds:g} s, and must be 0 or more; give a time that can be")
        if self.device_mtbf == 0 or self.num_devices < 1:
            raise RequestError(
                f"{self.num_devices} devices that fail every {self.device_mtbf:g} s cannot train; give both above 0"
            )

    @property
    def mtbf(self) -> float:
        """Mean time between failures of any device."""
        return self.device_mtbf / self.num_devices


def young_interval(failures: Failures) -> float:
    """Seconds of work between checkpoints: Young's first-order optimum."""
    return math.sqrt(2.0 * failures.checkpoint * failures.mtbf)


def daly_interval(failures: Failures) -> float:
    """Seconds of work between checkpoints: Daly's higher-order estimate of the optimum."""
    cost, mtbf = failures.checkpoint, failures.mtbf
    if cost >= 2.0 * mtbf:
        return mtbf
    ratio = cost / (2.0 * mtbf)
    return young_interval(failures) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost


def expected_goodput(work: float, failures: Failures) -> float:
    """Share of time that is progress, with a checkpoint after every ``work`` seconds of it."""
    segment, mtbf = work + failures.checkpoint, failures.mtbf
    if work <= 0 or (segment + failures.restart) / mtbf > 700.0:
        return 0.0
    return work / (mtbf * math.exp(failures.restart / mtbf) * math.expm1(segment / mtbf))


def expected_loss(work: float, failures: Failures) -> float:
    """Seconds since the last checkpoint that a failure in a segment costs, in the mean: a little under half of it."""
    ratio = (work + failures.checkpoint) / failures.mtbf
    if ratio > 700.0:
        return failures.mtbf
    # For short segments the difference of two near numbers would be noise; its series is L/2 - L^2/(12 M).
    if ratio < 1e-4:
        return failures.mtbf * (ratio / 2.0 - ratio * ratio / 12.0)
    return failures.mtbf * (1.0 - ratio / math.expm1(ratio))


def best_interval(step_seconds: float, failures: Failures) -> int:
    """Whole steps between checkpoints with the highest expected goodput.

    Raises:
        RequestError: a step takes no time.
    """
    if not step_seconds > 0:
        raise RequestError(f"a step takes {step_seconds:g} s; there is no best interval for steps without length")
    # Goodput rises to one maximum and falls: close in on it, from both sides of Daly's estimate.
    low, high = 1, max(2, math.ceil(4.0 * max(daly_interval(failures), failures.checkpoint) / step_seconds))
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if expected_goodput(left * step_seconds, failures) < expected_goodput(right * step_seconds, failures):
            low = left
        else:
            high = right
    return max(range(low, high + 1), key=lambda steps: expected_goodput(steps * step_seconds, failures))


@dataclass(frozen=True)
class Attempt:
    """From a start or restart until a failure, or the end."""

    start: float
    first_step: int
    """Steps done when it starts."""
    num_steps: int
    """Steps that it adds and that last: those before its last checkpoint."""
    end: float
    failed_rank: int | None
    """None where the run ends."""
    lost: float
    """Seconds since its last checkpoint, or since its start, that were for nothing."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """A long run with failures. The four parts of its time add up to it."""

    wall_seconds: float
    useful_seconds: float
    lost_seconds: float
    restart_seconds: float
    checkpoint_seconds: float
    num_failures: int
    """Those during a restart are counted too."""
    num_checkpoints: int
    interval_steps: int
    attempts: tuple[Attempt, ...]

    @property
    def goodput(self) -> float:
        """Progress over all."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def loss_per_failure(self) -> float:
        """Seconds since the last checkpoint that a failure of a run that was under way costs, without the restart."""
        hit = sum(attempt.failed_rank is not None for attempt in self.attempts)
        return self.lost_seconds / hit if hit else 0.0


def simulate_goodput(
    failures: Failures, *, step_seconds: float, interval_steps: int, num_steps: int, seed: int = 0
) -> Goodput:
    """Play a run of so many steps, failure by failure.

    Raises:
        RequestError: an interval or a step without length, or a run that would hardly ever get to its next checkpoint.
    """
    if interval_steps < 1 or num_steps < 1 or not step_seconds > 0:
        raise RequestError(
            f"{num_steps} steps of {step_seconds:g} s with a checkpoint every {interval_steps} cannot be played; "
            f"give 1 or more, and steps that take time"
        )
    interval_steps = min(interval_steps, num_steps)
    work = interval_steps * step_seconds
    expected = expected_goodput(work, failures)
    if expected < LEAST_GOODPUT:
        raise RequestError(
            f"{work + failures.checkpoint:.4g} s from checkpoint to checkpoint and {failures.restart:.4g} s to restart, with a "
            f"failure every {failures.mtbf:.4g} s: {expected:.2g} of the time would be progress; "
            f"{_way_out(step_seconds, failures)}"
        )
    num_failures = num_steps * step_seconds / expected / failures.mtbf
    if num_failures > MOST_FAILURES:
        raise RequestError(
            f"{num_steps * step_seconds / 86_400:.4g} days of work with a failure every {failures.mtbf:.4g} s are about "
            f"{num_failures:.2g} failures, and {MOST_FAILURES} are played at most; give "
            f"--days {num_steps * step_seconds / 86_400 * MOST_FAILURES / num_failures:.2g} or fewer"
        )
    return _Run(failures, step_seconds, interval_steps, num_steps, seed).play()


def _way_out(step_seconds: float, failures: Failures) -> str:
    """What to change where hardly anything would be progress: the interval, or where none helps, what fails and what it costs."""
    best = best_interval(step_seconds, failures)
    if expected_goodput(best * step_seconds, failures) >= LEAST_GOODPUT:
        return f"set the interval to {best} steps, or use fewer devices"
    # A restart and a checkpoint between two failures, in the mean.
    enough = (failures.restart + failures.checkpoint + step_seconds) * failures.num_devices / 3600.0
    return (
        f"no interval helps; give --mtbf {enough:.3g} hours or more for these {failures.num_devices} devices, or a shorter "
        f"--restart and --checkpoint"
    )


class _Run:
    """The state of a run while it is played."""

    def __init__(self, failures: Failures, step_seconds: float, interval: int, num_steps: int, seed: int) -> None:
        self.failures, self.step_seconds, self.interval, self.num_steps = failures, step_seconds, interval, num_steps
        self.random = np.random.default_rng(derive_key("goodput", seed))
        self.now, self.done, self.num_checkpoints, self.num_failures = 0.0, 0, 0, 0
        self.lost = self.restarting = 0.0

    def play(self) -> Goodput:
        attempts = tuple(self._attempts())
        return Goodput(
            wall_seconds=self.now,
            useful_seconds=self.done * self.step_seconds,
            lost_seconds=self.lost,
            restart_seconds=self.restarting,
            checkpoint_seconds=self.num_checkpoints * self.failures.checkpoint,
            num_failures=self.num_failures,
            num_checkpoints=self.num_checkpoints,
            interval_steps=self.interval,
            attempts=attempts,
        )

    def _attempts(self) -> Iterator[Attempt]:
        until_failure = self._draw()
        while self.done < self.num_steps:
            start, first = self.now, self.done
            self._advance(until_failure)
            if self.done >= self.num_steps:
                yield Attempt(start, first, self.done - first, self.now, None, 0.0)
                return
            lost = start + until_failure - self.now
            self.lost += lost
            self.now = start + until_failure
            rank = int(self.random.integers(self.failures.num_devices))
            yield Attempt(start, first, self.done - first, self.now, rank, lost)
            until_failure = self._restart()

    def _advance(self, seconds: float) -> None:
        """Whole segments until a failure so far away, or until the run is done."""
        segment = self.interval * self.step_seconds + self.failures.checkpoint
        whole = min(int(seconds // segment), (self.num_steps - self.done) // self.interval)
        self.now += whole * segment
        self.done += whole * self.interval
        self.num_checkpoints += whole
        rest = self.num_steps - self.done
        last = rest * self.step_seconds + self.failures.checkpoint
        if 0 < rest < self.interval and whole * segment + last <= seconds:
            self.now += last
            self.done += rest
            self.num_checkpoints += 1

    def _restart(self) -> float:
        """Start again, as often as it takes; the seconds until the next failure, from when it goes on."""
        self.num_failures += 1
        while (until := self._draw()) < self.failures.restart:
            self.num_failures += 1
            self.restarting += until
            self.now += until
        self.restarting += self.failures.restart
        self.now += self.failures.restart
        return until - self.failures.restart

    def _draw(self) -> float:
        return float(self.random.exponential(self.failures.mtbf))
