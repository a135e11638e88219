"""The update log's inputs as a numbered row: what the primary's update log is told, the backup's update log is told in the same
order.

An update log is deterministic, so two that got the same row are the same. It also decides where checkpoints cut: the version at
which enough work units are in updates, and the update log as it was right then, are kept until the shards have been written.
"""

import json
from typing import Any

import msgspec

from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.records import Change, PushRecord, Wait

_CUTS_KEPT = 64
"""A server that is slow, or has just come, still finds the cut that the others vote on."""


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One input: what is asked, by whom, when."""

    kind: str
    """join, leave, take, commit, advance, tick, rebase, trim or grow."""
    now: float
    worker: str = ""
    number: int = 0
    """Of a join: the worker's index. Of a trim: the version below which updates are forgotten. Of a grow: a version of
    the data."""
    samples: int = 0
    """Of a grow: that the version has."""
    held: tuple[int, ...] = ()
    """Of a take: the work units that the worker knows it has."""
    push: PushRecord | None = None
    memory: str = ""
    """Of an advance."""

    def encode(self) -> bytes:
        """As bytes for the wire."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, text: bytes) -> "Command":
        """Back from ``encode``."""
        return msgspec.msgpack.decode(text, type=cls)


class CommandLog:
    """An update log and the row of inputs that made it what it is.

    Args:
        update log: taken over.
        cut_every: work units between checkpoints; 0: none.
    """

    def __init__(self, update_log: UpdateLog, *, cut_every: int = 0) -> None:
        self.update_log = update_log
        self.place = 0
        """Inputs so far."""
        self._cut_every = cut_every
        self._next_cut = self._cut_after(update_log.num_settled)
        self.cuts: dict[int, str] = {}
        """By version: the update log as it was when that version was closed, as JSON."""

    def enter(self, given: Command) -> Any:
        """Tell the update log; its answer. A wait changes nothing, so it has no place in the row."""
        answer = self._tell(given)
        if isinstance(answer, Wait):
            return answer
        self.place += 1
        change = answer if isinstance(answer, Change) else getattr(answer, "change", None)
        if change is not None and change.closed and self._cut_every and self.update_log.num_settled >= self._next_cut:
            self.cuts[self.update_log.closed] = self.cut()
            self._next_cut = self._cut_after(self.update_log.num_settled)
            for version in sorted(self.cuts)[:-_CUTS_KEPT]:
                del self.cuts[version]
        return answer

    def cut(self) -> str:
        """The update log as a checkpoint needs it, as JSON: without the updates that are in the weights, and without who was
        there."""
        plain = self.update_log.export()
        return json.dumps({**plain, "log": [], "trimmed": self.update_log.closed, "members": {}, "gone": []})

    def _cut_after(self, settled: int) -> int:
        return (settled // self._cut_every + 1) * self._cut_every if self._cut_every else 0

    def _tell(self, given: Command) -> Any:
        update_log = self.update_log
        match given.kind:
            case "join":
                return update_log.join(given.worker, given.number, given.now)
            case "leave":
                return update_log.leave(given.worker, given.now)
            case "take":
                return update_log.take(given.worker, given.now, given.held)
            case "commit":
                assert given.push is not None
                return update_log.commit(given.push, given.now)
            case "advance":
                assert given.push is not None
                return update_log.advance(given.push, given.memory)
            case "tick":
                return update_log.tick(given.now)
            case "rebase":
                return update_log.rebase(given.now)
            case "trim":
                return update_log.trim(given.number)
            case "grow":
                assert update_log.receipts.epochs is not None, "nothing grows in this run"
                return update_log.receipts.epochs.tell(given.number, given.samples)
        raise AssertionError(f"no such input: {given.kind}")

    def export(self) -> bytes:
        """Everything, for a new backup."""
        values = {
            "book": self.update_log.export(),
            "place": self.place,
            "cut_every": self._cut_every,
            "next_cut": self._next_cut,
            "cuts": {str(version): text for version, text in self.cuts.items()},
        }
        return json.dumps(values).encode()

    @classmethod
    def restore(cls, text: bytes) -> "CommandLog":
        """Back from ``export``."""
        plain = json.loads(text)
        command_log = cls(UpdateLog.restore(plain["book"]), cut_every=plain["cut_every"])
        command_log.place, command_log._next_cut = plain["place"], plain["next_cut"]
        command_log.cuts = {int(version): cut for version, cut in plain["cuts"].items()}
        return command_log


def restart_update_log(text: str, *, rule: str, workers: int, steps: int) -> UpdateLog | None:
    """The update log that goes on from a cut: what was done and in an update stays done, everything else is to do.

    Args:
        text: as in ``CommandLog.cuts``.
        rule: of the run that goes on.
        workers: its shares of a step.
        steps: its length.

    Returns:
        The update log; None when the cut was made under another rule or another number of shares, and only its steps count.
    """
    plain = json.loads(text)
    units = plain["portions"]
    if plain["rule"] != rule or units["workers"] != workers or units["opened"] > steps:
        return None
    undone = [*units["todo"], *(unit for unit, _ in units["doing"])]
    undone += [unit for one in plain["pending"] for unit in one["portions"]]
    closed = plain["trimmed"] + len(plain["log"])
    again = {"workers": workers, "steps": steps, "opened": units["opened"], "todo": sorted(undone), "doing": []}
    emptied: dict[str, Any] = {
        "members": {},
        "gone": [],
        "pending": [],
        "first_arrival": None,
        "unused": [],
        "log": [],
        "own_shares": {},
    }
    return UpdateLog.restore({**plain, **emptied, "portions": again, "trimmed": closed})


def update_log_after(steps_done: int, update_log: UpdateLog, *, updates_per_step: int) -> UpdateLog:
    """An empty update log as it would be after so many whole steps."""
    plain = update_log.export()
    plain["portions"] = {**plain["portions"], "opened": steps_done}
    plain["receipts"] = {**plain["receipts"], "first": steps_done * update_log.workers}
    after = UpdateLog.restore({**plain, "trimmed": steps_done * updates_per_step})
    if after.receipts.epochs is not None:
        after.receipts.epochs.begin_at(steps_done)
    return after
