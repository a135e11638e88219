"""The book's inputs as a numbered row: what the primary's book is told, the backup's book is told in the same order.

A book is deterministic, so two that got the same row are the same. It also decides where checkpoints cut: the version at which
enough portions are in rounds, and the book as it was right then, are kept until the shards have been written.
"""

import json
from typing import Any

import msgspec

from shoal.paramserver.log.updates import Book
from shoal.paramserver.records import Change, Contribution, Wait

_CUTS_KEPT = 64
"""A server that is slow, or has just come, still finds the cut that the others vote on."""


class Input(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One input: what is asked, by whom, when."""

    kind: str
    """join, leave, take, commit, advance, tick, rebase or trim."""
    now: float
    worker: str = ""
    number: int = 0
    """Of a join: the worker's index. Of a trim: the version below which rounds are forgotten."""
    held: tuple[int, ...] = ()
    """Of a take: the portions that the worker knows it has."""
    contribution: Contribution | None = None
    memory: str = ""
    """Of an advance."""

    def encode(self) -> bytes:
        """As bytes for the wire."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, text: bytes) -> "Input":
        """Back from ``encode``."""
        return msgspec.msgpack.decode(text, type=cls)


class Ledger:
    """A book and the row of inputs that made it what it is.

    Args:
        book: taken over.
        cut_every: portions between checkpoints; 0: none.
    """

    def __init__(self, book: Book, *, cut_every: int = 0) -> None:
        self.book = book
        self.place = 0
        """Inputs so far."""
        self._cut_every = cut_every
        self._next_cut = self._cut_after(book.num_settled)
        self.cuts: dict[int, str] = {}
        """By version: the book as it was when that version was closed, as JSON."""

    def enter(self, given: Input) -> Any:
        """Tell the book; its answer. A wait changes nothing, so it has no place in the row."""
        answer = self._tell(given)
        if isinstance(answer, Wait):
            return answer
        self.place += 1
        change = answer if isinstance(answer, Change) else getattr(answer, "change", None)
        if change is not None and change.closed and self._cut_every and self.book.num_settled >= self._next_cut:
            self.cuts[self.book.closed] = self.cut()
            self._next_cut = self._cut_after(self.book.num_settled)
            for version in sorted(self.cuts)[:-_CUTS_KEPT]:
                del self.cuts[version]
        return answer

    def cut(self) -> str:
        """The book as a checkpoint needs it, as JSON: without the rounds that are in the weights, and without who was there."""
        plain = self.book.export()
        return json.dumps({**plain, "log": [], "trimmed": self.book.closed, "members": {}, "gone": []})

    def _cut_after(self, settled: int) -> int:
        return (settled // self._cut_every + 1) * self._cut_every if self._cut_every else 0

    def _tell(self, given: Input) -> Any:
        book = self.book
        match given.kind:
            case "join":
                return book.join(given.worker, given.number, given.now)
            case "leave":
                return book.leave(given.worker, given.now)
            case "take":
                return book.take(given.worker, given.now, given.held)
            case "commit":
                assert given.contribution is not None
                return book.commit(given.contribution, given.now)
            case "advance":
                assert given.contribution is not None
                return book.advance(given.contribution, given.memory)
            case "tick":
                return book.tick(given.now)
            case "rebase":
                return book.rebase(given.now)
            case "trim":
                return book.trim(given.number)
        raise AssertionError(f"no such input: {given.kind}")

    def export(self) -> bytes:
        """Everything, for a new backup."""
        values = {
            "book": self.book.export(),
            "place": self.place,
            "cut_every": self._cut_every,
            "next_cut": self._next_cut,
            "cuts": {str(version): text for version, text in self.cuts.items()},
        }
        return json.dumps(values).encode()

    @classmethod
    def restore(cls, text: bytes) -> "Ledger":
        """Back from ``export``."""
        plain = json.loads(text)
        ledger = cls(Book.restore(plain["book"]), cut_every=plain["cut_every"])
        ledger.place, ledger._next_cut = plain["place"], plain["next_cut"]
        ledger.cuts = {int(version): cut for version, cut in plain["cuts"].items()}
        return ledger


def restart_book(text: str, *, rule: str, workers: int, steps: int) -> Book | None:
    """The book that goes on from a cut: what was done and in a round stays done, everything else is to do.

    Args:
        text: as in ``Ledger.cuts``.
        rule: of the run that goes on.
        workers: its shares of a step.
        steps: its length.

    Returns:
        The book; None when the cut was made under another rule or another number of shares, and only its steps count.
    """
    plain = json.loads(text)
    portions = plain["portions"]
    if plain["rule"] != rule or portions["workers"] != workers or portions["opened"] > steps:
        return None
    undone = [*portions["todo"], *(portion for portion, _ in portions["doing"])]
    undone += [portion for one in plain["pending"] for portion in one["portions"]]
    closed = plain["trimmed"] + len(plain["log"])
    again = {"workers": workers, "steps": steps, "opened": portions["opened"], "todo": sorted(undone), "doing": []}
    emptied: dict[str, Any] = {"members": {}, "gone": [], "pending": [], "first_arrival": None, "unused": [], "log": []}
    return Book.restore({**plain, **emptied, "portions": again, "trimmed": closed})


def book_after(steps_done: int, book: Book, *, updates_per_step: int) -> Book:
    """An empty book as it would be after so many whole steps."""
    plain = book.export()
    plain["portions"] = {**plain["portions"], "opened": steps_done}
    return Book.restore({**plain, "trimmed": steps_done * updates_per_step})
