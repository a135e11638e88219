"""How replicas agree, as one value that prints and parses as the plan's key ``sync``. No torch.

Islands are groups of ranks that sum their gradients at every step; this rule says what happens between islands::

    text               at a round                                                          source
    allreduce          there are no islands: all replicas sum their gradients at every step
    local:H            the mean of the islands' weights, every H steps                     McMahan et al. 2017, "FedAvg"
    local:30s          the same, every 30 seconds, at a step that one rank decides
    local:H@S          all-reduce for S steps, then the above                              Lin et al. 2020, "post-local SGD"
    diloco:H           an outer Nesterov step on the mean change of the weights            Douillard et al. 2023, "DiLoCo"
    stream:H,F,T       DiLoCo on F fragments in turn, applied T steps after they are sent  Douillard et al. 2025, streaming
    sparse:H,K         the share K of the change that is largest, and the rest later       Sarfi et al. 2025, "SparseLoCo"
    slowmo:H           slow momentum on the mean change of the weights                     Wang et al. 2020, "SlowMo"
    easgd:H            islands are drawn to a center, and the center to them               Zhang et al. 2015, "EASGD"
    gossip:GRAPH[,H]   a weighted mean with the neighbours                                 Lian et al. 2017, "D-PSGD"
    pushsum:GRAPH[,H]  the same over directed graphs, with the bias taken out              Assran et al. 2019, "SGP"
"""

from dataclasses import dataclass
from typing import Literal

from shoal.core.errors import RequestError, did_you_mean
from shoal.core.units import parse_duration

SyncKind = Literal["allreduce", "local", "diloco", "stream", "sparse", "slowmo", "easgd", "gossip", "pushsum"]

GRAPHS = ("ring", "exponential", "random", "complete")
"""Graphs that have a name; any other is a file that ends in .json."""
DEFAULT_PERIOD = {"local": 10, "diloco": 50, "slowmo": 48, "easgd": 10, "gossip": 1, "pushsum": 1}

_FORMS = {
    "allreduce": "allreduce",
    "local": "local:H such as local:10, local:30s, or local:10@100 for all-reduce until step 100",
    "diloco": "diloco:H such as diloco:50",
    "stream": "stream:H,FRAGMENTS,DELAY such as stream:48,4,2",
    "sparse": "sparse:H,K such as sparse:50,0.03, where K is the share of each chunk that is sent",
    "slowmo": "slowmo:H such as slowmo:48",
    "easgd": "easgd:H such as easgd:10",
    "gossip": "gossip:GRAPH such as gossip:ring, or gossip:ring,5 for every 5 steps",
    "pushsum": "pushsum:GRAPH such as pushsum:exponential",
}


