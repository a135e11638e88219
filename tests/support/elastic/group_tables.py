"""The decisions of an elastic group as short lines, for tables: what happened, and the list of instructions.

A view reads ``3: a b c / 4``: epoch 3, replicas a, b and c, four logical ones. A member of replica a is ``a.1``, and of a
second start of it ``a.2``; with several processes in a replica ``a.1/0`` and ``a.1/1``.
"""

from collections.abc import Iterable

from shoal.elastic.group import step
from shoal.elastic.groupchanges import (
    Died,
    Ended,
    Event,
    Expel,
    Failed,
    GiveUp,
    Heard,
    Instruction,
    Joined,
    Left,
    Order,
    Publish,
    Ready,
    Remind,
    Slow,
    Ticked,
)
from shoal.elastic.groupstate import State, Wanted
from shoal.elastic.groupview import GroupView


def show_view(view: GroupView) -> str:
    return f"{view.epoch}: {' '.join(one.name for one in view.replicas)} / {view.num_logical}"


def show(instruction: Instruction) -> str:
    match instruction:
        case Publish(view=view, is_retry=is_retry):
            return f"{'retry' if is_retry else 'publish'} {show_view(view)}"
        case Remind(host=host, view=view):
            return f"remind {host} of {view.epoch}"
        case Order(replica=replica, host=host, spare=spare):
            return f"order {replica} on {host}{' as spare' if spare else ''}"
        case Expel(member=member):
            return f"expel {member}"
        case GiveUp():
            return "give up"


class Coordinator:
    """One coordinator, and a clock that is set by hand."""

    def __init__(self, num_logical: int, **wanted: object) -> None:
        self.state = State(wanted=Wanted(num_logical=num_logical, **wanted))  # type: ignore[arg-type]
        self.now = 0.0
        self.raw: list[Instruction] = []
        """The last ones that there were."""

    def do(self, event: Event) -> list[str]:
        self.state, instructions = step(self.state, event)
        self.raw = instructions or self.raw
        return [show(one) for one in instructions]

    def join(self, member: str, host: str = "h0", *, spare: bool = False, position: int = 0) -> list[str]:
        replica = member.rpartition(".")[0] or member
        return self.do(Joined(member=member, replica=replica, host=host, spare=spare, position=position, now=self.now))

    def ready(self, member: str) -> list[str]:
        return self.do(Ready(member=member, now=self.now))

    def enter(self, member: str, host: str = "h0", *, spare: bool = False, position: int = 0) -> list[str]:
        """It joins, and is ready at once."""
        return self.join(member, host, spare=spare, position=position) + self.ready(member)

    def die(self, member: str) -> list[str]:
        return self.do(Died(member=member, cause="killed by signal 9", now=self.now))

    def leave(self, member: str) -> list[str]:
        return self.do(Left(member=member, reason="SIGTERM", now=self.now))

    def slow(self, member: str) -> list[str]:
        return self.do(Slow(member=member, reason="compute", now=self.now))

    def fail(self, member: str, *suspects: str, epoch: int | None = None) -> list[str]:
        at = self.state.epoch if epoch is None else epoch
        return self.do(Failed(member=member, epoch=at, suspects=suspects, now=self.now))

    def hear(
        self,
        host: str,
        slots: int | None = None,
        *,
        agent: str = "",
        epoch: int | None = None,
        members: tuple[str, ...] = (),
        replicas: tuple[str, ...] | None = None,
    ) -> list[str]:
        return self.do(
            Heard(
                host=host,
                slots=slots,
                agent=agent,
                epoch=epoch,
                members=members,
                replicas=replicas,
                now=self.now,
            )
        )

    def end(self) -> list[str]:
        return self.do(Ended(now=self.now))

    def tick(self) -> list[str]:
        return self.do(Ticked(now=self.now))

    def wait(self, seconds: float, heard: Iterable[str] = ()) -> list[str]:
        """Let time go on in tenths of a second, while these hosts are heard."""
        found: list[str] = []
        for _ in range(round(seconds * 10)):
            self.now = round(self.now + 0.1, 6)
            for host in heard:
                found += self.hear(host)
            found += self.tick()
        return found


def running(*replicas: str, hosts: Iterable[str] = (), **wanted: object) -> Coordinator:
    """A run of replicas a.1, b.1, ..., each on its host, or all on h0."""
    num_logical = wanted.pop("num_logical", len(replicas))
    coordinator = Coordinator(num_logical, **wanted)  # type: ignore[arg-type]
    for member, host in zip(replicas, tuple(hosts) or ("h0",) * len(replicas), strict=True):
        coordinator.enter(member, host)
    return coordinator
