"""The center's decisions as short lines, for tables: what happened, and the list of instructions.

A view reads ``2: a b / w / a+b b+a``: epoch 2, servers a and b, worker w, shard 0 at a with backup b, and so on; ``~c3`` joins
under order 3, and ``#1`` at the end is the history.
"""

from collections.abc import Iterable

from shoal.elastic.changes import (
    Ask,
    Collect,
    Elected,
    Event,
    Failed,
    GiveUp,
    Heard,
    Instruction,
    Joined,
    Left,
    Publish,
    Refuse,
    Release,
    Remind,
    Restore,
    Stall,
    Sync,
    Synced,
    Ticked,
)
from shoal.elastic.membership import State, Wanted, step
from shoal.elastic.view import Chain, Member, View


def member(id: str, name: str = "") -> Member:
    """Workers are v, w, x, y, z; all else are servers."""
    return Member(id=id, name=name or f"name-{id}", role="worker" if id[0] in "vwxyz" else "server")


def show_view(view: View) -> str:
    def show(chain: Chain) -> str:
        return "+".join(chain.synced) + "".join(f"~{one.server}{one.order}" for one in chain.joining)

    ids = " ".join(one.id for one in view.servers), " ".join(one.id for one in view.workers)
    history = f" #{view.history}" if view.history else ""
    return f"{view.epoch}: {ids[0]} / {ids[1]} / {' '.join(map(show, view.chains))}{history}"


def show(instruction: Instruction) -> str:
    match instruction:
        case Publish(view=view):
            return f"publish {show_view(view)}"
        case Remind(id=id, view=view):
            return f"remind {id} of {view.epoch}"
        case Ask(id=id):
            return f"ask {id}"
        case Restore(shards=shards, history=history):
            return f"restore {shards} #{history}"
        case Release(worker=worker):
            return f"release {worker}"
        case Sync(shard=shard, source=source, target=target, order=order):
            return f"sync {shard} {source}->{target} {order}"
        case Collect(kind=kind, id=id, shard=shard):
            return f"collect {kind} {id}" + ("" if shard is None else f" {shard}")
        case Refuse(id=id, code=code):
            return f"refuse {id} {code}"
        case Stall(id=id):
            return f"stall {id}"
        case GiveUp():
            return "give up"


class Center:
    """The state machine with a clock, fed by short words."""

    def __init__(self, *, servers: int = 2, backups: int = 1, epoch: int = 1, **election: object) -> None:
        self.now = 100.0
        wanted = Wanted(servers=servers, backups=backups, dead_seconds=5.0, join_seconds=30.0)
        self.state = State(wanted=wanted)
        self.raw: list[Instruction] = []
        self.first = self.do(Elected(epoch=epoch, now=self.now, **election))

    def do(self, event: Event) -> list[str]:
        self.state, self.raw = step(self.state, event)
        return [show(one) for one in self.raw]

    def join(self, id: str, name: str = "", view: View | None = None) -> list[str]:
        return self.do(Joined(member=member(id, name), now=self.now, view=view))

    def leave(self, id: str) -> list[str]:
        return self.do(Left(id=id, reason="killed by signal 9", now=self.now))

    def hear(self, id: str, epoch: int | None = None) -> list[str]:
        seen = epoch if epoch is not None else self.state.view.epoch if self.state.view else 0
        return self.do(Heard(id=id, now=self.now, epoch=seen))

    def fail(self, shard: int, reporter: str, server: str, epoch: int | None = None) -> list[str]:
        epoch = self.state.view.epoch if epoch is None else epoch
        event = Failed(shard=shard, server=server, reporter=reporter, epoch=epoch, reason="no answer", now=self.now)
        return self.do(event)

    def synced(self, shard: int, server: str, order: int) -> list[str]:
        return self.do(Synced(shard=shard, server=server, order=order))

    def wait(self, seconds: float, heard: Iterable[str] = ()) -> list[str]:
        """Let time go on in ticks of a second, with signs of life of some."""
        done = []
        for _ in range(int(seconds)):
            self.now += 1.0
            for id in heard:
                done += self.hear(id)
            done += self.do(Ticked(now=self.now))
        return done

    @property
    def view(self) -> str:
        return show_view(self.state.view)


def running(servers: str = "a b", workers: str = "w", backups: int = 1) -> Center:
    center = Center(servers=len(servers.split()), backups=backups)
    for id in [*servers.split(), *workers.split()]:
        center.join(id)
    assert center.state.phase == "running"
    return center


def old_view(epoch: int = 7, servers: str = "a b", workers: str = "w", **more: object) -> View:
    chains = more.pop("chains", (Chain(primary="a", backups=("b",)), Chain(primary="b", backups=("a",))))
    return View(
        epoch=epoch,
        servers=tuple(member(id) for id in servers.split()),
        workers=tuple(member(id) for id in workers.split()),
        chains=chains,
        **more,
    )
