"""Replicas that meet seldom, over slow links: local SGD, DiLoCo and the other policies of ``sync``. Each site, or island, makes
steps by itself; in a cycle of steps that repeats there are exchanges, for which all wait for each other.

    a round    H steps of the slowest site, and one all-reduce over the sites
    all-reduce 2 (K - 1) latency + 2 (K - 1) / K bytes / bandwidth       a ring over K sites, each with one link of its own

Sites that average everything every H steps over a link of their own are ``LocalUpdates``; a plan's ``sync`` and ``compress`` are
priced by ``pricing/agreement.py``. Both are played as ``Rounds``. An exchange may begin some steps before it is needed, as those
of ``stream`` do: it goes on beside these steps, and only what is left of it is waited for.

Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767; Douillard et al., "DiLoCo", arXiv 2311.08105.
What averaging seldom does to the loss is not priced here: only time and bytes are.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError, nearest
from shoal.core.seeding import derive_key
from shoal.planner.hardware.presets import LINKS, Link

Array = NDArray[np.float64]
_LINK = re.compile(
    r"(?P<rate>\d+(?:\.\d+)?)\s*(?P<scale>[kMG]?)(?P<unit>bit|b|B)/s\s*[,:]\s*(?P<time>\d+(?:\.\d+)?)\s*(?P<in>us|ms|s)"
)
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class LocalUpdates:
    """Sites that average every so many steps."""

    period: int
    """Steps between averages: H."""
    num_sites: int
    num_bytes: float
    """What a site brings to an average, before compression: all weights of the model."""
    bandwidth: float
    """Bytes per second that a site sends, and receives."""
    latency: float
    compression: float = 1.0
    """How many times fewer bytes travel."""

    def __post_init__(self) -> None:
        for name, value in (("local steps", self.period), ("sites", self.num_sites)):
            if value < 1:
                raise RequestError(f"{name} are {value}, and must be 1 or more")
        for name, number, least in (
            ("bytes", self.num_bytes, 0.0),
            ("latency", self.latency, 0.0),
            ("bandwidth", self.bandwidth, math.ulp(0.0)),
            ("compression", self.compression, 1.0),
        ):
            if not least <= number < math.inf:
                wanted = "above 0" if least == math.ulp(0.0) else f"{least:g} or more"
                raise RequestError(f"{name} of {number:g} cannot be; give {wanted}")

    @property
    def sync_seconds(self) -> float:
        """One average over all sites."""
        others = self.num_sites - 1
        moved = 2.0 * others / self.num_sites * self.num_bytes / self.compression
        return 2.0 * others * self.latency + moved / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Exchanges between sites, by the steps of a cycle; most steps have none."""

    num_sites: int
    meets: tuple[bool, ...]
    """Steps of the cycle after which sites wait for each other."""
    exchange: tuple[float, ...]
    """Seconds on the wire, after each step of the cycle."""
    work: tuple[float, ...]
    """Seconds of each site's own arithmetic for it: codecs, the outer step."""
    sent: tuple[float, ...]
    """Bytes that leave a rank, or a site."""
    delay: int = 0
    """Steps that an exchange may go on before it is needed."""
    told: tuple[float, ...] = ()
    """Seconds of what sites tell each other after each step of the cycle, which all wait for at once; empty for nothing."""

    @property
    def length(self) -> int:
        """Steps of a cycle."""
        return len(self.exchange)

    @property
    def round_seconds(self) -> float:
        """Of the longest exchange with its arithmetic, if nothing hid it."""
        return max(exchange + work for exchange, work in zip(self.exchange, self.work, strict=True))

    @property
    def bytes_per_step(self) -> float:
        """In the mean."""
        return sum(self.sent) / self.length


