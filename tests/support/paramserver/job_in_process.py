"""A whole job in one process: servers, workers and centers as tasks, over real sockets, with a model of a few numbers.

Fast enough for many interleavings. Messages can be lost, doubled, delayed (and so reordered) and corrupted where they arrive;
members can be killed. What a worker pushes depends on the weights that it pulled, so any wrong or missing update changes the
result.
"""

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import zmq
from torch import nn

from shoal.comm.wire import sockets as sockets_module
from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.updaterule import UpdateRule
from shoal.elastic.election.filelease import FileLease, read_center
from shoal.elastic.membership import Wanted
from shoal.optim.build import decide_groups
from shoal.optim.config import OptimConfig
from shoal.paramserver import contact as contact_module
from shoal.paramserver.center import center as center_module
from shoal.paramserver.center.center import Center
from shoal.paramserver.contact import Contact, Evicted
from shoal.paramserver.log import leader as log_leader
from shoal.paramserver.log.commands import CommandLog
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.messages import FINISHED, OPERATIONS, Dead, Halt, Join
from shoal.paramserver.records import Entry, PushId, PushRecord, Update
from shoal.paramserver.server import follower as following
from shoal.paramserver.server import server as server_module
from shoal.paramserver.server import store as shard_store
from shoal.paramserver.server.server import Server
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.sharding import TensorSpec, cut_model
from shoal.paramserver.worker import client as client_module
from shoal.paramserver.worker.client import Client, RunOver

OPTIM = OptimConfig(name="adamw", lr=0.05)
ATTEMPT_SECONDS = 0.15
DEADLINE_SECONDS = 60.0
"""Of everything; long, because a busy machine must not fail a test."""


def build_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def specs(model: nn.Module) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(one.shape), "float32") for name, one in model.named_parameters()}


# Drawn once: the generator is the process's own, and servers make their shards in threads.
INITIAL = build_model()
MODEL = specs(INITIAL)


def gradient_of(weights: torch.Tensor, step: int, share: int) -> torch.Tensor:
    """What a worker computes: any weights but the right ones give something else."""
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1000 * step + share))
    return 0.3 * weights + noise


def rate(number: int) -> float:
    return 0.05 / (1 + 0.1 * number)


@dataclass
class Faults:
    """How often what happens to a message that arrives; chances add up."""

    seed: int = 0
    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    longest: float = 0.3
    """Seconds of a delay."""
    met: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.random = random.Random(self.seed)


def install_faults(monkeypatch, faults: Faults) -> None:
    """Every socket of this process but the monitors gets its messages through these faults."""
    original = sockets_module.AsyncSocket.__init__

    def build(self, socket, receive):
        is_monitor = socket.getsockopt(zmq.TYPE) == zmq.PAIR
        original(self, socket, receive if is_monitor else lambda frames: strike(self, receive, frames))

    def deliver(async_socket, receive, frames):
        if not async_socket.is_closed:
            receive(frames)

    def strike(async_socket, receive, frames):
        drawn = faults.random.random()
        loop = asyncio.get_running_loop()
        for kind in ("lose", "double", "delay", "corrupt"):
            chance = getattr(faults, kind)
            if drawn < chance:
                faults.met[kind] += 1
                break
            drawn -= chance
        else:
            kind = ""
        match kind:
            case "lose":
                return
            case "double":
                receive(frames)
                loop.call_later(faults.random.uniform(0, faults.longest), deliver, async_socket, receive, frames)
            case "delay":
                loop.call_later(faults.random.uniform(0, faults.longest), deliver, async_socket, receive, frames)
            case "corrupt":
                receive(_damage(frames, faults.random))
            case _:
                receive(frames)

    monkeypatch.setattr(sockets_module.AsyncSocket, "__init__", build)


def _damage(frames, dice):
    texts = [bytearray(frame.bytes) for frame in frames]
    # Not the route, which is the socket's own and never crosses.
    candidates = [
        place for place, text in enumerate(texts) if text and not (place == 0 and len(texts) > 1 and len(text) == 5)
    ]
    chosen = texts[dice.choice(candidates)]
    chosen[dice.randrange(len(chosen))] ^= 1 << dice.randrange(8)
    return [zmq.Frame(bytes(text)) for text in texts]


