"""A small world with a virtual clock: processes with tasks, and a network that loses, doubles, delays and reorders.

A task is a generator. It yields ``Sleep(seconds)`` or ``Call(...)``, and gets the answer of a call, or None when nobody answered
in time. A killed process's tasks never go on; a paused one's go on, and its messages arrive, when it wakes up.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

Task = Generator[Any, Any, None]


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass(frozen=True)
class Call:
    """Ask another process, and wait for its answer."""

    target: str
    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    timeout: float = 0.6


@dataclass(frozen=True)
class Message:
    kind: str
    sender: str
    epoch: int
    body: dict[str, Any]
    token: int = -1
    """Of the call that it is, or that it answers; -1 for a word that nobody answers."""
    is_answer: bool = False


class World:
    """The clock, the network, and everybody who is there."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.by_id: dict[str, Process] = {}
        self.by_name: dict[str, Process] = {}
        self.loss = 0.0
        self.late = 0.0
        self.cuts: set[frozenset[str]] = set()
        self.num_sent = 0
        self.story: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ids = itertools.count(1)

    def new_id(self, name: str) -> str:
        return f"{name}.{next(self._ids)}"

    def tell(self, line: str) -> None:
        self.story.append(f"{self.now:8.3f} {line}")

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, until: float) -> None:
        """Let time go on until then."""
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until

    def send(self, source: "Process", target: str, message: Message) -> None:
        """Give a message to the network."""
        self.num_sent += 1
        draw = self.random.random
        for _ in range(2 if self.loss and draw() < 0.1 else 1):
            if draw() < self.loss:
                continue
            delay = 0.3 + 3.0 * draw() if draw() < self.late else 0.002 + 0.02 * draw()
            self.after(delay, lambda: self._arrive(source.name, target, message))

    def _arrive(self, source: str, target: str, message: Message) -> None:
        process = self.by_id.get(target)
        if process is None or not process.is_alive or (self.cuts and frozenset((source, process.name)) in self.cuts):
            return
        process.when_awake(lambda: process.receive(message))


class Process:
    """One start of one process. Its id may change: one that was taken for dead comes back as another."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.id = world.new_id(name)
        self.started = world.now
        self.epoch = 0
        self.is_alive = True
        self.paused_until = 0.0
        self._calls: dict[int, Task] = {}
        self._tokens = itertools.count()
        world.by_id[self.id] = self
        world.by_name[name] = self

    def change_id(self) -> None:
        del self.world.by_id[self.id]
        self.id = self.world.new_id(self.name)
        self.started = self.world.now
        self.world.by_id[self.id] = self

    def kill(self) -> None:
        self.is_alive = False
        self.world.by_id.pop(self.id, None)

    def when_awake(self, action: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.world.now < self.paused_until:
            self.world.after(self.paused_until - self.world.now, lambda: self.when_awake(action))
        else:
            action()

    def spawn(self, task: Task) -> None:
        self._resume(task, None)

    def tell(self, target: str, kind: str, **body: Any) -> None:
        """Send a word that nobody answers."""
        self.world.send(self, target, Message(kind, self.id, self.epoch, body))

    def answer(self, message: Message, **body: Any) -> None:
        self.world.send(self, message.sender, Message("answer", self.id, self.epoch, body, message.token, True))

    def receive(self, message: Message) -> None:
        if message.is_answer:
            task = self._calls.pop(message.token, None)
            if task is not None:
                self._resume(task, message)
            return
        getattr(self, f"on_{message.kind}")(message)

    def _resume(self, task: Task, value: Any) -> None:
        try:
            wanted = task.send(value)
        except StopIteration:
            return
        if isinstance(wanted, Sleep):
            self.world.after(wanted.seconds, lambda: self.when_awake(lambda: self._resume(task, None)))
            return
        token = next(self._tokens)
        self._calls[token] = task
        self.world.send(self, wanted.target, Message(wanted.kind, self.id, self.epoch, wanted.body, token))
        self.world.after(wanted.timeout, lambda: self.when_awake(lambda: self._give_up(token)))

    def _give_up(self, token: int) -> None:
        task = self._calls.pop(token, None)
        if task is not None:
            self._resume(task, None)