def rounds_of(updates: LocalUpdates) -> Rounds:
    """An average of everything after the last step of every period."""
    silent = (0.0,) * (updates.period - 1)
    others = updates.num_sites - 1
    moved = 2.0 * others / updates.num_sites * updates.num_bytes / updates.compression
    return Rounds(
        num_sites=updates.num_sites,
        meets=(*(False for _ in silent), True),
        exchange=(*silent, updates.sync_seconds),
        work=(*silent, 0.0),
        sent=(*silent, moved),
    )


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast sites go for one period."""

    period: int
    steps_per_second: float
    communication: float
    """Share of the time that exchanges take, beyond the steps of the slowest site."""
    bytes_per_step: float
    """Sent by each site, in the mean."""
    longest_seconds: float = 0.0
    """Of the longest step, with what it waits for."""


def pace_of(step_seconds: float, updates: LocalUpdates) -> Pace:
    """The pace of sites that are alike and steady."""
    round_seconds = updates.period * step_seconds + updates.sync_seconds
    return Pace(
        period=updates.period,
        steps_per_second=updates.period / round_seconds if round_seconds else math.inf,
        communication=updates.sync_seconds / round_seconds if round_seconds else 0.0,
        bytes_per_step=rounds_of(updates).bytes_per_step,
        longest_seconds=step_seconds + updates.sync_seconds,
    )


def sweep(step_seconds: float, updates: LocalUpdates, periods: Iterable[int]) -> list[Pace]:
    """The pace for each of several periods."""
    return [pace_of(step_seconds, replace(updates, period=period)) for period in periods]


def periods_around(period: int) -> list[int]:
    """1, powers of ten, and the period itself, up to ten times as far."""
    powers = [10**power for power in range(12) if 10**power <= 10 * period]
    return sorted({*powers, period})


def simulate_rounds(steps: Array, updates: LocalUpdates, *, link_jitter: float = 0.0, seed: int = 0) -> Pace:
    """Play averages of everything from the seconds of every site's steps, by (site, step).

    Steps after the last whole round are left out.

    Raises:
        RequestError: there is no whole round, or not a row for each site.
    """
    return play_rounds(steps, rounds_of(updates), period=updates.period, link_jitter=link_jitter, seed=seed).pace


@dataclass(frozen=True, kw_only=True)
class PlayedRounds:
    """Steps of sites with the exchanges between them."""

    pace: Pace
    seconds: Array
    """Of every step of the slowest site, with what it waits for."""
    waited: Array
    """Of it, what the step takes beyond a step alone of that site."""
    has_round: NDArray[np.bool_]
    """Steps that end with an exchange of weights."""


def play_rounds(steps: Array, rounds: Rounds, *, period: int, link_jitter: float = 0.0, seed: int = 0) -> PlayedRounds:
    """Play exchanges from the seconds of every site's steps, by (site, step); what is after the last whole cycle is left out.

    Args:
        steps: seconds of each step of each site, alone.
        rounds: what they exchange.
        period: steps between rounds, to be said.
        link_jitter: mean slow-down of a site's link in an exchange.
        seed: of the draws.

    Raises:
        RequestError: there is no whole cycle, or not a row for each site.
    """
    num_sites, num_steps = steps.shape
    num_cycles = num_steps // rounds.length
    if num_sites != rounds.num_sites or num_cycles < 1:
        raise RequestError(
            f"{num_steps} steps of {num_sites} sites hold no round of {rounds.length} steps of {rounds.num_sites} sites; "
            f"play {rounds.length} steps or more of each site"
        )
    count = num_cycles * rounds.length
    meets = [at for at in range(count) if rounds.meets[at % rounds.length]]
    draws = np.random.default_rng(derive_key("widearea", seed)).standard_exponential((num_sites, len(meets)))
    slower = 1.0 + link_jitter * draws.max(axis=0)
    now = np.zeros(num_sites)
    # When each step ends on the site that is last; a site that was slow in one step can be fast in the next.
    ends = np.zeros(count)
    begun = np.concatenate([np.zeros((num_sites, 1)), np.cumsum(steps[:, :count], axis=1)], axis=1)
    done, free = 0, 0.0
    for index, at in enumerate(meets):
        here = at % rounds.length
        starts = max(done, at + 1 - rounds.delay)
        # Alone until the exchange begins, which is when the last has come; then beside it, until it is needed.
        ready = now + begun[:, starts] - begun[:, done]
        over = max(free, float(ready.max())) + rounds.exchange[here] * float(slower[index])
        alone = now + begun[:, at + 1] - begun[:, done]
        ends[done:at] = _last_ends(now, begun, done, at)
        now = np.maximum(alone, over) + rounds.work[here]
        if rounds.told and rounds.told[here]:
            now = np.full(num_sites, now.max() + rounds.told[here])
        done, free = at + 1, over
        ends[at] = float(now.max())
    ends[done:] = _last_ends(now, begun, done, count)
    seconds = np.diff(ends, prepend=0.0)
    wall = float(ends[-1])
    # What the slowest site takes alone between two meetings is work; the rest is exchanges.
    bounds = [0, *(at + 1 for at in meets), count]
    work = sum(float((begun[:, b] - begun[:, a]).max()) for a, b in itertools.pairwise(bounds))
    weights = max(rounds.sent) / 2
    pace = Pace(
        period=period,
        steps_per_second=count / wall if wall else math.inf,
        communication=max(0.0, wall - work) / wall if wall else 0.0,
        bytes_per_step=rounds.bytes_per_step,
        longest_seconds=float(seconds.max()),
    )
    return PlayedRounds(
        pace=pace,
        seconds=seconds,
        waited=np.maximum(0.0, seconds - steps[:, :count].max(axis=0)),
        has_round=np.array([rounds.sent[at % rounds.length] >= weights > 0 for at in range(count)]),
    )


def _last_ends(now: Array, begun: Array, first: int, end: int) -> Array:
    """When the last site ends each of some steps that all go through alone."""
    found: Array = (now[:, None] + begun[:, first + 1 : end + 1] - begun[:, [first]]).max(axis=0, initial=0.0)
    return found


def find_link(text: str) -> Link:
    """A link by its name, or from ``1Gbit/s,30ms``.

    Raises:
        RequestError: the text is neither.
    """
    if text in LINKS:
        return LINKS[text]
    found = _LINK.fullmatch(text.strip())
    if found is None:
        close = nearest(text, LINKS)
        offer = f"did you mean {close!r}? " if close else ""
        raise RequestError(
            f"there is no link {text!r}; {offer}write one of {', '.join(LINKS)}, or bandwidth and latency such as 1Gbit/s,30ms"
        )
    bits = 1.0 if found["unit"] == "B" else 8.0
    bandwidth = float(found["rate"]) * _SCALE[found["scale"]] / bits
    if bandwidth <= 0:
        raise RequestError(f"link {text!r} carries {bandwidth:g} bytes a second; give a bandwidth above 0")
    return Link(bandwidth=bandwidth, latency=float(found["time"]) * _TIME[found["in"]], source="given")