def quicken(monkeypatch) -> None:
    """Short waits, so that what is lost is missed soon."""
    for module in (log_leader, shard_store, following, server_module, client_module):
        monkeypatch.setattr(module, "PARK_SECONDS", 0.15)
    monkeypatch.setattr(center_module, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(contact_module, "_ANSWER_SECONDS", 0.4)


@dataclass(eq=False)
class Member:
    name: str
    node: Node
    tasks: list[asyncio.Task] = field(default_factory=list)
    server: Server | None = None
    client: Client | None = None
    contact: Contact | None = None
    center: Center | None = None

    async def kill(self):
        """End without a word to anyone."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.contact is not None:
            await self.contact.stop()
        if self.server is not None:
            await self.server.close()
        await self.node.close()


class Job:
    """See the module."""

    def __init__(
        self, folder: Path, *, update: str = "bsp", servers: int = 2, shares: int = 2, steps: int = 10, backups: int = 1
    ) -> None:
        self.folder = folder
        self.update, self.num_servers, self.shares, self.steps, self.backups = update, servers, shares, steps, backups
        self.shard_map = cut_model(MODEL, servers)
        self.members: dict[str, Member] = {}
        self.updates: dict[int, object] = {}
        """By number, as some server applied it; that all apply the same is checked."""
        self.kept: dict[tuple[str, int], tuple[int, ...]] = {}
        """Acknowledged: worker and number of each push, and its work units."""
        self.pushed: dict[tuple[str, int], tuple[int, ...]] = {}
        self.num_duplicates = 0
        self.lines: list[str] = []
        self.dead_seconds = 10.0
        self.model = MODEL
        # torch imports seconds of code with its first optimizer; not while members wait for each other.
        self.make_shard(0)

    # -- starting ----

    def make_node(self) -> Node:
        return Node(instance_id=new_instance_id(), operations=OPERATIONS, arena_dir=self.folder)

    def find(self):
        return read_center(self.folder / "lease")

    async def start(self, *, workers: int = 2, centers: int = 1) -> None:
        for index in range(centers):
            await self.start_center(f"center-{index}")
        for index in range(self.num_servers):
            await self.start_server(f"server-{index}")
        for index in range(workers):
            await self.start_worker(f"worker-{index}")

    async def start_center(self, name: str) -> Member:
        node = self.make_node()
        member = self.members[name] = Member(name, node)
        address = f"ipc://{self.folder}/{name}-{node.instance_id}.sock"
        elector = FileLease(self.folder / "lease", name=name, address=address, lease_seconds=1.0)
        wanted = Wanted(
            servers=self.num_servers,
            backups=self.backups,
            dead_seconds=self.dead_seconds,
            join_seconds=DEADLINE_SECONDS,
        )
        member.center = Center(node, elector, wanted=wanted, tell=self.lines.append)
        await node.listen(address, member.center.handle)

        async def lead():
            try:
                await member.center.run()
            finally:
                await elector.resign()

        member.tasks.append(asyncio.create_task(lead()))
        return member

    async def start_server(self, name: str, *, model: dict[str, TensorSpec] | None = None) -> Member:
        node = self.make_node()
        member = self.members[name] = Member(name, node)
        given = {key: (spec.shape, spec.dtype) for key, spec in (model or self.model).items()}
        address = f"ipc://{self.folder}/{name}-{node.instance_id}.sock"
        member.contact = Contact(
            node,
            find=self.find,
            introduce=lambda view: Join(name=name, role="server", address=address, model=given, view=view),
        )
        member.server = Server(
            node,
            member.contact,
            make_shard=self.make_shard,
            make_log=self.make_log,
            rate=rate,
            on_update=self._on_update,
            deadline_seconds=DEADLINE_SECONDS,
            attempt_seconds=ATTEMPT_SECONDS,
        )
        await node.listen(address, member.server.handle)
        member.contact.start()
        member.tasks.append(asyncio.create_task(self._serve(member)))
        return member

    async def _serve(self, member: Member) -> None:
        assert member.server is not None
        following_task = asyncio.ensure_future(member.server.follow())
        try:
            await asyncio.wait([following_task, member.server.failure], return_when=asyncio.FIRST_COMPLETED)
            if member.server.failure.done():
                member.server.failure.result()
            following_task.result()
        finally:
            following_task.cancel()

    def make_shard(self, number: int) -> ShardState:
        state = ShardState(
            self.shard_map.shards[number], model=MODEL, optim=OPTIM, groups=decide_groups(OPTIM, INITIAL)
        )
        state.load_weights(dict(INITIAL.named_parameters()))
        return state

    def make_log(self) -> CommandLog:
        return CommandLog(UpdateLog(rule=UpdateRule.parse(self.update), workers=self.shares, steps=self.steps))

    async def _on_update(self, server: Server, made, cut) -> None:
        known = self.updates.setdefault(made.number, made)
        assert known == made, f"two servers have another update {made.number}"

    async def start_worker(
        self, name: str, *, model: dict[str, TensorSpec] | None = None, compute=gradient_of
    ) -> Member:
        member = self.members[name] = Member(name, self.make_node())
        member.tasks.append(asyncio.create_task(self._work(member, model or self.model, compute)))
        return member

    async def _work(self, member: Member, model, compute) -> None:
        while True:
            try:
                await self._work_off(member, model, compute)
                return
            except RunOver:
                return
            except Evicted:
                await member.contact.stop()
                await member.node.close()
                member.node = self.make_node()

    async def _work_off(self, member: Member, model, compute) -> None:
        name, node = member.name, member.node
        given = {key: (spec.shape, spec.dtype) for key, spec in model.items()}
        member.contact = contact = Contact(
            node,
            find=self.find,
            introduce=lambda view: Join(name=name, role="worker", address="", model=given, view=view),
            ends_with_history=True,
        )
        contact.start()
        while contact.view is None or contact.view.find(node.instance_id) is None:
            contact.check()
            await contact.changed.wait(0.05)
        sizes = [shard.numel for shard in self.shard_map.shards]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        weights = torch.zeros(sum(sizes))
        member.client = client = Client(
            node,
            contact,
            weights=weights,
            spans=[slice(start, start + size) for start, size in zip(starts, sizes, strict=True)],
            deadline_seconds=DEADLINE_SECONDS,
            attempt_seconds=ATTEMPT_SECONDS,
        )
        while (unit := await client.take()) is not None:
            read = await client.pull(unit.need)
            gradient = compute(weights, unit.step, unit.share)
            number = await client.push(gradient, read=read)
            self.pushed[(node.instance_id, number)] = (unit.number,)
            push = PushRecord(
                worker=node.instance_id,
                number=number,
                units=(unit.number,),
                samples=1,
                weight=1.0,
                loss=float(weights.sum()),
                version=min(read),
            )
            if await client.commit(push):
                self.kept[(node.instance_id, number)] = (unit.number,)
            else:
                self.num_duplicates += 1

    # -- what happens to it ----

    async def kill(self, name: str, *, tell: bool = True) -> None:
        member = self.members.pop(name)
        await member.kill()
        if tell:
            await self.tell_dead(member.node.instance_id)

    async def tell_dead(self, identity: str) -> None:
        await self.tell(Dead(member=identity, reason="killed"))

    async def tell(self, message) -> None:
        """To whoever leads, as the one who starts processes does."""
        node = self.make_node()
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                while True:
                    center = self.find()
                    if center is not None:
                        with contextlib.suppress(Exception):
                            await node.connect(center.address).call(message, deadline=0.3)
                            return
                    await asyncio.sleep(0.01)
        finally:
            await node.close()

    async def until_update(self, number: int) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while number not in self.updates:
                self.check()
                await asyncio.sleep(0.002)

    async def until_level(self) -> int:
        """Wait until every server has applied all updates there are, while nobody works; the version."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len({server.version for server in self.servers()} | {len(self.updates)}) > 1:
                await asyncio.sleep(0.002)
        return len(self.updates)

    def check(self) -> None:
        """Raise what ended a member that should live."""
        for member in list(self.members.values()):
            for task in member.tasks:
                if task.done() and not task.cancelled():
                    task.result()
            if member.contact is not None:
                member.contact.check()

    def servers(self) -> list[Server]:
        return [member.server for member in self.members.values() if member.server is not None]

    def view(self):
        views = [member.contact.view for member in self.members.values() if member.contact and member.contact.view]
        return max(views, key=lambda view: view.epoch)

    def named(self, identity: str) -> str:
        return next(name for name, member in self.members.items() if member.node.instance_id == identity)

    async def finish(self, seconds: float = DEADLINE_SECONDS) -> torch.Tensor:
        """Wait until every server has applied the last update; the weights, which all replicas have alike."""
        async with asyncio.timeout(seconds):
            tasks = [task for member in self.members.values() if member.server for task in member.tasks]
            while not all(task.done() for task in tasks):
                self.check()
                await asyncio.sleep(0.002)
        self.check()
        found: dict[int, torch.Tensor] = {}
        for server in self.servers():
            for shard, replica in server.replicas.items():
                if replica.ready.is_set():
                    weights = found.setdefault(shard, replica.state.weights.clone())
                    assert torch.equal(weights, replica.state.weights), f"replicas of shard {shard} differ"
        assert sorted(found) == list(range(self.num_servers))
        self.check_once()
        return torch.cat([found[shard] for shard in sorted(found)])

    def check_once(self) -> None:
        """Every acknowledged push is in the log exactly once, and every work unit was done exactly once."""
        entries = Counter(entry.identity for made in self.updates.values() for entry in made.entries)
        assert set(entries.values()) <= {1}, "a push is in the log twice"
        lost = [identity for identity in self.kept if identity not in entries]
        assert not lost, f"acknowledged and not in the log: {lost}"
        done = Counter(unit for identity in entries for unit in self.pushed[tuple(identity)])
        assert done == Counter(range(self.steps * self.shares)), "a work unit was done twice or never"
        assert sorted(self.updates) == list(range(len(self.updates)))

    async def end(self) -> None:
        with contextlib.suppress(Exception):
            await self.tell(Halt(reason=FINISHED))
        for name in list(self.members):
            await self.members.pop(name).kill()


@contextlib.asynccontextmanager
async def running_job(folder: Path, **options):
    """A job that is ended, whatever happens."""
    start = {key: options.pop(key) for key in ("workers", "centers") if key in options}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    job = Job(folder, **options)
    try:
        await job.start(**start)
        yield job
    finally:
        await job.end()


def alone(*, steps: int, shares: int) -> torch.Tensor:
    """What bsp must give: one process, one shard, the shares of a step added in their order."""
    states = []
    for shard in cut_model(MODEL, 2).shards:
        state = ShardState(shard, model=MODEL, optim=OPTIM, groups=decide_groups(OPTIM, INITIAL))
        state.load_weights(dict(INITIAL.named_parameters()))
        states.append(state)
    for step in range(steps):
        weights = torch.cat([state.weights for state in states])
        gradients = [gradient_of(weights, step, share) for share in range(shares)]
        start = 0
        for state in states:
            size = state.weights.numel()
            for share, gradient in enumerate(gradients):
                state.store(PushId("w", step * shares + share), gradient[start : start + size].clone(), step)
            entries = tuple(Entry("w", step * shares + share, 1.0) for share in range(shares))
            made = Update(
                number=step,
                entries=entries,
                loss=0.0,
                weight=1.0,
                samples=1,
                first_step=step,
                last_step=step,
                staleness=0,
            )
            state.apply(made, rate(step))
            start += size
    return torch.cat([state.weights for state in states])