@dataclass(frozen=True, kw_only=True)
class SyncRule:
    """When islands exchange weights, and with whom."""

    kind: SyncKind
    period: int = 1
    """Steps between rounds; where ``seconds`` are given, the steps after which the clock is looked at."""
    seconds: float | None = None
    """Seconds between rounds, in place of steps."""
    start: int = 0
    """Steps at the beginning during which all islands sum their gradients (post-local); rounds are counted from there."""
    fragments: int = 1
    """Parts of the model that have rounds of their own (``stream``)."""
    delay: int = 0
    """Steps between sending a fragment's change and applying the round (``stream``)."""
    keep: float = 1.0
    """Share of each chunk of a change that is sent in a round (``sparse``)."""
    graph: str | None = None
    """Who is whose neighbour: a name of ``GRAPHS``, or a file."""

    @classmethod
    def parse(cls, text: str) -> "SyncRule":
        """The rule that a word of the plan says.

        Raises:
            RequestError: the name is unknown, or its numbers are missing, too many or out of range.
        """
        name, colon, given = text.partition(":")
        if name not in _FORMS:
            raise RequestError(f"sync={text}: unknown policy {name!r}; {did_you_mean(name, _FORMS)}")
        words = given.split(",") if colon else []
        match name:
            case "allreduce":
                _expect(text, name, words, 0, 0)
                return cls(kind="allreduce")
            case "local":
                _expect(text, name, words, 0, 1)
                return _parse_local(text, words[0] if words else str(DEFAULT_PERIOD["local"]))
            case "diloco" | "slowmo" | "easgd":
                _expect(text, name, words, 0, 1)
                period = _whole(text, "H", words[0], 1) if words else DEFAULT_PERIOD[name]
                return cls(kind=name, period=period)
            case "stream":
                _expect(text, name, words, 3, 3)
                return _parse_stream(text, words)
            case "sparse":
                _expect(text, name, words, 2, 2)
                return cls(kind="sparse", period=_whole(text, "H", words[0], 1), keep=_share(text, words[1]))
            case _:
                _expect(text, name, words, 1, 2)
                period = _whole(text, "H", words[1], 1) if len(words) > 1 else 1
                kind: SyncKind = "gossip" if name == "gossip" else "pushsum"
                return cls(kind=kind, period=period, graph=_graph(text, words[0]))

    def __str__(self) -> str:
        match self.kind:
            case "allreduce":
                return "allreduce"
            case "local":
                every = str(self.period) if self.seconds is None else f"{self.seconds:g}s"
                return f"local:{every}" + (f"@{self.start}" if self.start else "")
            case "stream":
                return f"stream:{self.period},{self.fragments},{self.delay}"
            case "sparse":
                return f"sparse:{self.period},{self.keep:g}"
            case "gossip" | "pushsum":
                return f"{self.kind}:{self.graph}" + (f",{self.period}" if self.period > 1 else "")
            case _:
                return f"{self.kind}:{self.period}"

    @property
    def is_island_rule(self) -> bool:
        """False for all-reduce, under which there are no islands."""
        return self.kind != "allreduce"

    def is_round(self, step: int) -> bool:
        """True when a round is due after step number ``step``, counted from 0, by the number of steps alone: of the whole model,
        or of ``stream`` when a fragment is applied."""
        if self.kind == "stream":
            return bool(self.fragments_applied(step))
        return self.seconds is None and step >= self.start and (step - self.start + 1) % self.period == 0

    def fragments_sent(self, step: int) -> list[int]:
        """Fragments of ``stream`` whose change is sent after this step: fragment p of F after step H + p H / F, counted from 1,
        and every H steps from there on."""
        since = (step + 1 - fragment * self.period // self.fragments for fragment in range(self.fragments))
        return [fragment for fragment, steps in enumerate(since) if steps > 0 and steps % self.period == 0]

    def fragments_applied(self, step: int) -> list[int]:
        """Fragments that are applied after this step: those that were sent so many steps before."""
        return self.fragments_sent(step - self.delay)


def _parse_local(text: str, given: str) -> SyncRule:
    every, at, start = given.partition("@")
    first = _whole(text, "the step after @", start, 1) if at else 0
    if every[-1:] in ("s", "m", "h"):
        try:
            seconds = parse_duration(every)
        except (RequestError, ValueError) as error:
            raise RequestError(f"sync={text}: {error}") from error
        if seconds <= 0:
            raise RequestError(f"sync={text}: rounds are {every} apart; write a time above zero, such as local:30s")
        return SyncRule(kind="local", seconds=seconds, start=first)
    return SyncRule(kind="local", period=_whole(text, "H", every, 1), start=first)


def _parse_stream(text: str, words: list[str]) -> SyncRule:
    period = _whole(text, "H", words[0], 1)
    fragments = _whole(text, "the number of fragments", words[1], 1)
    delay = _whole(text, "the delay", words[2], 0)
    if period % fragments:
        near = max(fragments, period - period % fragments)
        raise RequestError(
            f"sync={text}: {fragments} fragments take turns within {period} steps, which they do not divide; "
            f"write stream:{near},{fragments},{delay}"
        )
    if delay >= period // fragments:
        raise RequestError(
            f"sync={text}: a fragment is applied {delay} steps after it is sent, and the next one is sent after "
            f"{period // fragments}; lower the delay to {period // fragments - 1} or less"
        )
    return SyncRule(kind="stream", period=period, fragments=fragments, delay=delay)


def _graph(text: str, given: str) -> str:
    if given in GRAPHS or given.endswith(".json"):
        return given
    raise RequestError(
        f"sync={text}: {given!r} is neither a graph nor a file that ends in .json; {did_you_mean(given, GRAPHS)}"
    )


def _share(text: str, given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        raise RequestError(f"sync={text}: K is a share such as 0.03, not {given!r}; write {_FORMS['sparse']}") from None
    if not 0 < value <= 1:
        raise RequestError(f"sync={text}: K is {value:g}, and a share is above 0 and at most 1; write 0.03 for 3%")
    return value


def _expect(text: str, name: str, words: list[str], least: int, most: int) -> None:
    if not least <= len(words) <= most:
        raise RequestError(f"sync={text}: {len(words)} values after the colon do not fit; write {_FORMS[name]}")


def _whole(text: str, what: str, given: str, least: int) -> int:
    try:
        value = int(given)
    except ValueError:
        raise RequestError(
            f"sync={text}: {what} is a whole number, not {given!r}; write {_FORMS[text.partition(':')[0]]}"
        ) from None
    if value < least:
        raise RequestError(f"sync={text}: {what} is {value}, below {least}; set it to {least} or more")
    return value
