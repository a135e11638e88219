"""Replicas that meet seldom, over slow links: local SGD and DiLoCo. Each site makes ``H`` steps by itself, then all average.

    a round    H steps of the slowest site, and one all-reduce over the sites
    all-reduce 2 (K - 1) latency + 2 (K - 1) / K bytes / bandwidth       a ring over K sites, each with one link of its own

Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767; Douillard et al., "DiLoCo", arXiv 2311.08105.
What averaging seldom does to the loss is not priced here: only time and bytes are.
"""

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
class Pace:
    """How fast sites go for one period."""

    period: int
    steps_per_second: float
    communication: float
    """Share of the time that averages take."""
    bytes_per_step: float
    """Sent by each site, in the mean."""


def pace_of(step_seconds: float, updates: LocalUpdates) -> Pace:
    """The pace of sites that are alike and steady."""
    round_seconds = updates.period * step_seconds + updates.sync_seconds
    others = updates.num_sites - 1
    moved = 2.0 * others / updates.num_sites * updates.num_bytes / updates.compression
    return Pace(
        period=updates.period,
        steps_per_second=updates.period / round_seconds if round_seconds else math.inf,
        communication=updates.sync_seconds / round_seconds if round_seconds else 0.0,
        bytes_per_step=moved / updates.period,
    )


def sweep(step_seconds: float, updates: LocalUpdates, periods: Iterable[int]) -> list[Pace]:
    """The pace for each of several periods."""
    return [pace_of(step_seconds, replace(updates, period=period)) for period in periods]


def periods_around(period: int) -> list[int]:
    """1, powers of ten, and the period itself, up to ten times as far."""
    powers = [10**power for power in range(12) if 10**power <= 10 * period]
    return sorted({*powers, period})


def simulate_rounds(steps: Array, updates: LocalUpdates, *, link_jitter: float = 0.0, seed: int = 0) -> Pace:
    """Play rounds from the seconds of every site's steps, by (site, step); steps after the last whole round are left out.

    Raises:
        RequestError: there is no whole round, or not a row for each site.
    """
    num_sites, num_steps = steps.shape
    num_rounds = num_steps // updates.period
    if num_sites != updates.num_sites or num_rounds < 1:
        raise RequestError(
            f"{num_steps} steps of {num_sites} sites hold no round of {updates.period} steps of {updates.num_sites} sites; "
            f"play {updates.period} steps or more of each site"
        )
    whole = steps[:, : num_rounds * updates.period].reshape(num_sites, num_rounds, updates.period)
    # A site that was slow in one step can be fast in the next: only the sums of a round are waited for.
    work = whole.sum(axis=2).max(axis=0)
    draws = np.random.default_rng(derive_key("widearea", seed)).standard_exponential((num_sites, num_rounds))
    syncs = updates.sync_seconds * (1.0 + link_jitter * draws.max(axis=0))
    wall = float(work.sum() + syncs.sum())
    steady = pace_of(1.0, updates)
    return Pace(
        period=updates.period,
        steps_per_second=num_rounds * updates.period / wall if wall else math.inf,
        communication=float(syncs.sum()) / wall if wall else 0.0,
        bytes_per_step=steady.bytes_per_step,
    )


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
