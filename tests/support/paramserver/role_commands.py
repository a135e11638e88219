"""Runs whose roles are started by hand, each with a command of its own: on loopback, or in network namespaces."""

import json
import re
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from shoal.comm.wire.keys import make_keys
from support.processes.command import read_events, start_command

PLAN = "ps=2 workers=2 backup=1"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class Role:
    """One command."""

    name: str
    process: subprocess.Popen
    log: Path

    def said(self) -> str:
        """What it said, without the times in front of its lines."""
        return re.sub(r"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} ", "", self.log.read_text(errors="replace"))

    def end(self, seconds: float = 60.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {seconds:g} s:\n{self.said()}") from None


@dataclass
class Roles:
    """The commands of one run.

    Args:
        folder: for the run, keys and what the roles say.
        recipe: the recipe file.
        hosts: the address of the machine that each role is on; loopback where it is not said.
        port: of every center, and the next one of every server; any free ones when left out.
        before: a command that runs each role's process there.
    """

    folder: Path
    recipe: Path
    settings: tuple[str, ...] = ()
    plan: str = PLAN
    num_centers: int = 3
    hosts: dict[str, str] = field(default_factory=dict)
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)
    port: int | None = None
    started: list[Role] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run_dir = self.folder / "run"
        self.keys = self.folder / "key"
        if not self.keys.exists():
            make_keys(self.keys)
        ports = free_ports(self.num_centers) if self.port is None else [self.port] * self.num_centers
        self.seats = [f"tcp://{self.host(f'center-{seat}')}:{port}" for seat, port in enumerate(ports)]

    def host(self, name: str) -> str:
        return self.hosts.get(name, "127.0.0.1")

    def arguments(self, name: str) -> list[str]:
        role, _, index = name.partition("-")
        words = ["role", role, str(self.recipe), "--plan", self.plan, "--centers", ",".join(self.seats)]
        words += ["--keys", str(self.keys)]
        words += [word for setting in self.settings for word in ("--set", setting)]
        if role == "center":
            return [*words, "--listen", self.seats[int(index)], "--run-dir", str(self.run_dir)]
        if role == "worker":
            return [*words, "--index", index]
        port = 0 if self.port is None else self.port + 1
        return [*words, "--index", index, "--listen", f"tcp://{self.host(name)}:{port}", "--run-dir", str(self.run_dir)]

    def start(self, name: str, *more: str, replaced: dict[str, str] | None = None) -> Role:
        """Start a role; ``replaced`` has other values for some of its options."""
        words = [*self.arguments(name), *more]
        for option, value in (replaced or {}).items():
            words[words.index(option) + 1] = value
        log = self.folder / f"{name}-{len(self.started)}.log"
        with log.open("wb") as out:
            options = {"cwd": self.folder, "stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            process = start_command(*words, before=self.before.get(name, ()), **options)
        role = Role(name=name, process=process, log=log)
        self.started.append(role)
        return role

    def start_all(self) -> dict[str, Role]:
        names = [f"center-{seat}" for seat in range(self.num_centers)]
        names += ["server-0", "server-1", "worker-0", "worker-1"]
        return {name: self.start(name) for name in names}

    def leader(self, *, above: int = 0) -> tuple[Role, int] | None:
        """The center that was elected last, and its epoch."""
        led = [
            (int(line.rpartition(" ")[2]), role)
            for role in self.started
            if role.name.startswith("center")
            for line in role.said().splitlines()
            if line.startswith("center of epoch ")
        ]
        epoch, role = max(led, key=lambda one: one[0], default=(0, None))
        return (role, epoch) if role is not None and epoch > above else None

    def step(self) -> int:
        """The last step that any server told of."""
        found = 0
        for path in (self.run_dir / "events").glob("rank-*.jsonl"):
            rank = int(path.stem.partition("-")[2])
            found = max([found, *(event["step"] for event in read_events(self.run_dir, rank, "step"))])
        return found

    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())

    def story(self) -> str:
        """What everybody said, for a test that failed."""
        return "\n".join(f"--- {role.name} ({role.process.poll()})\n{role.said()}" for role in self.started)

    def kill_all(self) -> None:
        for role in self.started:
            if role.process.poll() is None:
                role.process.kill()
            role.process.wait()


def until(roles: Roles, condition, what: str, seconds: float = 60.0):
    """Wait for a condition; its value. Fails with what everybody said."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}\n{roles.story()}"
        time.sleep(0.05)
    return found
