"""A script of how many replicas are present, such as ``4,3,1,4``, as deaths and arrivals at steps. Pure, no torch."""

from dataclasses import dataclass

from shoal.core.errors import RequestError

_POINTS = ("microbatch", "update", "start", "gradients")
_FIRST = 2
"""The first step, counted from 0, at which something happens: a step before it has been taken undisturbed."""


@dataclass(frozen=True, kw_only=True)
class ScriptedDeath:
    """The replica in a place dies in a step."""

    step: int
    present: int
    """Replicas that are present then."""
    place: int
    point: str


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens to a run."""

    counts: tuple[int, ...]
    deaths: tuple[ScriptedDeath, ...]
    arrivals: tuple[tuple[int, int], ...]
    """Before which step to wait until how many are present."""
    steps: int
    """That the run needs."""

    @property
    def num_early_deaths(self) -> int:
        """Deaths before others come for the first time."""
        first = min((step for step, _ in self.arrivals), default=self.steps)
        return sum(death.step < first for death in self.deaths)

    @property
    def text(self) -> str:
        """As it was written."""
        return ",".join(map(str, self.counts))


def parse_script(text: str, *, dp: int) -> Script:
    """Deaths one after another, each at another point of a step and of another place; then arrivals, which are waited for.

    Raises:
        RequestError: it is no list of counts that begins with the plan's dp.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if len(counts) < 2 or counts[0] != dp or not all(1 <= count <= dp for count in counts):
        raise RequestError(
            f"--elastic {text!r}: give how many replicas are present, one number after the other, beginning with the plan's "
            f"dp={dp} and none above it, such as {dp},{max(1, dp - 1)}"
        )
    deaths: list[ScriptedDeath] = []
    arrivals: list[tuple[int, int]] = []
    step, present = _FIRST, dp
    for count in counts[1:]:
        while present > count:
            number = len(deaths)
            place = (number + 1) % present
            deaths.append(ScriptedDeath(step=step, present=present, place=place, point=_POINTS[number % len(_POINTS)]))
            present, step = present - 1, step + 1
        if count > present:
            arrivals.append((step, count))
            present, step = count, step + 1
        step += 1
    return Script(counts=counts, deaths=tuple(deaths), arrivals=tuple(arrivals), steps=step + 2)
