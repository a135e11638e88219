"""The update rules of the parameter servers, as one value that prints and parses as one word of the plan. No torch.

Every rule is the same machine with other settings: how many pushes make an update (``quorum``; None: every share of a
step), how many updates a step may be ahead of the ones that are closed (``staleness``; None: any), how long a worker waits at
random before it pushes (``wait``), and after how many steps it pushes and fetches. ::

    text                quorum   staleness   wait   push, fetch
    bsp                 None     0           0      1, 1
    ssp:S               None     S           0      1, 1
    async               1        None        0      1, 1
    half:K,W            K        None        W      1, 1         an update is K arrivals, or those there are after the wait
    downpour:N,M        1        None        0      N, M         Dean et al. 2012, "Large Scale Distributed Deep Networks"
    lbfgs               None     0           0      1, 1         the step itself is Sandblaster's, driven from outside
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shoal.core.errors import RequestError, did_you_mean

RuleKind = Literal["bsp", "ssp", "async", "half", "downpour", "lbfgs"]

DEFAULT_STALENESS = 3
DEFAULT_WAIT = 0.25
DEFAULT_EVERY = 5
DEFAULT_SHARE = 0.8
"""Share of the workers whose arrival closes an update of ``half`` when no number is given."""
LONGEST_WAIT = 10.0

_FORMS = {
    "bsp": "bsp",
    "ssp": "ssp:S such as ssp:3",
    "async": "async",
    "half": "half:K,W such as half:3,0.25",
    "downpour": "downpour:PUSH,FETCH such as downpour:5,5",
    "lbfgs": "lbfgs",
}


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """When pushes become an update, and how far workers may drift apart."""

    kind: RuleKind
    quorum: int | None = None
    """Pushes that close an update; None: one from every share of a step (``half``: not derived yet, see ``resolve``)."""
    staleness: int | None = 0
    """Steps by which a work unit may be ahead of the closed updates; None: any number."""
    wait: float = 0.0
    """Longest random wait before a push, in mean step times of the worker."""
    push_every: int = 1
    """Work units that a worker adds up before it pushes."""
    fetch_every: int = 1
    """Work units after which a worker fetches weights anew."""

    @classmethod
    def parse(cls, text: str) -> "UpdateRule":
        """The rule that a word of the plan says.

        Raises:
            RequestError: the name is unknown, or its numbers are missing, too many or out of range.
        """
        name, colon, given = text.partition(":")
        if name not in _FORMS:
            raise RequestError(f"update rule {text!r}: unknown name {name!r}; {did_you_mean(name, _FORMS)}")
        numbers = given.split(",") if colon else []
        match name:
            case "ssp":
                _expect(text, name, numbers, (0, 1))
                bound = _whole(text, "the staleness", numbers[0], 0) if numbers else DEFAULT_STALENESS
                return cls(kind="ssp", staleness=bound)
            case "half":
                _expect(text, name, numbers, (0, 2))
                quorum = _whole(text, "the number of arrivals", numbers[0], 1) if numbers else None
                wait = _wait(text, numbers[1]) if numbers else DEFAULT_WAIT
                return cls(kind="half", quorum=quorum, staleness=None, wait=wait)
            case "downpour":
                _expect(text, name, numbers, (0, 2))
                push = _whole(text, "the steps between pushes", numbers[0], 1) if numbers else DEFAULT_EVERY
                fetch = _whole(text, "the steps between fetches", numbers[1], 1) if numbers else DEFAULT_EVERY
                return cls(kind="downpour", quorum=1, staleness=None, push_every=push, fetch_every=fetch)
        _expect(text, name, numbers, (0,))
        if name == "async":
            return cls(kind="async", quorum=1, staleness=None)
        return cls(kind="lbfgs" if name == "lbfgs" else "bsp")

    def __str__(self) -> str:
        match self.kind:
            case "ssp":
                return f"ssp:{self.staleness}"
            case "half":
                return "half" if self.quorum is None else f"half:{self.quorum},{_short(self.wait)}"
            case "downpour":
                return f"downpour:{self.push_every},{self.fetch_every}"
        return self.kind

    @property
    def is_stepwise(self) -> bool:
        """True when an update is all shares of one step, so that who computed them changes nothing."""
        return self.quorum is None and self.kind != "half"

    def resolve(self, workers: int) -> "UpdateRule":
        """This rule for so many workers, with every derived number filled in.

        Raises:
            RequestError: it waits for more arrivals than there are workers.
        """
        if self.kind != "half":
            return self
        if self.quorum is None:
            return replace(self, quorum=max(1, math.ceil(DEFAULT_SHARE * workers)))
        if self.quorum > workers:
            raise RequestError(
                f"update rule '{self}' waits for {self.quorum} arrivals from {workers} workers; "
                f"use half:{workers},{_short(self.wait)}, or start {self.quorum} workers"
            )
        return self


def _expect(text: str, name: str, numbers: list[str], counts: tuple[int, ...]) -> None:
    if len(numbers) not in counts:
        allowed = " or ".join(str(count) for count in counts)
        raise RequestError(
            f"update rule {text!r}: {name} takes {allowed} numbers, not {len(numbers)}; write {_FORMS[name]}"
        )


def _whole(text: str, what: str, value: str, low: int) -> int:
    # int() would also take spaces, signs and underscores, which then print otherwise than they were written.
    number = int(value) if value.isascii() and value.isdigit() else None
    if number is None or number < low:
        raise RequestError(f"update rule {text!r}: {what} is {value!r}, and must be a whole number of {low} or more")
    return number


def _wait(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= LONGEST_WAIT:
        raise RequestError(
            f"update rule {text!r}: the wait is {value!r}, and must be a number from 0 to {LONGEST_WAIT:g} (in step times)"
        )
    return number + 0.0  # -0.0 prints with its sign


def _short(number: float) -> str:
    return repr(number).removesuffix(".0")


assert set(_FORMS) == set(get_args(RuleKind))
